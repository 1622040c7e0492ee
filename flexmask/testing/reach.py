"""The positions that each output may depend on: the visible ones of one layer, or those that several layers reach."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from flexmask.expr.mask import Mask


def visible_pairs(mask: Mask, batch: int, heads: int | None, q_len: int, kv_len: int, device: torch.device) -> Tensor:
    """The keys that each query attends to in any head, ``bool[B, q_len, kv_len]``."""
    cells = mask.to(device).dense(q_len, kv_len, batch=batch, heads=heads, device=device)
    return cells.any(1).expand(batch, -1, -1)


def dependence(shown: Sequence[Tensor]) -> Iterator[Tensor]:
    """The positions of the input that each position of the output may depend on, ``bool[B, length, length]``.

    Gives them where the layers are applied once, twice, and so on, until nothing more can be reached.

    Args:
        shown: the visible pairs of each layer in order; a layer's output also depends on its input at the same position.
    """
    own = torch.eye(shown[0].shape[-1], dtype=torch.bool, device=shown[0].device)
    steps = [(cells | own).float() for cells in shown]
    found, before = own.float().expand_as(steps[0]), None
    while before is None or not torch.equal(found, before):
        before = found
        for step in steps:
            found = (step @ found > 0).float()
        yield found > 0
