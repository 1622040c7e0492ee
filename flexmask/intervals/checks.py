"""Checks before any evaluation: no index leaves its table, no value overflows 64 bits, nothing is divided by zero."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor

from flexmask import _sync
from flexmask._transforms import is_captured
from flexmask.errors import LoweringError
from flexmask.expr.index import Absolute, Arithmetic, Constant, Index, Opaque, Symbol
from flexmask.expr.node import Node
from flexmask.expr.tables import Lookup, Ranged, Slot, Table
from flexmask.intervals import laws
from flexmask.intervals.context import MAX_LENGTH, Context
from flexmask.intervals.evaluation import Evaluation
from flexmask.intervals.extent import INT64, Extent, Read, combined_extent, extent, fits, value_range, values_extent

#: The symbols that index an axis of a mask; data indexed by one has that axis' size.
AXES = {"b", "h", "q", "kv"}

#: What the checks are about.
Computed: TypeAlias = Lookup | Arithmetic | Absolute


def is_computed(node: Computed, known: dict[Any, Extent | None]) -> bool:
    """Whether an index of a lookup, a divisor, or the value of an operation could be out of range, whatever the lengths.

    Args:
        node: the lookup or operation.
        known: value ranges at any length, which calls for one mask share.
    """
    if isinstance(node, Lookup):
        return any(not isinstance(index, Symbol) or index.name not in AXES for index in node.indices)
    if isinstance(node, Arithmetic) and node.sign in {"//", "%"} and not isinstance(node.right, Constant):
        return True
    widest = combined_extent(node, lambda below: value_range(below, _widest, known))
    return widest is None or not fits(widest)


def _widest(leaf: Index) -> Extent | None:
    """The extent of a symbol or a lookup at any length, by the kind of its data alone."""
    match leaf:
        case Symbol():
            return 0, MAX_LENGTH
        case Lookup(table):
            source = table.source if isinstance(table, Ranged) else table
            if isinstance(source, Slot) and not source.boolean:
                limits = torch.iinfo(source.dtype)
                return limits.min, limits.max
            return (0, 1) if isinstance(source, Table) and source.boolean else INT64
    return None


def check_ranges(computed: list[Computed], context: Context) -> None:
    """Checks computed indices, divisors and values in a context. Values in another device's memory are not read nor checked.

    Args:
        computed: the nodes of the context's mask for which :func:`is_computed` holds, inner ones before those around them.
        context: the context, its tables ready.

    Raises:
        LoweringError: an index that leaves its table, a divisor that may be 0, or a value beyond 64 bits.
    """
    for node in computed:
        if isinstance(node, Lookup):
            _check_lookup(node, context)
            continue
        if isinstance(node, Arithmetic) and node.sign in {"//", "%"} and _is_known(node.right, context):
            low, high = extent(node.right, context, Read.ALL)
            if low <= 0 <= high:
                given = f"{context.filled(node.right).brief()} ranges from {low} to {high}"
                raise LoweringError(f"{context.filled(node).brief()} may divide by 0: {given}")
        found = combined_extent(node, lambda below: extent(below, context))
        if found is None or fits(found) or not _is_known(node, context):
            continue
        found = combined_extent(node, lambda below: extent(below, context, Read.ALL))
        if found is not None and not fits(found) and _overflows(node, context):
            raise LoweringError(
                f"{context.filled(node).brief()} ranges from {found[0]} to {found[1]}, beyond 64-bit integers; where a great "
                "number means that there is no limit, compare with it alone, or take a number such as 2**60"
            )


def _is_known(index: Index, context: Context) -> bool:
    """Whether all data that an expression depends on can be read."""

    def is_hidden(node: Node) -> bool:
        match node:
            case Opaque():
                return True
            case Symbol("q"):
                return context.q_end is None
            case Lookup(table):
                return _sync.needs_sync(context.tables[table.key])
        return False

    return not any(map(is_hidden, index.walk()))


def _overflows(node: Arithmetic | Absolute, context: Context) -> bool:
    """Whether an operation overflows by the values of its operands, which together may be less than what their extents allow.

    In a graph, which has no values, the extents decide.
    """
    operands = [node.operand] if isinstance(node, Absolute) else [node.left, node.right]
    if is_captured() or any({"q", "kv"} <= operand.symbols for operand in operands):
        return True
    of_operands = {operand.key: _evaluated(operand, context) for operand in operands}
    ends = {key: values_extent(values) for key, values in of_operands.items()}
    found = combined_extent(node, lambda below: ends[below.key])
    if found is None or fits(found):
        return False
    if isinstance(node, Absolute) or {"q", "kv"} <= node.symbols or node.sign not in laws.WRAPS:
        return True
    left, right = (of_operands[operand.key] for operand in operands)
    return bool(laws.WRAPS[node.sign](left, right, _evaluated(node, context)).any())


def _check_lookup(lookup: Lookup, context: Context) -> None:
    for axis, index in enumerate(lookup.indices):
        size, is_along_one = context.tables[lookup.table.key].shape[axis], not {"q", "kv"} <= index.symbols
        if isinstance(index, Symbol) and index.name in AXES:
            continue
        if not _is_known(index, context):
            if is_captured() and is_along_one and not any(isinstance(node, Opaque) for node in index.walk()):
                _require_inside(lookup, index, size, context)  # torch takes an index below 0 for one from the end
            continue
        found = extent(index, context, Read.ALL)
        if found[0] >= 0 and found[1] < size:
            continue
        if is_along_one:
            if is_captured():
                _require_inside(lookup, index, size, context, everywhere=True)
                continue
            found = values_extent(_evaluated(index, context))
        elif getattr(lookup.table, "may_be_longer", False):
            continue  # a traced function may ask first whether it is inside; torch says so where it is not
        if found[0] < 0 or found[1] >= size:
            raise LoweringError(
                f"{context.filled(lookup).brief()}: the index {context.filled(index).brief()} ranges from {found[0]} to "
                f"{found[1]}, but the table has {size} values along that axis; keep it inside with flexmask.minimum and "
                "flexmask.maximum"
            )


def _require_inside(lookup: Lookup, index: Index, size: int, context: Context, *, everywhere: bool = False) -> None:
    """As :func:`flexmask._sync.require`, that an index does not leave its table."""

    def is_inside() -> Tensor:
        values = _evaluated(index, context)
        return (values >= 0) & (values < size)

    message = f"{lookup.brief()}: the index {index.brief()} leaves the table"
    _sync.require(is_inside, context.device, message, everywhere=everywhere)


def end_of_index(index: Index, context: Context) -> int | Tensor | None:
    """One more than the greatest value of an index in a checked context; None where that takes a host sync or every cell.

    In a graph it is a tensor where it depends on values.
    """
    if isinstance(index, Symbol) and _is_known(index, context):
        return context.kv_len if index.name == "kv" else context.q_end if index.name == "q" else extent(index, context)[1] + 1
    if context.device.type != "cpu" or {"q", "kv"} <= index.symbols or (isinstance(index, Symbol) and not is_captured()):
        return None
    if isinstance(index, Symbol) and isinstance(context.q_offset, Tensor):  # the queries
        return (context.q_offset if context.q_offset.numel() == 1 else context.q_offset.max()) + context.q_len
    end = _evaluated(index, context).max() + 1
    return end if is_captured() else int(end)


def _evaluated(index: Index, context: Context) -> Tensor:
    return Evaluation(context, "kv" if "kv" in index.symbols else "q").tensor(index)
