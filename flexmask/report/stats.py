"""Statistics: the visible cells of a mask, its blocks, and the cost of attention with it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from flexmask import _sync
from flexmask.blocks.classify import Blocks, classify, decide_open
from flexmask.blocks.sparse import BlockSets
from flexmask.blocks.survey import Survey
from flexmask.intervals.bounds import RowBounds, analyze
from flexmask.intervals.context import Context
from flexmask.intervals.rows import Rows
from flexmask.lowering.block_lists import interval_lists
from flexmask.lowering.block_mask import MAX_ROOM, block_count, block_sizes


@dataclass(frozen=True)
class Stats:
    """Statistics of a mask at given lengths, over all sequences and heads that differ.

    Attributes:
        batch: sequences, 1 where the mask is the same for all.
        heads: heads, 1 where the mask is the same for all.
        q_len: queries.
        kv_len: keys.
        block_size: queries and keys in a block.
        cells: all (query, key) pairs.
        visible: cells where the query attends to the key.
        fully_masked_rows: fully masked rows, for which attention gives 0.
        blocks: all blocks.
        partial_blocks: blocks that the kernel computes with ``mask_mod``.
        full_blocks: blocks that the kernel computes without it.
        block_mask_bytes: memory that the lists of the BlockMask take, in bytes. What its ``mask_mod`` reads, the ends of key
            intervals, comes on top.
        torch_block_mask_bytes: memory that those of torch's ``create_block_mask`` would take, which list all blocks.
    """

    batch: int
    heads: int
    q_len: int
    kv_len: int
    block_size: tuple[int, int]
    cells: int
    visible: int
    fully_masked_rows: int
    blocks: int
    partial_blocks: int
    full_blocks: int
    block_mask_bytes: int
    torch_block_mask_bytes: int

    @property
    def visible_fraction(self) -> float:
        """Visible cells of all cells, 0 to 1."""
        return self.visible / self.cells

    @property
    def empty_blocks(self) -> int:
        """Blocks that the kernel skips."""
        return self.blocks - self.partial_blocks - self.full_blocks

    @property
    def block_sparsity(self) -> float:
        """Skipped blocks of all blocks, 0 to 1."""
        return self.empty_blocks / self.blocks

    @property
    def partial_fill(self) -> float:
        """Visible cells of the cells in partial blocks, 0 to 1; 1 where there is no such block."""
        size = self.block_size[0] * self.block_size[1]
        computed = self.partial_blocks * size
        return (self.visible - self.full_blocks * size) / computed if computed else 1.0

    @property
    def cost(self) -> float:
        """Work of a block-sparse kernel relative to dense attention; above 1 where blocks reach beyond the ends of the mask."""
        return (self.partial_blocks + self.full_blocks) * self.block_size[0] * self.block_size[1] / self.cells

    def flops(self, d_head: int) -> int:
        """Floating point operations of a forward pass over ``batch`` x ``heads``: two products over partial and full blocks.

        Where the mask is the same for all sequences or heads, these are 1: multiply by those of the model.

        Args:
            d_head: size of a head.
        """
        return 4 * d_head * (self.partial_blocks + self.full_blocks) * self.block_size[0] * self.block_size[1]


def stats(context: Context, block_size: int | tuple[int, int] = 128, bounds: RowBounds | None = None) -> Stats:
    """The statistics of the mask of a lowering context: see :meth:`flexmask.Mask.stats`.

    Args:
        context: the lowering context.
        block_size: tokens in a block, or the pair (queries, keys).
        bounds: the key intervals of the mask, where they are computed already.

    Raises:
        LoweringError: a mask on ``meta``.
    """
    _sync.check_values(context.device, "statistics count cells")
    sets = BlockSets(context, *block_sizes(block_size))
    bounds = bounds or analyze(context)
    blocks = decide_open(classify(bounds, sets), sets)
    counts = row_counts(bounds, blocks, sets)
    groups, q_blocks, kv_blocks = context.batch * context.heads, sets.q_blocks, sets.kv_blocks
    # Lists that are not packed have room for all blocks, as torch's have.
    is_packed = block_count(context, (sets.q_size, sets.kv_size)) > MAX_ROOM.on(bounds.upper.lo)
    room = context.full_batch * context.heads * 4 * (4 * q_blocks * kv_blocks + 2 * (q_blocks + kv_blocks))
    return Stats(
        batch=context.batch,
        heads=context.heads,
        q_len=context.q_len,
        kv_len=context.kv_len,
        block_size=(sets.q_size, sets.kv_size),
        cells=groups * context.q_len * context.kv_len,
        visible=int(counts.sum()),
        fully_masked_rows=int((counts == 0).sum()),
        blocks=groups * q_blocks * kv_blocks,
        partial_blocks=sets.count(blocks.partial),
        full_blocks=sets.count(blocks.full),
        block_mask_bytes=_packed_bytes(blocks, sets) if is_packed else room,
        torch_block_mask_bytes=room,
    )


def _packed_bytes(blocks: Blocks[Rows], sets: BlockSets) -> int:
    """The bytes that packed lists of the BlockMask take; several may be views of one storage. No cell is evaluated again."""
    lists = interval_lists([blocks.partial, blocks.full], sets.context.full_batch, None, packed=True)
    storages = [tensor.untyped_storage() for pair in lists for tensor in pair]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def row_counts(bounds: RowBounds, blocks: Blocks[Rows], sets: BlockSets) -> Tensor:
    """The number of visible keys of each row, ``int64[B, H, q_len]``.

    Counted from the key intervals where they are exact, else from full blocks and from cells of partial and open blocks.

    Args:
        bounds: the key intervals of the mask.
        blocks: its blocks, of which some may be open.
        sets: the strategy that classified them.
    """
    context = sets.context
    if bounds.exact:
        return bounds.lower.counts().expand(context.batch, context.heads, context.q_len)
    shape = context.batch, context.heads, sets.q_blocks
    counts = (blocks.full.expand(*shape).counts() * sets.kv_size).repeat_interleave(sets.height, -1).view(-1, sets.height)
    evaluated = blocks.partial if blocks.open is None else blocks.partial | blocks.open
    for entries, visible in Survey(sets).row_counts(evaluated.expand(*shape)):
        counts.index_add_(0, entries.row, visible)
    return counts.view(context.batch, context.heads, -1)[..., : context.q_len]
