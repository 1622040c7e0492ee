"""The table of rules: for each operation of torch, by name, the function that gives its expression.

A rule takes the state of the trace, the function that was called, and its arguments, proxies or not. It gives a proxy, or raises
:class:`flexmask.tracing.proxies.NoExpression` where these arguments have no expression.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from flexmask.tracing.proxies import Element, Proxy, TraceState

Rule = Callable[..., Any]

#: Operations that read metadata of a tensor, no values.
METADATA = {"__get__", "dim", "size", "numel", "is_floating_point", "is_complex", "stride", "get_device", "__hash__", "is_tensor"}
METADATA |= {"result_type", "can_cast", "__len__", "ndimension", "nelement", "is_contiguous"}
#: Operations that read a value.
READS = {"__bool__", "item", "tolist", "__int__", "__index__", "__float__", "numpy", "__array__", "__contains__", "__complex__"}
READS |= {"__repr__", "__format__", "__setitem__", "equal", "is_nonzero", "allclose"}
#: Operations that draw random numbers, so that a mask would not be the same each time.
RANDOM = {"rand", "randn", "randint", "randperm", "bernoulli", "normal", "multinomial", "poisson", "dropout"}
RANDOM |= {"rand_like", "randn_like", "randint_like", "random_", "uniform_", "normal_", "bernoulli_", "exponential_"}

RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Registers a rule for operations, by the names that torch has for them."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


def has_proxy(value: Any) -> bool:
    """Whether nested arguments contain a proxy."""
    return any(isinstance(leaf, Proxy) for leaf in tree_leaves(value))


def map_elements(state: TraceState, dtype: torch.dtype, function: Callable[..., Element], *values: Any) -> Proxy:
    """``function`` of the elements of values that broadcast."""
    rows, shape = broadcast_elements([state.lift(value) for value in values])
    return state.proxy((function(*row) for row in rows), shape, dtype)


def broadcast_elements(traced: Sequence[Proxy]) -> tuple[list[tuple[Element, ...]], torch.Size]:
    """The elements of proxies that broadcast, as one tuple per element of the result, and the shape of the result."""
    if all(value.dim() == 0 for value in traced):
        return [tuple(value.elements[0] for value in traced)], torch.Size()
    places = torch.broadcast_tensors(*(torch.arange(value.numel(), device="cpu").view(value.shape) for value in traced))
    columns = [[value.elements[i] for i in place.flatten().tolist()] for value, place in zip(traced, places, strict=True)]
    return list(zip(*columns, strict=True)), places[0].shape
