"""Masks and functions named as ``package.module:name``."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from flexmask._checks import nearest
from flexmask.cli.messages import UserError
from flexmask.errors import FlexmaskError
from flexmask.expr.mask import Mask

__all__ = ["resolve_mask", "resolve_reference"]


def resolve_mask(reference: str) -> Mask:
    """The mask that ``module:name`` refers to, or that the text or ``mask_mod`` of that name is.

    Raises:
        Refused: there is no such module or name, the module fails, or the function does.
        FlexmaskError: it is neither a mask, a text nor a ``mask_mod``.
    """
    found = resolve_reference(reference)
    from flexmask.tracing.as_mask import as_mask

    try:
        return as_mask(found, reference)
    except FlexmaskError:
        raise
    except Exception as error:  # whatever a user's function raises is theirs to correct
        raise UserError(f"{reference} fails: {type(error).__name__}: {error}") from error


def resolve_reference(reference: str) -> Any:
    """What ``module:name`` refers to, as it is.

    Raises:
        Refused: there is no such module or name, or the module fails.
    """
    module_name, _, names = reference.partition(":")
    try:
        found: Any = import_module(module_name)
    except (Exception, SystemExit) as error:  # whatever a user's module raises is theirs to correct
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
