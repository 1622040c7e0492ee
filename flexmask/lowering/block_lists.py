"""The index lists of a BlockMask: ``num_blocks``, ``int32[B, H, rows]``, and ``indices``, ``int32[B, H, rows, columns]``.

Only the first ``num_blocks`` indices of a row are defined. Lists from a grid have room for every block. Lists from intervals
are packed: a strided view of the shape that kernels expect over storage that follows the listed blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from flexmask import _sync
from flexmask._transforms import are_ints, is_captured
from flexmask.blocks.layout import Entries, rank_in_row
from flexmask.blocks.sparse import union
from flexmask.intervals.rows import Rows

#: ``num_blocks`` and ``indices``.
BlockList: TypeAlias = tuple[Tensor, Tensor]

#: Blocks of a grid up to which it is faster to rank all of them than to pick out those that are set.
SMALL = 2**13
#: The least distance between the packed lists of two rows.
LEAST_PITCH = 64
#: Whether all of FlexAttention's CUDA kernels read the lists of full blocks with the strides of those of partial blocks.
SHARED_STRIDES = torch.__version__ < "2.12"
#: The fewest block rows with which no decoding kernel runs. Those kernels share the strides in every version.
MIN_PREFILL_ROWS = 128


def grid_lists(grids: Sequence[Tensor], batch: int, heads: int | None) -> list[BlockList]:
    """The lists of grids: of each grid by query block, then by key block.

    Args:
        grids: ``bool[B', H', q_blocks, kv_blocks]``, each of which broadcasts to the shape of the first.
        batch: B of the lists.
        heads: H of the lists, which are copied for each head; None for the H of the grids.
    """
    shape = batch, *grids[0].shape[1:]
    if is_captured():
        grids = [grid.to(torch.int32) for grid in grids]  # Inductor transposes it about eight times faster than bool
    by_query = [grid.expand(shape) for grid in grids]
    if not _sync.needs_sync(by_query[0]) and by_query[0].numel() > SMALL:
        lists = [block_list for grid in by_query for block_list in _sparse_lists(grid) or _ranked_lists([grid])]
    else:
        lists = _ranked_lists(by_query)
    if heads is None or heads == shape[1]:
        return lists
    return [(number.repeat(1, heads, 1), indices.repeat(1, heads, 1, 1)) for number, indices in lists]


def run_lists(start: Tensor, stop: Tensor, batch: int, heads: int | None, width: int) -> list[BlockList]:
    """The lists of one block row, whose blocks are one run, by query block and by key block.

    Args:
        start: the first block, ``int32[B', H', 1, 1]``.
        stop: one more than the last block, shaped like ``start``.
        batch: B of the lists.
        heads: H of the lists; None for that of the run.
        width: key blocks.
    """
    size = batch, heads or start.shape[1], 1
    start, stop = (end.squeeze(-1).expand(size) for end in (start, stop))
    column = torch.arange(width, dtype=torch.int32, device=start.device)
    indices = (start.unsqueeze(-1) + column).clamp(max=width - 1)
    listed = ((column >= start) & (column < stop)).to(torch.int32)
    return [(stop - start, indices), (listed, torch.zeros((*listed.shape, 1), dtype=torch.int32, device=start.device))]


def no_lists(like: Sequence[BlockList]) -> list[BlockList]:
    """Lists of no blocks in the shapes of others."""
    return [(torch.zeros_like(number), torch.zeros_like(indices)) for number, indices in like]


def _sparse_lists(grid: Tensor) -> list[BlockList] | None:
    """The lists of a grid of few blocks, by query block and by key block, else None; forces a host sync."""
    entries = Entries.from_grid(grid)
    if entries.row.numel() >= grid.numel() // 8:
        return None
    height, width = grid.shape[-2:]
    line, row = entries.row.div(height, rounding_mode="floor"), entries.row.remainder(height)
    of_keys, order = (line * width + entries.column).sort(stable=True)
    by_key = Entries(of_keys, row[order])
    return [_list_of_entries(entries, grid.shape), _list_of_entries(by_key, grid.mT.shape)]


def _list_of_entries(entries: Entries, shape: torch.Size) -> BlockList:
    """The list of blocks in the order of rows and columns, of a grid ``[B, H, rows, columns]``."""
    count = torch.bincount(entries.row, minlength=shape[:-1].numel())
    indices = pack(entries.column.to(torch.int32), entries.row, rank_in_row(entries.row, count), shape, shape[-1])
    return count.to(torch.int32).view(shape[:-1]), indices


def _ranked_lists(grids: Sequence[Tensor]) -> list[BlockList]:
    """The lists of grids of one shape, of bool, or of 0 and 1 as int32, without a host sync."""
    by_key = [grid.mT for grid in grids]
    is_square = grids[0].shape == by_key[0].shape
    lists = _ranks([*grids, *by_key]) if is_square else _ranks(grids) + _ranks(by_key)  # each operation takes a kernel launch
    return [block_list for pair in zip(lists[: len(grids)], lists[len(grids) :], strict=True) for block_list in pair]


def _ranks(grids: Sequence[Tensor]) -> list[BlockList]:
    """The blocks that are set in each row of grids of one shape, in the order of columns."""
    width = grids[0].shape[-1]
    if are_ints(width) and width == 1:
        # Copies, as the grids of a graph are int32 already, and may broadcast.
        zeros = [torch.zeros(grid.shape, dtype=torch.int32, device=grid.device) for grid in grids]
        return [(grid.squeeze(-1).to(torch.int32, copy=True), zero) for grid, zero in zip(grids, zeros, strict=True)]
    stacked = torch.stack(list(grids))
    # From 1: each set block goes to the place of its rank, the others to a place that is cut off.
    rank = stacked.cumsum(-1, dtype=torch.int32 if stacked.dtype == torch.int32 else torch.int64)
    columns = torch.arange(width, dtype=torch.int32, device=stacked.device).expand_as(stacked)
    indices = torch.zeros((*stacked.shape[:-1], width + 1), dtype=torch.int32, device=stacked.device)
    indices.scatter_(-1, (rank * stacked).long(), columns)
    if is_captured():
        number = rank[..., -1].clone(memory_format=torch.contiguous_format)
        return list(zip(_parts(number), _parts(indices[..., 1:].clone(memory_format=torch.contiguous_format)), strict=True))
    # Each list has its own memory: the offsets of parts of one tensor differ, and torch.compile would compile for each length.
    return [
        (last.to(torch.int32, memory_format=torch.contiguous_format), part[..., 1:].clone(memory_format=torch.contiguous_format))
        for last, part in zip(rank[..., -1].unbind(), indices.unbind(), strict=True)
    ]


def _parts(stacked: Tensor) -> list[Tensor]:
    """As ``unbind`` of a new contiguous tensor, with the strides of contiguous tensors also along axes of size 1.

    CUDA kernels multiply the stride of heads by their number for that of sequences. In code that Inductor compiles, other views
    than ``as_strided`` of a tensor that is computed there have stride 0 along an axis of size 1.
    """
    size = list(stacked.shape[1:])
    strides = [math.prod(size[axis + 1 :]) for axis in range(len(size))]
    return [stacked.as_strided(size, strides, part * math.prod(size)) for part in range(len(stacked))]


def interval_lists(sets: Sequence[Rows], batch: int, heads: int | None, *, packed: bool) -> list[BlockList]:
    """The lists of sets of blocks: of each set by query block, then by key block.

    Args:
        sets: intervals of key blocks ``[B', H', q_blocks, K]`` that broadcast.
        batch: B of the lists.
        heads: H of the lists; None for the H of the sets.
        packed: whether the lists have room for their members alone, or for all blocks.
    """
    shape = batch, heads or sets[0].lo.shape[1], sets[0].lo.shape[2]
    by_query = [blocks.expand(*shape) for blocks in sets]
    by_key = [_transpose(blocks) for blocks in by_query]
    pairs = zip(_lists(by_query, packed), _lists(by_key, packed), strict=True)
    return [side for pair in pairs for side in pair]


def _lists(sets: list[Rows], packed: bool) -> list[BlockList]:
    if not packed:
        return [_spaced_list(rows, rows.kv_len) for rows in sets]
    if SHARED_STRIDES or sets[0].lo.shape[2] < MIN_PREFILL_ROWS:
        return _packed_lists(sets)
    return [packed_list for rows in sets for packed_list in _packed_lists([rows])]


def _packed_lists(sets: list[Rows]) -> list[BlockList]:
    """Lists with room for their members alone, which all have the same strides.

    Only the first ``num_blocks`` indices of a row are defined. So the indices of a row start at a fixed distance from those of
    the row above, and the view of a row reads on into the rows below: every value there is the index of some block. The
    distance is a power of two, so that few masks differ in it. The last row of each head has room for all blocks: it is long
    where the last queries fill no block, of which none is full.
    """
    for pitch in (0, 1) if all(rows.slots == 1 for rows in sets) else ():
        diagonals = [_diagonal_indices(rows, pitch) for rows in sets]
        if None not in diagonals:
            pairs = zip(sets, diagonals, strict=True)
            return [(rows.counts().to(torch.int32), indices) for rows, indices in pairs if indices is not None]
    most = max(most_above(rows.counts()) for rows in sets)
    pitch = min(sets[0].kv_len, max(LEAST_PITCH, 1 << (most - 1).bit_length()))
    return [_spaced_list(rows, pitch) for rows in sets]


def most_above(number: Tensor) -> int:
    """The most members of a row that is not the last one of its head, at least 1; forces a host sync."""
    return max(1, int(number[..., :-1].max())) if number.shape[-1] > 1 else 1


def _spaced_list(rows: Rows, pitch: int) -> BlockList:
    """A list whose rows start at a distance of ``pitch``; no row has more members, but for the last one of each head."""
    shape, width, count = rows.lo.shape[:3], rows.kv_len, rows.counts()
    if rows.slots == 1:
        storage = torch.zeros((*shape[:2], shape[2] * pitch + width - pitch), dtype=torch.int32, device=count.device)
        run = torch.arange(width, dtype=torch.int32, device=count.device)
        above = storage[..., : shape[2] * pitch].unflatten(-1, (shape[2], pitch))
        torch.add(rows.lo, run[:pitch], out=above).clamp_(max=width - 1)
        if pitch < width:
            torch.add(rows.lo[:, :, -1], run[pitch:], out=storage[..., shape[2] * pitch :]).clamp_(max=width - 1)
        indices = _with_pitch(storage, torch.Size((*shape, width)), pitch)
    else:
        entries = Entries.from_rows(rows)
        rank = rank_in_row(entries.row, count.flatten())
        indices = pack(entries.column.to(torch.int32), entries.row, rank, torch.Size((*shape, width)), pitch)
    return count.to(torch.int32), indices


def pack(values: Tensor, row: Tensor, rank: Tensor, shape: torch.Size, pitch: int) -> Tensor:
    """Values at ranks of rows in a view ``[..., rows, columns]`` whose rows start at a distance of ``pitch``.

    The last row of each ``[rows, columns]`` has room for all columns, so that its ranks may be beyond ``pitch``.
    """
    *groups, height, width = shape
    size = (height - 1) * pitch + width
    storage = values.new_zeros(math.prod(groups) * size)
    at = row.div(height, rounding_mode="floor") * size + row.remainder(height) * pitch + rank
    return _with_pitch(storage.scatter_(0, at, values), shape, pitch)


def _with_pitch(storage: Tensor, shape: torch.Size, pitch: int) -> Tensor:
    *groups, height, width = shape
    size = (height - 1) * pitch + width
    strides = [math.prod(groups[axis + 1 :]) * size for axis in range(len(groups))]
    return storage.as_strided(shape, (*strides, pitch, 1))


def _diagonal_indices(rows: Rows, pitch: int) -> Tensor | None:
    """The indices as views of one range, where each row is a run that starts ``pitch`` after that of the row above, else None.

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


def _transpose(rows: Rows) -> Rows:
    """For each column the rows that hold it.

    Neighboring rows differ in few columns. Where a row holds a column that the row above does not, an interval of that column
    starts; where the row above alone holds it, an interval stops.
    """
    batch, heads, height, _ = rows.lo.shape
    width, edge = rows.kv_len, torch.full_like(rows.lo[:, :, :1], rows.kv_len)
    here = Rows(torch.cat((rows.lo, edge), 2), torch.cat((rows.hi, edge), 2), width)
    above = Rows(torch.cat((edge, rows.lo), 2), torch.cat((edge, rows.hi), 2), width)

    def by_column(changes: Rows) -> Tensor:
        """The changes sorted by column and then by row, each as one number."""
        entries = Entries.from_rows(changes)
        group, row = entries.row // (height + 1), entries.row % (height + 1)
        return ((group * width + entries.column) * (height + 1) + row).sort().values

    starts, stops = by_column(here - above), by_column(above - here)
    shape = torch.Size((batch, heads, width))
    return union(starts // (height + 1), starts % (height + 1), stops % (height + 1), shape, height)
