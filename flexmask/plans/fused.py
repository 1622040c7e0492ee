"""Which masks torch's fused attention kernels take without a tensor: all keys, or ``is_causal``."""

from __future__ import annotations

from typing import Literal, TypeAlias

from flexmask.expr.index import q
from flexmask.expr.linear import Linear
from flexmask.expr.mask import Truth
from flexmask.intervals.context import Context
from flexmask.intervals.solve import Span, separate

__all__ = ["Fused", "fused_kind"]

#: ``"whole"`` for all keys, ``"causal"`` for ``is_causal``; None for another mask.
Fused: TypeAlias = Literal["whole", "causal"] | None

#: ``kv < q + 1``, the mask of ``is_causal``, after separation.
CAUSAL = Span(None, Linear.of(q + 1).index())


def fused_kind(context: Context) -> Fused:
    """The kind of the mask of a lowering context."""
    mask = context.with_lengths(context.mask)
    if mask == Truth(True):
        return "whole"
    starts_at_0 = isinstance(context.q_offset, int) and context.q_offset == 0
    return "causal" if starts_at_0 and separate(mask) == CAUSAL else None
