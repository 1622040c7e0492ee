"""The rules for the arrangement of cells: shapes, reductions, and looking up captured tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor

from flexmask.expr.index import Constant, Index, maximum, minimum
from flexmask.expr.mask import Mask, where
from flexmask.tracing.proxies import MAX_CELLS, Beyond, Cell, Cells, Source, Traced, number, truth
from flexmask.tracing.rules import RULES, Rule, holds_traced, mapped, rule, together

__all__: list[str] = []

# ---------------------------------------------------------------- shapes and reductions


@rule(
    *("unsqueeze", "squeeze", "view", "reshape", "expand", "expand_as", "flatten", "permute", "transpose", "t", "movedim"),
    *("moveaxis", "swapaxes", "swapdims", "broadcast_to", "broadcast_tensors", "select", "narrow", "unbind", "split", "chunk"),
    *("stack", "cat", "concat", "concatenate", "ravel", "repeat", "tile", "flip", "roll", "hstack", "vstack", "atleast_1d"),
)
def _moved(cells: Cells, func: Any, *args: Any, **named: Any) -> Any:
    """What only moves cells is applied to their places."""
    pool: list[Cell] = []
    dtypes = set()

    def place(value: Any) -> Any:
        if isinstance(value, torch.dtype):
            raise Beyond
        if not isinstance(value, Tensor):
            return value
        traced = cells.lift(value)
        traced.shared = True
        pool.extend(traced.cells)
        dtypes.add(traced.dtype)
        return torch.arange(len(pool) - traced.numel(), len(pool)).view(traced.shape)

    found = func(*mapped(place, args), **mapped(place, named))
    if len(dtypes) != 1:
        raise Beyond
    (dtype,) = dtypes

    def made(at: Tensor) -> Traced:
        part = cells.make((pool[i] for i in at.flatten().tolist()), at.shape, dtype)
        part.shared = True
        return part

    return mapped(made, found)


def _reduction(operation: Callable[[Any, Any], Cell], convert: Callable[[Cell], Cell], empty: Cell) -> Rule:
    def apply(cells: Cells, func: Any, value: Any, dim: Any = None, keepdim: bool = False) -> Traced:
        value = cells.lift(value)
        if convert is truth and value.dtype == torch.uint8:
            raise Beyond  # of bytes torch gives a byte
        dtype = torch.bool if convert is truth else torch.int64 if func.__name__ in ("sum", "prod") else value.dtype
        dims = [dim] if isinstance(dim, int) else list(range(value.dim()) if dim is None else dim)
        places = torch.arange(value.numel()).view(value.shape)
        shape = places.sum(dims, keepdim=keepdim).shape if dims else places.shape
        rows = places.movedim(dims, list(range(-len(dims), 0))).flatten(-len(dims)) if dims else places.unsqueeze(-1)
        lines = rows.reshape(-1, rows.shape[-1]).tolist()
        folded = [reduce(operation, (convert(value.cells[i]) for i in line)) if line else empty for line in lines]
        return cells.make((x if isinstance(x, Mask) else cells.fits(x, dtype) for x in folded), shape, dtype)

    return apply


RULES["any"] = _reduction(lambda x, y: x | y, truth, truth(Constant(0)))
RULES["all"] = _reduction(lambda x, y: x & y, truth, truth(Constant(1)))
RULES["sum"] = _reduction(lambda x, y: x + y, number, Constant(0))
RULES["prod"] = _reduction(lambda x, y: x * y, number, Constant(1))


def _greatest(of_numbers: Rule, of_truth: Rule) -> Rule:
    def apply(cells: Cells, func: Any, value: Traced, *args: Any, **named: Any) -> Traced:
        return cast(Traced, (of_truth if value.dtype == torch.bool else of_numbers)(cells, func, value, *args, **named))

    return apply


RULES["amax"] = _greatest(_reduction(maximum, number, Constant(0)), RULES["any"])
RULES["amin"] = _greatest(_reduction(minimum, number, Constant(0)), RULES["all"])


@rule("max", "min")
def _extreme(cells: Cells, func: Any, value: Any, other: Any = None) -> Traced:
    name = "maximum" if func.__name__ == "max" else "minimum"
    if isinstance(other, Tensor):
        return cast(Traced, RULES[name](cells, func, value, other))
    if other is not None or value.dtype == torch.bool:
        raise Beyond  # along an axis it gives two tensors
    return cast(Traced, RULES[f"a{func.__name__}"](cells, func, value))


# ---------------------------------------------------------------- indexing


@rule("__getitem__")
def _getitem(cells: Cells, func: Any, data: Any, index: Any) -> Any:
    items = list(index) if isinstance(index, tuple) else [index]
    if isinstance(data, Traced) and not data.is_large and not holds_traced(items):
        return _moved(cells, func, data, index)
    source = data.source if isinstance(data, Traced) else Source(data, [None] * data.dim())
    if source is None:
        raise Beyond
    items = _aligned(items, len(source.open))
    at = iter(source.open)
    axes = {next(at): item for item in items if item is not None}
    source = _sliced(source, {axis: item for axis, item in axes.items() if isinstance(item, slice)})
    advanced = {axis: cells.lift(item) for axis, item in axes.items() if not isinstance(item, slice)}
    if any(item.dtype == torch.bool for item in advanced.values()):
        raise Beyond
    found = _looked_up(cells, source, advanced)
    if None not in items:
        return found
    if found.is_large or any(item.dim() for item in advanced.values()):
        raise Beyond
    return _moved(cells, func, found, tuple(None if item is None else slice(None) for item in items if _is_axis(item)))


def _is_axis(item: Any) -> bool:
    return item is None or isinstance(item, slice)


def _aligned(items: list[Any], axes: int) -> list[Any]:
    """The items of an index, one for each axis of the data, and None for each new one."""
    if any(isinstance(item, bool | list | tuple) for item in items):
        raise Beyond
    used = sum(item is not None and item is not Ellipsis for item in items)
    if used > axes:
        raise IndexError(f"too many indices: {used} for {axes} axes")
    rest = [slice(None)] * (axes - used)
    place = next((i for i, item in enumerate(items) if item is Ellipsis), None)
    return [*items, *rest] if place is None else [*items[:place], *rest, *items[place + 1 :]]


def _sliced(source: Source, slices: dict[int, slice]) -> Source:
    if all(part == slice(None) for part in slices.values()):
        return source
    key = tuple(slices.get(axis, slice(None)) for axis in range(source.tensor.dim()))
    return Source(source.tensor[key], source.entries)


def _looked_up(cells: Cells, source: Source, advanced: dict[int, Traced]) -> Traced:
    """A source with more axes looked up, by indices that broadcast."""

    def entries(row: Sequence[Cell]) -> list[Index | None]:
        found = list(source.entries)
        for axis, cell in zip(advanced, row, strict=True):
            found[axis] = _inside(cells, cast(Index, cell), source.tensor.shape[axis])
        return found

    if all(item.dim() == 0 for item in advanced.values()):
        return cells.opened(Source(source.tensor, entries([item.cells[0] for item in advanced.values()])))
    rows, shape = together(list(advanced.values()))
    if len(rows) > MAX_CELLS:
        raise Beyond
    parts = [cells.opened(Source(source.tensor, entries(row))) for row in rows]
    if any(part.is_large for part in parts):
        raise Beyond
    stacked = _moved(cells, torch.stack, parts)
    shaped = _moved(cells, torch.Tensor.reshape, stacked, (*shape, *parts[0].shape))
    order = [source.open.index(axis) for axis in advanced]
    front = order[0] if all(b - a == 1 for a, b in pairwise(order)) else 0
    width = len(shape)
    return cast(Traced, _moved(cells, torch.movedim, shaped, list(range(width)), list(range(front, front + width))))


def _inside(cells: Cells, index: Index, size: int) -> Index:
    """An index that counts from the end where it is negative, as torch's do."""
    low, high = cells.extent(index)
    if isinstance(index, Constant) and not -size <= index.value < size:
        raise IndexError(f"index {index.value} is out of range for an axis of {size}")
    if low >= 0:
        return index
    return index + size if high < 0 else where(index < 0, index + size, index)
