"""Sheets: which sequences and heads they show, that each panel is its mask, and what stands in the interactive view."""

from __future__ import annotations

import base64
import io
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray

import flexmask as fm
from flexmask.errors import FlexmaskError, OperandError, RenderError
from flexmask.plotting.html import block_size_for, view_of
from flexmask.plotting.palette import looks_of
from flexmask.plotting.sheet import panel_sheet, term_sheet
from tests.support.exhaustive import one_in

MASK = fm.per_head([fm.causal(), fm.sliding_window(size=2) & (fm.kv > 0)]) & fm.key_padding(lengths=[5, 3, 4])


def test_every_sequence_and_head_is_its_mask() -> None:
    shown = panel_sheet(MASK, 5, why=True, block_size=2)
    assert (len(shown.pictures), shown.columns) == (6, 2)
    assert shown.titles[:3] == ("sequence 0, head 0", "sequence 0, head 1", "sequence 1, head 0")
    cells = MASK.dense(5)
    for place, picture in enumerate(shown.pictures):
        assert np.array_equal(picture.cells == 0, cells[place // 2, place % 2])


def test_kinds_mean_the_same_in_every_panel() -> None:
    shown = panel_sheet(MASK, 5, why=True)
    labels = [kind.label for kind in shown.pictures[0].categories]
    assert len(labels) == len(set(labels)) == 5
    for place, picture in enumerate(shown.pictures):
        assert [kind.label for kind in picture.categories] == labels
        assert looks_of(picture.categories) == looks_of(shown.pictures[0].categories)
        assert [pair[0] for pair in picture.pairs] == [int((picture.cells == kind).sum()) for kind in range(5)]
        padded = fm.key_padding(lengths=[5, 3, 4]).dense(5)[place // 2, 0].logical_not().expand(5, 5)
        assert picture.hidden_by is not None
        number = labels.index("hidden by key_padding(lengths=[5, 3, 4])")
        assert np.array_equal(picture.hidden_by >> number & 1, padded)


def test_heads_with_many_terms_have_different_colors() -> None:
    """Colors for each head's own terms would not do; so ``per_head`` is one term."""
    heads = [fm.causal() & (fm.kv > place) & (fm.q != place) for place in range(8)]
    shown = panel_sheet(fm.per_head(heads) & fm.key_padding(lengths=9), 10, why=True)
    assert [kind.label for kind in shown.pictures[0].categories][2] == "hidden by key_padding(lengths=9)"
    for head, picture in enumerate(shown.pictures):
        assert picture.categories == shown.pictures[0].categories
        assert len(picture.categories) == 3
        own = np.asarray(heads[head].dense(10)[0, 0])
        assert np.array_equal(picture.cells == 1, ~own)
        assert np.array_equal(picture.cells == 0, own & (np.arange(10) < 9))


def test_some_are_chosen() -> None:
    assert panel_sheet(MASK, 5, batch=[0, 0, 1], head=0).titles == ("sequence 0", "sequence 1")
    assert panel_sheet(MASK, 5, batch=[2, 0], head=1).titles == ("sequence 2", "sequence 0")
    assert panel_sheet(fm.causal(), 4).titles == ("",)
    many = fm.key_padding(lengths=list(range(1, 101)))
    assert len(panel_sheet(many, 100, batch="some").pictures) == 8
    assert panel_sheet(fm.q - fm.b >= fm.kv, 4, batch=[1, 3]).pictures[1].cells.tolist() == [[1] * 4] * 3 + [[0, 1, 1, 1]]


def test_terms_and_the_whole() -> None:
    mask = fm.causal() & fm.key_padding(lengths=[2, 4]) & fm.per_head([fm.full(), fm.kv > 0])
    shown = term_sheet(mask, 4, batch=1, head=1)
    assert shown.titles == ("causal", "key_padding(lengths=[2, 4])", "kv > 0", "together, sequence 1 of 2, head 1 of 2")
    parts = [fm.causal(), fm.key_padding(lengths=[2, 4]), fm.kv > 0]
    for picture, part in zip(shown.pictures, parts, strict=False):
        cells = part.dense(4)
        assert np.array_equal(picture.cells == 0, cells[-1, 0].expand(4, 4))
    assert np.array_equal(shown.pictures[-1].cells == 0, mask.dense(4)[1, 1])
    assert len(shown.pictures[-1].categories) == 4


def test_terms_of_later_queries_of_each_sequence() -> None:
    shown = term_sheet(fm.causal() & (fm.kv > 0), 2, 8, batch=1, q_offset=torch.tensor([0, 5]))
    assert (shown.pictures[0].cells == 0).sum(1).tolist() == [6, 7]


REFUSED: list[tuple[str, Callable[[], object], type[FlexmaskError], str]] = [
    (
        "too many",
        lambda: panel_sheet(fm.key_padding(lengths=[1] * 65), 2),
        RenderError,
        "65 sequences x 1 heads are more than 64",
    ),
    ("nothing says", lambda: panel_sheet(fm.q >= fm.b, 2), RenderError, "does not determine the size of batch"),
    ("no index", lambda: panel_sheet(MASK, 5, batch="most"), OperandError, "batch must be an index, a list .* got 'most'"),  # type: ignore[arg-type]
    ("empty", lambda: panel_sheet(MASK, 5, head=[]), OperandError, r"head must be .* got \[\]"),
    ("out of range", lambda: panel_sheet(MASK, 5, batch=[0, 3]), RenderError, r"batch 3 .*0 to 2"),
]


@pytest.mark.parametrize(("attempt", "error", "message"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_refused(attempt: Callable[[], object], error: type[FlexmaskError], message: str) -> None:
    with pytest.raises(error, match=message):
        attempt()


# ---------------------------------------------------------------- drawn


def texts(figure: Figure) -> list[str]:
    legend = figure.legends[0]
    return [text.get_text() for text in (*figure.texts, *legend.get_texts(), legend.get_title())]


def test_panels_have_titles_and_one_legend() -> None:
    figure = MASK.plot_panels(5, why=True)
    assert [ax.get_title(loc="left").splitlines()[0].split("  ·  ")[0] for ax in figure.axes][:2] == [
        "sequence 0, head 0",
        "sequence 0, head 1",
    ]
    said = texts(figure)
    assert said[0].startswith("per_head([causal,")
    assert "hidden by key_padding(lengths=[5, 3, 4])" in said
    figure.savefig(io.BytesIO())


def test_the_legend_of_panels_has_what_is_in_one_of_them() -> None:
    said = texts((fm.causal() & fm.key_padding(lengths=[4, 2])).plot_panels(4, why=True, block_size=2))
    assert "visible, in full blocks" in said
    assert "hidden by key_padding(lengths=[4, 2])" in said
    assert "padding" in said
    said = texts(fm.causal().plot_panels(4, why=True, block_size=4))
    assert "visible, in full blocks" not in said
    assert "padding" not in said


def test_terms_are_drawn() -> None:
    figure = (fm.causal() & fm.key_padding(3)).plot_terms(5, title="mine")
    titles = [ax.get_title(loc="left").splitlines()[0].split("  ·  ")[0] for ax in figure.axes]
    assert titles == ["causal", "key_padding(lengths=3)", "together"]
    assert texts(figure)[0] == "mine"


@pytest.mark.parametrize(
    ("ending", "options"),
    one_in(3, ["png", "svg", "html"], [{}, {"batch": "all"}, {"why": True, "batch": [0, 2], "head": 1}, {"terms": True}]),
)
def test_files_are_the_same_each_time(tmp_path: Path, ending: str, options: dict[str, Any]) -> None:
    if ending == "html" and "terms" in options:
        with pytest.raises(RenderError, match="terms"):
            MASK.save_picture(tmp_path / "mask.html", 5, **options)
        return
    for number in range(2):
        MASK.save_picture(tmp_path / f"{number}.{ending}", 5, **options)
    assert (tmp_path / f"0.{ending}").read_bytes() == (tmp_path / f"1.{ending}").read_bytes()
    assert (tmp_path / f"0.{ending}").stat().st_size > 1000


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RenderError, match=r"\.png, \.svg, \.pdf or \.html, got .*mask\.gif"):
        MASK.save_picture(tmp_path / "mask.gif", 5)
    with pytest.raises(RenderError, match="one sequence"):
        MASK.save_picture(tmp_path / "mask.png", 5, terms=True, batch="all")


# ---------------------------------------------------------------- the data of the page


def unpacked(text: str | None, kind: str) -> NDArray[Any]:
    assert text is not None
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype=kind)


def test_the_page_gets_the_cells() -> None:
    shown = panel_sheet(MASK, 5, why=True, block_size=2)
    view = view_of(shown)
    assert (view["batches"], view["heads"], view["shape"], view["block_size"]) == (3, 2, [5, 5], [2, 2])
    cells = MASK.dense(5)
    for panel, picture in zip(view["panels"], shown.pictures, strict=True):
        kinds = unpacked(panel["cells"], "u1").reshape(5, 5)
        assert np.array_equal(kinds == 0, cells[panel["batch"], panel["head"]])
        for name, kind, drawn in (("hidden_by", "<u4", picture.hidden_by), ("blocks", "u1", picture.blocks)):
            assert drawn is not None
            assert np.array_equal(unpacked(panel[name], kind), drawn.flatten())
        assert panel["shares"] is None


def test_the_page_of_a_long_mask_gets_shares() -> None:
    mask = fm.causal() & (fm.q != fm.kv + 5000)
    panel = view_of(panel_sheet(mask, 100_000, why=True))["panels"][0]
    shares = unpacked(panel["shares"], "u1").reshape(3, 1021, 1021)
    assert panel["cells"] is panel["hidden_by"] is None
    assert (shares[0, 0, 0], shares[1, 0, 0], shares[0, 5, 0], shares[1, 0, 5]) == (129, 126, 255, 255)
    assert shares[2, 52, 0] == 1  # 2 of 9,604 cells


@pytest.mark.parametrize(
    ("options", "start"),
    [({}, "why"), ({"block_size": 2}, "blocks"), ({"block_size": 2, "why": True}, "why"), ({"why": True}, "why")],
    ids=str,
)
def test_a_page_starts_with_what_is_asked_for(options: dict[str, Any], start: str) -> None:
    assert f'"start":"{start}"' in MASK.html(5, **options)


def test_a_page_has_blocks_of_a_size_that_shows_something() -> None:
    sizes = {length: block_size_for(length, 1) for length in (1, 7, 16, 24, 100, 512, 4096)}
    assert sizes == {1: 2, 7: 2, 16: 4, 24: 4, 100: 16, 512: 128, 4096: 128}


def test_a_notebook_shows_the_view_or_says_why_not() -> None:
    assert fm.causal()._repr_html_().startswith('<iframe title="causal" srcdoc="&lt;!doctype html&gt;')
    assert fm.parse("document(ids)")._repr_html_() == "<code>document(ids=ids)</code> with the parameters ids"
    failing = fm.document([0, 1]) & fm.document([0, 1, 2])
    assert "has 2 values along" in failing._repr_html_()
    assert "&lt;" in (fm.kv < 3)._repr_html_().split("srcdoc")[0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("pixels", [(64, 64), (7, 9)])
def test_pictures_of_masks_on_a_gpu(pixels: tuple[int, int]) -> None:
    ids, lengths = torch.tensor([[0] * 9 + [1] * 11, [0] * 3 + [2] * 17]), torch.tensor([18, 20])
    here, there = (
        panel_sheet(
            fm.causal() & fm.document(ids.to(device)) & fm.key_padding(lengths.to(device)), 20, why=True, max_pixels=pixels
        )
        for device in ("cpu", "cuda")
    )
    for one, other in zip(here.pictures, there.pictures, strict=True):
        assert np.array_equal(one.shares, other.shares)
        assert one.bands == other.bands
    query, key = torch.randn(2, 2, 20, 8), torch.randn(2, 2, 20, 8)
    weights = fm.backends.attention_weights(query, key, fm.causal())
    assert torch.allclose(weights, fm.backends.attention_weights(query.cuda(), key.cuda(), fm.causal()).cpu(), atol=1e-5)
