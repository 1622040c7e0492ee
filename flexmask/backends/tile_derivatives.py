"""Derivatives of attention that can be differentiated and mapped again: tangents, second derivatives, any `score_mod`.

They are simple rather than fast, and written in operations that torch differentiates. Shapes as in `tile`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flexmask._transforms import is_transformed
from flexmask.backends.mixed_precision import without_autocast
from flexmask.backends.score_mods import over_indices
from flexmask.backends.tile import Cells, Tile
from flexmask.backends.tile_weights import (
    DropoutState,
    ScoreMod,
    attend,
    compute_weights,
    has_nonfinite,
    precise_dtype,
)
from flexmask.backends.tiling_cache import shared_tiling
from flexmask.backends.unchanged import Unchanged

__all__ = ["attend_with_score_mod", "hessian_product", "tangent"]


@dataclass(frozen=True, eq=False)
class _TileTangents:
    """The parts of a tile from which both further derivatives are computed.

    Attributes:
        q: the queries, folded, times the scale; k and v are the keys and values.
        q_tangent: the tangent of q; k_tangent and v_tangent are those of k and v.
        weights: the weights before dropout.
        scores_tangent: the tangent of the scores, less its mean under the weights of the row.
        mean: that mean, [b, n, g * m, 1].
        factors: the factors of dropout, or 1.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    q_tangent: Tensor
    k_tangent: Tensor
    v_tangent: Tensor
    weights: Tensor
    scores_tangent: Tensor
    mean: Tensor
    factors: Tensor | float


def _tile_tangents(
    tensors: Sequence[Tensor], tangents: Sequence[Tensor], bounds: Tensor, cells: Cells, scale: float, drop: DropoutState | None
) -> Iterator[tuple[Tile, _TileTangents]]:
    """Each block of rows with its tangents, computed in float32 at least."""
    precise = precise_dtype(tensors[0])
    query, key, value, query_tangent, key_tangent, value_tangent = (tensor.to(precise) for tensor in (*tensors, *tangents))
    query, query_tangent = query * scale, query_tangent * scale
    for tile in shared_tiling(bounds, query, key).tiles:
        q, q_tangent = tile.fold(query), tile.fold(query_tangent)
        k, v, k_tangent, v_tangent = (tile.gather_keys(tensor) for tensor in (key, value, key_tangent, value_tangent))
        weights = compute_weights(tile, q, k, tile.visible(bounds, cells))
        scores_tangent = q_tangent @ k.mT + q @ k_tangent.mT
        mean = (weights * scores_tangent).sum(-1, keepdim=True)
        factors = 1.0 if drop is None else drop.factors(tile, weights)
        yield tile, _TileTangents(q, k, v, q_tangent, k_tangent, v_tangent, weights, scores_tangent - mean, mean, factors)


def tangent(
    tensors: Sequence[Tensor], tangents: Sequence[Tensor], bounds: Tensor, cells: Cells, scale: float, drop: DropoutState | None
) -> Tensor:
    """The tangent of the output, [B, H, Q, Dv]: the Jacobian times the tangents of query, key and value."""
    query, _, value = tensors
    parts = []
    with without_autocast(query):
        for tile, change in _tile_tangents(tensors, tangents, bounds, cells, scale, drop):
            weights_tangent = change.weights * change.scores_tangent * change.factors
            part = weights_tangent @ change.v + change.weights * change.factors @ change.v_tangent
            parts.append(tile.unfold(part))
    return torch.cat(parts, 2).to(query.dtype) if parts else query.new_zeros(*query.shape[:3], value.size(3))


def hessian_product(
    grad: Tensor,
    tensors: Sequence[Tensor],
    tangents: Sequence[Tensor],
    bounds: Tensor,
    cells: Cells,
    scale: float,
    drop: DropoutState | None,
) -> tuple[Tensor, ...]:
    """The tangents of the gradients of query, key and value: the Hessian of ``(grad * out).sum()`` times the tangents.

    It is the gradient of ``(grad * tangent).sum() = sum(G * P * (S - sum(P * S)) + H * P)``, with P the weights, S the tangent of
    the scores, ``G = grad @ v.mT`` and ``H = grad @ v_tangent.mT``.
    """
    query, key, value = tensors
    query_parts, key_parts, value_parts, places = [], [], [], []
    grad = grad.to(precise_dtype(query))
    with without_autocast(query):
        for tile, change in _tile_tangents(tensors, tangents, bounds, cells, scale, drop):
            weights, g = change.weights, tile.fold(grad)
            by_value, by_change = g @ change.v.mT * change.factors, g @ change.v_tangent.mT * change.factors
            mean = (weights * by_value).sum(-1, keepdim=True)
            first = weights * (by_value - mean)
            by_weights = by_value * change.scores_tangent - mean * (change.scores_tangent + change.mean) + by_change
            second = weights * (by_weights - (weights * by_weights).sum(-1, keepdim=True))
            query_parts.append(tile.unfold(first @ change.k_tangent + second @ change.k) * scale)
            key_parts.append(first.mT @ change.q_tangent + second.mT @ change.q)
            value_parts.append((weights * change.scores_tangent * change.factors).mT @ g)
            places.append(tile.indices(query.device)[3])
    if not places:
        return tuple(torch.zeros_like(tensor) for tensor in tensors)
    at = torch.cat(places)
    sums = [
        torch.zeros_like(total, dtype=grad.dtype).index_add(2, at, torch.cat(parts, 2))
        for total, parts in ((key, key_parts), (value, value_parts))
    ]
    return tuple(tensor.to(query.dtype) for tensor in (torch.cat(query_parts, 2), *sums))


# ---------------------------------------------------------------- with a score_mod


def attend_with_score_mod(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    cells: Cells,
    score_mod: ScoreMod,
    scale: float,
    drop: DropoutState | None,
) -> Tensor:
    """The output with a score_mod, [B, H, Q, Dv], in operations that torch differentiates."""
    tiles = shared_tiling(bounds, query, key).tiles
    if not tiles:
        anchor = query[..., :0].sum() + key[..., :0].sum() + value[..., :0].sum()
        return query.new_zeros(*query.shape[:3], value.size(3)) + anchor
    score_mod = over_indices(score_mod)
    transformed = is_transformed(query, key, value)
    isolate_nonfinite = not transformed and (has_nonfinite(key.detach()) or has_nonfinite(value.detach()))

    def compute(tile: Tile, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        precise = precise_dtype(query)
        q, k, v = (part.to(precise) for part in tile.parts(query, key, value))
        visible = tile.visible(bounds, cells)
        out = attend(tile, q * scale, k, v, visible, score_mod, drop, isolate_nonfinite=isolate_nonfinite)
        return tile.unfold(out).to(query.dtype)

    if transformed:  # transforms cannot differentiate checkpoints
        return torch.cat([compute(tile, query, key, value) for tile in tiles], 2)
    # Checkpoints keep the memory of the backward pass linear: the scores of one tile exist at a time.
    repeated = compute if torch.compiler.is_compiling() else Unchanged(compute, bounds)
    return torch.cat([checkpoint(repeated, tile, query, key, value, use_reentrant=False) for tile in tiles], 2)
