"""The classification of blocks, which BlockMask, statistics, comparison, explanation and pictures share.

A strategy represents a set of blocks ``[B', H', q_blocks, kv_blocks]``: as a grid (:mod:`flexmask.blocks.grid`) or as intervals
(:mod:`flexmask.blocks.sparse`). Both support ``&``, ``|`` and ``~``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from flexmask.intervals.bounds import RowBounds
from flexmask.intervals.rows import Rows

#: A set of blocks.
S = TypeVar("S", Tensor, Rows)


class Strategy(Protocol[S]):
    """How sets of blocks are represented and computed."""

    def touched(self, rows: Rows) -> S:
        """The blocks in which some row holds some key."""

    def covered(self, rows: Rows) -> S:
        """The blocks in which each of ``q_size`` rows holds each of ``kv_size`` keys; none beyond the ends of the mask."""

    def decide(self, open_blocks: S) -> tuple[S, S]:
        """Which of some blocks are partial, and which are full, from value ranges and cells."""


@dataclass(frozen=True, eq=False)
class Blocks(Generic[S]):
    """The blocks of a mask; all others are empty.

    Attributes:
        partial: blocks of which some cell is visible, but not all ``q_size * kv_size``.
        full: blocks of which every cell is visible; a block that reaches beyond the mask is never full.
        open: blocks that the key intervals leave open; None where there are no such blocks.
    """

    partial: S
    full: S
    open: S | None


def classify(bounds: RowBounds, strategy: Strategy[S]) -> Blocks[S]:
    """Classifies the blocks of a mask by its key intervals alone.

    Args:
        bounds: the key intervals of each query row, from below and above.
        strategy: the blocks, as a grid or as intervals.
    """
    visible, full = strategy.touched(bounds.upper), strategy.covered(bounds.lower)
    if bounds.exact:
        return Blocks(visible & ~full, full, None)
    partial = strategy.touched(bounds.lower) & ~strategy.covered(bounds.upper)
    return Blocks(partial, full, visible & ~full & ~partial)


def decide_open(blocks: Blocks[S], strategy: Strategy[S]) -> Blocks[S]:
    """The blocks of a mask with those decided that its key intervals leave open."""
    if blocks.open is None:
        return blocks
    partial, full = strategy.decide(blocks.open)
    return Blocks(blocks.partial | partial, blocks.full | full, None)
