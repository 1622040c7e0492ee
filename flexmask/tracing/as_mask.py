"""What is taken for a mask: a Mask, its text, or a ``mask_mod`` function. Every public function that takes one comes here."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexmask._checks import kind_of
from flexmask.errors import OperandError
from flexmask.expr.index import Index
from flexmask.expr.mask import Mask
from flexmask.expr.names import uncalled
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
    raise OperandError(f"{what} must be {kinds} or a mask_mod function, got {kind_of(mask)}{_instead(mask)}")


def _instead(value: Any) -> str:
    """What to write instead, as the end of a message."""
    match value:
        case Tensor() if value.is_floating_point():
            return ". Of an additive mask, 0 for visible and -inf for hidden, take flexmask.from_dense(tensor == 0)"
        case Tensor():
            table = "tensor" if value.dtype == torch.bool else "tensor != 0"
            return (
                f". Where its True is for visible, as in SDPA, take flexmask.from_dense({table}), or of bool[B, kv_len] "
                "flexmask.key_padding(keep=tensor); where its True is for hidden, as in torch.nn.MultiheadAttention, "
                f"~flexmask.from_dense({table}) or flexmask.key_padding(hide=tensor)"
            )
        case BlockMask():
            return "; give the Mask that it was made from"
        case Index():
            return f". Compare it to get a mask, e.g. ({value} == 0)"
        case list() | tuple() if value and all(isinstance(item, Mask) for item in value):
            return ". A mask for each head is flexmask.per_head([...]); several that hold at once are joined with &"
        case type():
            return "; give an object of it"
    hint = uncalled(value)
    return f": {hint}" if hint else "; the simplest masks are flexmask.causal() and 'causal'"
