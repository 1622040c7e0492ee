"""From a mask to its rows, ``[B, H, q_len, K]`` key intervals, from below and from above.

A mask whose leaves are all separable (:mod:`flexmask.intervals.solve`) has exact rows. A leaf that is not separable is bounded by
no key from below and by all keys from above. The boolean algebra is computed on these bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import reduce
from operator import and_, or_, xor
from typing import Any, TypeAlias, TypeGuard, cast

import torch
from torch import Tensor

from flexmask import _sync
from flexmask._transforms import are_ints, can_keep_tensors, is_captured
from flexmask.errors import LoweringError
from flexmask.expr.index import Constant, Index, Opaque, Symbol, q
from flexmask.expr.linear import Quotient, Sum
from flexmask.expr.mask import And, Compare, Mask, Not, Or, PerHead, Truth, Xor, operands_of
from flexmask.expr.node import Node
from flexmask.expr.packing import COVERING, DocumentTable
from flexmask.expr.tables import Lookup, Param, Slot, Table
from flexmask.intervals.bands import distance_from_query, share_a_key
from flexmask.intervals.bind import bind
from flexmask.intervals.columns import (
    PiecewiseColumn,
    ValueRuns,
    direction,
    equal_hull,
    nondecreasing_runs,
    runs,
    search,
    threshold,
    true_hull,
)
from flexmask.intervals.context import MAX_LENGTH, Context
from flexmask.intervals.documents import document_spans, is_at_positions
from flexmask.intervals.evaluation import Evaluation, sides
from flexmask.intervals.extent import INT64, extent
from flexmask.intervals.operations import clamped, greater, lesser
from flexmask.intervals.rows import Rows
from flexmask.intervals.solve import Span, has_same_sides, is_separable, separate
from flexmask.intervals.subtrees import subtree_rows

#: More intervals in a row than this are not listed but bounded, which keeps the memory of rows linear.
MAX_SLOTS = 64
#: The most queries with which a copy of a mask's data is kept: masks of more are rarely lowered twice with the same data.
MAX_KEPT_QUERIES = 1024

#: Starts and stops of spans: numbers or ``int64[B, H, q_len]``, exact between 0 and kv_len.
Ends: TypeAlias = tuple[list[Any], list[Any]]


@dataclass(frozen=True, eq=False)
class RowBounds:
    """The rows of a mask, bounded from below and above.

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

    @classmethod
    def between(cls, lower: Rows, upper: Rows) -> RowBounds:
        """Rows from below and above, which are the same object where they are exact, as :meth:`of` bounds each."""
        return cls.of(lower) if lower is upper else cls(cls.of(lower).lower, cls.of(upper).upper)

    def _joined(self, other: RowBounds, join: Callable[[Rows, Rows], Rows]) -> RowBounds:
        lower = join(self.lower, other.lower)
        return RowBounds.between(lower, lower if self.exact and other.exact else join(self.upper, other.upper))

    def __and__(self, other: RowBounds) -> RowBounds:
        return self._joined(other, and_)

    def __or__(self, other: RowBounds) -> RowBounds:
        return self._joined(other, or_)

    def __invert__(self) -> RowBounds:
        lower = ~self.upper
        return RowBounds.between(lower, lower if self.exact else ~self.lower)

    def filled(self, rows: Tensor) -> RowBounds:
        """With all keys in some rows, ``bool[B, H, q_len, 1]``."""
        lower = self.lower.filled(rows)
        return RowBounds(lower, lower if self.exact else self.upper.filled(rows))

    def __xor__(self, other: RowBounds) -> RowBounds:
        return (self & ~other) | (~self & other)


def analyze(context: Context) -> RowBounds:
    """The rows of the mask of a context."""
    return _Analysis(context).rows(separate(context.mask))


class _Analysis:
    """The rows of the parts of one mask; index expressions are evaluated once along the queries and once along the keys."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.queries, self.keys = Evaluation(context, "q"), Evaluation(context, "kv")
        self.known: dict[Any, Rows | None] = {}
        self.piecewise_columns: dict[Any, PiecewiseColumn | None] = {}
        self.side_values: dict[Any, tuple[Tensor, Tensor] | None] = {}

    def rows(self, mask: Mask) -> RowBounds:
        """The rows of a mask.

        In a graph, where no value can be read, parts of the mask that have no data are lowered as constants where their rows are
        not exact otherwise. Then the graph is one for these lengths.
        """
        found = self.direct_rows(mask)
        if found.exact or not is_captured():
            return found
        parts = operands_of(mask)
        constant = [part for part in parts if self.has_constant_rows(part)]
        if all(self.direct_rows(part).exact for part in constant):
            return found
        known = self.constant_rows(And.make(tuple(constant)))
        if known is None:
            return found
        rest = [part for part in parts if part not in constant]
        return known & self.direct_rows(And.make(tuple(rest))) if rest else known

    def has_constant_rows(self, mask: Mask) -> bool:
        """Whether a mask has no data and is separable, so that its rows are the same each time."""
        moves = isinstance(self.context.q_offset, Tensor) and "q" in mask.symbols
        return not moves and not mask.slots and not any(map(_is_of_cells, mask.walk()))

    def constant_rows(self, mask: Mask) -> RowBounds | None:
        """The rows of a mask without data, as constants of the graph that is captured; None where they are not exact."""
        context = self.context
        sizes = int(context.q_len), int(context.kv_len), int(context.batch), int(context.heads)
        offset = 0 if isinstance(context.q_offset, Tensor) else context.q_offset

        def ends() -> list[Tensor] | None:
            found = _Analysis(bind(mask, *sizes, offset, torch.device("cpu"))).direct_rows(separate(mask))
            return [end.to(context.device) for end in (found.lower.lo, found.lower.hi)] if found.exact else None

        with ThreadPoolExecutor(1) as thread:  # in which no graph is captured
            constants = thread.submit(ends).result()
        if constants is None:
            return None
        # As torch.tensor(list) does for the CPU, so that fake tensors may take them, but without a copy from there in the graph.
        lo, hi = (torch.ops.aten.lift_fresh_copy(end) for end in constants)
        return RowBounds.of(Rows(lo, hi, context.kv_len))

    def direct_rows(self, mask: Mask) -> RowBounds:
        """The rows of a mask. In a graph they are not exact where that would require values to be read."""
        match mask:
            case And(operands):
                return self.conjunction(operands)
            case Or(operands):
                return self.disjunction(operands)
            case Xor(operands):
                return reduce(xor, map(self.rows, operands))
            case Not(operand):
                return ~self.rows(operand)
            case PerHead(masks):
                return _stacked([self.rows(mask) for mask in masks])
            case Compare("!=", left, right) if is_separable(mask):
                return ~self.rows(Compare("==", left, right))
        return self.leaf(mask)

    def conjunction(self, operands: tuple[Mask, ...]) -> RowBounds:
        """The rows of ``a & b & ...``. Operands of one interval a row are intersected first."""
        operands, documents = self.own_documents(operands)
        operands, nested = self.subtrees(operands)
        spans = {id(operand): ends for operand in operands if (ends := self.ends(operand)) is not None}
        piecewise = {id(operand): operand for operand in operands if self.is_piecewise(operand)}
        special = spans.keys() | piecewise.keys()
        parts = [self.rows(operand) for operand in operands if id(operand) not in special]
        single = documents + [part.lower for part in parts if part.exact and part.lower.slots == 1]
        others = nested + [part for part in parts if not (part.exact and part.lower.slots == 1)]
        if spans or single or not others:
            others.insert(0, RowBounds.of(self.span(spans.values(), single)))
        found = reduce(and_, others)
        counted = any(known.slots > 1 for part in operands if (known := self.known.get(part.key)))
        if counted and found.exact and _sync.needs_sync(found.lower.lo):
            # The runs of equal values were counted on the host; another operand may hide some.
            found = RowBounds.of(found.lower.trimmed())
        return self.refined(found, piecewise.values())

    def own_documents(self, operands: tuple[Mask, ...]) -> tuple[tuple[Mask, ...], list[Rows]]:
        """The rows of ``(ids[kv] == ids[q]) & (ids[q] >= 0)`` for documents given by lengths, and the remaining operands."""
        found: list[Rows] = []
        equal = [part for part in operands if isinstance(part, Compare) and part.sign == "=="]
        for condition in operands:
            match condition:
                case Compare(">=", Lookup(DocumentTable(rule)) as own, Constant(0)) if rule in COVERING:
                    same = [part for part in equal if part.right.key == own.key and has_same_sides(part)]
                    table = self.documents_of(own)
                    if same and table is not None:
                        operands = tuple(part for part in operands if part is not condition and part is not same[0])
                        found.append(self.document_rows(table, of_padding=False))
        return operands, found

    def subtrees(self, operands: tuple[Mask, ...]) -> tuple[tuple[Mask, ...], list[RowBounds]]:
        """The rows of ``(kv <= q) & (q < end[kv])``, also with ``depth[kv] >= depth[q] - n``, and the remaining operands."""
        context = self.context
        if context.q_end is None:
            return operands, []
        n = greater(context.kv_len, context.q_end)
        at_least = [part for part in operands if isinstance(part, Compare) and part.sign in {">", ">="}]
        at_least = [part for part in at_least if self.has_int64_sides(part)]
        if all(self.monotone_rows(part) is not None for part in at_least):
            return operands, []
        causal = next((part for part in operands if self.last_of_queries(part) in {0, 1}), None)
        if causal is None:
            return operands, []
        until, end = next(((part, end) for part in at_least if (end := self.end_of_keys(part, n)) is not None), (None, None))
        if until is None or end is None:
            return operands, []
        others = [part for part in at_least if part is not until]
        depths = [(*cast("tuple[Tensor, Tensor]", self.sides(part)), part.sign == ">") for part in others]
        found = subtree_rows(end, depths, self.queries.tensor(q), context.kv_len, n, MAX_SLOTS)
        if found is None:
            return operands, []
        lower, upper, are_depths = found
        done: list[Mask | None] = [until, *(part for part, is_depth in zip(others, are_depths, strict=True) if is_depth)]
        if not is_captured() and self.last_of_queries(causal) == 1 and getattr(causal, "start", None) is None:
            done.append(causal)
        left = tuple(part for part in operands if not any(part is other for other in done))
        return left, [RowBounds(lower, upper) if lower is not upper else RowBounds.of(lower)]

    def last_of_queries(self, mask: Mask) -> int | None:
        """``n`` of a mask that hides the keys from ``q + n`` on; None for others. So does ``x[kv] <= x[q]`` where x rises."""
        if isinstance(mask, Span):
            return distance_from_query(mask.stop)
        if is_captured() or not isinstance(mask, Compare) or mask.sign != "<=" or not self.has_int64_sides(mask):
            return None
        rows, stop = self.monotone_rows(mask), (self.queries.tensor(q) + 1).unsqueeze(-1)
        return 1 if rows is not None and bool(((rows.lo == 0) & (rows.hi == stop)).all()) else None

    def end_of_keys(self, mask: Compare, n: int) -> Tensor | None:
        """For each key the first position, up to n, from which on a condition does not hold; None where it may hold again."""
        column, value = cast("tuple[Tensor, Tensor]", self.sides(mask))
        behind = distance_from_query(mask.right)
        if behind is not None and abs(behind) <= MAX_LENGTH:
            past = behind - (mask.sign == ">=")
            return column.clamp(past, n + past) - past
        is_whole = not is_captured() and value.shape[-1] == self.context.kv_len == n
        return search(value, column, right=mask.sign == ">=") if is_whole and direction(value) > 0 else None

    def documents_of(self, column: Index) -> Table | Param | None:
        """The documents given by lengths that a column looks up at each position."""
        if isinstance(column, Lookup) and column.table.key in self.context.stops and is_at_positions(column.indices):
            return column.table
        return None

    def document_rows(self, table: Table | Param, *, of_padding: bool) -> Rows:
        """The keys of the document of each query, given by lengths.

        Args:
            table: the documents.
            of_padding: whether those behind the last document are a document of their own; otherwise they have no keys.
        """
        context, stops = self.context, self.context.stops[table.key]
        lengths = (context.q_end or 0), context.kv_len
        if not are_ints(*lengths) or lengths[0] > lengths[1]:
            stops = stops.clamp(max=context.kv_len)
        padding = context.kv_len if of_padding else None
        lo, hi = document_spans(stops.to(torch.int32), self.queries.document_number(table), padding)
        return Rows(lo.unsqueeze(-1), hi.unsqueeze(-1), context.kv_len)

    def disjunction(self, operands: tuple[Mask, ...]) -> RowBounds:
        """The rows of ``a | b | ...``, those that are exact joined at once."""
        parts = [(operand, self.rows(operand)) for operand in operands]
        exact = [part.lower for _, part in parts if part.exact]
        are_single = len(exact) == len(parts) <= MAX_SLOTS and all(rows.slots == 1 for rows in exact)
        if are_single and share_a_key(operands, self.context):
            return RowBounds.of(Rows.union(exact).hull())  # also where the host cannot read how many intervals are used
        # Conditions on the query alone give a row all keys: no further interval, also where the host cannot read that.
        whole = [part.lower for operand, part in parts if part.exact and "kv" not in operand.symbols]
        exact = [part.lower for operand, part in parts if part.exact and "kv" in operand.symbols]
        if len(exact) > 1 and sum(rows.slots for rows in exact) <= MAX_SLOTS:
            exact = [Rows.union(exact)]
        joined = [*map(RowBounds.of, exact), *(part for _, part in parts if not part.exact)]
        found = reduce(or_, joined or [self.leaf(Truth(False))])
        return found.filled(reduce(or_, [(rows.lo < rows.hi).any(-1, keepdim=True) for rows in whole])) if whole else found

    def refined(self, bounds: RowBounds, masks: Iterable[Compare]) -> RowBounds:
        """The bounds, intersected with conditions on piecewise non-decreasing columns, those of the fewest pieces first."""
        groups: dict[PiecewiseColumn, list[tuple[str, Tensor]]] = {}
        for mask in masks:
            column, value = cast("tuple[Tensor, Tensor]", self.sides(mask))
            if mask.sign == "==" and is_captured():  # whose runs cannot be counted
                bounds = RowBounds(bounds.lower, bounds.upper & equal_hull(column, value, self.context.kv_len))
            if (pieces := self.pieces(mask.left, column)) is None:
                bounds = RowBounds(self.unknown().lower, bounds.upper)
            else:
                groups.setdefault(pieces, []).append((mask.sign, value))
        for pieces, conditions in sorted(groups.items(), key=lambda group: group[0].count):
            upper = pieces.keys_within(bounds.upper, conditions, MAX_SLOTS)
            if upper is None:
                bounds = RowBounds(self.unknown().lower, bounds.upper)
            else:
                lower = upper if bounds.exact else pieces.keys_within(bounds.lower, conditions, MAX_SLOTS)
                bounds = RowBounds.between(lower or self.unknown().lower, upper)
        return bounds

    def pieces(self, column: Index, values: Tensor) -> PiecewiseColumn | None:
        if column.key not in self.piecewise_columns:
            self.piecewise_columns[column.key] = (
                PiecewiseColumn.of(values.flatten()) if values.numel() == self.context.kv_len and not is_captured() else None
            )
        return self.piecewise_columns[column.key]

    def sides(self, mask: Compare) -> tuple[Tensor, Tensor] | None:
        """The sides of a separable comparison, along the keys and along the queries, or None where 64 bits do not hold them."""
        if mask.key not in self.side_values:
            found = None if self.keys.exact(mask.left) is None else sides(mask, self.keys, self.queries)
            self.side_values[mask.key] = found and (self.keys.shaped(found[0]), self.queries.shaped(found[1]))
        return self.side_values[mask.key]

    def has_int64_sides(self, mask: Mask) -> TypeGuard[Compare]:
        """Whether a mask is a separable comparison whose sides fit 64 bits; sides that a user wrote always do."""
        if not is_separable(mask):
            return False
        return not any(isinstance(side, Sum | Quotient) for side in (mask.left, mask.right)) or self.sides(mask) is not None

    def is_piecewise(self, mask: Mask) -> TypeGuard[Compare]:
        """Whether a mask is a separable comparison whose column is only piecewise non-decreasing."""
        return self.has_int64_sides(mask) and mask.sign != "!=" and self.monotone_rows(mask) is None

    def monotone_rows(self, mask: Compare) -> Rows | None:
        """The rows of a comparison whose column is monotone, or has few runs of equal values; else None."""
        if mask.key not in self.known:
            self.known[mask.key] = self.matches(mask) if mask.sign == "==" else self.threshold(mask)
        return self.known[mask.key]

    def threshold(self, mask: Compare) -> Rows | None:
        column, value = cast("tuple[Tensor, Tensor]", self.sides(mask))
        way = 0 if is_captured() else direction(column)
        return threshold(column, value, self.context.kv_len, mask.sign, rises=way > 0) if way else None

    def ends(self, mask: Mask) -> Ends | None:
        """The starts and stops of a mask of one interval a row; None for other masks, and where 64 bits do not hold the ends."""
        kv_len = self.context.kv_len
        match mask:
            case Span(start, stop):
                most = kv_len if are_ints(kv_len) else MAX_LENGTH
                of_start, of_stop = (None if end is None else self.queries.within(end, 0, most) for end in (start, stop))
                if (start is None) == (of_start is None) and (stop is None) == (of_stop is None):
                    return [of_start] * (start is not None), [of_stop] * (stop is not None)
            case Compare() if "kv" not in mask.symbols:
                holds = self.queries.holds(mask)
                return None if holds is None else ([], [torch.where(holds, kv_len, 0)])
            case Compare(">=" | "<" as sign, Lookup(DocumentTable(rule)) as ids, Constant(0)) if rule in COVERING:
                if (table := self.documents_of(ids)) is not None:
                    last = [self.context.stops[table.key][..., -1].view(-1, 1, 1)]
                    return ([], last) if sign == ">=" else (last, [])
        return None

    def span(self, spans: Collection[Ends], rows: Sequence[Rows] = ()) -> Rows:
        """The keys inside all of the spans and of the rows of one interval."""
        kv_len = self.context.kv_len
        starts, stops = ([end for ends in spans for end in ends[side]] for side in (0, 1))
        lo = _innermost(greater, starts, [part.lo.squeeze(-1) for part in rows], kv_len, default=0)
        hi = _innermost(lesser, stops, [part.hi.squeeze(-1) for part in rows], kv_len, default=kv_len)
        return Rows.spans(self.queries.shaped(lo), self.queries.shaped(hi), kv_len)

    def leaf(self, mask: Mask) -> RowBounds:
        context, kv_len = self.context, self.context.kv_len
        match mask:
            case Truth(value):
                make = Rows.everything if value else Rows.nothing
                return RowBounds.of(make(kv_len, context.device))
            case Span() | Compare() if (ends := self.ends(mask)) is not None:
                return RowBounds.of(self.span([ends]))
            case Compare() if self.has_int64_sides(mask):
                found = self.monotone_rows(mask)
                return RowBounds.of(found) if found is not None else self.refined(self.leaf(Truth(True)), [mask])
            case Compare() if "q" not in mask.symbols and (holds := self.keys.holds(mask)) is not None:
                if is_captured():
                    return RowBounds(self.unknown().lower, true_hull(holds, kv_len))
                return RowBounds.of(runs(holds, kv_len))
            case Span() | Compare():
                return self.unknown()
        raise LoweringError(f"no rows for {type(mask).__name__} {mask}")

    def matches(self, mask: Compare) -> Rows | None:
        context, column = self.context, mask.left
        table = self.documents_of(column)
        if table is not None and has_same_sides(mask):
            return self.document_rows(table, of_padding=True)  # no document is empty where a query is
        if _is_nondecreasing(column) and _sync.needs_sync(context.tables[column.table.key]):
            great = extent(mask.right, context)[1] == INT64[1]  # which no document has
            ids, value = cast("tuple[Tensor, Tensor]", self.sides(mask))
            return nondecreasing_runs(ids, value.clamp(max=INT64[1] - 1) if great else value, context.kv_len)
        if is_captured():
            return None
        found = self.runs_of(column)
        if context.q_len == context.kv_len and context.begins_at_0 and has_same_sides(mask):
            return found.own(MAX_SLOTS)
        return found.matching(cast("tuple[Tensor, Tensor]", self.sides(mask))[1], MAX_SLOTS)

    def runs_of(self, column: Index) -> ValueRuns:
        """The runs of equal values of a column, cached until its data changes."""
        context, (memo, place) = self.context, self.place_of(column)
        data = None if memo is None or not can_keep_tensors() else self.column_data(column)
        if memo is None or data is None:
            return ValueRuns.of(self.keys.tensor(column), context.kv_len)
        place = place, *(context.size(axis) for axis in ("b", "h") if axis in column.symbols)
        setting = context.kv_len, context.device
        known: _sync.Stamped[ValueRuns] | None = memo.get(place)
        if known is None or not known.stamp.holds(data, setting):
            runs = ValueRuns.of(self.keys.tensor(column), context.kv_len)
            memo[place] = known = _sync.Stamped(_sync.Stamp(data, setting), runs)
        return known.result

    def place_of(self, column: Index) -> tuple[dict[Any, Any] | None, Any]:
        """Where to keep what follows from the values of a column, and its key there: never with a form that others share."""
        source = self.context.source
        match column:
            case Lookup(Slot(number), indices) if _table_of(column) is not None:
                return source.held[number].memo, tuple([index.key for index in indices])
        if not column.is_kept:  # it has literal data
            return column.memo, "runs"
        return (source.memo, column.key) if source.held else (None, None)

    def column_data(self, column: Index) -> list[Tensor] | None:
        """The tensors whose stamp tells whether a column changed; None where comparing them costs as much as its runs."""
        table = _table_of(column)
        if isinstance(table, Table) and table.constant:
            return []
        values = self.keys.tensor(column)
        if not _sync.needs_sync(values):
            return [values] if self.context.q_len <= MAX_KEPT_QUERIES else None
        tensor = self.context.source.held[table.number].tensor if isinstance(table, Slot) else None
        return [tensor] if tensor is not None and _sync.has_stamp(tensor) else None

    def unknown(self) -> RowBounds:
        kv_len, device = self.context.kv_len, self.context.device
        return RowBounds(Rows.nothing(kv_len, device), Rows.everything(kv_len, device))


def _varying(values: Any) -> list[bool]:
    """The axes along which ends ``[B, H, q_len]`` vary, the queries first."""
    return [bool(size != 1) for size in reversed(values.shape)] if isinstance(values, Tensor) else []


def _innermost(join: Callable[[Any, Any], Any], ends: list[Any], of_rows: list[Tensor], kv_len: int, default: int) -> Any:
    """The greatest start or the least stop of some spans and rows, as a 32-bit position or a number."""
    # Small tensors first: the length of each sequence is compared with the bounds of documents, not with those of each query.
    of_spans = [clamped(reduce(join, sorted(ends, key=_varying)), 0, kv_len)] if ends else []
    of_spans = [end.to(torch.int32) if isinstance(end, Tensor) else end for end in of_spans]
    return reduce(join, of_spans + of_rows) if of_spans or of_rows else default


def _table_of(column: Index) -> Table | Param | None:
    """The table of a column that is a lookup at plain indices."""
    if isinstance(column, Lookup) and all(isinstance(index, Symbol) for index in column.indices):
        return column.table
    return None


def _is_nondecreasing(column: Index) -> TypeGuard[Lookup]:
    """Whether a column is known to be non-decreasing from 0 up, except for a tail of -1, as document tables are."""
    return isinstance(table := _table_of(column), DocumentTable) and table.rule != "subtrees"


def _is_of_cells(node: Node) -> bool:
    """Whether a part of a separated mask has no key intervals, as each cell must be evaluated."""
    return isinstance(node, Opaque) or (isinstance(node, Compare) and {"q", "kv"} <= node.symbols and not is_separable(node))


def _stacked(heads: list[RowBounds]) -> RowBounds:
    """Head ``h`` of the result is head ``h`` of the ``h``-th rows."""

    def stack(parts: list[Rows]) -> Rows:
        shape = torch.broadcast_shapes(*((part.lo.shape[0], part.lo.shape[2]) for part in parts))
        return Rows.stacked([part.of_head(head, *shape) for head, part in enumerate(parts)], 1)

    lower = stack([bounds.lower for bounds in heads])
    return RowBounds(lower, lower if all(b.exact for b in heads) else stack([b.upper for b in heads]))
