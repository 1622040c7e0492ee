"""Sets of blocks as grids, ``bool[B', H', q_blocks, kv_blocks]``, for masks of few blocks.

All sizes follow from the lengths, so nothing here forces a host sync as long as the key intervals of the mask are exact.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from flexmask import _sync
from flexmask._transforms import are_ints
from flexmask.blocks.layout import BlockLayout, Entries, ceil_div, floor_div
from flexmask.blocks.survey import Survey
from flexmask.intervals.rows import Rows

#: Cells of a mask up to which all are evaluated where counting the open blocks would force a host sync.
FEW_CELLS = 2**22


class BlockGrid(BlockLayout):
    """The strategy that holds one truth value for each block: see :class:`flexmask.blocks.classify.Strategy`."""

    def touched(self, rows: Rows) -> Tensor:
        if rows.resets is not None:
            begins, stops = self._runs(rows)
            return self._count_runs(*self.touched_ends(rows.at(stops - 1)), begins, stops) > 0
        start, stop = self.touched_ends(rows)
        return self._between(start, stop) if rows.lo.shape[2] == 1 else self._count(start, stop) > 0

    def touched_ends(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """The first block that each interval touches and one more than the last, ``int32[B', H', q_len, K]``."""
        start, stop = floor_div(rows.lo, self.kv_size), ceil_div(rows.hi, self.kv_size)
        kv_len = self.context.kv_len
        if not are_ints(kv_len) or kv_len % self.kv_size:  # else unused slots, behind the keys, begin behind the last block
            start = start.masked_fill(rows.lo >= rows.hi, self.kv_blocks)
        return start, stop

    def covered(self, rows: Rows) -> Tensor:
        if not self.may_have_full_blocks:
            return torch.zeros((1, 1, 1, 1), dtype=torch.bool, device=rows.lo.device)
        if rows.resets is not None:
            begins, stops = self._runs(rows)
            first = rows.at(begins)
            start, stop = ceil_div(first.lo, self.kv_size), floor_div(first.hi, self.kv_size)
            return self._count_runs(start, torch.maximum(start, stop), begins, stops) == self.q_size
        if rows.lo.shape[2] == 1:
            complete = torch.arange(self.q_blocks, device=rows.lo.device).unsqueeze(-1) < self.complete_rows
            return self._between(ceil_div(rows.lo, self.kv_size), floor_div(rows.hi, self.kv_size)) & complete
        if rows.slots == 1:  # the intersection of intervals is an interval
            lo, hi = self.in_block_rows(rows.lo, self.context.kv_len).amax(3), self.in_block_rows(rows.hi, 0).amin(3)
            return self._between(ceil_div(lo, self.kv_size), floor_div(hi, self.kv_size))
        start, stop = ceil_div(rows.lo, self.kv_size), floor_div(rows.hi, self.kv_size)
        return self._count(start, torch.maximum(start, stop)) == self.q_size

    def decide(self, open_blocks: Tensor) -> tuple[Tensor, Tensor]:
        context, size = self.context, self.q_size * self.kv_size
        open_blocks = open_blocks.expand(context.batch, context.heads, -1, -1)
        # Counting the open blocks would force a host sync; evaluating a few cells too many does not.
        if _sync.needs_sync(open_blocks) and open_blocks.numel() * self.height * self.width <= FEW_CELLS:
            counts = torch.zeros(open_blocks.numel(), dtype=torch.int64, device=open_blocks.device)
            for blocks, _, cells in self.evaluate(Entries.whole_grid(open_blocks)):
                counts[blocks] += cells.sum((1, 2))
            counts = counts.view(open_blocks.shape)
            return (counts > 0) & (counts < size), counts == size
        entries = Entries.from_grid(open_blocks)
        partial, full = torch.zeros((2, *open_blocks.shape), dtype=torch.bool, device=open_blocks.device)
        index = entries.row * self.kv_blocks + entries.column
        partial.view(-1)[index], full.view(-1)[index] = Survey(self).classes(entries)
        return partial, full

    def from_cells(self, rows: Rows, cells: Tensor) -> tuple[Tensor, Tensor]:
        """The partial and the full blocks of the cells ``bool[B', H', q_len, kv_len]``.

        Args:
            rows: key intervals with all visible cells.
            cells: the cells. ``bool[B', H', 1, kv_len]`` where they are broadcast over the queries: then those in the intervals
                are visible, which begin and end with visible cells, or there is one query.
        """
        columns = self.kv_blocks * self.kv_size - cells.shape[3]
        if cells.shape[2] == 1:
            inside = F.pad(cells, (0, columns)).unflatten(3, (self.kv_blocks, self.kv_size))
            touched, full = self.touched(rows) & inside.any(-1), self.covered(rows) & inside.all(-1)
            return touched & ~full, full
        inside = F.pad(cells, (0, columns, 0, self.q_blocks * self.q_size - cells.shape[2]))
        counts = inside.unflatten(3, (self.kv_blocks, self.kv_size)).unflatten(2, (self.q_blocks, self.q_size)).sum((3, 5))
        full = counts == self.q_size * self.kv_size
        return (counts > 0) & ~full, full

    def _between(self, start: Tensor, stop: Tensor) -> Tensor:
        """The blocks in some interval ``[start, stop)``, given ``[B, H, rows, K]``."""
        column = torch.arange(self.kv_blocks, dtype=torch.int32, device=start.device)
        if start.shape[-1] == 1:
            return (column >= start) & (column < stop)
        return ((column >= start.unsqueeze(-1)) & (column < stop.unsqueeze(-1))).any(3)

    def _runs(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """The first row of each run of rows that hold the keys of the row before them, and one more than its last row.

        Runs end with block rows. The blocks that all rows of a run hold are those of its first row, and the blocks that some row
        holds are those of its last one.
        """
        q_len, device = rows.lo.shape[2], rows.lo.device
        begins = torch.cat((cast(Tensor, rows.resets), torch.arange(0, q_len, self.q_size, device=device))).unique()
        return begins, F.pad(begins[1:], (0, 1), value=q_len)

    def _count_runs(self, start: Tensor, stop: Tensor, begins: Tensor, stops: Tensor) -> Tensor:
        """As :meth:`_count`, for one row of each run from ``begins`` to ``stops``."""
        width, number = self.kv_blocks, (stops - begins).to(torch.int32)
        line = (floor_div(begins, self.q_size) * (width + 1)).unsqueeze(-1)
        edges = torch.zeros((*start.shape[:2], self.q_blocks * (width + 1)), dtype=torch.int32, device=start.device)
        for ends, step in ((start, 1), (stop, -1)):
            index = (ends + line).flatten(2)
            edges.scatter_add_(-1, index, (number * step).repeat_interleave(ends.shape[3]).expand_as(index))
        counts: Tensor = edges.view(*start.shape[:2], self.q_blocks, width + 1)[..., :width].cumsum(-1)
        return counts

    def _count(self, start: Tensor, stop: Tensor) -> Tensor:
        """How many rows of each block row have an interval ``[start, stop)`` of key blocks that holds a block."""
        width = self.kv_blocks
        edges = torch.zeros((*start.shape[:2], self.q_blocks, width + 1), dtype=torch.int32, device=start.device)
        for ends, step in ((start, 1), (stop, -1)):
            # Contiguous, as a graph takes padded tensors to be: padding by 0 keeps other strides.
            index = self.in_block_rows(ends, width).to(torch.int64, memory_format=torch.contiguous_format).flatten(3)
            edges.scatter_add_(-1, index, edges.new_full((), step).expand_as(index))
        return edges[..., :width].cumsum(-1)
