"""Proxies, the tensors that a function computes with while it is traced, and the table of rules for torch's operations on them.

A proxy has a shape, a dtype and a device, and one expression per element instead of a value: a mask where the dtype is bool, an
index expression where it is an integer. The traced function never sees values.

A rule takes the state of the trace, the function that was called, and its arguments, proxies or not. It gives a proxy, or raises
:class:`NoExpression` where these arguments have no expression.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import product
from math import prod
from typing import Any, TypeAlias, TypeVar, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from flexmask.errors import FlexmaskError
from flexmask.expr.index import Choice, Constant, Index, Opaque, Symbol, as_index
from flexmask.expr.mask import Compare, Mask, Truth
from flexmask.expr.node import within_depth
from flexmask.expr.tables import Lookup, TensorTable
from flexmask.intervals.context import MAX_LENGTH
from flexmask.intervals.extent import Extent, value_range

Element: TypeAlias = Index | Mask
E = TypeVar("E", bound=Element)

#: The largest magnitude that data without values is assumed to have, so that sums of it still fit 64 bits.
LIKELY = 2**60
#: A proxy with more elements has no expressions, only the tensor that it indexes.
MAX_ELEMENTS = 64

INTEGERS = "expressions have integers and truth values only"


class NoExpression(Exception):  # noqa: N818 - no error: the operation becomes an opaque call
    """An operation has no expression, for a reason that may be given. It is kept as an opaque call."""


class Untraceable(FlexmaskError):  # noqa: N818 - no error: the function becomes an opaque call
    """A function needs a value, as ``if`` does, so that the whole function is kept as one opaque call."""


class Source:
    """A captured tensor of which some axes are indexed. Its proxy has the open axes, whose index is None.

    Args:
        tensor: the captured tensor.
        entries: for each axis its index, or None.
    """

    def __init__(self, tensor: Tensor, entries: list[Index | None]) -> None:
        self.tensor, self.entries = tensor, entries

    @property
    def open_axes(self) -> list[int]:
        return [axis for axis, entry in enumerate(self.entries) if entry is None]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape[axis] for axis in self.open_axes)


class Proxy(torch.Tensor):
    """A tensor of expressions.

    Attributes:
        elements: the expressions in row-major order; none where the proxy is large.
        source: the captured tensor that it is a part of, if any.
        shared: whether another proxy has the same elements, so that an in-place operation would have to change both.
    """

    elements: tuple[Element, ...]
    source: Source | None
    shared: bool

    @property
    def is_large(self) -> bool:
        return self.source is not None and prod(self.source.shape) > MAX_ELEMENTS

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise Untraceable(f"{func} needs a tensor with values")


def as_integer(element: Element) -> Index:
    """An element as an index expression; a mask as 0 or 1."""
    match element:
        case Compare("!=", Lookup(table) as lookup, Constant(0)) if getattr(table, "boolean", False):
            return lookup
        case Mask():
            return Choice.make(element, as_index(1), as_index(0))
    return element


def as_truth(element: Element) -> Mask:
    """An element as a mask; an index expression as whether it is not 0."""
    match element:
        case Mask():
            return element
        case Choice(condition, Constant(1), Constant(0)):
            return condition
    return element != 0


def _unread_extent(leaf: Index) -> Extent | None:
    """The extent of a leaf, of a lookup that of the tensor's dtype."""
    match leaf:
        case Symbol():
            return 0, MAX_LENGTH - 1
        case Lookup(TensorTable(tensor)) if tensor.dtype == torch.bool:
            return 0, 1
        case Lookup(TensorTable(tensor)):
            limits = torch.iinfo(tensor.dtype)
            return limits.min, limits.max
    return None


def _element(values: Tensor, *at: int) -> Tensor:
    return values[at]


def _indexed(data: Tensor, *indices: Any) -> Tensor:
    return data[indices]


def _stacked(*elements: Any) -> Tensor:
    *values, shape = elements
    like = next(value for value in values if isinstance(value, Tensor))
    return torch.stack([torch.as_tensor(value, device=like.device) for value in values]).reshape(shape)


class TraceState:
    """The device of one trace, the names of captured tensors by their ids, and the tables and value ranges of its proxies."""

    def __init__(self, device: torch.device, names: dict[int, str]) -> None:
        self.device, self.names = device, names
        self.tables: dict[int, TensorTable] = {}
        self.extents: dict[int, Extent] = {}
        self.known_extents: dict[Any, Extent | None] = {}

    def scalar(self, element: Element, dtype: torch.dtype) -> Proxy:
        return self.proxy([element], (), dtype)

    def proxy(self, elements: Iterable[Element], shape: Iterable[int], dtype: torch.dtype) -> Proxy:
        made = torch.Tensor._make_wrapper_subclass(Proxy, tuple(shape), dtype=dtype, device=self.device)
        made.elements, made.source, made.shared = tuple(elements), None, False
        return made

    def lift(self, value: Any) -> Proxy:
        """A proxy for an int, a bool or a small tensor of these.

        Raises:
            NoExpression: anything else.
        """
        if isinstance(value, bool):
            return self.scalar(Truth(value), torch.bool)
        if isinstance(value, int):
            return self.scalar(as_index(value), torch.int64)
        if not isinstance(value, Tensor):
            raise NoExpression(INTEGERS)
        proxy = value if isinstance(value, Proxy) else self.indexed(Source(value, [None] * value.dim()))
        if proxy.is_large:
            raise NoExpression(f"on more than {MAX_ELEMENTS} values at once")
        if proxy.dtype.is_floating_point or proxy.dtype.is_complex:
            raise NoExpression(INTEGERS)
        return proxy

    def indexed(self, source: Source) -> Proxy:
        """The proxy of a source, with elements where they are few."""
        shape = source.shape
        places = product(*map(range, shape)) if prod(shape) <= MAX_ELEMENTS else ()
        elements = []
        for place in places:
            found = iter(place)
            elements.append(self.lookup(source.tensor, [as_index(next(found)) if e is None else e for e in source.entries]))
        made = self.proxy(elements, shape, source.tensor.dtype)
        made.source = source if shape else None
        return made

    def lookup(self, tensor: Tensor, indices: list[Index]) -> Element:
        """The element ``tensor[indices]``."""
        whole = not (tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype == torch.uint64)
        if not whole or tensor.numel() == 0:
            return Opaque(_indexed, (TensorTable(tensor, is_argument=True), *indices))
        found = Lookup(self.table(tensor), tuple(indices))
        return found != 0 if tensor.dtype == torch.bool else found

    def table(self, tensor: Tensor) -> TensorTable:
        """The table of a captured tensor."""
        name = self.names.get(id(tensor), "")
        return self.tables.setdefault(id(tensor), TensorTable(tensor, True, name))  # keeps it alive, so that its id is not reused

    def extent(self, element: Element) -> Extent:
        """The least and greatest value of an element, whatever the lengths."""
        if isinstance(element, Mask):
            return 0, 1
        return cast(Extent, value_range(element, self._leaf_extent, self.known_extents, is_clamped=False))

    def _leaf_extent(self, leaf: Index) -> Extent | None:
        """The extent of a leaf, of a lookup that of the tensor's values, which forces one host sync."""
        match leaf:
            case Lookup(TensorTable(tensor)) if tensor.dtype != torch.bool and tensor.device.type != "meta":
                if id(tensor) not in self.extents:
                    low, high = tensor.aminmax()
                    self.extents[id(tensor)] = int(low), int(high)
                    self.table(tensor)
                return self.extents[id(tensor)]
        found = _unread_extent(leaf)
        return found and (max(found[0], -LIKELY), min(found[1], LIKELY))

    def is_non_negative(self, *values: Any) -> bool:
        """Whether values are never negative, whatever those of the captured tensors become later."""
        numbers = (element for value in values for element in self.lift(value).elements if isinstance(element, Index))
        return all(cast(Extent, value_range(number, _unread_extent, {}, is_clamped=False))[0] >= 0 for number in numbers)

    def in_range(self, element: E, dtype: torch.dtype) -> E:
        """An element whose values the dtype can hold.

        Raises:
            NoExpression: it may overflow, which expressions do not.
        """
        low, high = self.extent(element)
        limits = torch.iinfo(torch.uint8 if dtype == torch.bool else dtype)
        if low < limits.min or high > limits.max:
            raise NoExpression(f"its values may not fit {dtype}")
        return element

    def argument(self, value: Any) -> Any:
        """A value as an argument of an opaque call."""
        if isinstance(value, Proxy):
            if value.is_large:
                raise Untraceable("an opaque call takes a part of a large captured tensor")
            elements = [self._exact(element, value.dtype) for element in value.elements]
            shape = tuple(value.shape)
            return Opaque(_stacked, (*elements, shape), shape=shape) if shape else elements[0]
        if isinstance(value, Tensor):
            return TensorTable(value, is_argument=True)
        if isinstance(value, list):
            return tuple(map(self.argument, value))
        return value

    def _exact(self, element: Element, dtype: torch.dtype) -> Any:
        """An element whose value is a tensor of exactly this dtype."""
        if isinstance(element, Constant | Truth):
            return TensorTable(torch.tensor(element.value, dtype=dtype, device=self.device), is_argument=True)
        if dtype in (torch.int64, torch.bool) or dtype.is_floating_point or dtype.is_complex:
            return element
        return Opaque(torch.Tensor.to, (element, dtype))

    def opaque_call(self, function: Any, arguments: tuple[Any, ...], keywords: tuple[str, ...], example: Tensor) -> Proxy:
        """The proxy of an opaque call, of the shape and dtype of an example of its result."""
        if example.numel() > MAX_ELEMENTS:
            raise Untraceable("an opaque call gives too many values")
        node = within_depth(Opaque(function, tuple(map(self.argument, arguments)), keywords, tuple(example.shape)))
        places = product(*map(range, example.shape))
        elements: list[Element] = [node if not place else Opaque(_element, (node, *place)) for place in places]
        if example.dtype == torch.bool:
            elements = [cast(Index, element) != 0 for element in elements]
        elif example.dtype != torch.int64 and not (example.dtype.is_floating_point or example.dtype.is_complex):
            elements = [Opaque(torch.Tensor.long, (element,)) for element in elements]  # expressions do not overflow
        return self.proxy(elements, example.shape, example.dtype)


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
