"""The difference of two masks as sets of cells, in memory that follows their key intervals.

Where the key intervals of both masks are exact, so are those of their difference. Otherwise cells are evaluated in the blocks
that the key intervals leave open, a bounded number at a time, so the difference is always exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from flexmask import _sync
from flexmask.blocks.classify import classify
from flexmask.blocks.sparse import BlockSets
from flexmask.expr.mask import And, Mask, Not
from flexmask.intervals.bind import bind
from flexmask.intervals.bounds import analyze
from flexmask.intervals.closures import mask_closure
from flexmask.intervals.context import Context
from flexmask.intervals.rows import Rows
from flexmask.report.stats import row_counts
from flexmask.tracing.trace import MaskLike, as_mask

#: Queries and keys in a block in which cells are evaluated.
SIZE = 128

#: Sequences, heads and queries.
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
    """How two masks differ at given lengths, over all sequences and heads that differ; true where the masks differ.

    Attributes:
        cells: all cells.
        only_self: cells that only the first mask shows.
        only_other: cells that only the second mask shows.
        first_self: the first cell that only the first mask shows, in the order of b, h, q and kv; None where there is none.
        first_other: the first cell that only the second mask shows, in the same way.
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
    contexts = [bind(part, q_len, kv_len, batch, heads, q_offset, device) for part in (mask, other)]
    where = next((context.device for context in contexts if context.device.type != "cpu"), contexts[0].device)
    _sync.check_values(where, "masks are compared by their cells")
    for place, part in enumerate((mask, other)):  # the tensors of either may be on a device that the other is not bound to
        if contexts[place].device != where:
            contexts[place] = bind(part, q_len, kv_len, batch, heads, q_offset, where)
    sizes = [max(context.batch for context in contexts), max(context.heads for context in contexts)]
    if any([context.batch, context.heads] != sizes for context in contexts):
        bind(And.make((mask, other)), q_len, kv_len, batch, heads, q_offset, where)  # raises where the data is for two sizes
    shape = sizes[0], sizes[1], q_len
    bounds = [analyze(context) for context in contexts]
    if all(part.exact for part in bounds):
        one, two = (part.lower for part in bounds)
        sides = [_visible_keys(one - two, shape), _visible_keys(two - one, shape)]
    else:
        groups = [given or (size if size > 1 else None) for given, size in zip((batch, heads), sizes, strict=True)]
        lowering: Any = q_len, kv_len, *groups, q_offset, contexts[0].device
        only = And.make((mask, Not.make(other))), And.make((other, Not.make(mask)))
        sides = [_visible_cells(bind(part, *lowering), shape) for part in only]
    (only_self, first_self), (only_other, first_other) = sides
    cells = shape[0] * shape[1] * q_len * contexts[0].kv_len
    return Difference(cells, only_self, only_other, first_self, first_other)


def first_visible(context: Context) -> Cell | None:
    """The first cell that the mask of a context shows, in the order of b, h, q and kv; None where there is none."""
    return _visible_cells(context, (context.batch, context.heads, context.q_len))[1]


def _visible_cells(context: Context, shape: Shape) -> tuple[int, Cell | None]:
    """How many cells the mask of a context shows, and the first."""
    bounds = analyze(context)
    if bounds.exact:
        return _visible_keys(bounds.lower, shape)
    sets = BlockSets(context, SIZE, SIZE)
    counts = row_counts(bounds, classify(bounds, sets), sets).expand(shape)
    row = _first_row(counts)
    return int(counts.sum()), row and Cell(*row, _first_key(context, *row))


def _visible_keys(rows: Rows, shape: Shape) -> tuple[int, Cell | None]:
    """How many cells exact rows show, and the first."""
    counts = rows.counts().expand(shape)
    row = _first_row(counts)
    return int(counts.sum()), row and Cell(*row, int(rows.expand(*shape).lo[*row, 0]))


def _first_row(counts: Tensor) -> Shape | None:
    """The indices ``b``, ``h``, ``q`` of the first row with a visible key."""
    is_visible = counts > 0
    b, h, q = (int(place) for place in torch.unravel_index(is_visible.to(torch.uint8).argmax(), counts.shape))
    return (b, h, q) if is_visible[b, h, q] else None


def _first_key(context: Context, b: int, h: int, q: int) -> int:
    """The first visible key of a row that has one."""
    sequence, head, query = (torch.tensor(index, device=context.device) for index in (b, h, q))
    return int(mask_closure(context)(sequence, head, query, context.index("kv")).to(torch.uint8).argmax())
