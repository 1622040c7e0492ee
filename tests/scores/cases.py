"""Scores with what they do to scores [B, H, Q, KV], written out cell by cell."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from flexmask import scores
from flexmask.scores import Score

HEADS, BUCKETS, FARTHEST = 4, 8, 20

#: Scores at positions int[Q] and int[KV] -> other scores.
Change: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]


def t5_bucket(distance: int, buckets: int, farthest: int, *, bidirectional: bool) -> int:
    """The bucket of ``kv - q``: one for each distance in the first half, then logarithmic ones."""
    first = 0
    if bidirectional:
        buckets //= 2
        first, distance = buckets if distance > 0 else 0, abs(distance)
    else:
        distance = max(-distance, 0)
    exact = buckets // 2
    if distance < exact:
        return first + distance
    share = math.log(distance / exact) / math.log(farthest / exact)
    return first + min(buckets - 1, exact + math.floor(share * (buckets - exact) + 1e-9))


def alibi_bias(slopes: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return -slopes[:, None, None] * (q[:, None] - kv).abs()


def t5_bias(table: Tensor, q: Tensor, kv: Tensor, *, bidirectional: bool = True) -> Tensor:
    places = [[t5_bucket(k - i, len(table), FARTHEST, bidirectional=bidirectional) for k in kv.tolist()] for i in q.tolist()]
    return table[torch.tensor(places)].permute(2, 0, 1)


def capped(found: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(found / cap)


class Case:
    """A score that holds tensors with gradients, and what it does.

    Attributes:
        score: the score.
        change: what becomes of scores.
        tensors: what the score holds.
    """

    def __init__(self, name: str, dtype: torch.dtype = torch.float64, length: int = 90) -> None:
        slopes, table, cells = (
            torch.randn(shape, dtype=dtype).requires_grad_() for shape in ((HEADS,), (BUCKETS, HEADS), (HEADS, length, length))
        )
        alibi, relative = scores.alibi(slopes), scores.relative_bias(table, max_distance=FARTHEST)
        decoder = scores.relative_bias(table, max_distance=FARTHEST, bidirectional=False)
        steps: dict[str, tuple[Score, list[Tensor], Change]] = {
            "alibi": (alibi, [slopes], lambda s, q, kv: s + alibi_bias(slopes, q, kv)),
            "relative": (relative, [table], lambda s, q, kv: s + t5_bias(table, q, kv)),
            "decoder": (decoder, [table], lambda s, q, kv: s + t5_bias(table, q, kv, bidirectional=False)),
            "bias": (scores.bias(cells), [cells], lambda s, q, kv: s + cells[:, q][..., kv.clamp(min=0)]),
            "softcap": (scores.softcap(3.0), [], lambda s, q, kv: capped(s, 3.0)),
        }
        parts = [steps[part] for part in name.split()]
        self.score, self.tensors = parts[0][0], [tensor for part in parts for tensor in part[1]]
        for part in parts[1:]:
            self.score = self.score >> part[0]
        self.steps = [part[2] for part in parts]

    def change(self, found: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        for step in self.steps:
            found = step(found, q, kv)
        return found
