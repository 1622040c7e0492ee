"""Piecewise non-decreasing key columns ``int64[kv_len]``, such as ``kv % n``: the keys between two values, piece by piece."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Self

import torch
from torch import Tensor

from flexmask.intervals.extent import values_extent
from flexmask.intervals.rows import Rows

#: Candidate intervals of a row at most, of which many may be empty.
MAX_CANDIDATES = 256
#: Entries of the table of first keys at most, for each key: about what the rows themselves take.
MAX_ENTRIES = 16
#: Candidate intervals computed at a time, which bounds the memory of intermediate results.
CHUNK = 2**22


def direction(column: Tensor) -> int:
    """1 where ``[..., n]`` is non-decreasing, else -1 where it is non-increasing, else 0; forces a host sync."""
    before, here = column[..., :-1], column[..., 1:]  # a difference of two integers of 64 bits may need more
    return 1 if bool((before <= here).all()) else -1 if bool((before >= here).all()) else 0


@dataclass(frozen=True, eq=False)
class PiecewiseColumn:
    """A column ``int64[n]`` as pieces, in each of which it is non-decreasing.

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
        """The pieces, or None where there would be too many; forces a host sync."""
        piece = torch.nn.functional.pad((column[1:] < column[:-1]).long().cumsum(0), (1, 0))
        low, high = values_extent(column)
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

    def rank(self, value: Tensor, *, inclusive: bool) -> Tensor:
        """How many integers of the column's range are below values, or not above them, ``int32``; for any of 64 bits."""
        beyond = value >= self.low if inclusive else value > self.low + (self.size - 1)
        return (value.clamp(self.low, self.low + (self.size - 1)) - self.low + beyond).to(torch.int32)

    def keys_within(self, rows: Rows, conditions: Iterable[tuple[str, Tensor]], most: int) -> Rows | None:
        """The keys of rows that meet conditions ``column sign value``: see :meth:`between`.

        Args:
            rows: the keys to choose from.
            conditions: the sign and the value of each.
            most: intervals of a row at most.
        """
        every = torch.zeros((1, 1, 1), dtype=torch.int32, device=rows.lo.device)
        first, ends = [every], [every + self.size]
        for sign, value in conditions:
            if sign in {"==", ">=", ">"}:
                first.append(self.rank(value, inclusive=sign == ">"))
            if sign in {"==", "<=", "<"}:
                ends.append(self.rank(value, inclusive=sign != "<"))
        return self.between(rows, reduce(torch.maximum, first), reduce(torch.minimum, ends), most)

    def between(self, rows: Rows, least: Tensor, end: Tensor, most: int) -> Rows | None:
        """Of each row the keys whose values have a rank in ``least <= rank < end``; forces a host sync.

        Args:
            rows: the keys to choose from.
            least: ``int32[B, H, q_len]``, each axis may be 1: see :meth:`rank`.
            end: like ``least``.
            most: intervals of a row at most; None is returned where there are more, or far more candidates.
        """
        last_key = rows.kv_len - 1
        begin, last = (_taken(self.piece, key.clamp(0, last_key)) for key in (rows.lo, rows.hi - 1))
        number = torch.where(rows.lo < rows.hi, last - begin + 1, 0)
        step = torch.arange(max(1, int(number.max())), dtype=torch.int32, device=begin.device)
        if step.numel() * rows.slots > MAX_CANDIDATES:
            return None
        parts: list[Rows] = []
        for part in _chunks((rows.lo, rows.hi, begin, number, least, end), CHUNK // (step.numel() * rows.slots)):
            parts.append(self._candidates(part, step, rows.kv_len))
            if parts[-1].slots > most:
                return None
        return Rows.stacked(parts, 2)

    def _candidates(self, tensors: Sequence[Tensor], step: Tensor, kv_len: int) -> Rows:
        lo, hi, begin, number, least, end = tensors
        start = (begin.unsqueeze(-1) + step).clamp(max=self.count - 1) * self.size
        first = torch.maximum(_taken(self.first, start + least[..., None, None]), lo.unsqueeze(-1))
        stop = torch.minimum(_taken(self.first, start + end[..., None, None]), hi.unsqueeze(-1))
        if step.numel() > 1:
            stop = torch.where(step < number.unsqueeze(-1), stop, first)
        return Rows(first.flatten(-2), stop.flatten(-2), kv_len).joined()


def _chunks(tensors: Sequence[Tensor], size: int) -> Iterator[list[Tensor]]:
    """Queries, at most ``size`` at a time, of tensors ``[B, H, q_len, ...]``, in which each of these axes may be 1."""
    shapes = [torch.Size(tensor.shape[:3]) for tensor in tensors]
    batch, heads, q_len = torch.broadcast_shapes(*shapes)
    size = max(1, size // (batch * heads))
    for start in range(0, q_len, size):
        yield [tensor if tensor.shape[2] == 1 else tensor[:, :, start : start + size] for tensor in tensors]


def _taken(values: Tensor, at: Tensor) -> Tensor:
    return values.index_select(0, at.flatten()).view(at.shape)
