"""Calls that make expressions in code that ``torch.compile`` traces: they are kept as they are, and run when a mask is lowered.

The compiler cannot follow how an expression is made. In traced code a function under :func:`deferrable` gives a deferred mask,
index or table (:mod:`flexmask.expr.deferred`), which has the name of the function and its arguments. Where such a value leaves
traced code, as after a graph break, the call is made.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

from flexmask._checks import is_traced
from flexmask.errors import LoweringError

P = ParamSpec("P")
R = TypeVar("R")

#: The functions that may be deferred, by their names.
FUNCTIONS: dict[str, Callable[..., Any]] = {}


class Deferred:
    """The base of what :mod:`flexmask.expr.deferred` has."""

    __slots__ = ()

    def made(self) -> Any:
        """What the call makes."""
        raise NotImplementedError


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
