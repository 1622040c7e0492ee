"""Masks under a KVCache in code that ``torch.compile`` traces: over all places of the cache, so that sizes do not change."""

from __future__ import annotations

from torch import Tensor

from flexmask.errors import LoweringError
from flexmask.expr.deferral import deferrable
from flexmask.expr.index import b, kv
from flexmask.expr.mask import Mask
from flexmask.expr.tables import TensorTable
from flexmask.nn.cache_masks import check_symbols

__all__ = ["check_no_window", "mask_over_places"]


@deferrable
def mask_over_places(mask: Mask, end: Tensor | None) -> Mask:
    """The mask of a whole sequence as a mask over all places of a cache.

    Args:
        mask: the mask.
        end: the tokens in the cache, ``int64`` or ``int64[B]``; None for the keys of a context.

    Raises:
        LoweringError: the mask depends on the length of the whole sequence.
    """
    check_symbols(mask, is_context=end is None)
    if end is None:
        return mask
    table = TensorTable(end)
    return mask & (kv < (table[b] if end.dim() else table[()]))


def check_no_window(window: int | None) -> None:
    """Raises a LoweringError for a cache with a window."""
    if window is not None:
        raise LoweringError(
            "in code that torch.compile traces, the sizes of KVCache(window=...) change with each call: give KVCache(capacity), "
            "and a mask with the window, such as sliding_window(size=...)"
        )
