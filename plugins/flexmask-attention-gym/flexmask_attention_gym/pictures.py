"""attention-gym's picture of attention scores, for a mask of flexmask."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import flexmask

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = ["visualize_attention_scores"]


def visualize_attention_scores(
    query: Tensor,
    key: Tensor,
    mask: flexmask.Mask | str,
    *,
    score_mod: Callable[..., Tensor] | None = None,
    name: str = "attention_scores",
    path: Path | str | None = None,
    batch_idx: int = 0,
    head_idx: int = 0,
    scale: float | None = None,
    device: str | None = None,
) -> None:
    """Writes attention-gym's picture of the scores that a mask leaves, as a PNG file.

    Args:
        query: ``float[B, H, Q, D]``.
        key: ``float[B, H_kv, KV, D]``.
        mask: the mask, or its text.
        score_mod: changes the scores, as in FlexAttention. Without one the picture shows the mask itself, with one the scores
            where it is True.
        name: the title, and the file's name where ``path`` is not given.
        path: the file, whose ending becomes ``.png``; by default ``name`` in the current folder.
        batch_idx: which sequence of the batch.
        head_idx: which head.
        scale: factor of the scores, by default ``1 / sqrt(D)``.
        device: where the scores are computed, by default where ``query`` is.

    Raises:
        FlexmaskError: a text that is no mask, or a mask that does not fit the lengths.

    Source: ``attn_gym.visualize_attention_scores``, which takes a ``mask_mod`` and computes on ``"cuda"`` by default.
    """
    from attn_gym import visualize_attention_scores as visualize

    mask = flexmask.parse(mask) if isinstance(mask, str) else mask
    device = str(query.device) if device is None else device
    (batch, heads), q_len, kv_len = query.shape[:2], query.shape[-2], key.shape[-2]
    visualize(
        query.to(device),
        key.to(device),
        score_mod=score_mod,
        mask_mod=mask.to(device).mask_mod(q_len, kv_len, batch=batch, heads=heads, device=device),
        device=device,
        name=name,
        path=None if path is None else Path(path),
        batch_idx=batch_idx,
        head_idx=head_idx,
        scale=scale,
    )
