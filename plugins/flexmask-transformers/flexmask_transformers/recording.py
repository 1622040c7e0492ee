"""The masks that the layers of a model use."""

from __future__ import annotations

from contextvars import ContextVar

import torch

from flexmask import Mask

__all__ = ["record"]

RECORD: ContextVar[list[tuple[torch.nn.Module, Mask]] | None] = ContextVar("flexmask_transformers.record", default=None)


def record(module: torch.nn.Module, mask: Mask) -> None:
    """Notes the mask of a layer, within :func:`masks_of`."""
    found = RECORD.get()
    if found is not None:
        found.append((module, mask))
