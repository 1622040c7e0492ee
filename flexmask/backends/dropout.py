"""Dropout of attention weights ``[B, H, q_len, kv_len]`` by a counter-based hash of the seed and the cell.

The decision for a cell is the same in the forward and backward pass, on every backend and device, and for any tiling. Each row
has two hashes of 32 bits (62 random bits together, so that rows do not collide), and each key has one. They are computed once per
call, so that a cell costs three operations: a quadratic polynomial of the hash of the key, with those of the row as coefficients.

Hashes of rows and keys are computed in 64-bit integers, whose products do not overflow. Cells are computed in 32-bit integers,
whose products wrap around equally on every processor.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexmask._checks import checked_int
from flexmask.errors import ExpressionError, LoweringError, OperandError

BITS = 0xFFFFFFFF
#: An odd number near 2**32 divided by the golden ratio, less 2**32, as kernels multiply by it in 32 bits with a sign; and the
#: factors of a 32-bit mixing function.
STEP = 0x9E3779B1 - 2**32
FIRST, SECOND = 0x7FEB352D, 0x45D9F3B
#: Initial states: two for rows, and one for keys.
STARTS = 0, 0x85EBCA6B, 0xC2B2AE35


def _mix(x: Any) -> Any:
    """A bijection of 32-bit numbers, by multiplications and shifts as in the finalisers of MurmurHash and their successors."""
    x = ((x ^ (x >> 16)) * FIRST) & BITS
    x = ((x ^ (x >> 15)) * SECOND) & BITS
    return x ^ (x >> 16)


def _hash(start: int, seed: Tensor, *indices: Tensor) -> Tensor:
    """A 32-bit hash, in an int64, of a seed and some indices."""
    state: Any = start
    for number in (seed & BITS, (seed >> 32) & BITS, *indices):
        state = _mix((state + (number.to(torch.int64) + 1) * STEP) & BITS)
    found: Tensor = state
    return found


class Hashes(NamedTuple):
    """The hashes of one call of attention.

    Attributes:
        rows: the two hashes of each row, ``int32[B, H, q_len, 2]``.
        keys: the hash of each key, ``int32[1, 1, 1, kv_len]``.
    """

    rows: Tensor
    keys: Tensor


def hashes_of(seed: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Hashes:
    """The hashes of all rows and keys of a call.

    Args:
        seed: ``int64`` without axes.
        b: the indices of its sequences, an integer tensor ``[B]``.
        h: those of its query heads, ``[H]``.
        q: those of its queries, ``[q_len]``.
        kv: those of its keys, ``[kv_len]``.
    """
    return Hashes(torch.stack(row_hashes(seed, b.view(-1, 1, 1), h.view(-1, 1), q), -1), key_hashes(seed, kv).view(1, 1, 1, -1))


def row_hashes(seed: Tensor, b: Tensor, h: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """The two hashes of each row, ``int32`` shaped as the arguments broadcast; the first is even, the second odd.

    Args:
        seed: ``int64``.
        b: batch indices, an integer tensor.
        h: query heads.
        q: queries.
    """
    first, second = (_hash(start, seed, b, h, q) for start in STARTS[:2])
    return (first & ~1).to(torch.int32), (second | 1).to(torch.int32)


def key_hashes(seed: Tensor, kv: Tensor) -> Tensor:
    """The hash of each key, ``int32`` shaped as the arguments broadcast; it is odd.

    Args:
        seed: ``int64``.
        kv: keys.
    """
    return (_hash(STARTS[2], seed, kv) | 1).to(torch.int32)


def keep_weights(first: Tensor, second: Tensor, key: Tensor, p: float) -> Tensor:
    """Which cells keep their weight, each with probability ``1 - p``: ``int32``, 1 for kept and 0 for dropped.

    A decision follows from the high bits of ``first * key**2 + second * key``. With an even first and an odd second coefficient
    that is a bijection of the odd 32-bit numbers, so that the results of a row are as uniform as the hashes of keys. With two
    coefficients the decisions of any two keys are independent over the rows, and no three or four keys have one linear relation
    in all rows.

    Args:
        first: first hash of the rows.
        second: second hash of the rows.
        key: hash of the keys.
        p: probability that a weight is dropped, 0 to 1.
    """
    x = (key * first).add_(second).mul_(key)  # in place, since memory traffic dominates on the CPU
    lowest = round(p * 2**32) - 2**31
    return x.ge_(lowest) if lowest < 2**31 else x.zero_()


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
    state = seed_tensor(seed, torch.device("cpu"))
    rows, keys = hashes_of(state, *map(torch.arange, (batch, heads, q_len, kv_len)))
    first, second = rows.unsqueeze(3).unbind(-1)
    return keep_weights(first, second, keys, p).bool()


def seed_tensor(seed: int | Tensor | None, device: torch.device) -> Tensor:
    """A seed as a tensor ``int64`` without axes on a device: the one given, or one drawn by torch's generator.

    Args:
        seed: an int, one integer in a tensor, or None to draw one.
        device: device of the result.

    Raises:
        OperandError: none of these.
        LoweringError: a tensor of several values or of another dtype.
        ExpressionError: an int beyond 64 bits.
    """
    if seed is None:
        return torch.randint(2**62, (), device=device)
    if isinstance(seed, Tensor):
        if seed.numel() != 1 or seed.is_floating_point() or seed.dtype == torch.bool:
            raise LoweringError(f"dropout_seed must be an int or one integer in a tensor, got {seed.dtype}{list(seed.shape)}")
        return seed.reshape(()).to(device, torch.int64)
    seed = checked_int(seed, "dropout_seed", -(2**63), 2**63 - 1, wanted="an int or one integer in a tensor")
    return torch.full((), seed, dtype=torch.int64, device=device)


def check_dropout(p: float, name: str = "dropout_p") -> None:
    """Raises an OperandError unless ``p`` is a number, and an ExpressionError unless it is a probability."""
    if isinstance(p, bool) or not isinstance(p, int | float):
        raise OperandError(f"{name} must be a number from 0 to 1, got {p!r}")
    if not 0 <= p <= 1:
        raise ExpressionError(f"{name} must be between 0 and 1, got {p}")
