"""The order in which key blocks add to the gradient of a query block, for FlexAttention's deterministic backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexmask.blocks.layout import Entries

__all__ = ["add_write_order"]


def add_write_order(block_mask: BlockMask, *, descending: bool) -> None:
    """Sets ``dq_write_order`` of a BlockMask, and ``dq_write_order_full`` where full blocks have lists of their own.

    For each query block in a list of a key block it is the rank of the key block among those of the query block, ``int32`` in
    the shape of ``q_indices``; 0 beyond ``num_blocks``. Takes time that follows the number of listed blocks, and a host sync on
    a GPU to count them.

    Args:
        block_mask: the BlockMask, with ``q_num_blocks`` and ``q_indices``.
        descending: whether the last key block comes first.
    """
    lists: Any = [(block_mask.q_num_blocks, block_mask.q_indices), (block_mask.full_q_num_blocks, block_mask.full_q_indices)]
    lists = [(number, indices) for number, indices in lists if number is not None]
    heads = lists[0][0].shape[1]
    if all(number.stride(1) == 0 for number, _ in lists):  # heads that share their lists share the order
        lists = [(number[:, :1], indices[:, :1]) for number, indices in lists]
    orders = [order.expand(-1, heads, -1, -1) for order in _write_orders(lists, descending)]
    block_mask.__dict__.update(
        dq_write_order=orders[0], dq_write_order_full=orders[1] if len(orders) > 1 else None, dq_kv_order_spt=descending
    )


def _write_orders(lists: list[tuple[Tensor, Tensor]], descending: bool) -> list[Tensor]:
    """The ranks in each list."""
    members = [_entries(number, indices) for number, indices in lists]
    kv_blocks, q_blocks = lists[0][1].shape[-2:]
    kv_row, q_column = (torch.cat([getattr(entries, part) for entries, _ in members]) for part in ("row", "column"))
    q_row = kv_row // kv_blocks * q_blocks + q_column
    order = (q_row * kv_blocks + kv_row % kv_blocks).argsort()
    count = torch.bincount(q_row, minlength=lists[0][0].shape[:-1].numel() * q_blocks)
    rank = torch.empty_like(q_row)
    rank[order] = torch.arange(rank.numel(), device=rank.device) - (count.cumsum(0) - count)[q_row[order]]
    if descending:
        rank = count[q_row] - 1 - rank
    ranks = rank.to(torch.int32).split([entries.row.numel() for entries, _ in members])
    return [
        _in_list(values, entries, place, *block_list)
        for values, (entries, place), block_list in zip(ranks, members, lists, strict=True)
    ]


def _entries(number: Tensor, indices: Tensor) -> tuple[Entries, Tensor]:
    """The members of a list by row, and the place of each in its row."""
    count = number.flatten().long()
    total = int(count.sum())
    row = torch.repeat_interleave(count, output_size=total)
    place = torch.arange(total, device=count.device) - (count.cumsum(0) - count)[row]
    index = torch.unravel_index(row, number.shape)
    return Entries(row, indices[(*index, place)].long()), place


def _in_list(values: Tensor, entries: Entries, place: Tensor, number: Tensor, indices: Tensor) -> Tensor:
    """A value for each member in the shape of its list, and packed where the list is."""
    width = indices.shape[-1]
    pitch = width if indices.is_contiguous() else max(1, int(number.max()))
    storage = values.new_zeros(number.numel() * pitch + width - pitch)
    storage[entries.row * pitch + place] = values
    strides = [pitch] * number.dim()
    for axis in range(number.dim() - 2, -1, -1):
        strides[axis] = strides[axis + 1] * number.shape[axis + 1]
    return storage.as_strided(indices.shape, (*strides, 1))
