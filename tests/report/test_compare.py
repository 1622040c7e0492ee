"""Masks compared as sets of cells: against counts over their dense form, and in bounded memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import flexmask as fm
from flexmask import Mask
from flexmask.blocks import survey
from flexmask.errors import LoweringError, OperandError
from flexmask.report.compare import Cell
from tests.support.exhaustive import half
from tests.support.lowerings import LargestTensor
from tests.support.strategies import Case, Shape, mask_cases, shapes


def first_of(cells: torch.Tensor) -> Cell | None:
    found = cells.nonzero()
    return Cell(*found[0].tolist()) if len(found) else None


def check_difference(found: fm.report.Difference, own: torch.Tensor, its: torch.Tensor) -> None:
    """Against the dense masks, ``bool[B, H, q_len, kv_len]``."""
    own, its = torch.broadcast_tensors(own, its)
    assert found.cells == own.numel()
    assert found.only_self == int((own & ~its).sum())
    assert found.only_other == int((its & ~own).sum())
    assert found.first_self == first_of(own & ~its)
    assert found.first_other == first_of(its & ~own)
    assert bool(found) == (not torch.equal(own, its))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Case, Case, Shape]:
    shape = draw(shapes())
    return draw(mask_cases(shape)), draw(mask_cases(shape)), shape


@half
@given(pairs())
def test_difference_of_random_masks(drawn: tuple[Case, Case, Shape]) -> None:
    one, other, shape = drawn
    found = one.mask.difference(other.mask, **shape.lowering)
    cells = [case.mask.dense(**shape.lowering) for case in (one, other)]
    check_difference(found, *cells)
    assert one.mask.equals(other.mask, **shape.lowering) == (not found)
    assert one.mask.equals(one.mask, **shape.lowering)


@half
@given(pairs())
def test_difference_equals_the_oracle(drawn: tuple[Case, Case, Shape]) -> None:
    one, other, shape = drawn
    found = one.mask.difference(other.mask, **shape.lowering)
    own, its = one.expected(shape), other.expected(shape)
    assert found.first_self == first_of(own & ~its)
    assert found.first_other == first_of(its & ~own)


DIAGONALS = (fm.q - fm.kv) % 3 == 0
LONG: dict[str, tuple[Mask, Mask]] = {
    "rows": (fm.causal(), fm.sliding_window(left=7, right=0)),
    "one is not separable": (fm.causal(), DIAGONALS),
    "neither does": (fm.causal() & DIAGONALS, (fm.q - fm.kv) % 6 == 0),
    "only in the last block": (fm.causal() | DIAGONALS, fm.causal() | DIAGONALS | (fm.q * fm.kv > 83000)),
    "full blocks": (DIAGONALS | fm.causal(), fm.empty()),
    "more intervals than are listed": (fm.key_padding(keep=[i % 2 == 0 for i in range(300)]), fm.key_padding(299)),
    "the same in other words": (DIAGONALS & fm.causal(), ((fm.kv - fm.q) % 3 == 0) - (fm.kv > fm.q)),
    "heads": (fm.per_head([fm.causal(), DIAGONALS]), fm.causal()),
    "sequences": (fm.key_padding([3, 290, 140]) & DIAGONALS, fm.key_padding([5, 290, 100])),
}


@pytest.mark.parametrize("name", LONG)
def test_long_masks(name: str) -> None:
    one, other = LONG[name]
    cells = one.dense(300), other.dense(300)
    check_difference(one.difference(other, 300), *cells)
    check_difference(other.difference(one, 300), *cells[::-1])


def test_blocks_are_decided_a_few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "CHUNK", 1)
    one, other = LONG["sequences"]
    check_difference(one.difference(other, 300), one.dense(300), other.dense(300))


def test_nothing_grows_with_queries_times_keys() -> None:
    length = 4096
    one, other = fm.causal() & fm.document(lengths=[512] * 8), fm.sliding_window(left=256, right=0)
    with LargestTensor() as largest:
        assert one.difference(other, length)
    assert 0 < largest.elements <= 64 * length
    with LargestTensor() as largest:
        assert not (other & DIAGONALS).difference((fm.kv % 3 == fm.q % 3) & other, length)
    assert 0 < largest.elements < length * length / 8


def test_sizes_come_from_both_masks() -> None:
    found = fm.causal().difference(fm.key_padding([2, 4]), 4, q_offset=torch.tensor([0, 0]))
    assert found.cells == 32
    assert fm.causal().difference(fm.full(), 4, batch=3, heads=5).cells == 16  # neither knows sequences nor heads
    assert fm.causal().difference(fm.full(), 2, 4).first_other == Cell(0, 0, 0, 1)


def test_the_query_counts_from_0_with_an_offset() -> None:
    assert fm.causal().difference(fm.causal(offset=1), 2, 9, q_offset=5).first_other == Cell(0, 0, 0, 6)


def test_text() -> None:
    found = fm.causal().difference(fm.sliding_window(left=1, right=1), 4)
    assert str(found) == (
        "6 of 16 cells differ: 3 only in the first mask, the first at b=0, h=0, q=2, kv=0; "
        "3 only in the second mask, the first at b=0, h=0, q=0, kv=1"
    )
    assert str(fm.causal().difference(fm.kv <= fm.q, 4)) == "the masks agree in all 16 cells"


def test_errors() -> None:
    with pytest.raises(OperandError, match=r"other must be a Mask, its text or a mask_mod function, got int 3"):
        fm.causal().equals(3, 4)  # type: ignore[arg-type]
    for mask in (fm.key_padding([3]), fm.key_padding([1, 2]), fm.key_padding([3]) & ((fm.q - fm.kv) % 3 == 0)):
        sizes = rf"two sizes of batch: {len(mask.dense(4))} by .* and 3 by key_padding\(lengths=\[1, 2, 3\]\)"
        with pytest.raises(LoweringError, match=sizes):
            mask.equals(fm.key_padding([1, 2, 3]), 4)
    with pytest.raises(LoweringError, match="at most kv_len = 4, got 5"):
        fm.key_padding([5]).equals(fm.key_padding([5]), 4)
    with pytest.raises(LoweringError, match="q_len must be at least 1"):
        fm.causal().difference(fm.full(), 0)
