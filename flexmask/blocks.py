"""Single blocks of a mask: how they are counted out, and the evaluation of their cells, a bounded number at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self, TypeAlias

import torch
from torch import Tensor

from flexmask import devices
from flexmask.evaluation import hoisted_closure
from flexmask.frame import Frame
from flexmask.rows import Rows

__all__ = ["Entries", "Listed", "divided", "divided_up", "evaluated"]

#: Cells evaluated at a time, which bounds the memory of intermediate results: on the CPU they stay in its caches.
CHUNK = devices.Limit(cpu=2**18, elsewhere=2**24)

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
        """The members of every row; waits for the device."""
        length = (rows.hi - rows.lo).flatten().long()
        total = int(length.sum())
        interval = torch.repeat_interleave(length, output_size=total)
        within = torch.arange(total, device=length.device) - (length.cumsum(0) - length)[interval]
        return cls(interval // rows.slots, rows.lo.flatten()[interval] + within)

    @classmethod
    def marked(cls, grid: Tensor) -> Self:
        """The members where ``bool[B, H, q, columns]`` is True; waits for the device."""
        at = grid.flatten().nonzero().squeeze(-1)
        row = at.div(grid.shape[-1], rounding_mode="floor")
        return cls(row, at - row * grid.shape[-1])

    @classmethod
    def every(cls, grid: Tensor) -> Self:
        """All members that there could be, whether or not they are marked."""
        row, column = (torch.arange(size, device=grid.device) for size in (grid.shape[:-1].numel(), grid.shape[-1]))
        return cls(row.repeat_interleave(column.numel(), output_size=grid.numel()), column.repeat(row.numel()))

    def split(self, size: int) -> Iterator[Self]:
        """The same members, at most ``size`` at a time."""
        for row, column in zip(self.row.split(size), self.column.split(size), strict=True):
            yield type(self)(row, column)


def divided(ends: Tensor, size: int) -> Tensor:
    """Rounded down; a shift where the size is a power of two, since integer division is slow."""
    return ends >> (size.bit_length() - 1) if size & (size - 1) == 0 else ends.div(size, rounding_mode="floor")


def divided_up(ends: Tensor, size: int) -> Tensor:
    """Rounded up."""
    return divided(ends + (size - 1), size)


def evaluated(entries: Entries, frame: Frame, q_size: int, kv_size: int) -> Iterator[tuple[Entries, Tensor]]:
    """Evaluates single blocks of a mask, a bounded number of cells at a time.

    Args:
        entries: query blocks as rows, key blocks as columns.
        frame: the frame of the mask's lowering.
        q_size: queries in a block.
        kv_size: keys in a block.

    Yields:
        Some blocks, and their cells ``bool[n, min(q_size, q_len), min(kv_size, kv_len)]``, False beyond the ends of the mask.
    """
    closure = hoisted_closure(frame)
    q_blocks = -(-frame.q_len // q_size)
    device, height, width = entries.row.device, min(q_size, frame.q_len), min(kv_size, frame.kv_len)
    for part in entries.split(max(1, CHUNK.on(entries.row) // (height * width))):
        group = part.row // q_blocks
        q = (part.row % q_blocks).view(-1, 1, 1) * q_size + torch.arange(height, device=device).view(1, -1, 1)
        kv = part.column.view(-1, 1, 1) * kv_size + torch.arange(width, device=device)
        b, h = (group // frame.heads).view(-1, 1, 1), (group % frame.heads).view(-1, 1, 1)
        inside = (q < frame.q_len) & (kv < frame.kv_len)
        yield part, closure(b, h, q.clamp(max=frame.q_len - 1), kv.clamp(max=frame.kv_len - 1)) & inside
