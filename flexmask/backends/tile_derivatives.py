"""Derivatives of attention that can be differentiated and mapped again: the tangent, the second derivative, any `score_mod`.

They are simple rather than fast, and written with torch's own differentiable operations. Shapes as in `tiles`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flexmask._transforms import is_transformed
from flexmask.backends.tile import Cells, Tile
from flexmask.backends.tile_weights import Drop, ScoreMod, attend, is_tainted, precise_dtype, weights_of, without_autocast
from flexmask.backends.tiling import plan_tiles

__all__ = ["curvature", "modified", "tangent"]


@dataclass(frozen=True, eq=False)
class _Change:
    """A tile whose queries, keys and values change: what both further derivatives start from.

    Attributes:
        q: the queries, folded, times the scale; their change is `to_q`, and so for the others.
        weights: the weights before dropout.
        of_scores: the change of the scores, less its mean under the weights of the row.
        mean: that mean, [b, n, g * m, 1].
        factors: of dropout, or 1.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    to_q: Tensor
    to_k: Tensor
    to_v: Tensor
    weights: Tensor
    of_scores: Tensor
    mean: Tensor
    factors: Tensor | float


def _changes(
    tensors: Sequence[Tensor], tangents: Sequence[Tensor], bounds: Tensor, cells: Cells, scale: float, drop: Drop | None
) -> Iterator[tuple[Tile, _Change]]:
    """Each block of rows with its change, computed in float32 at least."""
    precise = precise_dtype(tensors[0])
    query, key, value, to_query, to_key, to_value = (tensor.to(precise) for tensor in (*tensors, *tangents))
    query, to_query = query * scale, to_query * scale
    for tile in plan_tiles(bounds, query, key)[0]:
        q, to_q = tile.fold(query), tile.fold(to_query)
        k, v, to_k, to_v = (tile.keys_of(tensor) for tensor in (key, value, to_key, to_value))
        weights = weights_of(tile, q, k, tile.visible(bounds, cells))
        of_scores = to_q @ k.mT + q @ to_k.mT
        mean = (weights * of_scores).sum(-1, keepdim=True)
        factors = 1.0 if drop is None else drop.factors(tile, weights)
        yield tile, _Change(q, k, v, to_q, to_k, to_v, weights, of_scores - mean, mean, factors)


def tangent(
    tensors: Sequence[Tensor], tangents: Sequence[Tensor], bounds: Tensor, cells: Cells, scale: float, drop: Drop | None
) -> Tensor:
    """How the output changes with query, key and value: their tangents times the Jacobian, [B, H, Q, Dv]."""
    query, _, value = tensors
    parts = []
    with without_autocast(query):
        for tile, change in _changes(tensors, tangents, bounds, cells, scale, drop):
            of_weights = change.weights * change.of_scores * change.factors
            part = of_weights @ change.v + change.weights * change.factors @ change.to_v
            parts.append(tile.unfold(part))
    return torch.cat(parts, 2).to(query.dtype) if parts else query.new_zeros(*query.shape[:3], value.size(3))


def curvature(
    grad: Tensor,
    tensors: Sequence[Tensor],
    tangents: Sequence[Tensor],
    bounds: Tensor,
    cells: Cells,
    scale: float,
    drop: Drop | None,
) -> tuple[Tensor, ...]:
    """How the gradients of query, key and value change with these: the Hessian of ``(grad * out).sum()`` times the tangents.

    It is the gradient of ``(grad * tangent).sum()``: with P the weights, S the change of the scores, and G and H the gradients
    of the weights by the values and by their change, ``(grad * tangent).sum() = sum(G * P * (S - sum(P * S)) + H * P)``.
    """
    query, key, value = tensors
    of_query, of_key, of_value, places = [], [], [], []
    grad = grad.to(precise_dtype(query))
    with without_autocast(query):
        for tile, change in _changes(tensors, tangents, bounds, cells, scale, drop):
            weights, g = change.weights, tile.fold(grad)
            by_value, by_change = g @ change.v.mT * change.factors, g @ change.to_v.mT * change.factors
            mean = (weights * by_value).sum(-1, keepdim=True)
            first = weights * (by_value - mean)
            by_weights = by_value * change.of_scores - mean * (change.of_scores + change.mean) + by_change
            second = weights * (by_weights - (weights * by_weights).sum(-1, keepdim=True))
            of_query.append(tile.unfold(first @ change.to_k + second @ change.k) * scale)
            of_key.append(first.mT @ change.to_q + second.mT @ change.q)
            of_value.append((weights * change.of_scores * change.factors).mT @ g)
            places.append(tile.indices(query.device)[3])
    if not places:
        return tuple(torch.zeros_like(tensor) for tensor in tensors)
    at = torch.cat(places)
    sums = [
        torch.zeros_like(total, dtype=grad.dtype).index_add(2, at, torch.cat(parts, 2))
        for total, parts in ((key, of_key), (value, of_value))
    ]
    return tuple(tensor.to(query.dtype) for tensor in (torch.cat(of_query, 2), *sums))


# ---------------------------------------------------------------- with a score_mod


def modified(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    cells: Cells,
    score_mod: ScoreMod,
    scale: float,
    drop: Drop | None,
) -> Tensor:
    """The output with changed scores, [B, H, Q, Dv], in operations that torch differentiates."""
    tiles, _ = plan_tiles(bounds, query, key)
    if not tiles:
        anchor = query[..., :0].sum() + key[..., :0].sum() + value[..., :0].sum()
        return query.new_zeros(*query.shape[:3], value.size(3)) + anchor
    score_mod = _over_indices(score_mod)
    transformed = is_transformed(query, key, value)
    careful = not transformed and (is_tainted(key.detach()) or is_tainted(value.detach()))

    def compute(tile: Tile, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        precise = precise_dtype(query)
        q, k, v = (part.to(precise) for part in (tile.fold(query), tile.keys_of(key), tile.keys_of(value)))
        visible = tile.visible(bounds, cells)
        with without_autocast(query):
            return tile.unfold(attend(tile, q * scale, k, v, visible, score_mod, drop, careful=careful)).to(query.dtype)

    if transformed:  # transforms cannot differentiate checkpoints
        return torch.cat([compute(tile, query, key, value) for tile in tiles], 2)
    # Checkpoints keep the memory of the backward pass linear: the scores of one tile exist at a time.
    return torch.cat([checkpoint(compute, tile, query, key, value, use_reentrant=False) for tile in tiles], 2)


def _over_indices(score_mod: ScoreMod) -> ScoreMod:
    """Map a function of scalars over [b, h, q, kv] as FlexAttention does, so that `bias[b][h]` means what it says."""
    mapped: Callable[..., Tensor] = score_mod
    for axis in (4, 3, 2, 1):
        mapped = torch.vmap(mapped, in_dims=(0, *(0 if axis == i else None for i in range(1, 5))))
    return mapped
