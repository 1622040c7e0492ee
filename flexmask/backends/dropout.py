"""Dropout of attention weights by a counter-based hash: which weight is kept follows from the seed and the cell alone.

The decision about a cell is the same in the forward and in the backward pass, on every backend and device, and whatever the
blocks are in which attention is computed. Each row has two numbers of 32 bits, 64 together so that no two rows are alike, and
each key has one. They are made once in a call, so that a cell costs a few operations: on the CPU dropout then takes about as
long as the softmax, and in a GPU kernel, where the compiler writes an expression out each time that it is used, two numbers
that are read keep the code short.

The numbers of rows and keys are kept in 64-bit integers while they are made, whose products do not overflow. Cells are mixed in
32-bit integers, of whose products the low 32 bits stay: these are the same on every processor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexmask._checks import checked_int
from flexmask.errors import ExpressionError, LoweringError, OperandError

__all__ = ["check_dropout", "dropout_cells", "kept", "key_numbers", "row_numbers", "seed_of"]

BITS = 0xFFFFFFFF
#: An odd number near 2**32 divided by the golden ratio, and the factors of a 32-bit mixing function.
STEP = 0x9E3779B1
FIRST, SECOND = 0x7FEB352D, 0x45D9F3B
#: Where the chains begin: two of rows, and one of keys.
STARTS = 0, 0x85EBCA6B, 0xC2B2AE35


def _mixed(x: Any) -> Any:
    """A bijection of 32-bit numbers, by multiplications and shifts as in the finalisers of MurmurHash and their successors."""
    x = ((x ^ (x >> 16)) * FIRST) & BITS
    x = ((x ^ (x >> 15)) * SECOND) & BITS
    return x ^ (x >> 16)


def _joined(start: int, seed: Tensor, *indices: Tensor) -> Tensor:
    """A 32-bit number, in an int64, that follows from a seed and some indices."""
    state: Any = start
    for number in (seed & BITS, (seed >> 32) & BITS, *indices):
        state = _mixed((state + (number.to(torch.int64) + 1) * STEP) & BITS)
    found: Tensor = state
    return found


def row_numbers(seed: Tensor, b: Tensor, h: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """The two numbers of rows, ``int32`` shaped as the arguments broadcast; the second is odd.

    Args:
        seed: ``int64``.
        b: batch indices, an integer tensor.
        h: query heads.
        q: queries, which count from 0 in each call.
    """
    first, second = (_joined(start, seed, b, h, q) for start in STARTS[:2])
    return first.to(torch.int32), (second | 1).to(torch.int32)


def key_numbers(seed: Tensor, kv: Tensor) -> Tensor:
    """The number of keys, ``int32`` shaped as the arguments broadcast.

    Args:
        seed: ``int64``.
        kv: keys.
    """
    return _joined(STARTS[2], seed, kv).to(torch.int32)


def kept(first: Tensor, second: Tensor, key: Tensor, p: float) -> Tensor:
    """Which cells keep their weight, each with probability ``1 - p``: ``int32``, 1 for kept and 0 for dropped.

    Each step maps the numbers of keys onto themselves, so that those of a row are as uniform as they are.

    Args:
        first: first number of the rows.
        second: second number of the rows.
        key: number of the keys.
        p: probability that a weight is dropped, 0 to 1.
    """
    x = torch.bitwise_xor(key, first).mul_(second)  # in place, since memory takes most of the time on the CPU
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(SECOND)
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
    state = seed_of(seed, torch.device("cpu"))
    b, h, q = torch.arange(batch)[:, None, None, None], torch.arange(heads)[:, None, None], torch.arange(q_len)[:, None]
    return kept(*row_numbers(state, b, h, q), key_numbers(state, torch.arange(kv_len)), p).bool()


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
    seed = checked_int(seed, "dropout_seed", -(2**63), 2**63 - 1, wanted="an int or one integer in a tensor")
    return torch.full((), seed, dtype=torch.int64, device=device)


def check_dropout(p: float, name: str = "dropout_p") -> None:
    """Raises an OperandError unless ``p`` is a number, and an ExpressionError unless it is a probability."""
    if isinstance(p, bool) or not isinstance(p, int | float):
        raise OperandError(f"{name} must be a number from 0 to 1, got {p!r}")
    if not 0 <= p <= 1:
        raise ExpressionError(f"{name} must be between 0 and 1, got {p}")
