"""Checks of what a mask lowers to, against the oracle's cells."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._python_dispatch import TorchDispatchMode

import flexmask as fm
from flexmask.errors import LoweringError
from flexmask.intervals.bind import bind
from flexmask.plans import LoweredMask
from flexmask.plans.capture import lower
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
    ends = rows.bounds.flatten(-2)
    assert ((ends >= 0) & (ends <= shape.kv_len)).all()
    assert ((ends[..., 1:] > ends[..., :-1]) | (ends[..., :-1] == shape.kv_len)).all()


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


def lowered(mask: fm.Mask, q_len: int, kv_len: int | None = None, **options: Any) -> LoweredMask:
    """What the plan of a mask gives at some lengths, without a graph, whose capture takes ten times as long."""
    return lower(bind(mask, q_len, kv_len, **options), (128, 128))


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


def listed(block_mask: BlockMask, kind: str, shape: Shape) -> torch.Tensor:
    """How often one of the lists names each block, int [batch, heads, rows, columns]."""
    counts, indices = getattr(block_mask, f"{kind}_num_blocks"), getattr(block_mask, f"{kind}_indices")
    assert counts.dtype == indices.dtype == torch.int32
    rows, columns = (-(-n // size) for n, size in zip((shape.q_len, shape.kv_len), block_mask.BLOCK_SIZE, strict=True))
    assert indices.shape[2:] == ((rows, columns) if "kv" in kind else (columns, rows))
    sizes = shape.batch, shape.heads, *indices.shape[2:]
    unused = torch.arange(sizes[-1]) >= counts.unsqueeze(-1)
    places = indices.masked_fill(unused, sizes[-1]).expand(sizes).long()
    return torch.zeros(*sizes[:3], sizes[3] + 1, dtype=torch.int32).scatter_add_(3, places, torch.ones_like(places).int())[
        ..., :-1
    ]


def element_mask(block_mask: BlockMask, shape: Shape) -> torch.Tensor:
    """The element mask as a kernel reads it: all of a full block, and of a partial one what mask_mod says."""
    q_block, kv_block = block_mask.BLOCK_SIZE
    full, partial = (
        (listed(block_mask, kind, shape) > 0).repeat_interleave(q_block, 2).repeat_interleave(kv_block, 3)
        for kind in ("full_kv", "kv")
    )
    seen = block_mask.mask_mod(*grid(shape)).expand(shape.batch, shape.heads, shape.q_len, shape.kv_len)
    return (full | partial)[:, :, : shape.q_len, : shape.kv_len] & (full[:, :, : shape.q_len, : shape.kv_len] | seen)


def pair(block_size: int | tuple[int, int]) -> tuple[int, int]:
    return block_size if isinstance(block_size, tuple) else (block_size, block_size)


def check_block_mask(case: Case, shape: Shape, expected: torch.Tensor, block_size: int | tuple[int, int]) -> None:
    found = case.mask.block_mask(**shape.lowering, block_size=block_size)
    assert pair(block_size) == found.BLOCK_SIZE
    check_lists_of_cells(found, shape, expected)
    assert torch.equal(element_mask(found, shape), expected)


def check_lists_of_cells(found: BlockMask, shape: Shape, expected: torch.Tensor) -> None:
    """Each block is in the list that its cells say."""
    check_lists(found, shape, oracle.classify_blocks(expected, *found.BLOCK_SIZE))


def check_lists(found: BlockMask, shape: Shape, kinds: torch.Tensor) -> None:
    """Each block is in its list once, and in no other."""
    assert found.seq_lengths == (shape.q_len, shape.kv_len)
    for name, kind in (("kv", oracle.PARTIAL), ("full_kv", oracle.FULL)):
        wanted = (kinds == kind).int()
        assert torch.equal(listed(found, name, shape), wanted), name
        assert torch.equal(listed(found, name.replace("kv", "q"), shape), wanted.mT), name.replace("kv", "q")


def check_stats(case: Case, shape: Shape, expected: torch.Tensor, block_size: int | tuple[int, int]) -> None:
    stats = case.mask.stats(**shape.lowering, block_size=block_size)
    kinds = oracle.classify_blocks(expected[: stats.batch, : stats.heads], *pair(block_size)).flatten().tolist()
    assert stats.visible_fraction == pytest.approx(float(expected.double().mean()))
    for number, count in (
        (oracle.FULL, stats.full_blocks),
        (oracle.PARTIAL, stats.partial_blocks),
        (oracle.EMPTY, stats.empty_blocks),
    ):
        assert kinds.count(number) == count


def check_lowerings(case: Case, shape: Shape, expected: torch.Tensor, block_size: int | tuple[int, int]) -> None:
    """All that a mask lowers to has the same cells."""
    dense = case.mask.dense(**shape.lowering)
    assert dense.dtype == torch.bool
    assert torch.equal(dense.expand_as(expected), expected)
    check_rows(case, shape, expected)
    check_mask_mod(case, shape, expected)
    check_block_mask(case, shape, expected, block_size)
    check_stats(case, shape, expected, block_size)


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
