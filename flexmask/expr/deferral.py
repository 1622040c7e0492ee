"""Calls that make expressions in code that ``torch.compile`` traces: they are kept as they are, and run when a mask is lowered.

The compiler cannot follow how an expression is made. In traced code a function under :func:`deferrable` gives a deferred mask,
index or table (:mod:`flexmask.expr.deferred`), which has the name of the function and its arguments. Where such a value leaves
traced code, as after a graph break, the call is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any, ParamSpec, Self, TypeAlias, TypeVar, cast

from flexmask._checks import is_traced
from flexmask.errors import LoweringError

P = ParamSpec("P")
R = TypeVar("R")

#: The functions that may be deferred, by their names.
FUNCTIONS: dict[str, Callable[..., Any]] = {}
#: The calls that stand for a mask, by the digest of its form and its tensors, and for an index symbol.
GIVEN, SYMBOL = "given", "symbol"
#: An argument of a call: ``("leaf",)`` for the next leaf, ``("value", value)`` for a text or None, ``("list", arguments)``, or a
#: call, ``("call", function, arguments, names)``, with the names of the last arguments.
Argument: TypeAlias = tuple[Any, ...]
LEAF: Argument = ("leaf",)
#: What an expression has once its call is made.
DERIVED = ("key", "symbols", "depth", "below", "form", "held", "tensors", "memo", "walk", "replace")


def forwarded(name: str) -> Any:
    """An attribute that a deferred expression has from what its call makes."""
    return property(lambda self: getattr(self._outside(), name))


class Deferred:
    """An expression as the call of a deferrable function. It is a pytree of the tensors and numbers among its arguments.

    These lie in one tuple, also those of the calls among the arguments: dynamo takes its time for each container of a pytree. A
    part that stands twice in an expression is passed and made twice.

    Attributes:
        call: the call, with the function's key in :data:`FUNCTIONS`.
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

    key, symbols, depth, below, form, held, tensors, memo, walk, replace = map(forwarded, DERIVED)


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


def made_of(value: Any) -> Any:
    """An argument outside of traced code, with deferred values replaced by what their calls make."""
    if isinstance(value, Deferred):
        return value.made()
    if isinstance(value, list | tuple) and any(isinstance(item, Deferred) for item in value):
        return type(value)(map(made_of, value))
    return value


def refuse_traced(what: str) -> None:
    """Raises a LoweringError in code that ``torch.compile`` traces."""
    if is_traced():
        raise LoweringError(
            f"{what} cannot be made in code that torch.compile traces. Make it outside and pass it, or write a mask, as in "
            "kv <= q and flexmask.document(ids)"
        )


def name_of(function: Callable[..., Any]) -> str:
    """The key of a function in :data:`FUNCTIONS`."""
    return f"{function.__module__}.{function.__qualname__}"


def deferrable(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a function that makes an expression: in code that ``torch.compile`` traces the call is kept."""
    name = name_of(function)
    FUNCTIONS[name] = function

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if is_traced():
            from flexmask.expr.deferred import deferred  # masks are made by deferrable functions

            return cast(R, deferred(name, args, kwargs))
        own: Any = function
        return cast(R, own(*map(made_of, args), **{name: made_of(value) for name, value in kwargs.items()}))

    return call
