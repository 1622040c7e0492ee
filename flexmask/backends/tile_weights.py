"""The weights [b, n, g * m, t] of one tile and its output, and attention of all, in operations that torch differentiates.

It has derivatives of any order and transforms, with any `score_mod`, and is simple rather than fast. Shapes as in `tile`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flexmask._transforms import has_values, is_captured, without_autocast
from flexmask.backends.problem import Problem, precise_dtype
from flexmask.backends.score_mods import Unchanged, over_indices
from flexmask.backends.tile import Tile
from flexmask.scores.score import ScoreMod


def attend(
    problem: Problem, tile: Tile, score_mod: ScoreMod | None = None, *, isolate_nonfinite: bool = False
) -> tuple[Tensor, Tensor | None]:
    """The folded output of a tile, in float32 at least, and the logsumexp of its scores where the problem asks for it.

    Args:
        problem: what is computed.
        tile: the tile.
        score_mod: ``score_mod(score, b, h, q_idx, kv_idx)``, over index tensors that broadcast, in place of bias and cap.
        isolate_nonfinite: whether NaN and inf in keys and values reach only the rows that attend to them.
    """
    q, k, v = (part.to(precise_dtype(part)) for part in problem.parts(tile))
    q, visible = q * problem.scale, tile.visible(problem.bounds, problem.cells)
    nonfinite_keys = ~k.isfinite().all(-1) if isolate_nonfinite and visible is not None else None

    def change(scores: Tensor) -> Tensor:
        return problem.changed(tile, scores) if score_mod is None else score_mod(scores, *tile.indices(q.device)).to(q.dtype)

    weights, logsumexp = compute_weights(tile, q, k, visible, change, nonfinite_keys, with_lse=problem.with_lse)
    used = weights if problem.rows is None else weights * problem.factors(tile)
    if nonfinite_keys is None:
        return used @ v, logsumexp
    # A weight of 0 times NaN is NaN, so such values are left out of the product and added where their weight is positive.
    out = used @ v.masked_fill(~v.isfinite(), 0)
    attended = (used.detach() > 0).to(v.dtype)
    for number in (math.inf, -math.inf, math.nan):
        here = v.isnan() if math.isnan(number) else v == number
        out = out + torch.where(attended @ here.to(v.dtype) > 0, number, 0)
    return out, logsumexp


def compute_weights(
    tile: Tile,
    q: Tensor,
    k: Tensor,
    visible: Tensor | None,
    change: Callable[[Tensor], Tensor] | None = None,
    nonfinite_keys: Tensor | None = None,
    *,
    with_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The folded weights of a tile before dropout, and the logsumexp [b, n, g * m, 1]: 0 and -inf in fully masked rows.

    Args:
        tile: the tile.
        q: its queries, folded, times the scale.
        k: its keys.
        visible: as of `Tile.visible`.
        change: what becomes of the scores [b, n * g, m, t].
        nonfinite_keys: bool [b, n, t], keys with NaN or inf, whose scores are 0 where they are not visible.
        with_lse: whether to compute the logsumexp.
    """
    if nonfinite_keys is None:
        scores = tile.unfold(q @ k.mT)
    else:
        assert visible is not None
        scores = tile.unfold(q @ k.masked_fill(nonfinite_keys.unsqueeze(-1), 0).mT)
        shown = visible & nonfinite_keys.repeat_interleave(tile.group, 1).unsqueeze(2)
        scores = torch.where(shown, tile.unfold(q @ k.mT).detach(), scores)
    if change is not None and tile.runs:
        scores = change(scores)
    if visible is not None:
        scores = scores.masked_fill(~visible, -math.inf)
    fully_masked = (scores == -math.inf).all(-1, keepdim=True)
    scores = scores.masked_fill(fully_masked, 0)
    weights = torch.softmax(scores, -1).masked_fill(fully_masked, 0)
    logsumexp = torch.logsumexp(scores, -1, keepdim=True).masked_fill(fully_masked, -math.inf) if with_lse else None
    if nonfinite_keys is not None and visible is not None:  # all weights of a row with NaN are NaN
        weights = weights.masked_fill(~visible, 0)
    return weights.reshape(*q.shape[:3], k.size(2)), None if logsumexp is None else logsumexp.reshape(*q.shape[:3], 1)


def drop_weights(weights: Tensor, keep: Tensor | None) -> Tensor:
    """Sets weights, or gradients by them, to 0 in place where ``keep`` is 0."""
    if keep is None:
        return weights
    if weights.dtype != torch.float32:
        return weights.mul_(keep)
    weights.view(torch.int32).mul_(keep)  # on bits: to convert `keep` takes longer than to multiply by it
    return weights


def has_nonfinite(tensor: Tensor) -> bool:
    """Whether a tensor on the CPU holds NaN or inf; False on other devices, where reading it would force a host sync."""
    if tensor.device.type != "cpu" or not has_values(tensor) or is_captured():
        return False
    return not math.isfinite(tensor.sum(dtype=precise_dtype(tensor)).item())


# ---------------------------------------------------------------- all tiles


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
