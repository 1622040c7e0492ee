"""Blocks: which blocks of a mask are empty, partial and full, worked out from its rows.

A block row is a set of key blocks, and sets of blocks are intervals too: everything here is :class:`flexmask.rows.Rows` over
block indices, with query blocks as rows. No tensor has the size of q_len x kv_len, and none that of a row for every block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flexmask.analysis import RowBounds
from flexmask.closures import frame_closure
from flexmask.frame import Frame
from flexmask.rows import Rows

__all__ = ["Blocks", "Entries", "blocks_of", "evaluated", "union"]

#: Cells evaluated at a time, which bounds the memory of intermediate results.
CHUNK = 2**22


@dataclass(frozen=True, eq=False)
class Blocks:
    """The partial and the full blocks of a mask, as sets of key blocks for each query block.

    Attributes:
        partial: blocks of which some cell is visible, but not all ``q_size * kv_size``.
        full: blocks of which every cell is visible; a ragged last block never is.
        q_size: queries in a block.
        kv_size: keys in a block.
    """

    partial: Rows
    full: Rows
    q_size: int
    kv_size: int


@dataclass(frozen=True, eq=False)
class Entries:
    """Single members of the sets of some rows, in order: ``row`` counts over ``[B, H, q]`` flattened."""

    row: Tensor
    column: Tensor

    @classmethod
    def of(cls, rows: Rows) -> Entries:
        """The members of every row; waits for the device."""
        length = (rows.hi - rows.lo).flatten().long()
        total = int(length.sum())
        interval = torch.repeat_interleave(length, output_size=total)
        within = torch.arange(total, device=length.device) - (length.cumsum(0) - length)[interval]
        return cls(interval // rows.slots, rows.lo.flatten()[interval] + within)


def blocks_of(bounds: RowBounds, frame: Frame, q_size: int, kv_size: int) -> Blocks:
    """Classifies the blocks of a mask; evaluates cells only in blocks that its rows leave open.

    Args:
        bounds: the rows of the mask.
        frame: the frame of its lowering.
        q_size: queries in a block.
        kv_size: keys in a block.
    """
    touched, full = _touched(bounds.upper, frame, q_size, kv_size), _covered(bounds.lower, frame, q_size, kv_size)
    if bounds.exact:
        return Blocks(touched - full, full, q_size, kv_size)
    surely_partial = _touched(bounds.lower, frame, q_size, kv_size) - _covered(bounds.upper, frame, q_size, kv_size)
    open_blocks = (touched - full - surely_partial).expand(frame.batch, frame.heads, touched.lo.shape[2])
    entries = Entries.of(open_blocks)
    visible = [entries.row.new_zeros(0), *(block.sum((1, 2)) for _, block in evaluated(entries, frame, q_size, kv_size))]
    cells = torch.cat(visible)
    rows, width = torch.Size(open_blocks.lo.shape[:3]), touched.kv_len

    def found(chosen: Tensor) -> Rows:
        row, column = entries.row[chosen], entries.column[chosen]
        return union(row, column, column + 1, rows, width)

    partial, filled = found((cells > 0) & (cells < q_size * kv_size)), found(cells == q_size * kv_size)
    return Blocks(surely_partial | partial, full | filled, q_size, kv_size)


def _touched(rows: Rows, frame: Frame, q_size: int, kv_size: int) -> Rows:
    """The key blocks of which some row of each query block sees a key."""
    stop = -_divided(-rows.hi, kv_size)
    return _united(_divided(rows.lo, kv_size), stop.masked_fill(rows.lo >= rows.hi, 0), frame, q_size, kv_size)


def _covered(rows: Rows, frame: Frame, q_size: int, kv_size: int) -> Rows:
    """The key blocks of which every row of each query block sees every key: those that no row fails to cover."""
    width = -(-frame.kv_len // kv_size)
    first, last = -_divided(-rows.lo, kv_size), _divided(rows.hi, kv_size)
    if rows.slots == 1 and rows.lo.shape[2] > 1:
        return _common(first.squeeze(-1), last.squeeze(-1), frame, q_size, width)
    empty = first >= last
    outside = ~Rows(first.masked_fill(empty, width), last.masked_fill(empty, width), width).compact()
    missed = _united(outside.lo, outside.hi, frame, q_size, kv_size)
    q_blocks = missed.lo.shape[2]
    complete = torch.arange(q_blocks, device=missed.lo.device) < frame.q_len // q_size
    return ~missed & Rows.where(complete.view(1, 1, -1), width)


def _common(first: Tensor, last: Tensor, frame: Frame, q_size: int, width: int) -> Rows:
    """What all rows of each query block cover where each covers one interval: again one interval, none in a ragged block."""
    complete, q_blocks = frame.q_len // q_size, -(-frame.q_len // q_size)
    shape = (*first.shape[:2], complete, q_size)
    start, stop = (end[:, :, : complete * q_size].reshape(shape) for end in (first, last))
    none = first.new_zeros(*first.shape[:2], q_blocks - complete)
    start, stop = torch.cat((start.amax(3), none), 2), torch.cat((stop.amin(3), none), 2)
    return Rows.spans(start, stop, width)


def _divided(ends: Tensor, size: int) -> Tensor:
    """Rounded down; a shift where the size is a power of two, since integer division is slow."""
    return ends >> (size.bit_length() - 1) if size & (size - 1) == 0 else ends.div(size, rounding_mode="floor")


def _united(start: Tensor, stop: Tensor, frame: Frame, q_size: int, kv_size: int) -> Rows:
    """The union, over the rows of each query block, of intervals of key blocks ``[start, stop)``."""
    batch, heads, q_len, slots = start.shape
    width, q_blocks = -(-frame.kv_len // kv_size), -(-frame.q_len // q_size)
    shape = torch.Size((batch, heads, q_blocks))
    if q_len == 1:  # every row is the same, so each query block has one
        start, stop = start.expand(-1, -1, q_blocks, -1), stop.expand(-1, -1, q_blocks, -1)
        q_len, q_size = q_blocks, 1
    keep = start < stop
    # Rows repeat their neighbours over long stretches: only those that differ from the row above within a block count.
    above = (start[:, :, 1:] == start[:, :, :-1]) & (stop[:, :, 1:] == stop[:, :, :-1])
    if q_size > 1:
        above[:, :, q_size - 1 :: q_size] = False
        keep[:, :, 1:] &= ~above
    at = keep.flatten().nonzero().squeeze(-1)
    line = at // slots
    row = line // q_len * q_blocks + line % q_len // q_size
    return union(row, start.flatten()[at], stop.flatten()[at], shape, width)


def union(row: Tensor, start: Tensor, stop: Tensor, shape: torch.Size, width: int) -> Rows:
    """The union of intervals ``[start, stop)`` with the same ``row``, as rows of the given ``[B, H, q]`` shape."""
    offset = row.long() * (width + 1)  # puts the rows one behind the other on a line, with a gap of one
    start, order = (offset + start).sort()
    reach = (offset + stop)[order].cummax(0).values
    opens = torch.ones_like(start, dtype=torch.bool)
    opens[1:] = start[1:] > reach[:-1]
    closes = torch.ones_like(opens)
    closes[:-1] = opens[1:]
    start, stop = start[opens], reach[closes]
    row = start // (width + 1)
    count = torch.bincount(row, minlength=shape.numel())
    slots = max(1, int(count.max()))
    slot = torch.arange(row.numel(), device=row.device) - (count.cumsum(0) - count)[row]
    ends = []
    for end in (start, stop):
        listed = torch.full((shape.numel(), slots), width, dtype=torch.int32, device=row.device)
        listed[row, slot] = (end - row * (width + 1)).to(torch.int32)
        ends.append(listed.view(*shape, slots))
    return Rows(ends[0], ends[1], width)


def evaluated(entries: Entries, frame: Frame, q_size: int, kv_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Evaluates single blocks of a mask, a bounded number of cells at a time.

    Yields:
        The block rows of some entries, and their cells ``bool[n, q_size, kv_size]``, False beyond the ends of the mask.
    """
    closure = frame_closure(frame)
    q_blocks = -(-frame.q_len // q_size)
    chunk = max(1, CHUNK // (q_size * kv_size))
    for row, column in zip(entries.row.split(chunk), entries.column.split(chunk), strict=True):
        q = (row % q_blocks).view(-1, 1, 1) * q_size + torch.arange(q_size, device=row.device).view(1, -1, 1)
        kv = column.view(-1, 1, 1) * kv_size + torch.arange(kv_size, device=row.device)
        b, h = (row // q_blocks // frame.heads).view(-1, 1, 1), (row // q_blocks % frame.heads).view(-1, 1, 1)
        inside = (q < frame.q_len) & (kv < frame.kv_len)
        yield row, closure(b, h, q.clamp(max=frame.q_len - 1), kv.clamp(max=frame.kv_len - 1)) & inside
