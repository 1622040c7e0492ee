"""The laws of the algebra, and the round trips: text, repr and pickle."""

import copy
import operator
import pickle
from collections.abc import Callable
from functools import reduce
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, note
from hypothesis import strategies as st
from torch.distributed.utils import _apply_to_tensors
from torch.nn.attention.flex_attention import flex_attention

import flexmask as fm
from flexmask import Mask
from flexmask.errors import OperandError
from flexmask.expr.mask import Not
from tests.support.exhaustive import half
from tests.support.strategies import Case, Shape, mask_cases, shaped_masks, shapes

FULL, EMPTY = fm.full(), fm.empty()


@st.composite
def triples(draw: st.DrawFn) -> tuple[Mask, Mask, Mask, Shape]:
    """Three masks that have a meaning at the same lengths."""
    shape = draw(shapes(longest=12))
    first, second, third = (draw(mask_cases(shape, depth=2)) for _ in range(3))
    return first.mask, second.mask, third.mask, shape


def assert_same_mask(left: Mask, right: Mask) -> None:
    """Equal as values: equality, its opposite and the hash agree."""
    assert left == right
    assert (left != right) is False
    assert hash(left) == hash(right)


def assert_same_meaning(left: Mask, right: Mask, shape: Shape) -> None:
    full = (shape.batch, shape.heads, shape.q_len, shape.kv_len)
    assert torch.equal(left.dense(**shape.lowering).expand(full), right.dense(**shape.lowering).expand(full))


# ---------------------------------------------------------------- laws that hold for the values themselves

Law = Callable[[Mask, Mask, Mask], tuple[Mask, Mask]]

STRUCTURAL: dict[str, Law] = {
    "a & b == b & a": lambda a, b, c: (a & b, b & a),
    "a | b == b | a": lambda a, b, c: (a | b, b | a),
    "a ^ b == b ^ a": lambda a, b, c: (a ^ b, b ^ a),
    "(a & b) & c == a & (b & c)": lambda a, b, c: ((a & b) & c, a & (b & c)),
    "(a | b) | c == a | (b | c)": lambda a, b, c: ((a | b) | c, a | (b | c)),
    "~~a == a": lambda a, b, c: (~~a, a),
    "a & a == a": lambda a, b, c: (a & a, a),
    "a | a == a": lambda a, b, c: (a | a, a),
    "a & full == a": lambda a, b, c: (a & FULL, a),
    "full & a == a": lambda a, b, c: (FULL & a, a),
    "a & empty == empty": lambda a, b, c: (a & EMPTY, EMPTY),
    "a | full == full": lambda a, b, c: (a | FULL, FULL),
    "a | empty == a": lambda a, b, c: (a | EMPTY, a),
    "empty | a == a": lambda a, b, c: (EMPTY | a, a),
    "a ^ empty == a": lambda a, b, c: (a ^ EMPTY, a),
    "a ^ full == ~a": lambda a, b, c: (a ^ FULL, ~a),
    "a ^ a == empty": lambda a, b, c: (a ^ a, EMPTY),
    "a - b == a & ~b": lambda a, b, c: (a - b, a & ~b),
}

#: These are simplified too where `a` is one expression; between whole masks drawn at random only the meaning counts.
SIMPLIFIED: dict[str, Law] = {
    "a & ~a == empty": lambda a, b, c: (a & ~a, EMPTY),
    "a | ~a == full": lambda a, b, c: (a | ~a, FULL),
    "a - a == empty": lambda a, b, c: (a - a, EMPTY),
    "a & (a | b) == a": lambda a, b, c: (a & (a | b), a),
    "a | (a & b) == a": lambda a, b, c: (a | (a & b), a),
}

SEMANTIC: dict[str, Law] = {
    "~(a & b) == ~a | ~b": lambda a, b, c: (~(a & b), ~a | ~b),
    "~(a | b) == ~a & ~b": lambda a, b, c: (~(a | b), ~a & ~b),
    "a & (b | c) == (a & b) | (a & c)": lambda a, b, c: (a & (b | c), (a & b) | (a & c)),
    "a | (b & c) == (a | b) & (a | c)": lambda a, b, c: (a | (b & c), (a | b) & (a | c)),
    "a ^ b == (a | b) - (a & b)": lambda a, b, c: (a ^ b, (a | b) - (a & b)),
    "(a ^ b) ^ c == a ^ (b ^ c)": lambda a, b, c: ((a ^ b) ^ c, a ^ (b ^ c)),
    "(a ^ b) ^ b == a": lambda a, b, c: ((a ^ b) ^ b, a),
    "a - (b | c) == (a - b) - c": lambda a, b, c: (a - (b | c), (a - b) - c),
    "~(a ^ b) == ~a ^ b": lambda a, b, c: (~(a ^ b), ~a ^ b),
    "where(a, b, c) == (a & b) | (~a & c)": lambda a, b, c: (fm.where(a, b, c), (a & b) | (~a & c)),
    "where(~a, b, c) == where(a, c, b)": lambda a, b, c: (fm.where(~a, b, c), fm.where(a, c, b)),
    "transpose(transpose(a)) == a": lambda a, b, c: (fm.masks.transpose(fm.masks.transpose(a)), a),
    "transpose(a & b) == transpose(a) & transpose(b)": lambda a, b, c: (
        fm.masks.transpose(fm.masks.transpose(a & b)),
        fm.masks.transpose(fm.masks.transpose(a) & fm.masks.transpose(b)),
    ),
    "shift(a, 0, 0) == a": lambda a, b, c: (fm.masks.shift(a), a),
}

#: Masks of every kind of node, for the laws and for equality.
ATOMS: dict[str, Mask] = {
    "comparison": fm.q - fm.kv < 3,
    "equality": (fm.q - fm.kv) % 2 == 0,
    "named": fm.causal(),
    "named with data": fm.key_padding([3, 5, 4]),
    "conjunction": fm.causal() & (fm.kv < 4),
    "disjunction": fm.causal() | (fm.kv < 4),
    "exclusive": fm.causal() ^ (fm.kv < 4),
    "negation": ~fm.causal(),
    "negated conjunction": ~(fm.causal() & (fm.kv < 4)),
    "per_head": fm.per_head([fm.causal(), fm.sliding_window(size=2)]),
    "shift": fm.masks.shift(fm.sliding_window(left=1, right=1), q=1),
    "transpose": fm.masks.transpose(fm.causal()),
    "per_document": fm.per_document(fm.causal(), [0, 0, 1, 1, 1, -1]),
    "tensor": fm.document(torch.tensor([0, 0, 1, 1, 1, -1])),
    "full": FULL,
    "empty": EMPTY,
}


@pytest.mark.parametrize("law", [*STRUCTURAL, *SIMPLIFIED])
def test_structural_law_of_each_node(law: str) -> None:
    for atom in ATOMS.values():
        assert_same_mask(*(STRUCTURAL | SIMPLIFIED)[law](atom, fm.key_padding(3), fm.kv % 2 == 0))


@half
@given(triples())
def test_laws_of_drawn_masks(drawn: tuple[Mask, Mask, Mask, Shape]) -> None:
    first, second, third, shape = drawn
    for name, law in (STRUCTURAL | SIMPLIFIED | SEMANTIC).items():
        note(name)
        left, right = law(first, second, third)
        assert_same_meaning(left, right, shape)
        if name in STRUCTURAL:
            assert_same_mask(left, right)


# ---------------------------------------------------------------- equality and hash


def test_different_masks_are_not_equal() -> None:
    masks = list(ATOMS.values())
    assert len(set(masks)) == len(masks)
    assert all((left == right) == (left is right) for left in masks for right in masks)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (fm.q >= fm.kv, fm.kv <= fm.q),
        (fm.q > fm.kv, fm.kv < fm.q),
        (fm.q == fm.kv, fm.kv == fm.q),
        (fm.q != fm.kv, ~(fm.q == fm.kv)),
        (~(fm.q < fm.kv), fm.q >= fm.kv),
        (fm.causal(), fm.causal(align="upper_left", offset=0)),
        (fm.sliding_window(left=2, right=1), fm.sliding_window(left=2, right=1)),
        (fm.key_padding([3, 4]), fm.key_padding((3, 4))),
        (fm.kv + fm.q == 3, fm.q + fm.kv == 3),
        (fm.kv * -1 == fm.kv * -2, fm.kv * -2 == fm.kv * -1),
    ],
    ids=str,
)
def test_the_same_mask_written_twice(left: Mask, right: Mask) -> None:
    assert_same_mask(left, right)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (fm.q < fm.kv, fm.q > fm.kv),
        (fm.q < fm.kv, fm.q <= fm.kv),
        (fm.causal(), fm.causal(offset=1)),
        (fm.causal(), fm.causal(align="lower_right")),
        (fm.sliding_window(left=2, right=1), fm.sliding_window(left=1, right=2)),
        (fm.key_padding([3, 4]), fm.key_padding([4, 3])),
        (fm.key_padding([3, 4]), fm.query_padding([3, 4])),
        (fm.key_padding(3), fm.key_padding([3])),
        (fm.from_dense([[True]]), fm.from_dense([[False]])),
        (fm.masks.shift(fm.causal(), q=1), fm.masks.shift(fm.causal(), kv=1)),
        (fm.per_head([fm.causal(), FULL]), fm.per_head([FULL, fm.causal()])),
        (fm.kv < fm.table([1, 0])[fm.b], fm.kv < fm.table([1, 0])[fm.h]),
    ],
    ids=str,
)
def test_masks_that_differ_in_one_place(left: Mask, right: Mask) -> None:
    assert left != right
    assert (left == right) is False


def test_a_mask_is_not_equal_to_anything_else() -> None:
    for other in (None, 0, True, "causal", object()):
        assert fm.causal() != other
        assert (fm.causal() == other) is False


def test_tensors_compare_by_identity_and_lists_by_value() -> None:
    ids = torch.tensor([0, 0, 1])
    assert_same_mask(fm.document(ids), fm.document(ids))
    assert fm.document(ids) != fm.document(ids.clone())
    assert_same_mask(fm.document([0, 0, 1]), fm.document([0, 0, 1]))


def test_literal_data_is_copied() -> None:
    data = [1, 2]
    mask = fm.key_padding(data)
    data[0] = 2
    assert mask.dense(3)[0, 0, 0].tolist() == [True, False, False]


def test_masks_are_frozen() -> None:
    for mask in ATOMS.values():
        with pytest.raises((AttributeError, TypeError)):
            mask.name = "other"  # type: ignore[attr-defined]


@given(shaped_masks(longest=8))
def test_equal_masks_have_equal_hashes_and_meanings(drawn: tuple[Case, Shape]) -> None:
    case, shape = drawn
    again = copy.deepcopy(case.mask)
    assert_same_mask(again, case.mask)
    assert_same_meaning(again, case.mask, shape)


# ---------------------------------------------------------------- round trips

NAMESPACE = {name: value for name, value in vars(fm).items() if name in fm.__all__} | {
    name: getattr(fm.masks, name) for name in dir(fm.masks)
}


def read_back(mask: Mask) -> Mask:
    """What Python makes of a mask's repr."""
    found = eval(repr(mask), {"__builtins__": {"abs": abs}}, dict(NAMESPACE))
    assert isinstance(found, Mask)
    return found


ROUND_TRIPS = {
    **{name: mask for name, mask in ATOMS.items() if name != "tensor"},
    "param": fm.document(fm.param("ids")) & fm.key_padding(fm.param("lengths")),
    "param in an index": fm.kv < fm.param("width") + fm.q,
    "table": fm.table([[1, 2], [3, 4]])[fm.q % 2, fm.kv % 2] > 2,
    "negative": -fm.q + fm.kv * -3 < -(fm.kv + 1),
    "nested minus": (fm.q - (fm.kv - 1)) - (2 - fm.q) > 0,
    "division": (fm.q // (fm.kv + 1)) // 2 - fm.q // (2 // (fm.kv + 1) + 1) < fm.q % (fm.kv % 3 + 1),
    "precedence": (fm.causal() | (fm.q == 1)) & ~(fm.kv == 2) ^ (fm.q < 1),
    "keep": fm.key_padding(keep=[[True, False], [True, True]]),
    "dense": fm.from_dense([[True, False], [True, True]]),
    "window": fm.sliding_window(left=None, right=3) | fm.sliding_window(size=2) | fm.sliding_window(left=1, right=None),
    "sources": fm.document(lengths=[1, 2]) & fm.document(cu_seqlens=[0, 1, 2]) & fm.document(position_ids=[0, 1, 0]),
    "kv_ids": fm.document([0, 1], [1, 0, 1]),
    "cross": fm.cross_length([3, 5], q_lengths=[2, 2]) & fm.prefix_lm(2) & fm.causal(align="lower_right", offset=-2),
    "choice": fm.where(fm.q < 2, fm.kv, fm.kv + 1) < 4,
    "extremes": fm.minimum(fm.q, 3) <= fm.maximum(fm.kv, abs(fm.q - fm.kv)),
    "sides": fm.key_padding(2, side="left") & fm.query_padding([1, 2], side="left"),
}


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_text_reads_back(name: str) -> None:
    assert_same_mask(fm.parse(str(ROUND_TRIPS[name])), ROUND_TRIPS[name])


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_repr_reads_back(name: str) -> None:
    assert_same_mask(read_back(ROUND_TRIPS[name]), ROUND_TRIPS[name])


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_pickle_round_trip(name: str) -> None:
    assert_same_mask(pickle.loads(pickle.dumps(ROUND_TRIPS[name])), ROUND_TRIPS[name])


@pytest.mark.parametrize("name", [*ROUND_TRIPS, "tensor"])
def test_fsdp_makes_an_equal_mask(name: str) -> None:
    """Under mixed precision it makes the dataclasses among a module's arguments again, field by field."""
    mask = {**ROUND_TRIPS, "tensor": ATOMS["tensor"]}[name]
    again: Any = _apply_to_tensors(lambda tensor: tensor.bfloat16() if tensor.is_floating_point() else tensor, [mask])
    assert_same_mask(again[0], mask)


def test_pickled_tensor_keeps_its_values() -> None:
    mask = ATOMS["tensor"] & fm.causal()
    again = pickle.loads(pickle.dumps(mask))
    assert torch.equal(again.dense(6), mask.dense(6))
    assert str(again) == str(mask)


@given(shaped_masks(longest=8), st.sampled_from(["text", "repr", "pickle"]))
def test_round_trip_of_drawn_mask(drawn: tuple[Case, Shape], way: str) -> None:
    case, shape = drawn
    mask = case.mask
    if way == "text":
        again = fm.parse(str(mask))
    elif way == "repr":
        again = read_back(mask)
    else:
        again = pickle.loads(pickle.dumps(mask))
    assert_same_mask(again, mask)
    assert str(again) == str(mask)
    assert_same_meaning(again, mask, shape)


@pytest.mark.parametrize(
    ("text", "mask"),
    [
        ("causal", fm.causal()),
        ("causal()", fm.causal()),
        ("causal & key_padding(lengths=[3, 5, 4])", fm.causal() & fm.key_padding([3, 5, 4])),
        ("(q - kv < 128) & causal", fm.causal() & (fm.q - fm.kv < 128)),
        ("~full", EMPTY),
        ("kv <= q", fm.kv <= fm.q),
        ("sliding_window(left=2, right=None)", fm.sliding_window(left=2, right=None)),
        ("causal(align='lower_right', offset=-1)", fm.causal(align="lower_right", offset=-1)),
        ("abs(q - kv) <= width", abs(fm.q - fm.kv) <= fm.param("width")),
        ("causal & document(ids)", fm.causal() & fm.document(fm.param("ids"))),
        ("per_head([causal, full - causal])", fm.per_head([fm.causal(), FULL - fm.causal()])),
        ("ids[b, q] == ids[b, kv]", fm.param("ids")[fm.b, fm.q] == fm.param("ids")[fm.b, fm.kv]),
        ("  causal |\tempty ", fm.causal()),
    ],
)
def test_text_of_a_mask(text: str, mask: Mask) -> None:
    assert_same_mask(fm.parse(text), mask)


def test_bound_parameters_take_their_place() -> None:
    mask = fm.parse("causal & document(ids) & key_padding(lengths)")
    assert mask.params == ("ids", "lengths")
    half = mask.bind(ids=[0, 0, 1])
    assert half.params == ("lengths",)
    assert_same_mask(half.bind(lengths=[2, 3]), fm.causal() & fm.document([0, 0, 1]) & fm.key_padding([2, 3]))


@pytest.mark.parametrize("sign", [operator.and_, operator.or_, operator.xor, operator.sub])
def test_foreign_operand_is_refused_from_both_sides(sign: Callable[[object, object], object]) -> None:
    for other in (True, 1, torch.ones(3, 3, dtype=torch.bool)):
        with pytest.raises(TypeError):
            sign(fm.causal(), other)
        with pytest.raises(TypeError):
            sign(other, fm.causal())


@pytest.mark.parametrize("mask", [fm.causal(), fm.causal() & fm.sliding_window(size=3)])
def test_a_mask_is_neither_a_tensor_nor_a_block_mask(mask: Any) -> None:
    with pytest.raises(OperandError, match=r"a Mask is not indexed: its cells are mask.dense\(q_len, kv_len\)\[b, h, q, kv\]"):
        mask[3, 1]
    x = torch.zeros(1, 1, 4, 16)
    with pytest.raises(AttributeError, match=r"no attribute 'BLOCK_SIZE'; a BlockMask is mask.block_mask\(q_len, kv_len\)"):
        flex_attention(x, x, x, block_mask=mask)
    assert not hasattr(mask, "absent")


def test_signs_on_the_right_of_a_number() -> None:
    assert (5 % (fm.q + 1)).brief() == "5 % (q + 1)"
    assert +fm.q is fm.q


def test_a_comparison_differs_from_its_opposite_everywhere() -> None:
    assert (fm.q < fm.kv) ^ (fm.q >= fm.kv) == fm.full()
    assert (fm.q < fm.kv) ^ fm.causal() ^ (fm.q >= fm.kv) == ~fm.causal()


@pytest.mark.parametrize("join", [operator.and_, operator.or_])
def test_opposites_among_many_parts(join: Callable[[Mask, Mask], Mask], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part is compared once, so that a mask of hundreds of parts is made in the time of its parts."""
    made = Mock(side_effect=Not.make)
    monkeypatch.setattr(Not, "make", made)
    parts = [fm.kv < 3 * number + 10 * fm.q for number in range(60)]
    decided = EMPTY if join is operator.and_ else FULL
    for first, second in ((parts[:50], parts[50:]), (parts[50:], parts[:50])):
        one, other = reduce(join, first), reduce(join, second)
        assert made.call_count <= 60
        for place in (0, 5, -1):
            assert join(join(one, other), ~first[place]) == decided
            assert join(~first[place], join(one, other)) == decided
            assert join(one, join(other, ~first[place])) == decided
            assert join(join(other, ~first[place]), one) == decided
        made.reset_mock()
