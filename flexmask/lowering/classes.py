"""The ``mask_mod`` of a mask of classes, such as documents, for Triton's kernels on a GPU.

It is in a module of its own, as FlashAttention 4 takes key intervals instead.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flexmask.intervals.closures import without_unit_axes
from flexmask.intervals.rows import Rows


def classes(rows: Rows) -> tuple[Tensor, Tensor]:
    """The first key of each row, ``int32[B', H', q_len]``, and that of the row at each key; -1 where it does not hold the key."""
    lo, hi = rows.lo, rows.hi
    first = torch.where(lo < hi, lo, rows.kv_len).amin(-1)
    at = torch.arange(lo.shape[2], device=lo.device)[:, None]
    return first, torch.where(((lo <= at) & (at < hi)).any(-1), first, -1)


def class_mod(of_rows: Tensor, of_keys: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """``of_rows[row] == of_keys[key]``, of the tensors of :func:`classes`.

    A kernel of Triton that reads both ends of an interval by row converts the layout of all its cells in each step, where heads
    have 64 channels: on an H100 the forward pass of ``document`` took 1.8 to 2.6 times as long as with ids compared by hand.
    """
    (rows, axes), (keys, _) = (without_unit_axes(tensor, 2) for tensor in (of_rows, of_keys))

    def same_class(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        batch_and_head = [(b, h)[axis] for axis in axes]
        return rows[(*batch_and_head, q_idx)] == keys[(*batch_and_head, kv_idx)]

    return same_class
