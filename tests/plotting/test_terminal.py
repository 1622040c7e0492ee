"""Pictures in a terminal: drawn characters and colors are read back and compared with dense masks, at any width."""

import io
import re
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from rich.cells import cell_len
from rich.console import Console
from rich.style import Style
from rich.text import Text

import flexmask as fm
from flexmask import Mask
from flexmask.errors import LoweringError
from flexmask.plotting import density
from flexmask.plotting.raster import EMPTY, FULL, PARTIAL, rasterize
from flexmask.plotting.sheet import Sheet, panel_sheet, term_sheet
from flexmask.plotting.terminal.show import print_drawing
from tests.support.exhaustive import half, one_in
from tests.support.strategies import mask_cases, shapes

#: What there is to draw on: colors, and the encoding.
CONSOLES: dict[str, dict[str, Any]] = {
    "pipe": {"force_terminal": False},
    "ascii": {"force_terminal": True, "color_system": "truecolor", "encoding": "ascii"},
    "latin": {"force_terminal": True, "color_system": "standard", "encoding": "latin-1"},
    "dumb": {"force_terminal": True, "_environ": {"TERM": "dumb"}},
    "NO_COLOR": {"force_terminal": True, "color_system": "truecolor", "_environ": {"NO_COLOR": "1"}},
    "16": {"force_terminal": True, "color_system": "standard"},
    "256": {"force_terminal": True, "color_system": "256"},
    "truecolor": {"force_terminal": True, "color_system": "truecolor"},
}
PLAIN = {"pipe", "ascii", "latin"}


def output(drawn: Mask | Sheet, *lengths: int, on: str = "pipe", width: int = 80, height: int = 1000, **options: Any) -> str:
    """What a console gets, colors included."""
    for cached in (Style.parse, Style._add):
        cached.cache_clear()  # rich keeps the codes of a style for the first color system that it is written with
    settings = {"_environ": {}, **CONSOLES[on]}
    file = io.TextIOWrapper(io.BytesIO(), encoding=settings.pop("encoding", "utf-8"), newline="\n")
    console = Console(file=file, width=width, height=height, **settings)
    if isinstance(drawn, Sheet):
        print_drawing(drawn, console=console)
    else:
        drawn.show(*lengths, console=console, **options)
    file.flush()
    assert isinstance(file.buffer, io.BytesIO)
    return file.buffer.getvalue().decode(file.encoding)


def written(text: str) -> str:
    """What is written, without the codes of colors, of which a terminal gets no others."""
    return re.sub(r"\x1b\[[\d;]*m", "", text)


@dataclass(frozen=True)
class Read:
    """A drawing taken apart.

    Attributes:
        head: the lines before it.
        over: the lines over the cells, without the margin.
        beside: what stands beside each line.
        lines: the lines of the drawing, with what stands behind and below.
        legend: the lines of the legend.
    """

    head: list[str]
    over: list[str]
    beside: list[str]
    lines: list[str]
    legend: list[str]


def read(text: str) -> Read:
    lines = written(text).splitlines()
    corner = next(number for number, line in enumerate(lines) if "q\\kv" in line)
    first = next(number for number, line in enumerate(lines) if not line) + 1
    end = next(number for number in range(corner, len(lines)) if not lines[number])
    margin = lines[corner].index("q\\kv") + 5
    drawn = lines[corner + 1 : end]
    return Read(
        lines[: first - 1],
        [line[margin:] for line in lines[first : corner + 1]],
        [line[:margin].strip() for line in drawn],
        [line[margin:] for line in drawn],
        lines[end + 1 :],
    )


def signs(text: str, q_len: int, kv_len: int) -> NDArray[np.str_]:
    """The sign of each cell, ``[q_len, kv_len]``, where each is drawn and has room."""
    rows = [line.ljust(2 * kv_len) for line in read(text).lines[:q_len]]
    return np.array([[row[2 * key] for key in range(kv_len)] for row in rows])


def entry(text: str, words: str) -> str:
    """The sign that the legend gives to some words, and what is said behind them, on one line."""
    legend = " ".join(line.strip() for line in read(text).legend)
    return legend[: legend.index(words)].split()[-1]


def count(text: str, words: str) -> int:
    """How many the legend says there are."""
    legend = " ".join(line.strip() for line in read(text).legend)
    behind = legend[legend.index(words) + len(words) :].split("(", 1)[1]
    return int(behind.split(")")[0].replace(",", ""))


def step(text: str) -> tuple[int, int]:
    """Queries and keys in a pixel, as is said above the drawing."""
    said = re.search(r"a pixel is (\d+) . (\d+) cells", " ".join(read(text).head))
    assert said is not None
    return int(said[1]), int(said[2])


def join_lines(tokens: int, mean: int) -> list[int]:
    """Document ids of ``tokens`` tokens in documents of 1 to ``2 * mean`` tokens."""
    lengths = torch.randint(1, 2 * mean, (4 * tokens // mean + 1,), generator=torch.Generator().manual_seed(0))
    return torch.arange(len(lengths)).repeat_interleave(lengths)[:tokens].tolist()


def tiles(cells: NDArray[Any], high: int, wide: int) -> list[list[NDArray[Any]]]:
    """Rectangles of cells; smaller ones at the lower and right edge."""
    return [
        [cells[top : top + high, left : left + wide] for left in range(0, cells.shape[1], wide)]
        for top in range(0, cells.shape[0], high)
    ]


PADDED = fm.key_padding([3, 5, 4])

# ---------------------------------------------------------------- every cell

CELLS = """\
causal & key_padding(lengths=[3, 5, 4])
sequence 2 of 3, 3 queries x 5 keys, 73.3 % visible, blocks of 2 x 2

q\\kv 0 1 2 3 4
   2 # #|x .|
   3 # #|x x|
     ---+---+-
   4 x x|x x|
             ~

# visible, full block   x visible, partial block   . hidden, partial block
blank hidden, empty block   ~ padding
"""


def test_every_cell_as_plain_text() -> None:
    mask = fm.causal() & PADDED
    assert output(mask, 3, 5, batch=2, q_offset=2, block_size=2) == CELLS


def test_every_cell_in_a_terminal() -> None:
    colored = output(fm.causal(), 3, on="truecolor")
    assert "\x1b[" in colored
    lines = written(colored).splitlines()
    assert lines[3:] == ["q\\kv 0 1 2", "   0 ■ ⬚ ⬚", "   1 ■ ■ ⬚", "   2 ■ ■ ■", "", "■ visible   ⬚ hidden"]


@pytest.mark.parametrize("on", CONSOLES)
@pytest.mark.parametrize("size", [1, 7, 24, 33])
def test_drawn_cells_are_the_mask(size: int, on: str) -> None:
    mask = fm.causal() & fm.document(join_lines(size, 3))
    cells = signs(output(mask, size, on=on), size, size) == ("#" if on in PLAIN else "■")
    assert np.array_equal(cells, mask.dense(size)[0, 0])


@pytest.mark.parametrize("on", ["pipe", "16"])
def test_every_cell_without_gaps_where_they_do_not_fit(on: str) -> None:
    mask, other = fm.causal() & fm.document(join_lines(60, 9)), fm.sliding_window(size=20)
    dense, others = mask.dense(60)[0, 0].numpy(), other.dense(60)[0, 0].numpy()
    both, a, b, neither = "#+-." if on in PLAIN else "■◧◨⬚"
    alone, beside = (
        np.array([list(line) for line in read(output(mask, 60, on=on, against=against)).lines[:60]]) for against in (None, other)
    )
    assert np.array_equal(alone == both, dense)
    assert np.array_equal(alone == neither, ~dense)
    assert np.array_equal(beside == both, dense & others)
    assert np.array_equal(beside == a, dense & ~others)
    assert np.array_equal(beside == b, others & ~dense)


@half
@given(st.data())
def test_any_mask_is_drawn_as_it_is(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    case, other = data.draw(mask_cases(shape)), data.draw(mask_cases(shape, depth=2))
    lowering = {name: shape.lowering[name] for name in ("q_len", "kv_len", "q_offset")}
    found, others = (one.expected(shape)[0, 0].numpy() for one in (case, other))
    size = (shape.q_len, shape.kv_len)
    on = data.draw(st.sampled_from(["pipe", "16"]))
    both, a, b, neither = "#+-." if on in PLAIN else "■◧◨⬚"

    drawn = signs(output(case.mask, on=on, width=120, **lowering), *size)
    assert np.array_equal(drawn == both, found)
    assert np.array_equal(drawn == neither, ~found)

    drawn = signs(output(case.mask, on=on, width=120, why=True, **lowering), *size)
    assert np.array_equal(drawn == both, found)
    assert not (drawn == neither).any()

    text = output(case.mask, on=on, width=120, against=other.mask, **lowering)
    drawn = signs(text, *size)
    parts = {both: found & others, a: found & ~others, b: others & ~found, neither: ~found & ~others}
    for words, (sign, cells) in zip(("in both", "only in A", "only in B", "in neither"), parts.items(), strict=True):
        assert np.array_equal(drawn == sign, cells)
        assert entry(text, words) == sign
        assert count(text, words) == cells.sum()


TERMS = [
    [fm.causal(), fm.document([0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, -1]), fm.key_padding(9)],
    [fm.sliding_window(size=4), fm.query_padding(10), fm.kv % 3 != 1, fm.causal(), fm.q != 5],
    [fm.causal(), fm.kv < 3, fm.kv != 1, fm.q < 11, fm.q != 4, fm.kv >= 1, fm.q >= 2, fm.q != 7],
]


@pytest.mark.parametrize(("parts", "on"), one_in(3, TERMS, ["pipe", "NO_COLOR", "16", "truecolor"]))
def test_hidden_cells_say_which_term_hides_them(parts: list[Mask], on: str) -> None:
    text = output(reduce(and_, parts), 12, on=on, why=True, width=120)
    shown = [part.dense(12)[0, 0].tolist() for part in parts]
    names = [f"hidden by {part}" for part in parts]
    if len(parts) > 6:
        names[5:] = ["hidden by 3 further terms"] * 3
    drawn, counted = signs(text, 12, 12), {name.split("[")[0]: 0 for name in names}
    for query in range(12):
        for key in range(12):
            hides = next((place for place, cells in enumerate(shown) if not cells[query][key]), None)
            name = "visible" if hides is None else names[hides].split("[")[0]
            assert drawn[query, key] == entry(text, name)
            if hides is not None:
                counted[name] += 1
    assert {name: count(text, name) for name in counted} == counted
    assert len({entry(text, name) for name in ["visible", *counted]}) == len(counted) + 1


def test_terms_and_blocks_together() -> None:
    mask = fm.causal() & fm.document([0, 0, 0, 1, 1, 1])
    assert read(output(mask, why=True, block_size=2, bands=False)).lines == [
        "x a|a a|a a",
        "x x|a a|a a",
        "---+---+---",
        "x x|x a|a a",
        "b b|b x|a a",
        "---+---+---",
        "b b|b x|x a",
        "b b|b x|x x",
    ]


def test_bands_stand_behind_and_below() -> None:
    mask = fm.causal() & fm.document([8, 8, 9, 10, 10]) & fm.key_padding(4)
    found = read(output(mask))
    assert [line[-3:] for line in found.lines] == ["  8", "  8", "  9", "  0", "  0", "0 ~"]
    assert found.lines[-1] == "8 8 9 0 ~"
    assert found.legend == ["# visible   . hidden   0-9 document, its last digit   ~ padding"]
    assert len(read(output(mask, bands=False)).lines) == 5
    assert read(output(fm.key_padding(2), 3)).lines == ["# # .", "# # .", "# # .", "    ~"]


def test_tokens_stand_beside_and_over() -> None:
    found = read(output(fm.causal(), tokens="The quick fox", q_offset=0))
    assert found.beside == ["The", "quick", "fox"]
    assert found.over == ["  q", "  u", "T i f", "h c o", "e k x"]
    assert found.lines == ["# . .", "# # .", "# # #"]


def test_tokens_of_any_characters() -> None:
    tokens = ["字字", "\n", "e\u0301t", "▁on", "x" * 40, ""]
    text = output(fm.causal(), tokens=tokens, on="truecolor", width=80)
    lines = written(text).splitlines()
    start = next(number for number, line in enumerate(lines) if "q\\kv" in line) + 1
    margin = lines[start - 1].index("q\\kv") + 4
    for number, line in enumerate(lines[start : start + 6]):
        label, cells = line[: line.index("■")], line[line.index("■") :]
        assert cell_len(label) == margin + 1
        assert label.strip() == ["字字", "\\n", "e\u0301t", "▁on", "x" * 15 + "…", ""][number]
        assert cells == " ".join("■" * (number + 1) + "⬚" * (5 - number))
    for line in lines[3:start]:
        assert cell_len(line) <= margin + 12
    plain = output(fm.causal(), tokens=tokens, on="ascii", width=80)
    assert plain.isascii()
    assert "\\u25" in plain


def test_defaults_come_from_the_mask() -> None:
    assert "3 queries x 3 keys" in output(fm.document([0, 0, 1]))
    with pytest.raises(LoweringError, match=r"q_len .*0"):
        PADDED.show(0)


# ---------------------------------------------------------------- blocks and areas


def test_blocks_where_cells_do_not_fit() -> None:
    mask = fm.causal() & fm.document(join_lines(1000, 100))
    shown = rasterize(mask, 1000, block_size=50)
    assert shown.blocks is not None
    text = output(mask, 1000, block_size=50)
    glyphs = {EMPTY: ".", PARTIAL: "x", FULL: "#"}
    found = read(text)
    assert [line[::2] for line in found.lines] == ["".join(glyphs[kind] for kind in row) for row in shown.blocks.tolist()]
    assert found.head[1] == f"1,000 queries x 1,000 keys, {100 * shown.pairs[0][0] / 1e6:.3g} % visible, blocks of 50 x 50"
    assert found.legend == [
        "   ".join(
            f"{glyphs[kind]} {name} block ({(shown.blocks == kind).sum()})"
            for kind, name in ((FULL, "full"), (PARTIAL, "partial"), (EMPTY, "empty"))
        )
    ]


def test_area_where_blocks_do_not_fit() -> None:
    found = read(output(fm.causal(), 1000, width=40, block_size=2))
    assert "blocks of 2 x 2 are too small to draw" in found.head
    assert found.lines[0] == "*-" + "." * 33
    assert set("".join(found.lines)) == set(".-+*#")
    for line in found.lines:
        assert line.rstrip(".").rstrip("-+*") == "#" * len(line.rstrip(".").rstrip("-+*"))


LONG = fm.causal() & fm.document(join_lines(1300, 90)) & fm.key_padding(1210) & (fm.q != 777)
SPARSE = fm.causal() | ((fm.q * 7 + fm.kv * 3) % 211 == 0)  # its rows are only bounds


@pytest.mark.parametrize(("on", "width"), one_in(3, ["pipe", "NO_COLOR", "16"], [20, 77, 200]))
@pytest.mark.parametrize("mask", [LONG, SPARSE], ids=["documents", "sparse"])
def test_signs_of_an_area(mask: Mask, width: int, on: str) -> None:
    dense = mask.dense(1300)[0, 0].numpy()
    text = output(mask, 1300, on=on, width=width)
    lines, shades = read(text).lines, ".-+*#" if on in PLAIN else "·░▒▓█"
    high, wide = step(text)
    assert high == 2 * wide
    parts = tiles(dense, high, wide)
    assert [len(lines), len(lines[0])] == [len(parts), len(parts[0])]
    for line, row in zip(lines, parts, strict=True):
        for sign, part in zip(line, row, strict=True):
            visible, cells = int(part.sum()), part.size
            level = 0 if not visible else 4 if visible == cells else -(-3 * visible // cells)
            assert sign == shades[level]


def test_terms_by_area() -> None:
    parts = [fm.causal(), fm.document(join_lines(1300, 90)), fm.key_padding(1210)]
    shown = [part.dense(1300)[0, 0].numpy() for part in parts]
    text = output(reduce(and_, parts), 1300, why=True, width=100)
    first = np.where(~shown[0], 1, np.where(~shown[1], 2, np.where(~shown[2], 3, 0)))
    lines = read(text).lines
    for line, row in zip(lines, tiles(first, *step(text)), strict=True):
        for sign, cells in zip(line, row, strict=True):
            counts = [int((cells == kind).sum()) for kind in range(4)]
            if counts[0]:
                assert sign in "-+*#"
            else:
                assert counts["abc".index(sign) + 1] == max(counts)
    assert count(text, "visible, by share") == (first == 0).sum()
    for number, part in enumerate(parts, 1):
        assert count(text, f"hidden by {str(part).split('[')[0]}") == (first == number).sum()


OTHER = (fm.causal() - ((fm.q == 900) & (fm.kv == 450))) | ((fm.q == 100) & (fm.kv == 1200))


def differs(color: tuple[int, int, int]) -> bool:
    """Whether a color is no mix of those of cells in both masks and in neither."""
    both, neither = np.array([157, 180, 198]), np.array([58, 58, 58])
    part = (color[2] - neither[2]) / (both - neither)[2]
    return bool(np.abs(neither + part * (both - neither) - color).max() > 3)


@pytest.mark.parametrize(("on", "width"), one_in(3, ["pipe", "16", "truecolor"], [20, 60, 200]))
def test_not_one_cell_of_a_difference_is_lost(width: int, on: str) -> None:
    text = output(fm.causal(), 1300, against=OTHER, width=width, on=on)
    lines, (high, wide) = read(text).lines, step(text)
    assert count(text, "only in A") == count(text, "only in B") == 1
    if on == "truecolor":
        rows = pixels(text)
        differ = {(row, column) for row, line in enumerate(rows) for column, color in enumerate(line) if differs(color)}
    else:
        a, b = ("+", "-") if on in PLAIN else ("◧", "◨")
        differ = {(row, column) for row, line in enumerate(lines) for column, sign in enumerate(line) if sign in a + b}
        assert lines[900 // high][450 // wide] == a
        assert lines[100 // high][1200 // wide] == b
    assert differ == {(900 // high, 450 // wide), (100 // high, 1200 // wide)}


def test_pixels_that_differ_both_ways() -> None:
    text = output(fm.q < 500, 1000, against=fm.q >= 500, width=45)
    assert "some only in A" not in text
    text = output((fm.q + fm.kv) % 2 == 0, 1000, against=(fm.q + fm.kv) % 2 == 1, width=45)
    assert {sign for line in read(text).lines for sign in line} == {"x"}
    assert entry(text, "some only in A") == "x"


def pixels(text: str) -> list[list[tuple[int, int, int]]]:
    """The colors of half blocks, two lines for each line of characters."""
    rows: list[list[tuple[int, int, int]]] = []
    for line in Text.from_ansi(text).split("\n"):
        upper: list[tuple[int, int, int]] = []
        lower: list[tuple[int, int, int]] = []
        for span in line.spans:
            if line.plain[span.start : span.end].strip("▀") or isinstance(span.style, str):
                continue
            for colors, color in ((upper, span.style.color), (lower, span.style.bgcolor)):
                if color is not None:
                    red, green, blue = color.get_truecolor()
                    colors += [(red, green, blue)] * (span.end - span.start)
        rows += [row for row in (upper, lower) if row]
    return rows


@pytest.mark.parametrize(("mask", "width"), one_in(2, [LONG, SPARSE], [20, 60, 200]))
def test_colors_of_an_area(mask: Mask, width: int) -> None:
    text = output(mask, 1300, on="truecolor", width=width)
    rows, parts = pixels(text), tiles(mask.dense(1300)[0, 0].numpy(), *step(text))
    assert len(set(step(text))) == 1
    assert [len(rows), len(rows[0])] == [len(parts), len(parts[0])]
    found = sorted(
        (part.mean(), color) for row, line in zip(parts, rows, strict=True) for part, color in zip(row, line, strict=True)
    )
    dark = {color for share, color in found if share == 0}
    assert len(dark) <= 1
    assert not dark & {color for share, color in found if share > 0}
    blue = [color[2] for _, color in found]
    assert blue == sorted(blue)  # the more is visible, the brighter
    assert mask is SPARSE or len(set(blue)) > 8


def test_colors_of_terms_by_area() -> None:
    parts = [fm.causal(), fm.document([0] * 600 + [1] * 700)]
    text = output(reduce(and_, parts), 1300, why=True, on="truecolor", width=60)
    rows = pixels(text)
    assert rows[0][-1] != rows[-1][0]
    assert rows[0][-1] == rows[0][1]
    assert rows[-1][0] == rows[-1][1]
    assert {rows[0][-1], rows[-1][0], rows[-1][len(rows) * 3 // 5]} <= pixels_of_legend(text)


def pixels_of_legend(text: str) -> set[tuple[int, ...]]:
    """The colors of the signs of the legend."""
    return {
        tuple(span.style.color.get_truecolor())
        for line in Text.from_ansi(text).split("\n")
        for span in line.spans
        if "█" in line.plain[span.start : span.end] and not isinstance(span.style, str) and span.style.color
    }


def test_estimates_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(density, "MAX_CELLS", 1000)
    text = output(fm.causal() & ((fm.q - fm.kv) % 3 == 0), 600, width=70)
    assert "shades estimated from samples" in " ".join(read(text).head)
    assert set("".join(read(text).lines)) <= set(".-+*#")


# ---------------------------------------------------------------- the page

SHOWN: list[dict[str, Any]] = [
    {},
    {"why": True},
    {"against": fm.sliding_window(size=5)},
    {"block_size": 16},
    {"block_size": 4, "why": True},
]


@pytest.mark.parametrize(("options", "on", "width"), one_in(5, SHOWN, ["pipe", "ascii", "truecolor"], [20, 61, 200]))
def test_lines_fit_the_width(width: int, on: str, options: dict[str, Any]) -> None:
    for lengths in ((3, 5), (30, 30), (65, 20), (500, 700), (1, 5000), (3000, 2)):
        mask = fm.causal(align="lower_right") & fm.key_padding(lengths[1] - 1) & fm.document(lengths=[1, max(lengths) - 1])
        text = output(mask, *lengths, width=width, on=on, **options)
        lines = written(text).splitlines()
        assert max(map(len, lines)) <= width
        found = read(text)
        assert len(found.lines) <= 1 + 64 * (2 if "block_size" in options else 1)
        if on in PLAIN:
            assert written(text).isascii()
            assert all(line == line.rstrip() for line in lines)
        if on == "pipe":
            assert "\x1b" not in text


@pytest.mark.parametrize(("on", "options"), one_in(7, CONSOLES, SHOWN))
def test_the_same_picture_is_the_same_text(on: str, options: dict[str, Any]) -> None:
    assert output(LONG, 1300, on=on, **options) == output(LONG, 1300, on=on, **options)


@pytest.mark.parametrize(
    ("size", "on"), one_in(3, [(24, 24), (24, 30), (60, 24), (60, 40), (3000, 24), (8, 24)], ["16", "truecolor", "NO_COLOR"])
)
def test_pictures_are_not_higher_than_the_terminal(size: tuple[int, int], on: str) -> None:
    tokens, height = size
    mask = fm.causal() & fm.key_padding(tokens - 2)
    for options in ({}, {"why": True}, {"block_size": 4}):
        text = output(mask, tokens, on=on, height=height, **options)
        assert len(text.splitlines()) < height
        assert f"{tokens:,} queries" in text


def test_pictures_in_files_have_every_row() -> None:
    assert len(read(output(fm.causal(), 60, width=200, height=24)).lines) == 60
    assert len(read(output(fm.causal(), 8, on="16", height=24)).lines) == 8


def test_tokens_fit_the_width() -> None:
    tokens = ["a rather long token", *"abcdefgh"]
    for width in (20, 40, 80):
        lines = output(fm.causal(), tokens=tokens, width=width).splitlines()
        assert max(map(len, lines)) <= width


@pytest.mark.parametrize("on", ["dumb", "NO_COLOR", "16", "256", "truecolor"])
def test_legends_without_color_tell_the_kinds_apart(on: str) -> None:
    for options in SHOWN:
        text = output(TERMS[0][0] & TERMS[0][1] & TERMS[0][2], 12, on=on, **options)
        for forbidden in ("\x1b[3", "\x1b[4", ";38;", ";48;"):
            assert on not in ("dumb", "NO_COLOR") or forbidden not in text
        found = [part.split()[0] for line in read(text).legend for part in line.split("   ")]
        assert len(found) == len(set(found))


# ---------------------------------------------------------------- sheets


def test_sheet_of_sequences() -> None:
    mask = fm.causal() & PADDED
    assert output(panel_sheet(mask, 5), width=40).splitlines() == [
        "causal & key_padding(lengths=[3, 5, 4])",
        "5 queries x 5 keys",
        "",
        "sequence 0, 48 %     sequence 1, 60 %",
        "visible              visible",
        "q\\kv 0 1 2 3 4       q\\kv 0 1 2 3 4",
        "   0 # . . . .          0 # . . . .",
        "   1 # # . . .          1 # # . . .",
        "   2 # # # . .          2 # # # . .",
        "   3 # # # . .          3 # # # # .",
        "   4 # # # . .          4 # # # # #",
        "           ~ ~",
        "",
        "sequence 2, 56 %",
        "visible",
        "q\\kv 0 1 2 3 4",
        "   0 # . . . .",
        "   1 # # . . .",
        "   2 # # # . .",
        "   3 # # # # .",
        "   4 # # # # .",
        "             ~",
        "",
        "# visible   . hidden   ~ padding",
    ]


def test_sheet_of_terms_has_one_legend() -> None:
    text = output(term_sheet(fm.causal() & fm.document([0, 0, 1])), width=100)
    assert text.count("visible   . hidden") == 1
    assert text.splitlines()[-3:] == [
        "# visible   . hidden   0-9 document, its last digit   a hidden by causal",
        "b hidden by document(ids=[0, 0, 1])",
        "a cell has the letter of the first term that hides it",
    ]
    beside = [line for line in text.splitlines() if line.count("q\\kv") == 3]
    assert len(beside) == 1


@pytest.fixture(scope="module")
def sheets() -> list[Sheet]:
    mask = fm.per_head([fm.causal() & fm.key_padding([5, 9]), fm.sliding_window(size=9)])
    return [
        panel_sheet(mask, 9),
        panel_sheet(mask, 800),
        term_sheet(mask, 800),
        term_sheet(mask, 9),
        panel_sheet(mask, 800, block_size=100),
    ]


@pytest.mark.parametrize(("width", "on"), one_in(3, [20, 50, 90, 200], ["pipe", "16", "truecolor"]))
def test_sheets_fit_the_width(sheets: list[Sheet], width: int, on: str) -> None:
    for drawn in sheets:
        lines = written(output(drawn, width=width, on=on)).splitlines()
        assert max(map(len, lines)) <= width
        assert sum(line.count("q\\kv") for line in lines) == len(drawn.pictures)
        legend = "".join(lines[max(number for number, line in enumerate(lines) if not line) + 1 :]).replace(" ", "")
        for kind in drawn.pictures[-1].categories:
            if kind.hides is not None:
                assert legend.count(kind.label.replace(" ", "").split("(")[0]) == 1
