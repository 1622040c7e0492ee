"""Evaluation: the values of an expression at all queries, or at all keys, each common part worked out once."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from flexmask.algebra import Compare, Mask
from flexmask.closures import ARITHMETIC, COMPARISON, Column, MaskClosure, index_closure, mask_closure, opaque_call
from flexmask.frame import Frame
from flexmask.index import Absolute, Arithmetic, Constant, Index, Symbol
from flexmask.nodes import Node
from flexmask.opaque import Opaque
from flexmask.tables import Lookup
from flexmask.vectorising import vectorised

__all__ = ["Evaluation", "hoisted_closure"]


class Evaluation:
    """The values of expressions in a frame along one axis of positions.

    Args:
        frame: the frame of the lowering.
        axis: ``"q"`` or ``"kv"``; expressions may depend on ``b``, ``h`` and this symbol.
    """

    def __init__(self, frame: Frame, axis: str) -> None:
        self.frame, self.axis = frame, axis
        self.known: dict[Any, Any] = {}

    def tensor(self, node: Index | Mask) -> Tensor:
        """The values as ``int64`` or ``bool`` ``[B, H, n]``, with 1 for an axis that they do not depend on."""
        return self.shaped(self.values(self.frame.settled(node)))

    def shaped(self, values: Any) -> Tensor:
        """Values as ``[B, H, n]``, also where they are a number or a tensor without axes."""
        found = values if isinstance(values, Tensor) else torch.full((1, 1, 1), values, device=self.frame.device)
        return found.view(1, 1, 1) if found.dim() == 0 else found

    def values(self, node: Any) -> Any:
        """As :meth:`tensor` for a settled expression, or a Python number where nothing varies."""
        if node.key not in self.known:
            self.known[node.key] = self._values(node)
        return self.known[node.key]

    def _values(self, node: Any) -> Any:
        match node:
            case Constant(value):
                return value
            case Symbol(name):
                return self._symbol(name)
            case Lookup(table, indices) if _is_plain(indices):
                return self._sliced(self.frame.tables[table.key], [index.name for index in indices])  # type: ignore[attr-defined]
            case Arithmetic(sign, left, right):
                return ARITHMETIC[sign](self.values(left), self.values(right))
            case Absolute(operand):
                return abs(self.values(operand))
            case Compare(sign, left, right):
                return COMPARISON[sign](self.values(left), self.values(right))
            case Opaque():
                call, varying = opaque_call(node, self.frame)
                return vectorised(call, *map(self.values, varying))
        closure = mask_closure(node, self.frame) if isinstance(node, Mask) else index_closure(node, self.frame)
        position = self.frame.index(self.axis).view(1, 1, -1)
        b, h = self.frame.index("b").view(-1, 1, 1), self.frame.index("h").view(1, -1, 1)
        return closure(b, h, position, position)

    def _symbol(self, name: str) -> Tensor:
        values = self.frame.index(name)
        if name == "b":
            return values.view(-1, 1, 1)
        if name == "h":
            return values.view(1, -1, 1)
        offset = self.frame.q_offset
        if name == "kv" or (isinstance(offset, int) and offset == 0):
            return values.view(1, 1, -1)
        return values.view(1, 1, -1) + (offset.view(-1, 1, 1) if isinstance(offset, Tensor) else offset)

    def _sliced(self, data: Tensor, names: list[str]) -> Tensor:
        """A lookup at plain symbols: the table itself, its axes put where the symbols have theirs."""
        offset, n = self.frame.q_offset, self.frame.q_len
        if "q" in names and isinstance(offset, Tensor):
            return _integer(data[tuple(self._symbol(name) for name in names)])
        if "q" in names:
            data = data.narrow(names.index("q"), int(offset), n)
        if "kv" in names:  # a derived table may have more, as may a captured one
            data = data.narrow(names.index("kv"), 0, self.frame.kv_len)
        for name, size in (("b", self.frame.batch), ("h", self.frame.heads)):
            if name in names and data.shape[names.index(name)] > size:
                data = data.narrow(names.index(name), 0, size)
        order = ["b", "h", self.axis]
        data = data.permute([names.index(name) for name in order if name in names])
        return _integer(data[tuple(slice(None) if name in names else None for name in order)])


def hoisted_closure(frame: Frame) -> MaskClosure:
    """The closure of the mask of a frame, what depends on the query or on the key alone worked out beforehand."""
    along = {"q": Evaluation(frame, "q"), "kv": Evaluation(frame, "kv")}

    def hoisted(node: Node) -> Node | None:
        if (
            not isinstance(node, Index)
            or isinstance(node, Symbol | Constant)
            or (isinstance(node, Opaque) and node.shape)
            or (isinstance(node, Lookup) and _is_plain(node.indices))
        ):
            return None
        axes = node.symbols & {"q", "kv"}
        if len(axes) != 1:
            return None
        (axis,) = axes
        values = along[axis].tensor(node)
        shape = (*values.shape[:2], frame.q_len if axis == "q" else frame.kv_len)
        return Column(values.expand(shape), axis)

    return mask_closure(cast(Mask, frame.settled(frame.mask).replace(hoisted)), frame)


def _integer(values: Tensor) -> Tensor:
    return values.to(torch.int64) if values.dtype == torch.bool else values


def _is_plain(indices: tuple[Index, ...]) -> bool:
    names = [index.name for index in indices if isinstance(index, Symbol)]
    return len(names) == len(indices) == len(set(names))
