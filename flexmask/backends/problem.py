"""One call of attention in tiles as one value. Shapes as in `tile`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flexmask.backends.dropout import keep_weights
from flexmask.backends.fused_kernel import has_fused_kernel
from flexmask.backends.tile import Cells, Tile, size_of
from flexmask.backends.tiling import Tiling, shared_tiling


class Problem(NamedTuple):
    """Attention of each query row to the keys in its key intervals. As a tuple it is the arguments of the operators.

    Attributes:
        query: [B, H, Q, D], floating point.
        key: [B, H_kv, KV, D], of the query's dtype; query head h uses key head h // (H // H_kv).
        value: [B, H_kv, KV, Dv], of the query's dtype.
        bounds: int [B', H', Q', K, 2], disjoint key intervals [lo, hi) of each row; lo == hi: unused.
        cells: which keys of its intervals a row attends to, where these are an upper bound: bool [B or 1, H or 1, Q or 1, KV], or
            ``cells(b, h, q_idx, kv_idx)``, a mask_mod that is called with broadcasting index tensors, tile by tile.
        scale: factor of the scores.
        dropout_p: probability that a weight is dropped; the others grow by 1 / (1 - dropout_p).
        rows: the two hashes of each row for dropout (see `dropout`), int32[B, H, Q, 2]; None without dropout.
        keys: the hash of each key, int32[1 or B, 1, 1, KV].
        with_lse: whether the logsumexp of the scores of each row is a result too, [B, H, Q]: -inf in fully masked rows.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    bounds: Tensor
    cells: Cells
    scale: float
    dropout_p: float = 0.0
    rows: Tensor | None = None
    keys: Tensor | None = None
    with_lse: bool = False

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value, by which attention is differentiated."""
        return self.query, self.key, self.value

    @property
    def is_fused(self) -> bool:
        """Whether a tile is one call of the fused kernel."""
        return self.rows is None and has_fused_kernel(*self.tensors)

    def precise(self) -> Problem:
        """With query, key and value in the dtype in which scores and derivatives are computed."""
        query, key, value = (tensor.to(precise_dtype(tensor)) for tensor in self.tensors)
        return self._replace(query=query, key=key, value=value)

    def tiling(self, most_scores: int | None = None, *, in_bands: bool = False) -> Tiling:
        """The tiles, see `plan_tiles`."""
        return shared_tiling(self.bounds, self.query, self.key, most_scores=most_scores, in_bands=in_bands)

    def parts(self, tile: Tile) -> tuple[Tensor, Tensor, Tensor]:
        """The folded queries of a tile, its keys and its values."""
        return tile.fold(self.query), tile.gather_keys(self.key), tile.gather_keys(self.value)

    def visible(self, tile: Tile) -> Tensor | None:
        """See `Tile.visible`."""
        return tile.visible(self.bounds, self.cells)

    @property
    def kept_scale(self) -> float:
        """The factor of the weights that dropout keeps."""
        return 1 / (1 - self.dropout_p) if self.dropout_p < 1 else 0.0

    def keep(self, tile: Tile) -> Tensor | None:
        """Which weights of a tile are kept: int32 [b, n, g * m, t] of 0 and 1; None without dropout."""
        if self.rows is None or self.keys is None:
            return None
        first, second = self.rows[tile.slices].unsqueeze(3).unbind(-1)
        keep = keep_weights(first, second, tile.gather_cells(self.keys), self.dropout_p)
        return keep.reshape(size_of(tile.elements), size_of(tile.key_heads), tile.folded_rows, keep.size(3))

    def factors(self, tile: Tile) -> Tensor | float:
        """The factors of the folded weights of a tile: 0 where dropped, else `kept_scale`."""
        keep = self.keep(tile)
        return 1.0 if keep is None else keep.to(precise_dtype(self.query)).mul_(self.kept_scale)


def precise_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype in which scores and their derivatives are computed: float32 at least."""
    return torch.promote_types(tensor.dtype, torch.float32)
