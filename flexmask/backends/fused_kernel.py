"""torch's fused attention kernel for the CPU, which ``scaled_dot_product_attention`` calls, with the logsumexp and its gradient.

Shapes as in `tile`; B, H and H_kv may be those of a tile.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# torch has no public function that returns the logsumexp on the CPU.
_FORWARD: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
_BACKWARD: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None)


def has_fused_kernel(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the kernel takes these tensors: on the CPU, with one head dim, contiguous along it."""
    tensors = query, key, value
    is_fit = query.device.type == "cpu" and 0 < query.size(3) == value.size(3) and all(t.stride(3) == 1 for t in tensors)
    return is_fit and _FORWARD is not None and _BACKWARD is not None


def fused_forward(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """The output, [B, H, Q, D], and the logsumexp of the scores of each row, [B, H, Q], in float32 at least.

    Args:
        query: [B, H, Q, D].
        key: [B, H, KV, D].
        value: [B, H, KV, D].
        bias: added to the scores, [B or 1, H or 1, Q, KV], or None.
        scale: factor of the scores.
    """
    out, logsumexp = _FORWARD(query, key, value, 0.0, False, attn_mask=bias, scale=scale)
    return out, logsumexp


def fused_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value, from that of the output. Arguments and results as of `fused_forward`."""
    grads = _BACKWARD(grad, query, key, value, out, logsumexp, 0.0, False, attn_mask=bias, scale=scale)
    grad_query, grad_key, grad_value = grads
    return grad_query, grad_key, grad_value
