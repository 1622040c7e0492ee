"""Which masks are bands along the diagonal, and which of these torch's fused attention kernels take without a tensor."""

from __future__ import annotations

from typing import Literal, TypeAlias

from torch import Tensor

from flexmask.expr.index import q
from flexmask.expr.linear import Linear
from flexmask.expr.mask import And, Mask, Truth
from flexmask.intervals.solve import Span, separate

#: ``"whole"`` for all keys, ``"causal"`` for ``is_causal``; None for another mask.
Fused: TypeAlias = Literal["whole", "causal"] | None

#: The first key that a query attends to, and the end of its keys, both from the query on; None for all keys on a side.
Band: TypeAlias = tuple[int | None, int | None]
#: The kinds by their bands.
KINDS: dict[Band | None, Fused] = {(None, None): "whole", (None, 1): "causal"}


def fused_kind(mask: Mask, q_offset: int | Tensor) -> Fused:
    """The kind of a mask whose queries begin at an offset."""
    return KINDS.get(band_of(mask, q_offset))


def band_of(mask: Mask, q_offset: int | Tensor) -> Band | None:
    """The band of a mask whose queries begin at an offset; None for a mask that is no band.

    It is asked for offset 0 alone: other numbers vary in a graph, of which the results have one layout.
    """
    if mask == Truth(True):
        return None, None
    if not isinstance(q_offset, int) or q_offset:
        return None
    found = separate(mask)
    lows, highs = list[int](), list[int]()
    for span in found.operands if isinstance(found, And) else (found,):
        if not isinstance(span, Span):
            return None
        for end, offsets in ((span.start, lows), (span.stop, highs)):
            if end is not None:
                line = Linear.of(end)
                if {key: factor for key, (_, factor) in line.terms.items()} != {q.key: 1}:
                    return None
                offsets.append(line.constant)
    return max(lows, default=None), min(highs, default=None)
