"""Masks and functions named as ``package.module:name``."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, cast

from flexmask.algebra import Mask
from flexmask.cli.messages import Refused
from flexmask.errors import FlexmaskError
from flexmask.naming import nearest

__all__ = ["referred", "referred_mask"]


def referred_mask(reference: str) -> Mask:
    """The mask that ``module:name`` refers to, or that the ``mask_mod`` of that name computes.

    Raises:
        Refused: there is no such module or name, the module fails, or it is neither a mask nor a function.
        FlexmaskError: the function is no ``mask_mod``.
    """
    found = referred(reference)
    if isinstance(found, Mask):
        return found
    from flexmask.tracing.trace import trace

    try:
        return trace(found)
    except FlexmaskError:
        raise
    except Exception as error:  # whatever a user's function raises is theirs to mend
        raise Refused(f"{reference} fails: {type(error).__name__}: {error}") from error


def referred(reference: str) -> Mask | Callable[..., Any]:
    """The mask or function that ``module:name`` refers to, as it is.

    Raises:
        Refused: as for :func:`referred_mask`.
    """
    module_name, _, names = reference.partition(":")
    try:
        found: Any = import_module(module_name)
    except Exception as error:  # whatever a user's module raises is theirs to mend
        reason = error if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
        raise Refused(f"cannot import {module_name}: {reason}") from error
    for name in names.split("."):
        if not hasattr(found, name):
            raise Refused(f"{module_name} has no {names}.{nearest(name, dir(found))}")
        found = getattr(found, name)
    if isinstance(found, Mask):
        return found
    if not callable(found):
        raise Refused(f"{reference} is neither a mask nor a function of (b, h, q_idx, kv_idx), but {type(found).__name__}")
    return cast(Callable[..., Any], found)
