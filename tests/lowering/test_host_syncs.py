"""Which masks force a host sync on a GPU and at which sizes: derived here, and compared with ``docs/host_syncs.md``."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import cache, reduce
from operator import or_
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import flexmask as fm
from flexmask import Mask, _sync
from tests.support.examples import EXAMPLES

#: Operators whose results have a size, or are a number, that only the device knows.
READING = {"_local_scalar_dense", "_unique2", "bincount", "equal", "masked_select", "nonzero", "unique_consecutive", "unique_dim"}
INDEXING = {"_index_put_impl_", "index", "index_put", "index_put_"}


class HostSyncError(Exception):
    """An operator that would make the host stop for a GPU."""


class Watch(TorchDispatchMode):
    """Counts the operators that read from the device, and those that copy to it; on ``meta``, which has nothing to read, the
    first of them raises a HostSyncError."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reads, self.copies = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        reads = name in READING or (name == "repeat_interleave" and kwargs.get("output_size") is None)
        if name in INDEXING:
            reads = any(index is not None and index.dtype == torch.bool for index in args[1])
        if reads:
            self.reads += 1
            if any(isinstance(arg, Tensor) and arg.device.type == "meta" for arg in args):
                raise HostSyncError(name)
        if name == "_to_copy" and args[0].device.type == "cpu" and torch.device(kwargs.get("device") or "cpu").type != "cpu":
            self.copies += 1
        return func(*args, **kwargs)


def numbers(device: str, *sizes: int) -> Tensor:
    return torch.zeros(sizes, dtype=torch.long, device=device)


def truths(device: str, *sizes: int) -> Tensor:
    return torch.ones(sizes, dtype=torch.bool, device=device)


#: Each named mask with its sources of data, under the name that the documentation has for it, at a length on a device.
MASKS: dict[str, Callable[[int, str], Mask]] = {
    "bidirectional_spans": lambda n, at: fm.masks.bidirectional_spans(numbers(at, n)),
    "bigbird": lambda n, at: fm.masks.bigbird(8, n // 8),
    "block_causal": lambda n, at: fm.masks.block_causal(64),
    "block_diffusion": lambda n, at: fm.masks.block_diffusion(n // 2, 32),
    "block_diffusion(ids=)": lambda n, at: fm.masks.block_diffusion(n // 2, 32, numbers(at, n // 2)),
    "block_diffusion(lengths=)": lambda n, at: fm.masks.block_diffusion(n // 2, 32, lengths=numbers(at, 9), padding=True),
    "causal": lambda n, at: fm.causal(),
    "chunk_window": lambda n, at: fm.masks.chunk_window(64, left=2),
    "chunked": lambda n, at: fm.masks.chunked(64, start=numbers(at, 2)),
    "coarse": lambda n, at: fm.masks.coarse(fm.causal(), 4),
    "cross_document(q_cu_seqlens=)": lambda n, at: fm.masks.cross_document(
        fm.causal(), q_cu_seqlens=numbers(at, 9), kv_cu_seqlens=numbers(at, 9), align="lower_right", padding=True
    ),
    "cross_document(q_lengths=)": lambda n, at: fm.masks.cross_document(
        fm.causal(), q_lengths=numbers(at, 9), kv_lengths=numbers(at, 9), align="lower_right", padding=True
    ),
    "cross_length": lambda n, at: fm.cross_length(numbers(at, 2), q_lengths=numbers(at, 2)),
    "from_dense": lambda n, at: fm.from_dense(truths(at, n, n)),
    "dilated_window": lambda n, at: fm.masks.dilated_window(left=256, right=0, dilation=4),
    "document(cu_seqlens=)": lambda n, at: fm.document(cu_seqlens=numbers(at, 9), padding=True),
    "document(ids)": lambda n, at: fm.document(numbers(at, n)),
    "document(lengths=)": lambda n, at: fm.document(lengths=numbers(at, 9), padding=True),
    "document(position_ids=)": lambda n, at: fm.document(position_ids=numbers(at, n)),
    "draft_anchors": lambda n, at: fm.masks.draft_anchors(numbers(at, n // 16), 16, context=100),
    "draft_blocks": lambda n, at: fm.masks.draft_blocks(numbers(at, 2), 16),
    "empty": lambda n, at: fm.empty(),
    "eviction": lambda n, at: fm.masks.eviction(numbers(at, n)),
    "full": lambda n, at: fm.full(),
    "global_window": lambda n, at: fm.masks.global_window(truths(at, n), left=64, right=64),
    "image_cross": lambda n, at: fm.masks.image_cross(numbers(at, n // 64, 2), 64),
    "in_context": lambda n, at: fm.masks.in_context(lengths=numbers(at, 9), test_start=numbers(at, 2), padding=True),
    "in_context(ids=)": lambda n, at: fm.masks.in_context(numbers(at, n), test_start=numbers(at, 2)),
    "key_padding(keep=)": lambda n, at: fm.key_padding(keep=truths(at, 2, n)),
    "key_padding(lengths)": lambda n, at: fm.key_padding(numbers(at, 2)),
    "key_padding(start=)": lambda n, at: fm.key_padding(start=numbers(at, 2)),
    "multi_item": lambda n, at: fm.masks.multi_item(16, numbers(at, n - 16)),
    "named": lambda n, at: fm.causal().named("past"),
    "neighborhood": lambda n, at: fm.masks.neighborhood([n // 32, 32], [7, 7]),
    "paged": lambda n, at: fm.masks.paged(fm.causal(), numbers(at, n // 16), page_size=16),
    "per_chunk": lambda n, at: fm.masks.per_chunk(fm.causal(), 64),
    "per_document(ids)": lambda n, at: fm.per_document(fm.causal(), numbers(at, n)),
    "per_document(lengths=)": lambda n, at: fm.per_document(fm.causal(), lengths=numbers(at, 9), padding=True),
    "per_head": lambda n, at: fm.per_head([fm.causal(), fm.sliding_window(size=9)]),
    "prefix_lm": lambda n, at: fm.prefix_lm(numbers(at, 2)),
    "prefix_tree(end)": lambda n, at: fm.masks.prefix_tree(numbers(at, n)),
    "prefix_tree(order=)": lambda n, at: fm.masks.prefix_tree(numbers(at, n), order=numbers(at, n)),
    "prefix_tree(position_ids=)": lambda n, at: fm.masks.prefix_tree(position_ids=numbers(at, n)),
    "qk_sparse": lambda n, at: fm.masks.qk_sparse(numbers(at, 2), numbers(at, 2)),
    "query_padding(keep=)": lambda n, at: fm.query_padding(keep=truths(at, 2, n)),
    "query_padding(lengths)": lambda n, at: fm.query_padding(numbers(at, 2)),
    "query_padding(start=)": lambda n, at: fm.query_padding(start=numbers(at, 2)),
    "random_cells": lambda n, at: fm.masks.random_cells(0.5),
    "reorder(kv=)": lambda n, at: fm.masks.reorder(fm.causal(), kv=numbers(at, n)),
    "reorder(q=)": lambda n, at: fm.masks.reorder(fm.causal(), q=numbers(at, n)),
    "shifted_window": lambda n, at: fm.masks.shifted_window([n // 32, 32], [8, 8], [4, 4]),
    "shared_prefix(ids)": lambda n, at: fm.masks.shared_prefix(numbers(at, n), prefix_of=numbers(at, 9)),
    "shared_prefix(lengths=)": lambda n, at: fm.masks.shared_prefix(
        lengths=numbers(at, 9), prefix_of=numbers(at, 9), padding=True
    ),
    "shift": lambda n, at: fm.masks.shift(fm.causal(), q=3, kv=1),
    "sink_window": lambda n, at: fm.masks.sink_window(4, size=256),
    "sliding_tile": lambda n, at: fm.masks.sliding_tile([n // 32, 32], [12, 12], [4, 4]),
    "sliding_window": lambda n, at: fm.sliding_window(size=256),
    "svg_spatial": lambda n, at: fm.masks.svg_spatial(64, width=2),
    "svg_temporal": lambda n, at: fm.masks.svg_temporal(n // 8, frames=8, width=1),
    "tile_topk": lambda n, at: fm.masks.tile_topk(numbers(at, n // 64, 4), 64),
    "training_time_test": lambda n, at: fm.masks.training_time_test(n // 4, 3),
    "transpose": lambda n, at: fm.masks.transpose(fm.causal()),
    "tree": lambda n, at: fm.masks.tree(truths(at, n, n)),
}

#: Lengths within all limits, beyond 2**22 cells, and beyond 2**22 blocks.
SHORT, LONG, LONGEST = 2**10, 2**13, 2**19
TABLE = Path(__file__).parents[2] / "docs" / "host_syncs.md"
#: The first words of each row of the table.
KINDS = {
    "none": "none",
    "first": "first lowering of a tensor",
    "each": "each lowering, to count",
    "cells": "each lowering beyond 2**22 cells",
}


def has_sync(mask: Mask, length: int, **options: Any) -> bool:
    """Whether a lowering reads from a device, tested on one that cannot be read."""
    try:
        with Watch():
            mask.block_mask(length, device="meta", **options)
    except HostSyncError:
        return True
    return False


def reads(mask: Mask, length: int) -> int:
    """How often a lowering reads from a device, with the CPU in place of the device."""
    watch = Watch()
    with watch, pytest.MonkeyPatch.context() as patch:
        patch.setattr(_sync, "needs_sync", lambda tensor: True)
        mask.block_mask(length)
    return watch.reads


def kind_of(build: Callable[[int, str], Mask]) -> str:
    if not has_sync(build(SHORT, "meta"), SHORT):
        return "cells" if has_sync(build(LONG, "meta"), LONG) else "none"
    mask = build(SHORT, "cpu")
    assert reads(mask, SHORT) > 0
    return "each" if reads(mask, SHORT) else "first"


@cache
def documented() -> dict[str, str]:
    """The kind of each mask that the table names."""
    rows = [line.split("|")[1:3] for line in TABLE.read_text().splitlines() if line.startswith("| ")][1:]
    assert [row.strip().startswith(start) for (row, _), start in zip(rows, KINDS.values(), strict=True)] == [True] * len(KINDS)
    named = [(name, kind) for (_, cell), kind in zip(rows, KINDS, strict=True) for name in re.findall(r"`([^`]+)`", cell)]
    assert len(dict(named)) == len(named), "a mask is named twice"
    return dict(named)


def test_help_has_the_classes_and_names_the_table() -> None:
    text = " ".join((inspect.getdoc(Mask.block_mask) or "").split())
    for words in ("docs/host_syncs.md", "* None for", "* At the first lowering", "key alone", "2**22 cells", "2**22 blocks"):
        assert words in text
    assert TABLE.is_file()


def test_documented_masks_are_tested() -> None:
    assert set(documented()) <= set(MASKS)
    assert {name.partition("(")[0] for name in MASKS} <= set(EXAMPLES)


def on_meta(value: Any) -> Any:
    """Lists of data as tensors of a device that cannot be read."""
    return torch.tensor(value, device="meta") if isinstance(value, list) and not isinstance(value[0], Mask) else value


@pytest.mark.parametrize("name", sorted(set(EXAMPLES) - {name.partition("(")[0] for name in documented()}))
def test_masks_that_are_not_documented_have_none(name: str) -> None:
    """Where this fails, the mask needs its name in docs/host_syncs.md, and then a line in MASKS."""
    for arguments, _ in EXAMPLES[name]:
        assert not has_sync(getattr(fm.masks, name)(**{key: on_meta(value) for key, value in arguments.items()}), 4)


@pytest.mark.parametrize("name", MASKS)
def test_host_syncs_are_those_that_are_documented(name: str) -> None:
    assert documented().get(name, "none") == kind_of(MASKS[name])


@pytest.mark.parametrize(
    "name", [name for name in MASKS if name not in {"from_dense", "tree"}]
)  # whose data is as large as the mask
def test_beyond_the_limit_of_blocks_every_mask_has_one(name: str) -> None:
    assert has_sync(MASKS[name](LONGEST, "meta"), LONGEST)


def test_the_limit_of_blocks() -> None:
    assert not has_sync(fm.causal(), 262_144)
    assert has_sync(fm.causal(), 262_145)
    assert has_sync(fm.causal(), 131_072 + 1, heads=1, batch=4)
    assert not has_sync(fm.causal(), 131_072, batch=4)


def test_the_limit_of_cells() -> None:
    cells = (fm.q * fm.kv) % 3 == 0
    assert not has_sync(cells, 2048)
    assert has_sync(cells, 2049)
    assert has_sync(cells & fm.key_padding(numbers("meta", 2)), 2048)  # once for each sequence
    assert not has_sync(cells, 8, block_size=2**10)


COMPOSED: dict[str, tuple[Mask, bool]] = {
    "spans": (fm.causal() & fm.sliding_window(size=9) | (fm.kv < 4), False),
    "documents and padding": (
        fm.causal() & fm.document(lengths=numbers("meta", 9), padding=True) & fm.key_padding(numbers("meta", 2)),
        False,
    ),
    "all but": (~fm.document(lengths=numbers("meta", 9), padding=True) ^ fm.sliding_window(left=3, right=3), False),
    "by condition": (fm.where(fm.q % 2 == 0, fm.causal(), fm.prefix_lm(numbers("meta", 2))), False),
    "a condition on the query": (fm.q % 3 == 0, False),
    "eight keys": (reduce(or_, (fm.kv == 9 * i for i in range(8))), False),
    "nine keys": (reduce(or_, (fm.kv == 9 * i for i in range(9))), True),
    "a condition on the key": (fm.causal() & (fm.kv % 4 == 0), True),
    "one part of many": (fm.causal() & fm.sliding_window(size=9) & fm.document(numbers("meta", SHORT)), True),
}


@pytest.mark.parametrize("name", COMPOSED)
def test_composed_masks_have_the_host_syncs_of_their_parts(name: str) -> None:
    mask, expected = COMPOSED[name]
    assert has_sync(mask, SHORT) == expected


def test_lists_are_copied_once() -> None:
    mask = fm.causal() & fm.document(lengths=[SHORT // 2, SHORT // 2])
    copies = []
    for _ in range(2):
        with Watch() as watch:
            mask.block_mask(SHORT, device="meta")
        copies.append(watch.copies)
    assert copies == [1, 0]


@pytest.mark.parametrize("name", ["document(ids)", "bidirectional_spans", "shared_prefix(ids)"])
def test_changed_ids_are_counted_again(name: str) -> None:
    ids = torch.zeros(SHORT, dtype=torch.long)
    builds: dict[str, Callable[[Tensor], Mask]] = {
        "document(ids)": fm.document,
        "bidirectional_spans": fm.masks.bidirectional_spans,
        "shared_prefix(ids)": lambda ids: fm.masks.shared_prefix(ids, prefix_of=[0, 1]),
    }
    mask = builds[name](ids)
    assert reads(mask, SHORT) > 0
    assert reads(mask, SHORT) == 0
    ids[SHORT // 2 :] = 1
    assert reads(mask, SHORT) > 0


def test_a_decoding_step_at_positions_that_only_the_device_knows() -> None:
    offset = torch.tensor([700, 800], device="meta")
    for name, build in MASKS.items():
        if name not in documented():
            mask = build(SHORT, "meta")
            assert not has_sync(mask, 1, kv_len=SHORT, q_offset=offset), name


def test_steps_between_whole_sequences_count_no_ids_again() -> None:
    mask, offset = fm.document(torch.arange(SHORT) // 300), torch.tensor([3, 5])
    watch = Watch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_sync, "needs_sync", lambda tensor: True)
        mask.block_mask(SHORT), mask.block_mask(1, SHORT, q_offset=offset)
        with watch:
            mask.block_mask(SHORT), mask.block_mask(1, SHORT, q_offset=offset)
    assert watch.reads == 0


def test_the_watch_can_fail() -> None:
    with Watch() as watch:
        assert torch.tensor([1, 0]).nonzero().numel()
        assert bool(torch.ones(()))
        assert torch.arange(3)[torch.tensor([True, False, True])].numel() == 2
    assert watch.reads == 3
    with pytest.raises(HostSyncError, match="nonzero"), Watch():
        torch.ones(3, device="meta").nonzero()


def test_a_message_of_another_device_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA takes at most 254 bytes: with a longer message each assertion fails, also one that holds."""
    said: list[str] = []
    monkeypatch.setattr(torch, "_assert_async", lambda holds, message: said.append(message))
    for device in ("cpu", "meta"):
        for message in ("x" * 254, "x" * 255, "é" * 200):
            _sync.assert_async(torch.ones(2, device=device), message)
    assert said[:3] == ["x" * 254, "x" * 255, "é" * 200]
    assert said[3:] == ["x" * 254, "x" * 251 + "...", "é" * 125 + "..."]


def test_one_function_asserts_on_devices() -> None:
    root = Path(__file__).parents[2]
    paths = [path for folder in ("flexmask", "plugins") for path in (root / folder).rglob("*.py") if "build" not in path.parts]
    assert [path.name for path in paths if "_assert_async" in path.read_text()] == ["_sync.py"]
