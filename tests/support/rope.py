"""Rotary position embedding for tests of decoding."""

from __future__ import annotations

import torch
from torch import Tensor


def turn(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary positions, of a frequency for each pair of channels."""
    half = x.shape[-1] // 2
    angles = positions[..., None] * 10.0 ** -torch.arange(half, device=x.device).double()
    angles = angles[:, None] if angles.dim() == 3 else angles
    sine, cosine, (left, right) = angles.sin(), angles.cos(), x.chunk(2, -1)
    return torch.cat((left * cosine - right * sine, left * sine + right * cosine), -1).to(x.dtype)
