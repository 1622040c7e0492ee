"""Masks as a user writes them: pyright and mypy accept them, and reject what is marked, which is an error at run time too."""

from collections.abc import Callable
from typing import assert_type

import numpy as np
import pytest
import torch

import flexmask as fm
from flexmask import Mask, b, h, kv, q
from flexmask.errors import FlexmaskError, OperandError
from flexmask.expr import Index, Table


def test_named_masks() -> None:
    assert_type(fm.causal("lower_right", offset=1), Mask)
    assert_type(fm.sliding_window(left=3, right=None), Mask)
    assert_type(fm.document(lengths=[1, 3]) & fm.key_padding(torch.tensor([4])), Mask)
    assert_type(fm.key_padding(keep=np.array([True, False])), Mask)
    assert_type(fm.masks.sink_window(4, size=8), Mask)
    assert_type(fm.per_head([fm.causal(), fm.full()]), Mask)
    assert_type(fm.parse("document(ids)", ids=[0, 0, 1]), Mask)
    assert_type(fm.from_dense([[True, False], [True, True]]), Mask)


def test_expressions() -> None:
    ids = fm.table([[0, 0, 1]])
    assert_type(ids, Table)
    assert_type(q - kv, Index)
    assert_type(abs(q - kv) // 2 + fm.maximum(q, 3) % 4, Index)
    assert_type(ids[b, q] == ids[b, kv], Mask)
    assert_type((kv <= q) | ~(h < 2) ^ fm.causal() - fm.full(), Mask)
    assert_type(fm.where(q < 2, fm.causal(), fm.full()), Mask)
    assert_type(fm.where(q < 2, q, kv), Index)


def test_functions() -> None:
    def mask_mod(b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
        return q_idx >= kv_idx

    assert_type(fm.from_mask_mod(mask_mod), Mask)


WRONG: list[Callable[[], object]] = [
    lambda: fm.sliding_window(3),  # type: ignore[call-arg]
    lambda: fm.sliding_window(width=3),  # type: ignore[call-arg]
    lambda: fm.causal("bottom_right"),  # type: ignore[arg-type]
    lambda: fm.causal() & 3,  # type: ignore[operator]
    lambda: fm.causal() & fm.full,  # type: ignore[operator]
    lambda: q + "1",  # type: ignore[operator]
    lambda: fm.per_head(fm.causal()),  # type: ignore[arg-type]
    lambda: fm.masks.chunked("4"),  # type: ignore[arg-type]
    lambda: fm.parse(fm.causal()),  # type: ignore[arg-type]
    lambda: fm.where(fm.causal(), q, fm.full()),  # type: ignore[call-overload]
]


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_arguments(wrong: Callable[[], object]) -> None:
    with pytest.raises((FlexmaskError, TypeError)):
        wrong()


def test_masks_have_no_truth_value() -> None:
    with pytest.raises(OperandError, match="&"):
        bool(fm.causal())
