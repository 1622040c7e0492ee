"""Counts of visible cells in each rectangle of a regular grid over a mask, ``int64[rows, columns]``.

Counts come from the key intervals: each end of an interval adds a ramp to its row of the grid. The work is linear in the
intervals and in the grid, not in q_len x kv_len. If the bounds differ, the cells between them are evaluated, up to a limit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flexmask.blocks.classify import Blocks, classify, decide_open
from flexmask.blocks.sparse import BlockSets
from flexmask.intervals.bounds import RowBounds
from flexmask.intervals.closures import mask_closure
from flexmask.intervals.context import Context
from flexmask.intervals.rows import Rows

Counts = NDArray[np.int64]

#: Intervals, and cells, per chunk, which bounds the memory.
CHUNK_INTERVALS = 2**18
CHUNK_CELLS = 2**21
#: Queries per tile of cells between the bounds.
TILE_HEIGHT = 256
#: Sampled cells along each side of a larger rectangle.
SAMPLES = 8
#: The most cells between the bounds to evaluate: a second or two of work.
MAX_CELLS = 2**28


@dataclass(frozen=True, eq=False)
class MaskSlice:
    """One sequence and one head of a mask, whose visible cells are counted.

    Attributes:
        context: the mask's lowering context.
        bounds: its key intervals.
        batch: index of the sequence.
        head: index of the head.
    """

    context: Context
    bounds: RowBounds
    batch: int
    head: int

    def counts(self, step: tuple[int, int]) -> tuple[Counts, Counts]:
        """Lower and upper bounds of the visible cells in rectangles of ``step`` queries and keys; equal where exact."""
        least = self._count(self.bounds.lower, step)
        if self.bounds.exact:
            return least, least
        most = self._count(self.bounds.upper, step)
        tiles = self._undecided(least, most, step)
        if sum((q[1] - q[0]) * (kv[1] - kv[0]) for q, kv in tiles) * step[0] * step[1] > MAX_CELLS:
            return least, most
        for (top, bottom), (left, right) in tiles:
            least[top:bottom, left:right] = 0
            keys = self.context.index("kv")[left * step[1] : right * step[1]]
            for queries in self.context.index("q")[top * step[0] : bottom * step[0]].split(max(1, CHUNK_CELLS // len(keys))):
                found = np.add.reduceat(self._cells(queries, keys), range(0, len(keys), step[1]), axis=1, dtype=np.int64)
                np.add.at(least[:, left:right], queries.cpu().numpy() // step[0], found)
        return least, least

    def blocks(self, block_size: tuple[int, int]) -> Blocks[Tensor]:
        """The blocks as a BlockMask has them, ``bool[q_blocks, kv_blocks]``; open ones are left if they have too many cells."""
        context, sets = self.context, BlockSets(self.context, *block_size)
        lower = self._rows(self.bounds.lower)
        blocks = classify(RowBounds(lower, lower if self.bounds.exact else self._rows(self.bounds.upper)), sets)
        if blocks.open is not None and int(blocks.open.counts().sum()) * block_size[0] * block_size[1] <= MAX_CELLS:
            is_here = torch.zeros((context.batch, context.heads, 1), dtype=torch.bool, device=context.device)
            is_here[self.batch, self.head] = True
            here = Rows.where(is_here, sets.kv_blocks)
            blocks = decide_open(Blocks(blocks.partial, blocks.full, blocks.open & here), sets)
        keys = torch.arange(sets.kv_blocks, device=context.device)
        partial, full, left_open = (
            None if part is None else self._rows(part).expand(1, 1, sets.q_blocks).holds(keys)[0, 0]
            for part in (blocks.partial, blocks.full, blocks.open)
        )
        return Blocks(cast(Tensor, partial), cast(Tensor, full), left_open)

    def samples(self, least: Counts, most: Counts, step: tuple[int, int]) -> NDArray[np.float64]:
        """The visible fraction of ``SAMPLES`` x ``SAMPLES`` cells in each rectangle where the counts differ, 0 in the others.

        The cells are random, to avoid aliasing with patterns of the mask, from a fixed seed.
        """
        fraction = np.zeros(least.shape)
        draw = np.random.default_rng(0)
        q, kv = (
            np.concatenate(
                [np.sort(draw.integers(start, min(start + size, length), SAMPLES)) for start in range(0, length, size)]
            )
            for length, size in zip((self.context.q_len, self.context.kv_len), step, strict=True)
        )
        for (top, bottom), (left, right) in self._undecided(least, most, step):
            queries, keys = (
                torch.from_numpy(index[start * SAMPLES : stop * SAMPLES]).to(self.context.device)
                for index, start, stop in ((q, top, bottom), (kv, left, right))
            )
            cells = self._cells(queries, keys).reshape(bottom - top, SAMPLES, right - left, SAMPLES)
            fraction[top:bottom, left:right] = cells.mean((1, 3))
        fraction[least == most] = 0
        return fraction

    def _rows(self, rows: Rows) -> Rows:
        """The rows of the sequence and head, ``[1, 1, q, K]``."""
        b, h = min(self.batch, rows.lo.shape[0] - 1), min(self.head, rows.lo.shape[1] - 1)
        return Rows(rows.lo[b : b + 1, h : h + 1], rows.hi[b : b + 1, h : h + 1], rows.kv_len)

    def _count(self, rows: Rows, step: tuple[int, int]) -> Counts:
        own = self._rows(rows).expand(1, 1, self.context.q_len)
        return count_intervals(own.lo[0, 0].cpu().numpy(), own.hi[0, 0].cpu().numpy(), self.context.kv_len, step)

    def _undecided(self, least: Counts, most: Counts, step: tuple[int, int]) -> list[tuple[tuple[int, int], tuple[int, int]]]:
        """Ranges of rows and columns that cover every rectangle whose counts differ."""
        tiles = []
        many = max(1, TILE_HEIGHT // step[0])
        for top in range(0, least.shape[0], many):
            bottom = min(top + many, least.shape[0])
            columns = (least[top:bottom] != most[top:bottom]).any(0).nonzero()[0]
            if columns.size:
                tiles.append(((top, bottom), (int(columns[0]), int(columns[-1]) + 1)))
        return tiles

    def _cells(self, queries: torch.Tensor, keys: torch.Tensor) -> NDArray[np.bool_]:
        b, h = (torch.tensor(index, device=self.context.device) for index in (self.batch, self.head))
        found = mask_closure(self.context)(b, h, queries[:, None], keys[None, :])
        cells: NDArray[np.bool_] = found.expand(len(queries), len(keys)).cpu().numpy()
        return cells


def count_intervals(lo: NDArray[np.int32], hi: NDArray[np.int32], kv_len: int, step: tuple[int, int]) -> Counts:
    """Keys in the intervals ``[lo, hi)`` of each row, ``[q_len, K]``, summed over a grid of ``step`` queries and keys."""
    q_len, slots = lo.shape
    height, width = -(-q_len // step[0]), -(-kv_len // step[1])
    counts = np.empty((height, width), dtype=np.int64)
    many = max(1, CHUNK_INTERVALS // (step[0] * slots))
    for start in range(0, height, many):
        queries = slice(start * step[0], min((start + many) * step[0], q_len))
        counts[start : start + many] = _behind(lo[queries], kv_len, step) - _behind(hi[queries], kv_len, step)
    return counts


def _behind(ends: NDArray[np.int32], kv_len: int, step: tuple[int, int]) -> Counts:
    """For each rectangle the number of pairs of an end and a key at or after it."""
    height, width = -(-ends.shape[0] // step[0]), -(-kv_len // step[1])
    column = ends // step[1]  # an end at kv_len may fall into one column more than there are
    edges = np.minimum(np.arange(1, width + 2) * step[1], kv_len)
    place = ((np.arange(ends.shape[0]) // step[0])[:, None] * (width + 1) + column).ravel()
    size = height * (width + 1)
    within = np.bincount(place, (edges[column] - ends).ravel(), size).reshape(height, -1)[:, :width]
    starts = np.bincount(place, minlength=size).reshape(height, -1)[:, :width]
    before = np.cumsum(starts, axis=1) - starts
    return within.astype(np.int64) + before * np.diff(edges[:width], prepend=0)
