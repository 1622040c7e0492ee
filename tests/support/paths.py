"""The code paths that compute blocks, one at a time: a grid or sets of blocks, packed or not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from flexmask import _sync
from flexmask.intervals import bounds, columns
from flexmask.lowering import block_mask as lowering


@contextmanager
def path(name: str) -> Iterator[None]:
    """Forces one of the code paths, whatever the sizes."""
    with pytest.MonkeyPatch.context() as patch:
        match name:
            case "grid, all ranked" | "grid, few picked":
                patch.setattr(lowering, "MAX_GRID", _sync.PerDevice(2**30, 2**30))
                patch.setattr("flexmask.lowering.block_lists.SMALL", 2**30 if name == "grid, all ranked" else 0)
            case "sets with room":
                patch.setattr(lowering, "MAX_GRID", _sync.PerDevice(0, 0))
            case "packed sets" | "packed sets, shared strides":
                patch.setattr(lowering, "MAX_GRID", _sync.PerDevice(0, 0))
                patch.setattr(lowering, "MAX_ROOM", _sync.PerDevice(0, 0))
                patch.setattr("flexmask.lowering.block_lists.LEAST_PITCH", 1)
                patch.setattr("flexmask.lowering.block_lists.SHARED_STRIDES", name != "packed sets")
                patch.setattr("flexmask.lowering.block_lists.MIN_PREFILL_ROWS", 0)
            case "host syncs avoided":
                patch.setattr(_sync, "needs_sync", lambda tensor: True)
            case "host syncs avoided, cell by cell":
                patch.setattr(_sync, "needs_sync", lambda tensor: True)
                patch.setattr("flexmask.blocks.grid.FEW_CELLS", 0)
            case "runs of queries":
                patch.setattr(columns, "MANY", 1)
                patch.setattr(bounds, "MAX_KEPT_QUERIES", 0)
            case "single queries":
                patch.setattr(columns, "MANY", 2**30)
                patch.setattr(bounds, "MAX_KEPT_QUERIES", 2**30)
            case _:
                raise ValueError(name)
        yield


PATHS = [
    "grid, all ranked",
    "grid, few picked",
    "sets with room",
    "packed sets",
    "packed sets, shared strides",
    "host syncs avoided",
    "host syncs avoided, cell by cell",
    "runs of queries",
    "single queries",
]
#: The paths that differ in the lists of a BlockMask.
WAYS = PATHS[:4]
