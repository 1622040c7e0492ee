"""From values along the keys, ``[B, H, kv_len]``, to the key intervals where a condition on them holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from flexmask import _sync
from flexmask.expr.mask import SWAPPED
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
