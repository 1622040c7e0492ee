"""The forward pass [B, H, Q, Dv] of attention in tiles, and its gradient, with the scores of one tile at a time.

Shapes as in `tile`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from flexmask.backends.tile import Cells, Tile
from flexmask.backends.tile_weights import DropoutState, attend, compute_weights, has_nonfinite, precise_dtype, without_autocast
from flexmask.backends.tiling import plan_tiles

__all__ = ["backward", "empty_output", "forward"]

# The most scores of a tile. The backward pass writes several arrays of that size, which on a CPU should fit the cache.
FORWARD_SCORES = 2**26
BACKWARD_SCORES = 2**25
BACKWARD_SCORES_PER_THREAD = 2**19
# How many biases are kept for later tiles: a window needs 1, packed documents of n blocks each need n.
MAX_KEPT_BIASES = 4


def empty_output(query: Tensor, value: Tensor) -> Tensor:
    """An empty [B, H, Q, Dv] with the heads of a token contiguous in memory, for the projection after it."""
    batch, heads, q_len, _ = query.shape
    width = value.size(3)
    # Not a view: autograd requires the tangents of views in the same layout.
    return query.new_empty_strided((batch, heads, q_len, width), (q_len * heads * width, width, heads * width, 1))


def forward(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, cells: Cells, scale: float, drop: DropoutState | None
) -> Tensor:
    """The output, [B, H, Q, Dv]."""
    out = empty_output(query, value)
    most_scores = FORWARD_SCORES if drop is None else _backward_scores(query)
    tiles, all_rows_attend = plan_tiles(bounds, query, key, most_scores=most_scores)
    unmasked_bounds, fully_masked = _unmask_fully_masked_rows(bounds, key.size(2), all_rows_attend)
    nonfinite = False
    with without_autocast(query):
        for tile, bias, fully_masked_rows in _with_bias(tiles, unmasked_bounds, cells, query.dtype):
            q, k, v = tile.fold(query), tile.gather_keys(key), tile.gather_keys(value)
            if drop is None:
                part = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)
            else:
                part = _dropped_sdpa(q, k, v, bias, scale, tile, drop)
            if fully_masked_rows is not None:
                part = part.masked_fill(fully_masked_rows, 0)
            nonfinite = nonfinite or has_nonfinite(part)  # here, while the part is in the cache of the CPU
            out[tile.slices] = tile.unfold(part)
    if fully_masked is not None:
        out.masked_fill_(fully_masked, 0)
    if nonfinite:
        _recompute_nonfinite(out, query, key, value, bounds, cells, scale, drop)
    return out


def _recompute_nonfinite(
    out: Tensor, query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, cells: Cells, scale: float, drop: DropoutState | None
) -> None:
    """Computes the tiles with NaN or inf again, so that these reach only the rows that attend to them."""
    for tile in plan_tiles(bounds, query, key, most_scores=_backward_scores(query))[0]:
        if has_nonfinite(out[tile.slices]):
            q, k, v = (
                part.to(precise_dtype(query)) for part in (tile.fold(query), tile.gather_keys(key), tile.gather_keys(value))
            )
            part = attend(tile, q * scale, k, v, tile.visible(bounds, cells), None, drop, isolate_nonfinite=True)
            out[tile.slices] = tile.unfold(part).to(out.dtype)


def _dropped_sdpa(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, tile: Tile, drop: DropoutState) -> Tensor:
    """As scaled_dot_product_attention, with dropout; computed in float32 at least."""
    precise = precise_dtype(q)
    scores = q.to(precise) * scale @ k.to(precise).mT
    if bias is not None:
        scores.add_(bias)
    return (torch.softmax(scores, -1).mul_(drop.factors(tile, scores)) @ v.to(precise)).to(q.dtype)


def _backward_scores(query: Tensor) -> int:
    on_cpu = query.device.type == "cpu"
    return BACKWARD_SCORES_PER_THREAD * torch.get_num_threads() if on_cpu else BACKWARD_SCORES


def backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    bounds: Tensor,
    cells: Cells,
    scale: float,
    drop: DropoutState | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value, computed in float32 at least."""
    tiles, all_rows_attend = plan_tiles(bounds, query, key, most_scores=_backward_scores(query))
    unmasked_bounds, fully_masked = _unmask_fully_masked_rows(bounds, key.size(2), all_rows_attend)
    if fully_masked is not None:
        grad = grad.masked_fill(fully_masked, 0)
    dtype, precise = query.dtype, precise_dtype(query)
    grad, query, key, value, out = (tensor.to(precise) for tensor in (grad, query, key, value, out))
    grad_query = torch.empty_like(query) if fully_masked is None else torch.zeros_like(query)
    grad_key, grad_value = torch.zeros_like(key), torch.zeros_like(value)
    query = query * scale
    shift = (grad * out).sum(-1, keepdim=True)
    nonfinite = False
    with without_autocast(query):
        for tile, bias, fully_masked_rows in _with_bias(tiles, unmasked_bounds, cells, precise):
            q, k, v, grad_out = tile.fold(query), tile.gather_keys(key), tile.gather_keys(value), tile.fold(grad)
            if fully_masked_rows is not None:
                grad_out = grad_out.masked_fill(fully_masked_rows, 0)
            scores = q @ k.mT
            if bias is not None:
                scores.add_(bias)
            weights = torch.softmax(scores, -1)
            factors = None if drop is None else drop.factors(tile, weights)
            used = weights if factors is None else weights * factors
            tile.add_to_keys(grad_value, used.mT @ grad_out)
            grad_used = grad_out @ v.mT
            if factors is not None:
                grad_used.mul_(factors)
            grad_scores = grad_used.sub_(tile.fold(shift)).mul_(weights)
            tile.add_to_keys(grad_key, grad_scores.mT @ q)
            part = grad_scores @ k
            nonfinite = nonfinite or has_nonfinite(part)
            grad_query[tile.slices] = tile.unfold(part)
        if nonfinite:
            grad_query, grad_key, grad_value = (tensor.zero_() for tensor in (grad_query, grad_key, grad_value))
            for tile in tiles:
                parts = [tile.fold(query), tile.gather_keys(key), tile.gather_keys(value)]
                grads = _isolating_gradients(tile, parts, tile.fold(grad), tile.visible(bounds, cells), drop)
                grad_query[tile.slices] = tile.unfold(grads[0])
                tile.add_to_keys(grad_key, grads[1])
                tile.add_to_keys(grad_value, grads[2])
    return grad_query.mul_(scale).to(dtype), grad_key.to(dtype), grad_value.to(dtype)


def _isolating_gradients(
    tile: Tile, parts: Sequence[Tensor], grad_out: Tensor, visible: Tensor | None, drop: DropoutState | None
) -> tuple[Tensor, ...]:
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


def _with_bias(
    tiles: list[Tile], bounds: Tensor, cells: Cells, dtype: torch.dtype
) -> Iterator[tuple[Tile, Tensor | None, Tensor | None]]:
    """Each tile with its bias and its fully masked rows, which are kept for later tiles with equal masks."""
    to_come = Counter(tile.mask_id for tile in tiles if cells is None)
    held: dict[int, tuple[Tensor | None, Tensor | None]] = {}
    for tile in tiles:
        found = held.pop(tile.mask_id, None) or tile.bias(bounds, cells, dtype)
        to_come[tile.mask_id] -= 1
        if to_come[tile.mask_id] > 0:
            held[tile.mask_id] = found
        if len(held) > MAX_KEPT_BIASES:
            held.pop(next(iter(held)))
        yield tile, *found


def _unmask_fully_masked_rows(bounds: Tensor, kv_len: int, all_rows_attend: bool) -> tuple[Tensor, Tensor | None]:
    """Bounds in which fully masked rows are unmasked, to avoid NaN, and which rows these are: bool [B', H', Q', 1]."""
    if all_rows_attend:
        return bounds, None
    fully_masked = (bounds[..., 0] >= bounds[..., 1]).all(-1, keepdim=True)
    return torch.where(fully_masked[..., None], bounds.new_tensor([0, kv_len]), bounds), fully_masked
