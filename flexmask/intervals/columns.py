"""From values along the keys, ``[B, H, kv_len]``, to the key intervals where a condition on them holds.

Truth values have runs, monotone values are searched, equal values are found by their runs, and values that are non-decreasing in
pieces, as ``kv % n``, piece by piece.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from flexmask import _sync
from flexmask.expr.mask import SWAPPED
from flexmask.intervals.extent import values_extent
from flexmask.intervals.rows import Rows, padded

#: Queries from which on one of each run of equal values is looked up, not each of them.
MANY = 1024


def runs(holds: Tensor, kv_len: int) -> Rows:
    """The keys where ``bool[B, H, kv_len]`` is True, the same in every row.

    The number of intervals depends on the values, so this forces a host sync.
    """
    holds = holds.expand(*holds.shape[:2], kv_len)
    edges = F.pad(holds, (1, 1)).to(torch.int8).diff()
    starts, stops = (_positions(edges == sign, kv_len).unsqueeze(2) for sign in (1, -1))
    return Rows(starts, stops, kv_len)


def true_hull(holds: Tensor, kv_len: int) -> Rows:
    """The smallest interval with all keys where ``bool[B, H, kv_len]`` is True, the same in every row, without a host sync."""
    holds = holds.expand(*holds.shape[:2], kv_len)
    position = torch.arange(kv_len, dtype=torch.int32, device=holds.device)
    start, stop = torch.where(holds, position, kv_len).amin(-1), torch.where(holds, position + 1, 0).amax(-1)
    return Rows.spans(start.unsqueeze(-1), stop.unsqueeze(-1), kv_len)


def within_true(rows: Rows, holds: Tensor) -> Rows:
    """The intervals without their first and last keys where ``bool[B, H, kv_len]`` is False, without a host sync.

    Intervals without such a key are empty, and the others begin and end with one.
    """
    kv_len, positions = rows.kv_len, torch.arange(rows.kv_len, device=holds.device)
    next_true = torch.where(holds, positions, kv_len).flip(-1).cummin(-1).values.flip(-1)
    last_end = torch.where(holds, positions + 1, 0).cummax(-1).values
    tables = padded(next_true, (0, 1), kv_len), F.pad(last_end, (1, 0))
    shape = torch.broadcast_shapes(holds.shape[:2], rows.lo.shape[:2])
    places = [end.expand(*shape, -1, -1) for end in (rows.lo, rows.hi)]
    lo, hi = (picked(table, at.flatten(2).long()).view(at.shape) for table, at in zip(tables, places, strict=True))
    return Rows(lo.to(torch.int32), hi.to(torch.int32), kv_len).compact()


def equal_hull(column: Tensor, value: Tensor, kv_len: int) -> Rows:
    """The smallest interval with all keys of ``column[b, h, kv] == value[b, h, q]``, both ``int64``, without a host sync."""
    column = column.expand(*column.shape[:2], kv_len)
    held, order = column.sort(dim=-1, stable=True)
    first, end = search(held, value, right=False), search(held, value, right=True)
    start = picked(order, first.clamp(max=kv_len - 1))
    stop = picked(order, (end - 1).clamp(min=0)) + 1
    return Rows.spans(start, torch.where(first < end, stop, 0), kv_len)


def _positions(marked: Tensor, fill: int) -> Tensor:
    """The marked positions of each line in order, ``int32[B, H, K]``, filled up with ``fill``."""
    batch, heads, _ = marked.shape
    if batch * heads == 1:
        at = marked.flatten().nonzero().view(1, 1, -1).to(torch.int32)
        return at if at.numel() else at.new_full((1, 1, 1), fill)
    count = marked.sum(-1)
    slots = max(1, int(count.max()))
    line, position = marked.flatten(0, 1).nonzero(as_tuple=True)
    first = (count.flatten().cumsum(0) - count.flatten())[line]
    found = torch.full((batch * heads, slots), fill, dtype=torch.int32, device=marked.device)
    found[line, torch.arange(line.numel(), device=line.device) - first] = position.to(torch.int32)
    return found.view(batch, heads, slots)


def threshold(column: Tensor, value: Tensor, kv_len: int, sign: str, *, rises: bool) -> Rows:
    """The keys with ``column[b, h, kv] sign value[b, h, q]``, given a column that is non-decreasing, or else non-increasing.

    Args:
        column: ``int64[B, H, kv_len]``.
        value: ``int64[B, H, q_len]``.
        kv_len: number of keys.
        sign: one of ``< <= > >=``.
        rises: whether the column is non-decreasing.
    """
    column = column.expand(*column.shape[:2], kv_len)
    if not rises:
        column, value, sign = ~column, ~value, SWAPPED[sign]  # x <= y  <=>  ~x >= ~y, for every integer of 64 bits
    edge = search(column, value, right=sign in {"<=", ">"})
    if sign in {"<", "<="}:
        return Rows.spans(torch.zeros_like(value), edge, kv_len)
    return Rows.spans(edge, torch.full_like(value, kv_len), kv_len)


def search(column: Tensor, value: Tensor, *, right: bool) -> Tensor:
    """As ``torch.searchsorted`` of ``[B, H, n]``, in which axes may be 1."""
    if column.shape[:2] != value.shape[:2]:
        shape = torch.broadcast_shapes(column.shape[:2], value.shape[:2])
        column, value = column.expand(*shape, -1), value.expand(*shape, -1)
    column, value = column.contiguous(), value.contiguous()  # which it would be made anyway, with a warning
    return torch.searchsorted(column, value, right=right)


@dataclass(frozen=True, eq=False)
class ValueRuns:
    """The runs of equal values along lines ``[B, H, n]``.

    Lines with fewer runs than others are padded with empty runs of the greatest integer, which no length, id or position is.

    Attributes:
        starts: the first position of each run, ``int32[B, H, R]``, in order.
        stops: one more than the last position of each.
        held: the values of the runs in ascending order, ``int64[B, H, R]``.
        order: which run each of these is the value of, ``int64[B, H, R]``.
        distinct: whether each value has one run.
        n: the length of the lines.
    """

    starts: Tensor
    stops: Tensor
    held: Tensor
    order: Tensor
    distinct: bool
    n: int

    @classmethod
    def of(cls, values: Tensor, n: int) -> Self:
        """The runs of ``int64[B, H, n]``. Their number depends on the values, so this forces a host sync."""
        values = values.expand(*values.shape[:2], n)
        changes = torch.ones(values.shape, dtype=torch.bool, device=values.device)
        torch.ne(values[..., 1:], values[..., :-1], out=changes[..., 1:])
        starts = _positions(changes, n)
        stops = F.pad(starts[..., 1:], (0, 1), value=n)
        held = values.gather(-1, starts.clamp(max=n - 1).long()).masked_fill_(starts == n, torch.iinfo(values.dtype).max)
        held, order = held.sort(dim=-1, stable=True)
        inside = torch.arange(1, held.shape[-1], device=held.device) < (starts < n).sum(-1, keepdim=True)
        return cls(starts, stops, held, order, not bool(((held[..., 1:] == held[..., :-1]) & inside).any()), n)

    def matching(self, value: Tensor, most: int) -> Rows | None:
        """For ``value`` ``int64[B, H, q_len]`` the positions that hold it, or None where that takes over ``most`` intervals.

        Forces a host sync where some value has several runs.
        """
        if value.shape[-1] < MANY or _sync.needs_sync(value):
            return self._matching(value, None, most)
        rows = ValueRuns.of(value, value.shape[-1])
        found = self._matching(rows._values(), rows.starts < rows.stops, most)
        return found and rows._spread(found)

    def own(self, most: int) -> Rows | None:
        """For each position those that hold the same value, or None where that takes over ``most`` intervals."""
        if self.distinct:
            return self._spread(Rows(self.starts.unsqueeze(-1), self.stops.unsqueeze(-1), self.n))
        found = self._matching(self._values(), self.starts < self.stops, most)
        return found and self._spread(found)

    def _values(self) -> Tensor:
        """The values of the runs in the order of the runs."""
        return torch.empty_like(self.held).scatter_(-1, self.order, self.held)

    def _matching(self, value: Tensor, wanted: Tensor | None, most: int) -> Rows | None:
        """The positions that hold each value; none for those that are not wanted."""
        first = search(self.held, value, right=False)
        if self.distinct:
            at = first.clamp_(max=self.held.shape[-1] - 1)
            return self._placed(at, picked(self.held, at) == value, 1)
        last = search(self.held, value, right=True)
        last = last if wanted is None else last.where(wanted, first)
        slots = max(1, int((last - first).max()))
        if slots > most:
            return None
        at = first.unsqueeze(-1) + torch.arange(slots, device=value.device)
        used = at < last.unsqueeze(-1)
        return self._placed(at.clamp_(max=self.held.shape[-1] - 1).flatten(2), used.flatten(2), slots)

    def _placed(self, at: Tensor, used: Tensor, slots: int) -> Rows:
        """The runs at places ``[B, H, q * slots]`` in the order of values; none where a place is not used."""
        at = picked(self.order, at)
        lo, hi = (picked(end, at).where(used, self.n) for end in (self.starts, self.stops))
        return Rows(lo.view(*lo.shape[:2], -1, slots), hi.view(*hi.shape[:2], -1, slots), self.n)

    def _spread(self, found: Rows) -> Rows:
        """The rows of each run, repeated for each of its positions."""
        shape = torch.broadcast_shapes(self.starts.shape[:2], found.lo.shape[:2])
        repeats = (self.stops - self.starts).expand(*shape, -1).flatten()
        bounds = found.bounds.expand(*shape, -1, -1, -1).flatten(0, 2)
        bounds = bounds.repeat_interleave(repeats, 0, output_size=shape.numel() * self.n).view(*shape, self.n, -1, 2)
        return Rows(bounds[..., 0], bounds[..., 1], found.kv_len)


def picked(values: Tensor, at: Tensor) -> Tensor:
    """The values ``[B', H', m]`` at the places ``int64[B, H, n]``."""
    return (values if values.shape[:2] == at.shape[:2] else values.expand(*at.shape[:2], -1)).gather(-1, at)


def nondecreasing_runs(column: Tensor, value: Tensor, kv_len: int) -> Rows:
    """The keys with ``column[b, h, kv] == value[b, h, q]``, both ``int64``, without a host sync.

    The column must be non-decreasing from 0 up, except for a tail of -1; this is not checked. No value may be the
    greatest integer.
    """
    behind = torch.iinfo(column.dtype).max
    column, value = (side.masked_fill(side == -1, behind) for side in (column, value))
    return Rows.spans(search(column, value, right=False), search(column, value, right=True), kv_len)


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
