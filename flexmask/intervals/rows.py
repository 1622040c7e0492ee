"""Key intervals of each query row, ``int32[B, H, q_len, K]``, and their boolean algebra.

The tensors are padded: every row has the same number of interval slots, and a slot that is not used is the empty interval
``[kv_len, kv_len)``. Slots that no row uses are dropped after each operation on the CPU. Elsewhere that would force a host
sync, so there it is done only where a row has more than :data:`FEW`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from flexmask import _sync
from flexmask._transforms import are_ints, is_captured

#: Slots that are kept rather than counted where counting forces a host sync.
FEW = 8


@dataclass(frozen=True, eq=False)
class Rows:
    """Sets of keys, one for each query row, as sorted, disjoint, non-touching intervals ``[lo, hi)``.

    Attributes:
        lo: first key of each interval, ``int32[B, H, q_len, K]``; each of the first three axes is 1 where the set does not
            depend on it. Unused slots come last.
        hi: one more than the last key of each interval, shaped like ``lo``.
        kv_len: number of keys.
        resets: rows that may lack keys of the row before them, ``int64[m]`` in any order; each other row holds all of them. None
            where nothing is known; operations do not keep it. Known on the CPU alone.
    """

    lo: Tensor
    hi: Tensor
    kv_len: int
    resets: Tensor | None = None

    @property
    def bounds(self) -> Tensor:
        """Both ends of the intervals, ``int32[B, H, q_len, K, 2]``."""
        return torch.stack((self.lo, self.hi), -1)

    @property
    def slots(self) -> int:
        """The number of interval slots K."""
        return self.lo.shape[-1]

    @classmethod
    def everything(cls, kv_len: int, device: torch.device) -> Rows:
        """All keys in each row."""
        zero = torch.zeros((1, 1, 1, 1), dtype=torch.int32, device=device)
        return cls(zero, zero + kv_len, kv_len)

    @classmethod
    def nothing(cls, kv_len: int, device: torch.device) -> Rows:
        """No keys in any row."""
        end = torch.full((1, 1, 1, 1), kv_len, dtype=torch.int32, device=device)
        return cls(end, end, kv_len)

    @classmethod
    def spans(cls, start: Tensor, stop: Tensor, kv_len: int) -> Rows:
        """One interval a row, from ``int[B, H, q_len]`` that broadcast, where ``0 <= start`` and ``stop <= kv_len``."""
        empty = start >= stop
        lo, hi = (end.masked_fill(empty, kv_len).to(torch.int32).unsqueeze(-1) for end in (start, stop))
        return cls(lo, hi, kv_len)

    @classmethod
    def where(cls, rows: Tensor, kv_len: int) -> Rows:
        """All keys in the rows where ``bool[B, H, q_len]`` is True, none in the others."""
        lo = (~rows).to(torch.int32).unsqueeze(-1) * kv_len
        return cls(lo, torch.full_like(lo, kv_len), kv_len)

    def __and__(self, other: Rows) -> Rows:
        if min(self.slots, other.slots) > 1:
            few, many = sorted((self, other), key=lambda rows: rows.slots)
            if many.slots > FEW and not _sync.needs_sync(self.lo) and many.lo.numel() == many.slots and few.lo.shape[2] > 1:
                return few._intersected(many)
            both = ~(~self | ~other)
            return both._cut(self.slots + other.slots - 1)
        return Rows(torch.maximum(self.lo, other.lo), torch.minimum(self.hi, other.hi), self.kv_len).compact()

    @classmethod
    def stacked(cls, parts: Sequence[Rows], axis: int) -> Rows:
        """Sets one after another along an axis, with as many slots as the most of them have."""
        if len(parts) == 1:
            return parts[0]
        slots, kv_len = max(part.slots for part in parts), parts[0].kv_len
        ends = ("lo", "hi")
        lo, hi = (
            torch.cat([padded(getattr(part, end), (0, slots - part.slots), kv_len) for part in parts], axis) for end in ends
        )
        return cls(lo, hi, kv_len)

    def __or__(self, other: Rows) -> Rows:
        return Rows.union([self, other])

    @classmethod
    def union(cls, parts: Sequence[Rows]) -> Rows:
        """The keys that any of several sets holds."""
        shape = torch.broadcast_shapes(*(part.lo.shape[:-1] for part in parts))
        lo, hi = (torch.cat([getattr(part, end).expand(*shape, -1) for part in parts], -1) for end in ("lo", "hi"))
        return cls(lo, hi, parts[0].kv_len)._merge()

    def __invert__(self) -> Rows:
        edge = torch.zeros_like(self.lo[..., :1])
        return Rows(torch.cat((edge, self.hi), -1), torch.cat((self.lo, edge + self.kv_len), -1), self.kv_len).compact()

    def __sub__(self, other: Rows) -> Rows:
        return self & ~other

    def counts(self) -> Tensor:
        """The number of keys in each row, ``int64[B, H, q_len]``."""
        return (self.hi - self.lo).sum(-1)

    def hull(self) -> Rows:
        """The smallest single interval of each row that holds all its keys."""
        first = self.lo[..., :1]
        return Rows(first, torch.where(self.lo < self.hi, self.hi, first).amax(-1, keepdim=True), self.kv_len)

    def holds(self, kv: Tensor) -> Tensor:
        """Whether the rows hold keys: ``bool[B, H, q_len, n]`` for ``n`` keys ``int[n]``."""
        inside = (kv >= self.lo[..., :1]) & (kv < self.hi[..., :1])
        for slot in range(1, self.slots):
            inside |= (kv >= self.lo[..., slot : slot + 1]) & (kv < self.hi[..., slot : slot + 1])
        return inside

    def expand(self, batch: int, heads: int, q_len: int) -> Rows:
        """The same sets with the first three axes at their full size, as views."""
        shape = (batch, heads, q_len, self.slots)
        return Rows(self.lo.expand(shape), self.hi.expand(shape), self.kv_len)

    def at(self, places: Tensor | slice) -> Rows:
        """The sets of some of the rows, ``int64[n]`` or a slice."""
        return Rows(self.lo[:, :, places], self.hi[:, :, places], self.kv_len)

    def of_head(self, head: int, batch: int, q_len: int) -> Rows:
        """The sets of one head, with the other axes at a size, as views."""
        lo, hi = (end[:, min(head, end.shape[1] - 1), None].expand(batch, 1, q_len, -1) for end in (self.lo, self.hi))
        return Rows(lo, hi, self.kv_len)

    def filled(self, rows: Tensor) -> Rows:
        """The same sets, with all keys in some rows, ``bool[B, H, q_len, 1]``."""
        whole = padded(torch.zeros_like(self.lo[:1, :1, :1, :1]), (0, self.slots - 1), self.kv_len)
        lo, hi = torch.where(rows, whole, self.lo), torch.where(rows, self.kv_len, self.hi)
        return Rows(lo, hi, self.kv_len)._trimmed()

    def compact(self) -> Rows:
        """The same sets with empty intervals last, given intervals in order apart from these."""
        empty = self.lo >= self.hi
        lo, hi = self.lo.masked_fill(empty, self.kv_len), self.hi.masked_fill(empty, self.kv_len)
        return Rows(_sorted(lo), _sorted(hi), self.kv_len)._trimmed()

    def joined(self) -> Rows:
        """The same sets, given intervals in order that may be empty or touch the next one; forces a host sync."""
        found = self.compact()
        touching = (found.hi[..., :-1] == found.lo[..., 1:]) & (found.lo[..., 1:] < self.kv_len)
        return found._merge() if bool(touching.any()) else found

    def _intersected(self, shared: Rows) -> Rows:
        """The intersection with a set that is the same for all rows, in time of the size of the result."""
        lo, hi = shared.lo.flatten(), shared.hi.flatten()
        first = torch.searchsorted(hi, self.lo.contiguous(), right=True)
        end = torch.searchsorted(lo, self.hi.contiguous())
        number = end - first  # not above 0 where nothing is left, as for an empty interval
        step = torch.arange(max(1, int(number.max())), device=lo.device)
        at = (first.unsqueeze(-1) + step).clamp(max=shared.slots - 1)
        start, stop = torch.maximum(lo[at], self.lo.unsqueeze(-1)), torch.minimum(hi[at], self.hi.unsqueeze(-1))
        start = start.where(step < number.unsqueeze(-1), stop)
        return Rows(start.flatten(-2), stop.flatten(-2), self.kv_len).compact()

    def _merge(self) -> Rows:
        """Joins intervals that overlap or touch, given intervals in any order."""
        if self.slots == 2:
            return self._merge_two()
        lo, hi, opens, closes = union_runs(self.lo, self.hi)
        lo, hi = lo.masked_fill(~opens, self.kv_len), hi.masked_fill(~closes, self.kv_len)
        return Rows(_sorted(lo), _sorted(hi), self.kv_len)._trimmed()

    def _merge_two(self) -> Rows:
        first, second = self.lo.unbind(-1)
        swapped = first > second
        lo = torch.minimum(first, second), torch.maximum(first, second)
        first, second = self.hi.unbind(-1)
        hi = torch.where(swapped, second, first), torch.where(swapped, first, second)
        joined = lo[1] <= hi[0]
        ends = torch.stack((torch.where(joined, torch.maximum(*hi), hi[0]), hi[1].masked_fill(joined, self.kv_len)), -1)
        return Rows(torch.stack((lo[0], lo[1].masked_fill(joined, self.kv_len)), -1), ends, self.kv_len)._trimmed()

    def _trimmed(self) -> Rows:
        if self.slots == 1 or (_sync.needs_sync(self.lo) and self.slots <= FEW) or is_captured():
            return self
        if not _sync.needs_sync(self.lo) and bool((self.lo[..., -1] < self.hi[..., -1]).any()):
            return self
        return self.trimmed()

    def trimmed(self) -> Rows:
        """With as few slots as the fullest row has, which are counted on the host."""
        return self if self.slots == 1 else self._cut(max(1, int((self.lo < self.hi).sum(-1).max())))

    def _cut(self, slots: int) -> Rows:
        """The same sets without slots that are known to be unused."""
        return self if slots >= self.slots else Rows(self.lo[..., :slots], self.hi[..., :slots], self.kv_len)


def padded(tensor: Tensor, pad: tuple[int, ...], value: int) -> Tensor:
    """As ``F.pad`` with a number, which may be a length that a graph does not know."""
    return F.pad(tensor, pad, value=value) if are_ints(value) else F.pad(tensor - value, pad) + value


def union_runs(lo: Tensor, hi: Tensor, gap: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The union of intervals ``[lo, hi)`` along the last axis, ``[..., n]`` in any order.

    Args:
        lo: the first position of each interval.
        hi: one more than the last position of each.
        gap: intervals at most so far from each other are joined.

    Returns:
        Starts in order; the greatest end up to each of them; and, both ``bool[..., n]``, which of the starts are starts of the
        union and which of the ends are ends of it.
    """
    lo, order = lo.sort()
    hi = hi.gather(-1, order).cummax(-1).values
    opens = torch.ones_like(lo, dtype=torch.bool)
    opens[..., 1:] = lo[..., 1:] > (hi[..., :-1] + gap if gap else hi[..., :-1])
    closes = torch.ones_like(opens)
    closes[..., :-1] = opens[..., 1:]
    return lo, hi, opens, closes


def _sorted(ends: Tensor) -> Tensor:
    if ends.shape[-1] == 1:
        return ends
    if ends.shape[-1] == 2:
        first, second = ends.unbind(-1)
        return torch.stack((torch.minimum(first, second), torch.maximum(first, second)), -1)
    if not _sync.needs_sync(ends) and bool((ends[..., 1:] >= ends[..., :-1]).all()):  # checking costs less than sorting
        return ends
    return ends.sort(-1).values
