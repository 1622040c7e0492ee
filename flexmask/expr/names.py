"""The table of named masks, and how their functions are called."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flexmask.errors import FlexmaskError

if TYPE_CHECKING:
    from flexmask.expr.mask import Mask

__all__ = ["NAMES", "signature_of", "uncalled"]

#: Every named mask by its name, as far as its module is imported. :mod:`flexmask.registry` adds those of plugins.
NAMES: dict[str, Callable[..., Mask]] = {}


def signature_of(function: Callable[..., Any]) -> str:
    """The parameters of a function with their defaults, in parentheses, without annotations."""
    parameters = [p.replace(annotation=inspect.Parameter.empty) for p in inspect.signature(function).parameters.values()]
    return str(inspect.Signature(parameters))


def uncalled(value: object) -> str:
    """How a function that makes a named mask is called, for a message; nothing for anything else."""
    name = getattr(value, "__name__", "")
    define = NAMES.get(name) if isinstance(name, str) else None
    if define is None or define is not value:
        return ""
    try:
        define()
    except FlexmaskError:
        return f"call it with its arguments, {name}{signature_of(define)}"
    return f"call it, {name}()"
