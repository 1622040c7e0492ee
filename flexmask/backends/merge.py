"""Attention ``[B, H, q_len, D_v]`` to all keys, from that to disjoint parts of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flexmask._checks import kind_of
from flexmask.backends.problem import precise_dtype
from flexmask.errors import LoweringError, OperandError


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
        OperandError: other arguments than tensors, or outputs of several dtypes.
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
    for out, lse in zip(outputs, lses, strict=True):
        if out.shape != outputs[0].shape or lse.shape != out.shape[:-1]:
            raise LoweringError(
                f"merge_attention: each part must have one shape, an output {list(outputs[0].shape)} and a logsumexp "
                f"{list(outputs[0].shape[:-1])}, got {list(out.shape)} and {list(lse.shape)}"
            )
    scores = torch.stack([lse.to(precise_dtype(lse)) for lse in lses])
    greatest = scores.detach().amax(0)
    weights = (scores - greatest.masked_fill(greatest == -torch.inf, 0)).exp()
    total = weights.sum(0)
    is_seen = total > 0
    divisor = total.where(is_seen, 1)
    lse = (divisor.log() + greatest).where(is_seen, -torch.inf)
    parts = ((weight / divisor).unsqueeze(-1) * _counted(out, weight) for out, weight in zip(outputs, weights, strict=True))
    return torch.stack(list(parts)).sum(0).to(outputs[0].dtype), lse


def _counted(out: Tensor, weight: Tensor) -> Tensor:
    """An output, 0 where it does not count: NaN would."""
    return out.masked_fill((weight == 0).unsqueeze(-1), 0)
