"""Surveys: the blocks that the rows of a mask leave open, decided with as few cells as possible.

First the ranges of values in a block decide, then one block of each kind is evaluated (:mod:`flexmask.blocks.decide`). Whether
a block is partial shows in some of its rows already, so that hardly any is evaluated whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from flexmask.blocks.decide import Decider, joined
from flexmask.blocks.entries import BlockCells, Entries
from flexmask.intervals.context import Context
from flexmask.intervals.rows import Rows

__all__ = ["Progress", "Survey", "watched"]

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
    """Reports to ``progress`` how far each survey inside has come: one of many blocks that differ takes long."""
    before = _PROGRESS.set(progress)
    try:
        yield
    finally:
        _PROGRESS.reset(before)


class Survey:
    """The blocks of the mask of a context. Everything here forces host syncs.

    Args:
        context: the context of the mask's lowering.
        q_size: queries in a block.
        kv_size: keys in a block.
    """

    def __init__(self, context: Context, q_size: int, kv_size: int) -> None:
        self.context, self.q_size, self.kv_size = context, q_size, kv_size
        self.cells, self.decider = BlockCells(context, q_size, kv_size), Decider(context, q_size, kv_size)

    @property
    def height(self) -> int:
        """Rows of a block."""
        return self.cells.height

    def parts(self, rows: Rows, most: int = CHUNK) -> Iterator[Entries]:
        """The blocks of sets ``[B, H, q_blocks]`` in order, about ``most`` at a time."""
        progress = _PROGRESS.get()
        done, total = 0, int(rows.counts().sum()) if progress else 0
        for entries in Entries.streamed(rows, most):
            yield entries
            if progress:
                done += entries.row.numel()
                progress(done / total)

    def classes(self, entries: Entries) -> tuple[Tensor, Tensor]:
        """Which blocks are partial, and which are full: visible in each of ``q_size * kv_size`` cells."""
        partial, full = torch.zeros((2, entries.row.numel()), dtype=torch.bool, device=entries.row.device)
        for start in range(0, entries.row.numel(), CHUNK):
            part = slice(start, start + CHUNK)
            blocks = entries.at(part)
            whole, empty = self.decider.at(blocks).decide(self.decider.mask)
            left = (~(whole | empty)).nonzero().squeeze(-1)
            some, lacks = ~empty, ~(whole & self._complete(blocks))
            kinds, first = self._kinds(blocks.at(left))
            visible, hidden = self._seen(blocks.at(left).at(first))
            some[left], lacks[left] = visible[kinds], hidden[kinds]
            partial[part], full[part] = some & lacks, ~lacks
        return partial, full

    def counted(self, rows: Rows) -> Iterator[tuple[Entries, Tensor]]:
        """How many cells of each row of each block are visible: some blocks of sets at a time, and ``int64[n, height]``."""
        for entries in self.parts(rows, max(1, COUNTS // self.height)):
            kinds, first = self._kinds(entries)
            counts = torch.zeros((first.numel(), self.height), dtype=torch.int64, device=first.device)
            for blocks, queries, cells in self.cells.of(entries.at(first)):
                counts[blocks, queries] = cells.sum(-1)
            yield entries, counts[kinds]

    def _kinds(self, entries: Entries) -> tuple[Tensor, Tensor]:
        """For each block a number from 0 up, the same only where the cells are, and for each number some block."""
        if not entries.row.numel():
            return entries.row, entries.row
        ends = [self._inside(entries, axis) for axis in ("q", "kv")]
        kinds = joined([self.decider.at(entries).kinds(self.decider.mask), *ends])
        first = torch.zeros(int(kinds.max()) + 1, dtype=torch.int64, device=kinds.device)
        first[kinds] = torch.arange(kinds.numel(), device=kinds.device)
        return kinds, first

    def _inside(self, entries: Entries, axis: str) -> Tensor:
        """How many queries or keys of each block there are."""
        context = self.context
        if axis == "q":
            return (context.q_len - entries.row % self.cells.q_blocks * self.q_size).clamp(max=self.q_size)
        return (context.kv_len - entries.column.long() * self.kv_size).clamp(max=self.kv_size)

    def _complete(self, entries: Entries) -> Tensor:
        return (self._inside(entries, "q") == self.q_size) & (self._inside(entries, "kv") == self.kv_size)

    def _seen(self, entries: Entries) -> tuple[Tensor, Tensor]:
        """Of which blocks some cell is visible, and of which some is hidden or lies beyond the ends of the mask."""
        visible, hidden = torch.zeros_like(entries.row, dtype=torch.bool), ~self._complete(entries)
        for rows in self._passes(entries.row.device):
            left = (~(visible & hidden)).nonzero().squeeze(-1)
            some, lacks = torch.zeros((2, left.numel()), dtype=torch.bool, device=left.device)
            for blocks, _, cells in self.cells.of(entries.at(left), rows):
                some[blocks] |= cells.flatten(1).any(1)
                lacks[blocks] |= ~cells.flatten(1).all(1)
            visible[left] |= some
            hidden[left] |= lacks
        return visible, hidden

    def _passes(self, device: torch.device) -> Iterator[Tensor]:
        """The rows of a block to evaluate at once: its ends, then some between these, then the others."""
        row = torch.arange(self.height, device=device)
        turn = torch.where(row % STEP == 0, 1, 2)
        turn[0] = turn[-1] = 0
        yield from filter(torch.numel, ((turn == number).nonzero().squeeze(-1) for number in range(3)))
