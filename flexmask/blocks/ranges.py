"""The value ranges of expressions in blocks, which show in which blocks a condition holds in every cell or in none.

The range of an index expression is its least and its greatest value, ``int64[n]`` each for ``n`` blocks. It is exact for
expressions along one axis, and otherwise computed from the ranges of the operands.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from itertools import product
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from flexmask.blocks.layout import BlockLayout, Entries
from flexmask.expr.index import FOLD_COMPARE, Arithmetic, Constant, Index
from flexmask.expr.linear import Sum
from flexmask.expr.mask import And, Compare, Mask, Not, Or, PerHead, Truth, Xor
from flexmask.expr.node import Node
from flexmask.expr.tables import Lookup
from flexmask.intervals.evaluation import Evaluation, sides
from flexmask.intervals.extent import INT64, Extent, combined_extent, fits, values_extent
from flexmask.intervals.solve import Span, separate

#: For each block whether the condition holds in every cell, and whether it holds in none.
Decision: TypeAlias = tuple[Tensor, Tensor]
#: The least and the greatest value in each block.
ValueRange: TypeAlias = tuple[Any, Any]

#: Values that an index may take in a block for all of them to be looked up.
MAX_LOOKUPS = 4


class AxisRanges:
    """The value ranges of expressions along one axis, for each block along that axis.

    Attributes:
        layout: the blocks.
        mask: the mask with lengths put in, its comparisons solved for the key, and ``per_head`` as conditions on ``h``.
        values: the values along each axis.
    """

    def __init__(self, layout: BlockLayout) -> None:
        context = layout.context
        self.layout = layout
        self.mask = context.with_lengths(separate(cast(Mask, context.mask.replace(_heads_as_conditions))))
        self.values = {"q": Evaluation(context, "q"), "kv": Evaluation(context, "kv")}
        self.sizes = {"q": layout.q_size, "kv": layout.kv_size}
        self._ranges: dict[Any, ValueRange | None] = {}
        self._sides: dict[Any, tuple[ValueRange, ValueRange] | None] = {}

    def index_range(self, index: Index, low: int = INT64[0], high: int = INT64[1]) -> ValueRange | None:
        """The range of an expression, ``int64[B, H, blocks]``; None where it is unknown: see :meth:`Evaluation.within`."""
        key = (index.key, low, high)
        if key not in self._ranges:
            axis = axis_name(index)
            values = self.values[axis].within(index, low, high)
            self._ranges[key] = None if values is None else self._block_range(values, axis)
        return self._ranges[key]

    def side_ranges(self, mask: Compare) -> tuple[ValueRange, ValueRange] | None:
        """The ranges of both sides of a comparison, each along its axis: see :func:`flexmask.intervals.evaluation.sides`."""
        if mask.key not in self._sides:
            left, right = axis_name(mask.left), axis_name(mask.right)
            values = sides(mask, self.values[left], self.values[right])
            self._sides[mask.key] = values and (self._block_range(values[0], left), self._block_range(values[1], right))
        return self._sides[mask.key]

    def _block_range(self, values: Any, axis: str) -> ValueRange:
        """The least and the greatest of values in each block, ``int64[B, H, blocks]``."""
        values = self.values[axis].shaped(values).long()
        if values.shape[-1] == 1:
            return values, values
        size = self.sizes[axis]
        values = torch.nn.functional.pad(values, (0, -values.shape[-1] % size), mode="replicate")
        least, greatest = values.unflatten(-1, (-1, size)).aminmax(dim=-1)
        return least, greatest


class BlockRanges:
    """The value ranges of expressions in single blocks, and what follows from them for conditions."""

    def __init__(self, axes: AxisRanges, entries: Entries) -> None:
        self.axes, self.context, layout = axes, axes.layout.context, axes.layout
        self.positions = {"q": entries.row % layout.q_blocks, "kv": entries.column.long()}
        group = entries.row // layout.q_blocks
        self.b, self.h = group // self.context.heads, group % self.context.heads
        self._no_block = torch.zeros_like(entries.row, dtype=torch.bool)
        self._ranges: dict[Any, ValueRange | None] = {}
        self._decisions: dict[Any, Decision] = {}

    def decide(self, mask: Mask) -> Decision:
        """The blocks in which a mask holds in every cell, and those in which it holds in none, ``bool[n]`` each."""
        if mask.key not in self._decisions:
            self._decisions[mask.key] = self._decide(mask)
        return self._decisions[mask.key]

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
                return (~self._no_block, self._no_block) if value else (self._no_block, ~self._no_block)
        return self._decide_leaf(mask)

    def _decide_leaf(self, mask: Mask) -> Decision:
        match mask:
            case Span(start, stop):
                kv_len, kv_size = self.context.kv_len, self.axes.layout.kv_size
                first = self.positions["kv"] * kv_size
                last = (first + (kv_size - 1)).clamp(max=kv_len - 1)
                starts = (0, 0) if start is None else self._gather_range(self.axes.index_range(start, 0, kv_len), "q")
                stops = (kv_len, kv_len) if stop is None else self._gather_range(self.axes.index_range(stop, 0, kv_len), "q")
                if starts is not None and stops is not None:
                    full = (first >= starts[1]) & (last < stops[0])
                    return full, (last < starts[0]) | (first >= stops[1])
            case Compare(sign, left, right) if _is_mixed(left) or _is_mixed(right):
                if (values := self.index_range(left)) is not None and (others := self.index_range(right)) is not None:
                    return _compared(sign, values, others)
            case Compare(sign, left, right):
                ranges = self.axes.side_ranges(mask)
                if ranges is not None:
                    pair = [self._gather_range(ends, axis_name(side)) for ends, side in zip(ranges, (left, right), strict=True)]
                    return _compared(sign, *cast("list[ValueRange]", pair))
        return self._no_block, self._no_block

    def gather(self, values: Tensor, axis: str) -> Tensor:
        """Values for every block along an axis, ``[B, H, blocks]``, as those of the single blocks, ``[n]``."""
        b = self.b if values.shape[0] > 1 else 0
        h = self.h if values.shape[1] > 1 else 0
        return values[b, h, self.positions[axis] if values.shape[2] > 1 else 0].expand_as(self._no_block)

    def _gather_range(self, ends: ValueRange | None, axis: str) -> ValueRange | None:
        return ends and (self.gather(ends[0], axis), self.gather(ends[1], axis))

    def index_range(self, index: Index) -> ValueRange | None:
        """The range of an expression in each block, ``int64[n]``; None where it is unknown."""
        if index.key not in self._ranges:
            self._ranges[index.key] = self._index_range(index)
        return self._ranges[index.key]

    def _index_range(self, index: Index) -> ValueRange | None:
        if not _is_mixed(index):
            return self._gather_range(self.axes.index_range(index), axis_name(index))
        match index:
            case Lookup(table, indices):
                return self._lookup_range(self.context.tables[table.key], list(map(self.index_range, indices)))
            case Arithmetic("//" | "%", _, right) if not (isinstance(right, Constant) and right.value > 0):
                return None
            case Sum() if not self.axes.values["q"].fits_int64(index):
                return None
            case Sum(terms, constant):  # a factor beyond 64 bits is that of a term that is 0, since the sum fits them
                index = Sum(tuple(term for term in terms if abs(term[1]) <= INT64[1]), constant)
            case _ if (whole := combined_extent(index, self._whole_extent)) is None or not fits(whole):
                return None
        ends = combined_extent(index, self._operand_range)
        return ends and tuple(torch.as_tensor(end, device=self.b.device).expand_as(self.b) for end in ends)

    def _operand_range(self, index: Index) -> ValueRange | None:
        return (index.value, index.value) if isinstance(index, Constant) else self.index_range(index)

    def _whole_extent(self, index: Index) -> Extent | None:
        """The extent of an operand in all of the blocks."""
        ends = self._operand_range(index)
        return ends and (values_extent(ends[0])[0], values_extent(ends[1])[1])

    def _lookup_range(self, data: Tensor, indices: list[ValueRange | None]) -> ValueRange | None:
        """The range of values that are looked up at indices of which each takes few values in a block."""
        steps = []
        for ends, size in zip(indices, data.shape, strict=True):
            if ends is None or bool((ends[0] < 0).any()) or bool((ends[1] >= size).any()):
                return None  # a traced function may count an index from the end, or guard the lookup by a condition
            steps.append(range(int((ends[1] - ends[0]).max()) + 1))
            if len(steps[-1]) > MAX_LOOKUPS:
                return None
        least = greatest = None
        for offsets in product(*steps):
            index = [torch.minimum(ends[0] + step, ends[1]) for ends, step in zip(indices, offsets, strict=True) if ends]
            values = data[tuple(index)].long()
            least = values if least is None else torch.minimum(least, values)
            greatest = values if greatest is None else torch.maximum(greatest, values)
        return least, greatest


def _compared(sign: str, left: ValueRange, right: ValueRange) -> Decision:
    """Where a comparison of values in these ranges holds in every cell, and where in none."""
    if sign in {"==", "!="}:
        equal = (left[0] == right[1]) & (left[1] == right[0])
        unequal = (left[1] < right[0]) | (left[0] > right[1])
        return (equal, unequal) if sign == "==" else (unequal, equal)
    compare: Callable[[Any, Any], Any] = FOLD_COMPARE[sign]
    worst, best = (1, 0) if sign in {"<", "<="} else (0, 1)  # ends of the left side; those of the right side are the others
    return compare(left[worst], right[best]), ~compare(left[best], right[worst])


def axis_name(index: Index) -> str:
    """The axis along which an expression that depends on one alone is evaluated."""
    return "kv" if "kv" in index.symbols else "q"


def _is_mixed(index: Index) -> bool:
    return {"q", "kv"} <= index.symbols


def _heads_as_conditions(node: Node) -> Node | None:
    return node.by_head().replace(_heads_as_conditions) if isinstance(node, PerHead) else None
