"""Modules and caches whose calls are partly under autocast, against the module written out in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flexmask import KVCache, MultiheadFlexAttention
from flexmask.errors import LoweringError, OperandError
from tests.nn.test_multihead import plain

LENGTH = 6
LOWER = torch.ones(LENGTH, LENGTH).tril().bool()
WINDOW = LOWER & ~LOWER.tril(-3)
#: Where calls end, and which of them are under autocast.
ENDS, WITHIN = (3, 4, 6), [(False, True, True), (True, False, False)]


def check(within: tuple[bool, ...], cache: KVCache, mask: str | None, visible: Tensor, *, compiled: bool = False) -> None:
    layer, x = MultiheadFlexAttention(16, 16, 4, n_kv_heads=2), torch.randn(2, LENGTH, 16)
    context = torch.randn(2, 5, 16) if mask is None else None
    call: Any = torch.compile(layer, backend="eager", fullgraph=True) if compiled else layer
    parts = []
    for start, stop, is_on in zip((0, *ENDS), ENDS, within, strict=False):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=is_on):
            parts.append(call(x[:, start:stop], mask, cache=cache, context=None if start else context))
        assert parts[-1].dtype == (torch.bfloat16 if is_on else torch.float32)
    torch.testing.assert_close(torch.cat(parts, 1).double(), plain(layer, x, visible, context), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("within", WITHIN)
@pytest.mark.parametrize(
    ("cache", "mask", "visible"),
    [
        (KVCache(LENGTH), "causal", LOWER),
        (KVCache(window=3), "sliding_window(size=3)", WINDOW),
        (KVCache(), None, torch.ones(LENGTH, 5).bool()),
    ],
    ids=["capacity", "window", "context"],
)
def test_a_cache_goes_on_with_and_without_autocast(
    within: tuple[bool, ...], cache: KVCache, mask: str | None, visible: Tensor
) -> None:
    cache.reset()
    check(within, cache, mask, visible)


@pytest.mark.parametrize("within", [WITHIN[0], pytest.param(WITHIN[1], marks=pytest.mark.exhaustive)])
@pytest.mark.slow
def test_a_cache_in_compiled_code(within: tuple[bool, ...]) -> None:
    torch.compiler.reset()
    check(within, KVCache(LENGTH), "causal", LOWER, compiled=True)


def test_a_narrower_dtype_without_autocast() -> None:
    layer, cache, x = MultiheadFlexAttention(16, 16, 4), KVCache(LENGTH), torch.randn(2, LENGTH, 16)
    layer(x[:, :3], "causal", cache=cache)
    with pytest.raises(
        LoweringError, match=r"holds keys of torch.float32, got torch.bfloat16; keep to one dtype, or reset\(\) it"
    ):
        layer.bfloat16()(x[:, 3:].bfloat16(), "causal", cache=cache)


def test_float64_is_not_cast() -> None:
    layer, x = MultiheadFlexAttention(16, 16, 4).double(), torch.randn(2, LENGTH, 16)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(OperandError, match=r"is torch.float32, the module torch.float64"):
        layer(x, "causal")


def test_a_module_in_float8_computes_nothing() -> None:
    layer = MultiheadFlexAttention(16, 16, 4).to(torch.float8_e4m3fn)
    with pytest.raises(OperandError, match=r"is torch.float32, the module torch.float8_e4m3fn; convert one with"):
        layer(torch.randn(2, LENGTH, 16), "causal")
