"""The table of tracing's rules: for each operation of torch, what expression it is.

A rule takes the common state of the cells, the function that was called, and its arguments; it gives a stand-in, or raises
:class:`Beyond` where these arguments have no expression.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from flexmask.tracing.proxies import Cell, Cells, Traced

__all__ = ["METADATA", "RANDOM", "READS", "RULES", "Rule", "each", "holds_traced", "mapped", "rule", "together"]

Rule = Callable[..., Any]

#: What a tensor says about itself without looking at a value.
METADATA = {"__get__", "dim", "size", "numel", "is_floating_point", "is_complex", "stride", "get_device", "__hash__", "is_tensor"}
METADATA |= {"result_type", "can_cast", "__len__", "ndimension", "nelement", "is_contiguous"}
#: What asks for a value.
READS = {"__bool__", "item", "tolist", "__int__", "__index__", "__float__", "numpy", "__array__", "__contains__", "__complex__"}
READS |= {"__repr__", "__format__", "__setitem__", "equal", "is_nonzero", "allclose"}
#: What draws random numbers, so that a mask would not be the same each time.
RANDOM = {"rand", "randn", "randint", "randperm", "bernoulli", "normal", "multinomial", "poisson", "dropout"}
RANDOM |= {"rand_like", "randn_like", "randint_like", "random_", "uniform_", "normal_", "bernoulli_", "exponential_"}

RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Registers a rule for operations, by the names that torch has for them."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


def holds_traced(value: Any) -> bool:
    """Whether a stand-in is in nested arguments."""
    if isinstance(value, Traced):
        return True
    if isinstance(value, dict):
        return any(map(holds_traced, value.values()))
    return isinstance(value, list | tuple) and any(map(holds_traced, value))


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Nested arguments with ``function`` applied to each."""
    if isinstance(value, dict):
        return {key: mapped(function, item) for key, item in value.items()}
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        return type(value)(mapped(function, item) for item in value)
    return function(value)


def each(cells: Cells, dtype: torch.dtype, function: Callable[..., Cell], *values: Any) -> Traced:
    """``function`` of the cells of values that broadcast."""
    traced = [cells.lift(value) for value in values]
    if all(value.dim() == 0 for value in traced):
        return cells.one(function(*(value.cells[0] for value in traced)), dtype)
    rows, shape = together(traced)
    return cells.make((function(*row) for row in rows), shape, dtype)


def together(traced: Sequence[Traced]) -> tuple[list[tuple[Cell, ...]], torch.Size]:
    """The cells of stand-ins that broadcast, those of one place in a row, and the shape that they have then."""
    places = torch.broadcast_tensors(*(torch.arange(value.numel()).view(value.shape) for value in traced))
    columns = [[value.cells[i] for i in place.flatten().tolist()] for value, place in zip(traced, places, strict=True)]
    return list(zip(*columns, strict=True)), places[0].shape
