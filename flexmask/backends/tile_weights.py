"""The weights of one tile of attention and what they give, in operations that torch differentiates. Shapes as in `tiles`."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from flexmask._transforms import has_values, is_captured
from flexmask.backends.dropout import kept, key_numbers, row_numbers
from flexmask.backends.tile import Tile

__all__ = ["Drop", "ScoreMod", "attend", "is_tainted", "precise_dtype", "weights_of", "without_autocast"]

ScoreMod: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Drop:
    """Dropout of weights.

    Args:
        p: the probability that a weight is dropped.
        rows: the two numbers of each row that decide which ones are (see `dropout`), int32[B, H, Q].
        keys: the number of each key, int32[1 or B, 1, 1, KV].
    """

    p: float
    rows: tuple[Tensor, Tensor]
    keys: Tensor

    @classmethod
    def of(cls, p: float, seed: Tensor | None, query: Tensor, key: Tensor) -> Drop | None:
        """What a seed decides, int64 without axes; or int64[n], one for each n-th part of the batch, which counts from 0."""
        if seed is None:
            return None
        b, h, q, kv = (torch.arange(size, device=query.device) for size in (*query.shape[:3], key.size(2)))
        if seed.dim():
            part = query.size(0) // max(seed.numel(), 1)
            seed, b = seed[b // part], b % part
        seed = seed.reshape(-1, 1, 1)
        return cls(p, row_numbers(seed, b[:, None, None], h[:, None], q), key_numbers(seed, kv).unsqueeze(1))

    def factors(self, tile: Tile, like: Tensor) -> Tensor:
        """What the folded weights of a tile are multiplied by: 0 where dropped, else 1 / (1 - p)."""
        first, second = (numbers[tile.place].unsqueeze(-1) for numbers in self.rows)
        keep = kept(first, second, tile.cells_of(self.keys), self.p)
        folded = keep.reshape(len(tile.elements), len(tile.key_heads), tile.group * len(tile.rows), keep.size(3))
        return folded.to(like.dtype).mul_(1 / (1 - self.p) if self.p < 1 else 0)


def attend(
    tile: Tile,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None,
    score_mod: ScoreMod | None,
    drop: Drop | None,
    *,
    careful: bool = False,
) -> Tensor:
    """The folded output of a tile.

    Args:
        tile: the tile.
        q: its queries, folded, times the scale.
        k: its keys.
        v: its values.
        visible: as of `Tile.visible`.
        score_mod: as of `block_sdpa`, over index tensors that broadcast.
        drop: dropout.
        careful: whether NaN and inf in keys and values reach only the rows that attend to them.
    """
    if not careful or visible is None:
        weights = weights_of(tile, q, k, visible, score_mod)
        return (weights if drop is None else weights * drop.factors(tile, weights)) @ v
    weights = weights_of(tile, q, k, visible, score_mod, broken=~k.isfinite().all(-1))
    used = weights if drop is None else weights * drop.factors(tile, weights)
    # A weight of 0 times NaN is NaN, so these values are left out of the product and added where they have a weight.
    out = used @ v.masked_fill(~v.isfinite(), 0)
    attended = (used.detach() > 0).to(v.dtype)
    for number in (math.inf, -math.inf, math.nan):
        here = v.isnan() if math.isnan(number) else v == number
        out = out + torch.where(attended @ here.to(v.dtype) > 0, number, 0)
    return out


def weights_of(
    tile: Tile, q: Tensor, k: Tensor, visible: Tensor | None, score_mod: ScoreMod | None = None, broken: Tensor | None = None
) -> Tensor:
    """The folded weights of a tile before dropout: 0 in rows without a key.

    Args:
        tile: the tile.
        q: its queries, folded, times the scale.
        k: its keys.
        visible: as of `Tile.visible`.
        score_mod: as of `block_sdpa`, over index tensors that broadcast.
        broken: bool [b, n, t], keys with NaN or inf, whose scores are 0 where they are not visible.
    """
    if broken is None:
        scores = tile.unfold(q @ k.mT)
    else:
        assert visible is not None
        scores = tile.unfold(q @ k.masked_fill(broken.unsqueeze(-1), 0).mT)
        shown = visible & broken.repeat_interleave(tile.group, 1).unsqueeze(2)
        scores = torch.where(shown, tile.unfold(q @ k.mT).detach(), scores)
    if score_mod is not None and tile.runs:
        scores = score_mod(scores, *tile.indices(q.device)).to(q.dtype)
    if visible is not None:
        scores = scores.masked_fill(~visible, -math.inf)
    blind = (scores == -math.inf).all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(blind, 0), -1).masked_fill(blind, 0)
    if broken is not None and visible is not None:  # the weights of a row with NaN are all NaN
        weights = weights.masked_fill(~visible, 0)
    return weights.reshape(*q.shape[:3], k.size(2))


def without_autocast(tensor: Tensor) -> AbstractContextManager[Any]:
    """Within it autocast leaves operations on the device of a tensor as they are."""
    return nullcontext() if tensor.is_meta else torch.autocast(tensor.device.type, enabled=False)


def precise_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype in which scores and their derivatives are computed: float32 at least."""
    return torch.promote_types(tensor.dtype, torch.float32)


def is_tainted(tensor: Tensor) -> bool:
    """Whether a tensor on the CPU holds NaN or inf. Elsewhere that is not read: it would force a host sync."""
    if tensor.device.type != "cpu" or not has_values(tensor) or is_captured():
        return False
    return not math.isfinite(tensor.sum(dtype=precise_dtype(tensor)).item())
