"""Grids of blocks: which blocks of a mask are empty, partial and full, with one truth value for each block.

All sizes follow from the lengths, so nothing here forces a host sync while the rows of the mask are exact. A mask
whose blocks are too many for a grid takes :mod:`flexmask.blocks.sparse` instead.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from flexmask import _sync
from flexmask.blocks.entries import BlockCells, Entries, Listed, divided, divided_up
from flexmask.blocks.survey import Survey
from flexmask.intervals.bounds import RowBounds
from flexmask.intervals.context import Context
from flexmask.intervals.rows import Rows

__all__ = ["BlockGrid", "block_grid"]

#: Blocks of a grid up to which it costs less to rank all of them than to pick out those that are marked.
SMALL = 2**13
#: Cells of a mask up to which all are evaluated where counting the open blocks would force a host sync.
FEW_CELLS = 2**22


@dataclass(frozen=True, eq=False)
class BlockGrid:
    """The partial and the full blocks of a mask, ``bool[B, H, q_blocks, kv_blocks]``.

    Attributes:
        partial: blocks of which some cell is visible, but not all ``q_size * kv_size``.
        full: blocks of which every cell is visible; a ragged last block never is. None where there are fewer queries than a
            block has, as in decoding, whose steps would spend a fifth of their time on lists of nothing.
    """

    partial: Tensor
    full: Tensor | None

    def lists(self, batch: int, heads: int | None, *, separate: bool) -> list[Listed]:
        """The lists of a BlockMask: ``kv`` and ``q``, and if full blocks are separate ``full_kv`` and ``full_q``.

        Args:
            batch: B of the BlockMask.
            heads: H of the BlockMask, None for the mask's own.
            separate: whether full blocks have lists of their own.
        """
        partial = self.partial.expand(batch, *self.partial.shape[1:])
        if self.full is None:
            lists = [_listed(partial), _listed(partial.mT)]
            lists += [_unlisted(partial), _unlisted(partial.mT)] if separate else []
        else:
            full = self.full.expand_as(partial)
            grids = [partial, full] if separate else [partial | full]
            lists = [_listed(part) for grid in grids for part in (grid, grid.mT)]
        if heads is None or heads == partial.shape[1]:
            return lists
        return [(number.repeat(1, heads, 1), indices.repeat(1, heads, 1, 1)) for number, indices in lists]


def _listed(grid: Tensor) -> Listed:
    """The blocks that are marked, in the order of columns."""
    width = grid.shape[-1]
    if width == 1:
        return grid.squeeze(-1).to(torch.int32), torch.zeros(grid.shape, dtype=torch.int32, device=grid.device)
    grid = grid.contiguous()
    if grid.numel() > SMALL and not _sync.needs_sync(grid):
        marked = grid.flatten().nonzero().squeeze(-1)
        if marked.numel() < grid.numel() // 8:
            return _listed_few(marked, grid)
    rank = grid.cumsum(-1)  # from 1: each marked block goes to the place of its rank, the others to one that is cut off
    columns = torch.arange(width, dtype=torch.int32, device=grid.device).expand_as(grid)
    listed = torch.zeros((*grid.shape[:-1], width + 1), dtype=torch.int32, device=grid.device)
    listed.scatter_(-1, rank * grid, columns)
    return rank[..., -1].to(torch.int32), listed[..., 1:].contiguous()


def _listed_few(marked: Tensor, grid: Tensor) -> Listed:
    """The same from the places of the marked blocks, in time that follows their number."""
    width = grid.shape[-1]
    row = marked.div(width, rounding_mode="floor")
    count = torch.bincount(row, minlength=grid.numel() // width)
    first = count.cumsum(0) - count
    rank = torch.arange(row.numel(), device=grid.device) - first[row]
    listed = torch.zeros(grid.numel(), dtype=torch.int32, device=grid.device)
    listed.scatter_(0, row * width + rank, (marked - row * width).to(torch.int32))
    return count.to(torch.int32).view(grid.shape[:-1]), listed.view(grid.shape)


def _unlisted(grid: Tensor) -> Listed:
    """The lists of no blocks."""
    number = torch.zeros(grid.shape[:-1], dtype=torch.int32, device=grid.device)
    return number, torch.zeros(grid.shape, dtype=torch.int32, device=grid.device)


def block_grid(bounds: RowBounds, context: Context, q_size: int, kv_size: int) -> BlockGrid:
    """Classifies the blocks of a mask; evaluates cells only in blocks that its rows leave open.

    Args:
        bounds: the rows of the mask.
        context: the context of its lowering.
        q_size: queries in a block.
        kv_size: keys in a block.
    """
    sizes = q_size, kv_size
    touched, full = _touched(bounds.upper, context, *sizes), _covered(bounds.lower, context, *sizes)
    if bounds.exact:
        return BlockGrid(touched if full is None else touched & ~full, full)
    shape = context.batch, context.heads, -(-context.q_len // q_size), -(-context.kv_len // kv_size)
    full = torch.zeros_like(touched) if full is None else full
    covered = _covered(bounds.upper, context, *sizes)
    partial = _touched(bounds.lower, context, *sizes)
    partial = partial if covered is None else partial & ~covered
    partial, full = partial.expand(shape).clone(), full.expand(shape).clone()
    open_blocks = touched & ~full & ~partial
    # Counting the open blocks would force a host sync; evaluating a few cells too many does not.
    if _sync.needs_sync(partial) and partial.numel() * min(q_size, context.q_len) * min(kv_size, context.kv_len) <= FEW_CELLS:
        entries = Entries.every(partial)
        counts = torch.zeros_like(entries.row)
        for blocks, _, cells in BlockCells(context, *sizes).of(entries):
            counts[blocks] += cells.sum((1, 2))
        found = (counts > 0) & (counts < q_size * kv_size), counts == q_size * kv_size
    else:
        entries = Entries.marked(open_blocks)
        found = Survey(context, *sizes).classes(entries)
    place = entries.row * shape[-1] + entries.column
    partial.view(-1)[place], full.view(-1)[place] = found
    return BlockGrid(partial, full)


def _touched(rows: Rows, context: Context, q_size: int, kv_size: int) -> Tensor:
    """The blocks of which some row sees a key."""
    width = -(-context.kv_len // kv_size)
    start, stop = divided(rows.lo, kv_size), divided_up(rows.hi, kv_size)
    if rows.lo.shape[2] == 1:
        return _between(start, stop.where(rows.lo < rows.hi, 0), width)
    return _counted(start.masked_fill(rows.lo >= rows.hi, width), stop, q_size, width) > 0


def _covered(rows: Rows, context: Context, q_size: int, kv_size: int) -> Tensor | None:
    """The blocks of which every row sees every key, or None where there are too few queries for any."""
    complete, width = context.q_len // q_size, -(-context.kv_len // kv_size)
    if not complete:
        return None
    if rows.lo.shape[2] == 1:
        all_rows = torch.arange(-(-context.q_len // q_size), device=rows.lo.device) < complete
        return _between(divided_up(rows.lo, kv_size), divided(rows.hi, kv_size), width) & all_rows.unsqueeze(-1)
    if rows.slots == 1:  # what all rows of a block cover is one interval again
        lo, hi = (end[:, :, : complete * q_size].unflatten(2, (complete, q_size)) for end in (rows.lo, rows.hi))
        common = _between(divided_up(lo.amax(3), kv_size), divided(hi.amin(3), kv_size), width)
        return F.pad(common, (0, 0, 0, -(-context.q_len // q_size) - complete))
    start, stop = divided_up(rows.lo, kv_size), divided(rows.hi, kv_size)
    return _counted(start, torch.maximum(start, stop), q_size, width) == q_size


def _between(start: Tensor, stop: Tensor, width: int) -> Tensor:
    """The blocks in some interval ``[start, stop)``, given ``[B, H, rows, K]``: ``bool[B, H, rows, width]``."""
    column = torch.arange(width, dtype=torch.int32, device=start.device)
    if start.shape[-1] == 1:
        return (column >= start) & (column < stop)
    return ((column >= start.unsqueeze(-1)) & (column < stop.unsqueeze(-1))).any(3)


def _counted(start: Tensor, stop: Tensor, q_size: int, width: int) -> Tensor:
    """How many rows of each query block have an interval ``[start, stop)`` of key blocks that holds a block."""
    batch, heads, q_len, _ = start.shape
    q_size = min(q_size, q_len)
    edges = torch.zeros((batch, heads, -(-q_len // q_size), width + 1), dtype=torch.int32, device=start.device)
    for ends, step in ((start, 1), (stop, -1)):
        if q_len % q_size:
            ends = F.pad(ends, (0, 0, 0, -q_len % q_size), value=width)
        at = ends.long().view(*edges.shape[:3], -1)
        edges.scatter_add_(-1, at, edges.new_full((), step).expand_as(at))
    return edges[..., :width].cumsum_(-1)
