"""Names of data: a user's own, of parameters and of a function's variables, in texts and messages."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import and_masks

import flexmask as fm
from flexmask import b, kv, q
from flexmask.errors import LoweringError, OperandError

IDS = torch.zeros(2, 8, dtype=torch.int64)
LENGTHS, LIMITS = torch.tensor([[8, 5], [3, 4]])


def window(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, *, limits: Tensor) -> Tensor:
    return q_idx - kv_idx < limits[b] * 2


def packed(document_ids: Tensor) -> Callable[..., Tensor]:
    return lambda b, h, q_idx, kv_idx: document_ids[b, q_idx] * 2 == document_ids[b, kv_idx] * 2


#: Masks, and their texts.
NAMED: dict[str, tuple[Callable[[], Any], str]] = {
    "a table": (lambda: fm.table(IDS, name="row")[b, q] == 3, "<row: int64[2, 8]>[b, q] == 3"),
    "an argument": (lambda: fm.document(fm.table(IDS, "row")), "document(ids=<row: int64[2, 8]>)"),
    "two of one shape": (
        lambda: fm.document(fm.table(IDS, "of_q"), kv_ids=fm.table(IDS + 1, "of_kv")),
        "document(ids=<of_q: int64[2, 8]>, kv_ids=<of_kv: int64[2, 8]>)",
    ),
    "a list has its values": (lambda: fm.key_padding(fm.table([8, 5], "n")), "key_padding(lengths=[8, 5])"),
    "a parameter": (lambda: fm.parse("document(row)", row=IDS), "document(ids=<row: int64[2, 8]>)"),
    "a parameter of an expression": (lambda: (fm.param("n")[b] > kv).bind(n=LENGTHS), "<n: int64[2]>[b] > kv"),
    "a closure's variable": (
        lambda: fm.from_mask_mod(packed(IDS)),
        "<document_ids: int64[2, 8]>[b, q] * 2 == <document_ids: int64[2, 8]>[b, kv] * 2",
    ),
    "a global, and an argument of a partial": (
        lambda: fm.from_mask_mod(and_masks(partial(window, limits=LIMITS), lambda b, h, q_idx, kv_idx: kv_idx * 2 < LENGTHS[b])),
        "(q - kv < <limits: int64[2]>[b] * 2) & (kv * 2 < <LENGTHS: int64[2]>[b])",
    ),
}


@pytest.mark.parametrize("name", NAMED)
def test_texts(name: str) -> None:
    make, text = NAMED[name]
    assert str(make()) == text


def test_a_variable_without_a_value_yet() -> None:
    def make() -> Callable[..., Tensor]:
        def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return q_idx >= kv_idx if LENGTHS.numel() else later

        assert str(fm.from_mask_mod(causal)) == "causal"
        later = IDS
        return causal

    assert str(fm.from_mask_mod(make())) == "causal"


def test_a_name_is_no_part_of_equality() -> None:
    assert fm.document(fm.table(IDS, "row")) == fm.document(IDS)
    assert hash(fm.document(fm.table(IDS, "row"))) == hash(fm.document(IDS))


def test_a_message_has_the_name() -> None:
    with pytest.raises(LoweringError, match=r"document\(ids=<row: int64\[2, 8\]>\) has 8 values along q, but q_len is 6"):
        fm.document(fm.table(IDS, "row")).dense(6)


def test_a_name_is_a_string() -> None:
    with pytest.raises(OperandError, match="table: name must be a string, got int 3"):
        fm.table(IDS, 3)  # type: ignore[arg-type]


def test_floats_are_no_table() -> None:
    """`.long()` would cut off fractions, so that the message says what else may be meant."""
    with pytest.raises(OperandError, match=r"take tensor\.long\(\) of whole numbers, or compare them, .* are a score_mod"):
        fm.table(torch.ones(2))
