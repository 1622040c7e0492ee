"""Pictures with fewer and larger pixels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flexmask.plotting.raster import Picture

__all__ = ["coarser"]


def coarser(shown: Picture, step: tuple[int, int]) -> Picture:
    """The same picture with pixels of at least ``step`` cells: whole numbers of its own pixels.

    A share is 0 or 1 only where it is for all cells of a pixel, whatever their number.
    """
    factors = (-(-step[0] // shown.step[0]), -(-step[1] // shown.step[1]))
    if factors == (1, 1):
        return shown
    rows, columns = (
        np.diff([*range(0, length, size), length]) for length, size in zip((shown.q_len, shown.kv_len), shown.step, strict=True)
    )
    cells = np.multiply.outer(rows, columns).astype(np.float64)
    return replace(
        shown,
        step=(factors[0] * shown.step[0], factors[1] * shown.step[1]),
        shares=np.stack([_summed(np.add, share * cells, factors) for share in shown.shares]) / _summed(np.add, cells, factors),
        estimated=None if shown.estimated is None else _summed(np.logical_or, shown.estimated, factors),
        hidden_by=None,
    )


def _summed(operation: np.ufunc, pixels: NDArray[Any], factors: tuple[int, int]) -> NDArray[Any]:
    for axis in (0, 1):
        pixels = operation.reduceat(pixels, range(0, pixels.shape[axis], factors[axis]), axis=axis)
    return pixels
