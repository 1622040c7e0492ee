"""Attention weights ``[B, H, q_len, kv_len]``, for inspection, and attention to all keys from that to parts of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flexmask._checks import check_plain, checked_number, kind_of
from flexmask._transforms import autocast, without_autocast
from flexmask.backends.backend import refuse_in_parallel
from flexmask.backends.problem import precise_dtype
from flexmask.backends.score_mods import over_indices
from flexmask.errors import LoweringError, OperandError
from flexmask.scores.placed import PlacedScore, placed_score
from flexmask.scores.score import ScoreLike
from flexmask.tracing.trace import MaskLike, as_mask

#: The most bytes of the weights. A few tensors of this size exist at a time.
MAX_BYTES = 4 * 2**30


def attention_weights(
    query: Tensor,
    key: Tensor,
    mask: MaskLike | None = None,
    *,
    scale: float | None = None,
    score_mod: ScoreLike | None = None,
    q_offset: int | Tensor = 0,
) -> Tensor:
    """The softmax weights that :func:`flexmask.attention` computes without dropout.

    Args:
        query: ``[B, H, q_len, d_head]``, as ``return_qk`` of :class:`flexmask.MultiheadFlexAttention` gives it.
        key: ``[B, H_kv, kv_len, d_head]``; ``H_kv`` divides ``H``.
        mask: a mask, its text, or a ``mask_mod``; None for no mask.
        scale: factor of the scores; ``1 / sqrt(d_head)`` by default.
        score_mod: one of :mod:`flexmask.scores`, its text, or a function ``(score, b, h, q_idx, kv_idx) -> score``, in which
            ``q_idx`` counts from 0.
        q_offset: position of the first query, for the mask and a score of :mod:`flexmask.scores`.

    Returns:
        ``float[B, H, q_len, kv_len]``, at least float32. Each row sums to 1; a fully masked row is 0.

    Raises:
        OperandError: an argument of a wrong type.
        LoweringError: shapes that do not fit, or weights of more than 4 GiB.
    """
    change = placed_score(score_mod, q_offset)
    refuse_in_parallel("attention_weights")
    for name, tensor in (("query", query), ("key", key)):
        if isinstance(tensor, Tensor):
            check_plain(tensor, name)
        if not isinstance(tensor, Tensor) or tensor.dim() != 4:
            got = f"{list(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise OperandError(f"{name} must be a tensor [B, H, length, d_head], got {got}")
    (batch, heads, q_len, d_head), kv_len = query.shape, key.shape[2]
    if key.shape[0] != batch or key.shape[3] != d_head or not key.shape[1] or heads % key.shape[1]:
        raise LoweringError(
            f"key {list(key.shape)} does not fit query {list(query.shape)}: wanted the same B and d_head, and a number of "
            "heads of query that is a multiple of that of key"
        )
    precise = precise_dtype(query)
    size = batch * heads * q_len * kv_len * precise.itemsize
    if size > MAX_BYTES:
        raise LoweringError(f"weights of [{batch}, {heads}, {q_len}, {kv_len}] take {size / 2**30:.1f} GiB; take fewer queries")
    if isinstance(change, PlacedScore):
        change = change.of_call(query, key).function()
    factor = d_head**-0.5 if scale is None else checked_number(scale, "scale")
    query, key = (tensor.to(precise) for tensor in autocast(query, key))
    with without_autocast(query):
        scores = query @ key.repeat_interleave(heads // key.shape[1], 1).transpose(-1, -2) * factor
        if change is not None:
            indices = [torch.arange(length, device=query.device) for length in scores.shape]
            scores = over_indices(change)(scores, *indices).to(precise)
    if mask is not None:
        mask = as_mask(mask, device=query.device)
        cells = mask.dense(q_len, kv_len, batch=batch, heads=heads, q_offset=q_offset, device=query.device)
        scores = scores.masked_fill(~cells, -torch.inf)
    fully_masked = (scores == -torch.inf).all(-1, keepdim=True)
    return scores.softmax(-1).masked_fill(fully_masked, 0)


def merge_attention(outputs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The output and logsumexp of :func:`flexmask.attention` to all keys, from those of disjoint parts of the keys.

    Each part is a call with ``return_lse=True``: the same queries, some of the keys and values, and its part of the mask. A key
    in two parts counts twice. The parts may be on other backends, as of a prefix that sequences share, or of other ranks. Of
    parts with dropout the result is that of dropout with their decisions.

    ``lse = log(sum_i exp(lse_i))``, and ``output = sum_i exp(lse_i - lse) * output_i``. It is computed in float32 at least.

    Args:
        outputs: that of each part, ``[B, H, q_len, D_v]``.
        lses: the logsumexp of each part, ``[B, H, q_len]``: -inf in rows that attend to no key of the part, whose output does
            not count.

    Returns:
        The output, of the dtype of the outputs, and the logsumexp, float32, or float64 of float64: 0 and -inf in rows that are
        fully masked in each part. Both have gradients.

    Raises:
        OperandError: other arguments than tensors, outputs of several dtypes, or tensors on several devices.
        LoweringError: none, or numbers or shapes that do not fit.

    Source: the merging of ``softmax`` in "FlashAttention" (Dao et al., 2022) and "Ring Attention" (Liu et al., 2023).
    """
    for name, tensors in (("outputs", outputs), ("lses", lses)):
        if not isinstance(tensors, list | tuple):
            raise OperandError(f"merge_attention: {name} must be a list of tensors, got {kind_of(tensors)}")
        for tensor in tensors:
            if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
                raise OperandError(f"merge_attention: {name} must be floating point tensors, got {kind_of(tensor)}")
    if not outputs or len(outputs) != len(lses):
        raise LoweringError(
            f"merge_attention takes an output and a logsumexp of each part, got {len(outputs)} outputs and {len(lses)} logsumexps"
        )
    if any(out.dtype != outputs[0].dtype for out in outputs):
        raise OperandError(f"merge_attention: outputs must have one dtype, got {', '.join(str(out.dtype) for out in outputs)}")
    if any(tensor.device != outputs[0].device for tensor in (*outputs, *lses)):
        devices = ", ".join(sorted({str(tensor.device) for tensor in (*outputs, *lses)}))
        raise OperandError(f"merge_attention: outputs and lses must be on one device, got {devices}; move them with .to()")
    for out, lse in zip(outputs, lses, strict=True):
        if out.shape != outputs[0].shape or lse.shape != out.shape[:-1]:
            raise LoweringError(
                f"merge_attention: each part must have one shape, an output {list(outputs[0].shape)} and a logsumexp "
                f"{list(outputs[0].shape[:-1])}, got {list(out.shape)} and {list(lse.shape)}"
            )
    scores = torch.stack([lse.to(precise_dtype(lse)) for lse in lses])
    greatest = scores.detach().amax(0)
    weights = (scores - greatest.masked_fill(greatest == -torch.inf, 0)).exp()
    is_seen = greatest != -torch.inf  # also where it is NaN, as the result is then
    divisor = weights.sum(0).where(is_seen, 1)
    lse = (divisor.log() + greatest).where(is_seen, -torch.inf)
    counted = torch.stack(tuple(outputs)).masked_fill((weights == 0).unsqueeze(-1), 0)  # where it does not count: NaN would
    return ((weights / divisor).unsqueeze(-1) * counted).sum(0).to(outputs[0].dtype), lse
