"""A tile of attention: a block of queries against a few key intervals that contain all keys that they attend to.

Shapes: B batch, H query heads, H_kv key heads (H_kv divides H), Q queries, KV keys, D head dim (Dv of the values), K key
intervals per row; B', H', Q' are B, H, Q, or 1 to broadcast. A tile has b batch elements, n key heads with g query heads each,
m rows and t keys. It is computed folded, with the g heads of a key head stacked: [b, n, g * m, D].
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from flexmask.lowering.mask_mod import MaskMod
from flexmask.scores.placed import diagonals, sum_diagonals

Runs: TypeAlias = tuple[tuple[int, int], ...]
Cells: TypeAlias = Tensor | MaskMod | None


class SymbolicSpan(NamedTuple):
    """Consecutive numbers from ``start`` on in a graph for all lengths, where a range would make numbers of symbols."""

    start: int
    stop: int


Span: TypeAlias = range | SymbolicSpan


@dataclass(frozen=True, slots=True)
class Tile:
    """Queries of some batch elements and heads, and key intervals that contain all keys that they attend to.

    Args:
        elements: the batch elements.
        key_heads: the key heads.
        group: how many query heads share a key head.
        rows: the queries.
        runs: the keys, as disjoint key intervals [lo, hi) in ascending order.
        all_visible: whether every row attends to all of these keys.
        mask_id: equal for tiles with equal masks.
    """

    elements: Span
    key_heads: Span
    group: int
    rows: Span
    runs: Runs
    all_visible: bool
    mask_id: int

    @property
    def scores(self) -> int:
        """The number of its scores, b * n * g * m * t."""
        return size_of(self.elements) * size_of(self.key_heads) * self.group * size_of(self.rows) * key_count(self.runs)

    @property
    def step(self) -> int:
        """Its rows, m."""
        return size_of(self.rows)

    @property
    def folded_rows(self) -> int:
        """The rows of its folded queries, g * m."""
        return self.group * self.step

    @property
    def slices(self) -> tuple[slice, slice, slice]:
        """The part of [B, H, Q, ...] that the tile covers."""
        heads = slice(self.key_heads.start * self.group, self.key_heads.stop * self.group)
        return _slice(self.elements), heads, _slice(self.rows)

    @property
    def _some_runs(self) -> Runs:
        """The keys as one run at least, which is empty where there are none."""
        return self.runs or ((0, 0),)

    @property
    def _key_slices(self) -> list[tuple[slice, slice, slice]]:
        """The parts of [B, H_kv, KV, D] that the tile attends to, one for each run."""
        return [(_slice(self.elements), _slice(self.key_heads), slice(lo, hi)) for lo, hi in self._some_runs]

    def fold(self, tensor: Tensor) -> Tensor:
        """[B, H, Q, D] -> [b, n, g * m, D]."""
        part = self._by_tile(tensor)
        if self.group == 1:
            return part
        return part.reshape(part.size(0), size_of(self.key_heads), self.folded_rows, part.size(3))

    def unfold(self, part: Tensor) -> Tensor:
        """[b, n, g * m, D] -> [b, n * g, m, D]."""
        if self.group == 1:
            return part
        return part.reshape(part.size(0), size_of(self.key_heads) * self.group, self.step, part.size(3))

    def write(self, total: Tensor, part: Tensor) -> None:
        """Write [b, n, g * m, D] to the rows of the tile in [B, H, Q, D]."""
        self._by_tile(total).copy_(self.unfold(part))

    def gather_keys(self, tensor: Tensor) -> Tensor:
        """[B, H_kv, KV, D] -> [b, n, t, D], a view where the keys are one run."""
        return _joined([tensor[run] for run in self._key_slices], 2)

    def gather_cells(self, tensor: Tensor) -> Tensor:
        """[B', H', Q', KV] -> the rows and keys of the tile."""
        part = self._select(tensor)
        return _joined([part[..., lo:hi] for lo, hi in self._some_runs], -1)

    def add_to_keys(self, total: Tensor, part: Tensor) -> None:
        """Add [b, n, t, D] to the keys of the tile in [B, H_kv, KV, D]."""
        for run, own in zip(self._key_slices, self._split(part, 2), strict=True):
            total[run].add_(own)

    def indices(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The batch, head, query and key indices, each one-dimensional."""
        b, h, q_idx = (torch.arange(part.start, part.stop, device=device) for part in self.slices)
        return b, h, q_idx, self._kv_idx(device, torch.int64)

    def score_bias(self, bias: Tensor, q_len: int) -> Tensor:
        """What is added to the scores: [B', H', Q + KV] by the distance or [B', H', Q, KV] -> [b or 1, n * g or 1, m, t]."""
        if bias.dim() == 4:
            return self.gather_cells(bias)
        values = self._select(bias.unsqueeze(2)).squeeze(2)
        return _joined([diagonals(values, self._distance_start(lo, q_len), self.step, hi - lo) for lo, hi in self._some_runs], -1)

    def add_to_bias(self, total: Tensor, part: Tensor, q_len: int) -> None:
        """Add the gradient of the scores, [b, n * g, m, t], to that of `score_bias`."""
        into = self._select(total) if total.dim() == 4 else self._select(total.unsqueeze(2)).squeeze(2)
        part = part.sum_to_size(*into.shape[:2], into.size(2) if total.dim() == 4 else part.size(2), part.size(3))
        for (lo, hi), own in zip(self._some_runs, self._split(part, -1), strict=True):
            if total.dim() == 4:
                into[..., lo:hi].add_(own)
            else:
                start = self._distance_start(lo, q_len)
                into[..., start : start + own.size(2) + own.size(3)].add_(sum_diagonals(own))

    def by_heads(self, most: int) -> Iterator[Tile]:
        """Tiles of some of its key heads each, with at most so many scores of a sequence where there is more than one head."""
        heads = self.key_heads
        step = max(1, most // (self.folded_rows * key_count(self.runs)))
        for start in range(heads.start, heads.stop, step):
            yield replace(self, key_heads=range(start, min(start + step, heads.stop)))

    def visible(self, bounds: Tensor, cells: Cells = None) -> Tensor | None:
        """Which keys the rows attend to: bool [b or 1, n * g or 1, m, t]; None for all."""
        if self.all_visible and cells is None:
            return None
        within = bounds.new_ones((1, 1, 1, 1), dtype=torch.bool) if self.all_visible else self._within(bounds)
        seen = within.expand(-1, -1, self.step, key_count(self.runs))
        if cells is None:
            return seen
        if isinstance(cells, Tensor):
            return seen & self.gather_cells(cells)
        b, h, q_idx, kv_idx = self.indices(bounds.device)
        return seen & cells(b[:, None, None, None], h[:, None, None], q_idx[:, None], kv_idx)

    def bias(self, bounds: Tensor, cells: Cells, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
        """The folded mask as 0 and -inf, None where all is visible, and its fully masked rows, None where there are none.

        Fully masked rows are unmasked here, since kernels give NaN for them; the caller sets their output to 0. Only `cells`
        may make them: the bounds must have none.
        """
        visible, fully_masked = self.visible(bounds, cells), None
        if visible is None:
            return None, None
        if cells is not None:
            fully_masked = ~visible.any(-1, keepdim=True)
            visible, fully_masked = visible | fully_masked, fold_rows(fully_masked, self)
        zero, hidden = (torch.tensor(value, dtype=dtype, device=visible.device) for value in (0.0, -math.inf))
        return torch.where(fold_rows(visible, self), zero, hidden), fully_masked

    def _distance_start(self, lo: int, q_len: int) -> int:
        """Where the values for `diagonals` of a run from ``lo`` on start in a bias by the distance."""
        return lo - self.rows.start - self.step + q_len

    def _split(self, part: Tensor, dim: int) -> tuple[Tensor, ...]:
        """The keys of each run, along an axis of all keys of the tile."""
        return torch.split(part, [hi - lo for lo, hi in self._some_runs], dim)

    def _by_tile(self, tensor: Tensor) -> Tensor:
        """[B, H, Q, D] -> [b, n * g, m, D], a view."""
        return tensor[self.slices]

    def _within(self, bounds: Tensor) -> Tensor:
        return is_within(self._select(bounds), self._kv_idx(bounds.device, bounds.dtype))

    def _select(self, tensor: Tensor) -> Tensor:
        """[B', H', Q', ...] -> the batch elements, query heads and rows of the tile."""
        parts = zip(tensor.shape, self.slices, strict=False)
        return tensor[tuple(slice(None) if size == 1 else part for size, part in parts)]

    def _kv_idx(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        return _joined([torch.arange(lo, hi, device=device, dtype=dtype) for lo, hi in self._some_runs], 0)


def size_of(part: Span) -> int:
    """How many numbers there are."""
    return part.stop - part.start


def key_count(runs: Runs) -> int:
    """The number of keys in runs."""
    return sum(hi - lo for lo, hi in runs)


def _slice(part: Span) -> slice:
    return slice(part.start, part.stop)


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    """The parts of all runs as one tensor, a view of the only one."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def is_within(ends: Tensor, kv_idx: Tensor) -> Tensor:
    """Which keys are in the key intervals of rows: [b, h, m, K, 2] and indices [..., t] -> bool [b, h, m, t]."""
    seen = None
    for lo, hi in (interval.unsqueeze(3).unbind(-1) for interval in ends.unbind(3)):
        inside = (kv_idx >= lo) & (kv_idx < hi)
        seen = inside if seen is None else seen.logical_or_(inside)
    assert seen is not None, "rows without a slot are fully masked, so they are in no tile that needs a mask"
    return seen


def fold_rows(tensor: Tensor, tile: Tile) -> Tensor:
    """[b or 1, n * g or 1, m, t] -> [b or 1, n or 1, g * m, t]."""
    if tile.group == 1:
        return tensor
    if tensor.size(1) == 1:
        return tensor.repeat(1, 1, tile.group, 1)
    return tensor.reshape(tensor.size(0), size_of(tile.key_heads), tile.group * tensor.size(2), tensor.size(3))


# ---------------------------------------------------------------- bands


# The most scores of a band.
MAX_BAND_SCORES = 2**22


@dataclass(frozen=True, slots=True)
class Band(Tile):
    """Tiles of one batch element, each m rows and keys after the one before, where c tiles take the place of batch elements.

    Args:
        elements: the batch element.
        rows: those of all tiles, c * m.
        runs: the keys of the first tile, one run.
        count: c.
        is_uniform: whether all tiles have the mask of the first.
    """

    count: int = 1
    is_uniform: bool = False

    @property
    def step(self) -> int:
        """The rows of a tile, m."""
        return size_of(self.rows) // self.count

    def gather_keys(self, tensor: Tensor) -> Tensor:
        """[B, H_kv, KV, D] -> [c, n, t, D], a view in which the keys of neighbors overlap."""
        return self._windows(tensor, 0, 1)

    def add_to_keys(self, total: Tensor, part: Tensor) -> None:
        """Add [c, n, t, D] to the keys of the tiles in [B, H_kv, KV, D]."""
        apart = -(-part.size(2) // self.step)  # tiles so far from each other have no key in common
        for start in range(min(apart, self.count)):
            self._windows(total, start, apart).add_(part[start::apart])

    def _within(self, bounds: Tensor) -> Tensor:
        """As of a tile, [c or 1, n * g or 1, m, t]."""
        tiles = 1 if self.is_uniform else self.count
        ends = self._select(bounds)[0, :, : tiles * self.step].unflatten(1, (tiles, self.step)).transpose(0, 1)
        moved = torch.arange(tiles, device=bounds.device, dtype=bounds.dtype)
        return is_within(ends, self._kv_idx(bounds.device, bounds.dtype) + self.step * moved[:, None, None, None])

    def _by_tile(self, tensor: Tensor) -> Tensor:
        """[B, H, Q, D] -> [c, n * g, m, D], a view."""
        rows: Tensor = tensor[self.slices][0].unflatten(1, (self.count, self.step))
        return rows.transpose(0, 1)

    def _windows(self, tensor: Tensor, start: int, every: int) -> Tensor:
        """The keys of every ``every``-th tile from ``start`` on, [c', n, t, D], a view."""
        (lo, hi), *_ = self.runs
        part = tensor[self.elements.start, self.key_heads.start : self.key_heads.stop, lo + start * self.step :]
        heads, length, width = part.stride()
        shape = len(range(start, self.count, every)), part.size(0), hi - lo, part.size(2)
        windows: Tensor = part.as_strided(shape, (every * self.step * length, heads, length, width))
        return windows


def join_bands(tiles: Iterable[Tile], kv_len: int, worth: int) -> Iterator[Tile]:
    """The tiles, with those along the diagonal joined to bands.

    Args:
        tiles: tiles in the order of their rows.
        kv_len: KV.
        worth: the most scores of masked-out keys that a saved call may cost.
    """
    diagonals: dict[tuple[Span, Span], _Diagonal] = {}
    mask_ids = count(-1, -1)  # no tile has them
    for tile in tiles:
        area = tile.elements, tile.key_heads
        diagonal = diagonals.get(area)
        if diagonal is not None and diagonal.has_joined(tile, kv_len, worth):
            continue
        if diagonal is not None:
            yield diagonals.pop(area).band(next(mask_ids))
        if size_of(tile.elements) == len(tile.runs) == 1:
            diagonals[area] = _Diagonal([tile], *_relative_run(tile), tile.scores)
        else:
            yield tile
    for diagonal in diagonals.values():
        yield diagonal.band(next(mask_ids))


@dataclass(slots=True)
class _Diagonal:
    """Tiles to join.

    Args:
        tiles: the tiles.
        lo: their first key, relative to the first row of each.
        hi: one more than their last key.
        scores: the scores of all.
    """

    tiles: list[Tile]
    lo: int
    hi: int
    scores: int

    def has_joined(self, tile: Tile, kv_len: int, worth: int) -> bool:
        """Join the next tile where that costs less than a separate call, and return whether it was joined."""
        first, last = self.tiles[0], self.tiles[-1]
        if len(tile.runs) != 1 or size_of(tile.rows) != size_of(first.rows) or tile.rows.start != last.rows.stop:
            return False
        start, stop = _relative_run(tile)
        lo, hi, work = min(self.lo, start), max(self.hi, stop), self.scores + tile.scores
        scores = (len(self.tiles) + 1) * size_of(first.rows) * size_of(first.key_heads) * first.group * (hi - lo)
        if scores > min(work + worth * len(self.tiles), MAX_BAND_SCORES):
            return False
        if first.rows.start + lo < 0 or tile.rows.start + hi > kv_len:
            return False
        self.tiles.append(tile)
        self.lo, self.hi, self.scores = lo, hi, work
        return True

    def band(self, mask_id: int) -> Tile:
        """The band of the tiles, or the only one."""
        first, last = self.tiles[0], self.tiles[-1]
        if first is last:
            return first
        is_even = all(_relative_run(tile) == (self.lo, self.hi) for tile in self.tiles)
        return Band(
            first.elements,
            first.key_heads,
            first.group,
            range(first.rows.start, last.rows.stop),
            ((first.rows.start + self.lo, first.rows.start + self.hi),),
            is_even and all(tile.all_visible for tile in self.tiles),
            mask_id,
            len(self.tiles),
            is_even and all(tile.mask_id == first.mask_id for tile in self.tiles),
        )


def _relative_run(tile: Tile) -> tuple[int, int]:
    ((lo, hi),) = tile.runs
    return lo - tile.rows.start, hi - tile.rows.start
