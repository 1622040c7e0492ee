"""Attention in operations that torch differentiates and maps any number of times, with any `score_mod`; shapes as in `tile`.

It is simple rather than fast.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flexmask.backends.mixed_precision import without_autocast
from flexmask.backends.problem import Problem
from flexmask.backends.score_mods import over_indices
from flexmask.backends.tile import Tile
from flexmask.backends.tile_weights import attend, has_nonfinite
from flexmask.backends.unchanged import Unchanged
from flexmask.scores.score import ScoreMod


def differentiable_attention(problem: Problem, score_mod: ScoreMod | None = None) -> tuple[Tensor, Tensor | None]:
    """The output, [B, H, Q, Dv], and the logsumexp where the problem asks for it; with a score_mod in place of bias and cap."""
    query, key, value = problem.tensors
    tiles = problem.tiling().tiles
    score_mod = None if score_mod is None else over_indices(score_mod)
    transformed = problem.is_transformed()
    isolate_nonfinite = not transformed and (has_nonfinite(key.detach()) or has_nonfinite(value.detach()))

    def compute(tile: Tile, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor | None]:
        out, logsumexp = attend(problem.with_tensors(query, key, value), tile, score_mod, isolate_nonfinite=isolate_nonfinite)
        return tile.unfold(out).to(query.dtype), None if logsumexp is None else tile.unfold(logsumexp).squeeze(-1)

    if transformed:  # transforms cannot differentiate checkpoints
        found = [compute(tile, query, key, value) for tile in tiles]
    else:  # checkpoints keep the memory of the backward pass linear: the scores of one tile exist at a time
        repeated = compute if torch.compiler.is_compiling() else Unchanged(compute, problem.bounds)
        found = [checkpoint(repeated, tile, query, key, value, use_reentrant=False) for tile in tiles]
    parts, logsumexps = zip(*found, strict=True)
    return torch.cat(parts, 2), torch.cat(logsumexps, 2) if problem.with_lse else None


def gradients(problem: Problem, grad: Tensor, grad_lse: Tensor | None) -> tuple[Tensor, ...]:
    """The gradients of query, key and value, and of a bias that has one, by those of the output and of the logsumexp."""
    precise = problem.precise()

    def loss(*tensors: Tensor) -> Tensor:
        out, logsumexp = differentiable_attention(precise.with_tensors(*tensors))
        total = (out * grad).sum()
        return total if logsumexp is None or grad_lse is None else total + (logsumexp * grad_lse).sum()

    tensors = *precise.tensors, *precise.learned
    with without_autocast(problem.query):
        found = torch.func.grad(loss, tuple(range(len(tensors))))(*tensors)
    return *(one.to(problem.query.dtype) for one in found[:3]), *found[3:]


def second_gradients(problem: Problem, grad: Tensor, grad_lse: Tensor | None, weights: Sequence[Tensor]) -> list[Tensor | None]:
    """The gradients of the sum of `gradients` times weights by ``grad``, ``grad_lse``, query, key, value and a learned bias."""
    of_lse = () if grad_lse is None else (grad_lse,)

    def first(grad: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        lse, tensors = others[: len(of_lse)], others[len(of_lse) :]
        return gradients(problem.with_tensors(*tensors), grad, lse[0] if lse else None)

    pull = torch.func.vjp(first, grad, *of_lse, *problem.tensors, *problem.learned)[1]
    by_grad, *found = pull(tuple(weights))
    return [by_grad, *found] if of_lse else [by_grad, None, *found]
