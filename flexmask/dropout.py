"""Dropout of attention weights by a counter-based hash: which weight is kept follows from the seed and the cell alone.

The decision about a cell is the same in the forward and in the backward pass, on every backend and device, and whatever the
blocks are in which attention is computed. Numbers are 32 bits wide and kept in 64-bit integers. Of each product only the low
32 bits are used, which are the same where it wraps; so every implementation gives the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexmask.errors import ExpressionError, LoweringError, OperandError

__all__ = ["check_dropout", "dropout_cells", "kept", "seed_of"]

BITS = 0xFFFFFFFF
#: An odd number near 2**32 divided by the golden ratio, and the factors of a 32-bit mixing function.
STEP = 0x9E3779B1
FIRST, SECOND = 0x7FEB352D, 0x45D9F3B
#: Where the second of the two chains begins.
OTHER = 0x85EBCA6B


def _mixed(x: Any) -> Any:
    """A bijection of 32-bit numbers, by multiplications and shifts as in the finalisers of MurmurHash and their successors."""
    x = ((x ^ (x >> 16)) * FIRST) & BITS
    x = ((x ^ (x >> 15)) * SECOND) & BITS
    return x ^ (x >> 16)


def _joined(state: Any, number: Any) -> Any:
    return _mixed((state + (number + 1) * STEP) & BITS)


def _row(start: int, seed: Tensor, b: Tensor, h: Tensor, q: Tensor) -> Any:
    """One of the two states of a row, which together have 64 bits, so that no two rows are alike."""
    state: Any = start
    for number in (seed & BITS, (seed >> 32) & BITS, b, h, q):
        state = _joined(state, number)
    return state


def kept(seed: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, p: float) -> Tensor:
    """Whether cells keep their weight, which happens with probability ``1 - p``.

    Args:
        seed: ``int64``, without axes.
        b: integer tensors that broadcast, or scalars; ``q`` counts the queries of the call from 0.
        h: query heads.
        q: queries.
        kv: keys.
        p: probability that a weight is dropped, 0 to 1.

    Returns:
        ``bool``, shaped as the indices broadcast.
    """
    b, h, q, kv = (index.to(torch.int64) for index in (b, h, q, kv))
    first, second = (_row(start, seed, b, h, q) for start in (0, OTHER))
    found: Tensor = _mixed(((first + kv * STEP) & BITS) ^ second)
    return found >= round(p * 2**32)


def dropout_cells(seed: int | Tensor, p: float, batch: int, heads: int, q_len: int, kv_len: int) -> Tensor:
    """All decisions of one call of :func:`flexmask.attention`, ``bool[batch, heads, q_len, kv_len]``, True for kept.

    Args:
        seed: the ``dropout_seed`` of the call.
        p: its ``dropout_p``.
        batch: sequences.
        heads: query heads.
        q_len: queries.
        kv_len: keys.
    """
    check_dropout(p)
    state = seed_of(seed, torch.device("cpu"))
    sizes = batch, heads, q_len, kv_len
    indices = [torch.arange(n).view([-1 if i == axis else 1 for i in range(4)]) for axis, n in enumerate(sizes)]
    b, h, q, kv = indices
    return kept(state, b, h, q, kv, p)


def seed_of(seed: int | Tensor | None, device: torch.device) -> Tensor:
    """A seed as a tensor on a device: as it was given, or drawn by torch's generator there.

    Args:
        seed: an int, one integer in a tensor, or None to draw one.
        device: where the result is made.

    Raises:
        OperandError: neither of these.
        LoweringError: a tensor of several values or of another dtype.
        ExpressionError: an int beyond 64 bits.
    """
    if seed is None:
        return torch.randint(2**62, (), device=device)
    if isinstance(seed, Tensor):
        if seed.numel() != 1 or seed.is_floating_point() or seed.dtype == torch.bool:
            raise LoweringError(f"dropout_seed must be an int or one integer in a tensor, got {seed.dtype}{list(seed.shape)}")
        return seed.reshape(()).to(device, torch.int64)
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise OperandError(f"dropout_seed must be an int or one integer in a tensor, got {seed!r}")
    if not -(2**63) <= seed < 2**63:
        raise ExpressionError(f"dropout_seed must be a 64-bit integer, got {seed}")
    return torch.full((), seed, dtype=torch.int64, device=device)


def check_dropout(p: float, name: str = "dropout_p") -> None:
    """Raises an OperandError unless ``p`` is a number, and an ExpressionError unless it is a probability."""
    if isinstance(p, bool) or not isinstance(p, int | float):
        raise OperandError(f"{name} must be a number from 0 to 1, got {p!r}")
    if not 0 <= p <= 1:
        raise ExpressionError(f"{name} must be between 0 and 1, got {p}")
