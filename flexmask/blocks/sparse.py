"""Sets of blocks as intervals of key blocks for each block row, for masks of many blocks.

A set is :class:`flexmask.intervals.rows.Rows` of shape ``[B', H', q_blocks, K]``. No tensor has a size of q_len x kv_len or of
q_blocks x kv_blocks.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from flexmask.blocks.layout import BlockLayout, ceil_div, floor_div, rank_in_row
from flexmask.blocks.survey import Survey
from flexmask.intervals.rows import Rows, union_runs

#: Intervals of several rows on one line, ``[start, stop)`` as ``int64[n]`` each. Row ``r`` of ``width`` members begins at
#: ``r * (width + 1)``, so that intervals of two rows do not touch.
Lines: TypeAlias = tuple[Tensor, Tensor]


class BlockSets(BlockLayout):
    """The strategy that holds intervals of key blocks: see :class:`flexmask.blocks.classify.Strategy`."""

    def touched(self, rows: Rows) -> Rows:
        stop = ceil_div(rows.hi, self.kv_size)
        return self._union(floor_div(rows.lo, self.kv_size), stop.masked_fill(rows.lo >= rows.hi, 0))

    def covered(self, rows: Rows) -> Rows:
        width = self.kv_blocks
        if not self.may_have_full_blocks:
            return Rows.nothing(width, rows.lo.device).expand(rows.lo.shape[0], rows.lo.shape[1], self.q_blocks)
        start, stop = ceil_div(rows.lo, self.kv_size), floor_div(rows.hi, self.kv_size)
        if rows.slots == 1 and rows.lo.shape[2] > 1:  # the intersection of intervals is an interval
            start, stop = self.in_block_rows(start, width).amax(3), self.in_block_rows(stop, 0).amin(3)
            return Rows.spans(start.squeeze(-1), stop.squeeze(-1), width)
        empty = start >= stop
        outside = ~Rows(start.masked_fill(empty, width), stop.masked_fill(empty, width), width).compact()
        missed = self._union(outside.lo, outside.hi)
        complete = torch.arange(self.q_blocks, device=missed.lo.device) < self.complete_rows
        return ~missed & Rows.where(complete.view(1, 1, -1), width)

    def decide(self, open_blocks: Rows) -> tuple[Rows, Rows]:
        width, survey = self.kv_blocks, Survey(self)
        shape = torch.Size((self.context.batch, self.context.heads, self.q_blocks))
        parts: tuple[list[Lines], list[Lines]] = [], []
        for entries in survey.chunks(open_blocks.expand(*shape)):
            for chosen, lines in zip(survey.classes(entries), parts, strict=True):
                start = entries.row[chosen] * (width + 1) + entries.column[chosen]
                lines.append(_merge(start, start + 1))
        if not parts[0]:
            return open_blocks, open_blocks  # an empty set
        partial, full = (_from_lines(lines, shape, width) for lines in parts)
        return partial, full

    def count(self, blocks: Rows) -> int:
        """The number of blocks in a set, over all sequences and heads of the mask; forces a host sync."""
        return int(blocks.expand(self.context.batch, self.context.heads, self.q_blocks).counts().sum())

    def _union(self, start: Tensor, stop: Tensor) -> Rows:
        """The key blocks that some row of each block row holds, given intervals ``[B, H, q_len, K]`` of key blocks."""
        if start.shape[2] == 1:  # the rows are equal, so each block row takes one of them
            start, stop = (end.unsqueeze(3).expand(-1, -1, self.q_blocks, -1, -1) for end in (start, stop))
        else:
            start, stop = self.in_block_rows(start, self.kv_blocks), self.in_block_rows(stop, 0)
        start, stop = start.transpose(3, 4), stop.transpose(3, 4)
        # Where the intervals of neighboring rows overlap or touch, as they mostly do, their union is one interval.
        latest, earliest = torch.maximum(start[..., 1:], start[..., :-1]), torch.minimum(stop[..., 1:], stop[..., :-1])
        joined = (latest <= earliest).all(-1)
        parts = [_listed(start.amin(-1), stop.amax(-1), joined, 1)]
        if not bool(joined.all()):
            parts.append(_listed(start, stop, ~joined.unsqueeze(-1), start.shape[-1]))
        block_slot, start, stop = (torch.cat(part) for part in zip(*parts, strict=True))
        slots = joined.shape[-1]
        return union(block_slot // slots, start, stop, joined.shape[:-1], self.kv_blocks)


def union(row: Tensor, start: Tensor, stop: Tensor, shape: torch.Size, width: int) -> Rows:
    """The union of intervals in each row.

    Args:
        row: the row of each interval in ``shape`` flattened, ``int[n]``.
        start: the first member of each interval, ``int[n]``.
        stop: one more than the last member, ``int[n]``.
        shape: ``[B, H, rows]``.
        width: members that a row can have.
    """
    offset = row.long() * (width + 1)
    return _from_lines([_merge(offset + start, offset + stop)], shape, width)


def _listed(start: Tensor, stop: Tensor, wanted: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """The intervals that are wanted and not empty, each with the place ``[B, H, q_blocks, K]`` that it belongs to, flattened."""
    index = (wanted & (start < stop)).flatten().nonzero().squeeze(-1)
    return index // rows, start.flatten()[index], stop.flatten()[index]


def _merge(start: Tensor, stop: Tensor) -> Lines:
    """The union of intervals, in order."""
    start, stop, opens, closes = union_runs(start, stop)
    return start[opens], stop[closes]


def _from_lines(parts: list[Lines], shape: torch.Size, width: int) -> Rows:
    """Intervals on lines, in order, as rows of a shape ``[B, H, rows]``."""
    start, stop = (torch.cat(ends) for ends in zip(*parts, strict=True))
    row = start // (width + 1)
    count = torch.bincount(row, minlength=shape.numel())
    slots = max(1, int(count.max()))
    slot = rank_in_row(row, count)
    ends = torch.full((2, shape.numel(), slots), width, dtype=torch.int32, device=row.device)
    ends[:, row, slot] = (torch.stack((start, stop)) - row * (width + 1)).to(torch.int32)
    lo, hi = ends.view(2, *shape, slots)
    return Rows(lo, hi, width)
