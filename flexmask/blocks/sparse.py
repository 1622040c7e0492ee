"""Sets of blocks: which blocks of a mask are empty, partial and full, worked out from its rows.

A block row is a set of key blocks, and sets of blocks are intervals too: everything here is
:class:`flexmask.intervals.rows.Rows` over block indices, with query blocks as rows. No tensor has the size of q_len x kv_len,
and only lists with room for all blocks have that of q_blocks x kv_blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from flexmask.blocks.entries import Entries, Listed, divided, divided_up
from flexmask.blocks.survey import Survey
from flexmask.intervals.bounds import RowBounds
from flexmask.intervals.context import Context
from flexmask.intervals.rows import Rows

__all__ = ["BlockSets", "block_sets", "known_blocks"]

#: Intervals of blocks as their first places and those behind their last, ``int64[n]`` each, on one line of all rows.
Lines: TypeAlias = tuple[Tensor, Tensor]

#: The least distance between the lists of two rows.
LEAST_PITCH = 64
#: Whether all of FlexAttention's CUDA kernels read the lists of full blocks with the strides of those of partial blocks.
SHARED_STRIDES = torch.__version__ < "2.12"
#: Block rows from which on no decoding kernel runs. Those kernels share the strides in every version.
DECODING = 128


@dataclass(frozen=True, eq=False)
class BlockSets:
    """The partial and the full blocks of a mask, as sets of key blocks for each query block.

    Attributes:
        partial: blocks of which some cell is visible, but not all ``q_size * kv_size``.
        full: blocks of which every cell is visible; a ragged last block never is.
    """

    partial: Rows
    full: Rows

    def lists(self, batch: int, heads: int | None, *, separate: bool, packed: bool) -> list[Listed]:
        """The lists of a BlockMask: ``kv`` and ``q``, and if full blocks are separate ``full_kv`` and ``full_q``.

        Args:
            batch: B of the BlockMask.
            heads: H of the BlockMask, None for the mask's own.
            separate: whether full blocks have lists of their own.
            packed: whether the lists have room for their members alone, or for all blocks.
        """
        shape = batch, heads or self.partial.lo.shape[1], self.partial.lo.shape[2]
        parts = (self.partial, self.full) if separate else (self.partial | self.full,)
        pair = [part.expand(*shape) for part in parts]
        along_q, along_kv = _listed(pair, packed), _listed([_transposed(part) for part in pair], packed)
        return [listed for both in zip(along_q, along_kv, strict=True) for listed in both]


def block_sets(bounds: RowBounds, context: Context, q_size: int, kv_size: int) -> BlockSets:
    """Classifies the blocks of a mask; evaluates cells only in blocks that its rows leave open.

    Args:
        bounds: the rows of the mask.
        context: the context of its lowering.
        q_size: queries in a block.
        kv_size: keys in a block.
    """
    surely_partial, full, open_blocks = known_blocks(bounds, context, q_size, kv_size)
    if open_blocks is None:
        return BlockSets(surely_partial, full)
    survey, rows, width = Survey(context, q_size, kv_size), torch.Size(open_blocks.lo.shape[:3]), open_blocks.kv_len
    found: tuple[list[Lines], list[Lines]] = [], []
    for entries in survey.parts(open_blocks):
        for chosen, lines in zip(survey.classes(entries), found, strict=True):
            place = entries.row[chosen] * (width + 1) + entries.column[chosen]
            lines.append(_merged(place, place + 1))
    if not found[0]:
        return BlockSets(surely_partial, full)
    partial, filled = (_on_lines(lines, rows, width) for lines in found)
    return BlockSets(surely_partial | partial, full | filled)


def known_blocks(bounds: RowBounds, context: Context, q_size: int, kv_size: int) -> tuple[Rows, Rows, Rows | None]:
    """The blocks that the rows of a mask know to be partial and to be full, and those that they leave open, if any."""
    touched, full = _touched(bounds.upper, context, q_size, kv_size), _covered(bounds.lower, context, q_size, kv_size)
    if bounds.exact:
        return touched - full, full, None
    partial = _touched(bounds.lower, context, q_size, kv_size) - _covered(bounds.upper, context, q_size, kv_size)
    return partial, full, (touched - full - partial).expand(context.batch, context.heads, touched.lo.shape[2])


def _touched(rows: Rows, context: Context, q_size: int, kv_size: int) -> Rows:
    """The key blocks of which some row of each query block sees a key."""
    stop = divided_up(rows.hi, kv_size)
    return _united(divided(rows.lo, kv_size), stop.masked_fill(rows.lo >= rows.hi, 0), context, q_size, kv_size)


def _covered(rows: Rows, context: Context, q_size: int, kv_size: int) -> Rows:
    """The key blocks of which every row of each query block sees every key: those that no row fails to cover."""
    width = -(-context.kv_len // kv_size)
    first, last = divided_up(rows.lo, kv_size), divided(rows.hi, kv_size)
    if rows.slots == 1 and rows.lo.shape[2] > 1:
        return _common(first.squeeze(-1), last.squeeze(-1), context, q_size, width)
    empty = first >= last
    outside = ~Rows(first.masked_fill(empty, width), last.masked_fill(empty, width), width).compact()
    missed = _united(outside.lo, outside.hi, context, q_size, kv_size)
    q_blocks = missed.lo.shape[2]
    complete = torch.arange(q_blocks, device=missed.lo.device) < context.q_len // q_size
    return ~missed & Rows.where(complete.view(1, 1, -1), width)


def _common(first: Tensor, last: Tensor, context: Context, q_size: int, width: int) -> Rows:
    """What all rows of each query block cover where each covers one interval: again one interval, none in a ragged block."""
    complete, q_blocks = context.q_len // q_size, -(-context.q_len // q_size)
    shape = (*first.shape[:2], complete, q_size)
    start, stop = (end[:, :, : complete * q_size].reshape(shape) for end in (first, last))
    none = first.new_zeros(*first.shape[:2], q_blocks - complete)
    start, stop = torch.cat((start.amax(3), none), 2), torch.cat((stop.amin(3), none), 2)
    return Rows.spans(start, stop, width)


def _united(start: Tensor, stop: Tensor, context: Context, q_size: int, kv_size: int) -> Rows:
    """The union, over the rows of each query block, of intervals of key blocks ``[start, stop)``."""
    batch, heads, q_len, slots = start.shape
    width, q_blocks = -(-context.kv_len // kv_size), -(-context.q_len // q_size)
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
    return _union(row, start.flatten()[at], stop.flatten()[at], shape, width)


def _union(row: Tensor, start: Tensor, stop: Tensor, shape: torch.Size, width: int) -> Rows:
    """The union of intervals ``[start, stop)`` with the same ``row``, as rows of the given ``[B, H, q]`` shape."""
    offset = row.long() * (width + 1)  # puts the rows one behind the other on a line, with a gap of one
    return _on_lines([_merged(offset + start, offset + stop)], shape, width)


def _merged(start: Tensor, stop: Tensor) -> Lines:
    """The union of intervals, in order."""
    start, order = start.sort()
    reach = stop[order].cummax(0).values
    opens = torch.ones_like(start, dtype=torch.bool)
    opens[1:] = start[1:] > reach[:-1]
    closes = torch.ones_like(opens)
    closes[:-1] = opens[1:]
    return start[opens], reach[closes]


def _on_lines(parts: list[Lines], shape: torch.Size, width: int) -> Rows:
    """Intervals on a line of rows, each of which starts ``width + 1`` behind the one before, as rows of a shape."""
    start, stop = (torch.cat([part[end] for part in parts]) for end in (0, 1))
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


def _listed(pair: list[Rows], packed: bool) -> list[Listed]:
    """The partial and the full blocks as a BlockMask holds them."""
    if not packed:
        return [_spaced(rows, rows.kv_len) for rows in pair]
    if SHARED_STRIDES or pair[0].lo.shape[2] < DECODING:
        return _packed(pair)
    return [listed for rows in pair for listed in _packed([rows])]


def _packed(sets: list[Rows]) -> list[Listed]:
    """Lists with room for their members alone, which all have the same strides.

    Only the first ``number`` indices of a row mean something, so packed storage has no room for the others: each row's
    indices start at a fixed distance from those of the row before, and the view reads on into the next rows. Whatever stands
    there is the index of some block. The distance is a power of two, so that few masks differ in it.
    """
    for pitch in (0, 1) if all(rows.slots == 1 for rows in sets) else ():
        aligned = [_aligned(rows, pitch) for rows in sets]
        if None not in aligned:
            return [(rows.counts().to(torch.int32), line) for rows, line in zip(sets, aligned, strict=True) if line is not None]
    most = max(int(rows.counts().max()) for rows in sets)
    pitch = min(sets[0].kv_len, max(LEAST_PITCH, 1 << (most - 1).bit_length()))
    return [_spaced(rows, pitch) for rows in sets]


def _spaced(rows: Rows, pitch: int) -> Listed:
    """Lists whose rows start ``pitch`` behind each other, which no row has more members than."""
    (batch, heads, height, _), width = rows.lo.shape, rows.kv_len
    count = rows.counts()
    storage = torch.zeros(count.numel() * pitch + width - pitch, dtype=torch.int32, device=count.device)
    if rows.slots == 1:
        run = storage[: count.numel() * pitch].view(batch, heads, height, pitch)
        torch.add(rows.lo, torch.arange(pitch, dtype=torch.int32, device=count.device), out=run).clamp_(max=width - 1)
    else:
        entries = Entries.of(rows)
        before = (count.flatten().cumsum(0) - count.flatten())[entries.row]
        rank = torch.arange(entries.row.numel(), device=count.device) - before
        storage.scatter_(0, entries.row * pitch + rank, entries.column.to(torch.int32))
    strides = heads * height * pitch, height * pitch, pitch, 1
    return count.to(torch.int32), storage.as_strided((batch, heads, height, width), strides)


def _aligned(rows: Rows, pitch: int) -> Tensor | None:
    """The indices where each row is a run that starts ``pitch`` behind that of the row before: all are read off one range.

    So causal masks, whose rows are long, take no memory.
    """
    (batch, heads, height, _), width = rows.lo.shape, rows.kv_len
    row = torch.arange(height, dtype=torch.int32, device=rows.lo.device).unsqueeze(-1)
    origin, used = rows.lo - row * pitch, rows.lo < rows.hi
    first = origin.masked_fill(~used, width).amin(2)
    if bool((origin.masked_fill(~used, -height) > first.unsqueeze(2)).any()):
        return None
    size = width + pitch * (height - 1)
    line = (first + torch.arange(size, dtype=torch.int32, device=row.device)).clamp_(0, width - 1)
    return line.as_strided((batch, heads, height, width), (heads * size, size, pitch, 1))


def _transposed(rows: Rows) -> Rows:
    """For each column the rows that hold it.

    Neighbouring rows differ in few columns. Where a row holds one that the row above does not, an interval of that column
    starts; where it is the other way round, one stops.
    """
    batch, heads, height, _ = rows.lo.shape
    width, edge = rows.kv_len, torch.full_like(rows.lo[:, :, :1], rows.kv_len)
    here = Rows(torch.cat((rows.lo, edge), 2), torch.cat((rows.hi, edge), 2), width)
    above = Rows(torch.cat((edge, rows.lo), 2), torch.cat((edge, rows.hi), 2), width)

    def in_order(changes: Rows) -> Tensor:
        """The changes by column and then by row, each as one number."""
        entries = Entries.of(changes)
        group, row = entries.row // (height + 1), entries.row % (height + 1)
        return ((group * width + entries.column) * (height + 1) + row).sort().values

    starts, stops = in_order(here - above), in_order(above - here)
    shape = torch.Size((batch, heads, width))
    return _union(starts // (height + 1), starts % (height + 1), stops % (height + 1), shape, height)
