"""The call that dynamo does not trace: it runs while ``torch.compile`` makes a graph, and inserts a captured graph into it."""

from __future__ import annotations

from typing import Any

import torch._dynamo
from torch import Tensor

from flexmask.expr.node import Structure
from flexmask.plans.capture import GRAPHS, Setting
from flexmask.plans.lowered import LoweredMask

__all__ = ["lower_traced"]


@torch._dynamo.nonstrict_trace
def lower_traced(
    structure: Structure, names: tuple[str, ...], setting: tuple[Any, ...], tensors: tuple[Tensor, ...]
) -> LoweredMask:
    """The LoweredMask of a captured graph: :meth:`GraphCache.get`, then the graph with ``tensors``."""
    *sizes, device, block_size = setting
    q_len, kv_len, batch, heads, q_offset = map(int, sizes)  # a size that changes is another graph
    known = Setting(q_len, kv_len, batch, heads, q_offset, device, (int(block_size[0]), int(block_size[1])))
    return GRAPHS.get(structure, names, known, tensors).run(tensors)
