"""The order in which key blocks add to the gradient of a query block, for FlexAttention's deterministic backward pass."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention
from torch.nn.attention.flex_attention import BlockMask

from flexmask._checks import check_flag
from flexmask.blocks.layout import rank_in_row
from flexmask.errors import LoweringError
from flexmask.lowering.block_lists import BlockList, most_above, pack


def check_write_order(is_asked: bool, dq_kv_order: object) -> None:
    """Checks the arguments of :func:`flexmask.create_block_mask` for an order.

    Raises:
        OperandError: one of them is no truth value.
        LoweringError: an order is asked for, and the BlockMask of this torch does not hold one.
    """
    check_flag(is_asked, "compute_dq_write_order")
    check_flag(dq_kv_order, "dq_kv_order")
    if is_asked and "compute_dq_write_order" not in inspect.signature(flex_attention.create_block_mask).parameters:
        raise LoweringError(
            f"compute_dq_write_order=True needs a BlockMask that holds the order; that of torch {torch.__version__} does not: "
            "install torch 2.13 or newer, or leave it out"
        )


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


def _write_orders(lists: list[BlockList], descending: bool) -> list[Tensor]:
    """The ranks in each list."""
    kv_blocks, q_blocks = lists[0][1].shape[-2:]
    members = [_members(*block_list) for block_list in lists]
    kv_row, _, q_column = (torch.cat(parts) for parts in zip(*members, strict=True))
    q_row = kv_row // kv_blocks * q_blocks + q_column
    order = (q_row * kv_blocks + kv_row % kv_blocks).argsort()
    count = torch.bincount(q_row, minlength=lists[0][0].shape[:-1].numel() * q_blocks)
    rank = torch.empty_like(q_row)
    rank[order] = rank_in_row(q_row[order], count)
    if descending:
        rank = count[q_row] - 1 - rank
    sizes = [row.numel() for row, _, _ in members]
    parts = zip(lists, members, rank.to(torch.int32).split(sizes), strict=True)
    return [
        pack(values, row, place, indices.shape, _pitch(number, indices)) for (number, indices), (row, place, _), values in parts
    ]


def _members(number: Tensor, indices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The members of a list in order: the row, the rank in the row, and the member."""
    count = number.flatten().long()
    row = torch.repeat_interleave(count, output_size=int(count.sum()))
    rank = rank_in_row(row, count)
    return row, rank, indices[(*torch.unravel_index(row, number.shape), rank)].long()


def _pitch(number: Tensor, indices: Tensor) -> int:
    """The distance of rows in storage for values of a list: packed where the list is."""
    return indices.shape[-1] if indices.is_contiguous() else most_above(number)
