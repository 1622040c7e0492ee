"""Masks of sparse attention that depend on data or chance: dropped and evicted keys, random blocks and cells."""

from __future__ import annotations

from random import Random
from typing import Any

from flexmask.catalogue.arguments import fixed_int, int_or_index, lookup
from flexmask.errors import ExpressionError, OperandError
from flexmask.expr.data import Data, as_table
from flexmask.expr.index import Index, as_index, b, h, kv, minimum, q
from flexmask.expr.mask import And, Mask, Or, Truth
from flexmask.expr.tables import Param, Table
from flexmask.registry import named

__all__ = ["bigbird", "eviction", "qk_sparse", "random_cells"]

#: Each random block of a row is a condition of the mask.
MAX_RANDOM = 64
#: Choosing for as many blocks takes seconds.
MAX_BLOCKS = 2**17


@named
def bigbird(
    blocks: int, size: Index | int, *, random_blocks: int = 3, global_blocks: int = 1, around: int = 1, seed: int = 0
) -> Mask:
    """Blocks attend to global blocks, the blocks around their own and a fixed number of random ones; global blocks to all.

    Predicate: ``(x < global_blocks) | (y < global_blocks) | (abs(x - y) <= around) | (y in chosen[x])`` with the blocks
    ``x = q // size`` and ``y = kv // size``; keys after the blocks are masked out, and queries after them have no ``chosen[x]``

    ``bigbird(blocks=6, size=1, random_blocks=1, seed=1)`` at 6 x 6::

        ■ ■ ■ ■ ■ ■
        ■ ■ ■ ⬚ ⬚ ■
        ■ ■ ■ ■ ■ ⬚
        ■ ⬚ ■ ■ ■ ■
        ■ ■ ⬚ ■ ■ ■
        ■ ⬚ ■ ⬚ ■ ■

    Args:
        blocks: the number of blocks of the sequence.
        size: tokens in a block.
        random_blocks: how many other blocks each block attends to by chance, at most 64; fewer where there are not so many.
        global_blocks: the first blocks, which attend to and are attended to by all.
        around: blocks to either side of its own that a block attends to.
        seed: of the choice, which is the same on every device.

    Raises:
        ExpressionError: fewer than one block or more than 131,072, a size below 1, another number below 0, or more than 64 random
            blocks.

    Source: BigBird, https://arxiv.org/abs/2007.14062
    """
    n, count = fixed_int(blocks, "bigbird: blocks", 1, MAX_BLOCKS), int_or_index(size, "bigbird: size", 1)
    most = fixed_int(random_blocks, "bigbird: random_blocks", most=MAX_RANDOM)
    few = fixed_int(global_blocks, "bigbird: global_blocks")
    reach, draw = fixed_int(around, "bigbird: around"), Random(fixed_int(seed, "bigbird: seed"))
    stop = max(few, n)

    def others(own: int) -> list[int]:
        """Some blocks that are neither global nor around a block."""
        first, behind = min(max(few, own - reach), stop), min(max(few, own + reach + 1), stop)
        number = stop - few - (behind - first)
        places = [few + place for place in draw.sample(range(number), min(most, number))]
        return sorted(place if place < first else place + behind - first for place in places)

    chosen = [others(own) for own in range(n)]
    width = max(map(len, chosen))
    table = as_table([row + [-1] * (width - len(row)) for row in [*chosen, []]], "bigbird: chosen") if width else None
    x, y = q // count, kv // count
    by_chance = [] if table is None else [table[minimum(x, n), place] == y for place in range(width)]
    return Or.make((x < few, y < few, (y >= x - reach) & (y <= x + reach), *by_chance)) & (y < n)


@named
def eviction(steps: Data) -> Mask:
    """Masks out each key from the query on at which it is evicted from the cache. Usually combined with :func:`flexmask.causal`.

    Predicate: ``q < steps[b, h, kv]``

    ``eviction(steps=[4, 2, 4, 3])`` at 4 x 4 and 3 x 4::

        ■ ■ ■ ■     ■ ■ ■ ■
        ■ ■ ■ ■     ■ ■ ■ ■
        ■ ⬚ ■ ■     ■ ⬚ ■ ■
        ■ ⬚ ■ ⬚

    Args:
        steps: for each key the first query that does not attend to it, ``int[kv_len]``, ``int[B, kv_len]`` or
            ``int[B, H, kv_len]``; an axis B or H of size 1 is broadcast.

    Raises:
        ExpressionError: another number of axes.

    Source: the random eviction mask of FlashMask, https://arxiv.org/abs/2410.01359
    """
    places = ((kv,), (b, kv), (b, h, kv))
    return q < lookup(steps, "eviction: steps", "[KV], [B, KV] or [B, H, KV]", *places)


@named
def qk_sparse(starts: Data, lengths: Data) -> Mask:
    """Masks out ranges of keys for the queries up to the end of each range. Usually combined with :func:`flexmask.causal`.

    Predicate: ``(kv < starts[b, i]) | (kv >= end) | (q >= end)`` with ``end = starts[b, i] + lengths[b, i]``, for every ``i``

    ``qk_sparse(starts=[1], lengths=[2])`` at 4 x 4 and 3 x 5::

        ■ ⬚ ⬚ ■     ■ ⬚ ⬚ ■ ■
        ■ ⬚ ⬚ ■     ■ ⬚ ⬚ ■ ■
        ■ ⬚ ⬚ ■     ■ ⬚ ⬚ ■ ■
        ■ ■ ■ ■

    Args:
        starts: the first key of each range, ``[n]`` or ``[B, n]``.
        lengths: the number of keys in each range, ``[n]`` or ``[B, n]``.

    Raises:
        ExpressionError: parameters, or tables of other shapes: the mask has a condition for each range.

    Source: the QK-sparse mask of FlashMask, https://arxiv.org/abs/2410.01359
    """
    tables: dict[str, Table] = {}
    for what, data in (("starts", starts), ("lengths", lengths)):
        if isinstance(data, Param):
            raise ExpressionError(
                f"qk_sparse: {what} cannot be a parameter, as the mask has a condition for each range: write the values of {data}"
            )
        tables[what] = as_table(data, f"qk_sparse: {what}")
        if not tables[what].shape:
            raise ExpressionError(f"qk_sparse: {what} must be a list, one entry for each range, got one number")
    counts = [table.shape[-1] or 0 for table in tables.values()]
    if counts[0] != counts[1]:
        raise ExpressionError(f"qk_sparse: {counts[0]} starts with {counts[1]} lengths; give as many of each")
    seen: list[Mask] = []
    for i in range(counts[0]):
        start, length = (lookup(data, f"qk_sparse: {what}", "[n] or [B, n]", (i,), (b, i)) for what, data in tables.items())
        seen.append((kv < start) | (kv >= start + length) | (q >= start + length))
    return And.make(tuple(seen))


#: A prime: products of two numbers below it stay within 64 bits.
PRIME = 2**31 - 1
#: Large factors and summands without a pattern.
MIX = (1_517_746_329, 1_865_811_235, 1_183_186_591, 2_034_287_659, 1_640_531_527)


@named
def random_cells(p: float, *, seed: Index | int = 0) -> Mask:
    """Each cell is visible by chance. The same seed gives the same cells on every device.

    Predicate: ``hash(seed, q, kv) < p * (2**31 - 1)``

    ``random_cells(p=0.5, seed=1)`` at 4 x 4 and 3 x 5::

        ■ ■ ■ ■     ■ ■ ■ ■ ■
        ■ ⬚ ■ ⬚     ■ ⬚ ■ ⬚ ■
        ⬚ ⬚ ⬚ ⬚     ⬚ ⬚ ⬚ ⬚ ⬚
        ⬚ ⬚ ⬚ ■

    Args:
        p: the share of visible cells, from 0 to 1.
        seed: an integer from 0 up. An index expression gives each sequence or head different cells, e.g. ``seed=8 * b + h``.

    Raises:
        ExpressionError: a share outside 0 to 1, or a negative seed.
        OperandError: a share that is not a number.

    Source: ``RandomMask`` in the tests of Splash attention.
    """
    if isinstance(p, bool) or not isinstance(p, int | float):
        raise OperandError(f"random_cells: p must be a number from 0 to 1, got {p!r}")
    if not 0 <= p <= 1:
        raise ExpressionError(f"random_cells: p must be between 0 and 1, got {p}")
    start = int_or_index(seed, "random_cells: seed")
    if p in (0, 1):
        return Truth(p == 1)
    row = _squared(start * MIX[0] + MIX[1]) + q * MIX[2]
    cell = _squared(row) + kv * MIX[3]
    return as_index(_squared(_squared(cell) + MIX[4])) < round(p * PRIME)


def _squared(state: Any) -> Any:
    """A round of mixing, of an index expression or an integer. (Each use of a state evaluates it once more.)"""
    reduced = state % PRIME
    return reduced * reduced % PRIME
