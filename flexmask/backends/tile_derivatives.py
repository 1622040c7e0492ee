"""Derivatives of attention that can be differentiated and mapped again: tangents, second derivatives, any `score_mod`.

They are simple rather than fast, and written in operations that torch differentiates. Shapes as in `tile`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flexmask.backends.mixed_precision import without_autocast
from flexmask.backends.problem import Problem, precise_dtype
from flexmask.backends.score_mods import over_indices
from flexmask.backends.tile import Tile
from flexmask.backends.tile_weights import attend, compute_weights, has_nonfinite
from flexmask.backends.unchanged import Unchanged
from flexmask.scores.score import ScoreMod


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
        weights, _ = compute_weights(tile, q, k, problem.visible(tile))
        scores_tangent = q_tangent @ k.mT + q @ k_tangent.mT
        mean = (weights * scores_tangent).sum(-1, keepdim=True)
        factors = problem.factors(tile)
        yield tile, _TileTangents(q, k, v, q_tangent, k_tangent, v_tangent, weights, scores_tangent - mean, mean, factors)


def tangent(problem: Problem, tangents: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The tangents of the output, [B, H, Q, Dv], and the logsumexp, [B, H, Q], along those of query, key and value."""
    query = problem.query
    parts, means = [], []
    with without_autocast(query):
        for tile, change in _tile_tangents(problem, tangents):
            weights_tangent = change.weights * change.scores_tangent * change.factors
            part = weights_tangent @ change.v + change.weights * change.factors @ change.v_tangent
            parts.append(tile.unfold(part))
            means.append(tile.unfold(change.mean).squeeze(-1))
    return torch.cat(parts, 2).to(query.dtype), torch.cat(means, 2)


def hessian_product(grad: Tensor, grad_lse: Tensor | None, problem: Problem, tangents: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The tangents of the gradients of query, key and value: the Hessian of ``(grad * out).sum()`` times the tangents.

    It is the gradient of ``(grad * tangent).sum() = sum(G * P * (S - sum(P * S)) + H * P)``, with P the weights, S the tangent of
    the scores, ``G = grad @ v.mT`` and ``H = grad @ v_tangent.mT``; with the logsumexp, also of ``sum(grad_lse * P * S)``.
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
            if grad_lse is not None:
                by_lse = tile.fold(grad_lse.unsqueeze(-1))
                first, by_weights = first + weights * by_lse, by_weights + by_lse * change.scores_tangent
            second = weights * (by_weights - (weights * by_weights).sum(-1, keepdim=True))
            query_parts.append(tile.unfold(first @ change.k_tangent + second @ change.k) * problem.scale)
            key_parts.append(first.mT @ change.q_tangent + second.mT @ change.q)
            value_parts.append((weights * change.scores_tangent * change.factors).mT @ g)
            places.append(tile.indices(query.device)[3])
    at = torch.cat(places)
    sums = [
        torch.zeros_like(total, dtype=grad.dtype).index_add(2, at, torch.cat(parts, 2))
        for total, parts in ((key, key_parts), (value, value_parts))
    ]
    return tuple(tensor.to(query.dtype) for tensor in (torch.cat(query_parts, 2), *sums))


# ---------------------------------------------------------------- with changed scores


def attend_with_score_mod(problem: Problem, score_mod: ScoreMod | None = None) -> tuple[Tensor, Tensor | None]:
    """The output with a score_mod, or with bias and cap, [B, H, Q, Dv], and the logsumexp, which torch differentiates."""
    query, key, value = problem.tensors
    tiles = problem.tiling().tiles
    score_mod = None if score_mod is None else over_indices(score_mod)
    transformed = problem.is_transformed()
    isolate_nonfinite = not transformed and (has_nonfinite(key.detach()) or has_nonfinite(value.detach()))

    def compute(tile: Tile, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor | None]:
        given = problem._replace(query=query, key=key, value=value)
        out, logsumexp = attend(given, tile, score_mod, isolate_nonfinite=isolate_nonfinite)
        return tile.unfold(out).to(query.dtype), None if logsumexp is None else tile.unfold(logsumexp).squeeze(-1)

    if transformed:  # transforms cannot differentiate checkpoints
        found = [compute(tile, query, key, value) for tile in tiles]
    else:  # checkpoints keep the memory of the backward pass linear: the scores of one tile exist at a time
        repeated = compute if torch.compiler.is_compiling() else Unchanged(compute, problem.bounds)
        found = [checkpoint(repeated, tile, query, key, value, use_reentrant=False) for tile in tiles]
    parts, logsumexps = zip(*found, strict=True)
    return torch.cat(parts, 2), torch.cat(logsumexps, 2) if problem.with_lse else None
