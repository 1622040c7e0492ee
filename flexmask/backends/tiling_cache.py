"""The tilings that were used last: the layers of a model, and the passes of each, share one."""

from __future__ import annotations

from itertools import accumulate, compress

import torch
from torch import Tensor

from flexmask import _sync
from flexmask._transforms import is_observed, outside_transforms
from flexmask.backends.tiling import Tiling, plan_tiles

__all__ = ["shared_tiling"]

# The most tilings that are kept, as each call compares its bounds with theirs, and the most elements of them all. The last used
# one is kept whatever its size.
MAX_TILINGS = 8
MAX_KEPT = 2**23


#: The last used first. On the CPU stamps have copies: the layers in a graph have several tensors of the same bounds, and a graph
#: writes other bounds to their memory where torch's version counter does not see it.
_KEPT: tuple[_sync.Stamped[Tiling], ...] = ()


def shared_tiling(
    bounds: Tensor, query: Tensor, key: Tensor, *, most_scores: int | None = None, in_bands: bool = False
) -> Tiling:
    """The tiles of `plan_tiles`, made once for equal bounds; where comparing values forces a host sync, once for their memory."""
    global _KEPT
    if is_observed(bounds) or not _sync.has_stamp(bounds):
        return plan_tiles(bounds, query, key, most_scores=most_scores, in_bands=in_bands)
    shapes = *query.shape[:3], *key.shape[1:3], *bounds.shape
    setting = *shapes, bounds.device, most_scores, in_bands, torch.is_inference_mode_enabled()
    with outside_transforms():
        for found in _KEPT:
            if found.stamp.holds([bounds], setting):
                break
        else:
            stamp = _sync.Stamp([bounds], setting)
            found = _sync.Stamped(stamp, plan_tiles(stamp.kept[0], query, key, most_scores=most_scores, in_bands=in_bands))
    if not _KEPT or found is not _KEPT[0]:
        others = [other for other in _KEPT if other is not found][: MAX_TILINGS - 1]
        ends = accumulate(other.result.size for other in (found, *others))
        _KEPT = found, *compress(others, [end <= MAX_KEPT for end in ends][1:])
    return found.result
