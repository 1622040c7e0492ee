"""The layout of a mask in blocks, ``[B, H, q_blocks, kv_blocks]``, and lists of single blocks, ``int64[n]``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from flexmask import _sync
from flexmask._transforms import are_ints
from flexmask.intervals.closures import Closure
from flexmask.intervals.context import Context
from flexmask.intervals.evaluation import hoisted_closure
from flexmask.intervals.rows import Rows, padded

#: Cells evaluated at a time, which bounds the memory of intermediate results: on the CPU they stay in its caches.
CHUNK = _sync.PerDevice(cpu=2**18, elsewhere=2**24)


class BlockLayout:
    """A mask cut into blocks; the last block row and column may reach beyond the mask.

    Attributes:
        context: the lowering context of the mask.
        q_size: queries in a block.
        kv_size: keys in a block.
        q_blocks: block rows.
        kv_blocks: block columns.
        height: rows of a block that are evaluated, ``min(q_size, q_len)``; in a graph for all lengths ``q_size``.
        width: keys of a block that are evaluated, ``min(kv_size, kv_len)``; in a graph for all lengths ``kv_size``.
    """

    def __init__(self, context: Context, q_size: int, kv_size: int) -> None:
        self.context, self.q_size, self.kv_size = context, q_size, kv_size
        counts = -(-context.q_len // q_size), -(-context.kv_len // kv_size)
        self.q_blocks, self.kv_blocks = context.blocks.get((q_size, kv_size), counts)
        sides = (q_size, context.q_len), (kv_size, context.kv_len)
        self.height, self.width = (min(side) if are_ints(*side) else side[0] for side in sides)

    @property
    def complete_rows(self) -> int:
        """Block rows that do not reach beyond the last query."""
        return self.context.q_len // self.q_size

    @property
    def may_have_full_blocks(self) -> bool:
        """Whether there may be complete block rows."""
        return not are_ints(self.complete_rows) or self.complete_rows > 0

    def in_block_rows(self, ends: Tensor, fill: int) -> Tensor:
        """``[B, H, q_len, K]`` cut into block rows, ``[B, H, q_blocks, height, K]``, with a number behind the last query."""
        if not are_ints(self.context.q_len) or self.context.q_len % self.height:
            ends = padded(ends, (0, 0, 0, self.q_blocks * self.height - self.context.q_len), fill)
        block_rows: Tensor = ends.unflatten(2, (self.q_blocks, self.height))
        return block_rows

    @cached_property
    def _closure(self) -> Closure:
        return hoisted_closure(self.context)

    def evaluate(self, entries: Entries, rows: Tensor | None = None) -> Iterator[tuple[slice, slice, Tensor]]:
        """Evaluates rows of single blocks, a bounded number of cells at a time.

        Do not keep a tensor of each step: small tensors that stay alive between large ones fragment the memory.

        Args:
            entries: the blocks.
            rows: the rows of each block, ``int64[r]``, counted from its first; by default all.

        Yields:
            Which blocks, which rows, and their cells ``bool[blocks, rows, width]``, False beyond the ends of the mask.
        """
        context, device = self.context, entries.row.device
        rows = torch.arange(self.height, device=device) if rows is None else rows
        chunk = CHUNK.on(entries.row)
        row_count = min(rows.numel(), max(1, chunk // self.width))
        block_count = max(1, chunk // (row_count * self.width))
        columns = torch.arange(self.width, device=device)
        for block_start in range(0, entries.row.numel(), block_count):
            blocks = slice(block_start, block_start + block_count)
            group, block_row = entries.row[blocks] // self.q_blocks, entries.row[blocks] % self.q_blocks
            b, h = (group // context.heads).view(-1, 1, 1), (group % context.heads).view(-1, 1, 1)
            kv = entries.column[blocks].view(-1, 1, 1) * self.kv_size + columns
            for row_start in range(0, rows.numel(), row_count):
                part = slice(row_start, row_start + row_count)
                q = block_row.view(-1, 1, 1) * self.q_size + rows[part].view(1, -1, 1)
                cells = self._closure(b, h, q.clamp(max=context.q_len - 1), kv.clamp(max=context.kv_len - 1))
                yield blocks, part, cells & (q < context.q_len) & (kv < context.kv_len)


@dataclass(frozen=True, eq=False)
class Entries:
    """Entries of a sparse table ``bool[B, H, rows, columns]``, row by row; of a table of blocks, single blocks.

    Attributes:
        row: index of the row in ``[B, H, rows]`` flattened, ``int64[n]``.
        column: index of the column, ``int[n]``.
    """

    row: Tensor
    column: Tensor

    @classmethod
    def from_rows(cls, rows: Rows) -> Self:
        """The columns in the intervals of every row; forces a host sync."""
        length = (rows.hi - rows.lo).flatten().long()
        total = int(length.sum())
        interval = torch.repeat_interleave(length, output_size=total)
        return cls(interval // rows.slots, rows.lo.flatten()[interval] + rank_in_row(interval, length))

    @classmethod
    def from_grid(cls, grid: Tensor) -> Self:
        """The elements of ``bool[B, H, rows, columns]`` that are True; forces a host sync."""
        row, column = grid.flatten(0, -2).nonzero(as_tuple=True)
        return cls(row, column)

    @classmethod
    def whole_grid(cls, grid: Tensor) -> Self:
        """All elements of ``[B, H, rows, columns]``, True or False."""
        row, column = (torch.arange(size, device=grid.device) for size in (grid.shape[:-1].numel(), grid.shape[-1]))
        return cls(row.repeat_interleave(column.numel(), output_size=grid.numel()), column.repeat(row.numel()))

    @classmethod
    def chunks(cls, rows: Rows, size: int) -> Iterator[Self]:
        """As :meth:`from_rows` in parts of whole rows, with at most ``size`` entries or one row each; forces a host sync."""
        lo, hi = (end.reshape(1, 1, -1, rows.slots) for end in (rows.lo, rows.hi))
        lines = Rows(lo, hi, rows.kv_len)
        total = lines.counts().flatten().cumsum(0)
        start, done, count = 0, 0, int(total[-1])
        while done < count:
            stop = max(start + 1, int(torch.searchsorted(total, done + size, right=True)))
            part = cls.from_rows(lines.at(slice(start, stop)))
            if part.row.numel():
                yield cls(part.row + start, part.column)
            start, done = stop, int(total[stop - 1])

    def select(self, index: Tensor | slice) -> Self:
        """Some of the entries."""
        return type(self)(self.row[index], self.column[index])


def rank_in_row(row: Tensor, count: Tensor) -> Tensor:
    """The rank of each entry in its row, from 0.

    Args:
        row: the row of each entry, in order, ``int64[n]``.
        count: the number of entries of each row.
    """
    return torch.arange(row.numel(), device=row.device) - (count.cumsum(0) - count)[row]


def floor_div(positions: Tensor, size: int) -> Tensor:
    """Positions divided by a size, rounded down; by a shift for a power of two, since integer division is slow."""
    return positions >> (size.bit_length() - 1) if size & (size - 1) == 0 else positions.div(size, rounding_mode="floor")


def ceil_div(positions: Tensor, size: int) -> Tensor:
    """Positions divided by a size, rounded up."""
    return floor_div(positions + (size - 1), size)
