"""The BlockMask lowering: what FlexAttention's kernels skip, test, and compute without a test."""

from __future__ import annotations

import operator
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexmask.analysis import analyse
from flexmask.blocks import Entries, blocks_of, union
from flexmask.errors import LoweringError, OperandError
from flexmask.frame import Frame
from flexmask.lowering.mask_mod import Form, mask_mod
from flexmask.rows import Rows

__all__ = ["block_mask", "sizes_of"]


def block_mask(frame: Frame, block_size: int | tuple[int, int] = 128, form: Form = "auto") -> BlockMask:
    """The mask of a frame as a BlockMask: see :meth:`flexmask.masks.Mask.block_mask`."""
    sizes = sizes_of(block_size)
    rows = analyse(frame)
    blocks = blocks_of(rows, frame, *sizes)
    shape = frame.full_batch, frame.heads, -(-frame.q_len // sizes[0])
    partial, full = (part.expand(*shape) for part in (blocks.partial, blocks.full))
    return BlockMask(
        (frame.q_len, frame.kv_len),
        *_listed(partial),
        *_listed(full),
        *_listed(_transposed(partial)),
        *_listed(_transposed(full)),
        BLOCK_SIZE=sizes,
        mask_mod=mask_mod(frame, form, rows),
    )


def sizes_of(block_size: int | tuple[int, int]) -> tuple[int, int]:
    """The block size as the pair (queries, keys).

    Raises:
        OperandError: it is not an int or a pair of ints.
        LoweringError: it is less than 1.
    """
    if isinstance(block_size, bool):
        raise OperandError(f"block_size must be an int or a pair (queries, keys), got {block_size!r}")
    pair = block_size if isinstance(block_size, tuple | list) else (block_size, block_size)
    try:
        q_size, kv_size = (operator.index(cast(Any, size)) for size in pair)
    except (TypeError, ValueError):
        raise OperandError(f"block_size must be an int or a pair (queries, keys), got {block_size!r}") from None
    if min(q_size, kv_size) < 1:
        raise LoweringError(f"block_size must be at least 1, got {block_size!r}")
    return q_size, kv_size


def _listed(rows: Rows) -> tuple[Tensor, Tensor]:
    """Sets of blocks as a BlockMask holds them: their number ``int32[B, H, rows]`` and their indices ``[B, H, rows, width]``.

    Only the first ``number`` indices of a row mean something. So the storage has no room for the others: each row's indices
    start at a fixed distance from those of the row before, and the view reads on into the next rows. Whatever stands there
    is the index of some block.
    """
    shape, width = rows.lo.shape[:3], rows.kv_len
    count = rows.counts()
    stride = min(width, max(1, int(count.max())))
    storage = torch.zeros(count.numel() * stride + width - stride, dtype=torch.int32, device=count.device)
    if rows.slots == 1:
        run = rows.lo + torch.arange(stride, dtype=torch.int32, device=count.device)
        storage[: run.numel()] = run.clamp_(max=width - 1).flatten()
    else:
        entries = Entries.of(rows)
        before = (count.flatten().cumsum(0) - count.flatten())[entries.row]
        within = torch.arange(entries.row.numel(), device=count.device) - before
        storage[entries.row * stride + within] = entries.column.to(torch.int32)
    strides = (shape[1] * shape[2] * stride, shape[2] * stride, stride, 1)
    return count.to(torch.int32), storage.as_strided((*shape, width), strides)


def _transposed(rows: Rows) -> Rows:
    """For each column the rows that hold it.

    Neighbouring rows differ in few columns. Where a row holds one that the row above does not, an interval of that column
    starts; where it is the other way round, one stops.
    """
    batch, heads, height, _ = rows.lo.shape
    width, edge = rows.kv_len, torch.full_like(rows.lo[:, :, :1], rows.kv_len)
    here = Rows(torch.cat((rows.lo, edge), 2), torch.cat((rows.hi, edge), 2), width)
    above = Rows(torch.cat((edge, rows.lo), 2), torch.cat((edge, rows.hi), 2), width)

    def in_order(changes: Rows) -> Tensor:
        """The changes by column and then by row, each as one number."""
        entries = Entries.of(changes)
        group, row = entries.row // (height + 1), entries.row % (height + 1)
        return ((group * width + entries.column) * (height + 1) + row).sort().values

    starts, stops = in_order(here - above), in_order(above - here)
    shape = torch.Size((batch, heads, width))
    return union(starts // (height + 1), starts % (height + 1), stops % (height + 1), shape, height)
