"""A tile of attention: a block of queries against the few runs of keys that hold all that they see.

Shapes: B batch, H query heads, H_kv key heads (H_kv divides H), Q queries, KV keys, D head dim (Dv of the values), K
intervals a row; B', H', Q' are B, H, Q or 1 where nothing depends on the axis. A tile has b batch elements, n key heads
with g query heads each, m rows and t keys. It is computed folded: heads that share a key head stand below each other,
[b, n, g * m, D].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

__all__ = ["CellMod", "Cells", "Runs", "Tile"]

Runs: TypeAlias = tuple[tuple[int, int], ...]
CellMod: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Cells: TypeAlias = Tensor | CellMod | None


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows of some batch elements and heads, and the keys that hold all that they see.

    Args:
        elements: the batch elements.
        key_heads: the key heads.
        group: how many query heads share a key head.
        rows: the queries.
        runs: the keys, as disjoint intervals [lo, hi) in ascending order.
        whole: whether every row sees all of these keys.
        picture: the same number for tiles whose masks are the same.
    """

    elements: range
    key_heads: range
    group: int
    rows: range
    runs: Runs
    whole: bool
    picture: int

    @property
    def place(self) -> tuple[slice, slice, slice]:
        """Where the tile stands in [B, H, Q, ...]."""
        heads = slice(self.key_heads.start * self.group, self.key_heads.stop * self.group)
        return _slice(self.elements), heads, _slice(self.rows)

    def fold(self, tensor: Tensor) -> Tensor:
        """[B, H, Q, D] -> [b, n, g * m, D]."""
        part = tensor[self.place]
        return part.reshape(len(self.elements), len(self.key_heads), self.group * len(self.rows), part.size(3))

    def unfold(self, part: Tensor) -> Tensor:
        """[b, n, g * m, D] -> [b, n * g, m, D]."""
        return part.reshape(len(self.elements), len(self.key_heads) * self.group, len(self.rows), part.size(3))

    def keys_of(self, tensor: Tensor) -> Tensor:
        """[B, H_kv, KV, D] -> [b, n, t, D], a view where the keys are one run."""
        part = tensor[_slice(self.elements), _slice(self.key_heads)]
        runs = [part[:, :, lo:hi] for lo, hi in self.runs]
        return runs[0] if len(runs) == 1 else torch.cat(runs, 2) if runs else part[:, :, :0]

    def cells_of(self, tensor: Tensor) -> Tensor:
        """[B', H', Q', KV] -> the rows and keys of the tile."""
        part = self._part(tensor)
        runs = [part[..., lo:hi] for lo, hi in self.runs]
        return runs[0] if len(runs) == 1 else torch.cat(runs, -1) if runs else part[..., :0]

    def add_to_keys(self, total: Tensor, part: Tensor) -> None:
        """Add [b, n, t, D] to the keys of the tile in [B, H_kv, KV, D]."""
        into = total[_slice(self.elements), _slice(self.key_heads)]
        start = 0
        for lo, hi in self.runs:
            into[:, :, lo:hi].add_(part[:, :, start : start + hi - lo])
            start += hi - lo

    def indices(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The batch, head, query and key indices, each one-dimensional."""
        b, h, q_idx = (torch.arange(part.start, part.stop, device=device) for part in self.place)
        return b, h, q_idx, self._kv_idx(device, torch.int64)

    def visible(self, bounds: Tensor, cells: Cells = None) -> Tensor | None:
        """What the rows see of the keys: bool [b or 1, n * g or 1, m, t]; None where that is everything."""
        if self.whole and cells is None:
            return None
        size = len(self.rows), sum(hi - lo for lo, hi in self.runs)
        within = bounds.new_ones((1, 1, 1, 1), dtype=torch.bool) if self.whole else self._within(bounds)
        seen = within.expand(-1, -1, *size)
        if cells is None:
            return seen
        if isinstance(cells, Tensor):
            return seen & self.cells_of(cells)
        b, h, q_idx, kv_idx = self.indices(bounds.device)
        return seen & cells(b[:, None, None, None], h[:, None, None], q_idx[:, None], kv_idx)

    def bias(self, bounds: Tensor, cells: Cells, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
        """The folded mask as 0 and -inf, None where all is visible, and its rows without a key, None where there are none.

        Such rows see all keys here, so that no kernel meets an empty row; the caller replaces what they give by 0.
        Only `cells` make them: the bounds must have none.
        """
        visible = self.visible(bounds, cells)
        if visible is None:
            return None, None
        if self.group > 1:
            if visible.size(1) == 1:
                visible = visible.repeat(1, 1, self.group, 1)
            else:
                rows = self.group * len(self.rows)
                visible = visible.reshape(visible.size(0), len(self.key_heads), rows, visible.size(3))
        blind = None
        if cells is not None:
            blind = ~visible.any(-1, keepdim=True)
            visible = visible | blind
        zero, hidden = (torch.tensor(value, dtype=dtype, device=bounds.device) for value in (0.0, -math.inf))
        return torch.where(visible, zero, hidden), blind

    def _within(self, bounds: Tensor) -> Tensor:
        kv_idx = self._kv_idx(bounds.device, bounds.dtype)
        seen = None
        for lo, hi in (interval.unsqueeze(3).unbind(-1) for interval in self._part(bounds).unbind(3)):
            inside = (kv_idx >= lo) & (kv_idx < hi)
            seen = inside if seen is None else seen.logical_or_(inside)
        assert seen is not None, "rows without a slot see nothing, so they are in no tile that is not whole"
        return seen

    def _part(self, tensor: Tensor) -> Tensor:
        """[B', H', Q', ...] -> the batch elements, query heads and rows of the tile."""
        parts = zip(tensor.shape, self.place, strict=False)
        return tensor[tuple(slice(None) if size == 1 else part for size, part in parts)]

    def _kv_idx(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        runs = [torch.arange(lo, hi, device=device, dtype=dtype) for lo, hi in self.runs]
        return runs[0] if len(runs) == 1 else torch.cat(runs) if runs else torch.empty(0, device=device, dtype=dtype)


def _slice(part: range) -> slice:
    return slice(part.start, part.stop)
