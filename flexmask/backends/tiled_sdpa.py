"""The backend ``sdpa``: exact attention in tiles, blocks of queries against only the keys that they attend to.

Time is linear in the visible cells and memory in the lengths, forward and backward. Shapes as in `tile`.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexmask._transforms import has_values, is_captured, is_forward_mode, is_observed, is_transformed, outside_transforms
from flexmask.backends.backend import Backend, Call, Output
from flexmask.backends.cache import shared
from flexmask.backends.operators import FusedWithTiles, attend_tiles
from flexmask.backends.problem import Problem, precise_dtype
from flexmask.backends.tile import Cells
from flexmask.backends.tile_passes import FUSED_SCORES, differentiable_attention, has_nonfinite
from flexmask.backends.tiling import may_be_dense
from flexmask.expr.mask import ALL_CELLS, Mask
from flexmask.intervals.bands import Fused, fused_kind
from flexmask.intervals.bounds import analyze
from flexmask.intervals.closures import mask_closure
from flexmask.plans.capture import lower, lower_in_graph
from flexmask.plans.lowered import from_block_mask
from flexmask.scores.placed import PlacedScore
from flexmask.scores.score import ScoreMod

#: The key intervals and the cells of a mask.
Visible: TypeAlias = tuple[Tensor, Cells]


def attend(problem: Problem, score_mod: ScoreMod | None = None) -> tuple[Tensor, Tensor | None]:
    """The output [B, H, Q, Dv] of a problem, and the logsumexp; a fully masked row gives 0 and -inf, and gradient 0.

    One graph of `torch.compile` serves all values of the bounds: without a callable it is one operator, with one it is the
    operations of a few tiles of all keys.

    Args:
        problem: what is computed.
        score_mod: ``score_mod(score, b, h, q_idx, kv_idx)`` as in FlexAttention. Gradients reach the tensors that it
            captures. This path is simple rather than fast.

    Raises:
        LoweringError: an interval outside 0..KV.
    """
    is_scored = problem.bias is not None or problem.cap is not None
    if score_mod is not None or (is_scored and problem.is_transformed()) or is_forward_mode(*problem.tensors):
        return differentiable_attention(problem, score_mod)
    is_plain = problem.cells is None and problem.is_fused and not problem.with_lse and problem.bias is None
    if is_plain and not is_observed(problem.query) and not problem.is_transformed():
        if (run := _one_interval(problem)) is not None:
            query, key, value = problem.tensors
            return fused_sdpa(query, key[:, :, run], value[:, :, run], problem.scale, is_causal=False), None
        if (out := _whole_sdpa(problem)) is not None:
            return out, None
    return attend_tiles(problem)


def _one_interval(problem: Problem) -> slice | None:
    """The slice of keys that all rows attend to where it is one interval, as for one query; None where tiles are needed."""
    bounds = problem.bounds
    if bounds.numel() != 2:
        return None
    lo, hi = bounds.flatten().tolist()
    return slice(lo, hi) if 0 <= lo < hi <= problem.key.size(2) else None


def _whole_sdpa(problem: Problem) -> Tensor | None:
    """Attention in one call of ``scaled_dot_product_attention`` with all cells; None where tiles are needed or cheaper."""
    query, key, value = problem.tensors
    is_fit = query.dtype == precise_dtype(query) and query.size(1) == key.size(1)
    if not is_fit or not may_be_dense(query, key, FUSED_SCORES):
        return None
    tiling = problem.tiling(FUSED_SCORES, in_bands=True)
    if not tiling.is_dense:
        return None
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=tiling.dense_bias(query.dtype), scale=problem.scale)
    # A key of -inf that is masked out leaves the output as it is, but not the gradient.
    if has_nonfinite(out) or (out.requires_grad and has_nonfinite(key)):
        return None
    if not out.requires_grad:
        return out
    given = *problem.tensors, problem.bounds, False, problem.scale, tiling.fully_masked
    return cast(Tensor, FusedWithTiles.apply(out, *given))  # type: ignore[no-untyped-call]


def fused_sdpa(query: Tensor, key: Tensor, value: Tensor, scale: float, *, is_causal: bool) -> Tensor:
    """Attention under no mask or a causal one, in one call of ``scaled_dot_product_attention``.

    Unlike torch's function it has a second derivative. Shapes and dtypes as of a `Problem`.
    """
    gqa = True if query.size(1) != key.size(1) else False  # noqa: SIM210 - bool() of a comparison stays a symbol in a graph
    out = F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, scale=scale, enable_gqa=gqa)
    if not out.requires_grad or is_captured():
        return out
    return cast(Tensor, FusedWithTiles.apply(out, query, key, value, None, is_causal, scale, None))  # type: ignore[no-untyped-call]


# ---------------------------------------------------------------- the backend


def _supports(call: Call) -> str | None:
    if call.kernel_options:
        return "kernel_options are those of FlexAttention; use backend='flex', or 'auto', for which they have no effect on 'sdpa'"
    if isinstance(call.mask, BlockMask) and not has_values(call.query) and not is_captured():
        return "a BlockMask has no lists without values; for tensors on meta or under FakeTensorMode give a Mask"
    return None


def _run(call: Call) -> Output:
    query, key, value, hashes = call.query, call.key, call.value, call.hashes()
    # torch's fused kernels have no forward-mode derivative, and no second one under torch.func.
    fusible = (has_values(query) or is_captured()) and not is_transformed(query, key, value)
    # torch's causal kernel multiplies the -inf of hidden cells by the scale: NaN unless that is positive.
    is_positive = call.scale is None or call.scale > 0
    plain = call.score_mod is None and hashes is None and fusible and is_positive and not call.return_lse
    fused, visible = _visible(call, plain=plain)
    scale = 1 / math.sqrt(query.size(-1)) if call.scale is None else call.scale
    if visible is None:
        return fused_sdpa(query, key, value, scale, is_causal=fused == "causal")
    rows, keys = hashes or (None, None)
    form = call.score_mod.form() if isinstance(call.score_mod, PlacedScore) else None
    bias, cap = form or (None, None)
    learns_bias = bias is not None and bias.requires_grad and torch.is_grad_enabled()
    problem = Problem(query, key, value, *visible, scale, call.dropout_p, rows, keys, call.return_lse, bias, cap, learns_bias)
    out, lse = attend(problem, call.score_mod if form is None else None)
    return out if lse is None or not call.return_lse else (out, lse)


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
        mask = lower(call.bound(mask), (0, 0))
    elif isinstance(mask, Mask):
        make = partial(_lower, mask, call, plain=plain)
        if not has_values(query):
            return make(shapes_only=True)
        setting = *query.shape[:3], call.key.shape[2], query.device, plain
        with outside_transforms():
            return shared(mask, ("sdpa", *setting), call.q_offset, make)
    return (mask.fused, None) if plain and mask.fused else (None, (mask.bounds, mask.cells))


def _lower(mask: Mask, call: Call, *, plain: bool, shapes_only: bool = False) -> tuple[Fused, Visible | None]:
    """As :func:`_visible`. With ``shapes_only`` the mask is only checked, and the bounds are placeholders."""
    context = call.bound(mask)
    if plain and (fused := fused_kind(context)):
        return fused, None
    if shapes_only:
        return None, (torch.tensor([[[[[-1, 0]]]]], dtype=torch.int32, device="cpu").to(context.device), None)
    rows = analyze(context)
    return None, (rows.upper.bounds, None if rows.exact else mask_closure(context))


TILED_SDPA = Backend("sdpa", supports=_supports, run=_run)
