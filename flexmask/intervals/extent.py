"""Value ranges: the least and greatest value that an expression can take, as Python integers, so that nothing wraps around."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from itertools import product
from typing import TypeAlias

import torch
from torch import Tensor

from flexmask import _sync
from flexmask.expr.index import FOLD, Absolute, Arithmetic, Choice, Constant, Index, Symbol
from flexmask.expr.linear import Quotient, Sum
from flexmask.expr.packing import DocumentTable
from flexmask.expr.tables import Literal, Lookup, Param, Ranged, Table, TensorTable
from flexmask.intervals.context import MAX_LENGTH, Context

__all__ = ["Extent", "INT64", "Read", "combined_extent", "extent", "fits"]

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


def extent(index: Index, context: Context, read: Read = Read.HERE) -> Extent:
    """The extent of an expression in a context.

    Expressions as a user writes them have 64 bits: where nothing says more, as of data in another device's memory, they have
    the extent of these. Of sums that the library makes it is exact.

    Args:
        index: the expression, its lengths put in or not.
        context: the context of the lowering, its tables ready.
        read: which data is read.
    """
    known, key = context.extents, (index.key, read)
    if key not in known:
        known[key] = _extent(index, context, read)
    return known[key]


def _extent(index: Index, context: Context, read: Read) -> Extent:
    def below(part: Index) -> Extent:
        return extent(part, context, read)

    match index:
        case Symbol(name):
            return _symbol_extent(name, context)
        case Lookup(table):
            return _table_extent(table, context, read)
        case Sum(terms, constant):
            return _extent_of_terms([(factor, below(term)) for term, factor in terms], constant)
        case Quotient(dividend, divisor):
            low, high = below(dividend)
            return low // divisor, high // divisor
    low, high = combined_extent(index, below) or INT64
    return max(low, INT64[0]), min(high, INT64[1])


def _extent_of_terms(terms: list[tuple[int, Extent]], constant: int) -> Extent:
    """The extent of a sum of terms, each a factor and an extent."""
    ends = [sorted((factor * low, factor * high)) for factor, (low, high) in terms]
    return constant + sum(low for low, _ in ends), constant + sum(high for _, high in ends)


def combined_extent(index: Index, below: Callable[[Index], Extent | None]) -> Extent | None:
    """The extent of an expression from those of its parts, or None where one is unknown."""
    match index:
        case Constant(value):
            return value, value
        case Absolute(operand):
            inner = below(operand)
            return inner and (max(0, inner[0], -inner[1]), max(-inner[0], inner[1]))
        case Choice(_, then, otherwise):
            pair = below(then), below(otherwise)
            return None if pair[0] is None or pair[1] is None else (min(pair[0][0], pair[1][0]), max(pair[0][1], pair[1][1]))
        case Arithmetic(sign, left, right):
            return _combined(sign, below(left), below(right))
    return None


def _combined(sign: str, left: Extent | None, right: Extent | None) -> Extent | None:
    if left is None or right is None:
        return None
    if sign in {"//", "%"} and right[0] <= 0 <= right[1]:
        return None  # reported as a division by zero
    if sign == "%":  # the result has the sign of the divisor and is nearer to 0
        inside = left[0] >= 0 and left[1] < right[0]
        return left if inside else (min(0, right[0] + 1), max(0, right[1] - 1))
    corners = [FOLD[sign](x, y) for x, y in product(left, right)]  # each of these is monotone in either side
    return min(corners), max(corners)


def _symbol_extent(name: str, context: Context) -> Extent:
    match name:
        case "b":
            return 0, context.batch - 1
        case "h":
            return 0, context.heads - 1
        case "kv":
            return 0, context.kv_len - 1
        case "q_len":
            return context.q_len, context.q_len
        case "kv_len":
            return context.kv_len, context.kv_len
    first = context.q_offset if isinstance(context.q_offset, int) else 0
    return first, (context.q_end or MAX_LENGTH) - 1


def _table_extent(table: Table | Param, context: Context, read: Read) -> Extent:
    match table:
        case Ranged(source):
            return _table_extent(source, context, read)
        case Literal():
            return table.extent
        case DocumentTable(source=Table() as source):
            return -1, max(context.kv_len, context.q_end or MAX_LENGTH, *(size or 0 for size in source.shape))
    values = context.tables[table.key]
    if values.dtype == torch.bool:
        return 0, 1
    dtype = table.tensor.dtype if isinstance(table, TensorTable) else values.dtype
    if read == Read.ALL or (read == Read.HERE and dtype == torch.int64 and not _sync.needs_sync(values)):
        return _ends(values)
    limits = torch.iinfo(dtype)
    return limits.min, limits.max


def _ends(values: Tensor) -> Extent:
    least, most = values.aminmax()
    return int(least), int(most)
