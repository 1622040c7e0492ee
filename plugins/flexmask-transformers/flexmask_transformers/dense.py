"""Attention with a dense mask: in graphs of ``torch.compile``, for a single query, and for 4-D tensors that users give."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flexmask_transformers.scores import Scores, append_sink

__all__ = ["dense_attention"]


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scores: Scores,
    *,
    is_causal: bool = False,
    documents: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attention ``[B, H, q_len, D_v]`` with a dense mask.

    Args:
        query: ``[B, H, q_len, D]``.
        key: ``[B, H_kv, kv_len, D]``.
        value: ``[B, H_kv, kv_len, D_v]``.
        mask: ``bool[B, 1 or H, q_len, kv_len]``, True for visible, or ``float``, which is added to the scores.
        scores: scale, soft-capping, position bias and sink.
        is_causal: whether queries attend to no later keys; without a mask.
        documents: ``int[B, kv_len]``, the document of each token, for ``q_len == kv_len``.
        dropout: probability that a weight is dropped.
    """
    q_len, kv_len = query.shape[2], key.shape[2]
    options: dict[str, Any] = {"dropout_p": dropout, "scale": scores.scale, "enable_gqa": query.shape[1] != key.shape[1]}
    if mask is None and documents is None and scores.is_scaling and (not is_causal or scores.scale > 0):  # is_causal: else NaN
        return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, **options)
    if mask is None and is_causal:
        mask = torch.ones(q_len, kv_len, dtype=torch.bool, device=query.device).tril()[None, None]
    if documents is not None:
        same = (documents[:, None, :, None] == documents[:, None, None, :]).to(query.device)
        mask = same if mask is None else mask & same if mask.dtype == torch.bool else _float(same, mask)
    if scores.position_bias is not None:
        bias = scores.position_bias[..., :kv_len]
        mask = bias if mask is None else _float(mask, bias) if mask.dtype == torch.bool else mask + bias
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.clamp(min=torch.finfo(query.dtype).min).to(query.dtype)  # -inf in a whole row would give NaN
    if scores.softcap is not None:
        return _attend_capped(query, key, value, mask, scores, scores.softcap, dropout)
    if scores.sink is not None:
        query, key, value = append_sink(query, key, value, scores.sink, scores.scale)
        mask = mask if mask is None else F.pad(mask, (0, 1), value=True if mask.dtype == torch.bool else 0.0)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, **options)


def _attend_capped(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scores: Scores, softcap: float, dropout: float
) -> Tensor:
    """Attention with soft-capping, which no function of torch has. A sink is not capped."""
    key, value = (tensor.repeat_interleave(query.shape[1] // tensor.shape[1], 1) for tensor in (key, value))
    capped = softcap * torch.tanh(query @ key.mT * (scores.scale / softcap))
    if mask is not None:
        capped = _float(mask, capped) if mask.dtype == torch.bool else capped + mask
    if scores.sink is not None:
        sink = scores.sink.to(capped.dtype).view(1, -1, 1, 1).expand(*capped.shape[:3], 1)
        capped = torch.cat([capped, sink], -1)
    weights = torch.softmax(capped, -1, dtype=torch.float32).to(query.dtype)[..., : key.shape[2]]
    return F.dropout(weights, dropout) @ value


def _float(visible: Tensor, scores: Tensor) -> Tensor:
    """Scores, with the least number of their dtype where a cell is masked out, as in ``eager``."""
    return torch.where(visible, scores, torch.finfo(scores.dtype).min)
