"""What each unit of consecutive queries costs and sees: the numbers from which a sequence is sharded.

Masks are analyzed some queries at a time, so that memory does not grow with the length times the number of intervals of a row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flexmask.blocks.classify import classify, decide_open
from flexmask.blocks.layout import rank_in_row
from flexmask.blocks.sparse import BlockSets
from flexmask.intervals.bounds import analyze
from flexmask.intervals.context import Context
from flexmask.intervals.rows import Rows, union_runs
from flexmask.report.stats import row_counts

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
        return cls.counted(torch.bincount(unit, minlength=units), start - unit * width, stop - unit * width)

    @classmethod
    def counted(cls, counts: Tensor, lo: Tensor, hi: Tensor) -> KeyLists:
        """The intervals of all units one after another; ``counts`` says how many each unit has."""
        return cls(lo, hi, torch.nn.functional.pad(counts.cumsum(0), (1, 0)))

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

    def take(self, units: Tensor) -> KeyLists:
        """Some of the units ``int64[n]``, in this order."""
        counts = self.first.diff()[units]
        of_unit = torch.repeat_interleave(counts)
        at = self.first[:-1][units][of_unit] + rank_in_row(of_unit, counts)
        return KeyLists.counted(counts, self.lo[at], self.hi[at])

    @property
    def intervals(self) -> Tensor:
        """The intervals ``[lo, hi)`` of all units, ``int64[n, 2]``."""
        return torch.stack((self.lo, self.hi), -1)

    def runs(self, unit: int) -> Tensor:
        """The keys of a unit as intervals ``[lo, hi)`` in order, ``int64[n, 2]``."""
        part = slice(int(self.first[unit]), int(self.first[unit + 1]))
        return torch.stack((self.lo[part], self.hi[part]), -1)

    def beyond(self, other: KeyLists) -> Tensor:
        """How many keys of each unit are not among those of the same unit of another list, ``int64[units]``."""
        return (self | other).sizes() - other.sizes()

    def shared(self, other: KeyLists) -> Tensor:
        """How many keys of each unit are also among those of the same unit of another list, ``int64[units]``."""
        return self.sizes() - self.beyond(other)

    def places(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """The unit of each of some keys ``int64[n]``, each of which one unit has, and how many keys of the unit are before it."""
        lengths = self.hi - self.lo
        before, (start, order) = lengths.cumsum(0) - lengths, self.lo.sort()
        run = order[torch.searchsorted(start, keys, right=True) - 1]
        unit = self.unit[run]
        return unit, before[run] - before[self.first[unit]] + keys - self.lo[run]

    def total(self, ends: Tensor) -> Tensor:
        """How many keys less than each of some numbers ``int64[n]`` all units have together, one in several units each time."""
        found = torch.zeros_like(ends)
        for edge, sign in ((self.lo, 1), (self.hi, -1)):
            edge = edge.sort().values
            below = torch.searchsorted(edge, ends)
            found += sign * (below * ends - torch.nn.functional.pad(edge.cumsum(0), (1, 0))[below])
        return found

    def sizes(self) -> Tensor:
        """The number of keys of each unit, ``int64[units]``."""
        return sums(self.hi - self.lo, self.unit, self.first.numel() - 1)


def sums(values: Tensor, group: Tensor, groups: int) -> Tensor:
    """The sums of the values of each group, ``int64[groups]``."""
    return values.new_zeros(groups).index_add_(0, group, values)


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
    queries = max(1, CHUNK // block_size[0]) * block_size[0]
    starts = range(0, context.q_len, queries)
    chunks = (context.of_queries(start, min(start + queries, context.q_len)) for start in starts)
    parts = [_units_of_part(chunk, size, block_size) for chunk in chunks]
    columns = ((part.work, part.visible, part.keys.first.diff(), part.keys.lo, part.keys.hi) for part in parts)
    work, visible, *keys = (torch.cat(column).cpu() for column in zip(*columns, strict=True))
    return QueryUnits(work, visible, KeyLists.counted(*keys))


def _units_of_part(context: Context, size: int, block_size: tuple[int, int]) -> QueryUnits:
    bounds, shape = analyze(context), (context.batch, context.heads)
    touched = BlockSets(context, size, 1).touched(bounds.upper)  # which keys of each unit
    units = touched.lo.shape[2]
    if bounds.exact:
        blocks = BlockSets(replace(context, q_len=units), block_size[0] // size, block_size[1]).touched(touched)
        of_row = bounds.lower.counts()
    else:
        sets = BlockSets(context, *block_size)
        found = decide_open(classify(bounds, sets), sets)
        blocks, of_row = found.partial | found.full, row_counts(bounds, found, sets)
    computed = blocks.expand(*shape, blocks.lo.shape[2]).counts().sum((0, 1)) * block_size[1]
    unit = torch.arange(units, device=computed.device)
    queries = (context.q_len - unit * size).clamp(max=size)
    visible = torch.nn.functional.pad(of_row.expand(*shape, context.q_len).sum((0, 1)), (0, units * size - context.q_len))
    block = unit.div(block_size[0] // size, rounding_mode="floor")
    return QueryUnits(computed[block] * queries, visible.view(units, size).sum(-1), KeyLists.of(touched))
