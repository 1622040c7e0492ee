"""Which masks torch's fused attention kernels take without a tensor: all keys, or ``is_causal``."""

from __future__ import annotations

from typing import Literal, TypeAlias

from torch import Tensor

from flexmask.expr.index import q
from flexmask.expr.linear import Linear
from flexmask.expr.mask import Mask, Truth
from flexmask.intervals.solve import Span, separate

__all__ = ["Fused", "fused_kind"]

#: ``"whole"`` for all keys, ``"causal"`` for ``is_causal``; None for another mask.
Fused: TypeAlias = Literal["whole", "causal"] | None

#: ``kv < q + 1``, the mask of ``is_causal``, after separation.
CAUSAL = Span(None, Linear.of(q + 1).index())


def fused_kind(mask: Mask, q_offset: int | Tensor) -> Fused:
    """The kind of a mask whose queries begin at an offset."""
    if mask == Truth(True):
        return "whole"
    return "causal" if isinstance(q_offset, int) and q_offset == 0 and separate(mask) == CAUSAL else None
