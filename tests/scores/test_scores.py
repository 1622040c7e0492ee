"""Scores as values: composition, text, equality, and what is refused."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

import flexmask as fm
from flexmask import scores
from flexmask.errors import ExpressionError, FlexmaskError, LoweringError, OperandError, TextError
from flexmask.scores import alibi, bias, parse, relative_bias, softcap
from tests.scores.cases import t5_bucket

TEXTS = [
    "alibi()",
    "alibi(slopes=[0.5, 0.25])",
    "softcap(50.0)",
    "relative_bias([[0.5, 1.0], [0.25, 0.0], [1.0, 2.0], [0.0, 0.0]], max_distance=9)",
    "relative_bias([[0.5], [0.25]], bidirectional=False)",
    "bias([[0.5, -1.0]])",
    "alibi() + bias([[0.5]]) >> softcap(2.0) >> alibi() >> softcap(1.0) >> softcap(1.0)",
]


@pytest.mark.parametrize("text", TEXTS)
def test_text_and_equality(text: str) -> None:
    score = parse(text)
    assert str(score) == repr(score) == text
    again = parse(f" {text}\n")
    assert again == score
    assert hash(again) == hash(score)
    assert pickle.loads(pickle.dumps(score)) == score
    assert score != parse(TEXTS[(TEXTS.index(text) + 1) % len(TEXTS)])


def test_names_need_no_brackets_and_plus_binds_more_tightly() -> None:
    assert parse("alibi + alibi([1, 2]) >> softcap(3)") == (alibi() + alibi([1, 2])) >> softcap(3)
    assert (alibi() >> alibi([1.0])) == alibi() + alibi([1.0])
    assert (softcap(1) >> softcap(2)) != (softcap(2) >> softcap(1))


def test_tensors_compare_by_identity() -> None:
    table = torch.zeros(8, 2)
    score = relative_bias(table)
    assert score == relative_bias(table)
    assert score != relative_bias(table.clone())
    assert str(score) == "relative_bias(<float32[8, 2]>)"
    assert score.tensors == (table,)
    assert score.to("cpu") == score
    assert relative_bias(torch.nn.Parameter(table)).to("meta").tensors[0].device.type == "cpu"


@pytest.mark.parametrize(
    ("buckets", "farthest", "bidirectional"), [(32, 128, True), (32, 128, False), (8, 20, True), (7, 9, False), (4, 2, True)]
)
def test_buckets(buckets: int, farthest: int, bidirectional: bool) -> None:
    table = torch.arange(buckets)[:, None].float()
    found = relative_bias(table, max_distance=farthest, bidirectional=bidirectional).dense(160, heads=1)[0, 0]
    for q, kv in ((0, 0), (0, 159), (159, 0), (70, 69), *zip([40] * 160, range(160), strict=True)):
        assert found[q, kv] == t5_bucket(kv - q, buckets, farthest, bidirectional=bidirectional)


def test_dense_is_what_becomes_of_zeros() -> None:
    assert torch.equal(
        bias([[1.0, 2.0], [3.0, 4.0]]).dense(1, 2, heads=3, q_offset=1), torch.tensor([[[[3.0, 4.0]]]]).expand(1, 3, 1, 2)
    )
    assert softcap(3.0).dense(2, heads=1).abs().sum() == 0
    assert alibi([1.0, 2.0]).dense(2, heads=2, batch=2).tolist() == [[[[0, -1], [-1, 0]], [[0, -2], [-2, 0]]]] * 2


def attend(score: Any, heads: int = 4, length: int = 6, **options: Any) -> Any:
    query = torch.randn(2, heads, length, 8)
    return fm.attention(query, query, query, "causal", score_mod=score, **options)


WRONG: dict[str, tuple[Callable[[], Any], type[FlexmaskError], str]] = {
    "slopes": (lambda: attend(alibi([1.0, 2.0])), LoweringError, "alibi has 2 slopes, and there are 4 query heads"),
    "slope": (lambda: alibi(0.5), OperandError, r"slopes must be numbers \[H\]"),
    "integers": (lambda: alibi(torch.arange(4)), OperandError, "floating-point tensor or a list, got Tensor int64"),
    "text": (lambda: alibi("a"), OperandError, "got str a"),
    "infinite": (lambda: bias([[float("inf")]]), OperandError, "finite numbers; hide keys by a mask"),
    "sparse": (lambda: bias(torch.zeros(2, 2).to_sparse()), OperandError, "plain tensor, got one of layout"),
    "no heads": (lambda: alibi().score_mod(), LoweringError, "give heads=, or alibi"),
    "heads of a table": (lambda: attend(relative_bias(torch.zeros(8, 3))), LoweringError, "a table of 3 heads"),
    "odd": (lambda: relative_bias(torch.zeros(7, 4)), ExpressionError, "7 buckets .* wanted an even number"),
    "few": (lambda: relative_bias(torch.zeros(1, 4), bidirectional=False), ExpressionError, "wanted at least 2"),
    "near": (lambda: relative_bias(torch.zeros(64, 4), max_distance=20), ExpressionError, "max_distance must be at least 32"),
    "one axis": (lambda: relative_bias(torch.zeros(8)), OperandError, r"numbers \[buckets, H\]"),
    "small": (lambda: attend(bias(torch.zeros(5, 6))), LoweringError, "positions are up to 6 queries and 6 keys"),
    "small for a function": (
        lambda: attend(softcap(3) >> bias(torch.zeros(5, 6))),
        LoweringError,
        "positions are up to 6 queries",
    ),
    "after an offset": (lambda: attend(bias(torch.zeros(6, 6)), q_offset=1), LoweringError, "up to 7 queries"),
    "batch": (lambda: attend(bias(torch.zeros(3, 1, 6, 6))), LoweringError, r"wanted \[1 or 2, 1 or 4, 6, 6\]"),
    "heads of a bias": (lambda: attend(bias(torch.zeros(3, 6, 6))), LoweringError, "bias has a table of 3 heads"),
    "device": (lambda: attend(alibi(torch.zeros(4, device="meta"))), LoweringError, "on meta, and the query is on cpu"),
    "cap": (lambda: softcap(0), ExpressionError, "cap must be positive"),
    "no cap": (lambda: softcap(cast(Any, "50")), OperandError, "cap must be a number"),
    "plus": (lambda: alibi() + softcap(3), OperandError, "write a >> b"),
    "function": (lambda: alibi() >> (lambda s, *_: s), OperandError, "calls score.score_mod"),
    "no score": (lambda: attend(3), OperandError, "score_mod must be a function"),
    "parse": (lambda: parse(3), OperandError, "reads a string"),  # type: ignore[arg-type]
    "name": (lambda: attend("albi()"), TextError, "Did you mean alibi"),
    "argument": (lambda: parse("alibi(slope=[1])"), TextError, "Did you mean slopes"),
    "expression": (lambda: parse("softcap(3) >> "), TextError, "not an expression"),
    "variable": (lambda: parse("alibi(x)"), TextError, "numbers and lists"),
    "operator": (lambda: parse("alibi() & softcap(3)"), TextError, "by >> to do one after another"),
    "value": (lambda: parse("alibi() >> softcap(-1)"), TextError, "cap must be positive"),
    "layer": (lambda: fm.MultiheadFlexAttention(8, 8, 2, score_mod="softcap()"), TextError, "missing a required argument"),
    "size": (lambda: alibi().dense(0, heads=2), ExpressionError, "q_len must be at least 1"),
}


@pytest.mark.parametrize("case", WRONG)
def test_errors(case: str) -> None:
    make, kind, message = WRONG[case]
    with pytest.raises(kind, match=message):
        make()


def test_a_place_in_the_text() -> None:
    with pytest.raises(TextError) as caught:
        parse("alibi() >> softap(3)")
    assert str(caught.value).endswith("\n  alibi() >> softap(3)\n             ^")


def test_names() -> None:
    assert set(scores.__all__) == {"Score", "ScoreMod", "alibi", "bias", "parse", "relative_bias", "softcap"}
