"""Decisions about blocks from the values in them, before any cell is evaluated: which are empty or full, and which are alike.

Ranges of values decide the blocks in which a condition holds everywhere or nowhere. Of the others many have the same cells: in
``(q - kv) % 64 == 0`` a block depends on the remainder of its first query and key alone, so that one of each kind is evaluated.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from itertools import product
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from flexmask.algebra import And, Compare, Mask, Not, Or, PerHead, Truth, Xor
from flexmask.blocks import Entries
from flexmask.closures import ARITHMETIC
from flexmask.evaluation import Evaluation
from flexmask.frame import Frame
from flexmask.index import FOLD_COMPARE, Absolute, Arithmetic, Choice, Constant, Index, Symbol, h, kv
from flexmask.nodes import Node
from flexmask.opaque import Opaque
from flexmask.separation import Linear, Matches, Reaches, Span, separate
from flexmask.tables import Lookup

__all__ = ["Decider", "joined"]

#: For each block whether all of its cells are visible for certain, and whether none is.
Decision: TypeAlias = tuple[Tensor, Tensor]
#: The least and the greatest value in each block.
Limits: TypeAlias = tuple[Any, Any]
#: What the cells of a block depend on: a value at its first cell, or the remainder of it by a number other than 0.
Feature: TypeAlias = tuple[Index, int]

#: Values beyond this may wrap; then nothing is known.
SAFE = 2**62
#: Values that an index may take in a block for all of them to be looked up.
FEW = 4


class Decider:
    """What the values in blocks say about them.

    Args:
        frame: the frame of the mask's lowering.
        q_size: queries in a block.
        kv_size: keys in a block.
    """

    def __init__(self, frame: Frame, q_size: int, kv_size: int) -> None:
        self.frame, self.sizes = frame, {"q": q_size, "kv": kv_size}
        self.mask = frame.settled(separate(cast(Mask, frame.mask.replace(_by_head))))
        self.along = {"q": Evaluation(frame, "q"), "kv": Evaluation(frame, "kv")}
        self.ends: dict[Any, tuple[Tensor, Tensor]] = {}

    def at(self, entries: Entries) -> BlockValues:
        """The values in some blocks, query blocks as rows and key blocks as columns."""
        return BlockValues(self, entries)

    def limits(self, index: Index, axis: str) -> tuple[Tensor, Tensor]:
        """The least and the greatest value of an expression in each block along an axis, ``int64[B, H, blocks]``."""
        if index.key not in self.ends:
            values = self.along[axis].tensor(index).long()
            if values.shape[-1] > 1:
                size = self.sizes[axis]
                values = torch.nn.functional.pad(values, (0, -values.shape[-1] % size), mode="replicate")
                least, most = values.unflatten(-1, (-1, size)).aminmax(dim=-1)
            else:
                least = most = values
            self.ends[index.key] = least, most
        return self.ends[index.key]


class BlockValues:
    """The values in some blocks: see :class:`Decider`."""

    def __init__(self, decider: Decider, entries: Entries) -> None:
        self.decider, self.frame, self.sizes = decider, decider.frame, decider.sizes
        q_blocks = -(-self.frame.q_len // self.sizes["q"])
        self.place = {"q": entries.row % q_blocks, "kv": entries.column.long()}
        group = entries.row // q_blocks
        self.b, self.h = group // self.frame.heads, group % self.frame.heads
        self.none = torch.zeros_like(entries.row, dtype=torch.bool)
        self.known: dict[Any, Limits | None] = {}
        self.decided: dict[int, Decision] = {}

    def decide(self, mask: Mask) -> Decision:
        """The blocks that are full and those that are empty."""
        if id(mask) not in self.decided:
            self.decided[id(mask)] = self._decide(mask)
        return self.decided[id(mask)]

    def _decide(self, mask: Mask) -> Decision:
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
        match mask:
            case Span(start, stop):
                first, last = self.keys()
                start_of = (0, 0) if start is None else self.of(start)
                stop_of = (self.frame.kv_len,) * 2 if stop is None else self.of(stop)
                full = (first >= start_of[1]) & (last < stop_of[0])
                return full, (last < start_of[0]) | (first >= stop_of[1])
            case Reaches(column, value):
                keys, limit = self.of(column), self.of(value)
                return self.all(keys[1] <= limit[0]), self.all(keys[0] > limit[1])
            case Matches(column, value):
                keys, own = self.of(column), self.of(value)
                same = (keys[0] == own[1]) & (keys[1] == own[0])
                return self.all(same), self.all((keys[1] < own[0]) | (keys[0] > own[1]))
            case Compare(sign, left, right):
                if (values := self.limits(left)) is not None and (others := self.limits(right)) is not None:
                    return self.compared(sign, values, others)
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

    def of(self, index: Index) -> Limits:
        """The limits of an expression that does not depend on both query and key."""
        return cast(Limits, self.limits(index))

    def limits(self, index: Index) -> Limits | None:
        """The least and the greatest value that an expression may have in each block; None where nothing is known."""
        if index.key not in self.known:
            self.known[index.key] = self._limits(index)
        return self.known[index.key]

    def _limits(self, index: Index) -> Limits | None:
        if not {"q", "kv"} <= index.symbols:
            axis = "kv" if "kv" in index.symbols else "q"
            least, most = self.decider.limits(index, axis)
            return self.gathered(least, axis), self.gathered(most, axis)
        match index:
            case Absolute(operand):
                below = self.limits(operand)
                return below and (torch.maximum(below[0], -below[1]).clamp(min=0), torch.maximum(-below[0], below[1]))
            case Choice(_, then, otherwise):
                return self._paired(then, otherwise, lambda x, y: (torch.minimum(x[0], y[0]), torch.maximum(x[1], y[1])))
            case Arithmetic("%", left, Constant(value)) if value > 0:
                below = self.limits(left)
                return below and _remainders(below, value)
            case Arithmetic("//", left, Constant(value)) if value > 0:
                below = self.limits(left)
                return below and (below[0] // value, below[1] // value)
            case Arithmetic("+" | "-" | "*" | "minimum" | "maximum" as sign, left, right):
                return self._paired(left, right, partial(_combined, sign))
            case Lookup(table, indices):
                return self._looked_up(self.frame.tables[table.key], list(map(self.limits, indices)))
        return None

    def _paired(self, left: Index, right: Index, combine: Callable[[Limits, Limits], Limits | None]) -> Limits | None:
        x, y = self.limits(left), self.limits(right)
        return None if x is None or y is None else combine(x, y)

    def _looked_up(self, data: Tensor, indices: list[Limits | None]) -> Limits | None:
        """The limits of values that are looked up at indices of which each takes few values in a block."""
        steps = []
        for limits, size in zip(indices, data.shape, strict=True):
            if limits is None or bool((limits[0] < 0).any()) or bool((limits[1] >= size).any()):
                return None  # a traced function may look up from the end, or ask first whether it is inside
            steps.append(range(int((limits[1] - limits[0]).max()) + 1))
            if len(steps[-1]) > FEW:
                return None
        least = most = None
        for offsets in product(*steps):
            at = [torch.minimum(limits[0] + step, limits[1]) for limits, step in zip(indices, offsets, strict=True) if limits]
            values = data[tuple(at)].long()
            least = values if least is None else torch.minimum(least, values)
            most = values if most is None else torch.maximum(most, values)
        return least, most

    def gathered(self, values: Tensor, axis: str) -> Tensor:
        b = self.b if values.shape[0] > 1 else 0
        h = self.h if values.shape[1] > 1 else 0
        return values[b, h, self.place[axis] if values.shape[2] > 1 else 0].expand_as(self.none)

    def kinds(self, mask: Mask) -> Tensor:
        """A number for each block, the same only where the cells are the same, as far as they lie inside the mask."""
        match mask:
            case And(operands) | Or(operands) | Xor(operands):
                kind = joined([self.kinds(operand) for operand in operands])
            case Not(operand):
                kind = self.kinds(operand)
            case _:
                kind = joined([self.first(*feature) for feature in _features_of(mask)] or [self.place["q"] * 0])
        full, empty = self.decide(mask)
        return torch.where(full, 0, torch.where(empty, 1, kind + 2))

    def first(self, index: Index, divisor: int) -> Tensor:
        """The value of an expression at the first cell of each block, or its remainder where the divisor is not 0."""
        total = torch.zeros_like(self.place["q"])
        for term, factor in Linear.of(index).terms.values():  # the constant is the same everywhere
            axis = "kv" if "kv" in term.symbols else "q"
            values = self.decider.along[axis].tensor(term).long()
            of_blocks = self.gathered(values[..., :: self.sizes[axis]] if values.shape[-1] > 1 else values, axis)
            if divisor:
                total = (total + of_blocks % divisor * (factor % divisor)) % divisor
            else:  # it may wrap, as long as what is the same stays the same
                total += of_blocks * ((factor + 2**63) % 2**64 - 2**63)
        return total


def joined(kinds: list[Tensor]) -> Tensor:
    """A number for each place, from 0 up, the same only where each of several numbers is the same."""
    found = torch.zeros_like(kinds[0])
    for kind in kinds:
        rank = kind.unique(return_inverse=True)[1]
        found = (found * kind.numel() + rank).unique(return_inverse=True)[1]
    return found


def _by_head(node: Node) -> Node | None:
    if not isinstance(node, PerHead):
        return None
    return Or.make(tuple((h == head) & cast(Mask, mask.replace(_by_head)) for head, mask in enumerate(node.masks)))


def _features_of(mask: Mask) -> list[Feature]:
    """What the cells of a block depend on in a condition."""
    found: dict[Any, Feature] = {}
    match mask:
        case Span(start, stop):
            values: list[Node] = [kv - end for end in (start, stop) if end is not None]
        case _:
            values = mask.children()
    for value in values:
        _collect(value, 0, found)
    return list(found.values())


def _collect(node: Node, divisor: int, found: dict[Any, Feature]) -> None:
    """What the values of an expression in a block depend on, or their remainders where the divisor is not 0.

    From its first cell on, a sum of multiples of ``q`` and ``kv`` changes in the same way in every block. The value of a call
    may be no integer, so that its arguments count instead.
    """
    if isinstance(node, Index) and not isinstance(node, Constant | Opaque):
        terms = [term for term, _ in Linear.of(node).terms.values()]
        if all(isinstance(term, Symbol) or not (isinstance(term, Opaque) or term.symbols & {"q", "kv"}) for term in terms):
            found[node.key, divisor] = node, divisor
            return
    match node:
        case Arithmetic("%", left, Constant(value)) if 0 < abs(value) < 2**31:
            _collect(left, abs(value), found)
        case Arithmetic("//", left, Constant(value)) if 0 < abs(value) * divisor < 2**31:
            _collect(left, abs(value) * divisor, found)
        case Arithmetic("+" | "-" | "*", left, right):  # of the remainders of both sides it is known, too
            _collect(left, divisor, found)
            _collect(right, divisor, found)
        case _:
            for child in node.children():
                _collect(child, 0, found)


def _remainders(limits: Limits, divisor: int) -> Limits:
    same = limits[0] // divisor == limits[1] // divisor
    return torch.where(same, limits[0] % divisor, 0), torch.where(same, limits[1] % divisor, divisor - 1)


def _combined(sign: str, x: Limits, y: Limits) -> Limits | None:
    """The limits of an operation that is monotone in either side, or None where it might leave 64 bits."""
    operation = ARITHMETIC[sign]
    if any(float(operation(left.double(), right.double()).abs().max()) > SAFE for left, right in product(x, y)):
        return None
    corners = [operation(left, right) for left, right in product(x, y)]
    return reduce(torch.minimum, corners), reduce(torch.maximum, corners)
