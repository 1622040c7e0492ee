"""Exchanges of tokens between ranks by functional collectives, which autograd and ``torch.compile`` take.

The gradient of an exchange is the reverse exchange: what several ranks received adds up at the rank that sent it.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import Tensor

from flexmask._transforms import is_transformed
from flexmask.distributed.query_units import KeyLists, sums
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

    def __init__(self, held: KeyLists, needed: KeyLists, rank: int, group: Any, device: torch.device) -> None:
        """Works out what this rank sends and receives.

        Args:
            held: the tokens of each rank, on the CPU.
            needed: the tokens that each rank needs.
            rank: this rank.
            group: the process group.
            device: of the tokens.
        """
        sizes = held.sizes()
        self._group, self._most, ranks = group, int(sizes.max()), len(sizes)
        own, positions = positions_of(held.runs(rank)), positions_of(needed.runs(rank))
        sender, at = held.places(positions)
        first, last = torch.searchsorted(own, needed.lo), torch.searchsorted(own, needed.hi)
        self._sizes = sums(last - first, needed.unit, ranks).tolist(), sender.bincount(minlength=ranks).tolist()
        self._sent = positions_of(torch.stack((first, last), -1)).to(device)
        self.gathers = 0 < GATHER_SHARE * ranks * (ranks - 1) * self._most <= int(needed.beyond(held).sum())
        arrival = sender.argsort(stable=True).argsort()
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

    def __init__(self, held: KeyLists, rank: int, group: Any, device: torch.device) -> None:
        """As :class:`TokenExchange`."""
        positions = positions_of(held.intervals)
        self._group, self._sizes = group, held.sizes().tolist()
        self._own = [self._sizes[rank]] * len(self._sizes)
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
