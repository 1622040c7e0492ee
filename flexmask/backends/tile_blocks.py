"""The visible keys of blocks of rows, on the host. Shapes as in `tile`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch
from torch import Tensor

from flexmask.backends.tile import Runs
from flexmask.errors import LoweringError
from flexmask.intervals.rows import union_runs

# Kernels are up to a fifth faster where a tile's keys are whole vectors.
ALIGNMENT = 16
# Attending to this many masked-out keys costs about as much as gathering the keys on both sides of them.
GAP = 128


@dataclass(frozen=True, slots=True)
class Blocks:
    """The visible keys of each block of rows, on the host. Where Q' is 1 there is one block, for all rows.

    Args:
        batch: B'.
        heads: H'.
        group: how many query heads share a key head.
        kv_len: KV.
        count: the blocks.
        alignment: what the ends of a tile's keys are multiples of.
        runs: key intervals that contain all keys that rows of the block attend to, [B' x H' x blocks].
        fewest: the least number of visible keys of a row, [B' x H' x blocks].
        lowest: the first visible key, [blocks].
        shapes: equal for blocks with equal key intervals, relative to their first keys, [blocks].
    """

    batch: int
    heads: int
    group: int
    kv_len: int
    count: int
    alignment: int
    runs: list[Runs]
    fewest: list[int]
    lowest: list[int]
    shapes: list[int]

    @classmethod
    def read(cls, bounds: Tensor, kv_len: int, group: int, starts: Sequence[int]) -> Blocks:
        bounds = bounds.cpu()
        if bounds.size(3) == 0:
            bounds = bounds.new_zeros(*bounds.shape[:3], 1, 2)
        batch, heads, q_len, slots, _ = bounds.shape
        first = torch.tensor(starts if q_len > 1 else [0], device="cpu")
        ends = torch.cat((first[1:], first.new_tensor([q_len])))
        rows, count = int((ends - first).amax()), len(first)
        total = batch * heads * count
        lo, hi = bounds.unbind(-1)
        used = lo < hi
        outside = (used & ((lo < 0) | (hi > kv_len))).any()
        lo, hi = lo.where(used, kv_len), hi.where(used, kv_len)
        row = first[:, None] + torch.arange(rows, device="cpu")
        beyond, row = row >= ends[:, None], row.clamp(max=q_len - 1)
        fewest = (hi - lo).sum(-1)[:, :, row].masked_fill(beyond, kv_len).view(total, rows).amin(-1)
        lo, hi = (end[:, :, row].masked_fill(beyond[..., None], kv_len).view(total, rows * slots) for end in (lo, hi))
        block, start, stop = _merge(lo, hi, kv_len)
        lowest, shapes = _shapes(*(end.view(batch * heads, count, rows * slots) for end in (lo, hi)))
        parts = (outside[None], fewest, lowest, shapes, block, start, stop)
        sizes = [len(part) for part in parts]
        numbers = torch.cat(parts).tolist()
        (wrong,), *host = (numbers[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True))
        check_within(wrong, kv_len)
        runs: list[list[tuple[int, int]]] = [[] for _ in range(total)]
        for at, *run in zip(*host[3:], strict=True):
            runs[at].append((run[0], run[1]))
        alignment = 1 if rows % ALIGNMENT and count > 1 else ALIGNMENT  # else the tiles of a band would have different keys
        return cls(batch, heads, group, kv_len, count, alignment, [tuple(own) for own in runs], *host[:3])

    def key_runs(self, block: int, elements: Sequence[int], key_heads: range) -> tuple[Runs, bool]:
        """The keys that these batch elements and heads attend to, together, and whether each row attends to all of them."""
        heads = range(key_heads.start * self.group, key_heads.stop * self.group)
        entries = [
            (b * self.heads + h) * self.count + block % self.count
            for b in (elements if self.batch > 1 else (0,))
            for h in (heads if self.heads > 1 else (0,))
        ]
        runs = union([self.runs[entry] for entry in entries])
        size = key_count(runs)
        if all(self.fewest[entry] == size for entry in entries):
            return runs, True
        aligned = [(lo - lo % self.alignment, min(hi + -hi % self.alignment, self.kv_len)) for lo, hi in runs]
        return _close(aligned), False

    def mask_key(self, block: int, rows: int, elements: range, key_heads: range, runs: Runs) -> tuple[object, ...]:
        """Equal for tiles with equal masks."""
        block %= self.count
        lowest = self.lowest[block]
        own = (elements if self.batch > 1 else None, key_heads if self.heads > 1 else None)
        return self.shapes[block], rows, own, tuple((lo - lowest, hi - lowest) for lo, hi in runs)


def _shapes(lo: Tensor, hi: Tensor) -> tuple[Tensor, Tensor]:
    """The first visible key of each block, and a number that is equal for blocks with equal key intervals relative to it."""
    lowest = lo.amin((0, 2))
    ends = torch.stack((lo, hi), -1) - lowest[:, None, None]
    ends = ends.where((lo < hi).unsqueeze(-1), 0)
    return lowest, torch.unique(ends.transpose(0, 1).flatten(1), dim=0, return_inverse=True)[1]


def _merge(lo: Tensor, hi: Tensor, kv_len: int) -> tuple[Tensor, Tensor, Tensor]:
    """Intervals [blocks, n], kv_len where unused -> runs (block, lo, hi) that contain them, with short gaps closed."""
    lo, hi, opens, closes = union_runs(lo.where(lo < kv_len, kv_len + GAP + 1), hi, GAP)  # which joins no used interval
    used = lo < kv_len
    first = opens & used
    return first.nonzero()[:, 0], lo[first], hi[closes & used]


def union(several: Sequence[Runs]) -> Runs:
    """Runs that contain all of several, with short gaps closed."""
    distinct = set(several)
    if len(distinct) == 1:
        return several[0]
    return _close(sorted(chain.from_iterable(distinct)))


def _close(ascending: Sequence[tuple[int, int]]) -> Runs:
    merged: list[tuple[int, int]] = []
    for lo, hi in ascending:
        if merged and lo <= merged[-1][1] + GAP:
            merged[-1] = (merged[-1][0], max(merged[-1][1], hi))
        else:
            merged.append((lo, hi))
    return tuple(merged)


def key_count(runs: Runs) -> int:
    """The number of keys in runs."""
    return sum(hi - lo for lo, hi in runs)


def check_within(wrong: int, kv_len: int) -> None:
    """Raises a LoweringError where an interval is outside 0..KV."""
    if wrong:
        raise LoweringError(f"bounds has an interval outside 0..{kv_len}; wanted 0 <= lo and hi <= {kv_len} keys")
