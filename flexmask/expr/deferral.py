"""Calls that make masks in code that ``torch.compile`` traces: they are kept as they are, and run when the mask is lowered.

The compiler cannot follow how an expression is made. In traced code a function under :func:`deferrable` gives a
:class:`flexmask.expr.deferred.DeferredMask`, which has the name of the function and its arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

from flexmask._checks import is_traced
from flexmask.errors import LoweringError

__all__ = ["FUNCTIONS", "deferrable", "refuse_traced"]

P = ParamSpec("P")
R = TypeVar("R")

#: The functions that may be deferred, by their names.
FUNCTIONS: dict[str, Callable[..., Any]] = {}


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
        return function(*args, **kwargs)

    return call
