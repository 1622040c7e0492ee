"""What code under ``torch.compile`` makes: masks, index expressions and tables as the calls that make them.

The calls run when a mask is lowered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Self, TypeAlias, cast

from flexmask._checks import is_tensor, is_traced
from flexmask.errors import LoweringError, OperandError
from flexmask.expr.choice import where
from flexmask.expr.data import table
from flexmask.expr.deferral import FUNCTIONS, Deferred, name_of
from flexmask.expr.form import of_digest
from flexmask.expr.index import Index, Symbol, absolute, arithmetic
from flexmask.expr.mask import Mask
from flexmask.expr.tables import Table, looked_up, param

#: The calls that stand for a mask, by the digest of its form and its tensors, and for an index symbol.
GIVEN, SYMBOL = "given", "symbol"
FUNCTIONS |= {GIVEN: of_digest, SYMBOL: Symbol}
#: The calls whose arguments by name are values of the mask's parameters.
BINDING = {"parse", "flexmask.expr.mask.Mask.bind"}
#: An argument of a call: ``("leaf",)`` for the next leaf, ``("value", value)`` for a text or None, ``("list", arguments)``, or a
#: call, ``("call", function, arguments, names)``, with the names of the last arguments.
Argument: TypeAlias = tuple[Any, ...]
LEAF: Argument = ("leaf",)

#: What an expression has once its call is made.
DERIVED = ("key", "symbols", "depth", "below", "form", "held", "tensors", "memo", "walk", "replace")


def _of_made(name: str) -> Any:
    return property(lambda self: getattr(self._outside(), name))


class DeferredNode(Deferred):
    """An expression as the call of a deferrable function. It is a pytree of the tensors and numbers among its arguments.

    These lie in one tuple, also those of the calls among the arguments: dynamo takes its time for each container of a pytree. A
    part that stands twice in an expression is passed and made twice.

    Attributes:
        call: the call, with the function's key in :data:`flexmask.expr.deferral.FUNCTIONS`.
        leaves: the tensors and numbers, in the order of the arguments.
        params: the names of the parameters that are not bound yet.
    """

    call: Argument
    leaves: tuple[Any, ...]
    params: tuple[str, ...]

    def __init__(self, call: Argument, leaves: tuple[Any, ...], params: tuple[str, ...]) -> None:
        for name, value in (("call", call), ("leaves", leaves), ("params", params)):
            object.__setattr__(self, name, value)

    def made(self) -> Any:
        """What the call makes.

        Raises:
            FlexmaskError: the function refuses its arguments.
        """
        if "node" not in self.__dict__:
            object.__setattr__(self, "node", self.made_with(lambda value: value))
        return self.__dict__["node"]

    def made_with(self, data: Callable[[Any], Any]) -> Any:
        """As :meth:`made`, with ``data(value)`` in the place of each number, tensor and list among the arguments."""
        leaves = iter(self.leaves)

        def value_of(argument: Argument, *, in_list: bool = False) -> Any:
            match argument:
                case ("leaf",):
                    return next(leaves) if in_list else data(next(leaves))
                case ("value", value):
                    return value
                case ("list", items):
                    values = [value_of(item, in_list=True) for item in items]
                    return values if in_list else data(values)
            _, function, items, names = argument
            values = [value_of(item) for item in items]
            first = len(values) - len(names)
            return FUNCTIONS[function](*values[:first], **dict(zip(names, values[first:], strict=True)))

        return value_of(self.call)

    def flatten(self) -> tuple[list[Any], Any]:
        """The leaves, and what :meth:`unflatten` takes with them."""
        return list(self.leaves), (self.call, self.params)

    @classmethod
    def unflatten(cls, leaves: Iterable[Any], context: Any) -> Self:
        """The value of the two results of :meth:`flatten`."""
        call, params = context
        return cls(call, tuple(leaves), params)

    def brief(self) -> str:
        """The call as a text that needs no values of its tensors."""
        return _text(self.call, iter(self.leaves))

    def __str__(self) -> str:
        return self.brief() if is_traced() else str(self.made())

    def __repr__(self) -> str:
        return self.brief() if is_traced() else repr(self.made())

    def __reduce__(self) -> Any:
        return self._outside().__reduce__()

    def _outside(self) -> Any:
        """What the call makes, where the code is not traced."""
        if is_traced():
            raise LoweringError(
                f"the mask {self.brief()} is made in code that torch.compile traces, where only flexmask's attention and "
                "modules take it: make it outside, and lower it there or pass it"
            )
        return self.made()

    key, symbols, depth, below, form, held, tensors, memo, walk, replace = map(_of_made, DERIVED)


class DeferredMask(DeferredNode, Mask):
    """A mask as a call."""


class DeferredIndex(DeferredNode, Index):
    """An index expression as a call; one of a parameter is looked up, too."""

    def __getitem__(self, indices: Any) -> Index:
        return looked_up(cast(Any, self), indices)


class DeferredTable(DeferredNode, Table):
    """A table as a call."""

    shape, boolean, constant, to_tensor = map(_of_made, ("shape", "boolean", "constant", "to_tensor"))


#: The classes of deferred values.
KINDS: tuple[type[DeferredNode], ...] = (DeferredMask, DeferredIndex, DeferredTable)

#: The functions that make no masks, by their names.
PARAM, TABLE, WHERE = name_of(param), name_of(table), name_of(where)
OF_INDICES = {PARAM, name_of(absolute), name_of(arithmetic), name_of(looked_up)}


def _kind(call: str, args: tuple[Any, ...]) -> type[DeferredNode]:
    """The class of what a call makes."""
    if call == TABLE:
        return DeferredTable
    of_indices = call in OF_INDICES or (call == WHERE and not any(isinstance(choice, Mask) for choice in args[1:]))
    return DeferredIndex if of_indices else DeferredMask


def deferred(call: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], params: tuple[str, ...] = ()) -> DeferredNode:
    """The call of a deferrable function as a value.

    Args:
        call: the function's key in :data:`flexmask.expr.deferral.FUNCTIONS`.
        args: arguments by position.
        kwargs: arguments by name.
        params: the parameters of the mask in addition to those of the masks among the arguments. Those that the call gives values
            are taken away.

    Raises:
        OperandError: an argument that a graph cannot take.
    """
    values = (*args, *kwargs.values())
    leaves: list[Any] = []
    names = {*params, *(args if call == PARAM else ())}
    items = tuple([_argument(value, leaves, names) for value in values])
    free = names - set(kwargs) if call in BINDING else names
    return _kind(call, values)(("call", call, items, tuple(kwargs)), tuple(leaves), tuple(sorted(free)))


def _text(argument: Argument, leaves: Iterator[Any]) -> str:
    if argument[0] == "leaf":
        leaf = next(leaves)
        return str(leaf) if isinstance(leaf, int) else "..."
    if argument[0] == "value":
        return str(argument[1])
    if argument[0] == "list":
        for item in argument[1]:
            _text(item, leaves)  # takes its leaves
        return "..."
    name, texts = argument[1].rpartition(".")[2], [_text(item, leaves) for item in argument[2]]
    if name in ("parse", SYMBOL):
        return texts[0]
    if name in ("_combine", "arithmetic", "compare"):
        sign, left, right = texts
        return f"{_wrapped(left)} {sign} {_wrapped(right)}"
    if name == "__invert__":
        return f"~{_wrapped(texts[0])}"
    return f"{name}(...)" if texts else name


def _wrapped(text: str) -> str:
    return f"({text})" if " " in text else text


def in_graph(mask: Mask) -> DeferredMask:
    """A mask as one that a graph takes, with its tensors as inputs."""
    if isinstance(mask, DeferredMask):
        return mask
    tensors = mask.tensors
    items = ("value", mask.form.digest), ("list", (LEAF,) * len(tensors))
    return DeferredMask(("call", GIVEN, items, ()), tensors, mask.params)


def _argument(value: Any, leaves: list[Any], params: set[str]) -> Argument:
    """An argument as a graph takes it; its leaves and its parameters are added to those of others."""
    if isinstance(value, Mask):
        value = in_graph(value)
    if isinstance(value, DeferredNode):
        leaves.extend(value.leaves)
        params.update(value.params)
        return value.call
    if isinstance(value, Symbol):
        return "call", SYMBOL, (("value", value.name),), ()
    if value is None or isinstance(value, str):
        return "value", value
    if isinstance(value, bool | int | float) or is_tensor(value):
        leaves.append(value)
        return LEAF
    if isinstance(value, list | tuple):
        return "list", tuple([_argument(item, leaves, params) for item in value])
    raise OperandError(
        "in code that torch.compile traces, a mask is made of tensors, numbers, lists, texts and masks, got "
        f"{type(value).__name__}; make the mask outside and pass it, or make its parts there"
    )
