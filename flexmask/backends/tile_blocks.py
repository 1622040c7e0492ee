"""Where the blocks of rows start, each in one tile or more, and their visible keys, on the host. Shapes as in `tile`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from flexmask.backends.tile import Runs, key_count
from flexmask.errors import LoweringError
from flexmask.intervals.rows import union_runs

BLOCK_ROWS = 128
# In bands blocks are halved down to this where that leaves out a fifth of the scores.
MIN_BLOCK_ROWS = 32
# Factor on the time of a score for each halving of a tile's rows below BLOCK_ROWS.
HALVING_COST = 1.2


def block_starts(bounds: Tensor, q_len: int, scores: int, call_scores: int, *, in_bands: bool) -> list[Sequence[int]]:
    """Candidates for the first rows of the blocks, of which the caller takes the one whose tiles cost least.

    The rows are in ascending order. A block has at most `BLOCK_ROWS` of them.

    Args:
        bounds: int [B', H', Q', K, 2].
        q_len: Q.
        scores: of one row and one key, B * H.
        call_scores: how many scores cost as much as one more block.
        in_bands: whether tiles along the diagonal are joined to bands, so that many blocks of equal rows cost little.

    Returns:
        Blocks that end where documents do, where there are several, and blocks of equal rows, where bands of them may be cheaper.
    """
    regular = range(0, q_len, BLOCK_ROWS)
    if bounds.size(2) != q_len or q_len <= BLOCK_ROWS or not bounds.size(3):
        return [regular]
    starts, keys = document_starts(bounds)
    if in_bands and (even := _even_rows(starts, q_len)):
        return [range(0, q_len, even)]
    choices: list[Sequence[int]] = []
    if 1 < len(starts) <= q_len // MIN_BLOCK_ROWS:
        choices.append(_cut(starts, keys, q_len, call_scores // scores))
    if in_bands and (rows := _block_rows(bounds)) < BLOCK_ROWS:
        choices.append(range(0, q_len, rows))
    return choices or [regular]


def score_cost(rows: int) -> float:
    """The time of a score in a tile of so many rows, of which a block of `BLOCK_ROWS` takes 1."""
    return math.pow(HALVING_COST, max(0.0, math.log2(BLOCK_ROWS / rows)))


def document_starts(bounds: Tensor) -> tuple[list[int], list[int]]:
    """The rows of new documents: from there on rows attend to later keys than all rows before. Row 0 is the first.

    Returns:
        The rows, and how many keys are between the last ones of each document and of the one before.
    """
    lo, hi = bounds.unbind(-1)
    used = lo < hi
    stop = hi.where(used, 0).amax((0, 1, 3)).cummax(0).values
    first = lo.where(used, torch.iinfo(lo.dtype).max).amin((0, 1, 3)).flip(0).cummin(0).values.flip(0)
    is_start = (first[1:] >= stop[:-1]) & used.any(3).any(1).any(0)[1:]
    starts = is_start.nonzero()[:, 0]
    stops = stop[torch.cat((starts, starts.new_tensor([-1])))]
    return [0, *(starts + 1).tolist()], stops.diff(prepend=stops.new_zeros(1)).tolist()


def _even_rows(starts: Sequence[int], q_len: int) -> int:
    """The rows of each of several short documents of one length, or of a few of them; 0 where blocks of 2**n rows fit too."""
    size = starts[1] if len(starts) > 1 else q_len
    rows = size * -(-MIN_BLOCK_ROWS // size)
    is_even = list(starts) == list(range(0, q_len, size)) and rows % MIN_BLOCK_ROWS
    return rows if is_even and rows < BLOCK_ROWS else 0


def _cut(starts: Sequence[int], keys: Sequence[int], q_len: int, call: int) -> list[int]:
    """Blocks that end where a document does, if the masked-out cells that this leaves out are more than ``call``."""
    found = [0]
    for start, size in zip(starts[1:], keys, strict=False):
        found += range(found[-1] + BLOCK_ROWS, start + 1, BLOCK_ROWS)
        before = start - found[-1]
        after = min(found[-1] + BLOCK_ROWS, q_len) - start
        if before and after * (size + before) > call:
            found.append(start)
    return [*found, *range(found[-1] + BLOCK_ROWS, q_len, BLOCK_ROWS)]


def _block_rows(bounds: Tensor) -> int:
    """The rows of a block: `BLOCK_ROWS`, or fewer where rows attend to few keys around them."""
    count = bounds.size(2) // BLOCK_ROWS
    if count < 2 or BLOCK_ROWS <= MIN_BLOCK_ROWS:
        return BLOCK_ROWS
    lo, hi = bounds[:, :, : count * BLOCK_ROWS].unbind(-1)
    hi = hi.where(lo < hi, 0).amax(-1)
    lo = lo.where(lo < hi.unsqueeze(-1), torch.iinfo(lo.dtype).max).amin(-1)
    sizes = [MIN_BLOCK_ROWS * 2**i for i in range((BLOCK_ROWS // MIN_BLOCK_ROWS).bit_length())]
    scores = []
    for rows in sizes:
        start, stop = (end.unflatten(2, (-1, rows)) for end in (lo, hi))
        scores.append((stop.amax(-1) - start.amin(-1)).clamp(min=0).sum() * rows)
    best, *others = torch.stack(scores).tolist()[::-1]
    rows = BLOCK_ROWS
    for fewer in others:
        if fewer > 0.8 * best:
            break
        rows, best = rows // 2, fewer
    return rows


# ---------------------------------------------------------------- the visible keys of blocks


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
        check_within(bool((used & ((lo < 0) | (hi > kv_len))).any()), kv_len)
        lo, hi = lo.where(used, kv_len), hi.where(used, kv_len)
        row = first[:, None] + torch.arange(rows, device="cpu")
        beyond, row = row >= ends[:, None], row.clamp(max=q_len - 1)
        fewest = (hi - lo).sum(-1)[:, :, row].masked_fill(beyond, kv_len).view(total, rows).amin(-1)
        lo, hi = (end[:, :, row].masked_fill(beyond[..., None], kv_len).view(total, rows * slots) for end in (lo, hi))
        block, start, stop = _merge(lo, hi, kv_len)
        lowest, shapes = _shapes(*(end.view(batch * heads, count, rows * slots) for end in (lo, hi)))
        runs: list[list[tuple[int, int]]] = [[] for _ in range(total)]
        for at, *run in zip(block.tolist(), start.tolist(), stop.tolist(), strict=True):
            runs[at].append((run[0], run[1]))
        alignment = 1 if rows % ALIGNMENT and count > 1 else ALIGNMENT  # else the tiles of a band would have different keys
        host = fewest.tolist(), lowest.tolist(), shapes.tolist()
        return cls(batch, heads, group, kv_len, count, alignment, [tuple(own) for own in runs], *host)

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
    return _close(sorted(chain.from_iterable(set(several))))


def _close(ascending: Sequence[tuple[int, int]]) -> Runs:
    merged: list[tuple[int, int]] = []
    for lo, hi in ascending:
        if merged and lo <= merged[-1][1] + GAP:
            merged[-1] = (merged[-1][0], max(merged[-1][1], hi))
        else:
            merged.append((lo, hi))
    return tuple(merged)


def check_within(wrong: int, kv_len: int) -> None:
    """Raises a LoweringError where an interval is outside 0..KV."""
    if wrong:
        raise LoweringError(f"bounds has an interval outside 0..{kv_len}; wanted 0 <= lo and hi <= {kv_len} keys")
