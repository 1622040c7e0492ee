"""What each operation of an expression computes, on tensors and on Python integers.

Two modules run operations: :mod:`flexmask.intervals.evaluation` at all positions of one axis, and
:mod:`flexmask.intervals.closures` at single cells, in kernels too.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import reduce
from typing import Any, TypeAlias

import torch
from torch import Tensor

from flexmask._transforms import are_ints, vectorized
from flexmask.errors import LoweringError
from flexmask.expr.index import FOLD, FOLD_COMPARE, Absolute, Arithmetic, Choice, Index, Opaque
from flexmask.expr.mask import And, Compare, Mask, Not, Or, PerHead, Xor
from flexmask.expr.tables import Lookup, Slot
from flexmask.intervals.context import Context

#: A function, and the expressions whose values it takes.
Operation: TypeAlias = tuple[Callable[..., Any], list["Index | Mask"]]


def lesser(x: Any, y: Any) -> Any:
    """The smaller of two tensors or integers."""
    if not isinstance(y, Tensor):
        return x.clamp(max=y) if isinstance(x, Tensor) else min(x, y) if are_ints(x, y) else torch.sym_min(x, y)
    return torch.minimum(x, y) if isinstance(x, Tensor) else y.clamp(max=x)


def greater(x: Any, y: Any) -> Any:
    """The larger of two tensors or integers."""
    if not isinstance(y, Tensor):
        return x.clamp(min=y) if isinstance(x, Tensor) else max(x, y) if are_ints(x, y) else torch.sym_max(x, y)
    return torch.maximum(x, y) if isinstance(x, Tensor) else y.clamp(min=x)


def clamped(values: Any, low: int, high: int) -> Any:
    """The nearest number in ``low .. high`` to each."""
    return values.clamp(low, high) if isinstance(values, Tensor) else lesser(greater(values, low), high)


#: As :data:`flexmask.expr.index.FOLD`, for tensors and integers alike.
ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {**FOLD, "minimum": lesser, "maximum": greater}
JOINED: dict[type, Callable[[Any, Any], Any]] = {And: operator.and_, Or: operator.or_, Xor: operator.xor}


def operation(node: Index | Mask, context: Context) -> Operation:
    """What a node computes from the values of its operands; its names are expanded.

    Masks are boolean, index expressions integers of 64 bits, except those of an opaque call.
    """
    match node:
        case Arithmetic(sign, left, right):
            return ARITHMETIC[sign], [left, right]
        case Absolute(operand):
            return abs, [operand]
        case Choice(condition, then, otherwise):
            return torch.where, [condition, then, otherwise]
        case Lookup(table, indices):
            return _integers(table_lookup(context.tables[table.key], len(indices)), context.tables[table.key]), list(indices)
        case Opaque():
            return _opaque_call(node, context)
        case Compare(sign, left, right):
            return FOLD_COMPARE[sign], [left, right]
        case And(operands) | Or(operands) | Xor(operands):
            join = JOINED[type(node)]
            return lambda *values: reduce(join, values), list(operands)
        case Not(operand):
            return operator.invert, [operand]
        case PerHead():
            return same, [node.by_head()]
    raise LoweringError(f"no expression form for {type(node).__name__} {node}")


def table_lookup(data: Tensor, axes: int) -> Callable[..., Tensor]:
    """Looks up values of a table by an index for each of its axes."""
    if not axes:
        return lambda: data
    return (lambda at: data[at]) if axes == 1 else lambda *at: data[at]


def _integers(found: Callable[..., Tensor], data: Tensor) -> Callable[..., Tensor]:
    """A lookup in which truth values count as 0 and 1."""
    return (lambda *at: found(*at).to(torch.int64)) if data.dtype == torch.bool else found


def same(value: Any) -> Any:
    """The value itself."""
    return value


def _opaque_call(node: Opaque, context: Context) -> Operation:
    """The call of a node, with the calls below it, as a function of what varies below these, and this."""
    varying: dict[Any, Index | Mask] = {}
    steps: list[tuple[Callable[..., Any], tuple[str, ...], list[tuple[bool, Any]]]] = []
    places: dict[Any, int] = {}  # of each call in the steps

    def argument(value: Any) -> tuple[bool, Any]:
        """A value as it is, or where to find it: from 0 up in the steps, below 0 in what varies."""
        if isinstance(value, Slot):
            return False, context.tables[value.key]
        if isinstance(value, Opaque):
            return True, step(value)
        if isinstance(value, Index | Mask):
            varying.setdefault(value.key, value)
            return True, ~list(varying).index(value.key)
        return False, value

    def step(call: Opaque) -> int:
        if call.key not in places:
            steps.append((call.function, call.keywords, list(map(argument, call.arguments))))
            places[call.key] = len(steps) - 1
        return places[call.key]

    step(node)

    def called(*values: Any) -> Any:
        found: list[Any] = []
        for function, named, arguments in steps:
            given = [(found[value] if value >= 0 else values[~value]) if is_found else value for is_found, value in arguments]
            first = len(given) - len(named)
            found.append(function(*given[:first], **dict(zip(named, given[first:], strict=True))))
        return found[-1]

    called.__name__ = getattr(node.function, "__name__", type(node.function).__name__)
    return lambda *values: vectorized(called, *values), list(varying.values())
