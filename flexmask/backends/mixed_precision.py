"""Mixed precision: under autocast tensors are cast once, before a backend gets them, and the backend runs without autocast.

That would cast each operation by itself: the matrix products of float32 scores, but not the sums around them.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def autocast_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype to which autocast casts an input of ``scaled_dot_product_attention``: its own without autocast, and float64."""
    kind = tensor.device.type
    is_cast = tensor.is_floating_point() and tensor.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if is_cast and _is_on(kind) else tensor.dtype


def autocast(tensor: Tensor) -> Tensor:
    """A tensor in its :func:`autocast_dtype`."""
    return tensor.to(autocast_dtype(tensor))


def without_autocast(tensor: Tensor) -> AbstractContextManager[Any]:
    """A context in which autocast is off on the device of a tensor."""
    kind = tensor.device.type
    return torch.autocast(kind, enabled=False) if _is_on(kind) else nullcontext()


def _is_on(kind: str) -> bool:
    """Whether autocast is on for a type of devices; meta has none."""
    return kind != "meta" and torch.is_autocast_enabled(kind)
