"""The weights [b, n, g * m, t] of one tile and its output, in operations that torch differentiates. Shapes as in `tile`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from flexmask._transforms import has_values, is_captured
from flexmask.backends.dropout import keep_weights
from flexmask.backends.tile import Tile

__all__ = [
    "DropoutState",
    "ScoreMod",
    "attend",
    "compute_weights",
    "drop_weights",
    "has_nonfinite",
    "precise_dtype",
]

ScoreMod: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class DropoutState:
    """The decisions of dropout.

    Args:
        p: the probability that a weight is dropped.
        rows: the two hashes of each row (see `dropout`), int32[B, H, Q, 2].
        keys: the hash of each key, int32[1 or B, 1, 1, KV].
    """

    p: float
    rows: Tensor
    keys: Tensor

    @classmethod
    def make(cls, p: float, rows: Tensor | None, keys: Tensor | None) -> DropoutState | None:
        """The state of some hashes; None without."""
        return None if rows is None or keys is None else cls(p, rows, keys)

    @property
    def scale(self) -> float:
        """The factor of the kept weights."""
        return 1 / (1 - self.p) if self.p < 1 else 0.0

    def keep(self, tile: Tile) -> Tensor:
        """Which weights of a tile are kept: int32 [b, n, g * m, t] of 0 and 1."""
        first, second = self.rows[tile.slices].unsqueeze(3).unbind(-1)
        keep = keep_weights(first, second, tile.gather_cells(self.keys), self.p)
        return keep.reshape(len(tile.elements), len(tile.key_heads), tile.folded_rows, keep.size(3))

    def factors(self, tile: Tile, like: Tensor) -> Tensor:
        """The factors of the folded weights of a tile: 0 where dropped, else `scale`."""
        return self.keep(tile).to(like.dtype).mul_(self.scale)


def drop_weights(weights: Tensor, keep: Tensor) -> Tensor:
    """Sets weights, or gradients by them, to 0 in place where ``keep`` is 0."""
    if weights.dtype != torch.float32:
        return weights.mul_(keep)
    weights.view(torch.int32).mul_(keep)  # on bits: to convert `keep` takes longer than to multiply by it
    return weights


def attend(
    tile: Tile,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None,
    score_mod: ScoreMod | None,
    drop: DropoutState | None,
    *,
    isolate_nonfinite: bool = False,
) -> Tensor:
    """The folded output of a tile.

    Args:
        tile: the tile.
        q: its queries, folded, times the scale.
        k: its keys.
        v: its values.
        visible: as of `Tile.visible`.
        score_mod: as of `block_sdpa`, over index tensors that broadcast.
        drop: dropout, or None.
        isolate_nonfinite: whether NaN and inf in keys and values reach only the rows that attend to them.
    """
    if not isolate_nonfinite or visible is None:
        weights = compute_weights(tile, q, k, visible, score_mod)
        return (weights if drop is None else weights * drop.factors(tile, weights)) @ v
    weights = compute_weights(tile, q, k, visible, score_mod, nonfinite_keys=~k.isfinite().all(-1))
    used = weights if drop is None else weights * drop.factors(tile, weights)
    # A weight of 0 times NaN is NaN, so such values are left out of the product and added where their weight is positive.
    out = used @ v.masked_fill(~v.isfinite(), 0)
    attended = (used.detach() > 0).to(v.dtype)
    for number in (math.inf, -math.inf, math.nan):
        here = v.isnan() if math.isnan(number) else v == number
        out = out + torch.where(attended @ here.to(v.dtype) > 0, number, 0)
    return out


def compute_weights(
    tile: Tile,
    q: Tensor,
    k: Tensor,
    visible: Tensor | None,
    score_mod: ScoreMod | None = None,
    nonfinite_keys: Tensor | None = None,
) -> Tensor:
    """The folded weights of a tile before dropout: 0 in fully masked rows.

    Args:
        tile: the tile.
        q: its queries, folded, times the scale.
        k: its keys.
        visible: as of `Tile.visible`.
        score_mod: as of `block_sdpa`, over index tensors that broadcast.
        nonfinite_keys: bool [b, n, t], keys with NaN or inf, whose scores are 0 where they are not visible.
    """
    if nonfinite_keys is None:
        scores = tile.unfold(q @ k.mT)
    else:
        assert visible is not None
        scores = tile.unfold(q @ k.masked_fill(nonfinite_keys.unsqueeze(-1), 0).mT)
        shown = visible & nonfinite_keys.repeat_interleave(tile.group, 1).unsqueeze(2)
        scores = torch.where(shown, tile.unfold(q @ k.mT).detach(), scores)
    if score_mod is not None and tile.runs:
        scores = score_mod(scores, *tile.indices(q.device)).to(q.dtype)
    if visible is not None:
        scores = scores.masked_fill(~visible, -math.inf)
    fully_masked = (scores == -math.inf).all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(fully_masked, 0), -1).masked_fill(fully_masked, 0)
    if nonfinite_keys is not None and visible is not None:  # all weights of a row with NaN are NaN
        weights = weights.masked_fill(~visible, 0)
    return weights.reshape(*q.shape[:3], k.size(2))


def precise_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype in which scores and their derivatives are computed: float32 at least."""
    return torch.promote_types(tensor.dtype, torch.float32)


def has_nonfinite(tensor: Tensor) -> bool:
    """Whether a tensor on the CPU holds NaN or inf; False on other devices, where reading it would force a host sync."""
    if tensor.device.type != "cpu" or not has_values(tensor) or is_captured():
        return False
    return not math.isfinite(tensor.sum(dtype=precise_dtype(tensor)).item())
