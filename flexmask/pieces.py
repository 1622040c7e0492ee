"""Pieces: columns that rise in pieces, such as ``kv % n``, and the keys between two values in each of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from flexmask.rows import Rows

__all__ = ["MAX_FOUND", "Pieces", "direction"]

#: Intervals of a row that are looked for at most, of which many may turn out to be empty.
MAX_FOUND = 256
#: Entries of the table of first keys at most, for each key.
MAX_ENTRIES = 16


def direction(column: Tensor) -> int:
    """1 where ``[..., n]`` never falls, else -1 where it never rises, else 0; waits for the device."""
    step = column.diff()
    return 1 if bool((step >= 0).all()) else -1 if bool((step <= 0).all()) else 0


@dataclass(frozen=True, eq=False)
class Pieces:
    """The pieces of a column ``int64[n]`` within which it rises or stays the same.

    Attributes:
        piece: the piece of each key, ``int32[n]``.
        first: the first key of piece ``p`` whose value is at least ``low + v``, or of a later piece, ``int32``; at
            ``p * size + v``.
        low: the least value.
        size: values that there are in the range of the column.
    """

    piece: Tensor
    first: Tensor
    low: int
    size: int

    @classmethod
    def of(cls, column: Tensor) -> Self | None:
        """The pieces, or None where there would be too many; waits for the device."""
        piece = torch.nn.functional.pad((column.diff() < 0).long().cumsum(0), (1, 0))
        low, high = (int(value) for value in column.aminmax())
        size, count = high - low + 1, int(piece[-1]) + 1
        if size * count > MAX_ENTRIES * (column.numel() + 64):
            return None
        held = torch.bincount(piece * size + (column - low), minlength=size * count)
        first = torch.nn.functional.pad(held.cumsum(0), (1, 0))
        return cls(piece.to(torch.int32), first.to(torch.int32), low, size)

    @property
    def count(self) -> int:
        """How many pieces there are."""
        return (self.first.numel() - 1) // self.size

    def between(self, rows: Rows, low: Tensor, high: Tensor) -> Rows | None:
        """Of each row the keys with ``low <= column <= high``, or None where these take too many intervals; waits for the device.

        Args:
            rows: the keys to choose from.
            low: ``int64[B, H, q_len]``, each axis may be 1.
            high: likewise.
        """
        end = rows.kv_len - 1
        begin, last = (_taken(self.piece, key.clamp(0, end)) for key in (rows.lo, rows.hi - 1))
        number = torch.where(rows.lo < rows.hi, last - begin + 1, 0)
        most = max(1, int(number.max()))
        if most * rows.slots > MAX_FOUND:
            return None
        step = torch.arange(most, dtype=torch.int32, device=begin.device)
        start = (begin.unsqueeze(-1) + step).clamp(max=self.count - 1) * self.size
        least = (low - self.low).clamp(0, self.size).to(torch.int32)[..., None, None]
        behind = (high - (self.low - 1)).clamp(0, self.size).to(torch.int32)[..., None, None]
        lo = torch.maximum(_taken(self.first, start + least), rows.lo.unsqueeze(-1))
        hi = torch.minimum(_taken(self.first, start + behind), rows.hi.unsqueeze(-1))
        if most > 1:
            hi = torch.where(step < number.unsqueeze(-1), hi, lo)
        return Rows(lo.flatten(-2), hi.flatten(-2), rows.kv_len).joined()


def _taken(values: Tensor, at: Tensor) -> Tensor:
    return values.index_select(0, at.flatten()).view(at.shape)
