"""FlexAttention as it is traced, without the kernels of Inductor, which take seconds each."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from flexmask.backends import flex


def without_kernels(patch: pytest.MonkeyPatch) -> None:
    """Makes the backend ``flex`` compile with ``eager``: the same graphs, run by operators of torch."""
    compiled = torch.compile(flex_attention, fullgraph=True, dynamic=False, backend="eager")
    patch.setattr(flex, "_compiled", lambda device: compiled)
