"""Pictures with matplotlib: what is on the axes, that files are reproducible, and golden images.

The golden images in ``tests/plotting/baseline`` are compared in every run. After a change of the drawing that is meant, write
them again with ``FLEXMASK_REGENERATE=1 pytest tests/plotting/test_plot.py -k golden`` and look at each.
"""

import io
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import imread

import flexmask as fm
from flexmask import Mask
from flexmask.plotting import density
from flexmask.plotting.mpl.plot import save
from flexmask.plotting.raster import rasterize
from flexmask.plotting.scores import score_picture, score_sheet
from tests.support.exhaustive import one_in
from tests.support.pictures import STRIDED, packed

BASELINE = Path(__file__).parent / "baseline"
#: Root mean square of the differences of golden images, of 255: letters may move by a hair, no cell may change.
TOLERANCE = 1.5


def test_plot_returns_axes_in_tokens() -> None:
    ax = (fm.key_padding([3, 5, 4]) & fm.causal()).plot(5, batch=1)
    assert (ax.get_xlim(), ax.get_ylim()) == ((0, 5), (5, 0))
    assert ax.get_title(loc="left") == "key_padding(lengths=[3, 5, 4]) & causal"
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("key index", "query index")
    legend = ax.get_legend()
    assert legend is not None
    assert legend.get_title().get_text() == "sequence 1 of 3  ·  5 queries × 5 keys  ·  60 % visible"
    assert [text.get_text() for text in legend.get_texts()] == ["visible", "hidden"]


def test_plot_draws_on_given_axes() -> None:
    figure = Figure()
    FigureCanvasAgg(figure)
    given_axes = figure.subplots(1, 2)[1]
    ax = fm.causal().plot(300, 200, ax=given_axes, title="mine\nin two lines")
    assert ax is given_axes
    assert ax.get_title(loc="left") == "mine\nin two lines"
    figure.savefig(io.BytesIO())


@pytest.mark.parametrize(("q_len", "kv_len"), [(3, 5), (5, 3), (40, 100), (300, 900), (1, 4), (2, 64), (5000, 700)])
def test_rectangles_are_drawn_as_rectangles(q_len: int, kv_len: int) -> None:
    ax = fm.causal().plot(q_len, kv_len)
    ax.apply_aspect()
    box = ax.get_window_extent()
    assert box.width / box.height == pytest.approx(kv_len / q_len, rel=0.01)


def test_what_is_not_to_scale_says_so() -> None:
    legend = fm.causal().plot(1, 5000).get_legend()
    assert legend is not None
    assert "not to scale" in legend.get_title().get_text()


def paths_of(svg: Path, color: str) -> list[str]:
    """The paths of an SVG file that are drawn in a color within the axes."""
    found = ElementTree.parse(svg).getroot().iter("{http://www.w3.org/2000/svg}path")
    return [path.get("d", "") for path in found if path.get("clip-path") and f"fill: {color}" in path.get("style", "")]


def cells_of(drawn: str, q_len: int, kv_len: int) -> np.ndarray[Any, Any]:
    """The cells that the rectangles of a path fill, which reaches from the first key to the last and from query to query."""
    corners = [[[float(x) for x in pair.split()] for pair in re.findall(r"[ML] ([^MLz]*)", part)] for part in drawn.split("z")]
    boxes = np.array([[*np.min(part, 0), *np.max(part, 0)] for part in corners if part])
    (left, top), (right, bottom) = boxes[:, :2].min(0), boxes[:, 2:].max(0)
    unit = np.array([(right - left) / kv_len, (bottom - top) / q_len] * 2)
    cells = np.zeros((q_len, kv_len), dtype=int)
    for x, y, x_end, y_end in np.round((boxes - [left, top, left, top]) / unit).astype(int):
        cells[y:y_end, x:x_end] += 1
    return cells


#: Masks whose first and last key and query are seen, and the bytes that their cells may take in a file.
VECTORS: dict[str, tuple[Mask, int, dict[str, Any], int]] = {
    "causal": (fm.causal(), 64, {}, 8_000),
    "causal, long": (fm.causal(), 250, {}, 30_000),
    "full": (fm.full(), 200, {}, 200),
    "documents": (fm.causal() & fm.document(packed(40, 3)), 40, {"why": True}, 5_000),
    "checks": ((fm.q + fm.kv) % 2 == 0, 64, {}, 250_000),
}


@pytest.mark.parametrize(("mask", "length", "options", "most"), VECTORS.values(), ids=VECTORS)
def test_cells_are_one_path_of_rectangles(mask: Mask, length: int, options: dict[str, Any], most: int, tmp_path: Path) -> None:
    mask.save_picture(tmp_path / "mask.svg", length, **options)
    assert "<image" not in (tmp_path / "mask.svg").read_text()
    (drawn,) = paths_of(tmp_path / "mask.svg", "#0072b2")
    assert len(drawn) < most
    assert np.array_equal(cells_of(drawn, length, length), mask.dense(length)[0, 0])


def test_blocks_are_paths_and_lines_are_two(tmp_path: Path) -> None:
    fm.causal().save_picture(tmp_path / "mask.svg", 32, block_size=4)
    (full,) = (cells_of(path, 7, 7) for path in paths_of(tmp_path / "mask.svg", "#0072b2"))
    assert np.array_equal(full, np.tri(7))
    assert len(paths_of(tmp_path / "mask.svg", "none; stroke: #ffffff")) == 2  # of cells
    assert len(paths_of(tmp_path / "mask.svg", "none; stroke: #333333")) == 2  # of blocks


@pytest.mark.parametrize(("mask", "length"), [(fm.causal(), 600), ((fm.q + fm.kv) % 2 == 0, 100)], ids=["small", "many"])
def test_drawn_pixels_are_the_mask(mask: Mask, length: int) -> None:
    """Where rectangles would be too small or too many, there is an image."""
    ax = mask.plot(length)
    image = ax.images[0].get_array()
    assert image is not None
    assert np.array_equal(image[..., 3] == 1, mask.dense(length)[0, 0])
    assert ((image[..., 3] == 0) | (image[..., 3] == 1)).all()


@pytest.mark.parametrize(("ending", "tokens"), one_in(2, ["png", "svg", "pdf"], [16, 200]))
def test_bytes_depend_on_nothing_else(tmp_path: Path, ending: str, tokens: int) -> None:
    mask = fm.causal() & fm.document(packed(tokens, 5))
    first, second = tmp_path / f"1.{ending}", tmp_path / f"2.{ending.upper()}"
    save(rasterize(mask, tokens, block_size=8), first)
    with matplotlib.rc_context({"font.size": 20, "axes.grid": True, "savefig.dpi": 30, "svg.fonttype": "path"}):
        save(rasterize(mask, tokens, block_size=8), second)
    assert first.read_bytes() == second.read_bytes()
    assert first.stat().st_size > 1000


def test_titles_are_not_mathematics(tmp_path: Path) -> None:
    save(rasterize(fm.causal(), 4), tmp_path / "mask.png", title="$\\frac$")
    assert (tmp_path / "mask.png").stat().st_size > 1000


# ---------------------------------------------------------------- golden images

PACKED = fm.causal() & fm.document(lengths=[[8, 10, 6], [5, 19, 0]]) & fm.key_padding(lengths=[22, 20])

GOLDEN: dict[str, tuple[Mask, dict[str, Any]]] = {
    "padded": (fm.causal() & fm.key_padding([3, 5, 4]), {"q_len": 5}),
    "packed_blocks": (fm.causal() & fm.document([0] * 9 + [1] * 4 + [2] * 9 + [-1] * 2), {"q_len": 24, "block_size": 4}),
    "decode": (
        fm.sliding_window(left=20, right=0) | (fm.kv < 4),
        {"q_len": 4, "kv_len": 48, "q_offset": 40, "block_size": (4, 16)},
    ),
    "packed_long": (fm.causal() & fm.document(packed(4096, 400)), {"q_len": 4096, "block_size": 128}),
    "wide": (fm.cross_length([300, 650], q_lengths=[200, 320]), {"q_len": 400, "kv_len": 900, "batch": 1}),
    "estimated": (STRIDED & fm.sliding_window(left=90, right=90), {"q_len": 300, "max_pixels": (100, 100)}),
    "why": (PACKED, {"why": True, "batch": 1}),
    "why_blocks": (PACKED, {"why": True, "block_size": 8}),
    "why_long": (fm.causal() & fm.document(packed(4096, 400)) & fm.key_padding(3900), {"q_len": 4096, "why": True}),
    "against": (fm.sliding_window(size=6), {"q_len": 20, "against": fm.causal() & (fm.q - fm.kv < 8) & (fm.kv > 1)}),
    "tokens": (fm.causal() & fm.key_padding(5), {"tokens": "The quick brown fox jumps <pad> <pad>"}),
}


def difference(first: Path, second: Path) -> float:
    """The root mean square of the differences of two images, of 255."""
    one, other = (imread(path)[..., :3].astype(np.float64) * 255 for path in (first, second))
    assert one.shape == other.shape
    return float(np.sqrt(((one - other) ** 2).mean()))


@pytest.mark.parametrize("name", one_in(2, GOLDEN))
def test_golden_image(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mask, options = GOLDEN[name]
    if name == "estimated":
        monkeypatch.setattr(density, "MAX_CELLS", 0)
    assert_golden(name, tmp_path, lambda path: save(rasterize(mask, **options), path))


def assert_golden(name: str, folder: Path, write: Callable[[Path], None]) -> None:
    path = (BASELINE if os.environ.get("FLEXMASK_REGENERATE") else folder) / f"{name}.png"
    write(path)
    assert difference(path, BASELINE / f"{name}.png") <= TOLERANCE


def test_golden_panels(tmp_path: Path) -> None:
    mask = fm.per_head([fm.causal(), fm.sliding_window(size=4)]) & fm.key_padding(lengths=[12, 9])
    assert_golden("panels", tmp_path, lambda path: mask.save_picture(path, 12, batch="all", head="all", block_size=4))


def test_golden_terms(tmp_path: Path) -> None:
    assert_golden("terms", tmp_path, lambda path: PACKED.save_picture(path, terms=True))


def test_golden_scores(tmp_path: Path) -> None:
    place = torch.arange(9.0)
    query = torch.stack([torch.cos(place), torch.sin(place)], -1).expand(1, 3, 9, 2) * torch.tensor([1.0, 3, 9]).view(1, 3, 1, 1)
    mask = fm.causal() & fm.key_padding(7)
    weights = fm.backends.attention_weights(query, query[:, :1], mask)
    tokens = "The quick brown fox jumps over the <pad> <pad>"
    assert_golden("scores", tmp_path, lambda path: save(score_picture(weights, mask, tokens=tokens), path))
    assert_golden("score_heads", tmp_path, lambda path: save(score_sheet(weights, mask, tokens=tokens), path))


@pytest.mark.exhaustive
def test_golden_images_would_show_one_wrong_cell(tmp_path: Path) -> None:
    mask, options = GOLDEN["packed_blocks"]
    wrong = mask ^ ((fm.q == 23) & (fm.kv == 22))
    save(rasterize(wrong, **options, bands=False), tmp_path / "wrong.png", title=str(mask).replace("table", ""))
    save(rasterize(mask, **options, bands=False), tmp_path / "right.png", title=str(mask).replace("table", ""))
    assert difference(tmp_path / "wrong.png", tmp_path / "right.png") > TOLERANCE
