"""Calls that make masks in code that ``torch.compile`` traces: they are kept as they are, and run when the mask is lowered.

The compiler cannot follow how an expression is made. In traced code a function under :func:`deferrable` gives a
:class:`flexmask.expr.deferred.DeferredMask`, which has the name of the function and its arguments. Where such a mask leaves
traced code, as after a graph break, the call is made.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

from flexmask._checks import is_traced
from flexmask.errors import LoweringError

__all__ = ["Deferred", "FUNCTIONS", "deferrable", "made_of", "refuse_traced"]

P = ParamSpec("P")
R = TypeVar("R")

#: The functions that may be deferred, by their names.
FUNCTIONS: dict[str, Callable[..., Any]] = {}


class Deferred:
    """The base of :class:`flexmask.expr.deferred.DeferredMask`."""

    __slots__ = ()

    def made(self) -> Any:
        """The mask that the call makes."""
        raise NotImplementedError


def made_of(value: Any) -> Any:
    """An argument outside of traced code, with deferred masks replaced by the masks that their calls make."""
    if isinstance(value, Deferred):
        return value.made()
    if isinstance(value, list | tuple) and any(isinstance(item, Deferred) for item in value):
        return [made_of(item) for item in value]
    return value


def refuse_traced(what: str) -> None:
    """Raises a LoweringError in code that ``torch.compile`` traces."""
    if is_traced():
        raise LoweringError(
            f"{what} cannot be made in code that torch.compile traces. Make it outside and pass it, or write a mask as text, "
            'flexmask.parse("kv <= q"), with data by name: flexmask.parse("ids[b, q] == ids[b, kv]", ids=ids)'
        )


def deferrable(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a function that makes a mask: in code that ``torch.compile`` traces the call is kept as a DeferredMask."""
    name = f"{function.__module__}.{function.__qualname__}"
    FUNCTIONS[name] = function

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if is_traced():
            from flexmask.expr.deferred import deferred  # masks are made by deferrable functions

            return cast(R, deferred(name, args, kwargs))
        own: Any = function
        return cast(R, own(*map(made_of, args), **{name: made_of(value) for name, value in kwargs.items()}))

    return call
