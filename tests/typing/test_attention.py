"""Attention and modules as a user writes them: the types of results, and arguments that pyright and mypy reject."""

from typing import assert_type

import pytest
import torch

import flexmask as fm
from flexmask.errors import FlexmaskError
from flexmask.testing import assert_equivalent, assert_no_leak

QUERY = torch.randn(1, 2, 4, 8)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = fm.MultiheadFlexAttention(8, 8, 2, mask="causal & key_padding(lengths)")

    def forward(self, x: torch.Tensor, lengths: list[int], cache: fm.KVCache | None = None) -> torch.Tensor:
        out: torch.Tensor = self.attention(x, lengths=lengths, cache=cache)
        return out


def test_attention() -> None:
    assert_type(fm.attention(QUERY, QUERY, QUERY, fm.causal(), backend="sdpa", dropout_p=0.1), torch.Tensor)
    assert_type(fm.attention(QUERY, QUERY, QUERY, "causal", scale=0.5), torch.Tensor)
    assert_type(fm.attention(QUERY, QUERY, QUERY, lambda b, h, q, kv: q >= kv), torch.Tensor)
    assert_type(fm.attention(QUERY, QUERY, QUERY, "causal", return_lse=True), tuple[torch.Tensor, torch.Tensor])


def test_modules() -> None:
    model = Model()
    with fm.MaskCache(size=4):
        model(torch.randn(2, 4, 8), [4, 3])
    model(torch.randn(2, 4, 8), [4, 3], fm.KVCache(capacity=8))
    assert_no_leak(fm.MultiheadFlexAttention(8, 8, 2, mask="causal"), fm.causal(), torch.randn(1, 4, 8))
    assert_equivalent(fm.causal(), 4, reference=lambda b, h, q_idx, kv_idx: q_idx >= kv_idx)


def test_wrong_arguments() -> None:
    with pytest.raises(FlexmaskError):
        fm.attention(QUERY, QUERY, QUERY, 3)  # type: ignore[call-overload]
    with pytest.raises(FlexmaskError):
        fm.attention(QUERY, QUERY, QUERY, "causal", backend=3)  # type: ignore[call-overload]
    with pytest.raises(TypeError):
        fm.MultiheadFlexAttention(8, 8)  # type: ignore[call-arg]
    with pytest.raises(FlexmaskError):
        fm.KVCache("8")  # type: ignore[arg-type]
