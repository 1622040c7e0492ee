"""Decisions: blocks that are empty or full by the ranges of values in them, so that no cell has to be evaluated."""

from __future__ import annotations

from functools import reduce
from typing import Any, TypeAlias

import torch
from torch import Tensor

from flexmask.algebra import And, Compare, Mask, Not, Or, Truth, Xor
from flexmask.blocks import Entries, evaluated
from flexmask.evaluation import Evaluation
from flexmask.frame import Frame
from flexmask.index import FOLD_COMPARE, Index
from flexmask.separation import Matches, Reaches, Span, separate

__all__ = ["counted"]

#: For each block whether all of its cells are visible for certain, and whether none is.
Decision: TypeAlias = tuple[Tensor, Tensor]
#: The least and the greatest value in each block.
Limits: TypeAlias = tuple[Any, Any]


def counted(entries: Entries, frame: Frame, q_size: int, kv_size: int) -> Tensor:
    """The visible cells of single blocks, ``int64[n]``; waits for the device.

    Args:
        entries: query blocks as rows, key blocks as columns.
        frame: the frame of the mask's lowering.
        q_size: queries in a block.
        kv_size: keys in a block.
    """
    full, empty = _Decider(entries, frame, q_size, kv_size).decide(separate(frame.mask))
    q_start, kv_start = entries.row % -(-frame.q_len // q_size) * q_size, entries.column.long() * kv_size
    counts = (frame.q_len - q_start).clamp(max=q_size) * (frame.kv_len - kv_start).clamp(max=kv_size) * full
    left = (~(full | empty)).nonzero().squeeze(-1)
    if left.numel():
        parts = evaluated(Entries(entries.row[left], entries.column[left]), frame, q_size, kv_size)
        counts[left] = torch.cat([cells.sum((1, 2)) for _, cells in parts])
    return counts


class _Decider:
    def __init__(self, entries: Entries, frame: Frame, q_size: int, kv_size: int) -> None:
        self.frame, self.sizes = frame, {"q": q_size, "kv": kv_size}
        self.along = {"q": Evaluation(frame, "q"), "kv": Evaluation(frame, "kv")}
        q_blocks = -(-frame.q_len // q_size)
        self.place = {"q": entries.row % q_blocks, "kv": entries.column.long()}
        group = entries.row // q_blocks
        self.b, self.h = group // frame.heads, group % frame.heads
        self.none = torch.zeros_like(entries.row, dtype=torch.bool)
        self.known: dict[Any, Limits] = {}

    def decide(self, mask: Mask) -> Decision:
        match mask:
            case And(operands):
                return reduce(lambda x, y: (x[0] & y[0], x[1] | y[1]), map(self.decide, operands))
            case Or(operands):
                return reduce(lambda x, y: (x[0] | y[0], x[1] & y[1]), map(self.decide, operands))
            case Xor(operands):
                return reduce(lambda x, y: (x[0] & y[1] | x[1] & y[0], x[0] & y[0] | x[1] & y[1]), map(self.decide, operands))
            case Not(operand):
                full, empty = self.decide(operand)
                return empty, full
            case Truth(value):
                return (~self.none, self.none) if value else (self.none, ~self.none)
        return self.leaf(mask)

    def leaf(self, mask: Mask) -> Decision:
        """A condition in which query and key stand apart; of any other nothing is known."""
        match mask:
            case Span(start, stop):
                first, last = self.keys()
                start_of = (0, 0) if start is None else self.limits(start)
                stop_of = (self.frame.kv_len,) * 2 if stop is None else self.limits(stop)
                full = (first >= start_of[1]) & (last < stop_of[0])
                return full, (last < start_of[0]) | (first >= stop_of[1])
            case Reaches(column, value):
                keys, limit = self.limits(column), self.limits(value)
                return self.all(keys[1] <= limit[0]), self.all(keys[0] > limit[1])
            case Matches(column, value):
                keys, own = self.limits(column), self.limits(value)
                same = (keys[0] == own[1]) & (keys[1] == own[0])
                return self.all(same), self.all((keys[1] < own[0]) | (keys[0] > own[1]))
            case Compare(sign, left, right) if len(mask.symbols & {"q", "kv"}) < 2:
                return self.compared(sign, self.limits(left), self.limits(right))
        return self.none, self.none

    def compared(self, sign: str, left: Limits, right: Limits) -> Decision:
        if sign in {"==", "!="}:
            same = self.all((left[0] == right[1]) & (left[1] == right[0]))
            apart = self.all((left[1] < right[0]) | (left[0] > right[1]))
            return (same, apart) if sign == "==" else (apart, same)
        compare = FOLD_COMPARE[sign]
        worst, best = ((1, 0), (0, 1)) if sign in {"<", "<="} else ((0, 1), (1, 0))
        holds = self.all(compare(left[worst[0]], right[worst[1]]))
        return holds, ~self.all(compare(left[best[0]], right[best[1]]))

    def all(self, found: Any) -> Tensor:
        return found if isinstance(found, Tensor) else ~self.none if found else self.none

    def keys(self) -> tuple[Tensor, Tensor]:
        first = self.place["kv"] * self.sizes["kv"]
        return first, (first + (self.sizes["kv"] - 1)).clamp(max=self.frame.kv_len - 1)

    def limits(self, index: Index) -> Limits:
        """The least and the greatest value of an expression in each block."""
        if index.key not in self.known:
            axis = "kv" if "kv" in index.symbols else "q"
            values = self.along[axis].tensor(index).long()
            if values.shape[-1] > 1:
                size = self.sizes[axis]
                values = torch.nn.functional.pad(values, (0, -values.shape[-1] % size), mode="replicate").unflatten(
                    -1, (-1, size)
                )
                pair = values.aminmax(dim=-1)
            else:
                pair = values, values
            self.known[index.key] = self.gathered(pair[0], axis), self.gathered(pair[1], axis)
        return self.known[index.key]

    def gathered(self, values: Tensor, axis: str) -> Tensor:
        b = self.b if values.shape[0] > 1 else 0
        h = self.h if values.shape[1] > 1 else 0
        return values[b, h, self.place[axis] if values.shape[2] > 1 else 0].expand_as(self.none)
