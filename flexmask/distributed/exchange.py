"""Exchanges of tokens between ranks by functional collectives, which autograd and ``torch.compile`` take.

The gradient of an exchange is the reverse exchange: what several ranks received adds up at the rank that sent it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import Tensor

__all__ = ["HeadExchange", "TokenExchange", "inside"]

#: From this share of the tokens of an all-gather on, one all-gather is used, which needs no copy of a token for each receiver.
GATHER_SHARE = 0.9

_all_gather: Any = getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd


class TokenExchange:
    """Gives each rank the tokens of the sequence that it needs, in order, from those that hold them.

    Attributes:
        needed: the positions of the tokens that this rank gets, ``int64[m]``.
        received: how many of them other ranks hold.
    """

    def __init__(self, held: Sequence[Tensor], needed: Sequence[Tensor], rank: int, group: Any, device: torch.device) -> None:
        """Works out what this rank sends and receives.

        Args:
            held: the positions of the tokens of each rank in order, ``int64``, on the CPU.
            needed: the tokens that each rank needs, as intervals ``[lo, hi)`` in order, ``int64[n, 2]``, on the CPU.
            rank: this rank.
            group: the process group.
            device: of the tokens.
        """
        self._group, self._most = group, max(map(len, held))
        to_each = [inside(held[rank], runs).nonzero().squeeze(-1) for runs in needed]
        from_each = [inside(positions, needed[rank]).nonzero().squeeze(-1) for positions in held]
        arriving = torch.cat([positions[at] for positions, at in zip(held, from_each, strict=True)])
        order = arriving.argsort()
        self.needed = arriving[order].to(device)
        self.received = len(arriving) - len(from_each[rank])
        own = sum(int(inside(positions, runs).sum()) for positions, runs in zip(held, needed, strict=True))
        total = sum(int((runs[:, 1] - runs[:, 0]).sum()) for runs in needed) - own
        self.gathers = 0 < GATHER_SHARE * len(held) * (len(held) - 1) * self._most <= total
        self._sizes = [len(at) for at in to_each], [len(at) for at in from_each]
        self._sent = torch.cat(to_each).to(device)
        if self.gathers:
            order = torch.cat([at + sender * self._most for sender, at in enumerate(from_each)])[order]
        self._order = order.to(device)

    def __call__(self, tokens: Tensor) -> Tensor:
        """The needed tokens ``[m, ...]``, from those that this rank holds, ``[n, ...]``."""
        if self.gathers:
            padding = [0, 0] * (tokens.dim() - 1) + [0, self._most - tokens.shape[0]]
            arrived = _waited(_all_gather(F.pad(tokens, padding).contiguous(), 0, self._group))
        else:
            sizes, of_each = self._sizes
            arrived = _all_to_all(tokens.index_select(0, self._sent), of_each, sizes, self._group)
        needed: Tensor = arrived.index_select(0, self._order)
        return needed


class HeadExchange:
    """Gives each rank all tokens of a part of the heads, and back.

    Source: Jacobs et al., DeepSpeed Ulysses, https://arxiv.org/abs/2309.14509
    """

    def __init__(self, held: Sequence[Tensor], rank: int, group: Any, device: torch.device) -> None:
        """As :class:`TokenExchange`."""
        positions = torch.cat(list(held))
        self._group, self._sizes = group, [len(part) for part in held]
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


def inside(positions: Tensor, runs: Tensor) -> Tensor:
    """Which positions ``int64[n]`` are in one of the intervals ``int64[m, 2]``, ``bool[n]``."""
    if not len(runs):
        return torch.zeros_like(positions, dtype=torch.bool)
    start, stop = runs.T.contiguous()
    at = torch.searchsorted(stop, positions, right=True)
    found: Tensor = (at < len(runs)) & (start[at.clamp(max=len(runs) - 1)] <= positions)
    return found


def _all_to_all(rows: Tensor, of_each: list[int], to_each: list[int], group: Any) -> Tensor:
    """The rows that this rank gets, ``of_each`` rank so many, for those that it sends, ``to_each`` so many, in order."""
    return _waited(collectives.all_to_all_single_autograd(rows.contiguous(), of_each, to_each, group))


def _waited(tensor: Tensor) -> Tensor:
    return cast(Tensor, collectives.wait_tensor(tensor))
