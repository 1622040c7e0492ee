"""Tiles along the diagonal in one call of a kernel, as of windows and short documents. Shapes as in `tile`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from flexmask.backends.tile import Cells, Span, Tile, as_bias, is_within, size_of

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

    @property
    def scores(self) -> int:
        """The number of its scores, c * n * g * m * t."""
        (lo, hi), *_ = self.runs
        return size_of(self.key_heads) * self.group * size_of(self.rows) * (hi - lo)

    @property
    def folded_rows(self) -> int:
        """The rows of the folded queries of a tile, g * m."""
        return self.group * self.step

    def fold(self, tensor: Tensor) -> Tensor:
        """[B, H, Q, D] -> [c, n, g * m, D], a view where g is 1."""
        return self._by_tile(tensor).reshape(self.count, size_of(self.key_heads), self.folded_rows, tensor.size(3))

    def write(self, total: Tensor, part: Tensor) -> None:
        """Write [c, n, g * m, D] to the rows of the band in [B, H, Q, D]."""
        into = self._by_tile(total)
        into.copy_(part.reshape(into.shape))

    def gather_keys(self, tensor: Tensor) -> Tensor:
        """[B, H_kv, KV, D] -> [c, n, t, D], a view in which the keys of neighbors overlap."""
        return self._windows(tensor, 0, 1)

    def add_to_keys(self, total: Tensor, part: Tensor) -> None:
        """Add [c, n, t, D] to the keys of the tiles in [B, H_kv, KV, D]."""
        apart = -(-part.size(2) // self.step)  # tiles so far from each other have no key in common
        for start in range(min(apart, self.count)):
            self._windows(total, start, apart).add_(part[start::apart])

    def bias(self, bounds: Tensor, cells: Cells, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
        """As of a tile, [c or 1, n or 1, g * m, t]; there are no ``cells``."""
        assert cells is None, "cells are evaluated tile by tile"
        if self.all_visible:
            return None, None
        (lo, hi), *_ = self.runs
        tiles = 1 if self.is_uniform else self.count
        ends = self._select(bounds)[0, :, : tiles * self.step].unflatten(1, (tiles, self.step)).transpose(0, 1)
        keys, moved = (torch.arange(*part, device=bounds.device, dtype=bounds.dtype) for part in ((lo, hi), (tiles,)))
        return as_bias(is_within(ends, keys + self.step * moved[:, None, None, None]), self, dtype), None

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
