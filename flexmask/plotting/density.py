"""Counts of visible cells in each rectangle of a regular grid over one sequence and head of a mask, ``int64[rows, columns]``.

Counts come from the key intervals: each end of an interval adds a ramp to its row of the grid. The work is linear in the
intervals and in the grid, not in q_len x kv_len. If the bounds differ, the cells between them are evaluated, up to a limit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flexmask._checks import checked_int
from flexmask.errors import OperandError, RenderError
from flexmask.expr.mask import Mask
from flexmask.intervals.bind import bind
from flexmask.intervals.bounds import RowBounds, analyze
from flexmask.intervals.closures import mask_closure
from flexmask.intervals.context import Context
from flexmask.intervals.rows import Rows
from flexmask.intervals.sizes import own_sizes

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

    def samples(self, least: Counts, most: Counts, step: tuple[int, int]) -> NDArray[np.float64]:
        """The visible fraction of ``SAMPLES`` x ``SAMPLES`` cells in each rectangle where the counts differ.

        Elsewhere the result has no meaning. The cells are random, to avoid aliasing with patterns of the mask, from a fixed seed.
        """
        fraction = np.zeros(least.shape)
        draw = np.random.default_rng(0)
        queries, keys = (
            np.concatenate([draw.integers(start, min(start + size, length), SAMPLES) for start in range(0, length, size)])
            for length, size in zip((self.context.q_len, self.context.kv_len), step, strict=True)
        )
        q, kv = (torch.from_numpy(index).to(self.context.device) for index in (queries, keys))
        for (top, bottom), (left, right) in self._undecided(least, most, step):
            cells = self._cells(q[top * SAMPLES : bottom * SAMPLES], kv[left * SAMPLES : right * SAMPLES])
            cells = cells.reshape(bottom - top, SAMPLES, right - left, SAMPLES)
            fraction[top:bottom, left:right] = cells.mean((1, 3))
        return fraction

    def _count(self, rows: Rows, step: tuple[int, int]) -> Counts:
        whole = rows.expand(self.context.batch, self.context.heads, self.context.q_len)
        lo, hi = (ends[self.batch, self.head].cpu().numpy() for ends in (whole.lo, whole.hi))
        return count_intervals(lo, hi, self.context.kv_len, step)

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

    def _cells(self, queries: Tensor, keys: Tensor) -> NDArray[np.bool_]:
        b, h = (torch.tensor(index, device=self.context.device) for index in (self.batch, self.head))
        found = mask_closure(self.context)(b, h, queries[:, None], keys[None, :])
        cells: NDArray[np.bool_] = found.expand(len(queries), len(keys)).cpu().numpy()
        return cells


def cells_in(q_len: int, kv_len: int, step: tuple[int, int]) -> Counts:
    """The number of cells in each rectangle of a grid; fewer at the lower and right edge."""
    sides = [np.diff([*range(0, length, size), length]) for length, size in zip((q_len, kv_len), step, strict=True)]
    return np.multiply.outer(sides[0], sides[1]).astype(np.int64)


def summed(operation: np.ufunc, pixels: NDArray[Any], step: tuple[int, int]) -> NDArray[Any]:
    """What an operation makes of the pixels ``[..., rows, columns]`` in each rectangle of a grid."""
    for axis in (-2, -1):
        pixels = operation.reduceat(pixels, range(0, pixels.shape[axis], step[axis]), axis=axis)
    return pixels


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


#: The most queries or keys. Their rows take about 3 GB; longer masks would run out of memory without an explanation.
MAX_TOKENS = 2**27


@dataclass(frozen=True)
class Selection:
    """One sequence and one head of masks at given lengths.

    Attributes:
        q_len: queries.
        kv_len: keys.
        q_offset: position of the first query.
        batch: index of the sequence.
        head: index of the head.
        batches: sequences of the masks; None if unknown.
        heads: heads of the masks, in the same way.
    """

    q_len: int
    kv_len: int
    q_offset: int | Tensor
    batch: int
    head: int
    batches: int | None
    heads: int | None

    def slice(self, mask: Mask) -> MaskSlice:
        """One sequence and head of a mask; sequences and heads that its data does not determine are those of the selection."""
        own = own_sizes(mask)
        batch, heads = (
            None if axis in own or axis not in mask.symbols else index + 1 if size is None else size
            for axis, index, size in (("b", self.batch, self.batches), ("h", self.head, self.heads))
        )
        context = bind(mask, self.q_len, self.kv_len, batch=batch, heads=heads, q_offset=self.q_offset)
        return MaskSlice(context, analyze(context), self.batch if context.batch > 1 else 0, self.head if context.heads > 1 else 0)


def select(masks: list[Mask], q_len: int, kv_len: int, batch: int, head: int, q_offset: int | Tensor) -> Selection:
    """The selection, with the numbers of sequences and heads if a mask determines them."""
    for name, index in (("batch", batch), ("head", head)):
        checked_int(index, name, 0, kind=OperandError, wanted="one index, of which Mask.plot_panels draws several")
    for name, length in (("q_len", q_len), ("kv_len", kv_len)):
        if length > MAX_TOKENS:
            raise RenderError(f"{name} {length:,} is too long to draw; at most {MAX_TOKENS:,} can be drawn")
    found = [own_sizes(mask) for mask in masks]
    if isinstance(q_offset, Tensor):
        found.append({"b": q_offset.numel()})
    depends = {symbol for mask in masks for symbol in mask.symbols}
    batches, heads = (
        max((sizes[axis] for sizes in found if axis in sizes), default=None if axis in depends else 1) for axis in ("b", "h")
    )
    for what, name, index, size in (("sequence", "batch", batch, batches), ("head", "head", head, heads)):
        if size is not None and index >= size:
            there = f"the {what}s are 0 to {size - 1}" if size > 1 else f"leave it 0, as the mask is the same for every {what}"
            raise RenderError(f"{name} {index} is out of range: {there}")
    return Selection(q_len, kv_len, q_offset, batch, head, batches, heads)
