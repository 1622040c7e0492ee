"""Which rank holds which units of queries: equally many for each, with equal work, and few keys to receive."""

from __future__ import annotations

import torch
from torch import Tensor

from flexmask.blocks.layout import rank_in_row
from flexmask.distributed.query_units import KeyLists

__all__ = ["arcs", "contiguous", "head_tail", "imbalance"]

#: How far the work of a rank may be from the mean for the sake of fewer keys to receive.
TOLERANCE = 0.01


def contiguous(units: int, ranks: int) -> Tensor:
    """One run of units for each rank: the rank of each unit, ``int64[units]``."""
    return torch.arange(units) * ranks // units


def head_tail(units: int, ranks: int) -> Tensor:
    """Two runs for each rank, as far from the start as from the end: the rank of each unit, ``int64[units]``."""
    chunk = torch.arange(units) * (2 * ranks) // units
    return torch.minimum(chunk, 2 * ranks - 1 - chunk)


def arcs(work: Tensor, keys: KeyLists, ranks: int) -> Tensor:
    """Equally many units with about equal work for each rank: the rank of each unit, ``int64[units]``.

    The units lie on a circle. The arcs of ``units / ranks`` units have the mean work on average, and neighboring arcs differ by
    two units, so that some arc has about the mean work. It becomes a rank's, the circle is closed, and so on. Hence all ranks
    together have at most ``2 * ranks`` runs. (The same argument proves that a necklace with beads of two kinds can be divided
    equally with two cuts for each thief, N. Alon, "Splitting necklaces", 1987.) Of the arcs with about the mean work the one is
    taken whose queries attend to the fewest keys.

    Args:
        work: of each unit, ``int64[units]``.
        keys: those that the queries of each unit attend to.
        ranks: at most the number of units.
    """
    owner, left = torch.empty_like(work), torch.arange(work.numel())
    sizes, new = keys.sizes(), _new_keys(keys)
    total = float(work.sum())
    mean = total / ranks
    for rank in range(ranks - 1):
        others, units = ranks - rank - 1, left.numel()
        length = -(-units // (others + 1))
        sums, seen = (_prefix_sums(torch.cat((part, part[:length]))) for part in (work, new))
        of_arc = sums[length : length + units] - sums[:units]
        attended = sizes + seen[length : length + units] - seen[1 : units + 1]
        low = max((1 - TOLERANCE) * mean, total - others * (1 + TOLERANCE / 2) * mean)
        high = min((1 + TOLERANCE) * mean, total - others * (1 - TOLERANCE / 2) * mean)
        near = (of_arc >= low) & (of_arc <= high)
        if bool(near.any()):
            start = int(attended.where(near, torch.iinfo(attended.dtype).max).argmin())
        else:
            start = int((of_arc - total / (others + 1)).abs().argmin())
        total -= float(of_arc[start])
        arc = (torch.arange(length) + start) % units
        owner[left[arc]] = rank
        before, after = (start - 1) % units, (start + length) % units
        new[after] = keys.select(left[[before, after]]).sizes() - sizes[before]
        keep = torch.ones(units, dtype=torch.bool)
        keep[arc] = False
        left, work, sizes, new = left[keep], work[keep], sizes[keep], new[keep]
    owner[left] = ranks - 1
    return owner


def imbalance(work: Tensor) -> float:
    """The most work of a rank, ``[ranks]``, relative to the mean; 1 where there is no work."""
    most, mean = float(work.max()), float(work.double().mean())
    return most / mean if mean else 1.0


def _prefix_sums(values: Tensor) -> Tensor:
    return torch.nn.functional.pad(values.cumsum(0), (1, 0))


def _new_keys(keys: KeyLists) -> Tensor:
    """How many keys of each unit are not among those of the unit before it, ``int64[units]``; the last is before the first."""
    counts = keys.first.diff().roll(1)
    unit = torch.repeat_interleave(counts)
    at = keys.first[:-1].roll(1)[unit] + rank_in_row(unit, counts)
    both = (torch.cat((own, before)) for own, before in ((keys.unit, unit), (keys.lo, keys.lo[at]), (keys.hi, keys.hi[at])))
    return KeyLists.union(counts.numel(), *both).sizes() - keys.sizes().roll(1)
