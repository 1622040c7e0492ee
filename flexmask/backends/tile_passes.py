"""The forward pass [B, H, Q, Dv] of attention in tiles, and its gradient, with the scores of one tile at a time.

Shapes as in `tile`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from flexmask.backends.fused_kernel import fused_backward, fused_forward, has_fused_kernel
from flexmask.backends.mixed_precision import without_autocast
from flexmask.backends.tile import Cells, Tile
from flexmask.backends.tile_weights import (
    DropoutState,
    attend,
    compute_weights,
    drop_weights,
    has_nonfinite,
    precise_dtype,
)
from flexmask.backends.tiling_cache import shared_tiling

__all__ = ["backward", "empty_logsumexp", "empty_output", "forward"]

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


def forward(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, cells: Cells, scale: float, drop: DropoutState | None
) -> tuple[Tensor, Tensor]:
    """The output, [B, H, Q, Dv], and the logsumexp of the scores for `backward`: see `empty_logsumexp`."""
    is_fused = drop is None and has_fused_kernel(query, key, value)
    most_scores = FUSED_SCORES if drop is None else _unfused_scores(query)
    tiling = shared_tiling(bounds, query, key, most_scores=most_scores, in_bands=is_fused and cells is None)
    out, logsumexp = empty_output(query, value), empty_logsumexp(query, is_fused=is_fused)
    for tile, bias, fully_masked_rows in tiling.with_biases(cells, query.dtype):
        q, k, v = tile.parts(query, key, value)
        if is_fused:
            part, part_logsumexp = fused_forward(q, k, v, bias, scale)
        elif drop is None:
            part = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)
        else:
            part = _dropped_sdpa(q, k, v, bias, scale, tile, drop)
        if fully_masked_rows is not None:
            part = part.masked_fill_(fully_masked_rows, 0)  # out of place it would have another layout
        tile.write(out, part)
        if is_fused:
            tile.write(logsumexp.unsqueeze(-1), part_logsumexp.unsqueeze(-1))
    if tiling.fully_masked is not None:
        out.masked_fill_(tiling.fully_masked, 0)
    if has_nonfinite(out):
        _recompute_nonfinite(out, query, key, value, bounds, cells, scale, drop)
    return out, logsumexp


def _recompute_nonfinite(
    out: Tensor, query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, cells: Cells, scale: float, drop: DropoutState | None
) -> None:
    """Computes the tiles with NaN or inf again, so that these reach only the rows that attend to them."""
    for tile in shared_tiling(bounds, query, key, most_scores=_unfused_scores(query)).tiles:
        if has_nonfinite(out[tile.slices]):
            q, k, v = (part.to(precise_dtype(query)) for part in tile.parts(query, key, value))
            part = attend(tile, q * scale, k, v, tile.visible(bounds, cells), None, drop, isolate_nonfinite=True)
            tile.write(out, part.to(out.dtype))


def _dropped_sdpa(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, tile: Tile, drop: DropoutState) -> Tensor:
    """As scaled_dot_product_attention, with dropout; computed in float32 at least."""
    precise = precise_dtype(q)
    scores = q.to(precise) * scale @ k.to(precise).mT
    if bias is not None:
        scores.add_(bias)
    used = drop_weights(torch.softmax(scores, -1), drop.keep(tile))
    return (used @ v.to(precise)).mul_(drop.scale).to(q.dtype)


def _unfused_scores(query: Tensor) -> int:
    on_cpu = query.device.type == "cpu"
    return UNFUSED_SCORES_PER_THREAD * torch.get_num_threads() if on_cpu else UNFUSED_SCORES


def backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    bounds: Tensor,
    cells: Cells,
    scale: float,
    drop: DropoutState | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value, computed in float32 at least."""
    is_fused = len(logsumexp) > 0 and has_fused_kernel(query, key, value)
    most_scores = FUSED_SCORES if is_fused else _unfused_scores(query)
    tiling = shared_tiling(bounds, query, key, most_scores=most_scores, in_bands=is_fused and cells is None)
    if tiling.fully_masked is not None:
        grad = grad.masked_fill(tiling.fully_masked, 0)
    dtype, precise = query.dtype, precise_dtype(query)
    grad, query, key, value, out = (tensor.to(precise) for tensor in (grad, query, key, value, out))
    grad_query, grad_key, grad_value = (empty_output(tensor, tensor).zero_() for tensor in (query, key, value))
    with without_autocast(query):
        for tile, bias, fully_masked_rows in tiling.with_biases(cells, precise):
            q, k, v = parts = tile.parts(query, key, value)
            part_grad, part_out = tile.fold(grad), tile.fold(out)
            if fully_masked_rows is not None:
                part_grad = part_grad.masked_fill(fully_masked_rows, 0)
            if is_fused:
                part_logsumexp = tile.fold(logsumexp.unsqueeze(-1)).squeeze(-1)
                grads = fused_backward(part_grad, q, k, v, part_out, part_logsumexp, bias, scale)
            else:
                grads = _unfused_gradients(tile, parts, part_grad, part_out, bias, scale, drop)
            tile.write(grad_query, grads[0])
            tile.add_to_keys(grad_key, grads[1])
            tile.add_to_keys(grad_value, grads[2])
        if has_nonfinite(grad_query):
            grad_query, grad_key, grad_value = (tensor.zero_() for tensor in (grad_query, grad_key, grad_value))
            for tile in shared_tiling(bounds, query, key, most_scores=_unfused_scores(query)).tiles:
                q, k, v = tile.parts(query, key, value)
                grads = _isolating_gradients(tile, (q * scale, k, v), tile.fold(grad), tile.visible(bounds, cells), drop)
                tile.write(grad_query, grads[0] * scale)
                tile.add_to_keys(grad_key, grads[1])
                tile.add_to_keys(grad_value, grads[2])
    return grad_query.to(dtype), grad_key.to(dtype), grad_value.to(dtype)


def _unfused_gradients(
    tile: Tile,
    parts: Sequence[Tensor],
    grad: Tensor,
    out: Tensor,
    bias: Tensor | None,
    scale: float,
    drop: DropoutState | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the folded query, key and value of a tile."""
    q, k, v = parts
    q = q * scale
    scores = q @ k.mT
    if bias is not None:
        scores.add_(bias)
    used = weights = torch.softmax(scores, -1)
    mean = (grad * out).sum(-1, keepdim=True)
    if drop is not None:
        keep, grad = drop.keep(tile), grad * drop.scale
        used = drop_weights(weights.clone(), keep)
    grad_value, grad_weights = used.mT @ grad, grad @ v.mT
    if drop is not None:
        drop_weights(grad_weights, keep)
    grad_scores = grad_weights.sub_(mean).mul_(weights)
    return (grad_scores @ k).mul_(scale), grad_scores.mT @ q, grad_value


def _isolating_gradients(
    tile: Tile, parts: Sequence[Tensor], grad_out: Tensor, visible: Tensor | None, drop: DropoutState | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of a tile, in which NaN and inf of keys and values reach only the rows that attend to them."""
    q, k, v = parts
    nonfinite_keys = ~k.isfinite().all(-1)
    weights = compute_weights(tile, q, k, visible, nonfinite_keys=None if visible is None else nonfinite_keys)
    factors = 1.0 if drop is None else drop.factors(tile, weights)
    grad_weights = grad_out @ v.masked_fill(~v.isfinite(), 0).mT * factors
    grad_scores = weights * (grad_weights - (weights * grad_weights).sum(-1, keepdim=True))
    if visible is not None:  # in rows with NaN also where weights are 0
        grad_scores = tile.unfold(grad_scores).masked_fill(~visible, 0).reshape(weights.shape)
    grad_q = grad_scores @ k.masked_fill(nonfinite_keys.unsqueeze(-1), 0)
    return grad_q, grad_scores.mT @ q, (weights * factors).mT @ grad_out
