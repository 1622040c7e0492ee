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
    return GRAPHS.get(structure, names, Setting(*setting), tensors).run(tensors)
