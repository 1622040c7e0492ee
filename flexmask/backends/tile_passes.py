"""Attention in tiles and its gradient, as fast as they go: with the scores of one tile at a time, in the cache of a CPU.

Shapes as in `tiles`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from flexmask.backends.tile import Cells, Tile
from flexmask.backends.tile_weights import Drop, attend, is_tainted, precise_dtype, weights_of, without_autocast
from flexmask.backends.tiling import plan_tiles

__all__ = ["backward", "forward", "new_out"]

# The most scores of a tile. The backward pass writes several arrays of that size, which on a CPU should fit the cache.
FORWARD_SCORES = 2**26
BACKWARD_SCORES = 2**25
BACKWARD_SCORES_PER_THREAD = 2**19
# How many masks are kept for tiles to come: a window needs 1, packed documents of n blocks each need n.
KEPT_PICTURES = 4


def new_out(query: Tensor, value: Tensor) -> Tensor:
    """Room for [B, H, Q, Dv], the heads of a token side by side in memory as the projection after it wants them."""
    batch, heads, q_len, _ = query.shape
    width = value.size(3)
    # No view, whose tangents autograd would want in the same layout.
    return query.new_empty_strided((batch, heads, q_len, width), (q_len * heads * width, width, heads * width, 1))


def forward(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, cells: Cells, scale: float, drop: Drop | None) -> Tensor:
    """The output, [B, H, Q, Dv]."""
    out = new_out(query, value)
    most_scores = FORWARD_SCORES if drop is None else _backward_scores(query)
    tiles, sighted = plan_tiles(bounds, query, key, most_scores=most_scores)
    opened, blind = _open_blind_rows(bounds, key.size(2), sighted)
    tainted = False
    with without_autocast(query):
        for tile, bias, emptied in _biased(tiles, opened, cells, query.dtype):
            q, k, v = tile.fold(query), tile.keys_of(key), tile.keys_of(value)
            if drop is None:
                part = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)
            else:
                part = _dropped_sdpa(q, k, v, bias, scale, tile, drop)
            if emptied is not None:
                part = part.masked_fill(emptied, 0)
            tainted = tainted or is_tainted(part)  # here, since the part is in the cache
            out[tile.place] = tile.unfold(part)
    if blind is not None:
        out.masked_fill_(blind, 0)
    if tainted:
        _redo(out, query, key, value, bounds, cells, scale, drop)
    return out


def _redo(
    out: Tensor, query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, cells: Cells, scale: float, drop: Drop | None
) -> None:
    """Compute the tiles with NaN or inf again, so that these reach only the rows that attend to them."""
    for tile in plan_tiles(bounds, query, key, most_scores=_backward_scores(query))[0]:
        if is_tainted(out[tile.place]):
            q, k, v = (part.to(precise_dtype(query)) for part in (tile.fold(query), tile.keys_of(key), tile.keys_of(value)))
            part = attend(tile, q * scale, k, v, tile.visible(bounds, cells), None, drop, careful=True)
            out[tile.place] = tile.unfold(part).to(out.dtype)


def _dropped_sdpa(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, tile: Tile, drop: Drop) -> Tensor:
    """What scaled_dot_product_attention does, with dropout; computed in float32 at least."""
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
    drop: Drop | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value, computed in float32 at least."""
    tiles, sighted = plan_tiles(bounds, query, key, most_scores=_backward_scores(query))
    opened, blind = _open_blind_rows(bounds, key.size(2), sighted)
    if blind is not None:
        grad = grad.masked_fill(blind, 0)
    dtype, precise = query.dtype, precise_dtype(query)
    grad, query, key, value, out = (tensor.to(precise) for tensor in (grad, query, key, value, out))
    grad_query = torch.empty_like(query) if blind is None else torch.zeros_like(query)
    grad_key, grad_value = torch.zeros_like(key), torch.zeros_like(value)
    query = query * scale
    shift = (grad * out).sum(-1, keepdim=True)
    tainted = False
    with without_autocast(query):
        for tile, bias, emptied in _biased(tiles, opened, cells, precise):
            q, k, v, grad_out = tile.fold(query), tile.keys_of(key), tile.keys_of(value), tile.fold(grad)
            if emptied is not None:
                grad_out = grad_out.masked_fill(emptied, 0)
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
            tainted = tainted or is_tainted(part)
            grad_query[tile.place] = tile.unfold(part)
        if tainted:
            grad_query, grad_key, grad_value = (tensor.zero_() for tensor in (grad_query, grad_key, grad_value))
            for tile in tiles:
                parts = [tile.fold(query), tile.keys_of(key), tile.keys_of(value)]
                grads = _careful_gradients(tile, parts, tile.fold(grad), tile.visible(bounds, cells), drop)
                grad_query[tile.place] = tile.unfold(grads[0])
                tile.add_to_keys(grad_key, grads[1])
                tile.add_to_keys(grad_value, grads[2])
    return grad_query.mul_(scale).to(dtype), grad_key.to(dtype), grad_value.to(dtype)


def _careful_gradients(
    tile: Tile, parts: Sequence[Tensor], grad_out: Tensor, visible: Tensor | None, drop: Drop | None
) -> tuple[Tensor, ...]:
    """The gradients of a tile, in which NaN and inf of keys and values reach only the rows that attend to them."""
    q, k, v = parts
    broken = ~k.isfinite().all(-1)
    weights = weights_of(tile, q, k, visible, broken=None if visible is None else broken)
    factors = 1.0 if drop is None else drop.factors(tile, weights)
    grad_weights = grad_out @ v.masked_fill(~v.isfinite(), 0).mT * factors
    grad_scores = weights * (grad_weights - (weights * grad_weights).sum(-1, keepdim=True))
    if visible is not None:  # in a row with NaN that is where weights are 0 too
        grad_scores = tile.unfold(grad_scores).masked_fill(~visible, 0).reshape(weights.shape)
    grad_q = grad_scores @ k.masked_fill(broken.unsqueeze(-1), 0)
    return grad_q, grad_scores.mT @ q, (weights * factors).mT @ grad_out


def _biased(
    tiles: list[Tile], bounds: Tensor, cells: Cells, dtype: torch.dtype
) -> Iterator[tuple[Tile, Tensor | None, Tensor | None]]:
    """Each tile with its bias and blind rows, which are held for tiles to come that show the same."""
    to_come = Counter(tile.picture for tile in tiles if cells is None)
    held: dict[int, tuple[Tensor | None, Tensor | None]] = {}
    for tile in tiles:
        found = held.pop(tile.picture, None) or tile.bias(bounds, cells, dtype)
        to_come[tile.picture] -= 1
        if to_come[tile.picture] > 0:
            held[tile.picture] = found
        if len(held) > KEPT_PICTURES:
            held.pop(next(iter(held)))
        yield tile, *found


def _open_blind_rows(bounds: Tensor, kv_len: int, sighted: bool) -> tuple[Tensor, Tensor | None]:
    """Bounds in which rows without a key see all of them, and which rows these are: bool [B', H', Q', 1]."""
    if sighted:
        return bounds, None
    blind = (bounds[..., 0] >= bounds[..., 1]).all(-1, keepdim=True)
    return torch.where(blind[..., None], bounds.new_tensor([0, kv_len]), bounds), blind
