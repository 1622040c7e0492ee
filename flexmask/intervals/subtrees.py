"""Rows of ``(kv <= q) & (q < end[kv])``: each key is seen until its end, as a token of a prefix tree until its subtree ends.

Neighbours that end together are one segment, and a row is a chain of segments: the last one that ends behind the query, the last
one before it that does, and so on. Where no segment of a chain ends before the next one, as in trees, the chain of a segment is
the same for all queries that see it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flexmask import _sync
from flexmask._transforms import are_ints, is_captured
from flexmask.intervals.rows import Rows, padded

#: Intervals of a row that are listed in a graph, which cannot count them; those before them are bounded.
LISTED = 4
#: Greater depths are compared cell by cell, so that their differences fit 64 bits.
MOST = 2**61
ROOT = "prefix_tree: position_ids, the depths of tokens, must begin with 0"
LEAST = "prefix_tree: position_ids, the depths of tokens, must be at least 0; where there is padding give end="
STEP = "prefix_tree: position_ids, the depths of tokens in depth-first order, must not rise by more than 1"


def subtree_rows(
    end: Tensor, depths: Sequence[tuple[Tensor, Tensor, bool]], position: Tensor, kv_len: int, n: int, most: int
) -> tuple[Rows, Rows, list[bool]] | None:
    """The rows of ``(kv <= q) & (q < end[kv])`` from below and from above; the same where they are exact.

    Args:
        end: ``int64[B, H, kv_len]`` from 0 to n; as of the other tensors, axes may be 1.
        depths: columns ``int64[B, H, kv_len]`` and values ``int64[B, H, q_len]`` of further conditions, and whether they are
            ``column[kv] > value[q]`` rather than ``column[kv] >= value[q]``.
        position: of the queries, ``int64[B, H, q_len]``.
        kv_len: number of keys.
        n: the first position behind all keys and queries.
        most: intervals of a row at most; of more, those before are bounded.

    Returns:
        The rows, and which of the further conditions they meet: those on columns that rise by one along each branch. None where
        the keys are no trees. In a graph, where this cannot be seen, nothing is known of a row then, and no condition is met.
    """
    shape = torch.broadcast_shapes(*(side.shape[:2] for side in (end, position, *(side for pair in depths for side in pair[:2]))))
    position = position.expand(*shape, -1)
    segments = Segments.of(padded(end.expand(*shape, kv_len), (0, n - kv_len), 0))
    if is_captured():
        lower, upper = segments.rows(position, [], kv_len, LISTED)
        nested = segments.nested.unsqueeze(-1)
        lower = Rows(torch.where(nested, lower.lo, kv_len), torch.where(nested, lower.hi, kv_len), kv_len)
        every = torch.arange(upper.slots, device=end.device) > 0  # all keys in the first interval
        upper = Rows(torch.where(nested, upper.lo, every * kv_len), torch.where(nested, upper.hi, kv_len), kv_len)
        return lower, upper, [False] * len(depths)
    if not bool(segments.nested.all()):
        return None
    columns = [padded(column.expand(*shape, kv_len), (0, n - kv_len), 0) for column, _, _ in depths]
    are_depths = [segments.has_depths(column) for column in columns]
    least = [
        (column, value.clamp(-MOST, MOST).expand(*shape, -1) + is_strict)
        for column, (_, value, is_strict), is_depth in zip(columns, depths, are_depths, strict=True)
        if is_depth
    ]
    return *segments.rows(position, least, kv_len, most), are_depths


@dataclass(frozen=True, eq=False)
class Segments:
    """The segments of keys and their chains, ``int64[B, H, m + 1]``; m, the last of them, stands for no segment.

    Attributes:
        edges: where each begins, and n: ``int64[m + 1]``.
        number: the segment of each position, ``int64[n]``.
        last: the last segment that the queries in each see.
        parent: the segment before each in its chain.
        head: the first segment of the neighbours up to each that are in its chain.
        root: the first segment of its chain.
        nested: whether these are the keys of the mask, ``bool[B, H, 1]``.
    """

    edges: Tensor
    number: Tensor
    last: Tensor
    parent: Tensor
    head: Tensor
    root: Tensor
    nested: Tensor

    @classmethod
    def of(cls, end: Tensor) -> Segments:
        """The segments of keys that are seen until ``end``, ``int64[B, H, n]`` from 0 to n."""
        n = end.shape[-1]
        if is_captured():
            edges = number = torch.arange(n + 1, device=end.device)
        else:
            begins = torch.zeros(n + 1, dtype=torch.bool, device=end.device)
            begins[1:-1] = _differ(end)
            begins[end.flatten()] = True
            begins[0] = begins[-1] = True
            edges, number = begins.nonzero().flatten(), begins.cumsum(0) - 1
        end = number[end[..., edges[:-1]]]
        m = end.shape[-1]
        at = number[edges[:-1]]
        behind = end.maximum(at)
        closed = torch.zeros_like(end).scatter_add(-1, behind.clamp(max=m - 1), (behind < m).long()).cumsum(-1)
        count = at + 1 - closed  # of the segments that each sees
        level = torch.where(end > at, count, 0)
        placed = (level * m + at).sort(-1).values

        def last(level: Tensor, position: Tensor) -> Tensor:
            """The last segment of a level up to a position."""
            found = torch.searchsorted(placed, level * m + position, right=True) - 1
            segment = placed.gather(-1, found.clamp(min=0))
            return torch.where((segment // m == level) & (level > 0), segment % m, m)

        own, parent = last(count, at), last(level - 1, at - 1)
        head = torch.where(parent == at - 1, 0, at).cummax(-1).values
        # A chain has as many segments as a query sees; each of them ends behind it where none ends before the next one.
        ends = padded(end, (0, 1), -1)  # no segment ends before all
        is_seen = (count == 0) | (ends.gather(-1, own) > at)
        is_within = (level <= 1) | (ends.gather(-1, parent) >= end)
        nested = (is_seen & is_within).all(-1, keepdim=True)
        root = last(torch.ones_like(end), at)
        own, parent, head, root = (padded(segments, (0, 1), m) for segments in (own, parent, head, root))
        return cls(edges, number, own, parent, head, root, nested)

    def has_depths(self, column: Tensor) -> bool:
        """Whether each value is one more than that of the key before it in its chain, and all are far from overflow."""
        number = self.number[:-1]
        before = torch.arange(-1, column.shape[-1] - 1, device=column.device).expand_as(column).clone()
        before[..., self.edges[:-1]] = padded(self.edges[1:], (0, 1), 0)[self.parent[..., :-1]] - 1
        is_seen = (self.last[..., :-1] == self.number[self.edges[:-1]])[..., number]
        rises = (before < 0) | (column == column.gather(-1, before.clamp(min=0)) + 1)
        return bool(((rises & (column > -MOST) & (column < MOST)) | ~is_seen).all())

    def rows(self, position: Tensor, least: Sequence[tuple[Tensor, Tensor]], kv_len: int, most: int) -> tuple[Rows, Rows]:
        """The rows of queries at positions: see :func:`subtree_rows`."""
        none = self.last.shape[-1] - 1
        following, last, chain = self.parent.gather(-1, self.head), self.last, list[Tensor]()
        while len(chain) < most and (not chain or is_captured() or bool((last < none).any())):
            chain.append(last)
            last = following.gather(-1, last)
        is_whole = not is_captured() and not bool((last < none).any())
        lasts = torch.stack(chain[::-1], -1)
        heads = self.head.unsqueeze(-1).expand_as(lasts).gather(2, lasts)
        lower = self._of_queries(position, heads, lasts, least, kv_len)
        if is_whole:
            return lower, lower
        heads = torch.cat((self.root.gather(-1, last).unsqueeze(-1), heads), -1)
        lasts = torch.cat((last.unsqueeze(-1), lasts), -1)
        return lower, self._of_queries(position, heads, lasts, least, kv_len)

    def _of_queries(
        self, position: Tensor, heads: Tensor, lasts: Tensor, least: Sequence[tuple[Tensor, Tensor]], kv_len: int
    ) -> Rows:
        """The keys up to each query from the first to the last segments of neighbours in its chain, ``[B, H, m + 1, K]``."""
        begins, stops = (padded(edges, (0, 1), kv_len).to(torch.int32) for edges in (self.edges[:-1], self.edges[1:]))
        of_segments, own = Rows(begins[heads], stops[lasts], kv_len).compact(), self.number[position]
        lo, hi = (_lines(end, own) for end in (of_segments.lo, of_segments.hi))
        # Only the last interval of a row can end behind the query. Where no slot is in use, it begins and ends at kv_len.
        slot = ((of_segments.lo < kv_len).sum(-1, keepdim=True) - 1).clamp(min=0)
        newest = torch.cat((slot, *(end.gather(-1, slot) for end in (of_segments.lo, of_segments.hi))), -1)
        slot, begin, stop = _lines(newest, own).split(1, -1)
        hi.scatter_(-1, slot, stop.minimum((position + 1).unsqueeze(-1)).maximum(begin).to(torch.int32))
        for column, value in least:
            first = column.unsqueeze(2).expand(*hi.shape[:3], -1).gather(-1, lo.clamp(max=kv_len - 1).long())
            lo = (lo + (value.unsqueeze(-1) - first).clamp(0, kv_len)).to(torch.int32)
        if least:
            return Rows(lo, hi, kv_len).compact()
        if is_captured() or _sync.needs_sync(own):
            return Rows(lo, hi, kv_len)
        return Rows(lo, hi, kv_len, resets=_differ(own).nonzero().flatten() + 1)


def subtree_ends(depth: Tensor) -> Tensor:
    """The first position behind the subtree of each token, ``int64[..., n]``, from its depth in a tree in depth-first order.

    Raises:
        LoweringError: a token is more than one below the one before it. Values in another device's memory are not read.
    """
    n = depth.shape[-1]

    def wrong_step() -> str:
        *line, at = (depth.diff(dim=-1) > 1).nonzero()[0].tolist()
        before, here = (int(depth[(*line, place)]) for place in (at, at + 1))
        return f", got {here} after {before} at position {at + 1}"

    _sync.check(lambda: depth[..., :1] == 0, depth, ROOT, lambda: f", got {int(depth[..., 0].max())}")
    _sync.check(lambda: depth >= 0, depth, LEAST, lambda: f", got {int(depth.min())}")
    _sync.check(lambda: depth.diff(dim=-1) <= 1, depth, STEP, wrong_step)
    at = torch.arange(n, device=depth.device)
    placed = (depth * n + at).sort(-1).values
    up = torch.searchsorted(placed, (depth - 1) * n + at) - 1  # the last token before at the depth above, the parent
    parent = torch.where(depth > 0, placed.gather(-1, up.clamp(min=0)) % n, at)
    later = torch.searchsorted(placed, depth * n + at, right=True)
    following = placed.gather(-1, later.clamp(max=n - 1))
    end = torch.where((later < n) & (following // n == depth), following % n, n)  # the next one at the same depth
    for _ in range(n.bit_length() if are_ints(n) else 32):  # the least of those of a token and the 2 ** i nearest above it
        end, parent = end.minimum(end.gather(-1, parent)), parent.gather(-1, parent)
    return end


def _differ(values: Tensor) -> Tensor:
    """Whether each value but the first is another than that before it in some line, ``bool[n - 1]``."""
    return (values[..., 1:] != values[..., :-1]).flatten(0, -2).any(0)


def _lines(values: Tensor, at: Tensor) -> Tensor:
    """The lines ``[B, H, n, K]`` of ``[B, H, m, K]`` at places ``[B, H, n]``; copying lines is faster than to gather cells."""
    batch, heads, m, _ = values.shape
    begin = torch.arange(batch * heads, device=at.device).view(batch, heads, 1) * m
    return values.flatten(0, 2).index_select(0, (at + begin).flatten()).view(*at.shape, -1)
