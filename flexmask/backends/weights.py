"""Attention weights: what attention multiplies the values with, written out for looking at."""

from __future__ import annotations

import torch
from torch import Tensor

from flexmask._checks import number, unfit
from flexmask.backends.api import check_options
from flexmask.backends.tiled_sdpa import ScoreMod
from flexmask.errors import LoweringError, OperandError
from flexmask.tracing.as_mask import MaskLike, as_mask

__all__ = ["attention_weights"]

#: The largest table of weights in bytes; a few of that size are held at a time.
MAX_BYTES = 4 * 2**30


def attention_weights(
    query: Tensor,
    key: Tensor,
    mask: MaskLike | None = None,
    *,
    scale: float | None = None,
    score_mod: ScoreMod | None = None,
    q_offset: int | Tensor = 0,
) -> Tensor:
    """The softmax of the scores over the keys that the mask shows, as :func:`flexmask.attention` has it without dropout.

    Args:
        query: ``[B, H, q_len, d_head]``, as ``return_qk`` of :class:`flexmask.MultiheadFlexAttention` gives it.
        key: ``[B, H_kv, kv_len, d_head]``; ``H_kv`` divides ``H``.
        mask: what each query may see: a mask, its text, or a ``mask_mod``; None for everything.
        scale: of the scores, by default ``1 / sqrt(d_head)``.
        score_mod: ``(score, b, h, q_idx, kv_idx) -> score``, as of FlexAttention; ``q_idx`` counts from 0.
        q_offset: position of the first query.

    Returns:
        ``float[B, H, q_len, kv_len]``, at least float32. Each row sums to 1, or is 0 where it sees no key.

    Raises:
        OperandError: what is not a tensor or a mask.
        LoweringError: shapes that do not fit, or weights of more than 4 GiB.
    """
    check_options(score_mod, scale)
    for name, tensor in (("query", query), ("key", key)):
        if isinstance(tensor, Tensor) and (reason := unfit(tensor)):
            raise OperandError(f"{name} must be a plain tensor, got {reason}")
        if not isinstance(tensor, Tensor) or tensor.dim() != 4:
            got = f"{list(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise OperandError(f"{name} must be a tensor [B, H, length, d_head], got {got}")
    (batch, heads, q_len, d_head), kv_len = query.shape, key.shape[2]
    if key.shape[0] != batch or key.shape[3] != d_head or not key.shape[1] or heads % key.shape[1]:
        raise LoweringError(f"key {list(key.shape)} does not fit query {list(query.shape)}: B, d_head, and H a multiple of H_kv")
    precise = torch.promote_types(query.dtype, torch.float32)
    size = batch * heads * q_len * kv_len * precise.itemsize
    if size > MAX_BYTES:
        raise LoweringError(f"weights of [{batch}, {heads}, {q_len}, {kv_len}] take {size / 2**30:.1f} GiB; take fewer queries")
    factor = d_head**-0.5 if scale is None else number(scale, "scale")
    scores = query.to(precise) @ key.to(precise).repeat_interleave(heads // key.shape[1], 1).transpose(-1, -2) * factor
    if score_mod is not None:
        b, h, q, kv = (
            torch.arange(length, device=query.device).view([-1 if axis == place else 1 for axis in range(4)])
            for place, length in enumerate(scores.shape)
        )
        scores = score_mod(scores, b, h, q, kv)
    if mask is not None:
        mask = as_mask(mask, device=query.device)
        cells = mask.dense(q_len, kv_len, batch=batch, heads=heads, q_offset=q_offset, device=query.device)
        scores = scores.masked_fill(~cells, -torch.inf)
    blind = (scores == -torch.inf).all(-1, keepdim=True)
    return scores.softmax(-1).masked_fill(blind, 0)
