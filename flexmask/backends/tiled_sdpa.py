"""The backend ``sdpa``: exact attention in tiles, blocks of queries against only the keys that they attend to.

Time is linear in the visible cells and memory in the lengths, forward and backward. Shapes as in `tile`.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexmask._transforms import has_values, is_captured, is_observed, is_transformed, outside_transforms
from flexmask.backends.backend import Backend, Call
from flexmask.backends.cache import shared
from flexmask.backends.dropout import Hashes
from flexmask.backends.fused_kernel import has_fused_kernel
from flexmask.backends.operators import attend_tiles, fused_with_tiles
from flexmask.backends.tile import Cells
from flexmask.backends.tile_derivatives import attend_with_score_mod
from flexmask.backends.tile_passes import FUSED_SCORES
from flexmask.backends.tile_weights import DropoutState, ScoreMod, has_nonfinite, precise_dtype
from flexmask.backends.tiling import may_be_dense
from flexmask.backends.tiling_cache import shared_tiling
from flexmask.errors import LoweringError, OperandError
from flexmask.expr.mask import ALL_CELLS, Mask
from flexmask.intervals.bind import bind
from flexmask.intervals.bounds import analyze
from flexmask.intervals.closures import mask_closure
from flexmask.intervals.context import Context
from flexmask.plans.capture import lower, lower_in_graph
from flexmask.plans.foreign import from_block_mask
from flexmask.plans.fused import Fused, fused_kind

__all__ = ["TILED_SDPA", "block_sdpa", "fused_sdpa"]

#: The key intervals and the cells of a mask.
Visible: TypeAlias = tuple[Tensor, Cells]


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
    hashes: Hashes | None = None,
) -> Tensor:
    """Attention of each query row to the keys in its key intervals; a fully masked row gives 0, and gradient 0.

    One graph of `torch.compile` serves all values of the bounds: without a callable it is one operator, with one it is the
    operations of a few tiles of all keys.

    Args:
        query: [B, H, Q, D], floating point.
        key: [B, H_kv, KV, D], of the query's dtype; query head h uses key head h // (H // H_kv).
        value: [B, H_kv, KV, Dv], of the query's dtype.
        bounds: int [B', H', Q', K, 2], disjoint key intervals [lo, hi) of each row; lo == hi: unused.
        cells: which keys of its intervals a row attends to, where these are an upper bound: bool [B or 1, H or 1, Q or 1, KV], or
            ``cells(b, h, q_idx, kv_idx)``, a mask_mod that is called with broadcasting index tensors, tile by tile.
        score_mod: ``score_mod(score, b, h, q_idx, kv_idx)`` as in FlexAttention. Gradients reach the tensors that it
            captures. This path is simple rather than fast.
        scale: factor of the scores; 1 / sqrt(D) by default.
        dropout_p: probability that a weight is dropped; the others grow by 1 / (1 - dropout_p).
        hashes: of the rows and keys, for the decisions of dropout; needed with dropout_p.

    Returns:
        [B, H, Q, Dv], of the query's dtype.

    Raises:
        LoweringError: shapes that do not fit each other, or an interval outside 0..KV.
        OperandError: dtypes that do not fit.
    """
    _check(query, key, value, bounds, cells)
    if dropout_p and hashes is None:
        raise LoweringError(f"dropout_p={dropout_p} needs hashes=(rows, keys), from flexmask.backends.dropout")
    return _attend(query, key, value, bounds, cells, score_mod=score_mod, scale=scale, dropout_p=dropout_p, hashes=hashes)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    cells: Cells,
    *,
    score_mod: ScoreMod | None,
    scale: float | None,
    dropout_p: float,
    hashes: Hashes | None,
) -> Tensor:
    """As `block_sdpa`, for arguments that fit each other."""
    if scale is None:
        scale = _default_scale(query)
    rows, keys = hashes if dropout_p and hashes is not None else (None, None)
    if score_mod is not None:
        return attend_with_score_mod(query, key, value, bounds, cells, score_mod, scale, DropoutState.make(dropout_p, rows, keys))
    if cells is None and rows is None:
        if (run := _one_interval(bounds, query, key, value)) is not None:
            return fused_sdpa(query, key[:, :, run], value[:, :, run], is_causal=False, scale=scale)
        if (out := _whole_sdpa(query, key, value, bounds, scale)) is not None:
            return out
    return attend_tiles(query, key, value, bounds, cells, scale, dropout_p, rows, keys)


def _one_interval(bounds: Tensor, query: Tensor, key: Tensor, value: Tensor) -> slice | None:
    """The slice of keys that all rows attend to where it is one interval, as for one query; None where tiles are needed."""
    if bounds.numel() != 2 or not has_fused_kernel(query, key, value):
        return None
    if is_observed(query) or is_transformed(query, key, value):
        return None
    lo, hi = bounds.flatten().tolist()
    return slice(lo, hi) if 0 <= lo < hi <= key.size(2) else None


def _whole_sdpa(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, scale: float) -> Tensor | None:
    """Attention in one call of ``scaled_dot_product_attention`` with all cells; None where tiles are needed or cheaper."""
    is_fit = has_fused_kernel(query, key, value) and query.dtype == precise_dtype(query) and query.size(1) == key.size(1)
    is_plain = not is_observed(query) and not is_transformed(query, key, value)
    if not (is_fit and is_plain and may_be_dense(query, key, FUSED_SCORES)):
        return None
    tiling = shared_tiling(bounds, query, key, most_scores=FUSED_SCORES, in_bands=True)
    if not tiling.is_dense:
        return None
    bias = tiling.dense_bias(query.dtype)
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scale)
    # A key of -inf that is masked out leaves the output as it is, but not the gradient.
    if has_nonfinite(out) or (out.requires_grad and has_nonfinite(key)):
        return None
    if not out.requires_grad:
        return out
    return fused_with_tiles(out, query, key, value, bounds, scale, tiling.fully_masked)


def fused_sdpa(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float | None = None) -> Tensor:
    """Attention under no mask or a causal one, in one call of ``scaled_dot_product_attention``.

    Unlike torch's function it has a second derivative. Shapes and dtypes as for `block_sdpa`.
    """
    gqa = True if query.size(1) != key.size(1) else False  # noqa: SIM210 - bool() of a comparison stays a symbol in a graph
    out = F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, scale=scale, enable_gqa=gqa)
    if not out.requires_grad or is_captured():
        return out
    scale = _default_scale(query) if scale is None else scale
    return fused_with_tiles(out, query, key, value, is_causal, scale)


def _default_scale(query: Tensor) -> float:
    return 1 / math.sqrt(query.size(-1))


def _check(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, cells: Cells) -> None:
    """Raises unless dtypes and shapes fit each other."""
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
        raise LoweringError(f"query has {heads} heads and key has {key.size(1)}; wanted a multiple of those of key")
    if bounds.is_floating_point() or bounds.dtype == torch.bool:
        raise OperandError(f"bounds is {bounds.dtype}; wanted an integer dtype")
    if bounds.dim() != 5 or bounds.size(4) != 2 or not _broadcasts(bounds, (batch, heads, q_len)):
        raise LoweringError(f"bounds has shape {tuple(bounds.shape)}; wanted [{batch} or 1, {heads} or 1, {q_len} or 1, K, 2]")
    if isinstance(cells, Tensor):
        if cells.dtype != torch.bool:
            raise OperandError(f"cells is {cells.dtype}; wanted torch.bool")
        if cells.dim() != 4 or not _broadcasts(cells, (batch, heads, q_len)) or cells.size(3) != key.size(2):
            wanted = f"[{batch} or 1, {heads} or 1, {q_len}, {key.size(2)}], or one row for all queries"
            raise LoweringError(f"cells has shape {tuple(cells.shape)}; wanted {wanted}")


def _broadcasts(tensor: Tensor, sizes: tuple[int, ...]) -> bool:
    # Not `axis in (1, size)`, which torch.compile does not trace for sizes that are symbols.
    return all(axis == 1 or axis == size for axis, size in zip(tensor.shape, sizes, strict=False))


# ---------------------------------------------------------------- the backend


def _supports(call: Call) -> str | None:
    if isinstance(call.mask, BlockMask) and not has_values(call.query) and not is_captured():
        return "a BlockMask has no lists without values; for tensors on meta or under FakeTensorMode give a Mask"
    return None


def _run(call: Call) -> Tensor:
    query, key, value, hashes = call.query, call.key, call.value, call.hashes()
    is_graph, is_real = is_captured(), has_values(query)
    # torch's fused kernels have no forward-mode derivative, and no second one under torch.func.
    fusible = (is_real or is_graph) and not is_transformed(query, key, value)
    # torch's causal kernel multiplies the -inf of hidden cells by the scale: NaN unless that is positive.
    is_positive = call.scale is None or call.scale > 0
    plain = call.score_mod is None and hashes is None and fusible and is_positive
    fused, visible = _visible(call, plain=plain)
    if visible is None:
        return fused_sdpa(query, key, value, is_causal=fused == "causal", scale=call.scale)
    return _attend(
        query, key, value, *visible, score_mod=call.score_mod, scale=call.scale, dropout_p=call.dropout_p, hashes=hashes
    )


def _visible(call: Call, *, plain: bool) -> tuple[Fused, Visible | None]:
    """The kind of fused call, or the key intervals and cells of the mask; they are None where a fused call is enough."""
    query, mask = call.query, call.mask
    if isinstance(mask, BlockMask):
        return None, from_block_mask(mask)
    if mask is None:
        if plain:
            return "whole", None
        mask = ALL_CELLS
    if isinstance(mask, Mask) and torch.compiler.is_compiling():
        mask = lower_in_graph(mask, query, call.key, call.q_offset, block_size=(0, 0))
    elif isinstance(mask, Mask) and is_captured():
        mask = lower(_bound(mask, call), (0, 0))
    elif isinstance(mask, Mask):
        make = partial(_lower, mask, call, plain=plain)
        if not has_values(query):
            return make(shapes_only=True)
        setting = *query.shape[:3], call.key.shape[2], query.device, plain
        with outside_transforms():
            return shared(mask, ("sdpa", *setting), call.q_offset, make)
    return (mask.fused, None) if plain and mask.fused else (None, (mask.bounds, mask.cells))


def _bound(mask: Mask, call: Call) -> Context:
    (batch, heads, q_len, _), device = call.query.shape, call.query.device
    return bind(mask, q_len, call.key.shape[2], batch=batch, heads=heads, q_offset=call.q_offset, device=device)


def _lower(mask: Mask, call: Call, *, plain: bool, shapes_only: bool = False) -> tuple[Fused, Visible | None]:
    """As :func:`_visible`. With ``shapes_only`` the mask is only checked, and the bounds are placeholders."""
    context = _bound(mask, call)
    if plain and (fused := fused_kind(context)):
        return fused, None
    if shapes_only:
        return None, (torch.tensor([[[[[-1, 0]]]]], dtype=torch.int32, device="cpu").to(context.device), None)
    rows = analyze(context)
    return None, (rows.upper.bounds, None if rows.exact else mask_closure(context))


TILED_SDPA = Backend("sdpa", supports=_supports, run=_run)
