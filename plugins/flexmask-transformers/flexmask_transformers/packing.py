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
        LoweringError: the keys are not the tokens of the queries, another shape, or offsets that do not start with 0, decrease,
            or do not end with ``B * S``. Where reading them forces a host sync, and in a graph, that is an error where it runs.
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
    _check_offsets(packing, batch * q_len)
    tokens = torch.arange(batch * q_len, device=packing.device, dtype=packing.dtype)
    return torch.bucketize(tokens, packing[1:].contiguous(), right=True).view(batch, q_len)


def _check_offsets(offsets: Tensor, tokens: int) -> None:
    fits = (offsets[0] == 0) & (offsets[1:] >= offsets[:-1]).all() & (offsets[-1] == tokens)
    message = f"cu_seq_lens must start with 0, not decrease, and end with the number of tokens, {tokens}"
    if torch.compiler.is_compiling() or offsets.device.type != "cpu":
        torch._assert_async(fits, message)
    elif not fits:
        raise LoweringError(f"{message}; got {offsets.tolist()}. Padding behind the last document is a document of its own")
