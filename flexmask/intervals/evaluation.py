"""Values of expressions along one axis, ``int64[B, H, q_len]`` or ``[B, H, kv_len]``, common subexpressions computed once.

Expressions that a user wrote do not overflow, which :mod:`flexmask.intervals.checks` has checked. Sums from solving a comparison
may be greater than 64 bits, so they are evaluated exactly, or not at all.

An :class:`Evaluation` knows all positions and the extents of what it adds up, so that it slices tables instead of looking up each
value, and chooses how to add by the extents. Single cells are computed by :mod:`flexmask.intervals.closures`, with the same
operations (:mod:`flexmask.intervals.operations`).
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from flexmask._transforms import are_ints, is_captured
from flexmask.expr.index import FOLD_COMPARE, Constant, Index, Opaque, Symbol
from flexmask.expr.linear import Linear, Quotient, Sum
from flexmask.expr.mask import Compare, Mask, Truth
from flexmask.expr.node import Node
from flexmask.expr.packing import DocumentTable
from flexmask.expr.tables import Lookup, Param, Table
from flexmask.intervals import laws
from flexmask.intervals.closures import Closure, Column, closure_of
from flexmask.intervals.context import Context
from flexmask.intervals.documents import document_numbers, first_positions, is_at_positions
from flexmask.intervals.extent import INT64, Read, extent, fits, values_extent
from flexmask.intervals.operations import clamped, operation


class Evaluation:
    """The values of expressions in a context along one axis of positions.

    Args:
        context: the context of the lowering.
        axis: ``"q"`` or ``"kv"``; expressions may depend on ``b``, ``h`` and this symbol.
    """

    def __init__(self, context: Context, axis: str) -> None:
        self.context, self.axis = context, axis
        self.known: dict[Any, Any] = {}

    def tensor(self, node: Index | Mask) -> Tensor:
        """The values as ``int64`` or ``bool`` ``[B, H, n]``, with 1 for an axis that they do not depend on."""
        return self.shaped(self.values(self.context.with_lengths(node)))

    def shaped(self, values: Any) -> Tensor:
        """Values as ``[B, H, n]``, also where they are a number."""
        return values if isinstance(values, Tensor) else torch.full((1, 1, 1), values, device=self.context.device)

    def values(self, node: Any) -> Any:
        """As :meth:`tensor` for an expression with lengths put in, or a Python number where nothing varies."""
        found = self.known.get(node.key)
        if found is None:
            self.known[node.key] = found = self._values(node)
        return found

    def _values(self, node: Any) -> Any:
        match node:
            case Constant(value):
                return value
            case Symbol(name):
                return self._symbol(name)
            case Lookup(table, indices) if self.axis == "q" and table.key in self.context.stops and is_at_positions(indices):
                stops, number = self.context.stops[table.key], self.document_number(table)
                if isinstance(table, DocumentTable) and table.rule == "starts":
                    return first_positions(stops, number)
                return torch.where(number < stops.shape[-1], number, -1)
            case Lookup(table, indices) if _are_symbols(indices):
                return self._sliced(self.context.tables[table.key], [index.name for index in indices])  # type: ignore[attr-defined]
            case Sum(constant=constant):
                return _added(self._parts(Linear.of(node)), constant)
            case Quotient(dividend, divisor):
                return self.values(dividend) // divisor
            case Truth(value):
                return torch.full((1, 1, 1), value, device=self.context.device)
        compute, operands = operation(node, self.context)
        found = compute(*map(self.values, operands))
        # In a graph an index tensor without axes would be read as a number.
        return found.view(1, 1, 1) if isinstance(found, Tensor) and found.dim() == 0 else found

    def document_number(self, table: Table | Param) -> Tensor:
        """The number of the document of each query, ``int64[B, 1, q_len]``, by the stops of a table; the greatest for padding."""
        stops = self.context.stops[table.key]
        key = "documents", id(stops)
        if key not in self.known:
            self.known[key] = document_numbers(stops, self.values(Symbol("q")).flatten(0, 1)).unsqueeze(1)
        return cast(Tensor, self.known[key])

    def holds(self, mask: Mask) -> Tensor | None:
        """Where a comparison that does not depend on the other axis holds, or None where 64 bits do not suffice."""
        resolved = self.context.with_lengths(mask)
        if not isinstance(resolved, Compare):
            return self.tensor(resolved)
        found = sides(resolved, self, self)
        return None if found is None else self.shaped(FOLD_COMPARE[resolved.sign](*found))

    def exact(self, index: Index) -> Any:
        """The values of an expression, or None where 64 bits do not hold what is added up on the way to them."""
        return self.within(index, *INT64)

    def within(self, index: Index, low: int, high: int) -> Any:
        """The values of an expression where they are in ``low .. high``; elsewhere values beyond the same end.

        So they compare with every number in ``low .. high`` as the exact values do. Data in another device's memory is read,
        which is a host sync, only where that is needed.

        Returns:
            The values as :meth:`values`, or None where 64-bit integers do not suffice.
        """
        resolved = self.context.with_lengths(index)
        if not isinstance(resolved, Sum | Quotient):
            return self.values(resolved)
        for read in (Read.HERE,) if is_captured() else (Read.HERE, Read.ALL):
            found = self._within(resolved, low, high, read)
            if found is not None:
                return found
        return None

    def _within(self, index: Index, low: int, high: int, read: Read) -> Any:
        least, most = extent(index, self.context, read)
        if most < low or least > high:  # decided without reading the values
            beyond = low - 1 if most < low else high + 1
            return beyond if fits((beyond, beyond)) else None
        if self.fits_int64(index, read):
            return self.values(index)
        if isinstance(index, Quotient):
            a, b = laws.limits_of_floor(low, high, index.divisor)
            dividend = self._within(index.dividend, a, b, read)
            return None if dividend is None or index.divisor > INT64[1] else dividend // index.divisor
        return self._sum_within(Linear.of(index), low, high, read) if isinstance(index, Sum) else self.values(index)

    def _sum_within(self, form: Linear, low: int, high: int, read: Read) -> Any:
        """As :meth:`_within`: all terms but the greatest are added up, and that one is kept within what decides."""
        of_term = {key: extent(index, self.context, read) for key, (index, _) in form.terms.items()}

        def size(key: Any) -> tuple[bool, int]:
            index, factor = form.terms[key]
            return not self.fits_int64(index, read), max(abs(factor * end) for end in of_term[key])

        *_, greatest = sorted(form.terms, key=size)
        term, factor = form.terms[greatest]
        rest = form.without(greatest)
        if not self.fits_int64(rest.index(), read):
            return self._limbs_within(form, low, high, read)
        of_rest = extent(rest.index(), self.context, read)
        if factor < 0:  # f * x is -f * -x
            least, most = laws.limits(low, high, *of_rest, -factor)
            kept = -most, -least
        else:
            kept = laws.limits(low, high, *of_rest, factor)
        values = self._within(term, *kept, read)
        if values is None:
            return None
        inside = max(of_term[greatest][0], kept[0]), min(of_term[greatest][1], kept[1])
        size_of_rest = sum(abs(f) * max(map(abs, of_term[key])) for key, (_, f) in rest.terms.items()) + abs(rest.constant)
        if abs(factor) * max(map(abs, inside)) + size_of_rest > INT64[1]:
            return None
        if inside != of_term[greatest]:
            values = clamped(values, *inside)
        return _added([(values if abs(factor) == 1 else values * abs(factor), factor), *self._parts(rest)], rest.constant)

    def _limbs_within(self, form: Linear, low: int, high: int, read: Read) -> Any:
        """As :meth:`_within` for several great terms, which are added up as two limbs."""
        plain = all(self.fits_int64(index, read) for index, _ in form.terms.values())
        near = max(abs(low), abs(high)) < 2**61
        if not plain or not near or sum(abs(factor) for _, factor in form.terms.values()) >= 2**28 or abs(form.constant) >= 2**90:
            return None
        limbs = [(self._limbs(index, abs(factor)), factor) for index, factor in form.terms.values()]
        upper = _added([(pair[0], factor) for pair, factor in limbs], form.constant >> laws.LIMB)
        lower = _added([(pair[1], factor) for pair, factor in limbs], form.constant & (2**laws.LIMB - 1))
        return laws.joined_limbs(upper, lower, clamped)

    def _limbs(self, index: Index, factor: int) -> tuple[Any, Any]:
        key = ("limbs", index.key, factor)
        if key not in self.known:
            values = self.values(index)
            self.known[key] = (values >> laws.LIMB) * factor, (values & (2**laws.LIMB - 1)) * factor
        return cast("tuple[Any, Any]", self.known[key])

    def fits_int64(self, index: Index, read: Read = Read.HERE) -> bool:
        """Whether 64 bits hold all that is computed on the way to the values."""
        match index:
            case Sum(terms, constant):
                if not all(self.fits_int64(term, read) for term, _ in terms):
                    return False
                ends = [(abs(factor), extent(term, self.context, read)) for term, factor in terms]
                return sum(factor * max(map(abs, end)) for factor, end in ends) + abs(constant) <= INT64[1]
            case Quotient(dividend, divisor):
                return divisor <= INT64[1] and self.fits_int64(dividend, read)
        return True

    def _parts(self, form: Linear) -> list[tuple[Any, int]]:
        """The terms of a plain form, each with its sign."""
        terms = form.terms.values()
        # A factor that 64 bits do not hold is that of a term that is 0, since the sum fits them.
        return [(self._times(index, abs(factor)), factor) for index, factor in terms if abs(factor) <= INT64[1]]

    def _times(self, index: Index, factor: int) -> Any:
        key = (index.key, factor)
        if factor > 1 and key not in self.known:
            self.known[key] = self.values(index) * factor
        return self.known[key] if factor > 1 else self.values(index)

    def _symbol(self, name: str) -> Any:
        if name in ("q_len", "kv_len"):
            return getattr(self.context, name)
        offset = self.context.q_offset if name == "q" else 0
        if not isinstance(offset, Tensor) and offset:
            return torch.arange(offset, offset + self.context.q_len, device=self.context.device).view(1, 1, -1)
        values = self.context.index(name).view({"b": (-1, 1, 1), "h": (1, -1, 1)}.get(name, (1, 1, -1)))
        return values + offset.view(-1, 1, 1) if isinstance(offset, Tensor) else values

    def _sliced(self, data: Tensor, names: list[str]) -> Tensor:
        """A lookup at plain symbols: the table itself, its axes put where the symbols have theirs."""
        offset = self.context.q_offset
        if "q" in names and isinstance(offset, Tensor):
            return _integer(data[tuple(self._symbol(name) for name in names)])
        for axis, name in enumerate(names):  # a derived table may have more positions, as may a captured one
            start, size, own = int(offset) if name == "q" else 0, self.context.size(name), data.shape[axis]
            if start or not (are_ints(size, own) and own <= size):
                data = data.narrow(axis, start, size)
        order = ["b", "h", self.axis]
        data = data.permute([names.index(name) for name in order if name in names])
        return _integer(data[tuple(slice(None) if name in names else None for name in order)])


def sides(mask: Compare, left: Evaluation, right: Evaluation) -> tuple[Any, Any] | None:
    """The sides of a comparison, each along its own axis, as values that compare as they do.

    Where 64 bits do not hold the values of one side, it is evaluated within those of the other, which then are read. None where
    that does not suffice either.
    """
    of_left, of_right = left.exact(mask.left), right.exact(mask.right)
    if is_captured() and (of_left is None or of_right is None):
        return None
    if of_left is None and of_right is not None:
        of_left = left.within(mask.left, *values_extent(of_right))
    elif of_right is None and of_left is not None:
        of_right = right.within(mask.right, *values_extent(of_left))
    return None if of_left is None or of_right is None else (of_left, of_right)


def _added(parts: list[tuple[Any, int]], constant: int) -> Any:
    """Values added up or, where the number with them is negative, taken away."""
    total: Any = None
    for values, sign in sorted(parts, key=lambda part: part[1] < 0):
        if total is None and sign < 0:
            total, constant = constant - values, 0
        else:
            total = values if total is None else total + values if sign > 0 else total - values
    return constant if total is None else total + constant if constant else total


def hoisted_closure(context: Context) -> Closure:
    """The closure of the mask of a context, with values that depend on the query or on the key alone precomputed."""
    along = {"q": Evaluation(context, "q"), "kv": Evaluation(context, "kv")}

    def hoisted(node: Node) -> Node | None:
        if (
            not isinstance(node, Index)
            or isinstance(node, Symbol | Constant)
            or (isinstance(node, Opaque) and node.shape)
            or (isinstance(node, Lookup) and _are_symbols(node.indices))
        ):
            return None
        axes = node.symbols & {"q", "kv"}
        if len(axes) != 1:
            return None
        (axis,) = axes
        values = along[axis].tensor(node)
        return Column(values.expand(*values.shape[:2], context.size(axis)), axis)

    return closure_of(cast(Mask, context.with_lengths(context.mask).replace(hoisted)), context)


def _integer(values: Tensor) -> Tensor:
    return values.to(torch.int64) if values.dtype == torch.bool else values


def _are_symbols(indices: tuple[Index, ...]) -> bool:
    names = [index.name for index in indices if isinstance(index, Symbol)]
    return len(names) == len(indices) == len(set(names))
