"""The arguments of named masks: numbers, sizes of axes, tables with several possible axes, and masks within a part."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, cast

from flexmask._checks import checked_int
from flexmask.errors import ExpressionError, OperandError
from flexmask.expr.data import Data, as_table, per_batch, ranged, truths
from flexmask.expr.index import Arithmetic, Index, Symbol, kv, q
from flexmask.expr.mask import Compare, Mask
from flexmask.expr.names import describe_non_mask
from flexmask.expr.node import Node
from flexmask.expr.tables import Literal, Lookup, Param, Ranged, Table


def int_or_index(value: Any, what: str, least: int = 0) -> Index | int:
    """An integer of at least ``least``, also in a tensor without axes, or an index expression, which is not checked."""
    value = number(value, what, least)
    return value if isinstance(value, Index) else fixed_int(value, what, least)


def number(value: Any, what: str, least: int = 0) -> Any:
    """The integer in a tensor without axes as an index expression, at least ``least``; any other value as it is."""
    if isinstance(value, Table) and value.shape == () and not value.boolean:
        return ranged(value, what, least, None)[()]
    return value


def fixed_int(value: Any, what: str, least: int = 0, most: int | None = None) -> int:
    """An integer from ``least`` to ``most`` that the conditions of the mask depend on, so it cannot be a parameter."""
    _refuse_index(value, what, "a number")
    if isinstance(value, Table):
        raise OperandError(f"{what} must be an integer, got {_brief(value)}")
    return checked_int(value, what, least, most)


def fixed_ints(values: Any, what: str, axes: Iterable[int], least: int = 1) -> list[int]:
    """A list of integers of at least ``least`` that the conditions of the mask depend on; its length is one of ``axes``."""
    _refuse_index(values, what, "a list")
    if not isinstance(values, Literal) or values.truth or len(values.size) != 1:
        raise OperandError(f"{what} must be a list of integers, one for each axis, got {_brief(values)}")
    sizes = cast("list[int]", values.tolist())
    if len(sizes) not in axes:
        raise ExpressionError(f"{what} must have {' or '.join(map(str, axes))} axes, got {sizes}")
    if min(sizes) < least:
        raise ExpressionError(f"{what} must be at least {least} along each axis, got {sizes}")
    return sizes


def _refuse_index(value: object, what: str, instead: str) -> None:
    if isinstance(value, Index):
        raise ExpressionError(
            f"{what} cannot be a parameter, as the conditions of the mask depend on it: write {instead} instead of {value}"
        )


def per_sequence(value: Data, what: str) -> Index | int:
    """A non-negative integer for all sequences, or one for each."""
    return fixed_int(value, what) if isinstance(value, int) else per_batch(value, what, None)


def of_rows(rows: Sequence[list[int]], data: Literal, what: str) -> Table:
    """A table of rows that were computed from those of ``data``, with the same axes."""
    return as_table(rows if len(data.size) == 2 else rows[0], what)


def check_mask(value: object, name: str) -> Mask:
    """Checks a mask that is an argument of a named mask."""
    if not isinstance(value, Mask):
        raise OperandError(f"{name}: wanted a mask first, got {describe_non_mask(value)}")
    return value


def lookup(data: Data, what: str, axes: str, *places: tuple[Index | int, ...], truth: str = "") -> Lookup:
    """Data at the first of ``places`` that has as many indices as the data has axes.

    An axis of size 1 that ``b`` or ``h`` indexes is broadcast. A parameter is looked up at the first place.

    Args:
        data: the data.
        what: its name, for messages.
        axes: the axes that it may have, for messages.
        places: indices, fewest first.
        truth: what True is for, of truth values, also given as 0 and 1; nothing where the data must be integers.

    Raises:
        OperandError: truth values for integers, or other numbers than 0 and 1 for truth values.
        ExpressionError: another number of axes.
    """
    if isinstance(data, Param):
        return data[places[0]]
    table = truths(data, what, truth) if truth else as_table(data, what)
    if table.boolean and not truth:
        raise OperandError(f"{what} must be integers, not truth values")
    indices = next((place for place in places if len(place) == len(table.shape)), None)
    if indices is None:
        raise ExpressionError(f"{what} must have the axes {axes}, got shape {list(table.shape)}")
    return table[tuple(0 if _is_broadcast(index, size) else index for index, size in zip(indices, table.shape, strict=True))]


def _is_broadcast(index: Index | int, size: int | None) -> bool:
    return size == 1 and isinstance(index, Symbol) and index.name in "bh"


def _brief(value: object) -> str:
    return f"a table of shape {list(value.shape)}" if isinstance(value, Table) else repr(value)


def with_local_positions(name: str, mask: Mask, queries: Index, near: Index, keys: Index) -> Mask:
    """``mask`` at positions relative to the start of a part, valid where query and key are in the same part.

    Args:
        name: the named mask, for messages.
        mask: the mask to apply; it must not use ``q_len`` and ``kv_len``.
        queries: the start of the queries' positions, as an expression of ``q``.
        near: the start of the keys' positions, as an expression of ``q``.
        keys: the start of the keys' positions, as an expression of ``kv``.
    """
    if mask.symbols & {"q_len", "kv_len"}:
        raise OperandError(f"{name}: {mask} uses q_len or kv_len, which are not those of a part of the sequence")

    def moved(node: Node) -> Node | None:
        if not isinstance(node, Compare):
            return None
        # Within a part both starts of the keys are equal. With ``near`` differences of positions cancel. With ``keys`` indices
        # stay inside their tables, and conditions on the key alone stay so.
        start = keys if any(_is_of_key(below) for below in node.walk()) else near
        return node.substitute(q=q - queries, kv=kv - start)

    return cast(Mask, mask.expand().replace(_without_length_limits).replace(moved))


def _without_length_limits(node: Node) -> Node | None:
    """A lookup whose values may be greater than the length of the sequence, which is not that of a part of it."""
    match node:
        case Lookup(Ranged(high=Index() as high) as table, indices) if high.symbols:
            own = tuple([cast(Index, index.replace(_without_length_limits)) for index in indices])
            return Lookup(replace(table, high=None), own)
    return None


def _is_of_key(node: Node) -> bool:
    steps = isinstance(node, Lookup) or (isinstance(node, Arithmetic) and node.sign == "%")
    return steps and "kv" in node.symbols
