"""The interactive page: what stands in the file, and in a browser what it says and draws, against plain loops over the cells."""

from __future__ import annotations

import json
import random
import re
import zlib
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from flexmask.plotting import palette
from flexmask.plotting.html import Data, compressed, inline_json, page, script, style
from tests.plotting.page_cases import PADDED, N, block_kind, by_area, case, causal, packed_text
from tests.support import browser
from tests.support.browser import Opened, opened, screenshot
from tests.support.exhaustive import exhaustive

chromium = browser.chromium

Rgb = tuple[int, int, int]
VISIBLE: Rgb = (0x00, 0x72, 0xB2)
IN_PARTIAL: Rgb = (0x56, 0xB4, 0xE9)
WASTED: Rgb = (0xBF, 0xC3, 0xC8)
HIDDEN: Rgb = (0xEF, 0xEF, 0xEF)
#: The colors of the first terms, of which cells have 30 %.
TERMS: list[Rgb] = [(0xE6, 0x9F, 0x00), (0x00, 0x9E, 0x73), (0xCC, 0x79, 0xA7)]

NASTY = ["</script><b>", "&amp;", "a\u2028b\u2029", "<!--", "ü 漢 \U0001f600", "\ud800", "\n"]

# The file.


def data_of(html: str) -> Any:
    found = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    assert len(found) == 1
    return json.loads(found[0])


def test_pages_are_the_same_bytes_for_the_same_data() -> None:
    assert page(packed_text().view) == page(packed_text().view)
    assert page(packed_text().view) != page(packed_text(tokens=False).view)


def test_no_text_breaks_out_of_the_page() -> None:
    view = causal(len(NASTY), len(NASTY), tokens=NASTY).view
    view["text"] = "a < b </title><script>alert(1)</script> & '\""
    html = page(view)
    assert data_of(html) == json.loads(json.dumps(view))
    assert html.count("</script>") == 2  # the data's and the script's own
    assert "<b>" not in html
    assert "\u2028" not in html
    assert "<title>a &lt; b &lt;/title&gt;&lt;script&gt;alert(1)" in html
    assert "<" not in inline_json(view)
    assert "</" not in script()
    assert "<" not in style()


def test_bytes_are_compressed_and_comes_back() -> None:
    data = bytes(range(256)) * 40
    assert zlib.decompress(b64decode(compressed(data))) == data
    assert len(compressed(data)) < len(data) / 10


def test_a_page_asks_for_nothing_from_outside() -> None:
    html = page(packed_text().view)
    assert "http:" not in html
    assert "https:" not in html
    assert "@import" not in html
    assert not re.search(r"\bsrc=|url\(|fetch\(|XMLHttpRequest", html)
    assert re.findall(r'href="([^"]*)"', html) == ["data:,"]
    assert "default-src 'none'" in html


def test_the_policy_allows_only_what_stands_in_the_page() -> None:
    html = page(packed_text().view)
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]+)"', html)
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    for rule, element in (("style-src", "style"), ("script-src", "script")):
        (text,) = re.findall(f"<{element}>(.*?)</{element}>", html, re.DOTALL)
        assert rules[rule] == f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
    assert "unsafe" not in policy


def test_page_and_pictures_have_the_same_colors() -> None:
    found = re.findall(r"--flexmask-([\w-]+): (?:light-dark\()?(#\w{6})", style())
    colors = {name: color.upper() for name, color in found}
    names = {"visible": palette.VISIBLE, "in-partial": palette.IN_PARTIAL, "wasted": palette.WASTED, "hidden": palette.HIDDEN}
    names |= {"unknown": palette.UNDECIDED}
    names |= {role.replace("_", "-"): look.color for role, look in palette.LOOKS.items()}
    assert {name: colors[name] for name in names} == names
    terms = [colors[name] for name in sorted(colors) if name.startswith("term-")]
    assert terms == [look.ink for look in palette.TERMS]
    assert re.findall(r"const TERMS = (\d+);", script()) == [str(len(palette.TERMS))]


def test_a_page_is_small() -> None:
    assert len(page(packed_text().view)) < 100_000
    assert len(page(by_area())) < 110_000


def test_without_scripts_the_page_gives_the_statistics() -> None:
    html = page(packed_text().view)
    shown = html[html.index("<noscript>") : html.index("</noscript>")]
    assert "24 queries × 24 keys" in shown
    case_ = packed_text()
    for b in range(2):
        visible = sum(not case_.hiding(b, q, kv) for q in range(N) for kv in range(N))
        assert f"sequence {b}, head 0: visible: {visible} ({100 * visible / N**2:.1f} %)" in shown
    assert '<html lang="en">' in html
    assert '<meta name="viewport"' in html
    assert "<h1>causal &amp; document(" in html


# The browser.

Shown = Callable[..., AbstractContextManager[Opened]]


@pytest.fixture
def shown(chromium: Any, tmp_path: Path) -> Shown:
    """Opens views and sees to it that nothing goes wrong and nothing is asked for."""

    def open_view(view: Data, **options: Any) -> AbstractContextManager[Opened]:
        return watched(opened(chromium, page(view), tmp_path, **options))

    return open_view


class watched(AbstractContextManager[Opened]):  # noqa: N801 - reads as a function
    """An opened page that in the end had no trouble and asked only for itself."""

    def __init__(self, inner: AbstractContextManager[Opened]) -> None:
        self.inner = inner

    def __enter__(self) -> Opened:
        self.found = self.inner.__enter__()
        return self.found

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        troubles, requests = self.found.troubles, [url for url in self.found.requests if not url.startswith("data:")]
        self.inner.__exit__(kind, value, trace)
        if kind is None:
            assert troubles == []
            assert [url.rsplit("/", 1)[-1] for url in requests] == ["page.html"]


@dataclass(frozen=True)
class Drawn:
    """A canvas' pixels, at one device pixel a pixel."""

    width: int
    height: int
    data: bytes

    def at(self, x: float, y: float) -> Rgb:
        start = 4 * (int(y) * self.width + int(x))
        return self.data[start], self.data[start + 1], self.data[start + 2]

    def extent(self, color: Rgb) -> tuple[int, int, int, int]:
        """The smallest rectangle that holds all pixels of a color: left, top, right, bottom."""
        pixels = np.frombuffer(self.data, np.uint8).reshape(self.height, self.width, 4)
        ys, xs = np.nonzero((pixels == (*color, 255)).all(-1))
        return int(xs.min()), int(ys.min()), int(xs.max()) + 1, int(ys.max()) + 1

    def main_color(self, x: float, y: float, reach: int = 6) -> Rgb:
        """The most frequent color around a place: that below a pattern."""
        around = range(-reach, reach + 1)
        return Counter(self.at(x + dx, y + dy) for dx in around for dy in around).most_common(1)[0][0]


def drawn(view: Opened) -> Drawn:
    return Drawn(*view.picture())


def middles(extent: tuple[int, int, int, int], rows: int, columns: int) -> Iterator[tuple[int, int, float, float]]:
    """Each row and column with the place of its cell's middle, in a mask that fills a rectangle."""
    left, top, right, bottom = extent
    for row in range(rows):
        for column in range(columns):
            yield row, column, left + (column + 0.5) * (right - left) / columns, top + (row + 0.5) * (bottom - top) / rows


def toggle(view: Opened, name: str) -> None:
    view.page.get_by_label(name).click()
    view.page.mouse.move(1, 1)
    view.settle()


def unpadded(extent: tuple[int, int, int, int], columns: int) -> tuple[int, int, int, int]:
    """The whole mask, where all but its last columns have something visible."""
    left, top, right, bottom = extent
    return left, top, left + round((right - left) * N / columns), bottom


@pytest.mark.browser
def test_pointing_at_a_cell_tells_the_truth(shown: Shown) -> None:
    mask = packed_text()
    tokens = mask.view["kv_tokens"]
    assert tokens is not None
    with shown(mask.view) as view:
        for b in (0, 1):
            view.page.get_by_label("Sequence").select_option(str(b))
            view.page.mouse.move(1, 1)
            extent = unpadded(drawn(view).extent(VISIBLE), PADDED[b])
            for row, column, x, y in random.Random(b).sample(list(middles(extent, N, N)), 20):
                said = view.hover(x, y)
                place = f"b {b}  h 0  q {row} ({tokens[row]})  kv {column} ({tokens[column]})"
                assert said.startswith(f"{place}: {mask.says(b, row, column)}; query in")
                assert ("padding" in said.split("; key in ")[1]) == (column >= PADDED[b])


@pytest.mark.browser
@pytest.mark.parametrize("notches", [3, *exhaustive([1, 7])])
def test_zoom_keeps_the_cell_and_the_truth(shown: Shown, notches: int) -> None:
    ids = [i // 20 for i in range(96)]
    mask = case({"causal": lambda b, q, kv: kv <= q, "document(ids)": lambda b, q, kv: ids[q] == ids[kv]}, 96, 96)
    with shown(mask.view) as view:
        toggle(view, "Why hidden")
        left, top, right, bottom = drawn(view).extent(VISIBLE)
        x, y = left + 0.4 * (right - left), top + 0.45 * (bottom - top)
        before = view.hover(x, y)
        for _ in range(notches):
            view.page.mouse.wheel(0, -120)
        view.settle()
        assert view.readout == before
        view.page.mouse.move(1, 1)
        now, checked, random_ = drawn(view), 0, random.Random(notches)
        for _ in range(30):
            x, y = random_.uniform(left, right - 1), random_.uniform(top, bottom - 1)
            said, color = view.hover(x, y), now.at(x, y)
            found = re.match(r"b 0  h 0  q (\d+)  kv (\d+): (.*)$", said)
            assert found is not None
            assert found[3] == mask.says(0, int(found[1]), int(found[2]))
            if color in {VISIBLE, HIDDEN}:  # not a line of the grid
                checked += 1
                assert (color == VISIBLE) == (found[3] == "visible")
        assert checked > 15


@pytest.mark.browser
def test_large_masks_are_shown_by_area(shown: Shown, tmp_path: Path) -> None:
    with shown(by_area()) as view:
        found = drawn(view).extent(VISIBLE)
        left, bottom = found[0], found[3]
        size = bottom - found[1]
        view.hover(left + 0.25 * size, bottom - 0.25 * size)
        assert re.search(r"q \d+\.\.\d+  kv \d+\.\.\d+: all visible; block \(\d+, \d+\) full", view.readout)
        view.hover(left + 0.75 * size, bottom - 0.75 * size)
        assert re.search(r": all hidden; block \(\d+, \d+\) empty", view.readout)
        assert not view.page.get_by_label("Blocks").is_checked()  # nobody asked for them
        screenshot(view.page, "large", tmp_path)
        canvas = view.page.locator(".flexmask-stage canvas")
        canvas.focus()
        view.page.keyboard.press("Escape")
        view.page.keyboard.press("ArrowDown")
        assert view.readout == "b 0  h 0  q 0..255  kv 0..255: 50 % visible, 50 % hidden; block (0, 0) partial"
        for _ in range(7):
            view.page.keyboard.press("ArrowDown")
            view.page.keyboard.press("ArrowRight")
        assert view.readout.startswith("b 0  h 0  q 1792..2047  kv 1792..2047: about 50 % visible, 50 % hidden")


@pytest.mark.browser
def test_queries_stand_at_their_positions_and_rectangles_to_scale(shown: Shown) -> None:
    mask = causal(3, 12, q_offset=9)
    with shown(mask.view) as view:
        extent = drawn(view).extent(VISIBLE)
        assert extent[2] - extent[0] == pytest.approx(4 * (extent[3] - extent[1]), abs=4)
        for row, column, x, y in middles(extent, 3, 12):
            assert view.hover(x, y) == f"b 0  h 0  q {row + 9}  kv {column}: {mask.says(0, row + 9, column)}"


FOCUSED = "() => document.activeElement.ariaLabel || document.activeElement.parentElement.textContent.trim()"


@pytest.mark.browser
def test_everything_is_reached_by_keyboard(shown: Shown) -> None:
    mask = packed_text(block_size=[4, 4])
    with shown(mask.view) as view:
        keyboard, reached = view.page.keyboard, list[str]()
        for _ in range(8):
            keyboard.press("Tab")
            reached.append(view.page.evaluate(FOCUSED))
        starts = [
            "Sequence",
            "Why hidden",
            "Blocks",
            "Zoom out",
            "Show everything",
            "Zoom in",
            "Copy the mask’s text",
            "Mask causal",
        ]
        assert [text.startswith(start) for text, start in zip(reached, starts, strict=True)] == [True] * 8
        assert view.readout.startswith("Point at a cell")
        keyboard.press("ArrowDown")  # only shows where the cursor stands
        place = [0, 0]
        moves = [("ArrowDown", 1, 0), ("ArrowRight", 0, 1), ("Shift+ArrowDown", 4, 0), ("PageDown", 4, 0), ("PageUp", -4, 0)]
        moves += [("Shift+ArrowRight", 0, 4), ("End", 0, N), ("ArrowLeft", 0, -1), ("Home", 0, -N), ("ArrowUp", -1, 0)]
        for zoom in ("0", "+", "+"):
            keyboard.press(zoom)
            for key, down, right in moves:
                keyboard.press(key)
                place = [min(N - 1, max(0, place[0] + down)), min(N - 1, max(0, place[1] + right))]
                q, kv = place
                said = re.sub(r" \([^)]*\)", "", view.readout, count=2)  # without the tokens
                assert said.startswith(f"b 0  h 0  q {q}  kv {kv}: {mask.says(0, q, kv)}; block ({q // 4}, {kv // 4}) ")
        keyboard.press("Escape")
        assert view.readout.startswith("Point at a cell")


@pytest.mark.browser
def test_only_what_is_chosen_is_announced(shown: Shown) -> None:
    with shown(causal().view, has_touch=True) as view:
        readout, canvas = view.page.locator(".flexmask-readout"), view.page.locator(".flexmask-stage canvas")
        left, top, right, bottom = drawn(view).extent(VISIBLE)
        for row in (2, 4):
            y = top + (row + 0.5) * (bottom - top) / 6
            assert view.hover(left + 5, y).startswith(f"b 0  h 0  q {row}  kv 0")
            assert readout.get_attribute("aria-live") == "off"
            canvas.focus()
            view.page.keyboard.press("ArrowRight")
            assert view.readout.startswith(f"b 0  h 0  q {row}  kv 1")
            assert readout.get_attribute("aria-live") == "polite"
        view.page.mouse.move(1, 1)
        view.hover(left + 5, top + 5)
        view.page.mouse.move(1, 1)
        assert readout.get_attribute("aria-live") == "off"
        box = canvas.bounding_box()
        assert box is not None
        view.page.touchscreen.tap(box["x"] + right - 5, box["y"] + bottom - 5)
        assert view.readout.startswith("b 0  h 0  q 5  kv 5")
        assert readout.get_attribute("aria-live") == "polite"


@pytest.mark.browser
@pytest.mark.parametrize("start", ["why", "blocks"])
@pytest.mark.parametrize("terms", [False, True])
def test_on_at_first_is_what_was_asked_for(shown: Shown, start: Literal["why", "blocks"], terms: bool) -> None:
    mask = packed_text(block_size=[4, 4]) if terms else causal(8, 8, block_size=[4, 4])
    with shown({**mask.view, "start": start}) as view:
        on = {name for name in ("Why hidden", "Blocks") for box in view.page.get_by_label(name).all() if box.is_checked()}
        assert on == ({"Blocks"} if start == "blocks" else {"Why hidden"} if terms else set())
        assert re.search(r"; block \(\d, 0\) (full|partial)", view.hover(*drawn(view).extent(VISIBLE)[:2]))


@pytest.mark.browser
def test_moving_makes_nothing_anew(shown: Shown) -> None:
    with shown(packed_text().view) as view:
        left, top, right, bottom = drawn(view).extent(VISIBLE)
        view.page.evaluate(COUNTED)
        view.hover((left + right) / 2, (top + bottom) / 2)
        view.page.mouse.wheel(0, -500)
        view.page.mouse.down()
        for step in range(5):
            view.hover((left + right) / 2 + 10 * step, (top + bottom) / 2)
            view.settle()
        view.page.mouse.up()
        assert view.page.evaluate("counted") == []
        toggle(view, "Why hidden")
        assert view.page.evaluate("counted.length") > 0


#: Notes what makes patterns and canvases, or sizes these.
COUNTED = """() => {
  window.counted = [];
  for (const [owner, name] of [[CanvasRenderingContext2D.prototype, "createPattern"], [Document.prototype, "createElement"]]) {
    const own = owner[name];
    owner[name] = function (...given) {
      counted.push(name);
      return own.apply(this, given);
    };
  }
  const width = Object.getOwnPropertyDescriptor(HTMLCanvasElement.prototype, "width"), set = width.set;
  width.set = function (value) {
    counted.push("width");
    set.call(this, value);
  };
  Object.defineProperty(HTMLCanvasElement.prototype, "width", width);
}"""


@pytest.mark.browser
def test_switches_change_what_is_drawn(shown: Shown) -> None:
    mask = packed_text(tokens=False, block_size=[4, 4])
    names = list(mask.terms)
    with shown(mask.view) as view:
        toggle(view, "Blocks")
        plain = drawn(view)
        places = list(middles(unpadded(plain.extent(VISIBLE), PADDED[0]), N, N))
        kinds = {(q, kv): mask.hiding(0, q, kv) for q in range(N) for kv in range(N)}
        for q, kv, x, y in places:
            assert plain.main_color(x, y) == (HIDDEN if kinds[q, kv] else VISIBLE)
        toggle(view, "Why hidden")
        why = drawn(view)
        for q, kv, x, y in places:
            hiding = kinds[q, kv]
            expected = tint(TERMS[names.index(hiding[0])]) if hiding else VISIBLE
            assert why.main_color(x, y) == pytest.approx(expected, abs=1)
            patterned = bool(hiding) and hiding[0] != names[0]  # the first term is plain
            found = {why.at(x + dx, y + dy) for dx in range(-6, 7) for dy in range(-6, 7)}
            assert (len(found) > 1) == patterned
            assert all(one <= most + 1 for rgb in found for one, most in zip(rgb, expected, strict=True))  # no other's pattern
        toggle(view, "Why hidden")
        toggle(view, "Blocks")
        blocks = drawn(view)
        for q, kv, x, y in places:
            top, left = q // 4 * 4, kv // 4 * 4
            kind = block_kind([not kinds[row, column] for row in range(top, top + 4) for column in range(left, left + 4)], 16)
            expected = (WASTED if kind else HIDDEN) if kinds[q, kv] else (VISIBLE if kind == 2 else IN_PARTIAL)
            assert blocks.main_color(x, y) == expected


def tint(color: Rgb) -> Rgb:
    red, green, blue = (round(channel * 0.3 + 255 * 0.7) for channel in color)
    return red, green, blue


LEGEND = """() => [...document.querySelectorAll(".flexmask-legend tbody tr")]
    .map((row) => [...row.cells].map((cell) => cell.textContent))"""


#: Notes what is written on a canvas.
LISTEN = """() => {
  const pen = CanvasRenderingContext2D.prototype, own = pen.fillText;
  pen.fillText = function (text, ...rest) { (window.said ??= []).push(text); return own.call(this, text, ...rest); };
}"""


@pytest.mark.browser
def test_bands_have_their_label(chromium: Any, tmp_path: Path) -> None:
    with opened(chromium, page(packed_text(tokens=False).view), tmp_path) as found:
        found.page.evaluate(LISTEN)
        found.page.set_viewport_size({"width": 900, "height": 700})
        found.settle()
        said: list[str] = found.page.evaluate("() => window.said")
    assert {"document", "queries", "keys"} <= set(said)
    assert said.count("document") == 2 * said.count("keys")


@pytest.mark.browser
def test_the_legend_counts(shown: Shown) -> None:
    mask = packed_text(block_size=[4, 4])
    with shown(mask.view) as view:
        counts = {label: int(count) for label, count, _ in view.page.evaluate(LEGEND)}
        expected = dict.fromkeys(counts, 0)
        for q in range(N):
            for kv in range(N):
                rows, columns = range(q // 4 * 4, q // 4 * 4 + 4), range(kv // 4 * 4, kv // 4 * 4 + 4)
                kind = block_kind([not mask.hiding(0, row, column) for row in rows for column in columns], 16)
                said = "visible in " if mask.says(0, q, kv) == "visible" else "hidden in "
                label = [text for text in expected if text.startswith(said + ("empty", "partial", "full")[kind])]
                expected[label[0]] += 1
        assert counts == expected
        toggle(view, "Why hidden")
        toggle(view, "Blocks")
        counts = {label: int(count) for label, count, _ in view.page.evaluate(LEGEND)}
        firsts = Counter(mask.says(0, q, kv).split(", also")[0] for q in range(N) for kv in range(N))
        assert counts == firsts


@pytest.mark.browser
def test_differences_have_their_own_kinds(shown: Shown) -> None:
    mask = causal(4, 4).view
    kinds: list[Data] = [
        {"role": "both", "label": "visible in both"},
        {"role": "only_a", "label": "only A"},
        {"role": "only_b", "label": "only B"},
        {"role": "neither", "label": "hidden in both"},
    ]
    cells = bytes((q + kv) % 4 for q in range(4) for kv in range(4))
    panel: Data = {**mask["panels"][0], "cells": compressed(cells), "pairs": [[4, 4]] * 4}
    with shown({**mask, "text": "A vs B", "categories": kinds, "panels": [panel]}) as view:
        view.page.locator(".flexmask-stage canvas").focus()
        for q in range(4):
            view.page.keyboard.press("Home" if q else "ArrowDown")
            for kv in range(4):
                assert view.readout == f"b 0  h 0  q {q}  kv {kv}: {kinds[(q + kv) % 4]['label']}"
                view.page.keyboard.press("ArrowRight")
            view.page.keyboard.press("ArrowDown")
        assert view.page.get_by_label("Why hidden").count() == 0


def luminance(color: list[float]) -> float:
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in (value / 255 for value in color)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


#: Every element with text of its own: the text, its color, and the first color behind it.
CONTRASTS = """() => {
  const numbers = (text) => text.match(/[\\d.]+/g).map(Number);
  const own = (element) => [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
  const found = [...document.querySelectorAll("body *:not(script, noscript, option)")].filter(own);
  return found.map((element) => {
    let behind = element;
    while (behind && numbers(getComputedStyle(behind).backgroundColor)[3] === 0) behind = behind.parentElement;
    const colors = [getComputedStyle(element).color, getComputedStyle(behind).backgroundColor];
    return [element.textContent, ...colors.map((color) => numbers(color).slice(0, 3))];
  });
}"""


@pytest.mark.browser
def test_light_and_dark_differ_and_are_legible(shown: Shown, tmp_path: Path) -> None:
    pictures = []
    for scheme in ("light", "dark"):
        with shown(packed_text().view, color_scheme=scheme) as view:
            contrasts = view.page.evaluate(CONTRASTS)
            assert len(contrasts) > 12
            for text, *colors in contrasts:
                low, high = sorted(map(luminance, colors))
                assert (high + 0.05) / (low + 0.05) >= 4.5, text
            pictures.append(drawn(view))
            screenshot(view.page, f"desktop-{scheme}", tmp_path)
    assert pictures[0].at(3, 3) == (255, 255, 255)
    assert sum(pictures[1].at(3, 3)) < 120
    with shown(packed_text().view, color_scheme="light") as view:  # a theme that changes is followed
        view.page.emulate_media(color_scheme="dark")
        view.settle()
        assert drawn(view).data == pictures[1].data


@pytest.mark.browser
def test_a_phone_is_wide_enough(shown: Shown, tmp_path: Path) -> None:
    long = packed_text(block_size=[4, 4]).view
    with shown(long, viewport={"width": 360, "height": 740}, device_scale_factor=2, has_touch=True, is_mobile=True) as view:
        root = "document.documentElement"
        assert view.page.evaluate(f"{root}.scrollWidth <= {root}.clientWidth")
        assert view.page.evaluate("innerWidth") == 360
        for control in view.page.locator("button, select, .flexmask-field").all():
            box = control.bounding_box()
            assert box is not None
            assert min(box["width"], box["height"]) >= 40
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= 360
        box = view.page.locator(".flexmask-stage canvas").bounding_box()
        assert box is not None
        view.page.touchscreen.tap(box["x"] + box["width"] * 0.6, box["y"] + box["height"] * 0.6)
        assert re.match(r"b 0  h 0  q \d+ \(.*\)  kv \d+ \(.*\): ", view.readout)
        width, height, _ = view.picture()
        assert (width, height) == (round(2 * box["width"]), round(2 * box["height"]))  # crisp
        screenshot(view.page, "phone", tmp_path)


@pytest.mark.browser
def test_a_notebook_frame_needs_no_scrolling(shown: Shown, tmp_path: Path) -> None:
    with shown(packed_text(tokens=False, block_size=[4, 4]).view, viewport={"width": 700, "height": 520}) as view:
        root = "document.documentElement"
        assert view.page.evaluate(f"[{root}.scrollWidth, {root}.scrollHeight]") == [700, 520]
        screenshot(view.page, "notebook", tmp_path)


@pytest.mark.browser
def test_dragging_never_loses_the_mask(shown: Shown) -> None:
    with shown(causal(48, 48).view) as view:
        left, top, right, bottom = drawn(view).extent(VISIBLE)
        view.hover((left + right) / 2, (top + bottom) / 2)
        view.page.mouse.wheel(0, -700)
        for step in ((4000, 3000), (-4000, -3000)):
            view.hover((left + right) / 2, (top + bottom) / 2)
            view.page.mouse.down()
            view.page.mouse.move(*step)
            view.page.mouse.up()
            said = view.hover(left + 20, bottom - 20)
            assert re.match(r"b 0  h 0  q \d+  kv \d+: visible", said)
        assert "kv 0:" not in said
        view.page.get_by_label("Show everything").click()
        view.page.mouse.move(1, 1)
        assert drawn(view).extent(VISIBLE) == (left, top, right, bottom)


@pytest.mark.browser
def test_nasty_tokens_are_shown_as_text(shown: Shown) -> None:
    count = len(NASTY)
    with shown(causal(count, count, tokens=NASTY).view) as view:
        view.page.locator(".flexmask-stage canvas").focus()
        view.page.keyboard.press("ArrowDown")
        assert view.readout == "b 0  h 0  q 0 (</script><b>)  kv 0 (</script><b>): visible"
        view.page.keyboard.press("ArrowRight")
        assert view.readout == "b 0  h 0  q 0 (</script><b>)  kv 1 (&amp;): hidden"
        view.page.keyboard.press("End")
        assert view.readout == "b 0  h 0  q 0 (</script><b>)  kv 6 (\\n): hidden"
        assert view.page.locator("body b").count() == 0


@pytest.mark.browser
def test_the_text_is_copied(shown: Shown) -> None:
    with shown(packed_text().view, permissions=["clipboard-read", "clipboard-write"]) as view:
        view.page.get_by_label("Copy the mask’s text").click()
        view.page.locator("button", has_text="Copied").wait_for()
        assert view.page.evaluate("navigator.clipboard.readText()") == packed_text().view["text"]


@pytest.mark.browser
def test_where_the_system_forces_colors_cells_keep_theirs(shown: Shown, tmp_path: Path) -> None:
    with shown(causal().view, color_scheme="dark", forced_colors="active") as view:
        canvas = "() => getComputedStyle(document.querySelector('.flexmask-frame')).backgroundColor"
        system = tuple(map(int, re.findall(r"\d+", view.page.evaluate(canvas))[:3]))
        dark = (0x3D, 0x9A, 0xD6)
        now = drawn(view)
        assert now.at(3, 3) == system
        left, top, right, bottom = now.extent(dark)
        assert right - left > 100
        assert bottom - top > 100


@pytest.mark.browser
def test_no_other_script_runs(chromium: Any, tmp_path: Path) -> None:
    with opened(
        chromium, page(causal().view).replace("</body>", "<script>document.title = 'other'</script></body>"), tmp_path
    ) as view:
        assert view.page.title() == "causal"
        assert len(view.troubles) == 1
        assert "Content Security Policy" in view.troubles[0]


@pytest.mark.browser
def test_paper_is_drawn_in_light_colors(shown: Shown) -> None:
    with shown(causal().view, color_scheme="dark") as view:
        assert sum(drawn(view).at(3, 3)) < 120
        view.page.evaluate("dispatchEvent(new Event('beforeprint'))")
        assert drawn(view).at(3, 3) == (255, 255, 255)
        view.page.evaluate("dispatchEvent(new Event('afterprint'))")
        assert sum(drawn(view).at(3, 3)) < 120


@pytest.mark.browser
def test_a_page_may_hold_many_views(shown: Shown) -> None:
    with shown(causal().view) as view:
        before = set(view.page.evaluate("Object.getOwnPropertyNames(window)"))
        view.page.evaluate(
            """(data) => {
              for (const text of ["one", "two"]) {
                const host = document.body.appendChild(document.createElement("div"));
                flexmaskView(host, { ...data, text });
              }
            }""",
            causal(3, 3).view,
        )
        view.page.locator(".flexmask[aria-busy=false]").nth(2).wait_for()
        assert set(view.page.evaluate("Object.getOwnPropertyNames(window)")) == before
        labels = [canvas.get_attribute("aria-label") or "" for canvas in view.page.locator(".flexmask-stage canvas").all()]
        assert [label.split(",")[0] for label in labels] == ["Mask causal", "Mask one", "Mask two"]


@pytest.mark.browser
def test_a_view_that_ends_lets_go_of_everything(shown: Shown) -> None:
    with shown(causal().view, color_scheme="light") as view:
        view.page.evaluate(
            """(data) => {
              window.host = document.body.appendChild(document.createElement("div"));
              host.className = "mine";
              window.ending = flexmaskView(host, data);
            }""",
            causal(3, 12).view,
        )
        view.page.locator(".mine[aria-busy=false]").wait_for()
        view.page.evaluate(
            """() => {
              window.canvas = host.querySelector(".flexmask-stage canvas");
              window.legend = host.querySelector("tbody");
              window.before = [legend.firstChild, canvas.width];
              ending.destroy();
            }"""
        )
        assert view.page.evaluate("host.outerHTML") == '<div class="mine"></div>'
        view.page.emulate_media(color_scheme="dark")
        view.page.evaluate("dispatchEvent(new Event('beforeprint'))")
        view.page.evaluate("() => { canvas.style.width = '33px'; host.append(canvas); }")
        view.settle()
        assert view.page.evaluate("host.className") == "mine"
        assert view.page.evaluate("legend.firstChild === before[0] && canvas.width === before[1]")


@pytest.mark.browser
def test_a_view_that_ends_before_it_is_drawn_stays_away(shown: Shown) -> None:
    with shown(causal().view) as view:
        ended = """(data) => {
          window.host = document.body.appendChild(document.createElement("div"));
          flexmaskView(host, data).destroy();
          window.changes = 0;
          new MutationObserver(() => { changes += 1; }).observe(host, { childList: true, subtree: true });
        }"""
        view.page.evaluate(ended, packed_text().view)
        view.page.evaluate(
            "(data) => flexmaskView(document.body.appendChild(document.createElement('div')), data)", packed_text().view
        )
        view.page.locator(".flexmask[aria-busy=false]").nth(1).wait_for()
        assert view.page.evaluate("host.outerHTML") == '<div class=""></div>'
        assert view.page.evaluate("changes") == 0
