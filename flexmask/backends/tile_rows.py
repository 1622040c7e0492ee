"""Where the blocks of rows start, each of which is in one tile or more. Shapes as in `tile`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

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
    if count < 2 or not bounds.size(3) or BLOCK_ROWS <= MIN_BLOCK_ROWS:
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
