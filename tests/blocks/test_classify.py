"""The classification of blocks: both strategies classify alike, and every user of it describes the same blocks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import flexmask as fm
from flexmask import Mask
from flexmask.blocks.classify import classify, decide_open
from flexmask.blocks.grid import BlockGrid
from flexmask.blocks.layout import Entries
from flexmask.blocks.sparse import BlockSets
from flexmask.intervals.bind import bind
from flexmask.intervals.bounds import analyze
from flexmask.intervals.rows import Rows
from flexmask.plotting.raster import FULL, PARTIAL, rasterize

LENGTHS = 50, 43
SIZES = 4, 8
MASKS: list[Mask] = [
    fm.causal(),
    fm.empty(),
    fm.sliding_window(size=9) | (fm.kv < 3),
    fm.key_padding([43, 20]) & fm.prefix_lm([30, 3]),
    fm.query_padding(10),
    fm.causal() & ((fm.q * fm.kv) % 3 == 0),
    fm.per_head([fm.causal() | ((fm.q - fm.kv) % 5 != 0), fm.full()]),
]


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_open_blocks_are_those_that_key_intervals_do_not_classify(mask: Mask) -> None:
    """A block that is open without need costs time and nothing else."""
    context = bind(mask, *LENGTHS)
    bounds = analyze(context)
    found = classify(bounds, BlockGrid(context, *SIZES))
    if found.open is None:
        assert bounds.exact
        return
    (q_len, kv_len), (q_size, kv_size) = LENGTHS, SIZES
    cells = F.pad(bounds.upper.holds(torch.arange(kv_len)).expand(-1, -1, q_len, -1), (0, -kv_len % kv_size, 0, -q_len % q_size))
    may_be_visible = cells.unflatten(3, (-1, kv_size)).unflatten(2, (-1, q_size)).any(5).any(3)
    assert found.open.any()
    assert not (found.open & (found.partial | found.full | ~may_be_visible)).any()


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_strategies_classify_alike(mask: Mask) -> None:
    context = bind(mask, *LENGTHS)
    bounds, grid, sets = analyze(context), BlockGrid(context, *SIZES), BlockSets(context, *SIZES)
    shape = context.batch, context.heads, grid.q_blocks
    columns = torch.arange(grid.kv_blocks)
    one, other = classify(bounds, grid), classify(bounds, sets)
    for _ in range(2):
        for marked, rows in ((one.partial, other.partial), (one.full, other.full), (one.open, other.open)):
            assert (marked is None) == (rows is None)
            if marked is not None and rows is not None:
                assert torch.equal(marked.expand(*shape, -1), rows.expand(*shape).holds(columns))
        one, other = decide_open(one, grid), decide_open(other, sets)
    assert one.open is None


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_block_mask_statistics_and_pictures_have_the_same_blocks(mask: Mask) -> None:
    block_mask, stats = mask.block_mask(*LENGTHS, block_size=SIZES), mask.stats(*LENGTHS, block_size=SIZES)
    assert block_mask.full_kv_num_blocks is not None
    counts = [tensor[: stats.batch, : stats.heads] for tensor in (block_mask.kv_num_blocks, block_mask.full_kv_num_blocks)]
    assert [int(count.sum()) for count in counts] == [stats.partial_blocks, stats.full_blocks]
    for b in range(stats.batch):
        for h in range(stats.heads):
            states = rasterize(mask, *LENGTHS, batch=b, head=h, block_size=SIZES).blocks
            assert states is not None
            drawn = [(states == state).sum(1).tolist() for state in (PARTIAL, FULL)]
            assert drawn == [count[b, h].tolist() for count in counts]


@pytest.mark.parametrize("size", [1, 3, 4, 5, 9, 100])
def test_entries_come_in_parts_of_whole_rows(size: int) -> None:
    """A row of more entries than a part has comes alone, and rows without entries in none."""
    keys = torch.tensor([[0, 0], [2, 5], [4, 5], [0, 0], [0, 0], [1, 6], [0, 2], [7, 9], [0, 0]], dtype=torch.int32)
    rows = Rows(keys[None, None, :, :1], keys[None, None, :, 1:], 9)
    whole = [(row, column) for row, (lo, hi) in enumerate(keys.tolist()) for column in range(lo, hi)]
    parts = [list(zip(part.row.tolist(), part.column.tolist(), strict=True)) for part in Entries.chunks(rows, size)]
    assert [entry for part in parts for entry in part] == whole
    for part, following in zip(parts, [*parts[1:], []], strict=True):
        own = {row for row, _ in part}
        assert len(part) <= size or len(own) == 1
        assert own.isdisjoint(row for row, _ in following)
        # One more row would be too many.
        assert not following or len(part) + sum(row == following[0][0] for row, _ in following) > size
