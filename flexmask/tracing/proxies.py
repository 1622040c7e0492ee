"""Stand-ins for index tensors: what a function sees while it is traced, and what stands in their cells.

A stand-in is a tensor with a shape, a dtype and a device, but with an expression in each cell instead of a number: a mask where
the dtype is bool, an index expression where it is an integer. Nothing of the functions traced is run on numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from flexmask.errors import FlexmaskError
from flexmask.expr.index import Absolute, Arithmetic, Choice, Constant, Index, Symbol, as_index
from flexmask.expr.mask import Compare, Mask, Truth
from flexmask.expr.node import within_depth
from flexmask.expr.opaque import Captured, Opaque
from flexmask.expr.tables import Lookup, TensorTable
from flexmask.intervals.context import MAX_LENGTH
from flexmask.intervals.extents import Extent, combined_extent

__all__ = ["Beyond", "Cell", "Cells", "INTEGERS", "MAX_CELLS", "Source", "Traced", "Untraceable", "number", "truth"]

Cell: TypeAlias = Index | Mask

#: How far from 0 data without values is taken to lie, so that sums of some of it are expressions still.
LIKELY = 2**60
#: Cells of a stand-in up to which each has an expression of its own.
MAX_CELLS = 64


INTEGERS = "expressions have integers and truth values only"


class Beyond(Exception):  # noqa: N818 - no error, but the way to the operation that is kept as a call
    """An operation has no expression, for a reason that may be given; it is kept as a call."""


class Untraceable(FlexmaskError):  # noqa: N818 - as Beyond, for the whole function
    """A function does what has no expression at all, such as to ask for a number."""


class Source:
    """A tensor of which some axes are looked up already; its stand-in has the axes that are open (None)."""

    def __init__(self, tensor: Tensor, entries: list[Index | None]) -> None:
        self.tensor, self.entries = tensor, entries

    @property
    def open(self) -> list[int]:
        return [axis for axis, entry in enumerate(self.entries) if entry is None]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape[axis] for axis in self.open)


class Traced(torch.Tensor):
    """A stand-in: its cells in row-major order, unless they are too many; and its source where it is of a captured tensor."""

    cells: tuple[Cell, ...]
    source: Source | None
    shared: bool  # with another stand-in, which an operation in place would have to change as well

    @property
    def is_large(self) -> bool:
        return self.source is not None and prod(self.source.shape) > MAX_CELLS

    @classmethod
    def of(cls, cells: Iterable[Cell], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Traced:
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        made.cells, made.source, made.shared = tuple(cells), None, False
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise Untraceable(f"{func} needs a tensor with values")


def number(cell: Cell) -> Index:
    """A cell as an integer, a truth value as 0 or 1."""
    match cell:
        case Compare("!=", Lookup(table) as lookup, Constant(0)) if getattr(table, "boolean", False):
            return lookup
        case Truth(value):
            return as_index(int(value))
        case Mask():
            return Choice.make(cell, as_index(1), as_index(0))
    return cell


def truth(cell: Cell) -> Mask:
    """A cell as a truth value, an integer as whether it is not 0."""
    match cell:
        case Mask():
            return cell
        case Choice(condition, Constant(1), Constant(0)):
            return condition
    return cell != 0


def _element(values: Tensor, *at: int) -> Tensor:
    return values[at]


def _indexed(data: Tensor, *indices: Any) -> Tensor:
    return data[indices]


def _stacked(*cells: Any) -> Tensor:
    *values, shape = cells
    like = next(value for value in values if isinstance(value, Tensor))
    return torch.stack([torch.as_tensor(value, device=like.device) for value in values]).reshape(shape)


class Cells:
    """What the cells of stand-ins have in common while one function is traced: the device, and the data that was seen."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.tables: dict[int, TensorTable] = {}
        self.extents: dict[int, Extent] = {}
        self.seen: dict[int, tuple[Cell, Extent]] = {}  # with the cell, so that its id stays its own

    def symbol(self, name: str) -> Traced:
        return self.one(Symbol(cast(Any, name)), torch.int64)

    def one(self, cell: Cell, dtype: torch.dtype) -> Traced:
        return Traced.of([cell], (), dtype, self.device)

    def make(self, cells: Iterable[Cell], shape: Iterable[int], dtype: torch.dtype) -> Traced:
        return Traced.of(cells, tuple(shape), dtype, self.device)

    def lift(self, value: Any) -> Traced:
        """A stand-in for an integer, a truth value or a small tensor of these.

        Raises:
            Beyond: anything else.
        """
        if isinstance(value, Traced):
            if value.is_large:
                raise Beyond(f"on more than {MAX_CELLS} values at once")
            if value.dtype.is_floating_point or value.dtype.is_complex:
                raise Beyond(INTEGERS)
            return value
        if isinstance(value, bool):
            return self.one(Truth(value), torch.bool)
        if isinstance(value, int):
            return self.one(as_index(value), torch.int64)
        if isinstance(value, Tensor) and value.numel() <= MAX_CELLS:
            return self.lift(self.opened(Source(value, [None] * value.dim())))
        raise Beyond(f"on more than {MAX_CELLS} values at once" if isinstance(value, Tensor) else INTEGERS)

    def constant(self, values: Tensor) -> Traced:
        """A stand-in for values that nothing else can change."""
        if values.numel() > MAX_CELLS or values.dtype.is_floating_point or values.dtype.is_complex:
            raise Beyond
        kind: Callable[[Any], Cell] = Truth if values.dtype == torch.bool else as_index
        return self.make(map(kind, values.flatten().tolist()), values.shape, values.dtype)

    def opened(self, source: Source) -> Traced:
        """The stand-in of a source, with cells where they are few."""
        shape = source.shape
        if prod(shape) > MAX_CELLS:
            made = self.make((), shape, source.tensor.dtype)
            made.source = source
            return made
        grid = torch.cartesian_prod(*map(torch.arange, shape)).reshape(prod(shape), len(shape)).tolist() if shape else [[]]
        cells = []
        for place in grid:
            found = iter(place)
            cells.append(self.looked_up(source.tensor, [as_index(next(found)) if e is None else e for e in source.entries]))
        made = self.make(cells, shape, source.tensor.dtype)
        made.source = source if shape else None
        return made

    def looked_up(self, tensor: Tensor, indices: list[Index]) -> Cell:
        """The cell for ``tensor[indices]``."""
        whole = not (tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype == torch.uint64)
        if not whole or tensor.numel() == 0:
            return Opaque(_indexed, (Captured(tensor), *indices))
        found = Lookup(self.tables.setdefault(id(tensor), TensorTable(tensor, True)), tuple(indices))
        return found != 0 if tensor.dtype == torch.bool else found

    def extent_in(self, tensor: Tensor) -> Extent:
        """The least and greatest value of a tensor, for which a device is waited for once; of its dtype where it has none."""
        if id(tensor) not in self.extents:
            if tensor.dtype == torch.bool:
                self.extents[id(tensor)] = 0, 1
            elif tensor.device.type == "meta":
                limits = torch.iinfo(tensor.dtype)
                self.extents[id(tensor)] = max(limits.min, -LIKELY), min(limits.max, LIKELY)
            else:
                low, high = tensor.aminmax()
                self.extents[id(tensor)] = int(low), int(high)
            self.tables.setdefault(id(tensor), TensorTable(tensor, True))  # keeps it alive, so that its id stays its own
        return self.extents[id(tensor)]

    def extent(self, cell: Cell) -> Extent:
        """The least and greatest value that a cell can have, whatever the lengths."""
        if isinstance(cell, Mask):
            return 0, 1
        if id(cell) not in self.seen:
            self.seen[id(cell)] = cell, self._extent(cell)
        return self.seen[id(cell)][1]

    def _extent(self, index: Index) -> Extent:
        match index:
            case Symbol():
                return 0, MAX_LENGTH - 1
            case Lookup(TensorTable(tensor)):
                return self.extent_in(tensor)
        limits = torch.iinfo(torch.int64)
        return combined_extent(index, self.extent) or (limits.min, limits.max)

    def is_natural(self, cell: Cell) -> bool:
        """Whether a cell cannot be negative, whatever values the captured tensors get later."""
        if isinstance(cell, Mask | Constant):
            return isinstance(cell, Mask) or cell.value >= 0
        match cell:
            case Symbol():
                return True
            case Lookup(table):
                return table.boolean if isinstance(table, TensorTable) else False
            case Arithmetic("+" | "*" | "//" | "minimum", left, right):
                return self.is_natural(left) and self.is_natural(right)
            case Arithmetic("%", _, Constant(value)):
                return value > 0
            case Arithmetic("maximum", left, right):
                return self.is_natural(left) or self.is_natural(right)
            case Choice(_, then, otherwise):
                return self.is_natural(then) and self.is_natural(otherwise)
        return isinstance(cell, Absolute)

    def fits(self, index: Index, dtype: torch.dtype) -> Index:
        """An index expression whose values the dtype can hold.

        Raises:
            Beyond: it may overflow, which expressions do not.
        """
        low, high = self.extent(index)
        limits = torch.iinfo(torch.uint8 if dtype == torch.bool else dtype)
        if low < limits.min or high > limits.max:
            raise Beyond(f"its values may not fit {dtype}")
        return index

    def node(self, value: Any) -> Any:
        """A value as an argument of a call."""
        if isinstance(value, Traced):
            if value.is_large:
                raise Untraceable("a call takes a large table that was looked up in part")
            cells = [self._exact(cell, value.dtype) for cell in value.cells]
            shape = tuple(value.shape)
            return Opaque(_stacked, (*cells, shape), shape=shape) if shape else cells[0]
        if isinstance(value, Tensor):
            return Captured(value)
        if isinstance(value, list):
            return tuple(map(self.node, value))
        return value

    def _exact(self, cell: Cell, dtype: torch.dtype) -> Any:
        """A cell whose value is a tensor of just this dtype."""
        if isinstance(cell, Constant | Truth):
            return Captured(torch.tensor(cell.value, dtype=dtype, device=self.device))
        if dtype in (torch.int64, torch.bool) or dtype.is_floating_point or dtype.is_complex:
            return cell
        return Opaque(torch.Tensor.to, (cell, dtype))

    def called(self, function: Any, arguments: tuple[Any, ...], keywords: tuple[str, ...], example: Tensor) -> Traced:
        """The stand-in for a call, shaped like an example of its result."""
        if example.numel() > MAX_CELLS:
            raise Untraceable("a call gives too many values")
        node = within_depth(Opaque(function, tuple(map(self.node, arguments)), keywords, tuple(example.shape)))
        places = torch.ones(example.shape).nonzero().tolist()
        cells: list[Cell] = [node if not place else Opaque(_element, (node, *place)) for place in places]
        if example.dtype == torch.bool:
            cells = [cast(Index, cell) != 0 for cell in cells]
        elif example.dtype != torch.int64 and not (example.dtype.is_floating_point or example.dtype.is_complex):
            cells = [Opaque(torch.Tensor.long, (cell,)) for cell in cells]  # expressions do not overflow
        return self.make(cells, example.shape, example.dtype)
