"""The BlockMask lowering: which blocks FlexAttention's kernels compute with ``mask_mod``, and which without it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.nn.attention.flex_attention import BlockMask

from flexmask import _sync
from flexmask._checks import check_flag, checked_int
from flexmask.blocks.classify import S, Strategy, classify, decide_open
from flexmask.blocks.grid import BlockGrid
from flexmask.blocks.sparse import BlockSets
from flexmask.errors import LoweringError, OperandError
from flexmask.intervals.bounds import RowBounds, analyze
from flexmask.intervals.context import MAX_LENGTH, Context
from flexmask.lowering.block_lists import BlockList, grid_lists, interval_lists, no_lists, run_lists
from flexmask.lowering.block_mask_type import BLOCK_MASK_TYPE
from flexmask.lowering.mask_mod import Form, MaskMod, mask_mod

#: Blocks of a mask up to which each list of its BlockMask has room for all of them, on the CPU and elsewhere. Then the lists'
#: strides follow from the lengths, so that a compiled kernel serves every mask. Beyond, lists are packed.
MAX_ROOM = _sync.PerDevice(cpu=2**20, elsewhere=2**22)
#: Blocks up to which a grid is better than intervals: on the CPU while it is faster; elsewhere wherever there is room, since
#: the sizes of a grid depend on no data, so that there is no host sync.
MAX_GRID = _sync.PerDevice(cpu=2**16, elsewhere=2**22)
#: The fields of a BlockMask that hold its lists, in the order of :func:`block_lists`.
FIELDS = [(f"{kind}_num_blocks", f"{kind}_indices") for kind in ("kv", "q", "full_kv", "full_q")]


def block_mask(
    context: Context,
    block_size: int | tuple[int, int] = 128,
    form: Form | MaskMod = "auto",
    *,
    separate_full_blocks: bool = True,
    heads: int | None = None,
) -> BlockMask:
    """The mask of a lowering context as a BlockMask: see :meth:`flexmask.Mask.block_mask`.

    Args:
        context: the lowering context.
        block_size: tokens in a block, or the pair (queries, keys).
        form: the form of its ``mask_mod``, or a ``mask_mod`` that computes the same mask.
        separate_full_blocks: whether full blocks have lists of their own.
        heads: H of the BlockMask where the mask is the same for all heads; None for 1.

    Raises:
        OperandError: ``block_size`` or ``separate_full_blocks`` has another type.
        LoweringError: ``block_size`` is less than 1 or too large, or the mask does not have the ``form``.
    """
    sizes = block_sizes(block_size)
    check_flag(separate_full_blocks, "separate_full_blocks")
    bounds = analyze(context)
    lists = block_lists(bounds, context, sizes, heads, separate=separate_full_blocks)
    if heads is not None:
        lists = [(number.expand(-1, heads, -1), indices.expand(-1, heads, -1, -1)) for number, indices in lists]
    mod = form if callable(form) else mask_mod(context, form, bounds)
    return from_lists(lists, mod, (context.q_len, context.kv_len), sizes)


def from_lists(lists: Sequence[BlockList], mod: MaskMod, lengths: tuple[int, int], sizes: tuple[int, int]) -> BlockMask:
    """The BlockMask with the lists of :func:`block_lists` and a ``mask_mod``."""
    fields: dict[str, Any] = {"BLOCK_SIZE": sizes, "mask_mod": mod}
    for names, block_list in zip(FIELDS, [*lists, (None, None), (None, None)], strict=False):
        fields.update(zip(names, block_list, strict=True))
    return BLOCK_MASK_TYPE(lengths, **fields)


def block_count(context: Context, sizes: tuple[int, int]) -> int:
    """The number of blocks over all sequences and all heads that differ."""
    return context.full_batch * context.heads * -(-context.q_len // sizes[0]) * -(-context.kv_len // sizes[1])


def block_lists(
    bounds: RowBounds, context: Context, sizes: tuple[int, int], heads: int | None = None, *, separate: bool = True
) -> list[BlockList]:
    """The lists ``kv`` and ``q``, and if full blocks are separate ``full_kv`` and ``full_q``, with B of the whole batch."""
    # CUDA kernels read the stride of heads alone and multiply it by the number of heads for the stride of sequences. So equal
    # heads share memory only where there is one sequence.
    batch = context.full_batch
    repeated = heads if batch > 1 else None
    grid, rows = BlockGrid(context, *sizes), bounds.upper
    count = block_count(context, sizes)
    # A block row that reaches beyond the last query has no full block. The blocks of one key interval of all queries are one run.
    if not grid.may_have_full_blocks and bounds.exact and rows.slots == rows.lo.shape[2] == 1 and count <= MAX_ROOM.on(rows.lo):
        lists = run_lists(*grid.touched_ends(rows), batch, repeated, grid.kv_blocks)
        return lists + no_lists(lists) if separate else lists
    if count > MAX_GRID.on(rows.lo):
        packed = count > MAX_ROOM.on(rows.lo)
        return interval_lists(_listed_sets(bounds, BlockSets(context, *sizes), separate), batch, repeated, packed=packed)
    if grid.may_have_full_blocks:
        return grid_lists(_listed_sets(bounds, grid, separate), batch, repeated)
    lists = grid_lists(_listed_sets(bounds, grid, separate)[:1], batch, repeated)
    return lists + no_lists(lists) if separate else lists


def _listed_sets(bounds: RowBounds, strategy: Strategy[S], separate: bool) -> list[S]:
    """The sets of blocks that have lists of their own."""
    blocks = decide_open(classify(bounds, strategy), strategy)
    return [blocks.partial, blocks.full] if separate else [blocks.partial | blocks.full]


def block_sizes(block_size: int | tuple[int, int]) -> tuple[int, int]:
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
