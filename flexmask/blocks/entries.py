"""Single blocks of a mask: how they are counted out, and the evaluation of their cells, a bounded number at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Self, TypeAlias

import torch
from torch import Tensor

from flexmask import _sync
from flexmask.intervals.closures import Closure
from flexmask.intervals.context import Context
from flexmask.intervals.evaluation import hoisted_closure
from flexmask.intervals.rows import Rows

__all__ = ["BlockCells", "Entries", "Listed", "divided", "divided_up"]

#: Cells evaluated at a time, which bounds the memory of intermediate results: on the CPU they stay in its caches.
CHUNK = _sync.PerDevice(cpu=2**18, elsewhere=2**24)

#: Sets of blocks as a BlockMask holds them: how many each row has, ``int32[B, H, rows]``, and which, first in
#: ``int32[B, H, rows, width]``.
Listed: TypeAlias = tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class Entries:
    """Single members of the sets of some rows, in order.

    Attributes:
        row: counted over ``[B, H, q]`` flattened, ``int64[n]``.
        column: the member, ``int[n]``.
    """

    row: Tensor
    column: Tensor

    @classmethod
    def of(cls, rows: Rows) -> Self:
        """The members of every row; forces a host sync."""
        length = (rows.hi - rows.lo).flatten().long()
        total = int(length.sum())
        interval = torch.repeat_interleave(length, output_size=total)
        within = torch.arange(total, device=length.device) - (length.cumsum(0) - length)[interval]
        return cls(interval // rows.slots, rows.lo.flatten()[interval] + within)

    @classmethod
    def marked(cls, grid: Tensor) -> Self:
        """The members where ``bool[B, H, q, columns]`` is True; forces a host sync."""
        at = grid.flatten().nonzero().squeeze(-1)
        row = at.div(grid.shape[-1], rounding_mode="floor")
        return cls(row, at - row * grid.shape[-1])

    @classmethod
    def every(cls, grid: Tensor) -> Self:
        """All members that there could be, whether or not they are marked."""
        row, column = (torch.arange(size, device=grid.device) for size in (grid.shape[:-1].numel(), grid.shape[-1]))
        return cls(row.repeat_interleave(column.numel(), output_size=grid.numel()), column.repeat(row.numel()))

    @classmethod
    def streamed(cls, rows: Rows, most: int) -> Iterator[Self]:
        """The members of every row, those of as many rows at a time as have ``most`` of them; forces a host sync."""
        lo, hi = rows.lo.flatten(0, 2), rows.hi.flatten(0, 2)
        total = (hi - lo).sum(-1).cumsum(0)
        start, done, every = 0, 0, int(total[-1])
        while done < every:
            stop = max(start + 1, int(torch.searchsorted(total, done + most, right=True)))
            part = cls.of(Rows(lo[start:stop].view(1, 1, -1, rows.slots), hi[start:stop].view(1, 1, -1, rows.slots), rows.kv_len))
            if part.row.numel():
                yield cls(part.row + start, part.column)
            start, done = stop, int(total[stop - 1])

    def at(self, places: Tensor | slice) -> Self:
        """Some of the members."""
        return type(self)(self.row[places], self.column[places])


def divided(ends: Tensor, size: int) -> Tensor:
    """Rounded down; a shift where the size is a power of two, since integer division is slow."""
    return ends >> (size.bit_length() - 1) if size & (size - 1) == 0 else ends.div(size, rounding_mode="floor")


def divided_up(ends: Tensor, size: int) -> Tensor:
    """Rounded up."""
    return divided(ends + (size - 1), size)


class BlockCells:
    """Evaluates single blocks of a mask, a bounded number of cells at a time.

    Args:
        context: the context of the mask's lowering.
        q_size: queries in a block.
        kv_size: keys in a block.

    Attributes:
        height: rows of a block that are evaluated, ``min(q_size, q_len)``.
        width: keys of a block that are evaluated, ``min(kv_size, kv_len)``.
    """

    def __init__(self, context: Context, q_size: int, kv_size: int) -> None:
        self.context, self.q_size, self.kv_size = context, q_size, kv_size
        self.q_blocks = -(-context.q_len // q_size)
        self.height, self.width = min(q_size, context.q_len), min(kv_size, context.kv_len)

    @cached_property
    def _closure(self) -> Closure:
        return hoisted_closure(self.context)

    def of(self, entries: Entries, rows: Tensor | None = None) -> Iterator[tuple[slice, slice, Tensor]]:
        """Evaluates rows of blocks. Do not keep a tensor of each step: small ones between the large ones fragment the memory.

        Args:
            entries: query blocks as rows, key blocks as columns.
            rows: the rows of each block, ``int64[r]``, counted from its first; by default all.

        Yields:
            Which blocks, which rows, and their cells ``bool[blocks, rows, width]``, False beyond the ends of the mask.
        """
        context, device = self.context, entries.row.device
        rows = torch.arange(self.height, device=device) if rows is None else rows
        most = CHUNK.on(entries.row)
        few = min(rows.numel(), max(1, most // self.width))
        count = max(1, most // (few * self.width))
        within = torch.arange(self.width, device=device)
        for start in range(0, entries.row.numel(), count):
            blocks = slice(start, start + count)
            group, block = entries.row[blocks] // self.q_blocks, entries.row[blocks] % self.q_blocks
            b, h = (group // context.heads).view(-1, 1, 1), (group % context.heads).view(-1, 1, 1)
            kv = entries.column[blocks].view(-1, 1, 1) * self.kv_size + within
            for first in range(0, rows.numel(), few):
                part = slice(first, first + few)
                q = block.view(-1, 1, 1) * self.q_size + rows[part].view(1, -1, 1)
                cells = self._closure(b, h, q.clamp(max=context.q_len - 1), kv.clamp(max=context.kv_len - 1))
                yield blocks, part, cells & (q < context.q_len) & (kv < context.kv_len)
