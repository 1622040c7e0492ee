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

from flexmask.blocks.entries import Entries
from flexmask.expr.index import FOLD_COMPARE, Absolute, Arithmetic, Choice, Constant, Index, Symbol, h, kv
from flexmask.expr.linear import Linear, Quotient, Sum
from flexmask.expr.mask import And, Compare, Mask, Not, Or, PerHead, Truth, Xor
from flexmask.expr.node import Node
from flexmask.expr.opaque import Opaque
from flexmask.expr.tables import Lookup
from flexmask.intervals.closures import ARITHMETIC
from flexmask.intervals.context import Context
from flexmask.intervals.evaluation import Evaluation, sides
from flexmask.intervals.extents import INT64, extent
from flexmask.intervals.solve import Span, separate

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
        context: the context of the mask's lowering.
        q_size: queries in a block.
        kv_size: keys in a block.
    """

    def __init__(self, context: Context, q_size: int, kv_size: int) -> None:
        self.context, self.sizes = context, {"q": q_size, "kv": kv_size}
        self.mask = context.with_lengths(separate(cast(Mask, context.mask.replace(_by_head))))
        self.along = {"q": Evaluation(context, "q"), "kv": Evaluation(context, "kv")}
        self.ends: dict[Any, Limits | None] = {}

    def at(self, entries: Entries) -> BlockValues:
        """The values in some blocks, query blocks as rows and key blocks as columns."""
        return BlockValues(self, entries)

    def limits(self, index: Index, low: int = INT64[0], high: int = INT64[1]) -> Limits | None:
        """The least and the greatest value of an expression along an axis in each block: see :meth:`Evaluation.within`."""
        key = (index.key, low, high)
        if key not in self.ends:
            axis = _axis(index)
            self.ends[key] = self._of_blocks(self.along[axis].within(index, low, high), axis)
        return self.ends[key]

    def sides(self, mask: Compare) -> tuple[Limits, Limits] | None:
        """The same for the two sides of a comparison, each along its own axis: see
        :func:`flexmask.intervals.evaluation.sides`.
        """
        axes = _axis(mask.left), _axis(mask.right)
        left, right = ((mask.key, side) for side in ("left", "right"))
        if left not in self.ends:
            found = sides(mask, *(self.along[axis] for axis in axes)) or (None, None)
            self.ends[left], self.ends[right] = map(self._of_blocks, found, axes)
        pair = self.ends[left], self.ends[right]
        return None if pair[0] is None or pair[1] is None else (pair[0], pair[1])

    def _of_blocks(self, values: Any, axis: str) -> Limits | None:
        """The least and the greatest of values in each block, ``int64[B, H, blocks]``."""
        if values is None:
            return None
        values = self.along[axis].shaped(values).long()
        if values.shape[-1] == 1:
            return values, values
        size = self.sizes[axis]
        values = torch.nn.functional.pad(values, (0, -values.shape[-1] % size), mode="replicate")
        least, most = values.unflatten(-1, (-1, size)).aminmax(dim=-1)
        return least, most


class BlockValues:
    """The values in some blocks: see :class:`Decider`."""

    def __init__(self, decider: Decider, entries: Entries) -> None:
        self.decider, self.context, self.sizes = decider, decider.context, decider.sizes
        q_blocks = -(-self.context.q_len // self.sizes["q"])
        self.place = {"q": entries.row % q_blocks, "kv": entries.column.long()}
        group = entries.row // q_blocks
        self.b, self.h = group // self.context.heads, group % self.context.heads
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
                kv_len = self.context.kv_len
                start_of = (0, 0) if start is None else self.of_blocks(self.decider.limits(start, 0, kv_len), "q")
                stop_of = (kv_len, kv_len) if stop is None else self.of_blocks(self.decider.limits(stop, 0, kv_len), "q")
                if start_of is not None and stop_of is not None:
                    full = (first >= start_of[1]) & (last < stop_of[0])
                    return full, (last < start_of[0]) | (first >= stop_of[1])
            case Compare(sign, left, right) if _mixes(left) or _mixes(right):
                if (values := self.limits(left)) is not None and (others := self.limits(right)) is not None:
                    return self.compared(sign, values, others)
            case Compare(sign, left, right):
                found = self.decider.sides(mask)
                if found is not None:
                    pair = [self.of_blocks(ends, _axis(side)) for ends, side in zip(found, (left, right), strict=True)]
                    return self.compared(sign, *cast("list[Limits]", pair))
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
        return first, (first + (self.sizes["kv"] - 1)).clamp(max=self.context.kv_len - 1)

    def of_blocks(self, ends: Limits | None, axis: str) -> Limits | None:
        """Limits for every block along an axis, as those of these blocks."""
        return ends and (self.gathered(ends[0], axis), self.gathered(ends[1], axis))

    def limits(self, index: Index) -> Limits | None:
        """The least and the greatest value that an expression may have in each block; None where nothing is known."""
        if index.key not in self.known:
            self.known[index.key] = self._limits(index)
        return self.known[index.key]

    def _limits(self, index: Index) -> Limits | None:
        if not _mixes(index):
            return self.of_blocks(self.decider.limits(index), _axis(index))
        match index:
            case Sum(terms, constant):
                return self._added(terms, constant) if self.decider.along["q"].is_plain(index) else None
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
                return self._looked_up(self.context.tables[table.key], list(map(self.limits, indices)))
        return None

    def _paired(self, left: Index, right: Index, combine: Callable[[Limits, Limits], Limits | None]) -> Limits | None:
        x, y = self.limits(left), self.limits(right)
        return None if x is None or y is None else combine(x, y)

    def _added(self, terms: tuple[tuple[Index, int], ...], constant: int) -> Limits | None:
        least: Any = constant
        most: Any = constant
        for term, factor in terms:
            limits = self.limits(term)
            if limits is None:
                return None
            if abs(factor) > INT64[1]:
                continue  # of a term that is 0, since the sum fits 64 bits
            low, high = limits if factor > 0 else limits[::-1]
            least, most = least + low * factor, most + high * factor
        return least, most

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
        terms = list(Linear.of(index).terms.values())  # the constant is the same everywhere
        values = [self._at_first(term) for term, _ in terms]
        if not divisor and not self._is_told(terms):
            return joined(values)
        total = torch.zeros_like(self.place["q"])
        for (_, factor), of_blocks in zip(terms, values, strict=True):
            if divisor:
                total = (total + of_blocks % divisor * (factor % divisor)) % divisor
            else:  # it may wrap around, which different values do not to the same one
                total += of_blocks * ((factor + 2**63) % 2**64 - 2**63)
        return total

    def _is_told(self, terms: list[tuple[Index, int]]) -> bool:
        """Whether all values of a sum differ by less than 2**64, so that the low 64 bits tell each from the others."""
        low, high = extent(Sum(tuple(terms), 0), self.context)
        return high - low < 2**64

    def _at_first(self, term: Index) -> Tensor:
        axis = _axis(term)
        values = self.decider.along[axis].tensor(term).long()
        return self.gathered(values[..., :: self.sizes[axis]] if values.shape[-1] > 1 else values, axis)


def _axis(index: Index) -> str:
    """The axis along which an expression is evaluated that does not depend on both."""
    return "kv" if "kv" in index.symbols else "q"


def _mixes(index: Index) -> bool:
    return {"q", "kv"} <= index.symbols


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
    return Or.make(tuple(And.make((h == head, mask.replace(_by_head))) for head, mask in enumerate(node.masks)))


def _features_of(mask: Mask) -> list[Feature]:
    """What the cells of a block depend on in a condition."""
    found: dict[Any, Feature] = {}
    seen: set[Any] = set()
    match mask:
        case Span(start, stop):
            values: list[Node] = [kv - end for end in (start, stop) if end is not None]
        case _:
            values = mask.children()
    for value in values:
        _collect(value, 0, found, seen)
    return list(found.values())


def _collect(node: Node, divisor: int, found: dict[Any, Feature], seen: set[Any]) -> None:
    """What the values of an expression in a block depend on, or their remainders where the divisor is not 0.

    From its first cell on, a sum of multiples of ``q`` and ``kv`` changes in the same way in every block. The value of a call
    may be no integer, and the dividend of a quotient may need more than 64 bits, so that what is below them counts instead.
    """
    if (node.key, divisor) in seen:
        return
    seen.add((node.key, divisor))
    if isinstance(node, Index) and not isinstance(node, Constant | Opaque):
        terms = [term for term, _ in Linear.of(node).terms.values()]
        if all(
            isinstance(term, Symbol) or not (isinstance(term, Opaque | Quotient) or term.symbols & {"q", "kv"}) for term in terms
        ):
            found[node.key, divisor] = node, divisor
            return
    match node:
        case Sum(parts):  # of the remainders of its terms it is known, too
            for term, _ in parts:
                _collect(term, divisor, found, seen)
        case Quotient(dividend, value) if 0 < value * divisor < 2**31:
            _collect(dividend, value * divisor, found, seen)
        case Arithmetic("%", left, Constant(value)) if 0 < abs(value) < 2**31:
            _collect(left, abs(value), found, seen)
        case Arithmetic("//", left, Constant(value)) if 0 < abs(value) * divisor < 2**31:
            _collect(left, abs(value) * divisor, found, seen)
        case Arithmetic("+" | "-" | "*", left, right):  # of the remainders of both sides it is known, too
            _collect(left, divisor, found, seen)
            _collect(right, divisor, found, seen)
        case _:
            for child in node.children():
                _collect(child, 0, found, seen)


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
