"""The call that ``torch.compile`` does not trace: it runs while a graph is made, and puts a captured graph into it."""

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
    """As :meth:`GraphCache.get` and :meth:`Graph.run`, which ``torch.compile`` does not trace but runs while it makes a graph."""
    return GRAPHS.get(structure, names, Setting(*setting), tensors).run(tensors)
