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
    """The first key of each row, ``int32[B', H', q_len]``, and that of the rows with each key, ``int32[B', H', kv_len]``.

    It is ``kv_len`` for a row without keys, and -1 for a key of no row.

    Args:
        rows: of which any two are the same, or have no key in common.
    """
    lo, hi = rows.lo, rows.hi
    first = lo.amin(-1)  # slots without use are behind all keys
    places, shape = lo.flatten(2).long(), (*lo.shape[:2], rows.kv_len + 1)
    ends, firsts = (lo.new_zeros(shape).scatter(2, places, values.flatten(2)) for values in (hi, first[..., None].expand_as(lo)))
    keys = torch.arange(rows.kv_len, device=lo.device)
    begins = torch.where(ends[..., :-1] > 0, keys, 0).cummax(2).values  # of the interval that is the last one to begin
    return first, torch.where(keys < ends.gather(2, begins), firsts.gather(2, begins), -1)


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
