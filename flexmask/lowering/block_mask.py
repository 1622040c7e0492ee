"""The BlockMask lowering: what FlexAttention's kernels skip, test, and compute without a test."""

from __future__ import annotations

import operator
from typing import Any, cast

from torch.nn.attention.flex_attention import BlockMask

from flexmask import devices
from flexmask.analysis import analyse
from flexmask.block_sets import block_sets
from flexmask.errors import LoweringError, OperandError
from flexmask.frame import Frame
from flexmask.grid import grid_of
from flexmask.lowering.mask_mod import Form, mask_mod

__all__ = ["block_mask", "sizes_of"]

#: Blocks of a mask up to which each list of its BlockMask has room for all of them, on the CPU and elsewhere. Then the lists'
#: strides follow from the lengths, so that a compiled kernel serves every mask. Beyond, lists are packed.
MAX_ROOM = 2**20, 2**22
#: Blocks up to which a grid of them is better than sets: on the CPU while it is faster; elsewhere wherever there is room, since
#: the sizes of a grid depend on no data, so that nothing waits for the device.
MAX_GRID = 2**16, 2**22


def block_mask(frame: Frame, block_size: int | tuple[int, int] = 128, form: Form = "auto") -> BlockMask:
    """The mask of a frame as a BlockMask: see :meth:`flexmask.masks.Mask.block_mask`."""
    sizes = sizes_of(block_size)
    rows = analyse(frame)
    blocks = frame.full_batch * frame.heads * -(-frame.q_len // sizes[0]) * -(-frame.kv_len // sizes[1])
    elsewhere = devices.waits(rows.upper.lo)
    if blocks <= MAX_GRID[elsewhere]:
        lists = grid_of(rows, frame, *sizes).lists(frame.full_batch)
    else:
        lists = block_sets(rows, frame, *sizes).lists(frame.full_batch, packed=blocks > MAX_ROOM[elsewhere])
    kv, full_kv, q, full_q = lists
    mod = mask_mod(frame, form, rows)
    return BlockMask((frame.q_len, frame.kv_len), *kv, *full_kv, *q, *full_q, BLOCK_SIZE=sizes, mask_mod=mod)


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
