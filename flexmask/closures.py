"""The expression form: an expression as nested plain closures of ``(b, h, q_idx, kv_idx)``.

The closures capture nothing but numbers, tensors and each other, so that a compiler has no Python object to guard on. They
take scalars, as FlexAttention passes them, or index tensors that broadcast. Kernels count positions in 32 bits; an operation
whose operands or result may need more has its operands converted to 64.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from flexmask.algebra import And, Compare, Mask, Not, Or, PerHead, Truth, Xor
from flexmask.errors import LoweringError
from flexmask.extents import Read, extent, fits
from flexmask.frame import Frame
from flexmask.index import FOLD, FOLD_COMPARE, Absolute, Arithmetic, Choice, Constant, Index, Symbol
from flexmask.opaque import Captured, Opaque
from flexmask.tables import Lookup
from flexmask.vectorising import vectorised

__all__ = [
    "ARITHMETIC",
    "COMPARISON",
    "Column",
    "frame_closure",
    "greater",
    "index_closure",
    "lesser",
    "mask_closure",
    "opaque_call",
]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Column(Index):
    """Values that were worked out before, at ``b``, ``h`` and one position; ``q`` counts from 0 whatever the offset.

    Args:
        values: ``int64[B, H, n]``, with 1 for an axis that they do not depend on.
        axis: the position, ``"q"`` or ``"kv"``.
    """

    values: Tensor
    axis: str

    def _make_key(self) -> tuple[Any, ...]:
        return ("Column", id(self.values), self.axis)


IndexClosure = Callable[[Tensor, Tensor, Tensor, Tensor], Any]
MaskClosure = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


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


#: As :data:`flexmask.index.FOLD`, for tensors and integers alike.
ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {**FOLD, "minimum": lesser, "maximum": greater}
COMPARISON: dict[str, Callable[[Any, Any], Any]] = {**FOLD_COMPARE}


def frame_closure(frame: Frame) -> MaskClosure:
    """The closure of the mask of a frame."""
    return mask_closure(frame.settled(frame.mask), frame)


def index_closure(node: Index, frame: Frame) -> IndexClosure:
    """The closure of an index expression with settled lengths; it gives an integer tensor, or the int of a constant."""
    match node:
        case Constant(value):
            return lambda b, h, q, kv: value
        case Symbol():
            return _symbol(node.name, frame)
        case Arithmetic(sign, left, right):
            return _binary(ARITHMETIC[sign], *_operands(frame, [left, right], node))
        case Absolute(operand):
            (inner,) = _operands(frame, [operand], node)
            return lambda b, h, q, kv: abs(inner(b, h, q, kv))
        case Choice(condition, then, otherwise):
            chosen = mask_closure(condition, frame)
            yes, no = _operands(frame, [then, otherwise])
            return lambda b, h, q, kv: torch.where(chosen(b, h, q, kv), yes(b, h, q, kv), no(b, h, q, kv))
        case Lookup(table, indices):
            return _lookup(frame.tables[table.key], [index_closure(index, frame) for index in indices])
        case Opaque():
            return _opaque(node, frame)
        case Column():
            return _column(node)
    raise LoweringError(f"no expression form for {type(node).__name__} {node}")


def mask_closure(node: Mask, frame: Frame) -> MaskClosure:
    """The closure of a mask with settled lengths and expanded names; it gives a boolean tensor."""
    match node:
        case Truth(True):
            return lambda b, h, q, kv: b.new_ones((), dtype=torch.bool)
        case Truth(False):
            return lambda b, h, q, kv: b.new_zeros((), dtype=torch.bool)
        case Compare("!=", Lookup(table, indices), Constant(0)) if frame.tables[table.key].dtype == torch.bool:
            return _gathered(frame.tables[table.key], [index_closure(index, frame) for index in indices])
        case Compare(sign, left, right):
            return _binary(COMPARISON[sign], *_operands(frame, [left, right]))
        case And(operands):
            return reduce(lambda f, g: _binary(operator.and_, f, g), (mask_closure(o, frame) for o in operands))
        case Or(operands):
            return reduce(lambda f, g: _binary(operator.or_, f, g), (mask_closure(o, frame) for o in operands))
        case Xor(operands):
            return reduce(lambda f, g: _binary(operator.xor, f, g), (mask_closure(o, frame) for o in operands))
        case Not(operand):
            inner = mask_closure(operand, frame)
            return lambda b, h, q, kv: ~inner(b, h, q, kv)
        case PerHead(masks):
            return mask_closure(Or.make(tuple((Symbol("h") == head) & mask for head, mask in enumerate(masks))), frame)
    raise LoweringError(f"no expression form for {type(node).__name__} {node}")


def _operands(frame: Frame, operands: list[Index], *result: Index) -> list[IndexClosure]:
    """The closures of the operands of an operation, in 64 bits where one of them or the result may need more than 32."""
    closures = [index_closure(operand, frame) for operand in operands]
    if all(fits(extent(index, frame, Read.NOTHING), 32) for index in (*operands, *result)):
        return closures
    ready = Constant | Lookup | Opaque | Column  # integers of 64 bits already
    return [f if isinstance(node, ready) else _widened(f) for node, f in zip(operands, closures, strict=True)]


def _widened(closure: IndexClosure) -> IndexClosure:
    return lambda b, h, q, kv: closure(b, h, q, kv).to(torch.int64)


def _symbol(name: str, frame: Frame) -> IndexClosure:
    match name:
        case "b":  # an axis of size 1 may stand for more: it is read at 0
            return (lambda b, h, q, kv: b) if frame.batch > 1 else (lambda b, h, q, kv: b * 0)
        case "h":
            return (lambda b, h, q, kv: h) if frame.heads > 1 else (lambda b, h, q, kv: h * 0)
        case "kv":
            return lambda b, h, q, kv: kv
    return _query(frame.q_offset)


def _query(offset: int | Tensor) -> IndexClosure:
    if isinstance(offset, Tensor):
        of_sequence = offset
        return (lambda b, h, q, kv: q + of_sequence[b]) if offset.numel() > 1 else lambda b, h, q, kv: q + of_sequence[0]
    if offset:
        return lambda b, h, q, kv: q + offset
    return lambda b, h, q, kv: q


def _binary(operation: Callable[[Any, Any], Any], left: IndexClosure, right: IndexClosure) -> IndexClosure:
    return lambda b, h, q, kv: operation(left(b, h, q, kv), right(b, h, q, kv))


def _column(node: Column) -> IndexClosure:
    values, along_q = node.values, node.axis == "q"
    if values.shape[:2] == (1, 1):
        line = values.flatten()
        return (lambda b, h, q, kv: line[q]) if along_q else lambda b, h, q, kv: line[kv]
    b_step, h_step = int(values.shape[0] > 1), int(values.shape[1] > 1)
    return lambda b, h, q, kv: values[b * b_step, h * h_step, q if along_q else kv]


def _lookup(data: Tensor, indices: list[IndexClosure]) -> IndexClosure:
    if data.dtype == torch.bool:  # truth values count as 0 and 1
        truth = _gathered(data, indices)
        return lambda b, h, q, kv: truth(b, h, q, kv).to(torch.int64)
    return _gathered(data, indices)


def _gathered(data: Tensor, indices: list[IndexClosure]) -> IndexClosure:
    match indices:
        case []:
            return lambda b, h, q, kv: data
        case [first]:
            return lambda b, h, q, kv: data[first(b, h, q, kv)]
        case [first, second]:
            return lambda b, h, q, kv: data[first(b, h, q, kv), second(b, h, q, kv)]
    return lambda b, h, q, kv: data[tuple(index(b, h, q, kv) for index in indices)]


def opaque_call(node: Opaque, frame: Frame) -> tuple[Callable[..., Any], list[Index | Mask]]:
    """The call of a node, with the calls below it, as a function of what varies below these, and this."""
    varying: dict[Any, Index | Mask] = {}
    steps: list[tuple[Callable[..., Any], tuple[str, ...], list[tuple[bool, Any]]]] = []
    places: dict[Any, int] = {}  # of each call in the steps

    def argument(value: Any) -> tuple[bool, Any]:
        """A value as it is, or where to find it: from 0 up in the steps, below 0 in what varies."""
        if isinstance(value, Captured):
            return False, frame.tables[value.key]
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


def _opaque(node: Opaque, frame: Frame) -> IndexClosure:
    call, varying = opaque_call(node, frame)
    closures = [mask_closure(value, frame) if isinstance(value, Mask) else index_closure(value, frame) for value in varying]
    return lambda b, h, q, kv: vectorised(call, *[closure(b, h, q, kv) for closure in closures])
