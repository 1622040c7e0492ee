"""Exchanges of tokens between ranks by functional collectives, which autograd and ``torch.compile`` take.

The gradient of an exchange is the reverse exchange: what several ranks received adds up at the rank that sent it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import Tensor

from flexmask._transforms import is_transformed
from flexmask.distributed.sharding import positions_of
from flexmask.errors import LoweringError

#: From this share of the tokens of an all-gather on, one all-gather is used, which needs no copy of a token for each receiver.
GATHER_SHARE = 0.9

_all_gather: Any = getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd


class TokenExchange:
    """Gives each rank the tokens of the sequence that it needs, in order, from those that hold them.

    Attributes:
        needed: the positions of the tokens that this rank gets, ``int64[m]``.
        gathers: whether every rank gets all tokens, of which it keeps these.
    """

    def __init__(self, held: Sequence[Tensor], needed: Sequence[Tensor], rank: int, group: Any, device: torch.device) -> None:
        """Works out what this rank sends and receives.

        Args:
            held: the tokens of each rank, as intervals ``[lo, hi)`` in order, ``int64[n, 2]``, on the CPU.
            needed: the tokens that each rank needs, in the same form.
            rank: this rank.
            group: the process group.
            device: of the tokens.
        """
        self._group, shards = group, Shards.of(held)
        own, positions = positions_of(held[rank]), positions_of(needed[rank])
        sender, at = shards.places(positions)
        receiver = torch.repeat_interleave(torch.tensor([len(runs) for runs in needed], device="cpu"))
        first, last = (torch.searchsorted(own, end.contiguous()) for end in torch.cat(list(needed)).unbind(1))
        to_each = torch.zeros(len(held), dtype=torch.int64, device="cpu").index_add_(0, receiver, last - first)
        self._sizes = to_each.tolist(), sender.bincount(minlength=len(held)).tolist()
        self._sent = positions_of(torch.stack((first, last), -1)).to(device)
        self._most = int(shards.sizes.max())
        self.gathers = 0 < GATHER_SHARE * len(held) * (len(held) - 1) * self._most <= shards.moved(needed)
        arrival = torch.empty_like(sender)
        arrival[sender.argsort(stable=True)] = torch.arange(len(sender), device="cpu")
        self._order = (sender * self._most + at if self.gathers else arrival).to(device)
        self.needed = positions.to(device)

    def __call__(self, tokens: Tensor) -> Tensor:
        """The needed tokens ``[m, ...]``, from those that this rank holds, ``[n, ...]``."""
        if self.gathers:
            padding = [0, 0] * (tokens.dim() - 1) + [0, self._most - tokens.shape[0]]
            arrived = _waited(_all_gather(_sendable(F.pad(tokens, padding)), 0, self._group))
        else:
            to_each, of_each = self._sizes
            arrived = _all_to_all(tokens.index_select(0, self._sent), of_each, to_each, self._group)
        needed: Tensor = arrived.index_select(0, self._order)
        return needed


class HeadExchange:
    """Gives each rank all tokens of a part of the heads, and back.

    Source: Jacobs et al., DeepSpeed Ulysses, https://arxiv.org/abs/2309.14509
    """

    def __init__(self, held: Sequence[Tensor], rank: int, group: Any, device: torch.device) -> None:
        """As :class:`TokenExchange`."""
        positions = positions_of(torch.cat(list(held)))
        self._group, self._sizes = group, Shards.of(held).sizes.tolist()
        self._own = [self._sizes[rank]] * len(held)
        self._place, self._order = positions.to(device), positions.argsort().to(device)

    def gather(self, *tensors: Tensor) -> list[Tensor]:
        """All tokens of this rank's part of the heads, ``[B, heads / ranks, seq_len, D]``, from ``[B, heads, n, D]``, each."""
        ranks = len(self._sizes)
        rows = [tensor.unflatten(1, (ranks, -1)).permute(1, 3, 0, 2, 4).flatten(0, 1) for tensor in tensors]
        widths = [row.shape[2] * row.shape[3] for row in rows]
        arrived = _all_to_all(torch.cat([row.flatten(2) for row in rows], -1), self._sizes, self._own, self._group)
        parts = arrived.index_select(0, self._order).split(widths, -1)
        return [part.unflatten(-1, row.shape[2:]).permute(1, 2, 0, 3) for part, row in zip(parts, rows, strict=True)]

    def scatter(self, tensor: Tensor) -> Tensor:
        """The tokens of this rank with all heads, ``[B, heads, n, D]``, from ``[B, heads / ranks, seq_len, D]``."""
        rows = tensor.permute(2, 0, 1, 3).index_select(0, self._place)
        arrived = _all_to_all(rows, self._own, self._sizes, self._group)
        heads: Tensor = arrived.unflatten(0, (len(self._sizes), self._own[0])).permute(2, 0, 3, 1, 4).flatten(1, 2)
        return heads


@dataclass(frozen=True, eq=False)
class Shards:
    """The runs of consecutive tokens that all ranks hold, those of a rank one after another.

    Attributes:
        rank: that holds each run, ``int64[runs]``.
        start: the position of its first token, ``int64[runs]``.
        before: tokens in the runs before it of all ranks, ``int64[runs]``.
        sizes: tokens of each rank, ``int64[ranks]``.
    """

    rank: Tensor
    start: Tensor
    before: Tensor
    sizes: Tensor

    @classmethod
    def of(cls, held: Sequence[Tensor]) -> Shards:
        """The shards of ranks with the runs ``int64[n, 2]``."""
        rank = torch.repeat_interleave(torch.tensor([len(runs) for runs in held], device="cpu"))
        start, stop = torch.cat(list(held)).unbind(1)
        lengths = stop - start
        sizes = torch.zeros(len(held), dtype=torch.int64, device="cpu").index_add_(0, rank, lengths)
        return cls(rank, start, lengths.cumsum(0) - lengths, sizes)

    def places(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The rank that holds each position ``int64[n]``, and the place of the token there."""
        start, order = self.start.sort()
        run = order[torch.searchsorted(start, positions, right=True) - 1]
        first = self.sizes.cumsum(0) - self.sizes
        return self.rank[run], self.before[run] - first[self.rank[run]] + positions - self.start[run]

    def moved(self, needed: Sequence[Tensor]) -> int:
        """How many tokens the ranks get from others, where each gets those that it needs."""
        rank = torch.repeat_interleave(torch.tensor([len(runs) for runs in needed], device="cpu"))
        lo, hi = torch.cat(list(needed)).unbind(1)
        return int((hi - lo).sum() - (self._held_before(rank, hi) - self._held_before(rank, lo)).sum())

    def _held_before(self, rank: Tensor, positions: Tensor) -> Tensor:
        """How many tokens before a position ranks hold, apart from a number that depends on the rank alone."""
        width = int(self.sizes.sum()) + 1
        run = torch.searchsorted(self.rank * width + self.start, rank * width + positions, right=True) - 1
        lengths = torch.diff(self.before, append=self.sizes.sum().view(1))
        inside = (positions - self.start[run]).minimum(lengths[run])
        # Before the first run of a rank the run is one of another rank, after which all of its tokens are held.
        return torch.where(self.rank[run] == rank, self.before[run] + inside, (self.before + lengths)[run]).where(run >= 0, 0)


def _all_to_all(rows: Tensor, of_each: list[int], to_each: list[int], group: Any) -> Tensor:
    """The rows that this rank gets, ``of_each`` rank so many, for those that it sends, ``to_each`` so many, in order."""
    return _waited(collectives.all_to_all_single_autograd(_sendable(rows), of_each, to_each, group))


def _sendable(rows: Tensor) -> Tensor:
    """The rows as collectives take them.

    Raises:
        LoweringError: they are transformed; collectives have no rules for that, and would give wrong values.
    """
    if is_transformed(rows):
        raise LoweringError(
            "tokens that ranks exchange take no transforms of torch.func (vmap, grad, jvp) and no forward-mode derivatives; use "
            "torch.autograd, and the batch in place of vmap"
        )
    return rows.contiguous()


def _waited(tensor: Tensor) -> Tensor:
    return cast(Tensor, collectives.wait_tensor(tensor))
