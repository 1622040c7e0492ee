"""The order in which key blocks add to the gradient of a query block, for FlexAttention's deterministic backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexmask.blocks.entries import Entries, Listed

__all__ = ["write_orders"]


def write_orders(partial: Listed, full: Listed | None = None, *, descending: bool) -> dict[str, Any]:
    """For each query block that a key block is listed with, the rank of the key block among those of the query block.

    In time that follows the number of blocks that are listed. How many these are is counted, a host sync on a GPU.

    Args:
        partial: the lists ``q_num_blocks`` and ``q_indices`` of a BlockMask.
        full: the lists ``full_q_num_blocks`` and ``full_q_indices``, where it has them.
        descending: whether the last key block comes first.

    Returns:
        The fields of a BlockMask that hold it. Ranks are shaped like the indices; beyond ``num_blocks`` they are 0.
    """
    lists = [partial] if full is None else [partial, full]
    found = [_entries(number, indices) for number, indices in lists]
    kv_blocks, q_blocks = partial[1].shape[-2:]
    kv_row, q_column = (torch.cat([getattr(entries, part) for entries, _ in found]) for part in ("row", "column"))
    q_row = kv_row // kv_blocks * q_blocks + q_column
    order = (q_row * kv_blocks + kv_row % kv_blocks).argsort()
    count = torch.bincount(q_row, minlength=partial[0].shape[:-1].numel() * q_blocks)
    rank = torch.empty_like(q_row)
    rank[order] = torch.arange(rank.numel(), device=rank.device) - (count.cumsum(0) - count)[q_row[order]]
    if descending:
        rank = count[q_row] - 1 - rank
    ranks = rank.to(torch.int32).split([entries.row.numel() for entries, _ in found])
    placed = [
        _placed(values, entries, place, *listed) for values, (entries, place), listed in zip(ranks, found, lists, strict=True)
    ]
    return {
        "dq_write_order": placed[0],
        "dq_write_order_full": placed[1] if full is not None else None,
        "dq_kv_order_spt": descending,
    }


def _entries(number: Tensor, indices: Tensor) -> tuple[Entries, Tensor]:
    """The entries of lists by row, and the place of each within its row."""
    count = number.flatten().long()
    total = int(count.sum())
    row = torch.repeat_interleave(count, output_size=total)
    place = torch.arange(total, device=count.device) - (count.cumsum(0) - count)[row]
    at = torch.unravel_index(row, number.shape)
    return Entries(row, indices[(*at, place)].long()), place


def _placed(values: Tensor, entries: Entries, place: Tensor, number: Tensor, indices: Tensor) -> Tensor:
    """A value for each entry in the shape of its list, and packed like it where the list is."""
    width = indices.shape[-1]
    pitch = width if indices.is_contiguous() else max(1, int(number.max()))
    storage = values.new_zeros(number.numel() * pitch + width - pitch)
    storage[entries.row * pitch + place] = values
    strides = [pitch] * number.dim()
    for axis in range(number.dim() - 2, -1, -1):
        strides[axis] = strides[axis + 1] * number.shape[axis + 1]
    return storage.as_strided(indices.shape, (*strides, 1))
