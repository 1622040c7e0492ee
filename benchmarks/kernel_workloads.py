"""The masks whose kernels are measured on a GPU, each as a user would write it by hand too."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from benchmarks.workloads import DOCUMENT, Workload, causal_work, documents, even_work, window_work
from flexmask import Mask, b, causal, document, key_padding, kv, per_head, prefix_lm, q, query_padding, sliding_window, table
from flexmask.lowering.mask_mod import MaskMod
from flexmask.masks import (
    bidirectional_spans,
    block_causal,
    block_diffusion,
    chunk_window,
    chunked,
    cross_document,
    cross_length,
    draft_anchors,
    draft_blocks,
    eviction,
    image_cross,
    in_context,
    multi_item,
    neighborhood,
    qk_sparse,
    reorder,
    shared_prefix,
    sink_window,
    svg_spatial,
    transpose,
)

__all__ = ["counted_workloads", "further_kernel_workloads", "kernel_workloads"]


def kernel_workloads(length: int, device: str) -> list[Workload]:
    """One sequence, of the masks that most models train with."""
    ids, kept = documents(1, length, device, DOCUMENT), _kept(length, device)
    ragged = document(cu_seqlens=_cumulative(ids))
    ends = torch.tensor([*range(0, length, DOCUMENT), length], device=device)
    return [
        causal_work(length),
        replace(even_work(length, device), mask=lambda: causal() & document(cu_seqlens=ends)),
        Workload(
            "causal & ragged documents",
            length,
            lambda: causal() & ragged,
            lambda b, h, q, kv: (q >= kv) & (ids[b, q] == ids[b, kv]),
            1,
        ),
        Workload("ragged documents", length, lambda: ragged, lambda b, h, q, kv: ids[b, q] == ids[b, kv], 1),
        window_work(length),
        Workload("key padding", length, lambda: key_padding(kept), lambda b, h, q, kv: kv < kept[b], 1),
        Workload(
            "sinks and a window of 256",
            length,
            lambda: sink_window(sinks=4, size=256),
            lambda b, h, q, kv: (q >= kv) & ((q - kv < 256) | (kv < 4)),
        ),
        Workload(
            "causal chunks of 1,000",
            length,
            lambda: causal() & chunked(1000),
            lambda b, h, q, kv: (q >= kv) & (q // 1000 == kv // 1000),
        ),
    ]


def further_kernel_workloads(length: int, device: str) -> list[Workload]:
    """One sequence, of named masks whose key intervals have other forms."""
    ids, kept, half = documents(1, length, device, DOCUMENT), _kept(length, device), length // 2
    key_ids = ids.max() - ids.flip(1)
    spans = torch.where(ids % 2 == 1, ids, -1)
    positions = torch.arange(length - half, device=device) % 100
    prefix_of = torch.zeros(int(ids.max()) + 1, dtype=torch.int64, device=device)
    cu_seqlens, key_cu_seqlens = _cumulative(ids), _cumulative(key_ids)
    start = torch.tensor([half], device=device)

    def after_prefix(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        own, prefix = ids[b, q], prefix_of[ids[b, q]]
        return ((own == ids[b, kv]) & (kv <= q)) | ((prefix == ids[b, kv]) & (prefix != own))

    def diffused(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        own, other = q % half // 32, kv % half // 32
        noised = (q < half) & (((kv < half) & (own == other)) | ((kv >= half) & (other < own)))
        return noised | ((q >= half) & (kv >= half) & (other <= own))

    def around(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        first = (q - 128).clamp(0, length - 257)
        return (kv >= first) & (kv < first + 257)

    found: dict[str, tuple[Mask, MaskMod]] = {
        "causal & key padding": (causal() & key_padding(kept), lambda b, h, q, kv: (q >= kv) & (kv < kept[b])),
        "prefix LM": (prefix_lm(start), lambda b, h, q, kv: (q >= kv) | (kv < start[b])),
        "window of 256 & ragged documents": (
            sliding_window(size=256) & document(cu_seqlens=cu_seqlens),
            lambda b, h, q, kv: (q >= kv) & (q - kv < 256) & (ids[b, q] == ids[b, kv]),
        ),
        "128 keys to both sides": (sliding_window(left=128, right=128), lambda b, h, q, kv: (q - kv).abs() <= 128),
        "block_causal of 1,000": (block_causal(1000), lambda b, h, q, kv: kv // 1000 <= q // 1000),
        "bidirectional_spans": (
            bidirectional_spans(spans),
            lambda b, h, q, kv: (q >= kv) | ((spans[b, q] == spans[b, kv]) & (spans[b, q] >= 0)),
        ),
        "in_context": (
            in_context(cu_seqlens=cu_seqlens, test_start=start),
            lambda b, h, q, kv: (q >= kv) & ((ids[b, q] == ids[b, kv]) | (q >= start[b])),
        ),
        "cross_document": (
            cross_document(q_cu_seqlens=cu_seqlens, kv_cu_seqlens=key_cu_seqlens),
            lambda b, h, q, kv: ids[b, q] == key_ids[b, kv],
        ),
        "query_padding": (query_padding(kept), lambda b, h, q, kv: q < kept[b]),
        "neighborhood of 257": (neighborhood(canvas=[length], kernel=[257]), around),
        "multi_item": (
            multi_item(half, positions),
            lambda b, h, q, kv: (q >= kv) & ((kv < half) | (kv > q - positions[(q - half).clamp(min=0)])),
        ),
        "shared_prefix": (shared_prefix(cu_seqlens=cu_seqlens, prefix_of=prefix_of), after_prefix),
        "block_diffusion of 32": (block_diffusion(half, 32), diffused),
    }
    return _works(length, found)


def counted_workloads(length: int, device: str) -> list[Workload]:
    """One sequence, of the other named masks of one or two key intervals, whose kernels are counted but not measured."""
    ids, kept = documents(1, length, device, DOCUMENT), _kept(length, device)
    pad, prefix, size = length - kept, kept // 2, 100
    steps = (torch.arange(length, device=device) + 300)[None, None]
    first = _cumulative(ids)[:-1] + 20
    anchors = torch.arange(0, length, size, device=device)
    starts, lengths = torch.tensor([[300]], device=device), torch.tensor([[50]], device=device)
    images = torch.arange(0, length, size, device=device)
    spans = torch.stack((images, images + 2 * size), 1)[None]
    flipped = torch.arange(length, device=device).flip(0)

    def in_blocks(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        place = kv - prefix[b]
        return (kv < prefix[b]) | ((place // size == q // size) & (place <= q))

    def from_anchor(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        anchor, place = anchors[q // size], kv - length // 2
        return (anchor >= 0) & (((kv < length // 2) & (kv < anchor)) | (place // size == q // size))

    def in_spans(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        image = kv // size
        return (q >= spans[b, image, 0]) & (q < spans[b, image, 1])

    def not_in_range(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        end = starts[b, 0] + lengths[b, 0]
        return (q >= kv) & ((kv < starts[b, 0]) | (kv >= end) | (q >= end))

    found: dict[str, tuple[Mask, MaskMod]] = {
        "chunks of 100": (chunked(size), lambda b, h, q, kv: q // size == kv // size),
        "chunk_window of 100": (
            chunk_window(size, left=1),
            lambda b, h, q, kv: (kv // size <= q // size) & (kv // size >= q // size - 1),
        ),
        "causal & padding on the left": (causal() & key_padding(start=pad), lambda b, h, q, kv: (q >= kv) & (kv >= pad[b])),
        "cross_length": (
            cross_length(kv_lengths=kept, q_lengths=prefix),
            lambda b, h, q, kv: (kv < kept[b]) & (q < prefix[b]),
        ),
        "a prefix in each document": (
            document(ids) & (causal() | (kv < table(first)[table(ids)[b, q]])),
            lambda b, h, q, kv: (ids[b, q] == ids[b, kv]) & ((q >= kv) | (kv < first[ids[b, q]])),
        ),
        "draft_blocks": (draft_blocks(prefix, size), in_blocks),
        "draft_anchors": (draft_anchors(anchors, size, context=length // 2), from_anchor),
        "causal & eviction": (causal() & eviction(steps), lambda b, h, q, kv: (q >= kv) & (q < steps[0, 0, kv])),
        "image_cross": (image_cross(spans, size), in_spans),
        "causal & qk_sparse": (causal() & qk_sparse(starts, lengths), not_in_range),
        "svg_spatial": (
            svg_spatial(size, width=1.0, prompt=30),
            lambda b, h, q, kv: ((q - kv).abs() < size) | (q < 30) | (kv < 30),
        ),
        "causal, reorder(q=)": (reorder(causal(), q=flipped), lambda b, h, q, kv: flipped[q] >= kv),
        "transpose of causal": (transpose(causal()), lambda b, h, q, kv: kv >= q),
    }
    window = sliding_window(left=50, right=0)
    of_heads = Workload(
        "per_head of causal and a window",
        length,
        lambda: per_head([causal(), window]),
        lambda b, h, q, kv: torch.where(h == 0, q >= kv, (q >= kv) & (q - kv <= 50)),
        heads=2,
    )
    return [*_works(length, found), of_heads]


def _works(length: int, found: dict[str, tuple[Mask, MaskMod]]) -> list[Workload]:
    """Workloads of masks that are built once, each next to its function by hand."""
    return [Workload(name, length, partial(copy, mask), by_hand, 1) for name, (mask, by_hand) in found.items()]


def _kept(length: int, device: str) -> Tensor:
    """The real tokens of one sequence, three quarters of all."""
    return torch.tensor([length - length // 4], device=device)


def _cumulative(ids: Tensor) -> Tensor:
    """The cumulative lengths of runs of equal ids, which start with 0."""
    return torch.nn.functional.pad(ids.unique_consecutive(return_counts=True)[1].cumsum(0), (1, 0))
