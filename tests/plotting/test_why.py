"""Why a cell is hidden: the terms of compositions against plain recursion over their parts, and the kinds of pictures."""

from __future__ import annotations

from functools import cache
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import flexmask as fm
from flexmask import Mask
from flexmask.errors import OperandError, RenderError
from flexmask.plotting.categories import MAX_TERMS
from flexmask.plotting.raster import rasterize
from flexmask.plotting.sheet import term_sheet
from flexmask.report.terms import terms
from tests.support.exhaustive import half

Q, KV = 9, 11
LEAVES = [
    fm.causal(),
    fm.document([0, 0, 0, 1, 1, 1, 1, 2, 2, -1, -1]),
    fm.key_padding(8),
    fm.kv < 2,
    (fm.q - fm.kv) % 3 == 0,
    ~fm.sliding_window(left=2, right=2),
    fm.q > 4,
    fm.causal() ^ (fm.kv > 6),
]
Cells: TypeAlias = NDArray[np.bool_]
#: A leaf by its number, or an operator with its operands.
Tree: TypeAlias = "int | tuple[str, list[Tree]]"


@cache
def leaf_cells(number: int) -> Cells:
    return np.asarray(LEAVES[number].dense(Q, KV)[0, 0])


def composed(tree: Tree) -> Mask:
    if isinstance(tree, int):
        return LEAVES[tree]
    sign, parts = tree
    mask = composed(parts[0])
    for part in parts[1:]:
        mask = mask & composed(part) if sign == "&" else mask | composed(part)
    return mask


def shows(tree: Tree, q: int, kv: int) -> bool:
    if isinstance(tree, int):
        return bool(leaf_cells(tree)[q, kv])
    found = [shows(part, q, kv) for part in tree[1]]
    return all(found) if tree[0] == "&" else any(found)


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    """A composition in which each leaf stands once."""
    order, many = draw(st.permutations(range(len(LEAVES)))), draw(st.integers(2, MAX_TERMS))
    pending: list[Tree] = [*order[:many]]
    while len(pending) > 1:
        many = draw(st.integers(2, len(pending)))
        pending[:many] = [(draw(st.sampled_from("&|")), pending[:many])]
    return pending[0]


@given(trees())
def test_each_hidden_cell_has_its_reasons(tree: Tree) -> None:
    """Every term hides what it does not show itself; a cell is visible where all terms show it."""
    mask = composed(tree)
    found = [np.asarray(term.dense(Q, KV)[0, 0]) for term in terms(mask, None)]
    shown = rasterize(mask, Q, KV, why=True)
    assert shown.hidden_by is not None
    for q in range(Q):
        for kv in range(KV):
            hiding = [number for number, cells in enumerate(found, 1) if not cells[q, kv]]
            assert shows(tree, q, kv) == (not hiding)
            if len(found) <= MAX_TERMS:
                assert [kind for kind in range(1, len(found) + 1) if int(shown.hidden_by[q, kv]) >> kind & 1] == hiding
                assert shown.cells[q, kv] == (hiding[0] if hiding else 0)
    assert [pair[0] for pair in shown.pairs] == [int((shown.cells == kind).sum()) for kind in range(len(shown.categories))]


@given(trees(), st.tuples(st.integers(1, 6), st.integers(1, 6)))
def test_by_area_terms_have_their_share(tree: Tree, pixels: tuple[int, int]) -> None:
    mask = composed(tree)
    cells, shown = rasterize(mask, Q, KV, why=True).cells, rasterize(mask, Q, KV, why=True, max_pixels=pixels)
    high, wide = shown.step
    for row in range(shown.shares.shape[1]):
        for column in range(shown.shares.shape[2]):
            part = cells[row * high : (row + 1) * high, column * wide : (column + 1) * wide]
            for kind in range(len(shown.categories)):
                assert shown.shares[kind, row, column] == pytest.approx(np.mean(part == kind), abs=1e-6)


@pytest.mark.parametrize("pixels", [(9, 9), (37, 41), (100, 100)])
def test_no_pixel_shows_a_kind_that_is_not_there(pixels: tuple[int, int]) -> None:
    """The shares are rounded; what they leave for the last kind must not be what rounding leaves."""
    mask = fm.causal() & (fm.q % 7 < 3) & (fm.kv % 5 != 1)
    cells, shown = rasterize(mask, 1000, why=True).cells, rasterize(mask, 1000, why=True, max_pixels=pixels)
    last = len(shown.categories) - 1
    rows, columns = (np.arange(0, 1000, size) for size in shown.step)
    counts = np.add.reduceat(np.add.reduceat((cells == last).astype(int), rows, axis=0), columns, axis=1)
    assert np.array_equal(shown.shares[last] > 0, counts > 0)


A, B, C, D = fm.causal(), fm.kv < 5, fm.q > 6, fm.key_padding(8)
TERMS: list[tuple[Mask, list[str]]] = [
    (A & B & D, ["causal", "kv < 5", "key_padding(lengths=8)"]),
    (A | B, ["causal | (kv < 5)"]),
    ((A & B) | C, ["causal & (kv < 5) | (q > 6)"]),
    (((A & B) | C) & D, ["causal & (kv < 5) | (q > 6)", "key_padding(lengths=8)"]),
    ((A & B).named("both") & D, ["named(causal & (kv < 5), name='both')", "key_padding(lengths=8)"]),
    ((A & B).named("the whole"), ["causal", "kv < 5"]),
    (~(A & B) & D, ["~(causal & (kv < 5))", "key_padding(lengths=8)"]),
    (A ^ B, ["causal ^ (kv < 5)"]),
    (fm.sliding_window(size=3), ["sliding_window(size=3)"]),
    (fm.sliding_window(size=3) & D, ["sliding_window(size=3)", "key_padding(lengths=8)"]),
    (fm.causal(), ["causal"]),
    (fm.full(), ["full"]),
    (fm.per_document(fm.sliding_window(size=3), lengths=[4, 7]), ["per_document(sliding_window(size=3), lengths=[4, 7])"]),
    (fm.per_head([A & B, C]) & D, ["per_head([causal & (kv < 5), q > 6])", "key_padding(lengths=8)"]),
]


@pytest.mark.parametrize(("mask", "expected"), TERMS, ids=[str(row[0])[:60] for row in TERMS])
def test_terms_as_text(mask: Mask, expected: list[str]) -> None:
    assert [str(term) for term in terms(mask, None)] == expected


def test_reasons_follow_the_brackets_and_have_the_names_of_parts() -> None:
    """Of ``a | b`` each alternative is said to be false, in the words of the user."""
    ids, images = fm.table(torch.zeros(1, 6, dtype=torch.int64), name="ids"), fm.table([[0, 0, 1, 1, 2, 2]])
    same = ((images[fm.b, fm.q] == images[fm.b, fm.kv]) & (images[fm.b, fm.q] >= 0)).named("same image")
    mask = (ids[fm.b, fm.q] == ids[fm.b, fm.kv]) & (fm.causal() | same | (C & B)) & fm.key_padding(5).named("real")
    labels = ["hidden by ids[b, q] == ids[b, kv]", "none of: causal, same image, (q > 6) & (kv < 5)", "hidden by real"]
    shown = rasterize(mask, 6, why=True)
    assert [kind.label for kind in shown.categories] == ["visible", *labels]
    assert shown.text == "(ids[b, q] == ids[b, kv]) & (causal | same image | (q > 6) & (kv < 5)) & real"
    titles = ("ids[b, q] == ids[b, kv]", "causal | same image | (q > 6) & (kv < 5)", "real", "together")
    assert term_sheet(mask, 6).titles == titles


def test_heads_have_terms_of_their_own() -> None:
    mask = fm.per_head([fm.causal() & (fm.kv > 1), fm.kv < 3]) & fm.key_padding(5)
    labels = [[kind.label for kind in rasterize(mask, 6, head=head, why=True).categories] for head in (0, 1)]
    assert labels == [
        ["visible", "hidden by causal", "hidden by kv > 1", "hidden by key_padding(lengths=5)"],
        ["visible", "hidden by kv < 3", "hidden by key_padding(lengths=5)"],
    ]


def test_many_terms_are_put_together() -> None:
    mask = fm.full()
    for place in range(10):
        mask = mask & (fm.kv != place)
    shown = rasterize(mask, 4, 12, why=True)
    assert [kind.label for kind in shown.categories][-2:] == ["hidden by kv != 4", "hidden by 5 further terms"]
    assert shown.cells[0].tolist() == [1, 2, 3, 4, 5, 6, 6, 6, 6, 6, 0, 0]
    assert shown.hidden_by is not None
    assert shown.hidden_by[0].tolist() == [2, 4, 8, 16, 32, 64, 64, 64, 64, 64, 0, 0]


def test_what_hides_everything_or_nothing() -> None:
    for mask, pairs in ((fm.full(), ((9, 9), (0, 0))), (fm.empty(), ((0, 0), (9, 9)))):
        shown = rasterize(mask, 3, why=True)
        assert [kind.label for kind in shown.categories] == ["visible", f"hidden by {mask}"]
        assert shown.pairs == pairs


# ---------------------------------------------------------------- two masks


@half
@given(trees(), trees())
def test_differences_are_those_of_the_cells(one: Tree, other: Tree) -> None:
    a, b = composed(one), composed(other)
    shown = rasterize(a, Q, KV, against=b)
    first, second = (np.asarray(mask.dense(Q, KV)[0, 0]) for mask in (a, b))
    assert [kind.role for kind in shown.categories] == ["both", "only_a", "only_b", "neither"]
    assert np.array_equal(shown.cells, np.where(first & second, 0, np.where(first, 1, np.where(second, 2, 3))))
    found = a.difference(b, Q, KV)
    assert [pair[0] for pair in shown.pairs[1:3]] == [found.only_self, found.only_other]


def test_differences_in_one_sequence() -> None:
    a, b = fm.empty(), fm.key_padding([2, 4])
    shown = rasterize(a, 5, against=b, batch=1)
    assert (shown.batches, shown.text) == (2, "A: empty\nB: key_padding(lengths=[2, 4])")
    assert shown.cells[0].tolist() == [2, 2, 2, 2, 3]
    with pytest.raises(RenderError, match=r"batch 2 .*0 to 1"):
        rasterize(a, 5, against=b, batch=2)


def test_differences_of_long_masks_are_never_lost() -> None:
    shown = rasterize(
        fm.sliding_window(left=100, right=0), 50_000, against=fm.sliding_window(left=100, right=0) | (fm.q + fm.kv == 60_000)
    )
    assert shown.pairs[2] == (39_999 - 51,) * 2  # from query 10,001 on, without those in the window
    assert (shown.shares[2] > 0).sum() > 700


def test_what_cannot_be_shown_together_is_refused() -> None:
    with pytest.raises(RenderError, match="against="):
        rasterize(fm.causal(), 4, against=fm.full(), why=True)
    with pytest.raises(OperandError, match="against must be a Mask, its text or a mask_mod function, got int 3"):
        rasterize(fm.causal(), 4, against=3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mask", "options", "sizes"),
    [
        (fm.per_head([fm.causal()]) & (fm.kv >= fm.h), {"why": True}, {}),
        (fm.key_padding([3]) & (fm.kv >= fm.b), {"why": True}, {}),
        (fm.per_head([fm.causal(), fm.full()]), {"against": fm.kv >= fm.h, "head": 1}, {"heads": 2}),
        (fm.kv >= fm.b, {"against": fm.key_padding([3, 2]), "batch": 1}, {"batch": 2}),
        (fm.causal() & (fm.kv < 3), {"why": True, "q_offset": torch.tensor([0, 1]), "batch": 1}, {}),
        (fm.kv < 3, {"why": True, "q_offset": torch.tensor([0, 1])}, {}),
    ],
    ids=str,
)
def test_what_only_a_part_says_holds_for_all(mask: Mask, options: dict[str, Any], sizes: dict[str, Any]) -> None:
    batch, head = options.get("batch", 0), options.get("head", 0)
    place: dict[str, Any] = {"q_offset": options["q_offset"]} if "q_offset" in options else {}
    shown = rasterize(mask, 4, **options)
    both = [one.dense(4, **place, **sizes) for one in (mask, options.get("against", mask))]
    expected = (both[0] & both[1]).expand(max(batch + 1, both[0].shape[0]), max(head + 1, both[0].shape[1]), 4, 4)
    assert np.array_equal(shown.cells == 0, expected[batch, head])
