"""The documents of packed rows, from what data collators give to the attention of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flexmask.errors import LoweringError

__all__ = ["packing_argument", "document_ids"]


def packing_argument(kwargs: Mapping[str, Any]) -> Tensor | None:
    """The argument that describes the documents of a row, ``cu_seq_lens_q`` or ``seq_idx``; None where there is neither."""
    for name in ("cu_seq_lens_q", "seq_idx"):
        if kwargs.get(name) is not None:
            return torch.as_tensor(kwargs[name])
    return None


def document_ids(packing: Tensor, batch: int, q_len: int, kv_len: int) -> Tensor:
    """The document of each token, ``int[B, S]``.

    Args:
        packing: ``cu_seq_lens``, ``int[n + 1]``, where documents start among all ``B * S`` tokens and where the last one ends; or
            ``seq_idx``, ``int[B, S]``, the document of each token.
        batch: B.
        q_len: S.
        kv_len: the number of keys.

    Raises:
        LoweringError: the keys are not the tokens of the queries, or another shape.
    """
    if q_len != kv_len:
        raise LoweringError(
            f"cu_seq_lens and seq_idx describe {q_len} tokens, but there are {kv_len} keys; do not give them with a cache that "
            "holds tokens already"
        )
    if packing.dim() == 2 and tuple(packing.shape) == (batch, q_len):
        return packing
    if packing.dim() != 1:
        raise LoweringError(f"cu_seq_lens must be [n + 1] and seq_idx [{batch}, {q_len}], got {list(packing.shape)}")
    tokens = torch.arange(batch * q_len, device=packing.device, dtype=packing.dtype)
    return torch.bucketize(tokens, packing[1:].contiguous(), right=True).view(batch, q_len)
