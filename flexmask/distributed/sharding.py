"""Which rank holds which tokens of a sequence, what it computes, and which keys it needs: a plan from masks and sizes alone.

Every process computes the same plan; no process group is needed. All positions are those of the whole sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from itertools import chain
from operator import or_
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from flexmask._checks import checked_int, nearest
from flexmask.distributed.balance import balanced, contiguous, head_tail, imbalance
from flexmask.distributed.query_units import KeyLists, QueryUnits, sums, unit_size, units_of
from flexmask.errors import LoweringError, OperandError
from flexmask.expr.mask import ALL_CELLS, Mask
from flexmask.intervals.bind import bind
from flexmask.intervals.context import MAX_LENGTH, Context
from flexmask.intervals.sizes import own_sizes
from flexmask.lowering.block_mask import block_sizes
from flexmask.tracing.trace import MaskLike, as_mask

#: How the tokens of a sequence are distributed: see :func:`shard_sequence`.
Balance: TypeAlias = Literal["work", "head_tail", "contiguous"]
#: The masks of a model: one, one for each layer, or each with the number of its layers.
Masks: TypeAlias = "MaskLike | Sequence[MaskLike] | Mapping[Mask, int] | Mapping[str, int]"

#: More ranks than this are a mistake.
MAX_RANKS = 2**20
#: Of many ranks a table has so many at each end.
SHOWN = 8


@dataclass(frozen=True, eq=False)
class Sharding:
    """The shards of a sequence, from :func:`shard_sequence`. ``str()`` is a table. All tensors are in the CPU's memory.

    Attributes:
        seq_len: tokens of the sequence.
        ranks: processes that it is distributed over.
        balance: how it is.
        tokens: tokens of each rank, ``int64[ranks]``.
        work: cells that the kernels of each rank compute, ``int64[ranks]``, in blocks that are not empty, over all sequences,
            heads and layers.
        visible: visible cells of each rank, ``int64[ranks]``, over all sequences, heads and layers.
    """

    seq_len: int
    ranks: int
    balance: Balance
    tokens: Tensor
    work: Tensor
    visible: Tensor
    _held: KeyLists = field(repr=False)  # the tokens of each rank
    _seen: tuple[KeyLists, ...] = field(repr=False)  # the keys that each rank attends to, of each mask that differs
    _layers: tuple[int, ...] = field(repr=False)
    _numbers: tuple[int, ...] = field(repr=False)  # of each given mask, among those that differ

    def runs(self, rank: int) -> Tensor:
        """The positions of a rank's tokens as intervals ``[lo, hi)`` in order, ``int64[n, 2]``."""
        return self._held.runs(self._checked(rank))

    def positions(self, rank: int) -> Tensor:
        """The positions of a rank's tokens in order, ``int64[tokens]``; the same in all sequences of the batch."""
        return positions_of(self.runs(rank))

    def seen(self, rank: int, mask: int | None = None) -> Tensor:
        """The keys that some query of a rank attends to, as intervals ``[lo, hi)`` in order, ``int64[n, 2]``.

        In any sequence and any head. More keys where the mask is not separable in q and kv.

        Args:
            rank: the rank, from 0 up.
            mask: the number of a mask, in the order in which they were given; None for any of them.
        """
        if mask is None:
            seen = reduce(or_, self._seen)
        else:
            seen = self._seen[self._numbers[checked_int(mask, "mask", 0, len(self._numbers) - 1)]]
        return seen.runs(self._checked(rank))

    @property
    def imbalance(self) -> float:
        """The most work of a rank relative to the mean, at least 1."""
        return imbalance(self.work)

    @cached_property
    def received(self) -> Tensor:
        """How many keys of other ranks each rank needs, over all layers, ``int64[ranks]``.

        Keys and values of a forward pass are ``received * 2 * kv_heads * d_head * itemsize * batch`` bytes.
        """
        return self._exchanged[0]

    @cached_property
    def sent(self) -> Tensor:
        """How many of its keys each rank sends, once for each rank that needs it, over all layers, ``int64[ranks]``."""
        return self._exchanged[1]

    @property
    def received_fraction(self) -> float:
        """The keys that all ranks receive, relative to those of an all-gather, 0 to 1."""
        gathered = sum(self._layers) * self.seq_len * (self.ranks - 1)
        return int(self.received.sum()) / gathered if gathered else 0.0

    @cached_property
    def _exchanged(self) -> tuple[Tensor, Tensor]:
        """The keys received and sent by each rank."""
        held = self._held
        received, sent = torch.zeros_like(self.work), torch.zeros_like(self.work)
        for lists, layers in zip(self._seen, self._layers, strict=True):
            missing = lists.beyond(held)
            needed = sums(lists.total(held.hi) - lists.total(held.lo), held.unit, self.ranks)
            received += layers * missing
            sent += layers * (needed - (lists.sizes() - missing))
        return received, sent

    def __str__(self) -> str:
        """A table with a row for each rank; of many ranks the first and the last."""
        of_mean = self.work / self.work.double().mean().clamp(min=1)
        rows = [["rank", "tokens", "runs", "work", "keys in", "keys out"]]
        ends = range(SHOWN), range(self.ranks - SHOWN, self.ranks)
        for rank in range(self.ranks) if self.ranks <= 2 * SHOWN else chain(*ends):
            numbers = (self.tokens[rank], len(self._held.runs(rank)), self.received[rank], self.sent[rank])
            tokens, runs, received, sent = (f"{int(number):,}" for number in numbers)
            rows.append([f"{rank:,}", tokens, runs, f"{of_mean[rank]:.3f}", received, sent])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]
        if len(rows) <= self.ranks:
            lines.insert(SHOWN + 1, f"{'...':>{widths[0]}}")
        lines.append(
            f"most work {self.imbalance:.3f} of the mean, {self.received_fraction:.1%} of the keys of an all-gather received"
        )
        return "\n".join(lines)

    def _checked(self, rank: int) -> int:
        return checked_int(rank, "rank", 0, self.ranks - 1, LoweringError)


def shard_sequence(
    masks: Masks | None,
    seq_len: int,
    ranks: int,
    *,
    balance: Balance = "work",
    batch: int | None = None,
    heads: int | None = None,
    block_size: int | tuple[int, int] = 128,
) -> Sharding:
    """Distributes the tokens of a sequence over ranks, for self-attention with some masks.

    Args:
        masks: the mask of all layers; a list, one for each layer; or a dict from masks to the number of layers that have them.
            None is no mask.
        seq_len: tokens; any number, also fewer than ranks, some of which then have none.
        ranks: processes.
        balance: ``"work"`` gives each rank the same number of tokens, up to a block, and the same work, in few runs of tokens
            that attend to few keys of others; ``"head_tail"`` gives each rank one run and its mirror image from the end, which
            balances causal masks; ``"contiguous"`` gives each rank one run.
        batch: sequences; by default as many as the masks have data for.
        heads: heads; by default as many as the masks differ in.
        block_size: tokens in a block of the kernel, or the pair (queries, keys).

    Raises:
        OperandError: an argument of another type.
        LoweringError: a mask cannot be lowered at these sizes, or sizes beyond their limits.
    """
    counts, numbers = layers_of(masks)
    seq_len = checked_int(seq_len, "seq_len", most=MAX_LENGTH, kind=LoweringError)
    ranks = checked_int(ranks, "ranks", most=MAX_RANKS, kind=LoweringError)
    if not isinstance(balance, str) or balance not in get_args(Balance):
        names = ", ".join(map(repr, get_args(Balance)))
        raise OperandError(f"balance must be one of {names}, got {balance!r}.{nearest(str(balance), get_args(Balance))}")
    sizes = block_sizes(block_size)
    contexts = _contexts(list(counts), seq_len, batch, heads)
    groups = max(context.full_batch for context in contexts) * (heads or max(context.heads for context in contexts))
    pairs = zip(contexts, counts.values(), strict=True)
    times = [layers * groups // (context.batch * context.heads) for context, layers in pairs]
    if sum(counts.values()) * groups * seq_len**2 >= 2**62:
        raise LoweringError(f"the cells of {seq_len} tokens in all sequences, heads and layers exceed 64-bit integers")
    size = unit_size(seq_len, ranks, sizes[0])
    found = [units_of(context, size, sizes) for context in contexts]
    weights = torch.tensor(times, device="cpu")
    work, visible = (weights @ torch.stack([getattr(units, name) for units in found]) for name in ("work", "visible"))
    owner = _in_order(_owners(balance, work, found, ranks, sizes[0] // size))
    starts = torch.arange(owner.numel(), device="cpu") * size
    held = KeyLists.union(ranks, owner, starts, (starts + size).clamp(max=seq_len))
    return Sharding(
        seq_len=seq_len,
        ranks=ranks,
        balance=balance,
        tokens=held.sizes(),
        work=sums(work, owner, ranks),
        visible=sums(visible, owner, ranks),
        _held=held,
        _seen=tuple(units.keys.grouped(owner, ranks) for units in found),
        _layers=tuple(counts.values()),
        _numbers=tuple(numbers),
    )


def positions_of(runs: Tensor) -> Tensor:
    """The positions in intervals ``int64[n, 2]``, one interval after another."""
    lengths = runs[:, 1] - runs[:, 0]
    first = lengths.cumsum(0) - lengths
    return torch.arange(int(lengths.sum()), device="cpu") + (runs[:, 0] - first).repeat_interleave(lengths)


def layers_of(masks: object, device: torch.device | None = None) -> tuple[dict[Mask, int], list[int]]:
    """The masks that differ, each with the number of all its layers, and for each given mask which of these it is.

    Models have many layers and few masks. None is no mask.
    """
    pairs: list[tuple[object, object]]
    if isinstance(masks, Mapping):
        pairs = list(masks.items())
    elif isinstance(masks, Sequence) and not isinstance(masks, str):
        pairs = [(mask, 1) for mask in masks]
    else:
        pairs = [(masks, 1)]
    if not pairs:
        raise OperandError("masks must be a mask, or a list or a dict with at least one, got none")
    counts: dict[Mask, int] = {}
    given = []
    for mask, count in pairs:
        found = ALL_CELLS if mask is None else as_mask(mask, "masks", also="a list or a dict of them", device=device)
        counts[found] = counts.get(found, 0) + checked_int(count, "the number of layers of a mask")
        given.append(found)
    numbers = {mask: number for number, mask in enumerate(counts)}
    return counts, [numbers[mask] for mask in given]


def _contexts(masks: Sequence[Mask], seq_len: int, batch: int | None, heads: int | None) -> list[Context]:
    """The lowering contexts of the masks, those without an axis of their own with the sizes of the others."""
    own = [own_sizes(mask) for mask in masks]
    sizes = [max((found[axis] for found in own if axis in found), default=None) for axis in ("b", "h")]
    b, h = (size if given is None else given for size, given in zip(sizes, (batch, heads), strict=True))
    return [bind(mask, seq_len, seq_len, b, h) for mask in masks]


def _owners(balance: Balance, work: Tensor, found: Sequence[QueryUnits], ranks: int, in_block: int) -> Tensor:
    """The rank of each unit, ``int64[units]``."""
    if balance == "contiguous":
        return contiguous(work.numel(), ranks)
    if balance == "head_tail":
        return head_tail(work.numel(), ranks)
    return balanced(work, reduce(or_, [units.keys for units in found]), ranks, in_block)


def _in_order(owner: Tensor) -> Tensor:
    """The same shards, with the ranks in the order of their first tokens."""
    first = torch.full((int(owner.max()) + 1,), owner.numel(), device="cpu")
    first.scatter_reduce_(0, owner, torch.arange(owner.numel(), device="cpu"), "amin")
    return first.argsort().argsort()[owner]
