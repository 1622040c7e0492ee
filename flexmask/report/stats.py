"""Statistics: how much a mask shows, and what it costs."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from flexmask.blocks.sparse import block_sets
from flexmask.blocks.survey import Survey
from flexmask.intervals.bounds import RowBounds, analyse
from flexmask.intervals.context import Context
from flexmask.intervals.rows import Rows
from flexmask.lowering.block_mask import sizes_of

__all__ = ["Stats", "stats"]


@dataclass(frozen=True)
class Stats:
    """Figures of one mask at given lengths, over all sequences and heads that it distinguishes.

    Attributes:
        batch: sequences that the mask distinguishes, 1 where it is the same for all.
        heads: heads, likewise.
        q_len: queries.
        kv_len: keys.
        block_size: queries and keys in a block.
        cells: all pairs of a query and a key.
        visible: pairs where the query sees the key.
        empty_rows: queries that see no key; attention gives 0 there.
        blocks: all blocks.
        partial_blocks: blocks that the kernel computes and masks.
        full_blocks: blocks that the kernel computes without a test.
        block_mask_bytes: memory of the BlockMask's tensors as torch stores them, in bytes.
    """

    batch: int
    heads: int
    q_len: int
    kv_len: int
    block_size: tuple[int, int]
    cells: int
    visible: int
    empty_rows: int
    blocks: int
    partial_blocks: int
    full_blocks: int
    block_mask_bytes: int

    @property
    def visible_fraction(self) -> float:
        """Visible pairs of all pairs, 0 to 1."""
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
        """Visible pairs of the pairs computed in partial blocks, 0 to 1; 1 where there is no such block."""
        size = self.block_size[0] * self.block_size[1]
        computed = self.partial_blocks * size
        return (self.visible - self.full_blocks * size) / computed if computed else 1.0

    @property
    def cost(self) -> float:
        """Attention operations that a block-sparse kernel does, of those of dense attention (can exceed 1 by ragged blocks)."""
        return (self.partial_blocks + self.full_blocks) * self.block_size[0] * self.block_size[1] / self.cells

    def flops(self, d_head: int) -> int:
        """Floating point operations of one forward pass over these cells: two matrix products over the blocks computed.

        Args:
            d_head: size of a head.
        """
        return 4 * d_head * (self.partial_blocks + self.full_blocks) * self.block_size[0] * self.block_size[1]


def stats(context: Context, block_size: int | tuple[int, int] = 128, bounds: RowBounds | None = None) -> Stats:
    """The figures of the mask of a context: see :meth:`flexmask.expr.mask.Mask.stats`.

    Args:
        context: the context of the lowering.
        block_size: tokens in a block, or the pair (queries, keys).
        bounds: the rows of the mask, where they are known already.
    """
    q_size, kv_size = sizes_of(block_size)
    bounds = bounds or analyse(context)
    found = block_sets(bounds, context, q_size, kv_size)
    q_blocks, kv_blocks = -(-context.q_len // q_size), -(-context.kv_len // kv_size)
    partial, full = (part.expand(context.batch, context.heads, q_blocks) for part in (found.partial, found.full))
    if bounds.exact:
        counts = bounds.lower.counts().expand(context.batch, context.heads, context.q_len)
    else:
        counts = _counted(partial, full, context, q_size, kv_size)
    groups = context.batch * context.heads
    return Stats(
        batch=context.batch,
        heads=context.heads,
        q_len=context.q_len,
        kv_len=context.kv_len,
        block_size=(q_size, kv_size),
        cells=groups * context.q_len * context.kv_len,
        visible=int(counts.sum()),
        empty_rows=int((counts == 0).sum()),
        blocks=groups * q_blocks * kv_blocks,
        partial_blocks=int(partial.counts().sum()),
        full_blocks=int(full.counts().sum()),
        block_mask_bytes=groups * 4 * (4 * q_blocks * kv_blocks + 2 * (q_blocks + kv_blocks)),
    )


def _counted(partial: Rows, full: Rows, context: Context, q_size: int, kv_size: int) -> Tensor:
    """Visible keys of each row, ``[B, H, q_len]``, where only the cells of partial blocks can tell."""
    survey = Survey(context, q_size, kv_size)
    counts = (full.counts() * kv_size).repeat_interleave(survey.height, -1).view(-1, survey.height)
    for entries, visible in survey.counted(partial):
        counts.index_add_(0, entries.row, visible)
    return counts.view(context.batch, context.heads, -1)[..., : context.q_len]
