"""The BlockMask lowering: what FlexAttention's kernels skip, test, and compute without a test."""

from __future__ import annotations

import operator
from typing import Any, cast

from torch.nn.attention.flex_attention import BlockMask

from flexmask import devices
from flexmask.analysis import analyse
from flexmask.block_grid import block_grid
from flexmask.block_sets import block_sets
from flexmask.errors import LoweringError, OperandError
from flexmask.frame import MAX_LENGTH, Frame
from flexmask.lowering.mask_mod import Form, MaskMod, mask_mod

__all__ = ["block_mask", "sizes_of"]

#: Blocks of a mask up to which each list of its BlockMask has room for all of them, on the CPU and elsewhere. Then the lists'
#: strides follow from the lengths, so that a compiled kernel serves every mask. Beyond, lists are packed.
MAX_ROOM = devices.Limit(cpu=2**20, elsewhere=2**22)
#: Blocks up to which a grid of them is better than sets: on the CPU while it is faster; elsewhere wherever there is room, since
#: the sizes of a grid depend on no data, so that nothing waits for the device.
MAX_GRID = devices.Limit(cpu=2**16, elsewhere=2**22)


def block_mask(
    frame: Frame, block_size: int | tuple[int, int] = 128, form: Form = "auto", mod: MaskMod | None = None
) -> BlockMask:
    """The mask of a frame as a BlockMask: see :meth:`flexmask.algebra.Mask.block_mask`.

    Args:
        frame: the frame of the lowering.
        block_size: tokens in a block, or the pair (queries, keys).
        form: which ``mask_mod`` stands in it, unless ``mod`` does.
        mod: a ``mask_mod`` that computes the same mask.
    """
    sizes = sizes_of(block_size)
    rows = analyse(frame)
    blocks = frame.full_batch * frame.heads * -(-frame.q_len // sizes[0]) * -(-frame.kv_len // sizes[1])
    if blocks <= MAX_GRID.on(rows.upper.lo):
        lists = block_grid(rows, frame, *sizes).lists(frame.full_batch)
    else:
        lists = block_sets(rows, frame, *sizes).lists(frame.full_batch, packed=blocks > MAX_ROOM.on(rows.upper.lo))
    kv, full_kv, q, full_q = lists
    mod = mod or mask_mod(frame, form, rows)
    return BlockMask((frame.q_len, frame.kv_len), *kv, *full_kv, *q, *full_q, BLOCK_SIZE=sizes, mask_mod=mod)


def sizes_of(block_size: int | tuple[int, int]) -> tuple[int, int]:
    """The block size as the pair (queries, keys).

    Raises:
        OperandError: it is not an int or a pair of ints.
        LoweringError: it is less than 1, or more than a length can be.
    """
    if isinstance(block_size, bool):
        raise OperandError(f"block_size must be an int or a pair (queries, keys), got {block_size!r}")
    pair = block_size if isinstance(block_size, tuple | list) else (block_size, block_size)
    try:
        q_size, kv_size = (operator.index(cast(Any, size)) for size in pair)
    except (TypeError, ValueError):
        raise OperandError(f"block_size must be an int or a pair (queries, keys), got {block_size!r}") from None
    if min(q_size, kv_size) < 1 or max(q_size, kv_size) > MAX_LENGTH:
        raise LoweringError(f"block_size must lie between 1 and {MAX_LENGTH}, got {block_size!r}")
    return q_size, kv_size
