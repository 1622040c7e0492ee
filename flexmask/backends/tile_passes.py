"""The forward pass [B, H, Q, Dv] of attention in tiles, and its gradient, with the scores of one tile at a time.

Shapes as in `tile`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from flexmask.backends.fused_kernel import fused_backward, fused_forward, has_fused_kernel
from flexmask.backends.mixed_precision import without_autocast
from flexmask.backends.problem import Problem, precise_dtype
from flexmask.backends.tile import Tile
from flexmask.backends.tile_weights import attend, compute_weights, drop_weights, has_nonfinite

# The most scores of a tile. Passes without a fused kernel write several arrays of that size, which on a CPU should fit the cache.
FUSED_SCORES = 2**26
UNFUSED_SCORES = 2**25
UNFUSED_SCORES_PER_THREAD = 2**19


def empty_output(query: Tensor, value: Tensor) -> Tensor:
    """An empty [B, H, Q, Dv] with the heads of a token contiguous in memory, for the projection after it."""
    batch, heads, q_len, _ = query.shape
    width = value.size(3)
    # Not a view: autograd requires the tangents of views in the same layout.
    return query.new_empty_strided((batch, heads, q_len, width), (q_len * heads * width, width, heads * width, 1))


def empty_logsumexp(query: Tensor, *, is_fused: bool) -> Tensor:
    """An empty [B, H, Q] in the layout of the fused kernel, or [0, H, Q] where that is not used."""
    batch, heads, q_len, _ = query.shape
    batch = batch if is_fused else 0
    return query.new_empty_strided((batch, heads, q_len), (q_len * heads, 1, heads), dtype=precise_dtype(query))


def forward(problem: Problem) -> tuple[Tensor, Tensor]:
    """The output, [B, H, Q, Dv], and the logsumexp of the scores for `backward`: see `empty_logsumexp`."""
    query, is_fused = problem.query, problem.is_fused
    most_scores = FUSED_SCORES if problem.rows is None else _unfused_scores(query)
    tiling = problem.tiling(most_scores, in_bands=is_fused and problem.cells is None)
    out, logsumexp = empty_output(query, problem.value), empty_logsumexp(query, is_fused=is_fused)
    for tile, bias, fully_masked_rows in tiling.with_biases(problem.cells, query.dtype):
        q, k, v = problem.parts(tile)
        if is_fused:
            part, part_logsumexp = fused_forward(q, k, v, bias, problem.scale)
            tile.write(logsumexp.unsqueeze(-1), part_logsumexp.unsqueeze(-1))
        elif problem.rows is None:
            part = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=problem.scale)
        else:
            part = _dropped_sdpa(problem, tile, bias)
        if fully_masked_rows is not None:
            part = part.masked_fill_(fully_masked_rows, 0)  # out of place it would have another layout
        tile.write(out, part)
    if tiling.fully_masked is not None:
        out.masked_fill_(tiling.fully_masked, 0)
    if has_nonfinite(out):  # computed again, so that NaN and inf reach only the rows that attend to them
        for tile in problem.tiling(_unfused_scores(query)).tiles:
            if has_nonfinite(out[tile.slices]):
                tile.write(out, attend(problem, tile, isolate_nonfinite=True).to(out.dtype))
    return out, logsumexp


def _dropped_sdpa(problem: Problem, tile: Tile, bias: Tensor | None) -> Tensor:
    """As scaled_dot_product_attention, with dropout; computed in float32 at least."""
    q, k, v = (part.to(precise_dtype(part)) for part in problem.parts(tile))
    used = drop_weights(_weights(q * problem.scale, k, bias), problem.keep(tile))
    return (used @ v).mul_(problem.kept_scale).to(problem.query.dtype)


def _weights(q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor:
    scores = q @ k.mT
    return torch.softmax(scores if bias is None else scores.add_(bias), -1)


def _unfused_scores(query: Tensor) -> int:
    on_cpu = query.device.type == "cpu"
    return UNFUSED_SCORES_PER_THREAD * torch.get_num_threads() if on_cpu else UNFUSED_SCORES


def backward(grad: Tensor, out: Tensor, logsumexp: Tensor, problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value, computed in float32 at least."""
    query = problem.query
    dtype, is_fused = query.dtype, len(logsumexp) > 0 and has_fused_kernel(*problem.tensors)
    tiling = problem.tiling(FUSED_SCORES if is_fused else _unfused_scores(query), in_bands=is_fused and problem.cells is None)
    if tiling.fully_masked is not None:
        grad = grad.masked_fill(tiling.fully_masked, 0)
    problem, grad, out = problem.precise(), grad.to(precise_dtype(grad)), out.to(precise_dtype(out))

    def of_tiles() -> Iterator[tuple[Tile, tuple[Tensor, Tensor, Tensor]]]:
        for tile, bias, fully_masked_rows in tiling.with_biases(problem.cells, problem.query.dtype):
            part_grad, part_out = tile.fold(grad), tile.fold(out)
            if fully_masked_rows is not None:
                part_grad = part_grad.masked_fill(fully_masked_rows, 0)
            if is_fused:
                part_logsumexp = tile.fold(logsumexp.unsqueeze(-1)).squeeze(-1)
                yield tile, fused_backward(part_grad, *problem.parts(tile), part_out, part_logsumexp, bias, problem.scale)
            else:
                yield tile, _unfused_gradients(problem, tile, part_grad, part_out, bias)

    with without_autocast(query):
        grads = _sums(problem, of_tiles())
        if has_nonfinite(grads[0]):
            tiles = problem.tiling(_unfused_scores(query)).tiles
            grads = _sums(problem, ((tile, _isolating_gradients(problem, tile, tile.fold(grad))) for tile in tiles))
    grad_query, grad_key, grad_value = (total.to(dtype) for total in grads)
    return grad_query, grad_key, grad_value


def _sums(problem: Problem, of_tiles: Iterable[tuple[Tile, tuple[Tensor, Tensor, Tensor]]]) -> list[Tensor]:
    """The gradients of query, key and value from those of each tile."""
    totals = [empty_output(tensor, tensor).zero_() for tensor in problem.tensors]
    for tile, (to_query, *to_keys) in of_tiles:
        tile.write(totals[0], to_query)
        for total, part in zip(totals[1:], to_keys, strict=True):
            tile.add_to_keys(total, part)
    return totals


def _unfused_gradients(
    problem: Problem, tile: Tile, grad: Tensor, out: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the folded query, key and value of a tile."""
    q, k, v = problem.parts(tile)
    q = q * problem.scale
    used = weights = _weights(q, k, bias)
    mean = (grad * out).sum(-1, keepdim=True)
    keep = problem.keep(tile)
    if keep is not None:
        used, grad = drop_weights(weights.clone(), keep), grad * problem.kept_scale
    grad_value, grad_weights = used.mT @ grad, drop_weights(grad @ v.mT, keep)
    grad_scores = grad_weights.sub_(mean).mul_(weights)
    return (grad_scores @ k).mul_(problem.scale), grad_scores.mT @ q, grad_value


def _isolating_gradients(problem: Problem, tile: Tile, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As `_unfused_gradients`, where NaN and inf of keys and values reach only the rows that attend to them."""
    q, k, v = problem.parts(tile)
    q, visible = q * problem.scale, problem.visible(tile)
    nonfinite_keys = ~k.isfinite().all(-1)
    weights = compute_weights(tile, q, k, visible, nonfinite_keys=None if visible is None else nonfinite_keys)
    factors = problem.factors(tile)
    grad_weights = grad @ v.masked_fill(~v.isfinite(), 0).mT * factors
    grad_scores = weights * (grad_weights - (weights * grad_weights).sum(-1, keepdim=True))
    if visible is not None:  # in rows with NaN also where weights are 0
        grad_scores = tile.unfold(grad_scores).masked_fill(~visible, 0).reshape(weights.shape)
    grad_q = grad_scores @ k.masked_fill(nonfinite_keys.unsqueeze(-1), 0) * problem.scale
    return grad_q, grad_scores.mT @ q, (weights * factors).mT @ grad
