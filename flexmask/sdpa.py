"""Exact masked attention in tiles: blocks of queries, each against only the keys that its rows can see.

Time follows what is visible and memory is linear in the lengths, forward and backward. Shapes as in `tiles`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from flexmask.dropout import kept
from flexmask.errors import LoweringError, OperandError
from flexmask.tile_plan import plan_tiles
from flexmask.tiles import CellMod, Cells, Tile

__all__ = ["CellMod", "ScoreMod", "block_sdpa"]

ScoreMod: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

# The most scores of a tile. The backward pass writes several arrays of that size, which on a CPU should fit the cache.
FORWARD_SCORES = 2**26
BACKWARD_SCORES = 2**25
BACKWARD_SCORES_PER_THREAD = 2**19
# How many masks are kept for tiles to come: a window needs 1, packed documents of n blocks each need n.
KEPT_PICTURES = 4


@dataclass(frozen=True, eq=False)
class Drop:
    """Dropout of weights: its probability, and the seed that decides, int64 without axes."""

    p: float
    seed: Tensor

    @classmethod
    def of(cls, p: float, seed: Tensor | None) -> Drop | None:
        return None if seed is None else cls(p, seed)

    def factors(self, tile: Tile, like: Tensor) -> Tensor:
        """What the folded weights of a tile are multiplied by: 0 where dropped, else 1 / (1 - p)."""
        b, h, q_idx, kv_idx = tile.indices(like.device)
        keep = kept(self.seed, b[:, None, None, None], h[:, None, None], q_idx[:, None], kv_idx, self.p)
        folded = keep.reshape(len(tile.elements), len(tile.key_heads), tile.group * len(tile.rows), kv_idx.numel())
        return folded.to(like.dtype).mul_(1 / (1 - self.p) if self.p < 1 else 0)


def block_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    *,
    cells: Cells = None,
    score_mod: ScoreMod | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
) -> Tensor:
    """Attention of each query row to the keys in its intervals; a row that sees no key gives 0, and gradient 0.

    It is one operator, so `torch.compile` keeps one graph whatever the bounds hold; with a callable it is eager only.

    Args:
        query: [B, H, Q, D], floating point.
        key: [B, H_kv, KV, D], of the query's dtype; query head h uses key head h // (H // H_kv).
        value: [B, H_kv, KV, Dv], of the query's dtype.
        bounds: int [B', H', Q', K, 2], disjoint intervals [lo, hi) of the keys that a row sees; lo == hi: unused.
        cells: which keys of its intervals a row sees, where these are an upper bound: bool [B or 1, H or 1, Q, KV], or
            ``cells(b, h, q_idx, kv_idx)``, a mask_mod that is called with broadcasting index tensors, tile by tile.
        score_mod: ``score_mod(score, b, h, q_idx, kv_idx)`` as in FlexAttention. Gradients reach the tensors that it
            captures. Simple rather than fast.
        scale: factor of the scores; 1 / sqrt(D) by default.
        dropout_p: probability that a weight is dropped; the others grow by 1 / (1 - dropout_p).
        seed: int64 without axes, from which the decisions follow (see `dropout`); wanted with dropout_p.

    Returns:
        [B, H, Q, Dv], of the query's dtype.

    Raises:
        LoweringError: shapes that do not fit each other, or an interval outside 0..KV.
        OperandError: dtypes that do not fit.
    """
    if torch.is_autocast_enabled(query.device.type):
        query, key, value = (_autocast(tensor) for tensor in (query, key, value))
    _check(query, key, value, bounds, cells)
    if dropout_p and seed is None:
        raise LoweringError(f"dropout_p={dropout_p} needs a seed, a tensor int64 without axes")
    if scale is None:
        scale = 1 / math.sqrt(query.size(-1)) if query.size(-1) else 1.0
    drop = Drop.of(dropout_p, seed) if dropout_p else None
    if score_mod is not None:
        return _modified_sdpa(query, key, value, bounds, cells, score_mod, scale, drop)
    if cells is None or isinstance(cells, Tensor):
        return cast(Tensor, _block_sdpa(query, key, value, bounds, cells, scale, dropout_p, seed if drop else None))
    return cast(Tensor, _CallableCells.apply(query, key, value, bounds, cells, scale, drop))  # type: ignore[no-untyped-call]


def _autocast(tensor: Tensor) -> Tensor:
    """What autocast does to the inputs of scaled_dot_product_attention."""
    return tensor if tensor.dtype == torch.float64 else tensor.to(torch.get_autocast_dtype(tensor.device.type))


def _check(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, cells: Cells) -> None:
    """Raise unless dtypes and shapes fit each other."""
    if not query.is_floating_point() or not query.dtype == key.dtype == value.dtype:
        raise OperandError(
            f"query, key and value are {query.dtype}, {key.dtype} and {value.dtype}; wanted one floating-point dtype"
        )
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 4:
            raise LoweringError(f"{name} has shape {tuple(tensor.shape)}; wanted [batch, heads, length, head_dim]")
    batch, heads, q_len, dim = query.shape
    if key.size(0) != batch or key.size(3) != dim or key.shape[:3] != value.shape[:3]:
        raise LoweringError(
            f"query, key and value have shapes {tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}; "
            "wanted [B, H, Q, D], [B, H_kv, KV, D] and [B, H_kv, KV, Dv]"
        )
    if key.size(1) == 0 or heads % key.size(1):
        raise LoweringError(f"query has {heads} heads and key has {key.size(1)}; wanted a multiple")
    if bounds.is_floating_point() or bounds.dtype == torch.bool:
        raise OperandError(f"bounds is {bounds.dtype}; wanted an integer dtype")
    if bounds.dim() != 5 or bounds.size(4) != 2 or not _broadcasts(bounds, (batch, heads, q_len)):
        raise LoweringError(f"bounds has shape {tuple(bounds.shape)}; wanted [{batch} or 1, {heads} or 1, {q_len} or 1, K, 2]")
    if isinstance(cells, Tensor):
        if cells.dtype != torch.bool:
            raise OperandError(f"cells is {cells.dtype}; wanted torch.bool")
        if cells.dim() != 4 or not _broadcasts(cells, (batch, heads)) or cells.shape[2:] != (q_len, key.size(2)):
            wanted = f"[{batch} or 1, {heads} or 1, {q_len}, {key.size(2)}]"
            raise LoweringError(f"cells has shape {tuple(cells.shape)}; wanted {wanted}")


def _broadcasts(tensor: Tensor, sizes: tuple[int, ...]) -> bool:
    return all(axis in (1, size) for axis, size in zip(tensor.shape, sizes, strict=False))


def _forward(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, cells: Cells, scale: float, drop: Drop | None) -> Tensor:
    out = _new_out(query, value)
    most_scores = FORWARD_SCORES if drop is None else _backward_scores(query)
    tiles, sighted = plan_tiles(bounds, query, key, most_scores=most_scores)
    bounds, blind = _open_blind_rows(bounds, key.size(2), sighted)
    with torch.autocast(query.device.type, enabled=False):
        for tile, bias, emptied in _biased(tiles, bounds, cells, query.dtype):
            q, k, v = tile.fold(query), tile.keys_of(key), tile.keys_of(value)
            if drop is None:
                part = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)
            else:
                part = _dropped_sdpa(q, k, v, bias, scale, tile, drop)
            if emptied is not None:
                part = part.masked_fill(emptied, 0)
            out[tile.place] = tile.unfold(part)
    return out if blind is None else out.masked_fill_(blind, 0)


def _dropped_sdpa(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, tile: Tile, drop: Drop) -> Tensor:
    """What scaled_dot_product_attention does, with dropout; computed in float32 at least."""
    precise = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(precise) * scale @ k.to(precise).mT
    if bias is not None:
        scores.add_(bias)
    return (torch.softmax(scores, -1).mul_(drop.factors(tile, scores)) @ v.to(precise)).to(q.dtype)


def _backward_scores(query: Tensor) -> int:
    on_cpu = query.device.type == "cpu"
    return BACKWARD_SCORES_PER_THREAD * torch.get_num_threads() if on_cpu else BACKWARD_SCORES


def _backward(
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
    bounds, blind = _open_blind_rows(bounds, key.size(2), sighted)
    if blind is not None:
        grad = grad.masked_fill(blind, 0)
    dtype, precise = query.dtype, torch.promote_types(query.dtype, torch.float32)
    grad, query, key, value, out = (tensor.to(precise) for tensor in (grad, query, key, value, out))
    grad_query = torch.empty_like(query) if blind is None else torch.zeros_like(query)
    grad_key, grad_value = torch.zeros_like(key), torch.zeros_like(value)
    query = query * scale
    shift = (grad * out).sum(-1, keepdim=True)
    with torch.autocast(query.device.type, enabled=False):
        for tile, bias, emptied in _biased(tiles, bounds, cells, precise):
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
            grad_query[tile.place] = tile.unfold(grad_scores @ k)
    return grad_query.mul_(scale).to(dtype), grad_key.to(dtype), grad_value.to(dtype)


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


def _new_out(query: Tensor, value: Tensor) -> Tensor:
    """Room for [B, H, Q, Dv], the heads of a token side by side in memory as the projection after it wants them."""
    batch, heads, q_len, _ = query.shape
    return query.new_empty(batch, q_len, heads, value.size(3)).transpose(1, 2)


def _open_blind_rows(bounds: Tensor, kv_len: int, sighted: bool) -> tuple[Tensor, Tensor | None]:
    """Bounds in which rows without a key see all of them, and which rows these are: bool [B', H', Q', 1]."""
    if sighted:
        return bounds, None
    blind = (bounds[..., 0] >= bounds[..., 1]).all(-1, keepdim=True)
    return torch.where(blind[..., None], bounds.new_tensor([0, kv_len]), bounds), blind


# ---------------------------------------------------------------- the operator


@torch.library.custom_op("flexmask::block_sdpa", mutates_args=())
def _block_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    cells: Tensor | None,
    scale: float,
    dropout_p: float,
    seed: Tensor | None,
) -> Tensor:
    return _forward(query, key, value, bounds, cells, scale, Drop.of(dropout_p, seed))


@torch.library.custom_op("flexmask::block_sdpa_backward", mutates_args=())
def _block_sdpa_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    bounds: Tensor,
    cells: Tensor | None,
    seed: Tensor | None,
    scale: float,
    dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return _backward(grad, query, key, value, out, bounds, cells, scale, Drop.of(dropout_p, seed))


@_block_sdpa.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
    return _new_out(query, value)


@_block_sdpa_backward.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    query, key, value, bounds, cells, ctx.scale, ctx.dropout_p, seed = inputs
    ctx.save_for_backward(query, key, value, output, bounds, cells, seed)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return (*_block_sdpa_backward(grad, *ctx.saved_tensors, ctx.scale, ctx.dropout_p), *[None] * 5)


def _refuse(ctx: Any, *grads: Tensor) -> None:
    raise LoweringError("block_sdpa has no second derivative; wanted a loss that differentiates it once")


_block_sdpa.register_autograd(_differentiate, setup_context=_keep)
_block_sdpa_backward.register_autograd(_refuse)


class _CallableCells(torch.autograd.Function):
    """The same forward and backward for cells that are a callable, which no operator can take."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, cells: CellMod, scale: float, drop: Drop | None
    ) -> Tensor:
        out = _forward(query, key, value, bounds, cells, scale, drop)
        ctx.save_for_backward(query, key, value, out, bounds)
        ctx.cells, ctx.scale, ctx.drop = cells, scale, drop
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, bounds = ctx.saved_tensors
        return (*_backward(grad, query, key, value, out, bounds, ctx.cells, ctx.scale, ctx.drop), *[None] * 4)


# ---------------------------------------------------------------- with a score_mod


def _modified_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    cells: Cells,
    score_mod: ScoreMod,
    scale: float,
    drop: Drop | None,
) -> Tensor:
    tiles, _ = plan_tiles(bounds, query, key)
    if not tiles:
        return cast(Tensor, _block_sdpa(query, key, value, bounds, None, scale, 0.0, None))
    score_mod = _over_indices(score_mod)

    def compute(tile: Tile, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return _modified_tile(tile, query, key, value, tile.visible(bounds, cells), score_mod, scale, drop)

    # Checkpoints keep the memory of the backward pass linear: the scores of one tile exist at a time.
    return torch.cat([checkpoint(compute, tile, query, key, value, use_reentrant=False) for tile in tiles], 2)


def _modified_tile(
    tile: Tile,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor | None,
    score_mod: ScoreMod,
    scale: float,
    drop: Drop | None,
) -> Tensor:
    precise = torch.promote_types(query.dtype, torch.float32)
    q, k, v = (part.to(precise) for part in (tile.fold(query), tile.keys_of(key), tile.keys_of(value)))
    with torch.autocast(query.device.type, enabled=False):
        scores = tile.unfold(q @ k.mT * scale)
        if tile.runs:
            scores = score_mod(scores, *tile.indices(query.device)).to(precise)
        if visible is not None:
            scores = scores.masked_fill(~visible, -math.inf)
        blind = (scores == -math.inf).all(-1, keepdim=True)
        weights = torch.softmax(scores.masked_fill(blind, 0), -1).masked_fill(blind, 0)
        weights = weights.reshape(*q.shape[:3], k.size(2))
        if drop is not None:
            weights = weights * drop.factors(tile, weights)
        return tile.unfold(weights @ v).to(query.dtype)


def _over_indices(score_mod: ScoreMod) -> ScoreMod:
    """Map a function of scalars over [b, h, q, kv] as FlexAttention does, so that `bias[b][h]` means what it says."""
    mapped: Callable[..., Tensor] = score_mod
    for axis in (4, 3, 2, 1):
        mapped = torch.vmap(mapped, in_dims=(0, *(0 if axis == i else None for i in range(1, 5))))
    return mapped
