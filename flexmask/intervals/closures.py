"""Expressions as functions of ``(b, h, q_idx, kv_idx)``, for kernels and for single cells: a flat list of steps.

A compiler inlines only a few nested calls, so the steps are a list. They capture only numbers, tensors and plain functions, so
that a compiled kernel has no other object to guard on. They take scalars, as FlexAttention passes them, or index tensors that
broadcast. Kernels count positions in 32 bits; an operation whose operands or result may need more is computed in 64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from flexmask.expr.form import Key
from flexmask.expr.index import Absolute, Arithmetic, Choice, Constant, Index, Opaque, Symbol
from flexmask.expr.mask import And, Compare, Mask, Or, Truth, Xor
from flexmask.expr.tables import Lookup
from flexmask.intervals.context import Context
from flexmask.intervals.extent import Read, extent, fits
from flexmask.intervals.operations import JOINED, operation, same, table_lookup


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Column(Index):
    """Precomputed values at ``b``, ``h`` and one position; ``q`` counts from 0 whatever the offset.

    Args:
        values: ``int64[B, H, n]``, with 1 for an axis that they do not depend on.
        axis: the position, ``"q"`` or ``"kv"``.
    """

    KEPT: ClassVar[bool] = False
    values: Tensor
    axis: str

    def _make_key(self) -> Key:
        return Key("Column", id(self.values), self.axis)

    def _make_digest(self) -> str:
        return f"Column {id(self.values)} {self.axis}"  # no graph is kept for it, and reading the values would force a host sync


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Widened(Index):
    """An operand that an operation needs in 64 bits."""

    operand: Index


#: As a ``mask_mod``, but for index expressions too: gives a tensor, or the int of a constant.
Closure: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Any]
#: A function, and the places of its operands: 0 to 3 are the four arguments, then come the results of the steps.
Step: TypeAlias = tuple[Callable[..., Any], tuple[int, ...]]


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
                return same, ["kv"]
            case Symbol("q_len" | "kv_len" as name):
                length = getattr(context, name)
                return lambda: length, []
            case Symbol("b" | "h" as name):  # an axis of size 1 may be broadcast: it is read at 0
                return (same if context.size(name) > 1 else lambda place: place * 0), [name]
            case Symbol():
                return _query(context.q_offset)
            case Widened(operand):
                return (lambda values: values.to(torch.int64) if isinstance(values, Tensor) else values), [operand]
            case Column():
                return _column(node), ["b", "h", node.axis]
            case Truth(value):
                return lambda like: like.new_full((), value, dtype=torch.bool), ["b"]
            case Compare("!=", Lookup(table, indices), Constant(0)) if context.tables[table.key].dtype == torch.bool:
                return table_lookup(context.tables[table.key], len(indices)), list(indices)
        compute, operands = operation(node, context)
        match node:
            case Arithmetic() | Absolute():
                return compute, self.widened(operands, node)
            case Choice():
                return compute, [operands[0], *self.widened(operands[1:])]
            case Compare():
                return compute, self.widened(operands)
        return compute, list(operands)

    def widened(self, operands: list[Any], *result: Index) -> list[Any]:
        """The operands of an operation, in 64 bits where one of them or the result may need more than 32."""
        if all(fits(extent(index, self.context, Read.NOTHING), 32) for index in (*operands, *result)):
            return operands
        ready = Constant | Lookup | Opaque | Column  # integers of 64 bits already
        return [operand if isinstance(operand, ready) else Widened(operand) for operand in operands]


def _query(offset: int | Tensor) -> tuple[Callable[..., Any], list[Any]]:
    if isinstance(offset, Tensor):
        of_sequence = offset
        return (lambda b, q: q + of_sequence[b]) if offset.numel() > 1 else lambda b, q: q + of_sequence[0], ["b", "q"]
    return (lambda q: q + offset) if offset else same, ["q"]


def _column(node: Column) -> Callable[..., Any]:
    values, axes = without_unit_axes(node.values, 2)
    return lambda b, h, position: values[(*[(b, h)[axis] for axis in axes], position)]


def without_unit_axes(tensor: Tensor, count: int) -> tuple[Tensor, tuple[int, ...]]:
    """A tensor without those of its first ``count`` axes that have size 1, and which of these it still has."""
    axes = tuple([axis for axis, size in enumerate(tensor.shape[:count]) if size != 1])
    return tensor.squeeze([axis for axis in range(count) if axis not in axes]), axes
