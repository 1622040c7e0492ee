"""From any argument that stands for a mask, a Mask, its text or a ``mask_mod``, to the mask: for all public functions."""

from __future__ import annotations

from typing import TypeAlias

import torch

from flexmask._checks import is_traced
from flexmask.errors import OperandError
from flexmask.expr.deferral import refuse_traced
from flexmask.expr.deferred import DeferredMask
from flexmask.expr.mask import Mask
from flexmask.expr.names import call_hint, describe_non_mask
from flexmask.lowering.mask_mod import MaskMod
from flexmask.parser import cached_mask
from flexmask.tracing.trace import from_mask_mod

#: An argument that stands for a mask. A function is traced: see :func:`flexmask.from_mask_mod`.
MaskLike: TypeAlias = Mask | str | MaskMod


def as_mask(mask: object, what: str = "mask", *, also: str = "", device: torch.device | str | None = None) -> Mask:
    """The mask that an argument stands for.

    A text is parsed once and cached. A function is traced at each call: where that costs too much, call
    :func:`flexmask.from_mask_mod` once and pass its result.

    Args:
        mask: a mask, its text, or a ``mask_mod``.
        what: the name of the argument, for messages.
        also: what else the caller takes, for messages.
        device: where the mask is lowered, where that is known.

    Raises:
        TextError: the text is not a mask.
        TraceError: the function does not return one truth value per cell.
        OperandError: the argument is none of these.
    """
    if isinstance(mask, Mask):
        return mask.made() if isinstance(mask, DeferredMask) and not is_traced() else mask  # after a graph break
    if isinstance(mask, str):
        return cached_mask(mask, None if device is None else torch.device(device))
    if callable(mask) and not isinstance(mask, type):
        refuse_traced("the mask of a mask_mod")
        if not call_hint(mask):
            return from_mask_mod(mask, device="cpu" if device is None else device)
    kinds = ", ".join(["a Mask, its text", *([also] if also else [])])
    raise OperandError(f"{what} must be {kinds} or a mask_mod function, got {describe_non_mask(mask)}")
