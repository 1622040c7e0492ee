"""What is taken for a mask: a Mask, its text, or a ``mask_mod`` function. Every public function that takes one comes here."""

from __future__ import annotations

from typing import TypeAlias

import torch

from flexmask.errors import OperandError
from flexmask.expr.mask import Mask
from flexmask.expr.names import describe_non_mask, uncalled
from flexmask.parser import kept_mask
from flexmask.tracing.trace import MaskMod, from_mask_mod

__all__ = ["MaskLike", "as_mask"]

#: What is taken for a mask: a function is traced, see :func:`flexmask.from_mask_mod`.
MaskLike: TypeAlias = Mask | str | MaskMod


def as_mask(mask: object, what: str = "mask", *, also: str = "", device: torch.device | str | None = None) -> Mask:
    """The mask that is meant.

    A text is read once and kept for the next time. A function is traced at each call: trace it beforehand where that counts.

    Args:
        mask: a mask, its text, or a ``mask_mod``.
        what: its name, for messages.
        also: what else there may be, for messages.
        device: where the mask is lowered, if that is known.

    Raises:
        TextError: text that is not a mask.
        TraceError: a function that gives no truth value for a cell.
        OperandError: none of these.
    """
    if isinstance(mask, Mask):
        return mask
    if isinstance(mask, str):
        return kept_mask(mask, None if device is None else torch.device(device))
    if callable(mask) and not isinstance(mask, type) and not uncalled(mask):
        return from_mask_mod(mask, device="cpu" if device is None else device)
    kinds = ", ".join(["a Mask, its text", *([also] if also else [])])
    raise OperandError(f"{what} must be {kinds} or a mask_mod function, got {describe_non_mask(mask)}")
