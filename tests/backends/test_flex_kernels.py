"""Which of FlexAttention's CUDA kernels torch takes for a call, by torch's own choice, which goes by sizes and needs no GPU.

The tile of the kernel for decoding holds the queries of all heads that share a key head. It must divide the block of queries, and
torch does not ask before it takes that kernel.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor
from torch._inductor.kernel.flex.flex_decoding import _use_flex_decoding
from torch._inductor.runtime.runtime_utils import next_power_of_2
from torch._inductor.sizevars import SizeVarAllocator
from torch._inductor.virtualized import V
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import flexmask as fm
from flexmask.backends import flex

LENGTHS, GROUPS = range(1, 131), (1, 2, 4, 8, 32)


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the last call of FlexAttention on CUDA was given, which is not run."""
    given: dict[str, Any] = {}

    def call(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        given.clear()
        given.update(options)
        return query

    monkeypatch.setattr(flex, "_inference_only", lambda tensor: False)
    monkeypatch.setattr(flex, "_call", call)
    return given


def decodes(q_len: int, group: int, options: dict[str, Any]) -> bool:
    """Whether torch takes the kernel for decoding."""
    mask = options["block_mask"]
    shapes = (2, group, q_len, 1), (1, 1, 1, 1) if mask is None else mask.kv_indices.shape, (2, 1, q_len, 1)
    query, indices, value = (SimpleNamespace(get_size=lambda shape=shape: [*map(sympy.Integer, shape)]) for shape in shapes)
    with V.set_graph_handler(SimpleNamespace(sizevars=SizeVarAllocator())):  # type: ignore[arg-type]
        return bool(_use_flex_decoding(query, indices, value, options.get("kernel_options", {}), group > 1))


def check(q_len: int, mask: fm.Mask | BlockMask | None, block: int, options: dict[str, Any], **call: Any) -> None:
    """Asserts that calls decode where, and only where, their rows fit a tile."""
    for group in GROUPS:
        query, key = torch.empty(2, group, q_len, 1), torch.empty(2, 1, q_len, 1)
        fm.attention(query, key, key, mask, enable_gqa=True, backend="flex", **call)
        rows = max(16, next_power_of_2(q_len * group))
        fits = q_len < 128 and rows <= 128 and block % rows == 0
        assert decodes(q_len, group, options) == fits, f"{q_len} queries, {group} heads"


def test_grouped_queries_of_every_length(options: dict[str, Any]) -> None:
    for q_len in LENGTHS:
        check(q_len, fm.causal().block_mask(q_len), 128, options)


def test_without_a_mask(options: dict[str, Any]) -> None:
    for q_len in LENGTHS:
        check(q_len, None, 128, options)


@pytest.mark.parametrize("block", [32, 64, 96, 256])
def test_blocks_of_other_sizes(block: int, options: dict[str, Any]) -> None:
    for q_len in (1, 9, 16, 17, 33, 64, 65, 127):
        made = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, q_len, q_len, device="cpu", BLOCK_SIZE=(block, 128))
        check(q_len, made, block, options)


def test_score_mods(options: dict[str, Any]) -> None:
    for q_len in (4, 70):
        check(q_len, fm.causal(), 128, options, score_mod=lambda score, b, h, q, kv: score + q)
