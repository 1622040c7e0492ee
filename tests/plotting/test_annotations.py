"""Bands along the edges of pictures: documents and padding, as the mask's data has them; and tokens as labels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import flexmask as fm
from flexmask import Mask, masks
from flexmask.errors import FlexmaskError, OperandError, RenderError
from flexmask.plotting.annotations import MAX_STRETCHES, Band
from flexmask.plotting.raster import Picture, rasterize


def along(shown: Picture, band: Band) -> list[str]:
    """What each position along a band is."""
    ends = [*band.starts[1:], shown.q_len if band.axis == "q" else shown.kv_len]
    return [value for start, end, value in zip(band.starts, ends, band.values, strict=True) for _ in range(start, end)]


def positions(shown: Picture) -> dict[tuple[str, str], list[str]]:
    """For each band what each position is."""
    return {(band.axis, band.label): along(shown, band) for band in shown.bands}


def both(values: list[str], label: str = "document") -> dict[tuple[str, str], list[str]]:
    return {("q", label): values, ("kv", label): values}


PAD = "padding"
DOCUMENTS = fm.document(lengths=[[2, 3, 0], [1, 1, 2]], padding=True)
CASES: list[tuple[str, Mask, dict[str, object], dict[tuple[str, str], list[str]]]] = [
    ("none", fm.causal(), {"q_len": 4}, {}),
    ("documents", fm.causal() & DOCUMENTS, {}, both(list("00111"))),
    (
        "shorter documents",
        DOCUMENTS,
        {"batch": 1},
        both([*"0122", PAD]),
    ),
    (
        "documents and padding",
        fm.causal() & DOCUMENTS & fm.key_padding(lengths=[4, 4]),
        {},
        {("q", "document"): list("00111"), ("kv", "document"): [*"0011", PAD]},
    ),
    ("padding", fm.key_padding(lengths=[3, 1]), {"batch": 1, "q_len": 3}, {("kv", PAD): ["", PAD, PAD]}),
    ("no padding in this sequence", fm.key_padding(lengths=[3, 1]), {"q_len": 3}, {}),
    ("keep", fm.key_padding(keep=[True, False, True]), {}, {("kv", PAD): ["", PAD, ""]}),
    (
        "both lengths",
        fm.cross_length([3], q_lengths=[2]),
        {"q_len": 3, "kv_len": 5},
        {("q", PAD): ["", "", PAD], ("kv", PAD): ["", "", "", PAD, PAD]},
    ),
    (
        "later queries",
        fm.document([0, 0, 1, 1, 2]),
        {"q_len": 2, "kv_len": 5, "q_offset": 3},
        {("q", "document"): ["1", "2"], ("kv", "document"): list("00112")},
    ),
    ("next to a window", fm.sliding_window(left=2, right=2) | fm.document([-1, -1, 0, 0]), {}, both(["", "", "0", "0"])),
    ("padding that only a part hides", fm.key_padding(2) | (fm.kv == 3), {"q_len": 4}, {}),
    (
        "of one head",
        fm.per_head([fm.full(), fm.document([0, 1, 1])]),
        {"head": 1},
        both(list("011")),
    ),
]


@pytest.mark.parametrize(("mask", "options", "expected"), [row[1:] for row in CASES], ids=[row[0] for row in CASES])
def test_bands_are_the_data(mask: Mask, options: dict[str, object], expected: dict[tuple[str, str], list[str]]) -> None:
    assert positions(rasterize(mask, **options)) == expected  # type: ignore[arg-type]


def test_ids_of_one_table_are_a_band() -> None:
    ids = fm.table(torch.tensor([[-1, 7, 7]]))
    found = positions(rasterize(fm.causal() | (ids[fm.b, fm.q] == ids[fm.b, fm.kv]), 3))
    assert found == both(["", "7", "7"], "ids")


def test_bands_have_the_name_of_their_data_or_the_words_of_their_part() -> None:
    data, plain = fm.table(torch.tensor([0, 0, 1]), name="images"), fm.table([2, 3, 3])
    named, unnamed = (ids[fm.q] == ids[fm.kv] for ids in (data, plain))
    lengths = torch.tensor([1, 2])
    for mask, label, values in (
        (named, "images", "001"),
        (named.named("same image"), "images", "001"),
        (unnamed.named("same page"), "same page", "233"),
        (unnamed, "ids", "233"),
        (fm.document(data), "images", "001"),
        (fm.document(plain).named("one text"), "one text", "233"),
        (fm.parse("document(pages)", pages=torch.tensor([0, 1, 1])), "pages", "011"),
        (fm.document(lengths=fm.table(lengths, name="sizes")), "document", "011"),
    ):
        assert positions(rasterize(fm.causal() & mask, 3)) == both(list(values), label), label


TREES = [
    (masks.prefix_tree(lengths=[2, 1, 1, 2, 1, 1], parents=[-1, 0, 1, 1, 0, -1]), 8),
    (masks.prefix_tree(end=[7, 7, 6, 4, 6, 6, 7, 8]), 8),
    (masks.prefix_tree(position_ids=torch.tensor([[0, 1, 2, 3, 3, 4, 2, 0]])), 8),
]


@pytest.mark.parametrize(("mask", "length"), TREES, ids=["segments", "ends", "depths"])
def test_each_level_of_a_tree_is_a_band_of_the_keys(mask: Mask, length: int) -> None:
    """A bar of a level is below the bar of the level before that it is a part of, as the subtree."""
    shown = rasterize(mask, length)
    assert {(band.axis, band.label) for band in shown.bands} == {("kv", "subtree")}
    drawn = [" ".join(value or "." for value in along(shown, band)) for band in shown.bands]
    assert drawn == ["0 0 0 0 0 0 0 5", ". . 1 1 1 1 4 .", ". . . 2 3 3 . ."]


def test_padding_behind_a_tree_is_in_none() -> None:
    assert positions(rasterize(masks.prefix_tree(end=[2, 2, 0, -1, -1]), 5)) == {("kv", "subtree"): ["0", "0", "", "", ""]}


def test_labels_of_bands_are_drawn() -> None:
    data = fm.table(torch.tensor([0, 0, 1]), name="a_name_too_long_to_stand_there")
    ax = (data[fm.q] == data[fm.kv]).plot(3)
    assert [text.get_text() for text in ax.texts if len(text.get_text()) > 1] == ["a_name_to…", "a_name_too_long…"]


def test_documents_of_long_masks_are_left_out_where_they_could_not_be_distinguished() -> None:
    few, many = (fm.document(lengths=[5] * count) for count in (MAX_STRETCHES, MAX_STRETCHES + 1))
    assert len(rasterize(few).bands) == 2
    assert rasterize(many).bands == ()
    assert rasterize(few, bands=False).bands == ()


# ---------------------------------------------------------------- tokens


def test_tokens_give_lengths_and_labels() -> None:
    shown = rasterize(fm.causal(), tokens="the cat sat")
    assert (shown.q_len, shown.kv_len, shown.q_tokens, shown.kv_tokens) == (3, 3, ("the", "cat", "sat"), ("the", "cat", "sat"))
    cross = rasterize(fm.full(), tokens=["le", "chat"], kv_tokens="the cat sat")
    assert (cross.q_len, cross.kv_len, cross.q_tokens, cross.kv_tokens) == (2, 3, ("le", "chat"), ("the", "cat", "sat"))
    only = rasterize(fm.full(), 2, kv_tokens="the cat sat")
    assert (only.q_len, only.kv_len, only.q_tokens) == (2, 3, None)


def test_later_queries_take_the_later_tokens() -> None:
    shown = rasterize(fm.causal(), tokens="the cat sat", q_offset=2)
    assert (shown.q_len, shown.kv_len, shown.q_tokens) == (1, 3, ("sat",))
    within = rasterize(fm.causal(), 2, tokens="the cat sat down", q_offset=torch.tensor([0, 1]), batch=1)
    assert (within.q_tokens, within.kv_tokens) == (("cat", "sat"), ("the", "cat", "sat", "down"))


REFUSED: list[tuple[str, Callable[[], object], type[FlexmaskError], str]] = [
    (
        "too few",
        lambda: rasterize(fm.causal(), 4, tokens="a b c"),
        RenderError,
        "tokens must label each of the 4 positions, got 3",
    ),
    ("no keys", lambda: rasterize(fm.full(), 2, kv_tokens=[]), OperandError, r"^kv_tokens must be a string .* one, got \[\]"),
    ("too few keys", lambda: rasterize(fm.causal(), 2, 3, kv_tokens="a b"), RenderError, "kv_tokens .* 3 positions, got 2"),
    ("one list for two lengths", lambda: rasterize(fm.causal(), 2, 3, tokens="a b"), RenderError, "tokens .* 3 positions"),
    ("numbers", lambda: rasterize(fm.causal(), tokens=[1, 2]), OperandError, r"tokens must be .* got \[1, 2\]"),  # type: ignore[list-item]
    ("none", lambda: rasterize(fm.causal(), tokens=" "), OperandError, "at least one"),
]


@pytest.mark.parametrize(("attempt", "error", "message"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_tokens_that_do_not_fit(attempt: Callable[[], object], error: type[FlexmaskError], message: str) -> None:
    with pytest.raises(error, match=message):
        attempt()


@pytest.mark.parametrize("data", [{"lengths": [3, 2, 4]}, {"ids": [0, 0, 0, 1, 1, 2, 2, 2, 2]}], ids=["lengths", "ids"])
def test_documents_of_inner_masks_are_numbered(data: dict[str, list[int]]) -> None:
    """The mask compares the first positions of documents, which are no numbers that a user gave."""
    mask = fm.per_document(fm.causal(), **data)  # type: ignore[arg-type]
    for band in rasterize(mask, 9).bands:
        assert (band.starts, band.values) == ((0, 3, 5), ("0", "1", "2"))
