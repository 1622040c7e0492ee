"""Comparing two masks as sets of cells, in memory that follows their intervals.

Where both masks have exact rows, so has their difference. Where a part of one does not separate, the blocks that its rows
leave open are decided from ranges of values or cell by cell, a bounded number at a time, so that the answer is exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from flexmask.blocks.entries import BlockCells, Entries
from flexmask.blocks.sparse import known_blocks
from flexmask.blocks.survey import Survey
from flexmask.errors import LoweringError
from flexmask.expr.mask import And, Mask, Not
from flexmask.intervals.bind import bind
from flexmask.intervals.bounds import analyse
from flexmask.intervals.context import Context
from flexmask.intervals.rows import Rows
from flexmask.tracing.as_mask import MaskLike, as_mask

__all__ = ["Cell", "Difference", "difference"]

#: Queries and keys in a block of cells that are decided together.
SIZE = 128

Shape: TypeAlias = tuple[int, int, int]


class Cell(NamedTuple):
    """One cell of a mask. ``q`` counts from 0 whatever the offset, as in a ``mask_mod``."""

    b: int
    h: int
    q: int
    kv: int

    def __str__(self) -> str:
        return ", ".join(f"{axis}={place}" for axis, place in self._asdict().items())


@dataclass(frozen=True)
class Difference:
    """How two masks differ at given lengths, over all sequences and heads that they distinguish; true where they do.

    Attributes:
        cells: all cells.
        only_self: cells that only the first mask shows.
        only_other: cells that only the second mask shows.
        first_self: the first cell that only the first mask shows, in the order of b, h, q and kv; None where there is none.
        first_other: the first cell that only the second mask shows, likewise.
    """

    cells: int
    only_self: int
    only_other: int
    first_self: Cell | None
    first_other: Cell | None

    def __bool__(self) -> bool:
        return self.only_self + self.only_other > 0

    def __str__(self) -> str:
        if not self:
            return f"the masks agree in all {self.cells:,} cells"
        parts = [
            f"{count:,} only in the {which} mask, the first at {first}"
            for which, count, first in (("first", self.only_self, self.first_self), ("second", self.only_other, self.first_other))
            if count
        ]
        return f"{self.only_self + self.only_other:,} of {self.cells:,} cells differ: {'; '.join(parts)}"


def difference(
    mask: Mask,
    other: MaskLike,
    q_len: int,
    kv_len: int | None = None,
    batch: int | None = None,
    heads: int | None = None,
    q_offset: int | Tensor = 0,
    device: torch.device | str | None = None,
) -> Difference:
    """How two masks differ: see :meth:`flexmask.Mask.difference`."""
    other = as_mask(other, "other", device=device)
    contexts = _contexts((mask, other), q_len, kv_len, batch, heads, q_offset, device)
    shape = (
        _size("batch", [context.batch for context in contexts]),
        _size("heads", [context.heads for context in contexts]),
        q_len,
    )
    bounds = [analyse(context) for context in contexts]
    found = []
    for place, (own, its) in enumerate(((mask, other), (other, mask))):
        if all(part.exact for part in bounds):
            found.append(_in_rows(bounds[place].lower - bounds[1 - place].lower, shape))
            continue
        sizes = (batch or (shape[0] if shape[0] > 1 else None), heads or (shape[1] if shape[1] > 1 else None))
        found.append(_shown(bind(And.make((own, Not.make(its))), q_len, kv_len, *sizes, q_offset, contexts[0].device), shape))
    (only_self, first_self), (only_other, first_other) = found
    cells = shape[0] * shape[1] * q_len * contexts[0].kv_len
    return Difference(cells, only_self, only_other, first_self, first_other)


def _contexts(
    masks: tuple[Mask, Mask],
    q_len: int,
    kv_len: int | None,
    batch: int | None,
    heads: int | None,
    q_offset: int | Tensor,
    device: torch.device | str | None,
) -> list[Context]:
    """The contexts of both masks, on one device: that of the tensors of either where none is given."""
    contexts = [bind(mask, q_len, kv_len, batch, heads, q_offset, device) for mask in masks]
    where = next((context.device for context in contexts if context.device.type != "cpu"), contexts[0].device)
    return [
        context if context.device == where else bind(mask, q_len, kv_len, batch, heads, q_offset, where)
        for mask, context in zip(masks, contexts, strict=True)
    ]


def _size(keyword: str, sizes: list[int]) -> int:
    if len({size for size in sizes if size > 1}) > 1:
        raise LoweringError(f"the masks are for two sizes of {keyword}: {sizes[0]} and {sizes[1]}; compare masks of one size")
    return max(sizes)


def _in_rows(rows: Rows, shape: Shape) -> tuple[int, Cell | None]:
    """How many cells exact rows show, and the first."""
    counts = rows.counts().expand(shape)
    total = int(counts.sum())
    if not total:
        return 0, None
    b, h, q = _place(int((counts > 0).flatten().to(torch.uint8).argmax()), shape)
    return total, Cell(b, h, q, int(rows.expand(*shape).lo[b, h, q, 0]))


def _place(row: int, shape: Shape) -> Shape:
    return row // shape[2] // shape[1], row // shape[2] % shape[1], row % shape[2]


def _shown(context: Context, shape: Shape) -> tuple[int, Cell | None]:
    """How many cells the mask of a context shows, and the first."""
    bounds = analyse(context)
    if bounds.exact:
        return _in_rows(bounds.lower, shape)
    partial, full, left_open = known_blocks(bounds, context, SIZE, SIZE)
    blocks = (context.batch, context.heads, -(-context.q_len // SIZE))
    unsure = (partial if left_open is None else partial | left_open).expand(*blocks)
    full = full.expand(*blocks)
    total = int(full.counts().sum()) * SIZE * SIZE
    rows = [int(row) for row in full.counts().flatten().nonzero()[:1]]
    for entries, counts in Survey(context, SIZE, SIZE).counted(unsure):
        total += int(counts.sum())
        rows += [int(row) for row in entries.row[counts.any(1)][:1]]
    repeated = shape[0] * shape[1] // (context.batch * context.heads)
    return (total * repeated, _first(min(rows), unsure, full, context, blocks)) if total else (0, None)


def _first(row: int, unsure: Rows, full: Rows, context: Context, blocks: Shape) -> Cell:
    """The first cell that is shown in a row of blocks, of which some is."""
    b, h, block = _place(row, blocks)
    # Of a full block the first cell counts, of the others each.
    found = [(0, int(key) * SIZE) for key in full.lo[b, h, block, :1] if key < full.kv_len]
    members = Entries.of(Rows(unsure.lo[b, h, block].view(1, 1, 1, -1), unsure.hi[b, h, block].view(1, 1, 1, -1), unsure.kv_len))
    for part, queries, cells in BlockCells(context, SIZE, SIZE).of(Entries(members.row + row, members.column)):
        at, q, kv = cells.nonzero().unbind(-1)
        if at.numel():
            place = (q + queries.start) * context.kv_len + members.column[part][at].long() * SIZE + kv
            found.append(divmod(int(place.min()), context.kv_len))
    q_start, key = min(found)
    return Cell(b, h, block * SIZE + q_start, key)
