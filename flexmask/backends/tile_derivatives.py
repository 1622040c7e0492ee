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
from flexmask.backends.problem import Problem, precise_dtype
from flexmask.backends.score_mods import over_indices
from flexmask.backends.tile import Tile
from flexmask.backends.tile_weights import ScoreMod, attend, compute_weights, has_nonfinite
from flexmask.backends.unchanged import Unchanged


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


def _tile_tangents(problem: Problem, tangents: Sequence[Tensor]) -> Iterator[tuple[Tile, _TileTangents]]:
    """Each block of rows with its tangents, computed in float32 at least."""
    problem = problem.precise()
    query_tangent, key_tangent, value_tangent = (tensor.to(problem.query.dtype) for tensor in tangents)
    for tile in problem.tiling().tiles:
        q, k, v = problem.parts(tile)
        q, q_tangent = q * problem.scale, tile.fold(query_tangent) * problem.scale
        k_tangent, v_tangent = tile.gather_keys(key_tangent), tile.gather_keys(value_tangent)
        weights = compute_weights(tile, q, k, problem.visible(tile))
        scores_tangent = q_tangent @ k.mT + q @ k_tangent.mT
        mean = (weights * scores_tangent).sum(-1, keepdim=True)
        factors = problem.factors(tile)
        yield tile, _TileTangents(q, k, v, q_tangent, k_tangent, v_tangent, weights, scores_tangent - mean, mean, factors)


def tangent(problem: Problem, tangents: Sequence[Tensor]) -> Tensor:
    """The tangent of the output, [B, H, Q, Dv]: the Jacobian times the tangents of query, key and value."""
    query, value = problem.query, problem.value
    parts = []
    with without_autocast(query):
        for tile, change in _tile_tangents(problem, tangents):
            weights_tangent = change.weights * change.scores_tangent * change.factors
            part = weights_tangent @ change.v + change.weights * change.factors @ change.v_tangent
            parts.append(tile.unfold(part))
    return torch.cat(parts, 2).to(query.dtype) if parts else query.new_zeros(*query.shape[:3], value.size(3))


def hessian_product(grad: Tensor, problem: Problem, tangents: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The tangents of the gradients of query, key and value: the Hessian of ``(grad * out).sum()`` times the tangents.

    It is the gradient of ``(grad * tangent).sum() = sum(G * P * (S - sum(P * S)) + H * P)``, with P the weights, S the tangent of
    the scores, ``G = grad @ v.mT`` and ``H = grad @ v_tangent.mT``.
    """
    query, key, value = problem.tensors
    query_parts, key_parts, value_parts, places = [], [], [], []
    grad = grad.to(precise_dtype(query))
    with without_autocast(query):
        for tile, change in _tile_tangents(problem, tangents):
            weights, g = change.weights, tile.fold(grad)
            by_value, by_change = g @ change.v.mT * change.factors, g @ change.v_tangent.mT * change.factors
            mean = (weights * by_value).sum(-1, keepdim=True)
            first = weights * (by_value - mean)
            by_weights = by_value * change.scores_tangent - mean * (change.scores_tangent + change.mean) + by_change
            second = weights * (by_weights - (weights * by_weights).sum(-1, keepdim=True))
            query_parts.append(tile.unfold(first @ change.k_tangent + second @ change.k) * problem.scale)
            key_parts.append(first.mT @ change.q_tangent + second.mT @ change.q)
            value_parts.append((weights * change.scores_tangent * change.factors).mT @ g)
            places.append(tile.indices(query.device)[3])
    if not places:
        return tuple(torch.zeros_like(tensor) for tensor in problem.tensors)
    at = torch.cat(places)
    sums = [
        torch.zeros_like(total, dtype=grad.dtype).index_add(2, at, torch.cat(parts, 2))
        for total, parts in ((key, key_parts), (value, value_parts))
    ]
    return tuple(tensor.to(query.dtype) for tensor in (torch.cat(query_parts, 2), *sums))


# ---------------------------------------------------------------- with a score_mod


def attend_with_score_mod(problem: Problem, score_mod: ScoreMod) -> Tensor:
    """The output with a score_mod, [B, H, Q, Dv], in operations that torch differentiates."""
    query, key, value = problem.tensors
    tiles = problem.tiling().tiles
    if not tiles:
        anchor = query[..., :0].sum() + key[..., :0].sum() + value[..., :0].sum()
        return query.new_zeros(*query.shape[:3], value.size(3)) + anchor
    score_mod = over_indices(score_mod)
    transformed = is_transformed(query, key, value)
    isolate_nonfinite = not transformed and (has_nonfinite(key.detach()) or has_nonfinite(value.detach()))

    def compute(tile: Tile, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        given = problem._replace(query=query, key=key, value=value)
        out = attend(given, tile, score_mod, isolate_nonfinite=isolate_nonfinite)
        return tile.unfold(out).to(query.dtype)

    if transformed:  # transforms cannot differentiate checkpoints
        return torch.cat([compute(tile, query, key, value) for tile in tiles], 2)
    # Checkpoints keep the memory of the backward pass linear: the scores of one tile exist at a time.
    repeated = compute if torch.compiler.is_compiling() else Unchanged(compute, problem.bounds)
    return torch.cat([checkpoint(repeated, tile, query, key, value, use_reentrant=False) for tile in tiles], 2)
