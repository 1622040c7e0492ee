"""What each unit of consecutive queries costs and sees: the numbers from which a sequence is sharded.

Masks are analyzed some queries at a time, so that memory does not grow with the length times the number of intervals of a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flexmask.blocks.classify import classify, decide_open
from flexmask.blocks.layout import ceil_div, rank_in_row
from flexmask.blocks.sparse import BlockSets
from flexmask.intervals.bounds import analyze
from flexmask.intervals.context import Context
from flexmask.intervals.rows import Rows, union_runs
from flexmask.report.stats import row_counts

__all__ = ["KeyLists", "QueryUnits", "unit_size", "units_of"]

#: Queries that are analyzed at a time.
CHUNK = 2**18
#: Units that each rank has at least, where the length allows it: one more or less changes little.
UNITS_PER_RANK = 64


@dataclass(frozen=True, eq=False)
class KeyLists:
    """A set of keys for each unit, as sorted disjoint intervals, those of all units one after another.

    Attributes:
        lo: the first key of each interval, ``int64[n]``.
        hi: one more than the last key of each, ``int64[n]``.
        first: the first interval of each unit, and the number of all, ``int64[units + 1]``.
    """

    lo: Tensor
    hi: Tensor
    first: Tensor

    @classmethod
    def of(cls, rows: Rows) -> KeyLists:
        """The keys of each row in any sequence or head; ``rows`` are ``[B', H', units, K]``."""
        lo, hi = (end.movedim(2, 0).flatten(1).long() for end in (rows.lo, rows.hi))
        unit, slot = (lo < hi).nonzero(as_tuple=True)
        return cls.union(lo.shape[0], unit, lo[unit, slot], hi[unit, slot])

    @classmethod
    def union(cls, units: int, unit: Tensor, lo: Tensor, hi: Tensor) -> KeyLists:
        """The keys in any of the intervals ``int64[n]`` of each unit; ``unit`` says which unit an interval is of."""
        width = int(hi.max()) + 1 if hi.numel() else 1  # units lie apart on one line, so that their intervals do not touch
        start, stop, opens, closes = union_runs(unit * width + lo, unit * width + hi)
        start, stop = start[opens], stop[closes]
        unit = start.div(width, rounding_mode="floor")
        first = torch.zeros(units + 1, dtype=torch.int64, device=lo.device)
        first[1:] = torch.bincount(unit, minlength=units).cumsum(0)
        return cls(start - unit * width, stop - unit * width, first)

    @classmethod
    def stacked(cls, parts: Sequence[KeyLists]) -> KeyLists:
        """The units of several lists one after another."""
        counts = torch.cat([part.first.diff() for part in parts])
        first = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        return cls(torch.cat([part.lo for part in parts]), torch.cat([part.hi for part in parts]), first)

    @property
    def unit(self) -> Tensor:
        """The unit of each interval, ``int64[n]``."""
        counts = self.first.diff()
        return torch.repeat_interleave(counts, output_size=self.lo.numel())

    def __or__(self, other: KeyLists) -> KeyLists:
        pairs = zip((self.unit, self.lo, self.hi), (other.unit, other.lo, other.hi), strict=True)
        return KeyLists.union(self.first.numel() - 1, *(torch.cat(pair) for pair in pairs))

    def grouped(self, owner: Tensor, groups: int) -> KeyLists:
        """The keys of any unit of each group; ``owner`` is the group of each unit, ``int64[units]``."""
        return KeyLists.union(groups, owner[self.unit], self.lo, self.hi)

    def select(self, units: Tensor) -> KeyLists:
        """The keys of any of some units ``int64[n]``, as the only unit."""
        counts = self.first.diff()[units]
        at = self.first[:-1][units].repeat_interleave(counts)
        at += rank_in_row(torch.repeat_interleave(counts), counts)
        return KeyLists.union(1, torch.zeros_like(at), self.lo[at], self.hi[at])

    def sizes(self) -> Tensor:
        """The number of keys of each unit, ``int64[units]``."""
        found = torch.zeros(self.first.numel() - 1, dtype=torch.int64, device=self.lo.device)
        return found.index_add_(0, self.unit, self.hi - self.lo)


@dataclass(frozen=True, eq=False)
class QueryUnits:
    """The units of consecutive queries of a mask.

    Attributes:
        work: cells that a kernel computes for each unit, ``int64[units]``: its queries times the keys of the blocks that are not
            empty in its block row, over all sequences and heads that differ.
        visible: visible cells of each unit, ``int64[units]``, over all sequences and heads that differ.
        keys: the keys that some query of each unit attends to; more where the mask is not separable.
    """

    work: Tensor
    visible: Tensor
    keys: KeyLists


def unit_size(seq_len: int, ranks: int, block_size: int) -> int:
    """Queries in a unit: the greatest divisor of the block size that gives each rank enough units, else 1."""
    most = max(1, seq_len // (ranks * UNITS_PER_RANK))
    return max(size for size in range(1, min(most, block_size) + 1) if block_size % size == 0)


def units_of(context: Context, size: int, block_size: tuple[int, int]) -> QueryUnits:
    """The units of a mask, in the CPU's memory.

    Args:
        context: the lowering context of the mask.
        size: queries in a unit, a divisor of those in a block.
        block_size: queries and keys in a block of the kernel.
    """
    parts = [_units_of_part(part, size, block_size) for part in _parts(context, CHUNK // block_size[0] * block_size[0])]
    work, visible = (torch.cat([getattr(part, name) for part in parts]).cpu() for name in ("work", "visible"))
    keys = KeyLists.stacked([part.keys for part in parts])
    return QueryUnits(work, visible, KeyLists(keys.lo.cpu(), keys.hi.cpu(), keys.first.cpu()))


def _parts(context: Context, size: int) -> Iterator[Context]:
    """The contexts of consecutive queries, at most ``size`` each."""
    mask = context.with_lengths(context.mask)
    for start in range(0, context.q_len, max(1, size)):
        stop = min(start + max(1, size), context.q_len)
        yield replace(context, mask=mask, q_len=stop - start, q_offset=start, q_end=stop)


def _units_of_part(context: Context, size: int, block_size: tuple[int, int]) -> QueryUnits:
    bounds, sets = analyze(context), BlockSets(context, *block_size)
    blocks = decide_open(classify(bounds, sets), sets)
    shape = context.batch, context.heads
    counts = (blocks.partial | blocks.full).expand(*shape, sets.q_blocks).counts().sum((0, 1)) * sets.kv_size
    start = torch.arange(0, context.q_len, size, device=counts.device)
    queries = (context.q_len - start).clamp(max=size)
    visible = row_counts(bounds, blocks, sets).sum((0, 1))
    of_row = ceil_div(torch.arange(1, context.q_len + 1, device=counts.device), size) - 1
    return QueryUnits(
        counts[start.div(sets.q_size, rounding_mode="floor")] * queries,
        torch.zeros_like(start).index_add_(0, of_row, visible),
        KeyLists.of(BlockSets(context, size, 1).touched(bounds.upper)),
    )
