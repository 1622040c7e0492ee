"""The forward pass [B, H, Q, Dv] of attention in tiles, and its gradient, with the scores of one tile at a time.

The weights [b, n, g * m, t] of one tile, its output, and attention of all are also here in operations that torch differentiates:
with derivatives of any order and transforms, and any `score_mod`, simple rather than fast. Shapes as in `tile`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flexmask._transforms import has_values, is_captured, without_autocast
from flexmask.backends.problem import FUSED_BACKWARD, FUSED_FORWARD, Problem, precise_dtype
from flexmask.backends.score_mods import Unchanged, over_indices
from flexmask.backends.tile import Tile, fold_rows
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


# ---------------------------------------------------------------- tile by tile


# The most scores of a tile. Passes without a fused kernel write several arrays of that size, which on a CPU should fit the cache.
FUSED_SCORES = 2**26
UNFUSED_SCORES = 2**25
UNFUSED_SCORES_PER_THREAD = 2**19
# The channels that are added for the gradient of the logsumexp: one is enough, and kernels are faster with whole vectors.
CHANNELS = 16


def empty_output(query: Tensor, value: Tensor) -> Tensor:
    """An empty [B, H, Q, Dv] with the heads of a token contiguous in memory, for the projection after it."""
    batch, heads, q_len, _ = query.shape
    width = value.size(3)
    # Not a view: autograd requires the tangents of views in the same layout.
    return query.new_empty_strided((batch, heads, q_len, width), (q_len * heads * width, width, heads * width, 1))


def empty_logsumexp(query: Tensor, *, is_kept: bool) -> Tensor:
    """An empty [B, H, Q] in the layout of the fused kernel, or [0, H, Q] where it is not kept."""
    batch, heads, q_len, _ = query.shape
    batch = batch if is_kept else 0
    return query.new_empty_strided((batch, heads, q_len), (q_len * heads, 1, heads), dtype=precise_dtype(query))


def forward(problem: Problem) -> tuple[Tensor, Tensor]:
    """The output, [B, H, Q, Dv], and the logsumexp of the scores, which the fused kernel keeps for `backward` in any case."""
    query, is_fused = problem.query, problem.is_fused
    is_kept = is_fused or problem.with_lse
    has_kernel = is_fused or (problem.rows is None and problem.cap is None and not problem.with_lse)
    most_scores = FUSED_SCORES if has_kernel else _unfused_scores(query)
    tiling = problem.tiling(most_scores, in_bands=problem.in_bands)
    out, logsumexp = empty_output(query, problem.value), empty_logsumexp(query, is_kept=is_kept)
    for tile, bias, fully_masked_rows in problem.with_biases(tiling):
        q, k, v = problem.parts(tile)
        if is_fused:
            part, lse = FUSED_FORWARD(q, k, v, 0.0, False, attn_mask=bias, scale=problem.scale)
        elif has_kernel:
            bias = None if bias is None else bias.to(q.dtype)
            part, lse = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=problem.scale), None
        else:
            part, lse = _unfused_forward(problem, tile, bias)
        if fully_masked_rows is not None:
            part = part.masked_fill_(fully_masked_rows, 0)  # out of place it would have another layout
            lse = None if lse is None else lse.masked_fill(fully_masked_rows.squeeze(-1), -math.inf)
        tile.write(out, part)
        if lse is not None:
            tile.write(logsumexp.unsqueeze(-1), lse.unsqueeze(-1))
    if tiling.fully_masked is not None:
        out.masked_fill_(tiling.fully_masked, 0)
        if is_kept:
            logsumexp.masked_fill_(tiling.fully_masked.squeeze(-1), -math.inf)
    if has_nonfinite(out):  # computed again, so that NaN and inf reach only the rows that attend to them
        for tile in problem.tiling(_unfused_scores(query)).tiles:
            if has_nonfinite(out[tile.slices]):
                part, lse = attend(problem, tile, isolate_nonfinite=True)
                tile.write(out, part.to(out.dtype))
                if lse is not None:
                    tile.write(logsumexp.unsqueeze(-1), lse)
    return out, logsumexp


def _unfused_forward(problem: Problem, tile: Tile, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The folded output of a tile and its logsumexp, with dropout and a cap; computed in float32 at least."""
    q, k, v = (part.to(precise_dtype(part)) for part in problem.parts(tile))
    scores, _ = _scores(problem, tile, q * problem.scale, k, bias)
    lse = torch.logsumexp(scores, -1) if problem.with_lse else None
    used = drop_weights(torch.softmax(scores, -1), problem.keep(tile))
    return (used @ v).mul_(problem.kept_scale).to(problem.query.dtype), lse


def _scores(problem: Problem, tile: Tile, q: Tensor, k: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The folded scores of a tile, and their derivative by those before the cap where there is one."""
    scores, slope = q @ k.mT, None
    if problem.cap is not None:
        own = problem.score_bias(tile)
        scores = scores if own is None else scores.add_(fold_rows(own, tile))
        scores = scores.div_(problem.cap).tanh_()
        slope = 1 - scores.square()
        scores.mul_(problem.cap)
    return (scores if bias is None else scores.add_(bias)), slope


def _unfused_scores(query: Tensor) -> int:
    on_cpu = query.device.type == "cpu"
    return UNFUSED_SCORES_PER_THREAD * torch.get_num_threads() if on_cpu else UNFUSED_SCORES


def backward(grad: Tensor, grad_lse: Tensor | None, out: Tensor, logsumexp: Tensor, problem: Problem) -> list[Tensor]:
    """The gradients of query, key and value by those of the output and of the logsumexp, computed in float32 at least.

    Where the problem learns its bias also that of the bias, which the fused kernel does not give.
    """
    tensors = query, *_ = problem.tensors
    is_fused = len(logsumexp) > 0 and problem.is_fused and not problem.learns_bias
    problem, grad, out = problem.precise(), grad.to(precise_dtype(grad)), out.to(precise_dtype(out))
    if grad_lse is not None:
        problem, grad, out = _with_channel(problem, grad, grad_lse, out)
    tiling = problem.tiling(FUSED_SCORES if is_fused else _unfused_scores(query), in_bands=is_fused and problem.in_bands)
    if tiling.fully_masked is not None:
        grad = grad.masked_fill(tiling.fully_masked, 0)
    # So that weights are 0 in these rows.
    if tiling.fully_masked is not None or problem.cells is not None or problem.bias is not None:
        logsumexp = logsumexp.masked_fill(logsumexp == -math.inf, math.inf)

    def of_tiles() -> Iterator[tuple[Tile, tuple[Tensor, ...]]]:
        for tile, bias, fully_masked_rows in problem.with_biases(tiling):
            part_grad, part_out = tile.fold(grad), tile.fold(out)
            if fully_masked_rows is not None:
                part_grad = part_grad.masked_fill(fully_masked_rows, 0)
            lse = tile.fold(logsumexp.unsqueeze(-1)) if len(logsumexp) else None
            if is_fused and lse is not None:
                given = part_grad, *problem.parts(tile), part_out, lse.squeeze(-1), 0.0, False
                yield tile, FUSED_BACKWARD(*given, attn_mask=bias, scale=problem.scale)
            else:
                yield tile, _unfused_gradients(problem, tile, part_grad, part_out, bias, lse)

    with without_autocast(query):
        grads = _sums(problem, of_tiles())
        if has_nonfinite(grads[0]):
            tiles = problem.tiling(_unfused_scores(query)).tiles
            grads = _sums(problem, ((tile, _isolating_gradients(problem, tile, grad, grad_lse)) for tile in tiles))
    if grad_lse is not None:
        grads[:3] = [empty_output(one, one).copy_(total[..., : one.size(3)]) for one, total in zip(tensors, grads, strict=False)]
    return [*(total.to(query.dtype) for total in grads[:3]), *grads[3:]]


def _with_channel(problem: Problem, grad: Tensor, grad_lse: Tensor, out: Tensor) -> tuple[Problem, Tensor, Tensor]:
    """With more channels, by which gradients of the output have that of the logsumexp.

    The gradient of the scores is ``weights * (grad @ v.mT - (grad * out).sum(-1) + grad_lse)``. A channel in which values are 0,
    ``grad`` is 1 and ``out`` is ``-grad_lse`` makes the last term a part of the sum.
    """
    query, key, value, grad, out = (F.pad(tensor, (0, CHANNELS)) for tensor in (*problem.tensors, grad, out))
    grad[..., -1] = 1
    out[..., -1] = -grad_lse
    return problem.with_tensors(query, key, value), grad, out


def _sums(problem: Problem, of_tiles: Iterable[tuple[Tile, tuple[Tensor, ...]]]) -> list[Tensor]:
    """The gradients of query, key, value and bias from those of each tile: of query, key and value, and of the scores."""
    totals = [empty_output(tensor, tensor).zero_() for tensor in problem.tensors]
    totals += [torch.zeros_like(bias, dtype=precise_dtype(bias)) for bias in problem.learned]
    for tile, (to_query, to_key, to_value, *to_scores) in of_tiles:
        tile.write(totals[0], to_query)
        for total, part in zip(totals[1:3], (to_key, to_value), strict=True):
            tile.add_to_keys(total, part)
        for total, part in zip(totals[3:], to_scores, strict=False):
            tile.add_to_bias(total, tile.unfold(part), problem.query.size(2))
    return totals


def _unfused_gradients(
    problem: Problem, tile: Tile, grad: Tensor, out: Tensor, bias: Tensor | None, lse: Tensor | None
) -> tuple[Tensor, ...]:
    """The gradients of the folded query, key, value and scores of a tile."""
    q, k, v = problem.parts(tile)
    q = q * problem.scale
    scores, slope = _scores(problem, tile, q, k, bias)
    used = weights = torch.softmax(scores, -1) if lse is None else scores.sub_(lse).exp_()
    mean = (grad * out).sum(-1, keepdim=True)
    keep = problem.keep(tile)
    if keep is not None:
        used, grad = drop_weights(weights.clone(), keep), grad * problem.kept_scale
    grad_value, grad_weights = used.mT @ grad, drop_weights(grad @ v.mT, keep)
    grad_scores = grad_weights.sub_(mean).mul_(weights)
    if slope is not None:
        grad_scores.mul_(slope)
    return (grad_scores @ k).mul_(problem.scale), grad_scores.mT @ q, grad_value, grad_scores


def _isolating_gradients(problem: Problem, tile: Tile, grad: Tensor, grad_lse: Tensor | None) -> tuple[Tensor, ...]:
    """As `_unfused_gradients`, where NaN and inf of keys and values reach only the rows that attend to them."""
    q, k, v = problem.parts(tile)
    q, visible, grad = q * problem.scale, tile.visible(problem.bounds, problem.cells), tile.fold(grad)
    nonfinite_keys = ~k.isfinite().all(-1)
    nonfinite = None if visible is None else nonfinite_keys
    weights, _ = compute_weights(tile, q, k, visible, lambda scores: problem.changed(tile, scores), nonfinite)
    factors = problem.factors(tile)
    grad_weights = grad @ v.masked_fill(~v.isfinite(), 0).mT * factors
    mean = (weights * grad_weights).sum(-1, keepdim=True)
    grad_scores = weights * (grad_weights - (mean if grad_lse is None else mean - tile.fold(grad_lse.unsqueeze(-1))))
    _, slope = _scores(problem, tile, q, k, None)
    grad_scores = grad_scores if slope is None else grad_scores * slope
    if visible is not None:  # in rows with NaN also where weights are 0
        grad_scores = tile.unfold(grad_scores).masked_fill(~visible, 0).reshape(weights.shape)
    grad_q = grad_scores @ k.masked_fill(nonfinite_keys.unsqueeze(-1), 0) * problem.scale
    return grad_q, grad_scores.mT @ q, (weights * factors).mT @ grad, grad_scores
