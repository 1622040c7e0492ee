"""One call of attention in tiles as one value. Shapes as in `tile`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from flexmask._transforms import is_transformed
from flexmask.backends.dropout import keep_weights
from flexmask.backends.tile import Cells, Tile, fold_rows, size_of
from flexmask.backends.tiling import Tiling, shared_tiling

#: The kernel that ``scaled_dot_product_attention`` calls on the CPU, with the logsumexp of the scores of each row, [B, H, Q], in
#: float32 at least, and its gradient: torch has no public function that returns them.
FUSED_FORWARD: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
FUSED_BACKWARD: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None)
#: The most scores of a sequence in a tile with a bias for each head, which is made for the tile: more tiles are more calls.
BIAS_SCORES = 2**20


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
        bias: added to the scores, floating point [B', H', Q + KV] or [B', H', Q, KV], as of `flexmask.scores.placed.Form`.
        cap: the bound of soft-capping after that.
        learns_bias: whether the bias has a gradient.
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
    bias: Tensor | None = None
    cap: float | None = None
    learns_bias: bool = False

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value, by which attention is differentiated."""
        return self.query, self.key, self.value

    @property
    def learned(self) -> tuple[Tensor, ...]:
        """The bias where it has a gradient, too."""
        return (self.bias,) if self.learns_bias and self.bias is not None else ()

    def with_tensors(self, query: Tensor, key: Tensor, value: Tensor, *learned: Tensor) -> Problem:
        """With others in place of `tensors` and `learned`."""
        problem = self._replace(query=query, key=key, value=value)
        return problem._replace(bias=learned[0]) if learned else problem

    @property
    def is_fused(self) -> bool:
        """Whether a tile is one call of the fused kernel: on the CPU, with one head dim, contiguous along it."""
        query, _, value = self.tensors
        is_fit = query.device.type == "cpu" and 0 < query.size(3) == value.size(3)
        is_fit = is_fit and all(tensor.stride(3) == 1 for tensor in self.tensors)
        return is_fit and self.rows is None and self.cap is None and FUSED_FORWARD is not None and FUSED_BACKWARD is not None

    def is_transformed(self) -> bool:
        """Whether a transform of torch.func, or a forward-mode derivative, is of these tensors."""
        return is_transformed(*self.tensors, *(() if self.bias is None else (self.bias,)))

    @property
    def in_bands(self) -> bool:
        """Whether tiles along the diagonal may be one call."""
        return self.is_fused and self.cells is None and (self.bias is None or self.bias.dim() == 3)

    def precise(self) -> Problem:
        """With query, key and value in the dtype in which scores and derivatives are computed."""
        return self.with_tensors(*(tensor.to(precise_dtype(tensor)) for tensor in self.tensors))

    def tiling(self, most_scores: int | None = None, *, in_bands: bool = False) -> Tiling:
        """The tiles, see `plan_tiles`."""
        return shared_tiling(self.bounds, self.query, self.key, most_scores=most_scores, in_bands=in_bands)

    def parts(self, tile: Tile) -> tuple[Tensor, Tensor, Tensor]:
        """The folded queries of a tile, its keys and its values."""
        return tile.fold(self.query), tile.gather_keys(self.key), tile.gather_keys(self.value)

    def with_biases(self, tiling: Tiling) -> Iterator[tuple[Tile, Tensor | None, Tensor | None]]:
        """As of `Tiling`, with what is added to the scores before a cap in the bias; with a cap there is one for cells alone."""
        for tile, hidden, fully_masked in tiling.with_biases(self.cells, self.query.dtype):
            if self.bias is None or self.cap is not None:
                yield tile, hidden, fully_masked
                continue
            parts = tile.by_heads(BIAS_SCORES) if self.bias.size(1) > 1 else [tile]
            for part in parts:
                first = part.key_heads.start - tile.key_heads.start
                heads = slice(first, first + size_of(part.key_heads))
                own, masked = (one if one is None or one.size(1) == 1 else one[:, heads] for one in (hidden, fully_masked))
                bias = fold_rows(cast(Tensor, self.score_bias(part)), part)
                yield part, bias if own is None else bias + own, masked

    def score_bias(self, tile: Tile) -> Tensor | None:
        """What is added to the scores of a tile, [b or 1, n * g or 1, m, t]."""
        return None if self.bias is None else tile.score_bias(self.bias, self.query.size(2)).to(precise_dtype(self.query))

    def changed(self, tile: Tile, scores: Tensor) -> Tensor:
        """The scores of a tile with the bias, below the cap: [b, n * g, m, t]."""
        bias = self.score_bias(tile)
        scores = scores if bias is None else scores + bias
        return scores if self.cap is None else self.cap * torch.tanh(scores / self.cap)

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
