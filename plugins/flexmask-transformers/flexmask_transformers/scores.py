"""Changes of the scores besides the scale: soft-capping, a position bias, and sinks."""

from __future__ import annotations

from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from flexmask import Mask, kv, kv_len, minimum, scores
from flexmask.scores import Score, ScoreMod

__all__ = ["Scores", "append_sink", "with_sink"]


class Scores(NamedTuple):
    """How the scores of a layer follow from ``query @ key.T``.

    Attributes:
        scale: their factor.
        softcap: they become ``softcap * tanh(score / softcap)``.
        position_bias: ``[B or 1, H, q_len, kv_len]``, added after that.
        sink: ``[H]``, the score of a sink, a further key with the value 0.
    """

    scale: float
    softcap: float | None = None
    position_bias: Tensor | None = None
    sink: Tensor | None = None

    @property
    def is_scaling(self) -> bool:
        """Whether they are the products times the scale, and nothing else."""
        return self.softcap is None and self.position_bias is None and self.sink is None

    def score_mod(self, batch: int, keys: int, q_offset: int | Tensor = 0) -> Score | ScoreMod | None:
        """The part of them that is no scale, for ``keys`` keys before the sink.

        A sink, and a bias of queries that are not the first ones, whose rows it has alone, need a function, which is slower.
        """
        softcap, bias, has_sink = self.softcap, self.position_bias, self.sink is not None
        if softcap is None and bias is None:
            return None
        if not has_sink and (bias is None or (isinstance(q_offset, int) and q_offset == 0)):
            steps = [] if softcap is None else [scores.softcap(softcap)]
            steps += [] if bias is None else [scores.bias(bias)]
            return reduce(Score.__rshift__, steps)
        if bias is not None:
            bias = bias.expand(batch, -1, -1, -1)

        def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            found = score if softcap is None else softcap * torch.tanh(score / softcap)
            if bias is not None:
                found = found + bias[b, h, q_idx, kv_idx.clamp(max=keys - 1) if has_sink else kv_idx]
            return torch.where(kv_idx < keys, found, score) if has_sink else found

        return score_mod


def append_sink(query: Tensor, key: Tensor, value: Tensor, sink: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value with a sink as their last key, and a further channel that gives it its score.

    Exact and differentiable in ``sink`` on every backend: ``scale * (sink / scale) * 1`` for the sink, and 0 for other keys.
    """
    batch, heads, q_len, _ = query.shape
    channel = (sink.to(query.dtype) / scale).view(1, heads, 1, 1).expand(batch, heads, q_len, 1)
    key, value = torch.nn.functional.pad(key, (0, 1, 0, 1)), torch.nn.functional.pad(value, (0, 0, 0, 1))
    at_sink = torch.zeros(key.shape[-2:], dtype=torch.bool, device=key.device)
    at_sink[-1, -1] = True
    return torch.cat([query, channel], -1), torch.where(at_sink, 1.0, key), value


def with_sink(mask: Mask) -> Mask:
    """The mask for one more key, the sink, which every query attends to."""
    return (kv == kv_len - 1) | mask.substitute(kv=minimum(kv, kv_len - 2), kv_len=kv_len - 1)
