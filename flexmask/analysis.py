"""The analysis: from a mask to the rows that it shows.

A mask whose leaves all separate (:mod:`flexmask.separation`) has exact rows. A leaf that does not is bounded: no key for
certain, all keys at most. The bounds go through the algebra, so every mask has rows that are visible for certain and rows
beyond which nothing is visible.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor

from flexmask import devices
from flexmask.algebra import And, Compare, Mask, Not, Or, PerHead, Truth, Xor
from flexmask.closures import greater, lesser
from flexmask.errors import LoweringError
from flexmask.evaluation import Evaluation
from flexmask.frame import Frame
from flexmask.index import Index, Symbol, kv, q
from flexmask.packing import Derived
from flexmask.pieces import Pieces, direction
from flexmask.rows import Rows
from flexmask.runs import ValueRuns, rising_runs, runs, threshold
from flexmask.separation import Linear, Matches, Reaches, Span, separate
from flexmask.tables import Lookup, Param, Table, TensorTable
from flexmask.transforms import can_keep_tensors

__all__ = ["MAX_SLOTS", "RowBounds", "analyse"]

#: More intervals in a row than this are not listed but bounded, which keeps the memory of rows linear.
MAX_SLOTS = 64
#: Queries from which on a mask is hardly lowered twice with the same data: a copy of the data would cost more than it saves.
DECODING = 1024


@dataclass(frozen=True, eq=False)
class RowBounds:
    """The rows of a mask from below and above.

    Attributes:
        lower: keys that are visible for certain.
        upper: keys that may be visible; no other is.
    """

    lower: Rows
    upper: Rows

    @property
    def exact(self) -> bool:
        """Whether the bounds coincide, so that both are the mask itself."""
        return self.lower is self.upper

    @classmethod
    def of(cls, rows: Rows) -> RowBounds:
        """Exact rows, or their hull where they take too many intervals."""
        if rows.slots <= MAX_SLOTS:
            return cls(rows, rows)
        return cls(Rows.nothing(rows.kv_len, rows.lo.device), rows.hull())

    def __and__(self, other: RowBounds) -> RowBounds:
        if self.exact and other.exact:
            return RowBounds.of(self.lower & other.lower)
        return RowBounds(RowBounds.of(self.lower & other.lower).lower, RowBounds.of(self.upper & other.upper).upper)

    def __or__(self, other: RowBounds) -> RowBounds:
        if self.exact and other.exact:
            return RowBounds.of(self.lower | other.lower)
        return RowBounds(RowBounds.of(self.lower | other.lower).lower, RowBounds.of(self.upper | other.upper).upper)

    def __invert__(self) -> RowBounds:
        lower = ~self.upper
        return RowBounds(lower, lower if self.exact else ~self.lower)

    def __xor__(self, other: RowBounds) -> RowBounds:
        return (self & ~other) | (~self & other)


@dataclass(frozen=True, eq=False)
class _Group:
    """Conditions on one column that rises in pieces: not less than any of ``least``, not more than any of ``most``."""

    pieces: Pieces | None
    least: list[Tensor]
    most: list[Tensor]

    def chosen(self, rows: Rows) -> Rows | None:
        """The keys of rows that meet them all, or None where these cannot be listed."""
        if self.pieces is None:
            return None
        pieces, every = self.pieces, torch.zeros((1, 1, 1), dtype=torch.int64, device=rows.lo.device)
        low = reduce(torch.maximum, self.least) if self.least else every + pieces.low
        high = reduce(torch.minimum, self.most) if self.most else every + pieces.low + pieces.size
        return pieces.between(rows, low, high, MAX_SLOTS)


def analyse(frame: Frame) -> RowBounds:
    """The rows of the mask of a frame."""
    return _Analysis(frame).rows(separate(frame.mask))


class _Analysis:
    """One analysis: each index expression is evaluated once along the queries and once along the keys."""

    def __init__(self, frame: Frame) -> None:
        self.frame = frame
        self.queries, self.keys = Evaluation(frame, "q"), Evaluation(frame, "kv")
        self.known: dict[Any, Rows | None] = {}
        self.stepped: dict[Any, Pieces | None] = {}

    def rows(self, mask: Mask) -> RowBounds:
        match mask:
            case And(operands):
                return self.conjunction(operands)
            case Or(operands):
                return self.disjunction([self.rows(operand) for operand in operands])
            case Xor(operands):
                return reduce(lambda a, b: a ^ b, map(self.rows, operands))
            case Not(operand):
                return ~self.rows(operand)
            case PerHead(masks):
                return _stacked([self.rows(mask) for mask in masks])
        return self.leaf(mask)

    def conjunction(self, operands: tuple[Mask, ...]) -> RowBounds:
        """The rows of ``a & b & ...``. What is one interval in each row first becomes one, with the tightest bounds."""
        spans = [operand for operand in operands if _is_span(operand)]
        stepped = [operand for operand in operands if isinstance(operand, Matches | Reaches) and self.plain(operand) is None]
        apart = {id(operand) for operand in (*spans, *stepped)}
        parts = [self.rows(operand) for operand in operands if id(operand) not in apart]
        single = [part.lower for part in parts if part.exact and part.lower.slots == 1]
        others = [part for part in parts if not (part.exact and part.lower.slots == 1)]
        if spans or single or not others:
            others.insert(0, RowBounds.of(self.span(spans, single)))
        return self.refined(reduce(lambda a, b: a & b, others), stepped)

    def disjunction(self, parts: list[RowBounds]) -> RowBounds:
        """The rows of ``a | b | ...``, those that are exact joined at once."""
        exact = [part.lower for part in parts if part.exact]
        others = [part for part in parts if not part.exact]
        if exact and sum(rows.slots for rows in exact) <= MAX_SLOTS:
            others.insert(0, RowBounds.of(Rows.union(exact) if len(exact) > 1 else exact[0]))
            return reduce(lambda a, b: a | b, others)
        return reduce(lambda a, b: a | b, parts)

    def refined(self, bounds: RowBounds, masks: Iterable[Matches | Reaches]) -> RowBounds:
        """The keys within bounds that conditions show whose columns rise only in pieces, those of the fewest pieces first."""
        groups: dict[Any, _Group] = {}
        for mask in masks:
            form = Linear.of(mask.column)
            falls = next(iter(form.terms.values()))[1] < 0
            column = form.times(-1).index() if falls else mask.column
            group = groups.setdefault(column.key, _Group(self.pieces(column), [], []))
            value = -self.queries.tensor(mask.value) if falls else self.queries.tensor(mask.value)
            if falls or isinstance(mask, Matches):
                group.least.append(value)
            if not falls or isinstance(mask, Matches):
                group.most.append(value)
        for group in sorted(groups.values(), key=lambda group: group.pieces.count if group.pieces else 0):
            upper = group.chosen(bounds.upper)
            if upper is None:
                bounds = RowBounds(self.unknown().lower, bounds.upper)
            elif bounds.exact:
                bounds = RowBounds.of(upper)
            else:
                lower = group.chosen(bounds.lower) or self.unknown().lower
                bounds = RowBounds(RowBounds.of(lower).lower, RowBounds.of(upper).upper)
        return bounds

    def pieces(self, column: Index) -> Pieces | None:
        if column.key not in self.stepped:
            values = self.keys.tensor(column)
            self.stepped[column.key] = Pieces.of(values.flatten()) if values.numel() == self.frame.kv_len else None
        return self.stepped[column.key]

    def plain(self, mask: Matches | Reaches) -> Rows | None:
        """The rows of a condition whose column rises, falls or has few runs throughout, else None."""
        if mask.key not in self.known:
            if isinstance(mask, Matches):
                self.known[mask.key] = self.matches(mask)
            else:
                column = self.keys.tensor(mask.column)
                way = direction(column)
                value = self.queries.tensor(mask.value)
                self.known[mask.key] = threshold(column, value, self.frame.kv_len, rises=way > 0) if way else None
        return self.known[mask.key]

    def span(self, masks: list[Mask], rows: Iterable[Rows] = ()) -> Rows:
        """The keys inside all of the spans and of the rows of one interval, and all or none of them by each test of the row."""
        kv_len = self.frame.kv_len
        starts: list[Any] = [0]
        stops: list[Any] = [kv_len]
        for mask in masks:
            if not isinstance(mask, Span):
                stops.append(torch.where(self.queries.tensor(mask), kv_len, 0))
                continue
            starts += [self.queries.values(self.frame.settled(mask.start))] if mask.start is not None else []
            stops += [self.queries.values(self.frame.settled(mask.stop))] if mask.stop is not None else []
        # Small tensors first: the length of each sequence is compared with kv_len, not the bounds of each query.
        start, stop = reduce(greater, sorted(starts, key=_size)), reduce(lesser, sorted(stops, key=_size))
        lo, hi = (_clamped(end, kv_len) for end in (start, stop))
        for part in rows:
            lo, hi = greater(lo, part.lo.squeeze(-1)), lesser(hi, part.hi.squeeze(-1))
        return Rows.spans(self.queries.shaped(lo), self.queries.shaped(hi), kv_len)

    def leaf(self, mask: Mask) -> RowBounds:
        frame, kv_len = self.frame, self.frame.kv_len
        match mask:
            case Truth(value):
                make = Rows.everything if value else Rows.nothing
                return RowBounds.of(make(kv_len, frame.device))
            case _ if _is_span(mask):
                return RowBounds.of(self.span([mask]))
            case Matches() | Reaches():
                found = self.plain(mask)
                return RowBounds.of(found) if found is not None else self.refined(self.leaf(Truth(True)), [mask])
            case Compare() if "q" not in mask.symbols:
                return RowBounds.of(runs(self.keys.tensor(mask), kv_len))
            case Compare():
                return self.unknown()
        raise LoweringError(f"no rows for {type(mask).__name__} {mask}")

    def matches(self, mask: Matches) -> Rows | None:
        frame, column, value = self.frame, mask.column, mask.value
        if _rises(column) and devices.waits(frame.tables[column.table.key]):
            return rising_runs(self.keys.tensor(column), self.queries.tensor(value), frame.kv_len)
        found = self.runs_of(column)
        if frame.q_len == frame.kv_len and isinstance(frame.q_offset, int) and frame.q_offset == 0 and _is_mirrored(mask):
            return found.own(MAX_SLOTS)
        return found.matching(self.queries.tensor(value), MAX_SLOTS)

    def runs_of(self, column: Index) -> ValueRuns:
        """The runs of a column, which are kept until its data changes."""
        stamp = self.stamp(column) if can_keep_tensors() else None
        known, found = column.memo.get("runs", (None, None))
        if stamp is not None and found is not None and _is_same(known, stamp):
            return cast(ValueRuns, found)
        made = ValueRuns.of(self.keys.tensor(column), self.frame.kv_len)
        if stamp is not None:
            column.memo["runs"] = (stamp.clone() if isinstance(stamp, Tensor) else stamp), made
        return made

    def stamp(self, column: Index) -> Any:
        """What changes with the data of a column: something cheaper than its runs, or None where there is no such thing."""
        table = _table_of(column)
        if isinstance(table, Table) and table.constant:
            return self.frame.kv_len, self.frame.batch, self.frame.heads, self.frame.device
        values = self.keys.tensor(column)
        if not devices.waits(values):
            return values if self.frame.q_len < DECODING else None
        if isinstance(table, TensorTable) and not table.tensor.is_inference():
            return table.tensor.data_ptr(), table.tensor._version, self.frame.kv_len, self.frame.batch, self.frame.heads
        return None

    def unknown(self) -> RowBounds:
        kv_len, device = self.frame.kv_len, self.frame.device
        return RowBounds(Rows.nothing(kv_len, device), Rows.everything(kv_len, device))


def _size(values: Any) -> int:
    return values.numel() if isinstance(values, Tensor) else 0


def _clamped(end: Any, kv_len: int) -> Any:
    """An end of spans as a 32-bit position, or as a number where all have the same."""
    return end.clamp(0, kv_len).to(torch.int32) if isinstance(end, Tensor) else min(max(end, 0), kv_len)


def _is_span(mask: Mask) -> bool:
    return isinstance(mask, Span) or (isinstance(mask, Compare) and "kv" not in mask.symbols)


def _is_same(known: Any, stamp: Any) -> bool:
    if isinstance(stamp, Tensor) and isinstance(known, Tensor):
        return torch.equal(known, stamp)
    return isinstance(stamp, tuple) and isinstance(known, tuple) and known == stamp


def _is_mirrored(mask: Matches) -> bool:
    """Whether the queries are compared by what the keys are."""
    if "mirrored" not in mask.memo:
        mirrored = mask.value.replace(lambda node: kv if node.key == q.key else None)
        mask.memo["mirrored"] = mirrored.key == mask.column.key
    return cast(bool, mask.memo["mirrored"])


def _table_of(column: Index) -> Table | Param | None:
    """The table that a column is, looked up at plain indices."""
    if isinstance(column, Lookup) and all(isinstance(index, Symbol) for index in column.indices):
        return column.table
    return None


def _rises(column: Index) -> TypeGuard[Lookup]:
    """Whether a column is known to rise from 0 up, but for a tail of -1, whatever its data: as derived tables do."""
    return isinstance(_table_of(column), Derived)


def _stacked(heads: list[RowBounds]) -> RowBounds:
    """Head ``h`` of the result is head ``h`` of the ``h``-th rows."""

    def stack(parts: list[Rows]) -> Rows:
        shape = torch.broadcast_shapes(*((part.lo.shape[0], part.lo.shape[2]) for part in parts))
        return Rows.stacked([part.of_head(head, *shape) for head, part in enumerate(parts)], 1)

    lower = stack([bounds.lower for bounds in heads])
    return RowBounds(lower, lower if all(b.exact for b in heads) else stack([b.upper for b in heads]))
