"""The masks that are measured: as flexmask has them, and as a hand-written ``mask_mod`` for torch's own functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flexmask import Mask, causal, document, from_dense, h, key_padding, kv, prefix_lm, q, sliding_window
from flexmask.lowering.mask_mod import MaskMod
from flexmask.masks import prefix_tree

__all__ = [
    "DOCUMENT",
    "Workload",
    "causal_work",
    "dilated_work",
    "documents",
    "even_work",
    "heads_work",
    "packed_work",
    "prefix_work",
    "table_work",
    "tree_work",
    "window_work",
    "workloads",
]

DOCUMENT = 512


@dataclass(frozen=True)
class Workload:
    """One mask at one size.

    Attributes:
        name: what the mask is.
        length: queries and keys.
        mask: builds the mask again, as a training step does for its batch.
        mask_mod: the same predicate as torch takes it.
        batch: B, or None where the mask is the same for every sequence.
        heads: H, or None.
    """

    name: str
    length: int
    mask: Callable[[], Mask]
    mask_mod: MaskMod
    batch: int | None = None
    heads: int | None = None


def documents(batch: int, length: int, device: str, mean: int) -> Tensor:
    """Ids of documents of ``mean`` tokens on average with random ends, ``int64[batch, length]``."""
    draw = torch.Generator().manual_seed(length + batch)
    ids = torch.zeros(batch, length, dtype=torch.int64)
    for row in ids:
        row[torch.randperm(length - 1, generator=draw)[: max(1, length // mean) - 1] + 1] = 1
    return ids.cumsum(-1).to(device)


def packed_work(length: int, device: str, batch: int = 1, mean: int = DOCUMENT) -> Workload:
    """Causal attention within packed documents, padded at the end."""
    ids = documents(batch, length, device, mean)
    draw = torch.Generator().manual_seed(0)
    shortest = length // 2 if batch > 1 else length - length // 20
    lengths = torch.randint(shortest, length, (batch,), generator=draw).to(device)

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q >= kv) & (ids[b, q] == ids[b, kv]) & (kv < lengths[b])

    name = "causal & document & key_padding" + (f", batch {batch}" if batch > 1 else "")
    return Workload(name, length, lambda: causal() & document(ids) & key_padding(lengths), mask_mod, batch)


def even_work(length: int, device: str) -> Workload:
    """Causal attention within documents of 512 tokens each."""
    ids = torch.arange(length, device=device) // DOCUMENT

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q >= kv) & (ids[q] == ids[kv])

    return Workload("causal documents of 512", length, lambda: causal() & document(ids), mask_mod)


def causal_work(length: int) -> Workload:
    """``kv <= q``"""
    return Workload("causal", length, causal, lambda b, h, q, kv: q >= kv)


def window_work(length: int) -> Workload:
    """``q - 256 < kv <= q``"""
    return Workload("window of 256", length, lambda: sliding_window(size=256), lambda b, h, q, kv: (q >= kv) & (q - kv < 256))


def prefix_work(length: int, device: str) -> Workload:
    """``(kv < 1000) | (kv <= q)``, of fewer tokens a prefix of half of them."""
    prefix = torch.tensor([min(1000, length // 2)], device=device)
    return Workload("prefix LM", length, lambda: prefix_lm(prefix), lambda b, h, q, kv: (q >= kv) | (kv < prefix[b]), 1)


def _subtree_ends(length: int, samples: int) -> Tensor:
    """The first position behind the subtree of each token, ``int64[length]``, in a random binary tree with a leaf per sample."""
    draw = torch.Generator().manual_seed(length)
    cuts = torch.randperm(length - 1, generator=draw)[: 2 * samples - 2] + 1
    edges = [0, *cuts.sort().values.tolist(), length]  # of the segments, in depth-first order
    ends = torch.empty(length, dtype=torch.int64)

    def behind(segment: int, leaves: int) -> int:
        """The first segment behind the subtree of one."""
        after = segment + 1
        if leaves > 1:
            left = int(torch.randint(1, leaves, (), generator=draw))
            after = behind(behind(after, left), leaves - left)
        ends[edges[segment] : edges[segment + 1]] = edges[after]
        return after

    behind(0, samples)
    return ends


def tree_work(length: int, device: str, samples: int = 256) -> Workload:
    """Samples that share prefixes, in a tree that branches at random."""
    ends = _subtree_ends(length, samples).to(device)
    return Workload(
        f"tree of {samples} samples",
        length,
        lambda: prefix_tree(ends.clone()),
        lambda b, h, q, kv: (kv <= q) & (q < ends[kv]),
    )


def heads_work(length: int, n_heads: int) -> Workload:
    """``(kv <= q) & (q - kv < 64 * (h + 1))``"""
    return Workload(
        f"a window for each of {n_heads} heads",
        length,
        lambda: causal() & (q - kv < 64 * (h + 1)),
        lambda b, h, q, kv: (q >= kv) & (q - kv < 64 * (h + 1)),
        heads=n_heads,
    )


def dilated_work(length: int) -> Workload:
    """``(abs(q - kv) <= 256) & ((q - kv) % 4 == 0)``"""
    return Workload(
        "dilated window (does not separate)",
        length,
        lambda: (abs(q - kv) <= 256) & ((q - kv) % 4 == 0),
        lambda b, h, q, kv: ((q - kv).abs() <= 256) & ((q - kv) % 4 == 0),
    )


def table_work(length: int, device: str) -> Workload:
    """``(q - 256 < kv <= q) & cells[q, kv]`` with random cells"""
    cells = torch.rand(length, length, generator=torch.Generator().manual_seed(0)).to(device) < 0.5
    return Workload(
        "window of 256 & dense table (does not separate)",
        length,
        lambda: sliding_window(size=256) & from_dense(cells),
        lambda b, h, q, kv: (q >= kv) & (q - kv < 256) & cells[q, kv],
    )


def workloads(device: str, *, quick: bool) -> list[Workload]:
    """All that is measured of BlockMasks, the packed documents first."""
    k = 1024
    sweep = [256, 2 * k, 8 * k] if quick else [256, 2 * k, 8 * k, 32 * k, 128 * k, 256 * k, k * k]
    found = [packed_work(length, device) for length in sweep]
    if quick:
        return [*found, window_work(8 * k), packed_work(2 * k, device, batch=4)]
    found += [causal_work(length) for length in (8 * k, 32 * k, 128 * k, k * k)]
    found += [window_work(length) for length in (32 * k, 128 * k, k * k)]
    found += [prefix_work(length, device) for length in (32 * k, 128 * k)]
    found += [tree_work(32 * k, device), packed_work(8 * k, device, batch=16), heads_work(8 * k, 16)]
    return [*found, dilated_work(8 * k), dilated_work(32 * k), table_work(8 * k, device)]
