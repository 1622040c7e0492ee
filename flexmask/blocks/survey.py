"""Surveys: open blocks decided by value ranges, and the others by evaluating as few cells as possible.

Value ranges come first (:mod:`flexmask.blocks.ranges`), then one block of each kind is evaluated
(:mod:`flexmask.blocks.kinds`). A block that is partial mostly shows it in a few of its rows, so those are evaluated first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from flexmask.blocks.kinds import block_kinds, group_numbers
from flexmask.blocks.layout import BlockLayout, Entries
from flexmask.blocks.ranges import AxisRanges, BlockRanges
from flexmask.intervals.rows import Rows

#: Blocks that are decided at a time, which bounds the memory.
CHUNK = 2**18
#: Counts of single rows that are held at a time, which bounds the memory, too.
COUNTS = 2**22
#: Every such row is evaluated next, where the first and the last row do not show that a block is partial.
STEP = 8

#: Is called with the share of the blocks that are done, from 0 to 1.
Progress = Callable[[float], None]

_PROGRESS: ContextVar[Progress | None] = ContextVar("flexmask.blocks.survey.progress", default=None)


@contextmanager
def watched(progress: Progress) -> Iterator[None]:
    """Reports to ``progress`` the share of blocks that each survey inside has done: many blocks of many kinds take long."""
    before = _PROGRESS.set(progress)
    try:
        yield
    finally:
        _PROGRESS.reset(before)


class Survey:
    """Decides and counts single blocks of a mask. Everything here forces host syncs."""

    def __init__(self, layout: BlockLayout) -> None:
        self._layout, self._axes = layout, AxisRanges(layout)

    def chunks(self, blocks: Rows, size: int = CHUNK) -> Iterator[Entries]:
        """The blocks of a set ``[B, H, q_blocks]`` in order, about ``size`` at a time."""
        progress = _PROGRESS.get()
        done, total = 0, int(blocks.counts().sum()) if progress else 0
        for entries in Entries.chunks(blocks, size):
            yield entries
            if progress:
                done += entries.row.numel()
                progress(done / total)

    def classes(self, entries: Entries) -> tuple[Tensor, Tensor]:
        """Which blocks are partial, and which are full: visible in each of ``q_size * kv_size`` cells; ``bool[n]`` each."""
        partial, full = torch.zeros((2, entries.row.numel()), dtype=torch.bool, device=entries.row.device)
        for start in range(0, entries.row.numel(), CHUNK):
            part = slice(start, start + CHUNK)
            blocks = entries.select(part)
            always, never = BlockRanges(self._axes, blocks).decide(self._axes.mask)
            undecided = (~(always | never)).nonzero().squeeze(-1)
            visible, hidden = ~never, ~(always & self._is_complete(blocks))
            kinds, examples = self._kinds(blocks.select(undecided))
            of_kind = self._evaluate(blocks.select(undecided).select(examples))
            visible[undecided], hidden[undecided] = of_kind[0][kinds], of_kind[1][kinds]
            partial[part], full[part] = visible & hidden, ~hidden
        return partial, full

    def row_counts(self, blocks: Rows) -> Iterator[tuple[Entries, Tensor]]:
        """The number of visible cells in each row of the blocks of a set: some blocks at a time, and ``int64[n, height]``."""
        height = self._layout.height
        for entries in self.chunks(blocks, max(1, COUNTS // height)):
            kinds, examples = self._kinds(entries)
            counts = torch.zeros((examples.numel(), height), dtype=torch.int64, device=examples.device)
            for part, rows, cells in self._layout.evaluate(entries.select(examples)):
                counts[part, rows] = cells.sum(-1)
            yield entries, counts[kinds]

    def _kinds(self, entries: Entries) -> tuple[Tensor, Tensor]:
        """For each block a number from 0 up, equal only where the cells are, and for each number one of its blocks."""
        if not entries.row.numel():
            return entries.row, entries.row
        kinds = group_numbers([block_kinds(BlockRanges(self._axes, entries), self._axes.mask), *self._sizes(entries)])
        examples = torch.zeros(int(kinds.max()) + 1, dtype=torch.int64, device=kinds.device)
        examples[kinds] = torch.arange(kinds.numel(), device=kinds.device)
        return kinds, examples

    def _sizes(self, entries: Entries) -> tuple[Tensor, Tensor]:
        """How many queries and how many keys of each block lie inside the mask."""
        layout, context = self._layout, self._layout.context
        queries = context.q_len - entries.row % layout.q_blocks * layout.q_size
        keys = context.kv_len - entries.column.long() * layout.kv_size
        return queries.clamp(max=layout.q_size), keys.clamp(max=layout.kv_size)

    def _is_complete(self, entries: Entries) -> Tensor:
        queries, keys = self._sizes(entries)
        return (queries == self._layout.q_size) & (keys == self._layout.kv_size)

    def _evaluate(self, entries: Entries) -> tuple[Tensor, Tensor]:
        """Of which blocks some cell is visible, and of which some is hidden or lies beyond the ends of the mask."""
        visible, hidden = torch.zeros_like(entries.row, dtype=torch.bool), ~self._is_complete(entries)
        for rows in self._passes(entries.row.device):
            undecided = (~(visible & hidden)).nonzero().squeeze(-1)
            some, lacks = torch.zeros((2, undecided.numel()), dtype=torch.bool, device=undecided.device)
            for blocks, _, cells in self._layout.evaluate(entries.select(undecided), rows):
                some[blocks] |= cells.flatten(1).any(1)
                lacks[blocks] |= ~cells.flatten(1).all(1)
            visible[undecided] |= some
            hidden[undecided] |= lacks
        return visible, hidden

    def _passes(self, device: torch.device) -> Iterator[Tensor]:
        """The rows of a block to evaluate at once: its ends, then some between these, then the others."""
        row = torch.arange(self._layout.height, device=device)
        turn = torch.where(row % STEP == 0, 1, 2)
        turn[0] = turn[-1] = 0
        yield from filter(torch.numel, ((turn == number).nonzero().squeeze(-1) for number in range(3)))
