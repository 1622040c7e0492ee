"""Rules of shape operations, of reductions, and of indexing captured tensors."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import reduce
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from flexmask.expr.choice import where
from flexmask.expr.index import Constant, Index, maximum, minimum
from flexmask.tracing.proxies import (
    MAX_ELEMENTS,
    RULES,
    Element,
    NoExpression,
    Proxy,
    Rule,
    Source,
    TraceState,
    as_integer,
    as_truth,
    broadcast_elements,
    has_proxy,
    rule,
)

__all__: list[str] = []

# ---------------------------------------------------------------- shapes and reductions


@rule(
    *("unsqueeze", "squeeze", "view", "reshape", "expand", "expand_as", "flatten", "permute", "transpose", "t", "movedim"),
    *("moveaxis", "swapaxes", "swapdims", "broadcast_to", "broadcast_tensors", "select", "narrow", "unbind", "split", "chunk"),
    *("stack", "cat", "concat", "concatenate", "ravel", "repeat", "tile", "flip", "roll", "hstack", "vstack", "atleast_1d"),
)
def _rearranged(state: TraceState, func: Any, *args: Any, **named: Any) -> Any:
    """An operation that only moves elements, applied to their numbers."""
    pool: list[Element] = []
    dtypes = set()

    def place(value: Tensor) -> Tensor:
        traced = state.lift(value)
        traced.shared = True
        pool.extend(traced.elements)
        dtypes.add(traced.dtype)
        return torch.arange(len(pool) - traced.numel(), len(pool), device="cpu").view(traced.shape)

    if any(isinstance(leaf, torch.dtype) for leaf in tree_leaves((args, named))):
        raise NoExpression
    args, named = tree_map_only(Tensor, place, (args, named))
    found = func(*args, **named)
    if len(dtypes) != 1:
        raise NoExpression
    (dtype,) = dtypes

    def made(at: Tensor) -> Proxy:
        part = state.proxy((pool[i] for i in at.flatten().tolist()), at.shape, dtype)
        part.shared = True
        return part

    return tree_map_only(Tensor, made, found)


def _reduction(
    operation: Callable[[Any, Any], Element], convert: Callable[[Element], Element], empty: Element, on_truth: Rule | None = None
) -> Rule:
    def apply(state: TraceState, func: Any, value: Any, dim: Any = None, keepdim: bool = False) -> Any:
        value = state.lift(value)
        if on_truth is not None and value.dtype == torch.bool:
            return on_truth(state, func, value, dim, keepdim)
        if convert is as_truth and value.dtype == torch.uint8:
            raise NoExpression  # torch returns uint8 for uint8
        dtype = torch.bool if convert is as_truth else torch.int64 if func.__name__ in ("sum", "prod") else value.dtype
        dims = [dim] if isinstance(dim, int) else list(range(value.dim()) if dim is None else dim)
        places = torch.arange(value.numel(), device="cpu").view(value.shape)
        shape = places.sum(dims, keepdim=keepdim).shape if dims else places.shape
        rows = places.movedim(dims, list(range(-len(dims), 0))).flatten(-len(dims)) if dims else places.unsqueeze(-1)
        lines = rows.reshape(-1, rows.shape[-1]).tolist()
        folded = [reduce(operation, (convert(value.elements[i]) for i in line)) if line else empty for line in lines]
        return state.proxy((state.in_range(x, dtype) for x in folded), shape, dtype)

    return apply


rule("any")(_reduction(operator.or_, as_truth, as_truth(Constant(0))))
rule("all")(_reduction(operator.and_, as_truth, as_truth(Constant(1))))
rule("sum")(_reduction(operator.add, as_integer, Constant(0)))
rule("prod")(_reduction(operator.mul, as_integer, Constant(1)))

rule("amax")(_reduction(maximum, as_integer, Constant(0), RULES["any"]))
rule("amin")(_reduction(minimum, as_integer, Constant(0), RULES["all"]))


@rule("max", "min")
def _extreme(state: TraceState, func: Any, value: Any, other: Any = None) -> Proxy:
    name = "maximum" if func.__name__ == "max" else "minimum"
    if isinstance(other, Tensor):
        return cast(Proxy, RULES[name](state, func, value, other))
    if other is not None or value.dtype == torch.bool:
        raise NoExpression  # with dim it gives values and indices
    return cast(Proxy, RULES[f"a{func.__name__}"](state, func, value))


# ---------------------------------------------------------------- indexing


@rule("__getitem__")
def _getitem(state: TraceState, func: Any, data: Any, index: Any) -> Any:
    items = list(index) if isinstance(index, tuple) else [index]
    if isinstance(data, Proxy) and not data.is_large and not has_proxy(items):
        return _rearranged(state, func, data, index)
    source = data.source if isinstance(data, Proxy) else Source(data, [None] * data.dim())
    if source is None:
        raise NoExpression
    items = _aligned(items, len(source.open_axes))
    at = iter(source.open_axes)
    axes = {next(at): item for item in items if item is not None}
    slices = [axes[axis] if isinstance(axes.get(axis), slice) else slice(None) for axis in range(source.tensor.dim())]
    if any(part != slice(None) for part in slices):
        source = Source(source.tensor[tuple(slices)], source.entries)
    advanced = {axis: state.lift(item) for axis, item in axes.items() if not isinstance(item, slice)}
    if any(item.dtype == torch.bool for item in advanced.values()):
        raise NoExpression
    found = _lookup(state, source, advanced)
    if None not in items:
        return found
    if found.is_large or any(item.dim() for item in advanced.values()):
        raise NoExpression
    new = tuple(None if item is None else slice(None) for item in items if item is None or isinstance(item, slice))
    return _rearranged(state, func, found, new)


def _aligned(items: list[Any], axes: int) -> list[Any]:
    """The items of an index: one per axis of the data, and None per new axis."""
    if any(isinstance(item, bool | list | tuple) for item in items):
        raise NoExpression
    used = sum(item is not None and item is not Ellipsis for item in items)
    if used > axes:
        raise IndexError(f"too many indices: {used} for {axes} axes")
    rest = [slice(None)] * (axes - used)
    place = next((i for i, item in enumerate(items) if item is Ellipsis), None)
    return [*items, *rest] if place is None else [*items[:place], *rest, *items[place + 1 :]]


def _lookup(state: TraceState, source: Source, advanced: dict[int, Proxy]) -> Proxy:
    """A source with further axes indexed, by indices that broadcast."""

    def entries(row: Sequence[Element]) -> list[Index | None]:
        found = list(source.entries)
        for axis, element in zip(advanced, row, strict=True):
            found[axis] = _inside(state, cast(Index, element), source.tensor.shape[axis])
        return found

    rows, shape = broadcast_elements(list(advanced.values()))
    if len(rows) > MAX_ELEMENTS:
        raise NoExpression
    parts = [state.indexed(Source(source.tensor, entries(row))) for row in rows]
    if not shape:
        return parts[0]
    if any(part.is_large for part in parts):
        raise NoExpression
    stacked = _rearranged(state, torch.stack, parts)
    shaped = _rearranged(state, torch.Tensor.reshape, stacked, (*shape, *parts[0].shape))
    order = [source.open_axes.index(axis) for axis in advanced]
    front = order[0] if all(b - a == 1 for a, b in pairwise(order)) else 0
    width = len(shape)
    return cast(Proxy, _rearranged(state, torch.movedim, shaped, list(range(width)), list(range(front, front + width))))


def _inside(state: TraceState, index: Index, size: int) -> Index:
    """An index with negative values counted from the end, as in torch."""
    low, high = state.extent(index)
    if isinstance(index, Constant) and not -size <= index.value < size:
        raise IndexError(f"index {index.value} is out of range for an axis of {size}")
    if low >= 0:
        return index
    return index + size if high < 0 else where(index < 0, index + size, index)
