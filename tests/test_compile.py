"""A compiled model keeps its graph when the mask changes."""

from __future__ import annotations

import pytest
import torch

import flexmask as fm

MASKS = [
    fm.causal(),
    fm.causal() & fm.document(lengths=[20, 44]),
    fm.sliding_window(size=9) & fm.key_padding([60, 33]),
    fm.prefix_lm([5, 9]),
    fm.document([[0] * 30 + [1] * 34, [0] * 63 + [-1]]),
]


@pytest.mark.slow
def test_one_graph_serves_every_mask() -> None:
    layer = fm.MultiheadFlexAttention(32, 32, 2)
    compiled = torch.compile(layer, fullgraph=True, dynamic=False)
    x = torch.randn(2, 64, 32)
    with torch.no_grad():
        compiled(x, MASKS[0].block_mask(64, batch=2))
        with torch.compiler.set_stance("fail_on_recompile"):
            for mask in MASKS:
                torch.testing.assert_close(compiled(x, mask.block_mask(64, batch=2)), layer(x, mask))


@pytest.mark.slow
def test_the_check_can_fail() -> None:
    layer = fm.MultiheadFlexAttention(32, 32, 2)
    compiled = torch.compile(layer, fullgraph=True, dynamic=False, backend="eager")
    with torch.no_grad():
        compiled(torch.randn(2, 64, 32), MASKS[0].block_mask(64, batch=2))
        with torch.compiler.set_stance("fail_on_recompile"), pytest.raises(RuntimeError, match="recompile"):
            compiled(torch.randn(2, 65, 32), MASKS[0].block_mask(65, batch=2))
