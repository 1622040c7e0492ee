"""Checks of what a mask lowers to, against the oracle's cells."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode

import flexmask as fm
from flexmask.errors import LoweringError
from tests.support import oracle
from tests.support.strategies import Case, Shape

MOST_INTERVALS = 8  # of the interval form of a mask_mod


def assert_canonical(rows: fm.intervals.Rows, shape: Shape) -> None:
    """Each row lists its maximal runs in order; unused slots are (kv_len, kv_len) and stand last."""
    assert rows.bounds.dtype == torch.int32
    assert rows.bounds.shape[-1] == 2
    assert rows.kv_len == shape.kv_len
    for size, wanted in zip(rows.bounds.shape, (shape.batch, shape.heads, shape.q_len), strict=False):
        assert size in {1, wanted}
    slots = rows.bounds.shape[3]
    for intervals, cells in zip(rows.bounds.flatten(0, 2).tolist(), own_cells_of(rows).flatten(0, 2).tolist(), strict=True):
        used = [list(pair) for pair in oracle.intervals_of(cells)]
        assert intervals == used + [[shape.kv_len] * 2] * (slots - len(used))


def own_cells_of(rows: fm.intervals.Rows) -> torch.Tensor:
    """The keys that rows show, with 1 for each axis that they do not depend on."""
    keys = torch.arange(rows.kv_len)
    low, high = rows.bounds[..., 0, None], rows.bounds[..., 1, None]
    return ((keys >= low) & (keys < high)).any(dim=-2)


def cells_of(rows: fm.intervals.Rows, shape: Shape) -> torch.Tensor:
    """The element mask that rows describe, bool [batch, heads, q_len, kv_len]."""
    return own_cells_of(rows).expand(shape.batch, shape.heads, shape.q_len, shape.kv_len)


def check_rows(case: Case, shape: Shape, expected: torch.Tensor) -> None:
    found = case.mask.rows(**shape.lowering)
    lower, upper = cells_of(found.lower, shape), cells_of(found.upper, shape)
    assert_canonical(found.lower, shape)
    assert_canonical(found.upper, shape)
    assert not (lower & ~expected).any(), "the lower bound shows a key that is hidden"
    assert not (expected & ~upper).any(), "the upper bound hides a key that is visible"
    assert not found.exact or torch.equal(lower, upper)
    assert torch.equal(found.lower.counts().expand(lower.shape[:3]), lower.sum(dim=-1))


def grid(shape: Shape) -> tuple[torch.Tensor, ...]:
    """Index tensors that broadcast to every cell."""
    sizes = (shape.batch, shape.heads, shape.q_len, shape.kv_len)
    return tuple(torch.arange(n).view([-1 if axis == i else 1 for i in range(4)]) for axis, n in enumerate(sizes))


def has_intervals(case: Case, shape: Shape) -> bool:
    """Whether the mask has the interval form of a mask_mod."""
    found = case.mask.rows(**shape.lowering)
    return found.exact and found.lower.bounds.shape[-2] <= MOST_INTERVALS


def check_mask_mod(case: Case, shape: Shape, expected: torch.Tensor) -> None:
    for form in ("auto", "interval", "expression"):
        if form == "interval" and not has_intervals(case, shape):
            with pytest.raises(LoweringError, match="interval"):
                case.mask.mask_mod(**shape.lowering, form=form)
            continue
        mask_mod = case.mask.mask_mod(**shape.lowering, form=form)
        answer = mask_mod(*grid(shape))
        assert answer.dtype == torch.bool
        assert torch.equal(answer.expand_as(expected), expected), form


def blocks_of(block_mask: BlockMask, kind: str, shape: Shape) -> Iterator[list[int]]:
    """The defined part of one list of a BlockMask, sorted, for each batch element, head and block row."""
    counts, indices = getattr(block_mask, f"{kind}_num_blocks"), getattr(block_mask, f"{kind}_indices")
    assert counts.dtype == indices.dtype == torch.int32
    counts = counts.expand(shape.batch, shape.heads, -1)
    indices = indices.expand(shape.batch, shape.heads, -1, -1)
    for row, count in zip(indices.flatten(0, 2).tolist(), counts.flatten().tolist(), strict=True):
        yield sorted(row[:count])


def element_mask(block_mask: BlockMask, shape: Shape) -> torch.Tensor:
    """The element mask as a kernel reads it: all of a full block, and of a partial one what mask_mod says."""
    q_block, kv_block = block_mask.BLOCK_SIZE
    q_blocks = -(-shape.q_len // q_block)
    seen = block_mask.mask_mod(*grid(shape)).expand(shape.batch, shape.heads, shape.q_len, shape.kv_len)
    cells = torch.zeros_like(seen)
    for kind in ("kv", "full_kv"):
        for place, columns in enumerate(blocks_of(block_mask, kind, shape)):
            b, h, row = place // q_blocks // shape.heads, place // q_blocks % shape.heads, place % q_blocks
            rows = slice(row * q_block, (row + 1) * q_block)
            for column in columns:
                keys = slice(column * kv_block, (column + 1) * kv_block)
                cells[b, h, rows, keys] = True if kind == "full_kv" else seen[b, h, rows, keys]
    return cells


def check_block_mask(case: Case, shape: Shape, expected: torch.Tensor, block_size: int | tuple[int, int]) -> None:
    found = case.mask.block_mask(**shape.lowering, block_size=block_size)
    wanted = create_block_mask(
        lambda b, h, q_idx, kv_idx: expected[b, h, q_idx, kv_idx],
        shape.batch,
        shape.heads,
        shape.q_len,
        shape.kv_len,
        device="cpu",
        BLOCK_SIZE=block_size,
    )
    assert found.BLOCK_SIZE == wanted.BLOCK_SIZE
    assert found.seq_lengths == wanted.seq_lengths
    for kind in ("kv", "full_kv", "q", "full_q"):
        ours, theirs = getattr(found, f"{kind}_indices"), getattr(wanted, f"{kind}_indices")
        assert ours.shape[2:] == theirs.shape[2:], kind
        assert list(blocks_of(found, kind, shape)) == list(blocks_of(wanted, kind, shape)), kind
    assert torch.equal(element_mask(found, shape), expected)
    check_oracle_blocks(wanted, expected, shape)


def check_oracle_blocks(block_mask: BlockMask, expected: torch.Tensor, shape: Shape) -> None:
    """torch classifies blocks as the oracle does: the two ways to count agree."""
    q_block, kv_block = block_mask.BLOCK_SIZE
    tables = expected.flatten(0, 1).tolist()
    kinds = [row for table in tables for row in oracle.classify_blocks(table, q_block, kv_block)]
    for kind, number in (("kv", oracle.PARTIAL), ("full_kv", oracle.FULL)):
        wanted = [[column for column, found in enumerate(row) if found == number] for row in kinds]
        assert list(blocks_of(block_mask, kind, shape)) == wanted


def check_stats(case: Case, shape: Shape, expected: torch.Tensor, block_size: tuple[int, int]) -> None:
    stats = case.mask.stats(**shape.lowering, block_size=block_size)
    tables = expected[: stats.batch, : stats.heads].flatten(0, 1).tolist()
    kinds = [kind for table in tables for row in oracle.classify_blocks(table, *block_size) for kind in row]
    assert stats.visible_fraction == pytest.approx(float(expected.double().mean()))
    for number, count in (
        (oracle.FULL, stats.full_blocks),
        (oracle.PARTIAL, stats.partial_blocks),
        (oracle.EMPTY, stats.empty_blocks),
    ):
        assert kinds.count(number) == count


class LargestTensor(TorchDispatchMode):
    """Notes the most elements that any tensor made within has."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor) and 0 not in tensor.stride():
                self.elements = max(self.elements, tensor.numel())
        return result
