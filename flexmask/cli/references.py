"""Masks and functions named as ``package.module:name``."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from inspect import isfunction, signature
from typing import Any

from flexmask._checks import nearest
from flexmask.cli.messages import UserError
from flexmask.errors import FlexmaskError
from flexmask.expr.mask import Mask
from flexmask.expr.names import call_hint


def resolve_mask(reference: str) -> Mask:
    """The mask of ``module:name``, which is a mask, its text, a ``mask_mod``, or a function without arguments that gives one.

    Raises:
        UserError: there is no such module or name, or the module or function raises.
        FlexmaskError: it is not a mask, a text or a ``mask_mod``.
    """
    found = resolve_reference(reference)
    from flexmask.tracing.as_mask import as_mask

    try:
        return as_mask(found() if _makes_a_mask(found, reference) else found, reference)
    except (FlexmaskError, UserError):
        raise
    except Exception as error:  # a user's function may raise anything
        raise UserError(f"{reference} fails: {type(error).__name__}: {error}") from error


def _makes_a_mask(found: Any, reference: str) -> bool:
    """Whether a function is called without arguments, as it does not take those of a ``mask_mod``.

    Raises:
        UserError: a function takes neither.
    """
    if not isfunction(found) or call_hint(found):
        return False
    cell, nothing = (_takes(found, count) for count in (4, 0))
    if not cell and not nothing:
        takes = f"{found.__name__}{signature(found)}"
        raise UserError(
            f"{reference} is {takes}, which is neither a mask_mod(b, h, q_idx, kv_idx) nor a function without arguments that "
            "gives a mask; give the name of a mask that it makes"
        )
    return nothing and not cell


def _takes(function: Callable[..., Any], count: int) -> bool:
    try:
        signature(function).bind(*range(count))
    except TypeError:
        return False
    return True


def resolve_reference(reference: str) -> Any:
    """The object that ``module:name`` refers to.

    Raises:
        UserError: there is no such module or name, or the module raises.
    """
    module_name, _, names = reference.partition(":")
    try:
        found: Any = import_module(module_name)
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        reason = error if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
        raise UserError(f"cannot import {module_name}: {reason}") from error
    for name in names.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            raise UserError(f"{module_name} has no {names}.{nearest(name, dir(found))}") from None
        except Exception as error:  # as above
            raise UserError(f"cannot read {name} of {reference}: {type(error).__name__}: {error}") from error
    return found
