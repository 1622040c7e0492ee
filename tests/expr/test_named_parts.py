"""Parts of a mask with a name: in its text, and nowhere in what it means."""

import pickle
from collections.abc import Callable

import pytest
import torch
from hypothesis import given

import flexmask as fm
from flexmask import Mask, kv, q
from flexmask.errors import OperandError
from tests.support.strategies import Case, Shape, shaped_masks

NEAR, EARLY = q - kv < 3, kv < 4


def test_text_and_words() -> None:
    mask = fm.causal() & (NEAR | EARLY).named("near or early")
    assert str(mask) == "causal & named((q - kv < 3) | (kv < 4), name='near or early')"
    assert repr(mask) == "causal() & named((q - kv < 3) | (kv < 4), name='near or early')"
    assert mask.spoken() == mask.brief() == "causal & near or early"
    assert fm.parse("causal & named((q - kv < 3) | (kv < 4), 'near or early')").spoken() == mask.spoken()
    assert pickle.loads(pickle.dumps(mask)).spoken() == mask.spoken()
    assert (~NEAR.named("near") | mask).spoken() == "~near | causal & near or early"


#: The same mask with names in other places, and without.
SAME: list[Callable[[], tuple[Mask, Mask]]] = [
    lambda: (NEAR.named("a"), NEAR),
    lambda: (fm.causal() & NEAR.named("a"), fm.causal() & NEAR),
    lambda: ((fm.causal() & NEAR).named("a") & EARLY, EARLY & NEAR & fm.causal()),
    lambda: (fm.causal() | (EARLY | NEAR.named("a")).named("b"), NEAR | fm.causal() | EARLY),
    lambda: (~NEAR.named("a"), ~NEAR),
    lambda: (~(~fm.causal()).named("a"), fm.causal()),
    lambda: (fm.causal() ^ NEAR.named("a"), NEAR ^ fm.causal()),
    lambda: (fm.causal() & ~fm.causal().named("a"), fm.masks.empty()),
    lambda: (NEAR & (NEAR | EARLY).named("a"), NEAR),
    lambda: ((fm.causal() | (fm.causal() & NEAR).named("a")) & EARLY, fm.causal() & EARLY),
    lambda: ((fm.causal() & (fm.causal() | NEAR).named("a")) | EARLY, fm.causal() | EARLY),
    lambda: ((NEAR | (fm.causal() & NEAR).named("a")) & (EARLY | NEAR), NEAR),
    lambda: (fm.masks.per_head([NEAR.named("a"), EARLY]), fm.masks.per_head([NEAR, EARLY])),
    lambda: (NEAR.named("a").named("b"), NEAR.named("c")),
]


@pytest.mark.parametrize("pair", SAME)
def test_equal_to_the_mask_without_names(pair: Callable[[], tuple[Mask, Mask]]) -> None:
    named, plain = pair()
    assert named == plain
    assert plain == named
    assert hash(named) == hash(plain)
    assert torch.equal(named.dense(9, 7), plain.dense(9, 7))


def test_opposites_are_found_below_a_name() -> None:
    """Also in what is written."""
    for mask in (((kv >= 4) & fm.causal()) & EARLY.named("a"), fm.causal() & (~fm.causal()).named("a")):
        assert str(mask) == "empty"
    assert str(((kv >= 4) | fm.causal()) | EARLY.named("a")) == "full"


@given(shaped_masks())
def test_a_mask_with_a_name_lowers_as_without(drawn: tuple[Case, Shape]) -> None:
    case, shape = drawn
    named = case.mask.named("a name")
    assert named == case.mask
    assert (~named & EARLY) == (~case.mask & EARLY)
    expected = case.expected(shape)
    assert torch.equal(named.dense(**shape.lowering).expand_as(expected), expected)


def test_parameters_are_bound_below_a_name() -> None:
    mask = fm.causal() & fm.parse("document(ids)").named("one text")
    bound = mask.bind(ids=[0, 0, 1])
    assert (mask.params, bound.params) == (("ids",), ())
    assert bound.spoken() == "causal & one text"
    assert bound == fm.causal() & fm.document([0, 0, 1])


def test_a_name_implies_no_length() -> None:
    assert (kv < 5).named("early").stats(7, 7).kv_len == 7
    assert fm.explain((kv < 5).named("early"), 7).stats.kv_len == 7
    from flexmask.report.lengths import resolve_lengths

    assert resolve_lengths((kv < 5).named("early")) == resolve_lengths(kv < 5)


def test_errors_have_the_name() -> None:
    with pytest.raises(fm.errors.ExpressionError, match=r"the mask causal & one text has no parameter window; it has ids"):
        (fm.causal() & fm.parse("document(ids)").named("one text")).bind(window=3)


@pytest.mark.parametrize("name", ["", "  ", "two\nlines", 3, None])
def test_what_is_no_name(name: object) -> None:
    with pytest.raises(OperandError, match="named: name must be a line of text, such as 'same image', got"):
        NEAR.named(name)  # type: ignore[arg-type]
