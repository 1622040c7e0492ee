"""Range checks: that no computed index leaves its table and nothing is divided by zero, before anything is evaluated."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import torch

from flexmask import devices
from flexmask.closures import index_closure
from flexmask.errors import LoweringError
from flexmask.frame import Frame
from flexmask.index import FOLD, Absolute, Arithmetic, Choice, Constant, Index, Symbol
from flexmask.tables import Lookup

__all__ = ["AXES", "Extent", "check_ranges", "combined_extent", "is_computed", "reach_of"]

#: The symbols that index an axis of a mask; data indexed by one has that axis' size.
AXES = {"b", "h", "q", "kv"}

Extent = tuple[int, int]


def check_ranges(computed: list[Lookup | Arithmetic], frame: Frame) -> bool:
    """Checks computed indices and divisors in a frame. Values in another device's memory are not read nor checked.

    Returns:
        Whether some value needs more than the 32 bits in which kernels count positions.

    Args:
        computed: the nodes of the frame's mask for which :func:`is_computed` holds, inner ones before those around them.
        frame: the frame, its tables ready.

    Raises:
        LoweringError: an index that leaves its table, a divisor that may be 0, or a value beyond 64 bits.
    """
    wide = False
    for node in computed:
        if isinstance(node, Lookup):
            _check_lookup(node, frame)
            continue
        if node.sign in {"//", "%"}:
            divisor = _extent(node.right, frame)
            if divisor is not None and divisor[0] <= 0 <= divisor[1]:
                given = f"{node.right.brief()} ranges from {divisor[0]} to {divisor[1]}"
                raise LoweringError(f"{node.brief()} may divide by 0: {given}")
        extent = _extent(node, frame)
        if extent is not None and (extent[0] < -(2**63) or extent[1] >= 2**63):
            raise LoweringError(f"{node.brief()} ranges from {extent[0]} to {extent[1]}, beyond 64-bit integers")
        wide |= extent is None or extent[0] < -(2**31) or extent[1] >= 2**31
    return wide


def is_computed(node: Lookup | Arithmetic) -> bool:
    """Whether an index of a lookup, a divisor, or the value of an operation could be out of range."""
    if isinstance(node, Lookup):
        return any(not isinstance(index, Symbol) or index.name not in AXES for index in node.indices)
    if node.sign in {"//", "%"} and not isinstance(node.right, Constant):
        return True
    return node.sign == "*" or any(isinstance(side, Constant) and abs(side.value) > 2**31 for side in (node.left, node.right))


def _check_lookup(lookup: Lookup, frame: Frame) -> None:
    for axis, index in enumerate(lookup.indices):
        size = frame.tables[lookup.table.key].shape[axis]
        extent = _extent(index, frame)
        if extent is None or (extent[0] >= 0 and extent[1] < size) or (isinstance(index, Symbol) and index.name in AXES):
            continue
        if {"q", "kv"} <= index.symbols:
            if getattr(lookup.table, "spare", False):
                continue  # a traced function may ask first whether it is inside; torch says so where it is not
        else:
            extent = _evaluated(index, frame)
        if extent[0] < 0 or extent[1] >= size:
            raise LoweringError(
                f"{lookup.brief()}: the index {index.brief()} ranges from {extent[0]} to {extent[1]}, but the table has {size} "
                "values along that axis; keep it inside with flexmask.minimum and flexmask.maximum"
            )


def reach_of(index: Index, frame: Frame) -> int | None:
    """One more than the greatest value of an index in a checked frame; None where that takes a host sync or every cell."""
    if isinstance(index, Symbol):
        extent = _extent(index, frame)
    elif frame.device.type != "cpu" or {"q", "kv"} <= index.symbols:
        return None
    else:
        extent = _evaluated(index, frame)
    return None if extent is None else extent[1] + 1


def _evaluated(index: Index, frame: Frame) -> Extent:
    axis = "kv" if "kv" in index.symbols else "q"
    position = frame.index(axis).view(1, 1, -1)
    values = index_closure(frame.settled(index), frame)(
        frame.index("b").view(-1, 1, 1), frame.index("h").view(1, -1, 1), position, position
    )
    least, most = torch.as_tensor(values).aminmax()
    return int(least), int(most)


def _extent(index: Index, frame: Frame) -> Extent | None:
    """The least and greatest value that an expression can take, or None where only the device knows."""
    match index:
        case Symbol(name):
            return _symbol_extent(name, frame)
        case Lookup(table):
            values = frame.tables[table.key]
            if devices.waits(values):
                return None
            least, most = values.aminmax()
            return int(least), int(most)
    return combined_extent(index, lambda below: _extent(below, frame))


def combined_extent(index: Index, extent: Callable[[Index], Extent | None]) -> Extent | None:
    """The least and greatest value of an expression from those of its parts, or None where one is unknown."""
    match index:
        case Constant(value):
            return value, value
        case Absolute(operand):
            inner = extent(operand)
            return inner and (max(0, inner[0], -inner[1]), max(-inner[0], inner[1]))
        case Choice(_, then, otherwise):
            pair = extent(then), extent(otherwise)
            return None if pair[0] is None or pair[1] is None else (min(pair[0][0], pair[1][0]), max(pair[0][1], pair[1][1]))
        case Arithmetic(sign, left, right):
            return _combined(sign, extent(left), extent(right))
    return None


def _symbol_extent(name: str, frame: Frame) -> Extent | None:
    match name:
        case "b":
            return 0, frame.batch - 1
        case "h":
            return 0, frame.heads - 1
        case "kv":
            return 0, frame.kv_len - 1
        case "q_len":
            return frame.q_len, frame.q_len
        case "kv_len":
            return frame.kv_len, frame.kv_len
    if isinstance(frame.q_offset, int):
        return frame.q_offset, frame.q_offset + frame.q_len - 1
    if devices.waits(frame.q_offset):
        return None
    least, most = frame.q_offset.aminmax()
    return int(least), int(most) + frame.q_len - 1


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
