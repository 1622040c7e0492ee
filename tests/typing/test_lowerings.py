"""What masks lower to, as a user calls it: the types of results, and arguments that pyright and mypy reject."""

from typing import assert_type

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask

import flexmask as fm
from flexmask.errors import FlexmaskError
from flexmask.intervals import RowBounds, Rows
from flexmask.report import Difference, Explanation, Stats

MASK = fm.causal() & fm.key_padding([3, 4])


def test_lowerings() -> None:
    assert_type(MASK.dense(4), torch.Tensor)
    assert_type(MASK.dense(4, 8, batch=2, heads=1, q_offset=torch.tensor([1, 2]), device="cpu"), torch.Tensor)
    assert_type(MASK.block_mask(4, block_size=(2, 4), form="interval"), BlockMask)
    assert_type(MASK.rows(4), RowBounds)
    assert_type(MASK.rows(4).lower, Rows)
    assert_type(MASK.stats(4), Stats)
    assert_type(MASK.stats(4).visible_fraction, float)
    assert_type(MASK.difference("causal", 4), Difference)
    assert_type(MASK.equals(fm.causal(), 4), bool)
    assert_type(MASK.bind(), fm.Mask)
    assert_type(MASK.to("cpu"), fm.Mask)
    assert_type(fm.explain(MASK, 4), Explanation)
    assert_type(fm.create_block_mask(lambda b, h, q, kv: q >= kv, 1, 1, 128, 128, device="cpu"), BlockMask)


def test_wrong_arguments() -> None:
    with pytest.raises(FlexmaskError):
        MASK.dense("4")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        MASK.dense(4, 4, 2)  # type: ignore[call-arg]
    with pytest.raises(FlexmaskError):
        MASK.block_mask(4, form="fast")  # type: ignore[arg-type]
    with pytest.raises(FlexmaskError):
        MASK.difference(3, 4)  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        MASK.to_dense(4)  # type: ignore[attr-defined]
