"""Every lowering of named masks and of random expressions, against the oracle and against torch's create_block_mask."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask

import flexmask as fm
from flexmask import Mask
from flexmask.errors import OperandError
from tests.support import oracle
from tests.support.exhaustive import one_in
from tests.support.lowerings import (
    LargestTensor,
    assert_canonical,
    cells_of,
    check_block_mask,
    check_lowerings,
    element_mask,
    has_intervals,
)
from tests.support.named_masks import NAMES, SHAPES, WITH_DATA, fits, named
from tests.support.strategies import Case, Shape, mask_cases, shaped_masks

BLOCK_SIZES: list[int | tuple[int, int]] = [4, (4, 8), 16, 3, (8, 3), 1]

# ---------------------------------------------------------------- named masks


def batched_or_not(name: str, shape: Shape) -> list[bool]:
    """With data for each sequence, and at two shapes with data for all of them."""
    return [True, False] if name in WITH_DATA and shape in (SHAPES["square"], SHAPES["offsets"]) else [True]


#: Each run takes every second shape of each mask, and those with data for all sequences.
EACH = [
    pytest.param(
        *(name, shape, batched, BLOCK_SIZES[(number + turn // 2) % len(BLOCK_SIZES)]),
        id=f"{name}-{at}-{batched}",
        marks=[pytest.mark.exhaustive] if batched and (number + turn) % 2 else [],
    )
    for number, name in enumerate(NAMES)
    for turn, (at, shape) in enumerate(SHAPES.items())
    if fits(name, shape)
    for batched in batched_or_not(name, shape)
]


@pytest.mark.parametrize(("name", "shape", "batched", "block_size"), EACH)
def test_lowerings_of_named_mask(name: str, shape: Shape, batched: bool, block_size: int | tuple[int, int]) -> None:
    case = named(name, shape, batched)
    check_lowerings(case, shape, case.expected(shape), block_size)


def test_rows_of_named_masks_are_exact() -> None:
    shape = SHAPES["odd"]
    assert {name for name in NAMES if not named(name, shape).mask.rows(**shape.lowering).exact} <= {"dense"}


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.mark.parametrize(("shape", "dtype"), list(zip(SHAPES.values(), DTYPES * 2, strict=True)), ids=str)
def test_bias_of_named_mask(shape: Shape, dtype: torch.dtype) -> None:
    case = named("causal", shape)
    bias = case.mask.to_bias(**shape.lowering, dtype=dtype)
    assert bias.dtype == dtype
    expected = case.expected(shape)
    wanted = torch.zeros(expected.shape, dtype=dtype).masked_fill(~expected, torch.finfo(dtype).min)
    assert torch.equal(bias.expand_as(expected), wanted)


def test_bias_is_what_softmax_adds() -> None:
    scores = torch.randn(2, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    weights = torch.softmax(scores + (fm.causal() & fm.key_padding(start=[0, 2])).to_bias(4), -1)
    assert weights[1, 0, 2].tolist() == [0, 0, 1, 0]
    assert weights[1, 0, 0].tolist() == [0.25] * 4  # fully masked
    assert torch.equal(weights[0, 0, 1], torch.softmax(torch.tensor([*scores[0, 0, 1, :2].tolist(), -torch.inf, -torch.inf]), -1))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, "float32"])
def test_bias_of_other_dtypes_is_refused(dtype: Any) -> None:
    with pytest.raises(OperandError, match="dtype must be a floating-point dtype"):
        fm.causal().to_bias(4, dtype=dtype)


LONG = {
    "ragged": Shape(300, 300, batch=3),
    "wide": Shape(130, 400, batch=3),
    "tall": Shape(400, 130, batch=3),
    "exact": Shape(256, 256, batch=3),
    "offset": Shape(140, 390, batch=3, q_offset=250),
}


@pytest.mark.parametrize(
    ("name", "shape"),
    one_in(3, ["full", "causal", "transpose", "window both", "key_padding", "document lengths", "query_padding"], LONG),
)
def test_block_mask_of_128(name: str, shape: str) -> None:
    case, lengths = named(name, LONG[shape]), LONG[shape]
    check_block_mask(case, lengths, case.expected(lengths), 128)


@pytest.mark.parametrize("name", ["causal", "window both", "key_padding", "per_document", "dense", "per_head"])
def test_mask_mod_under_vmap(name: str) -> None:
    """As create_block_mask and FlexAttention call it: one scalar index each."""
    shape = SHAPES["odd"]
    case = named(name, shape)
    expected = case.expected(shape)
    for form in ("interval", "expression") if has_intervals(case, shape) else ("expression",):
        mask_mod = case.mask.mask_mod(**shape.lowering, form=form)
        made = create_block_mask(mask_mod, 3, 2, 9, 13, device="cpu", BLOCK_SIZE=4)
        assert torch.equal(element_mask(made, shape), expected)


# ---------------------------------------------------------------- random expressions


@given(shaped_masks(), st.sampled_from(BLOCK_SIZES))
def test_lowerings_of_random_mask(drawn: tuple[Case, Shape], block_size: int | tuple[int, int]) -> None:
    case, shape = drawn
    check_lowerings(case, shape, case.expected(shape), block_size)


# ---------------------------------------------------------------- masks that are not separable in q and kv

INSEPARABLE: list[tuple[Mask, oracle.Predicate]] = [
    ((fm.q - fm.kv) % 3 == 0, lambda b, h, q, kv, q_len, kv_len: (q - kv) % 3 == 0),
    (
        fm.causal() & ((fm.q - fm.kv) % 3 == 0),
        lambda b, h, q, kv, q_len, kv_len: kv <= q and (q - kv) % 3 == 0,
    ),
    (fm.q * fm.kv < 40, lambda b, h, q, kv, q_len, kv_len: q * kv < 40),
    (
        fm.sliding_window(left=4, right=4) - ((fm.q * fm.kv) % 5 == fm.h),
        lambda b, h, q, kv, q_len, kv_len: -4 <= kv - q <= 4 and (q * kv) % 5 != h,
    ),
]


@pytest.mark.parametrize(("mask", "allowed"), INSEPARABLE, ids=[str(mask) for mask, _ in INSEPARABLE])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_inseparable_mask(mask: Mask, allowed: oracle.Predicate, shape: Shape) -> None:
    case = Case(mask, allowed)
    check_lowerings(case, shape, case.expected(shape), (2, 4))


def test_equal_sides_at_an_offset_of_the_queries() -> None:
    """As many queries as keys are the same positions only without an offset."""
    shape = Shape(6, 6, q_offset=1)
    case = Case(fm.q % 3 == fm.kv % 3, lambda b, h, q, kv, q_len, kv_len: q % 3 == kv % 3)
    check_lowerings(case, shape, case.expected(shape), (2, 4))


def test_a_dense_mask_is_evaluated_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flexmask.lowering.dense.CHUNK", 16)
    shape = Shape(6, 6)
    case = Case(fm.causal(), oracle.causal())
    assert torch.equal(case.mask.dense(6), case.expected(shape))


def test_bounds_are_tight_outside_the_inseparable_part() -> None:
    """Outside of the causal part the mask is known to be hidden, whatever the inseparable part is."""
    found = (fm.causal() & ((fm.q - fm.kv) % 3 == 0)).rows(16)
    causal = fm.causal().rows(16)
    shape = Shape(16, 16)
    assert not (cells_of(found.upper, shape) & ~cells_of(causal.lower, shape)).any()


def test_names_that_cancel_leave_data_unused() -> None:
    """`q < kv` and the predicate of `causal` contradict each other, which shows only once the name is expanded."""
    shape = Shape(4, 4)
    for mask, visible in (
        ((fm.q < fm.kv) & fm.causal() & fm.document([0, 0, 1, 1]), False),
        ((fm.q < fm.kv) | fm.causal() | fm.document([0, 0, 1, 1]), True),
    ):
        case = Case(mask, oracle.full() if visible else oracle.empty())
        check_lowerings(case, shape, case.expected(shape), 2)


def test_names_that_cancel_still_determine_the_batch() -> None:
    mask = (fm.q < fm.kv) & fm.causal() & fm.key_padding([2, 1])
    assert not mask.dense(2).any()
    assert not mask.rows(2).upper.counts().any()


# ---------------------------------------------------------------- memory


SEPARABLE = [
    fm.full(),
    fm.causal() & fm.document(lengths=[512] * 8),
    fm.sliding_window(left=256, right=0) | (fm.kv < 4),
    fm.per_head([fm.causal(), fm.masks.transpose(fm.causal()), ~fm.sliding_window(left=3, right=3)]),
    fm.prefix_lm([100, 2000]) & fm.key_padding([4000, 3000]) & fm.query_padding([4000, 3000]),
    fm.per_document(fm.causal(), lengths=[512] * 8),
    (fm.q // 16 == fm.kv // 16) ^ fm.causal(offset=-1000),
]


@pytest.mark.parametrize("mask", SEPARABLE, ids=str)
def test_nothing_grows_with_queries_times_keys(mask: Mask) -> None:
    length = 4096
    with LargestTensor() as largest:
        mask.rows(length)
        mask.mask_mod(length)
        mask.block_mask(length)
        mask.stats(length)
    assert 0 < largest.elements <= 64 * length


def test_cells_of_an_inseparable_mask_are_evaluated_in_parts() -> None:
    length = 8192
    mask = fm.sliding_window(left=2048, right=0) & ((fm.q * fm.kv) % 7 != 3)
    with LargestTensor() as largest:
        mask.block_mask(length)
        mask.stats(length)
    assert 0 < largest.elements <= length * length // 8


def test_the_largest_tensor_is_noticed() -> None:
    with LargestTensor() as largest:
        fm.causal().dense(64)
    assert largest.elements == 64 * 64


# ---------------------------------------------------------------- rows as sets


@given(st.data())
def test_rows_combine_as_sets(data: st.DataObject) -> None:
    first, shape = data.draw(shaped_masks())
    second = data.draw(mask_cases(shape))
    left, right = first.mask.rows(**shape.lowering).lower, second.mask.rows(**shape.lowering).lower
    a, b = cells_of(left, shape), cells_of(right, shape)
    results: list[tuple[Any, torch.Tensor]] = [
        (left & right, a & b),
        (left | right, a | b),
        (left - right, a & ~b),
        (~left, ~a),
    ]
    for rows, cells in results:
        assert_canonical(rows, shape)
        assert torch.equal(cells_of(rows, shape), cells)
