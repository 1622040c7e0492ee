"""Arguments of attention that are in another order or of another kind: what the messages say."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import flexmask as fm
from flexmask.errors import FlexmaskError, LoweringError, OperandError


@pytest.mark.parametrize(
    ("shapes", "options", "wanted"),
    [
        (((2, 9, 4, 8), (2, 7, 4, 8)), {}, "query has 9 heads, key 7"),
        (((2, 9, 4, 8), (2, 7, 2, 8)), {"enable_gqa": True}, "the query's 9 heads must be a multiple of the key's 7"),
        (((2, 5, 4, 8), (2, 5, 4, 8)), {"mask": fm.document([0] * 3 + [1] * 2)}, "has 5 values along q, but q_len is 4"),
        (((2, 9, 4, 8), (2, 9, 4, 8)), {"mask": "causal & key_padding([9, 5])"}, "lengths must be at most kv_len = 4, got 9"),
        (((2, 9, 4, 8), (2, 9, 4, 8)), {"mask": fm.per_head([fm.causal()] * 4)}, "two sizes of heads: 9 .* and 4"),
    ],
)
def test_the_other_order_of_axes_is_named(shapes: Any, options: dict[str, Any], wanted: str) -> None:
    query, key = (torch.randn(shape) for shape in shapes)
    hint = r".* as \[B, length, H, D\]: if they are that, take tensor.transpose\(1, 2\)"
    with pytest.raises(LoweringError, match=wanted + hint):
        fm.attention(query, key, key, **options)
    fm.attention(query.transpose(1, 2), key.transpose(1, 2), key.transpose(1, 2), **options)


def test_the_other_order_is_not_named_where_it_fits_no_better() -> None:
    query, key = torch.randn(2, 4, 9, 8), torch.randn(2, 3, 7, 8)
    for other, mask in ((key, None), (query, fm.document([0] * 5))):
        with pytest.raises(LoweringError) as caught:
            fm.attention(query, other, other, mask)
        assert "transpose" not in str(caught.value)
    with pytest.raises(LoweringError, match=r"takes \[B, H, length, D\]; .*unflatten\(-1, \(H, D\)\).transpose\(1, 2\)"):
        fm.attention(torch.randn(2, 9, 8), torch.randn(2, 9, 8), torch.randn(2, 9, 8))
    with pytest.raises(
        LoweringError, match=r"of \[length, H, D\] tensor.transpose\(0, 1\).unsqueeze\(0\), of \[H, length, D\] tensor"
    ):
        fm.attention(torch.randn(9, 4, 8), torch.randn(9, 4, 8), torch.randn(9, 4, 8))
    with pytest.raises(LoweringError, match=r"\[length, D\], take tensor\[None, None\]"):
        fm.attention(torch.randn(9, 8), torch.randn(9, 8), torch.randn(9, 8))
    # 5 nodes after 9 tokens: with 2 queries from position 3 the 5 parents would be enough.
    keys = torch.randn(1, 2, 14, 8)
    with pytest.raises(LoweringError) as caught:
        fm.attention(torch.randn(1, 2, 5, 8), keys, keys, fm.masks.tree(parents=[-1, 0, 0, 1, 1], prefix=9), q_offset=3)
    assert "transpose" not in str(caught.value)


@pytest.mark.parametrize(
    ("score_mod", "wanted"),
    [
        (lambda score, b, h, q, kv: None, "got None; a condition is a mask"),
        (lambda score, b, h, q, kv: q >= kv, r"got Tensor bool\[\]; a condition is a mask"),
        (lambda score, b, h, q, kv: score.expand(2), r"a tensor of shape \[\], got Tensor float32\[2\]"),
        (lambda score, b, h, q, kv: score if q > kv else -score, "score_mod fails .* it needs the value of a tensor, as `if`"),
        (lambda score, b, h, q, kv: math.tanh(score), "score_mod fails .* functions of math .* and functions of torch"),
        (lambda score, b, h, q, kv: score * torch.ones(1)[h], "score_mod fails .* IndexError: index 1 is out of bounds"),
    ],
)
def test_a_score_mod_that_fails_or_returns_no_score(score_mod: Any, wanted: str) -> None:
    query = torch.randn(1, 2, 5, 8)
    for backend in ("sdpa", "flex"):
        with pytest.raises(OperandError, match=wanted), torch.no_grad():
            fm.attention(query, query, query, "causal", score_mod=score_mod, backend=backend)
    with pytest.raises(OperandError, match=wanted):
        fm.backends.attention_weights(query, query, "causal", score_mod=score_mod)


@pytest.mark.parametrize("key", [(2, 2, 5, 8), (1, 3, 5, 8), (1, 2, 5, 4), (1, 0, 5, 8)])
def test_the_weights_of_a_key_that_does_not_fit_are_refused(key: tuple[int, ...]) -> None:
    with pytest.raises(LoweringError, match="does not fit query"):
        fm.backends.attention_weights(torch.randn(1, 2, 5, 8), torch.randn(key), "causal")


def test_the_weights_of_a_score_mod_with_indices_one_by_one() -> None:
    query, bias = torch.randn(2, 3, 5, 8), torch.randn(2, 3)
    found = fm.backends.attention_weights(
        query, query, "causal", score_mod=lambda score, b, h, q, kv: score * bias[b][h] + q - kv
    )
    distance = torch.arange(5)[:, None] - torch.arange(5)
    scores = query @ query.mT / 8**0.5 * bias[:, :, None, None] + distance
    torch.testing.assert_close(found, scores.masked_fill(distance < 0, -math.inf).softmax(-1))


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"score_mod": 3}, "score_mod must be a function .*got int 3"),
        ({"score_mod": lambda b, h, q, kv: q >= kv}, "score_mod must be a function .* too many positional"),
        ({"score_mod": torch.nn.ReLU}, "score_mod must be a function .*got the class ReLU"),
        ({"scale": "small"}, "scale must be a number, got str small"),
        ({"scale": torch.tensor(0.5)}, r"scale must be a number, got Tensor float32\[\]; take tensor.item\(\)"),
        ({"scale": math.nan}, "scale must be a finite number, got nan"),
        ({"scale": True}, "scale must be a number, got bool True"),
        ({"mask": fm.causal}, r"mask must be a Mask, its text.* a mask_mod function.*call it, causal\(\)"),
    ],
)
def test_options_of_another_kind_are_errors(options: dict[str, Any], wanted: str) -> None:
    query = torch.randn(1, 2, 5, 8)
    for backend in ("sdpa", "flex"):
        with pytest.raises(FlexmaskError, match=wanted):
            fm.attention(query, query, query, backend=backend, **options)
    with pytest.raises(FlexmaskError, match=wanted):
        fm.backends.attention_weights(query, query, **options)
    if "mask" not in options:
        with pytest.raises(FlexmaskError, match=wanted):
            fm.MultiheadFlexAttention(8, 8, 2, **options)
