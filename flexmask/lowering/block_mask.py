"""The BlockMask lowering: what FlexAttention's kernels skip, test, and compute without a test."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexmask import _sync
from flexmask._checks import checked_int
from flexmask.blocks.grid import block_grid
from flexmask.blocks.sparse import block_sets
from flexmask.errors import LoweringError, OperandError
from flexmask.intervals.bounds import analyse
from flexmask.intervals.context import MAX_LENGTH, Context
from flexmask.lowering.listed import block_mask_type
from flexmask.lowering.mask_mod import Form, MaskMod, mask_mod
from flexmask.lowering.write_order import write_orders

__all__ = ["block_mask", "sizes_of"]

#: Blocks of a mask up to which each list of its BlockMask has room for all of them, on the CPU and elsewhere. Then the lists'
#: strides follow from the lengths, so that a compiled kernel serves every mask. Beyond, lists are packed.
MAX_ROOM = _sync.PerDevice(cpu=2**20, elsewhere=2**22)
#: Blocks up to which a grid of them is better than sets: on the CPU while it is faster; elsewhere wherever there is room, since
#: the sizes of a grid depend on no data, so that there is no host sync.
MAX_GRID = _sync.PerDevice(cpu=2**16, elsewhere=2**22)


def block_mask(
    context: Context,
    block_size: int | tuple[int, int] = 128,
    form: Form = "auto",
    mod: MaskMod | None = None,
    *,
    separate_full_blocks: bool = True,
    descending: bool | None = None,
    batch: int | None = None,
    heads: int | None = None,
) -> BlockMask:
    """The mask of a context as a BlockMask: see :meth:`flexmask.expr.mask.Mask.block_mask`.

    Args:
        context: the context of the lowering.
        block_size: tokens in a block, or the pair (queries, keys).
        form: which ``mask_mod`` stands in it, unless ``mod`` does.
        mod: a ``mask_mod`` that computes the same mask.
        separate_full_blocks: whether full blocks have lists of their own.
        descending: for deterministic backward passes, whether key blocks add to the gradients of query blocks in descending
            order; None for no order, which not every version of torch takes.
        batch: B of the BlockMask where its lists are the same for all sequences.
        heads: H of the BlockMask where its lists are the same for all heads.
    """
    sizes = sizes_of(block_size)
    if not isinstance(separate_full_blocks, bool):
        raise OperandError(f"separate_full_blocks must be True or False, got {separate_full_blocks!r}")
    rows = analyse(context)
    # Kernels know how far heads are apart, and take sequences to be that far apart times the number of heads. So heads that are
    # the same share memory only where there is one sequence.
    apart = heads if context.full_batch > 1 else None
    blocks = context.full_batch * context.heads * -(-context.q_len // sizes[0]) * -(-context.kv_len // sizes[1])
    if blocks <= MAX_GRID.on(rows.upper.lo):
        lists = block_grid(rows, context, *sizes).lists(context.full_batch, apart, separate=separate_full_blocks)
    else:
        packed = blocks > MAX_ROOM.on(rows.upper.lo)
        lists = block_sets(rows, context, *sizes).lists(context.full_batch, apart, separate=separate_full_blocks, packed=packed)
    fields: dict[str, Any] = {"BLOCK_SIZE": sizes, "mask_mod": mod or mask_mod(context, form, rows)}
    for kind, listed in zip_longest(("kv", "q", "full_kv", "full_q"), lists, fillvalue=(None, None)):
        fields[f"{kind}_num_blocks"], fields[f"{kind}_indices"] = listed
    if descending is not None:
        fields |= write_orders(*lists[1::2], descending=descending)
    if batch is not None or heads is not None:
        fields = {name: _shaped(field, batch, heads) if isinstance(field, Tensor) else field for name, field in fields.items()}
    return block_mask_type()((context.q_len, context.kv_len), **fields)


def _shaped(tensor: Tensor, batch: int | None, heads: int | None) -> Tensor:
    """Lists ``[B, H, ...]`` at their full size; those that are the same for all sequences or heads share their memory."""
    sizes = (own if size is None else size for own, size in zip(tensor.shape, (batch, heads), strict=False))
    return tensor.expand(*sizes, *tensor.shape[2:])


def sizes_of(block_size: int | tuple[int, int]) -> tuple[int, int]:
    """The block size as the pair (queries, keys).

    Raises:
        OperandError: it is not an int or a pair of ints.
        LoweringError: it is less than 1, or more than a length can be.
    """
    wanted = "an int or a pair (queries, keys)"
    pair = block_size if isinstance(block_size, tuple | list) else (block_size, block_size)
    if len(pair) != 2:
        raise OperandError(f"block_size must be {wanted}, got {block_size!r}")
    q_size, kv_size = (checked_int(size, "block_size", 1, MAX_LENGTH, LoweringError, wanted) for size in pair)
    return q_size, kv_size
