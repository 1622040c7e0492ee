"""Expressions as functions of ``(b, h, q_idx, kv_idx)``, for kernels and for single cells: a flat list of steps.

A compiler inlines only a few nested calls, so the steps are a list. They capture only numbers, tensors and plain functions, so
that a compiled kernel has no other object to guard on. They take scalars, as FlexAttention passes them, or index tensors that
broadcast. Kernels count positions in 32 bits; an operation whose operands or result may need more is computed in 64.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from flexmask._vmap import vectorized
from flexmask.errors import LoweringError
from flexmask.expr.index import FOLD, FOLD_COMPARE, Absolute, Arithmetic, Choice, Constant, Index, Symbol
from flexmask.expr.mask import And, Compare, Mask, Not, Or, PerHead, Truth, Xor
from flexmask.expr.node import Key
from flexmask.expr.opaque import CapturedTensor, Opaque
from flexmask.expr.tables import Lookup
from flexmask.intervals.context import Context
from flexmask.intervals.extent import Read, extent, fits

__all__ = ["ARITHMETIC", "COMPARISON", "Closure", "Column", "closure_of", "greater", "lesser", "mask_closure", "opaque_call"]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Column(Index):
    """Precomputed values at ``b``, ``h`` and one position; ``q`` counts from 0 whatever the offset.

    Args:
        values: ``int64[B, H, n]``, with 1 for an axis that they do not depend on.
        axis: the position, ``"q"`` or ``"kv"``.
    """

    values: Tensor
    axis: str

    def _make_key(self) -> Key:
        return Key(("Column", id(self.values), self.axis))


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Widened(Index):
    """An operand that an operation needs in 64 bits."""

    operand: Index


#: As a ``mask_mod``, but for index expressions too: gives a tensor, or the int of a constant.
Closure: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Any]
#: A function, and the places of its operands: 0 to 3 are the four arguments, then come the results of the steps.
Step: TypeAlias = tuple[Callable[..., Any], tuple[int, ...]]


def lesser(x: Any, y: Any) -> Any:
    """The smaller of two tensors or integers."""
    if isinstance(y, int):
        return min(x, y) if isinstance(x, int) else x.clamp(max=y)
    return y.clamp(max=x) if isinstance(x, int) else torch.minimum(x, y)


def greater(x: Any, y: Any) -> Any:
    """The larger of two tensors or integers."""
    if isinstance(y, int):
        return max(x, y) if isinstance(x, int) else x.clamp(min=y)
    return y.clamp(min=x) if isinstance(x, int) else torch.maximum(x, y)


#: As :data:`flexmask.expr.index.FOLD`, for tensors and integers alike.
ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {**FOLD, "minimum": lesser, "maximum": greater}
COMPARISON: dict[str, Callable[[Any, Any], Any]] = {**FOLD_COMPARE}
JOINED: dict[type, Callable[[Any, Any], Any]] = {And: operator.and_, Or: operator.or_, Xor: operator.xor}


def mask_closure(context: Context) -> Closure:
    """The mask of a context as a closure."""
    return closure_of(context.with_lengths(context.mask), context)


def closure_of(node: Index | Mask, context: Context) -> Closure:
    """The closure of an expression with its lengths put in and expanded names.

    Of an index expression it gives an integer tensor, or the int of a constant, of a mask a boolean tensor.
    """
    program = _Program(context)
    program.add(node)
    return _closure(tuple(program.steps), program.places[node.key])


def _closure(steps: tuple[Step, ...], result: int) -> Closure:
    """Runs steps; a result is dropped after the last step that reads it."""
    last = {place: number for number, (_, places) in enumerate(steps) for place in places}
    freed = [[place for place in set(places) if last[place] == number] for number, (_, places) in enumerate(steps)]
    every = tuple((*step, tuple(place for place in done if place != result)) for step, done in zip(steps, freed, strict=True))

    def program(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Any:
        values: list[Any] = [b, h, q, kv]
        for compute, places, done in every:
            values.append(compute(*[values[place] for place in places]))
            for place in done:
                values[place] = None
        return values[result]

    return program


class _Program:
    """The steps of an expression, one for each distinct subexpression, operands before operations."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.steps: list[Step] = []
        self.places: dict[Any, int] = {name: place for place, name in enumerate(("b", "h", "q", "kv"))}

    def add(self, node: Index | Mask) -> None:
        """Adds the steps of an expression, without recursion, as Python's stack is short."""
        pending: list[Any] = [node]
        while pending:
            match pending.pop():
                case (key, compute, operands):
                    if key not in self.places:
                        self.places[key] = len(self.steps) + 4
                        self.steps.append((compute, tuple(self.places[operand] for operand in operands)))
                case node if node.key not in self.places:
                    pending += reversed(self.tasks(node))

    def tasks(self, node: Index | Mask) -> list[Any]:
        """The work for a node in order: nodes to add, and steps as (key, function, keys of operands)."""
        match node:
            case And(operands) | Or(operands) | Xor(operands):  # one after another, so that few values are held at a time
                done: list[Any] = [operands[0]]
                key: Any = operands[0].key
                for count, operand in enumerate(operands[1:], 2):
                    joined = node.key if count == len(operands) else object()  # which no other step can have
                    done += [operand, (joined, JOINED[type(node)], (key, operand.key))]
                    key = joined
                return done
            case PerHead(masks):
                each = Or.make(tuple(And.make((Symbol("h") == head, mask)) for head, mask in enumerate(masks)))
                return [each, (node.key, _same, (each.key,))]
        compute, parts = self.step(node)
        keys = tuple(part if isinstance(part, str) else part.key for part in parts)
        return [*(part for part in parts if not isinstance(part, str)), (node.key, compute, keys)]

    def step(self, node: Index | Mask) -> tuple[Callable[..., Any], list[Any]]:
        """The function that computes a node, and its operands: nodes, or names of the arguments."""
        context = self.context
        match node:
            case Constant(value):
                return lambda: value, []
            case Symbol("kv"):
                return _same, ["kv"]
            case Symbol("b" | "h" as name):  # an axis of size 1 may be broadcast: it is read at 0
                return (_same if (context.batch if name == "b" else context.heads) > 1 else lambda place: place * 0), [name]
            case Symbol():
                return _query(context.q_offset)
            case Widened(operand):
                return lambda values: values.to(torch.int64), [operand]
            case Arithmetic(sign, left, right):
                return ARITHMETIC[sign], self.operands([left, right], node)
            case Absolute(operand):
                return abs, self.operands([operand], node)
            case Choice(condition, then, otherwise):
                return torch.where, [condition, *self.operands([then, otherwise])]
            case Lookup(table, indices):
                return _lookup(context.tables[table.key], len(indices)), list(indices)
            case Opaque():
                call, varying = opaque_call(node, context)
                return lambda *values: vectorized(call, *values), list(varying)
            case Column():
                return _column(node), ["b", "h", node.axis]
            case Truth(value):
                return (_ones if value else _zeros), ["b"]
            case Compare("!=", Lookup(table, indices), Constant(0)) if context.tables[table.key].dtype == torch.bool:
                return _gathered(context.tables[table.key], len(indices)), list(indices)
            case Compare(sign, left, right):
                return COMPARISON[sign], self.operands([left, right])
            case Not(operand):
                return operator.invert, [operand]
        raise LoweringError(f"no expression form for {type(node).__name__} {node}")

    def operands(self, operands: list[Index], *result: Index) -> list[Index]:
        """The operands of an operation, in 64 bits where one of them or the result may need more than 32."""
        if all(fits(extent(index, self.context, Read.NOTHING), 32) for index in (*operands, *result)):
            return operands
        ready = Constant | Lookup | Opaque | Column  # integers of 64 bits already
        return [operand if isinstance(operand, ready) else Widened(operand) for operand in operands]


def _same(value: Any) -> Any:
    return value


def _ones(like: Tensor) -> Tensor:
    return like.new_ones((), dtype=torch.bool)


def _zeros(like: Tensor) -> Tensor:
    return like.new_zeros((), dtype=torch.bool)


def _query(offset: int | Tensor) -> tuple[Callable[..., Any], list[Any]]:
    if isinstance(offset, Tensor):
        of_sequence = offset
        return (lambda b, q: q + of_sequence[b]) if offset.numel() > 1 else lambda b, q: q + of_sequence[0], ["b", "q"]
    return (lambda q: q + offset) if offset else _same, ["q"]


def _column(node: Column) -> Callable[..., Any]:
    values = node.values
    if values.shape[:2] == (1, 1):
        line = values.flatten()
        return lambda b, h, position: line[position]
    b_step, h_step = int(values.shape[0] > 1), int(values.shape[1] > 1)
    return lambda b, h, position: values[b * b_step, h * h_step, position]


def _lookup(data: Tensor, axes: int) -> Callable[..., Any]:
    found = _gathered(data, axes)
    if data.dtype == torch.bool:  # truth values count as 0 and 1
        return lambda *at: found(*at).to(torch.int64)
    return found


def _gathered(data: Tensor, axes: int) -> Callable[..., Any]:
    if not axes:
        return lambda: data
    return (lambda at: data[at]) if axes == 1 else lambda *at: data[at]


def opaque_call(node: Opaque, context: Context) -> tuple[Callable[..., Any], list[Index | Mask]]:
    """The call of a node, with the calls below it, as a function of what varies below these, and this."""
    varying: dict[Any, Index | Mask] = {}
    steps: list[tuple[Callable[..., Any], tuple[str, ...], list[tuple[bool, Any]]]] = []
    places: dict[Any, int] = {}  # of each call in the steps

    def argument(value: Any) -> tuple[bool, Any]:
        """A value as it is, or where to find it: from 0 up in the steps, below 0 in what varies."""
        if isinstance(value, CapturedTensor):
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
    return called, list(varying.values())
