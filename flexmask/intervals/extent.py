"""Extents: the least and greatest value of an expression in a whole mask, as Python integers, so that nothing wraps around."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from functools import partial, reduce
from itertools import product
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from flexmask import _sync
from flexmask._transforms import are_ints
from flexmask.expr.index import Absolute, Arithmetic, Choice, Constant, Index, Opaque, Symbol
from flexmask.expr.linear import Quotient, Sum
from flexmask.expr.packing import DocumentTable
from flexmask.expr.tables import Literal, Lookup, Param, Ranged, Slot, Table
from flexmask.intervals.context import MAX_LENGTH, Context
from flexmask.intervals.operations import ARITHMETIC, greater, lesser

#: The least and the greatest of some values.
Extent: TypeAlias = tuple[int, int]

INT64: Extent = -(2**63), 2**63 - 1


class Read(IntEnum):
    """Which data may be read for an extent; other data has that of its dtype."""

    NOTHING = 0
    HERE = 1  # integers of 64 bits in the CPU's memory
    ALL = 2  # which forces a host sync where they are in another device's memory


def fits(found: Extent, bits: int = 64) -> bool:
    """Whether all values of an extent are signed integers of so many bits."""
    return -(1 << bits - 1) <= found[0] and found[1] < 1 << bits - 1


def value_range(
    index: Index,
    leaf: Callable[[Index], Extent | None],
    known: dict[Any, Extent | None],
    unknown: Extent | None = INT64,
    *,
    is_clamped: bool = True,
) -> Extent | None:
    """The extent of an expression from those of its leaves.

    Args:
        index: the expression.
        leaf: the extent of a symbol, a lookup or an opaque call; None where it has no known one.
        known: extents computed so far, by key, to which those of this expression are added.
        unknown: the extent of what has no known one. With None, nothing that depends on such a part has a known one.
        is_clamped: whether operations that a user writes are clamped to 64 bits, which checks keep them in. Sums that the
            library makes are exact.
    """
    if index.key in known:
        return known[index.key]

    if isinstance(index, Symbol | Lookup | Opaque):
        found = leaf(index)
    else:
        found = combined_extent(index, lambda part: value_range(part, leaf, known, unknown, is_clamped=is_clamped))
        if found is not None and is_clamped and not isinstance(index, Sum | Quotient):
            found = max(found[0], INT64[0]), min(found[1], INT64[1])
    known[index.key] = found = unknown if found is None else found
    return found


def extent(index: Index, context: Context, read: Read = Read.HERE) -> Extent:
    """The extent of an expression in a context.

    Args:
        index: the expression, its lengths put in or not.
        context: the lowering context, its tables ready.
        read: which data is read.
    """

    known = context.extents.setdefault(read, {})
    return known.get(index.key) or cast(Extent, value_range(index, partial(_leaf_extent, context, read), known))


def _leaf_extent(context: Context, read: Read, leaf: Index) -> Extent | None:
    match leaf:
        case Symbol(name):
            return _symbol_extent(name, context)
        case Lookup(table):
            return _table_extent(table, context, read)
    return None


def combined_extent(index: Index, below: Callable[[Index], Any]) -> Any:
    """The least and the greatest value of an expression from those of its operands, or None where one is unknown.

    They are Python integers, which are exact, or tensors with one value for each block, whose results must fit 64 bits; a divisor
    is the same in all blocks.
    """
    match index:
        case Constant(value):
            return value, value
        case Absolute(operand):
            inner = below(operand)
            return inner and (greater(greater(inner[0], -inner[1]), 0), greater(-inner[0], inner[1]))
        case Choice(_, then, otherwise):
            x, y = below(then), below(otherwise)
            return None if x is None or y is None else (lesser(x[0], y[0]), greater(x[1], y[1]))
        case Arithmetic(sign, left, right):
            return _combined(sign, below(left), below(right))
        case Sum(terms, constant):
            pairs = [(below(term), factor) for term, factor in terms]
            if any(ends is None for ends, _ in pairs):
                return None
            least = constant + sum(ends[factor < 0] * factor for ends, factor in pairs)
            return least, constant + sum(ends[factor > 0] * factor for ends, factor in pairs)
        case Quotient(dividend, divisor):
            inner = below(dividend)
            return inner and (inner[0] // divisor, inner[1] // divisor)
    return None


def _combined(sign: str, left: Any, right: Any) -> Any:
    if left is None or right is None:
        return None
    if sign in {"//", "%"} and right[0] <= 0 <= right[1]:
        return None  # reported as a division by zero
    if sign == "%" and right[0] == right[1]:
        return _remainders(left[0], left[1], right[0])
    if sign == "%":  # the result has the sign of the divisor and is nearer to 0
        inside = left[0] >= 0 and left[1] < right[0]
        return left if inside else (min(0, right[0] + 1), max(0, right[1] - 1))
    corners = [ARITHMETIC[sign](x, y) for x, y in product(left, right)]  # each of these is monotone in either side
    return reduce(lesser, corners), reduce(greater, corners)


def _remainders(low: Any, high: Any, divisor: int) -> Any:
    """The extent of the remainders of ``low .. high``: all of a divisor, where the quotients of the ends differ."""
    whole = low // divisor != high // divisor
    ends = min(0, divisor + 1), max(0, divisor - 1)
    if isinstance(whole, Tensor):
        return torch.where(whole, ends[0], low % divisor), torch.where(whole, ends[1], high % divisor)
    return ends if whole else (low % divisor, high % divisor)


def _symbol_extent(name: str, context: Context) -> Extent:
    if name in ("q_len", "kv_len"):
        size = getattr(context, name)
        return (size, size) if are_ints(size) else (0, MAX_LENGTH)
    first = context.q_offset if name == "q" and isinstance(context.q_offset, int) else 0
    ends = {"b": context.batch, "h": context.heads, "q": context.q_end, "kv": context.kv_len}
    return first, _most(ends[name]) - 1


def _most(size: int | None) -> int:
    """A size, or the greatest that it may be."""
    return size if isinstance(size, int) else MAX_LENGTH


def _table_extent(table: Table | Param, context: Context, read: Read) -> Extent:
    match table:
        case Ranged(source):
            return _table_extent(source, context, read)
        case Literal():
            return table.extent
        case DocumentTable(source=Table() as source):
            sizes = source.shape_of(context.source.held)
            ends = [context.kv_len, context.q_end, *(0 if size is None else size for size in sizes)]
            return -1, max(map(_most, ends))
    values = context.tables[table.key]
    if values.dtype == torch.bool:
        return 0, 1
    dtype = table.dtype if isinstance(table, Slot) else values.dtype
    if read == Read.ALL or (read == Read.HERE and dtype == torch.int64 and not _sync.needs_sync(values)):
        return values_extent(values)
    limits = torch.iinfo(dtype)
    return limits.min, limits.max


def values_extent(values: Any) -> Extent:
    """The extent of the values of a tensor, which forces a host sync, or of a number."""
    least, most = values.aminmax() if isinstance(values, Tensor) else (values, values)
    return int(least), int(most)
