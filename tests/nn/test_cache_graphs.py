"""A KVCache with a Mask in compiled code: two graphs for all steps, equal to the whole sequence at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import flexmask as fm
from flexmask import KVCache, MultiheadFlexAttention
from tests.support.exhaustive import exhaustive

LENGTH, CAPACITY = 10, 16
PACKED = fm.causal() & fm.document(lengths=[[5, 11], [3, 13]])


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


def compiled(layer: MultiheadFlexAttention, backend: str = "eager") -> tuple[Any, CompileCounterWithBackend]:
    counter = CompileCounterWithBackend(backend)
    return torch.compile(layer, fullgraph=True, backend=counter), counter


def steps(layer: Any, x: Tensor, mask: Any, cache: KVCache, **options: Any) -> Tensor:
    ends = [4, *range(5, LENGTH + 1)]
    with torch.no_grad():
        return torch.cat([layer(x[:, a:b], mask, cache=cache, **options) for a, b in zip([0, *ends], ends, strict=False)], 1)


@pytest.mark.slow
@pytest.mark.parametrize("mask", [PACKED, *exhaustive(["causal", fm.sliding_window(size=3)])])
def test_steps_have_two_graphs(mask: Any) -> None:
    layer = MultiheadFlexAttention(16, 16, 4, n_kv_heads=2).eval()
    model, counter = compiled(layer)
    x, cache = torch.randn(2, LENGTH, 16), KVCache(CAPACITY)
    found = steps(model, x, mask, cache)
    torch.testing.assert_close(found, steps(layer, x, mask, KVCache(CAPACITY)))
    own = fm.causal() & fm.document(lengths=[[5, 5], [3, 7]]) if mask is PACKED else mask
    torch.testing.assert_close(found, layer(x, own))
    assert counter.frame_count == 2
    assert cache.length == LENGTH


@pytest.mark.slow
def test_parameters_and_sequences_of_other_lengths() -> None:
    layer = MultiheadFlexAttention(16, 16, 2).eval()
    model, _ = compiled(layer)
    x, lengths = torch.randn(2, LENGTH, 16), torch.tensor([4, 2])
    outputs = []
    for run in (model, layer):
        cache = KVCache(CAPACITY)
        with torch.no_grad():
            run(x[:, :4], "causal & key_padding(lengths)", cache=cache, lengths=lengths)
            cache.truncate(lengths)
            outputs.append(torch.cat([run(x[:, i : i + 1], "causal", cache=cache) for i in range(4, 7)], 1))
    torch.testing.assert_close(*outputs)


@pytest.mark.parametrize(
    ("mask", "cache", "message"),
    [
        ("causal", KVCache(window=4), "give KVCache\\(capacity\\), and a mask with the window"),
        ("causal('lower_right')", KVCache(CAPACITY), "depends on kv_len and q_len, which grow with each call"),
        (None, KVCache(CAPACITY), "attend to the key at position .*, which comes after the tokens of this call.* causal"),
        ("sliding_window(left=2, right=1)", KVCache(CAPACITY), "which comes after the tokens of this call.* mask & causal"),
    ],
)
def test_refused(mask: str, cache: KVCache, message: str) -> None:
    model, _ = compiled(MultiheadFlexAttention(16, 16, 2).eval())
    with torch.no_grad(), pytest.raises(torch._dynamo.exc.Unsupported, match=message):
        model(torch.randn(2, 3, 16), mask, cache=cache)


@pytest.mark.slow
def test_a_full_cache_says_so_in_compiled_code() -> None:
    layer, cache, x = MultiheadFlexAttention(8, 8, 2), KVCache(16), torch.randn(1, 20, 8)
    step = torch.compile(lambda x: layer(x, "causal", cache=cache), fullgraph=True, backend="eager")
    with torch.no_grad():
        step(x[:, :10])
        with pytest.raises(Exception, match="capacity=16 tokens, 10 are taken and 10 more do not fit: make a KVCache"):
            step(x[:, 10:])
