"""Which rank holds which units of queries: equally many for each, with equal work, and few keys to receive.

Every process computes the same: sums are those of integers, exact also in ``float64``.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from flexmask.distributed.query_units import KeyLists, sums

#: How far above the mean the work of a rank may be for the sake of fewer keys to receive.
TOLERANCE = 0.02
#: Blocks of queries for each rank from which on no block is divided between ranks, so that kernels compute none twice.
MIN_BLOCKS = 4
#: How many times the keys of contiguous runs those of mirrored ones may be: 3/2 under a causal mask.
MIRRORED = 1.5
#: Units times key intervals of pairs of ranks up to which all pairs are compared at a time, some pairs at a time, and in all.
ALL_PAIRS, SOME_PAIRS, COMPARED = 2**15, 2**18, 2**24
#: How often all keys an exchange may add, if a rank has less work above the limit by the mean work.
PRICE = 20
#: Turns in which this price doubles from a small one, where only some pairs are compared.
TURNS = 12


def contiguous(units: int, ranks: int) -> Tensor:
    """One run of units for each rank: the rank of each unit, ``int64[units]``."""
    return torch.arange(units, device="cpu") * ranks // units


def head_tail(units: int, ranks: int) -> Tensor:
    """Two runs for each rank, as far from the start as from the end: the rank of each unit, ``int64[units]``."""
    chunk = torch.arange(units, device="cpu") * (2 * ranks) // units
    return torch.minimum(chunk, 2 * ranks - 1 - chunk)


def balanced(work: Tensor, keys: KeyLists, ranks: int, in_block: int) -> Tensor:
    """About equal work for each rank, with the fewest keys to receive: the rank of each unit, ``int64[units]``.

    The best of what is tried: one run of units for each rank, its mirror image in addition, and :func:`halved` blocks, of which
    ranks have :func:`exchanged` some.

    Args:
        work: of each unit, ``int64[units]``.
        keys: those that the queries of each unit attend to.
        ranks: how many there are.
        in_block: units in a block of queries of the kernel. Blocks are divided between ranks only where there are few.
    """
    tried: list[tuple[float, float, Tensor]] = []
    fewest = 0
    for owner in _assignments(work, keys, ranks, in_block):
        most, attended = imbalance(sums(work, owner, ranks)), int(keys.grouped(owner, ranks).sizes().sum())
        fewest = fewest or attended  # of contiguous runs
        tried.append((max(most, 1 + TOLERANCE), most * attended, owner))
        if most <= 1 + TOLERANCE and attended <= MIRRORED * fewest:
            break
    return min(tried, key=lambda found: found[:2])[2]


def _assignments(work: Tensor, keys: KeyLists, ranks: int, in_block: int) -> Iterator[Tensor]:
    """The rank of each unit, ``int64[units]``, as :func:`balanced` tries them."""
    units = work.numel()
    yield contiguous(units, ranks)
    yield head_tail(units, ranks)
    block = torch.arange(units, device="cpu")
    if units >= MIN_BLOCKS * in_block * ranks and in_block > 1:
        block = block.div(in_block, rounding_mode="floor")
        blocks = int(block[-1]) + 1
        work, keys = sums(work, block, blocks), keys.grouped(block, blocks)
    ranks = min(ranks, work.numel())
    yield exchanged(halved(work, keys, ranks), work, keys, ranks)[block]


# ---------------------------------------------------------------- halves


def halved(work: Tensor, keys: KeyLists, ranks: int) -> Tensor:
    """Equally many units with about equal work for each rank: the rank of each unit, ``int64[units]``.

    The units lie on a circle. The arcs of half of the units have half of the work on average, and neighboring arcs differ by two
    units, so that some arc has about half of the work. It becomes the units of half of the ranks, and what is left those of the
    others; both are closed to circles and halved again. Hence all ranks together have at most ``2 * ranks`` runs. (The same
    argument proves that a necklace with beads of two kinds can be divided equally with two cuts for each thief, N. Alon,
    "Splitting necklaces", 1987.) Of the arcs with about half of the work the one is taken for which fewest keys are attended to
    on both sides of its two cuts.

    Args:
        work: of each unit, ``int64[units]``.
        keys: those that the queries of each unit attend to.
        ranks: at most the number of units.
    """
    units = work.numel()
    at = torch.arange(units, device="cpu")
    order = at.clone()  # the units of all groups of ranks, one group after another
    stops = torch.arange(ranks + 1, device="cpu") * units // ranks
    edges = torch.tensor([0, ranks], device="cpu")  # of the groups
    before, shared = torch.full((units,), -1, device="cpu"), torch.zeros_like(work)
    mean = float(work.sum()) / ranks
    while len(edges) <= ranks:
        low, high = edges[:-1], edges[1:]
        middle = (low + high + 1).div(2, rounding_mode="floor")
        first, last = stops[low], stops[high]
        length, group = stops[middle] - first, torch.repeat_interleave(last - first)
        start, stop = first[group], last[group]
        previous = order[torch.where(at == start, stop, at) - 1]
        new = (before[order] != previous).nonzero().squeeze(-1)
        before[order[new]], shared[order[new]] = previous[new], keys.take(order[new]).shared(keys.take(previous[new]))
        prefix = torch.nn.functional.pad(work[order].cumsum(0), (1, 0))
        end = at + length[group]
        around = end - (stop - start) * (end >= stop)  # where the arc from each unit ends, around the circle
        of_arc = prefix[around] - prefix[at] + (prefix[stop] - prefix[start]) * (around < end)
        near = _near_half(of_arc, prefix[last] - prefix[first], high - low, middle - low, group, mean)
        cost = (shared[order] + shared[order[around]]).where(near, torch.iinfo(shared.dtype).max)
        least = torch.full_like(first, units).scatter_reduce(0, group, cost, "amin", include_self=False)
        chosen = torch.full_like(first, units).scatter_reduce(0, group, at.where(cost == least[group], units), "amin")
        outside = (at - chosen[group]) % (stop - start) >= length[group]
        order = order[(2 * group + outside).argsort(stable=True)]
        edges = torch.cat((edges, middle)).unique()
    owner = torch.empty_like(order)
    owner[order] = torch.repeat_interleave(stops.diff())
    return owner


def _near_half(of_arc: Tensor, total: Tensor, ranks: Tensor, half: Tensor, group: Tensor, mean: float) -> Tensor:
    """Which arcs leave both halves of their group of ranks with about the mean work, or as near to it as any, ``bool[units]``.

    Args:
        of_arc: the work of each arc, ``int64[units]``.
        total: of each group, ``int64[groups]``.
        ranks: of each group, ``int64[groups]``.
        half: those of the ranks of each group that get the arc, ``int64[groups]``.
        group: of each arc, ``int64[units]``.
        mean: the mean work of a rank.
    """
    slack = TOLERANCE * mean  # of each group of ranks, and at last of each rank
    wanted, left = half.double() * mean, total - (ranks - half).double() * mean
    low, high = torch.maximum(wanted, left) - slack, torch.minimum(wanted, left) + slack
    aside = (of_arc - (total.double() * half / ranks)[group]).abs()
    least = torch.zeros_like(low).scatter_reduce(0, group, aside, "amin", include_self=False)
    return (of_arc >= low[group]) & (of_arc <= high[group]) | (aside <= 2 * least[group])


# ---------------------------------------------------------------- exchanges


def exchanged(owner: Tensor, work: Tensor, keys: KeyLists, ranks: int) -> Tensor:
    """The rank of each unit, after pairs of ranks exchanged units, one for one.

    Where one unit is much of a rank's work, no arcs have about half of the work. Of the exchanges between two ranks the one of
    the least cost is made: the keys that both attend to, and ``PRICE`` times the work above the limit. With few ranks that have
    few units, all pairs of ranks are compared until no exchange is left that gains something; else the most loaded ones, until
    none is above the limit, with exchanges that add few keys first.

    Args:
        owner: the rank of each unit, ``int64[units]``.
        work: of each unit, ``int64[units]``.
        keys: those that the queries of each unit attend to.
        ranks: how many there are; each has some unit.
    """
    held, is_unit = _members(owner, ranks)
    load, width = sums(work, owner, ranks), int(keys.hi.max()) if keys.hi.numel() else 1
    mean, n = load.double().mean(), held.shape[1]
    limit, price = int(mean * (1 + TOLERANCE)), float(PRICE * width / mean.clamp(min=1))
    size = n * max(n, int(sums(keys.first.diff(), owner, ranks).max()))  # of the comparison of a pair
    pairs, every = min(ranks // 2, SOME_PAIRS // size), ranks // 2 * size <= ALL_PAIRS

    def above(load: Tensor) -> Tensor:
        return (load - limit).clamp(min=0)

    turn = unchanged = compared = 0
    while pairs and unchanged < ranks and compared < COMPARED and (every or int(load.max()) > limit):
        by_load, place = load.argsort(descending=True, stable=True), torch.arange(ranks, device="cpu")
        # In turn 0 the most loaded has the least loaded; in all turns all pairs meet.
        partner = (ranks - 1 - turn - place) % ranks
        place = place[place < partner][:pairs]
        if not every:
            place = place[load[by_load[place]] > limit]
        turn, unchanged, compared = turn + 1, unchanged + 1, compared + size * max(1, len(place))
        if not len(place):
            continue
        pair = torch.stack((by_load[place], by_load[partner[place]]), -1)
        (given, taken), (giver, taker) = held[pair].unbind(1), load[pair].view(-1, 2, 1, 1).unbind(1)
        less = work[given].unsqueeze(2) - work[taken].unsqueeze(1)
        more_above = above(giver - less) + above(taker + less) - above(giver) - above(taker)
        raised = price if every else price * 2.0 ** min(0, turn - TURNS)
        added = _added_keys(keys, held[pair], is_unit[pair]) + raised * more_above.double()
        both = is_unit[pair[:, 0]].unsqueeze(2) & is_unit[pair[:, 1]].unsqueeze(1)
        fewest, at = added.where(both, torch.inf).flatten(1).min(1)
        made = fewest < 0
        if bool(made.any()):
            (one, other), at = pair[made].unbind(1), at[made]
            x, y = at // n, at % n
            moved = work[held[one, x]] - work[held[other, y]]
            load[one], load[other] = load[one] - moved, load[other] + moved
            held[one, x], held[other, y] = held[other, y], held[one, x]
            unchanged = 0
    owner = torch.empty_like(owner)
    owner[held[is_unit]] = torch.arange(ranks, device="cpu").unsqueeze(-1).expand_as(held)[is_unit]
    return owner


def _members(owner: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
    """The units of each rank, ``int64[ranks, n]``, and which of them are none, filled up with unit 0, ``bool[ranks, n]``."""
    counts = owner.bincount(minlength=ranks)
    is_unit = torch.arange(int(counts.max()), device="cpu") < counts.unsqueeze(-1)
    held = torch.zeros(is_unit.shape, dtype=torch.int64, device="cpu")
    held[is_unit] = owner.argsort(stable=True)
    return held, is_unit


def _added_keys(keys: KeyLists, units: Tensor, is_unit: Tensor) -> Tensor:
    """How many more keys pairs of ranks attend to once they have exchanged two units, ``float64[pairs, n, n]``.

    Args:
        keys: those of all units.
        units: of both ranks of each pair, ``int64[pairs, 2, n]``.
        is_unit: which of them count, ``bool[pairs, 2, n]``.
    """
    pairs, _, n = units.shape
    found = keys.take(units.flatten())
    pair, width = found.unit.div(2 * n, rounding_mode="floor"), int(found.hi.max()) + 1 if found.hi.numel() else 1
    ends, place = torch.unique(torch.stack((found.lo, found.hi)) + pair * width, return_inverse=True)
    counts = ends.div(width, rounding_mode="floor").bincount(minlength=pairs)
    most = int(counts.max())
    # From one end of an interval of a pair to the next a unit attends to all keys or to none; after the last one to none.
    lengths = torch.zeros(pairs, most, dtype=torch.float64, device="cpu")
    lengths[torch.arange(most, device="cpu") < counts.unsqueeze(-1)] = ends.diff(append=ends[-1:]).double()
    opens_closes = torch.tensor([[1.0], [-1.0]], dtype=torch.float64, device="cpu").expand(place.shape)
    first = counts.cumsum(0) - counts
    attends = torch.zeros(units.numel() * most, dtype=torch.float64, device="cpu")
    attends.index_add_(0, (found.unit * most + place - first[pair]).flatten(), opens_closes.flatten())
    attends = attends.view(pairs, 2, n, most).cumsum(-1) * is_unit.unsqueeze(-1)
    times, lengths = attends.sum(2, keepdim=True), lengths.view(pairs, 1, 1, most)
    alone = attends * ((times == 1) * lengths)
    new = (attends * ((times.flip(1) == 0) * lengths)).sum(-1) - alone.sum(-1)
    still = alone[:, 0] @ attends[:, 1].mT + attends[:, 0] @ alone[:, 1].mT  # keys of the given unit and of the taken one
    return new[:, 0].unsqueeze(-1) + new[:, 1].unsqueeze(-2) + still


def imbalance(work: Tensor) -> float:
    """The most work of a rank, ``[ranks]``, relative to the mean; 1 where there is no work."""
    most, mean = float(work.max()), float(work.double().mean())
    return most / mean if mean else 1.0
