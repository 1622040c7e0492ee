"""Which rank holds which units of queries: equally many for each, with equal work, and few keys to receive."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from flexmask.distributed.query_units import KeyLists

__all__ = ["arcs", "balanced", "contiguous", "exchanged", "head_tail", "imbalance", "snake", "sums"]

#: How far above the mean the work of a rank may be for the sake of fewer keys to receive.
TOLERANCE = 0.02
#: Blocks of queries for each rank from which on no block is divided between ranks, so that kernels compute none twice.
MIN_BLOCKS = 4
#: How many times the keys of contiguous runs those of mirrored ones may be: 3/2 under a causal mask.
MIRRORED = 1.5
#: One of so many waiting ranks gets its arc in a pass over the units, which bounds the number of passes.
PASSES = 16
#: Exchanges for each rank at most, and ranks that an exchange is tried with.
EXCHANGES, TAKERS = 8, 64


def contiguous(units: int, ranks: int) -> Tensor:
    """One run of units for each rank: the rank of each unit, ``int64[units]``."""
    return torch.arange(units) * ranks // units


def head_tail(units: int, ranks: int) -> Tensor:
    """Two runs for each rank, as far from the start as from the end: the rank of each unit, ``int64[units]``."""
    chunk = torch.arange(units) * (2 * ranks) // units
    return torch.minimum(chunk, 2 * ranks - 1 - chunk)


def balanced(work: Tensor, keys: KeyLists, ranks: int, in_block: int) -> Tensor:
    """About equal work for each rank, with the fewest keys to receive: the rank of each unit, ``int64[units]``.

    The best of what is tried: one run of units for each rank, its mirror image in addition, :func:`arcs` of blocks and, where
    these leave some rank with too much work, :func:`snake`.

    Args:
        work: of each unit, ``int64[units]``.
        keys: those that the queries of each unit attend to.
        ranks: how many there are.
        in_block: units in a block of queries of the kernel. Blocks are divided between ranks only where there are few.
    """
    tried: list[tuple[float, float, Tensor]] = []
    fewest = 0
    for number, owner in enumerate(_assignments(work, keys, ranks, in_block)):
        most, attended = imbalance(sums(work, owner, ranks)), int(keys.grouped(owner, ranks).sizes().sum())
        fewest = fewest or attended  # of contiguous runs
        tried.append((max(most, 1 + TOLERANCE), most * attended, owner))
        if most <= 1 + TOLERANCE and (number > 1 or attended <= MIRRORED * fewest):
            break
    return min(tried, key=lambda found: found[:2])[2]


def _assignments(work: Tensor, keys: KeyLists, ranks: int, in_block: int) -> Iterator[Tensor]:
    """The rank of each unit, ``int64[units]``, as :func:`balanced` tries them."""
    units = work.numel()
    yield contiguous(units, ranks)
    yield head_tail(units, ranks)
    block = torch.arange(units)
    if units >= MIN_BLOCKS * in_block * ranks and in_block > 1:
        block = block.div(in_block, rounding_mode="floor")
        blocks = int(block[-1]) + 1
        work, keys = sums(work, block, blocks), keys.grouped(block, blocks)
    ranks = min(ranks, work.numel())
    yield exchanged(arcs(work, keys, ranks), work, keys, ranks)[block]
    yield exchanged(snake(work, ranks), work, keys, ranks)[block]


def snake(work: Tensor, ranks: int) -> Tensor:
    """The units by descending work to the ranks there and back: the rank of each unit, ``int64[units]``."""
    turn = torch.arange(work.numel())
    back = turn.div(ranks, rounding_mode="floor") % 2 == 1
    owner = torch.empty_like(turn)
    owner[work.argsort(descending=True, stable=True)] = torch.where(back, ranks - 1 - turn % ranks, turn % ranks)
    return owner


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
    sizes, new = keys.sizes(), _new_keys(keys, keys.take(left.roll(1)))
    total, rank = int(work.sum()), 0
    mean, aside = total / ranks, TOLERANCE / 2
    while rank < ranks - 1:
        waiting, units = ranks - rank, left.numel()
        length = -(-units // waiting)
        of_arc = _arc_sums(work, length)
        attended = sizes + _arc_sums(new, length) - new  # all keys of the first unit, and the new ones of the others
        low, high = ((1 + sign * aside) * mean for sign in (-1, 1))
        rest = [total - (waiting - 1) * (1 + sign * aside / 2) * mean for sign in (1, -1)]  # so that the others are near the mean
        near = (of_arc >= max(low, rest[0])) & (of_arc <= min(high, rest[1]))
        if not bool(near.any()):
            aside_of_arc = (of_arc - total / waiting).abs()
            near = aside_of_arc <= 2 * aside_of_arc.min()
        starts = _disjoint_starts(attended.where(near, torch.iinfo(attended.dtype).max), length)
        keep = torch.ones(units, dtype=torch.bool)
        most = min(max(1, waiting // PASSES), units % waiting or waiting)
        for start in starts:
            others = ranks - rank - 1
            after = total - int(of_arc[start])
            if keep.all() or (most and abs(after - others * mean) <= others * mean * aside / 2):
                arc = (torch.arange(length) + start) % units
                owner[left[arc]], keep[arc] = rank, False
                total, rank, most = after, rank + 1, most - 1
        follows = ~keep.roll(1)[keep]  # units whose neighbor was removed
        left, work, sizes, new = left[keep], work[keep], sizes[keep], new[keep]
        new[follows] = _new_keys(keys.take(left[follows]), keys.take(left.roll(1)[follows]))
    owner[left] = ranks - 1
    return owner


def _arc_sums(values: Tensor, length: int) -> Tensor:
    """The sums of as many values from each one on, around the circle."""
    prefix = torch.nn.functional.pad(torch.cat((values, values[:length])).cumsum(0), (1, 0))
    return prefix[length:-1] - prefix[: -length - 1]


def _disjoint_starts(cost: Tensor, length: int) -> list[int]:
    """Where arcs of a length start that have no unit in common, the cheapest first, by the cost of the arc from each unit."""
    first, limit = int(cost.argmin()), torch.iinfo(cost.dtype).max
    parts = cost.numel() // (2 * length)
    if parts < 2:
        return [first]
    # Arcs that start in the first half of a part of two lengths end in this part.
    least, at = cost.roll(-first)[: parts * 2 * length].view(parts, 2 * length)[:, :length].min(1)
    order = least.argsort(stable=True)[: int((least < limit).sum())]
    return [(first + part * 2 * length + int(at[part])) % cost.numel() for part in order.tolist()]


def _new_keys(keys: KeyLists, before: KeyLists) -> Tensor:
    """How many keys of each unit are not among those of the unit before it, ``int64[units]``."""
    return (keys | before).sizes() - before.sizes()


def exchanged(owner: Tensor, work: Tensor, keys: KeyLists, ranks: int) -> Tensor:
    """The rank of each unit, after the most loaded ranks exchanged units with others for the same number of units.

    Where one unit is much of a rank's work, no arcs have about the mean work. Then single units are exchanged, which makes more
    runs. Of the exchanges after which both ranks have about the mean work the one is chosen that adds the fewest keys.

    Args:
        owner: the rank of each unit, ``int64[units]``.
        work: of each unit, ``int64[units]``.
        keys: those that the queries of each unit attend to.
        ranks: how many there are.
    """
    owner, load = owner.clone(), sums(work, owner, ranks)
    limit = float(load.double().mean()) * (1 + TOLERANCE)
    for _ in range(EXCHANGES * ranks):
        giver = int(load.argmax())
        if load[giver] <= limit:
            break
        given = (owner == giver).nonzero().squeeze(-1)
        for taker in load.argsort(stable=True)[:TAKERS].tolist():
            taken = (owner == taker).nonzero().squeeze(-1)
            less = work[given].unsqueeze(-1) - work[taken]
            most = torch.maximum(load[giver] - less, load[taker] + less)
            best = int(most.min()) if most.numel() else load[giver]
            if best < load[giver]:
                break
        else:
            break
        added = keys.take(given).without(keys.of_units(taken)).unsqueeze(-1) + keys.take(taken).without(keys.of_units(given))
        at = int(added.where(most <= max(best, limit), torch.iinfo(added.dtype).max).argmin())
        here, there = given[at // taken.numel()], taken[at % taken.numel()]
        owner[here], owner[there] = taker, giver
        load[[giver, taker]] += less.flatten()[at] * torch.tensor([-1, 1])
    return owner


def sums(values: Tensor, group: Tensor, groups: int) -> Tensor:
    """The sums of the values of each group, ``int64[groups]``."""
    return values.new_zeros(groups).index_add_(0, group, values)


def imbalance(work: Tensor) -> float:
    """The most work of a rank, ``[ranks]``, relative to the mean; 1 where there is no work."""
    most, mean = float(work.max()), float(work.double().mean())
    return most / mean if mean else 1.0
