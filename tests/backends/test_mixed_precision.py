"""Attention under autocast, of dtypes as rotary embeddings give them, against ``scaled_dot_product_attention`` and float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import flexmask as fm
from flexmask import attention, kv, q
from flexmask.backends import Backend, attention_weights, backend, choose_backend, register_backend
from flexmask.errors import OperandError
from tests.support import oracle
from tests.support.dropout import kept_of
from tests.support.exhaustive import slow

LENGTH = 9
IDS = torch.arange(LENGTH) // 4
LOWER = torch.ones(LENGTH, LENGTH).tril().bool()
#: A mask of each path: fused kernels, tiles and cells.
MASKS: dict[str, tuple[Any, Tensor]] = {
    "none": (None, torch.ones_like(LOWER)),
    "causal": ("causal", LOWER),
    "documents": (fm.causal() & fm.document(IDS), LOWER & (IDS[:, None] == IDS)),
    "cells": ((q * kv) % 3 == 0, torch.outer(torch.arange(LENGTH), torch.arange(LENGTH)) % 3 == 0),
}
HALF = [torch.bfloat16, torch.float16]


def inputs(heads: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """Query and key in float32, the value in bfloat16, with gradients."""
    made = (torch.randn(2, n, LENGTH, 8).to(dtype) for n, dtype in ((heads, torch.float32), (2, torch.float32), (2, HALF[0])))
    query, key, value = (tensor.requires_grad_() for tensor in made)
    return query, key, value


def rounded(tensors: tuple[Tensor, ...], dtype: torch.dtype) -> Iterator[Tensor]:
    """What autocast makes of them, in float64."""
    return (tensor.to(dtype).double() for tensor in tensors)


def check_close(found: Tensor, wanted: Tensor, dtype: torch.dtype = torch.bfloat16) -> None:
    atol = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), wanted.double(), rtol=atol, atol=atol)


def check_gradients(found: Tensor, wanted: Tensor, tensors: tuple[Tensor, ...], dtype: torch.dtype = torch.bfloat16) -> None:
    own, others = (torch.autograd.grad(out.float().square().sum(), tensors) for out in (found, wanted))
    for tensor, one, other in zip(tensors, own, others, strict=True):
        assert one.dtype == tensor.dtype
        check_close(one, other, max(dtype, tensor.dtype, key=lambda kind: torch.finfo(kind).eps))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", MASKS)
def test_dtypes_that_differ(name: str, dtype: torch.dtype) -> None:
    (mask, visible), tensors = MASKS[name], inputs()
    query, key, value = tensors
    with torch.autocast("cpu", dtype):
        found = attention(*tensors, mask, enable_gqa=True)
        wanted = F.scaled_dot_product_attention(query, key, value, visible, enable_gqa=True)
        assert choose_backend(*tensors, mask, enable_gqa=True) == "sdpa"
    assert found.dtype == wanted.dtype == dtype
    check_close(found, wanted, dtype)
    check_gradients(found, wanted, tensors, dtype)


def test_backward_within_autocast() -> None:
    mask, visible = MASKS["documents"]
    tensors = query, key, value = inputs(2)
    with torch.autocast("cpu", torch.bfloat16):
        found = attention(*tensors, mask)
        wanted = F.scaled_dot_product_attention(query, key, value, visible)
        check_gradients(found, wanted, tensors)


@pytest.mark.parametrize("options", [{"score_mod": lambda s, b, h, q, kv: s + h * (q - kv) / 9}, {"dropout_p": 0.4}])
def test_scores_and_weights_are_float32(options: dict[str, Any]) -> None:
    mask, visible = MASKS["causal"]
    tensors = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        found = attention(*tensors, mask, enable_gqa=True, dropout_seed=3, **options)
    query, key, value = rounded(tensors, torch.bfloat16)
    factors = kept_of(3, 0.4, 2, 4, LENGTH, LENGTH) / 0.6 if "dropout_p" in options else None
    wanted = oracle.attention(query, key, value, visible, score_mod=options.get("score_mod"), factors=factors)
    check_close(found, wanted)
    check_gradients(found, wanted, tensors)


def test_a_backend_gets_one_dtype_and_no_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def run(call: Any) -> Tensor:
        seen.extend([call.query.dtype, call.key.dtype, call.value.dtype, torch.is_autocast_enabled("cpu")])
        return torch.zeros_like(call.query)

    monkeypatch.setattr(backend, "_BACKENDS", dict(backend._BACKENDS))
    register_backend(Backend("another", lambda call: None, run))
    with torch.autocast("cpu", torch.float16):
        attention(*inputs(2), backend="another")
    assert seen == [torch.float16] * 3 + [False]


def test_flex_has_the_dtype_of_autocast() -> None:
    """It takes no float64, which autocast leaves as it is."""
    query, key, value = (tensor.detach() for tensor in inputs(2))
    with torch.autocast("cpu", torch.bfloat16):
        assert choose_backend(query, key, value, "causal").reasons["flex"] == "sdpa comes first on cpu"


def test_one_cache_of_masks_within_and_without() -> None:
    mask, visible = MASKS["documents"]
    query, key, value = (tensor.detach().float() for tensor in inputs(2))
    wanted = oracle.attention(query, key, value, visible)
    with fm.MaskCache() as cache:
        for is_on in (True, False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=is_on):
                found = attention(query, key, value, mask)
            assert found.dtype == (torch.bfloat16 if is_on else torch.float32)
            check_close(found, wanted)
    assert (cache.builds, cache.hits) == (1, 2)


@pytest.mark.parametrize(("name", "within"), [("causal", False), *slow([("documents", True)])])
def test_in_compiled_code(name: str, within: bool) -> None:
    (mask, visible), tensors = MASKS[name], inputs()
    query, key, value = tensors

    def forward(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=within or torch.is_autocast_enabled("cpu")):
            return attention(query, key, value, mask, enable_gqa=True)

    torch.compiler.reset()
    compiled: Any = torch.compile(forward, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        wanted = F.scaled_dot_product_attention(query, key, value, visible, enable_gqa=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=not within):
        found = compiled(*tensors)
    assert found.dtype == torch.bfloat16
    check_close(found, wanted)
    check_gradients(found, wanted, tensors)


def test_attention_weights() -> None:
    query, key, _ = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        found = attention_weights(query, key, "causal")
    assert found.dtype == torch.float32
    query, key = rounded((query, key), torch.bfloat16)
    wanted = oracle.softmax(oracle.attention_scores(query, key), LOWER)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------- what autocast does not cover


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_without_autocast(device: str) -> None:
    """It is off where it is disabled, and on devices that have none."""
    query, key, value = (tensor.to(device) for tensor in inputs(2))
    with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=device == "meta"):
        assert attention(query, key, key).dtype == torch.float32
        with pytest.raises(OperandError, match=r"one floating point dtype, got .*float32, .*float32, .*bfloat16; convert them"):
            attention(query, key, value)


def test_float64_is_not_cast() -> None:
    query, key, value = inputs(2)
    with torch.autocast("cpu", torch.bfloat16):
        assert attention(query.double(), key.double(), value.double()).dtype == torch.float64
        with pytest.raises(OperandError, match=r"got .*float64, .*float32, .*bfloat16; .*autocast, which casts all but float64"):
            attention(query.double(), key, value)
