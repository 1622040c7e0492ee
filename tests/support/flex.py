"""FlexAttention as it is traced, without the kernels of Inductor, which take seconds each."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from flexmask.backends import flex


def without_kernels(patch: pytest.MonkeyPatch) -> None:
    """Makes the backend ``flex`` compile with ``eager``: the same graphs, run by operators of torch."""
    with patch.context() as inner:
        inner.setattr(torch, "compile", partial(torch.compile, backend="eager"))
        compiled = flex._compiled.__wrapped__("cpu")
    patch.setattr(flex, "_compiled", lambda device: compiled)
