"""The gallery's page in a browser: what is found, what is opened, and what it says of cells, against plain loops."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import flexmask as fm
from flexmask.gallery.build import index
from flexmask.gallery.rendered import command, python, render_entry
from flexmask.gallery.source import Entry, read_entries
from tests.support import browser
from tests.support.browser import Opened, screenshot, watched_page
from tests.support.cli import run
from tests.support.exhaustive import exhaustive

if TYPE_CHECKING:
    from playwright.sync_api import Browser

chromium = browser.chromium
pytestmark = pytest.mark.browser

ENTRIES = read_entries(Path(__file__).parents[2] / "gallery" / "gallery.toml")
PHONE: dict[str, Any] = {"viewport": {"width": 360, "height": 740}, "has_touch": True}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gallery") / "index.html"
    path.write_text(index([render_entry(entry) for entry in ENTRIES]), encoding="utf-8")
    return path


@contextmanager
def opened(chromium: Browser, file: Path, slug: str = "", **options: Any) -> Iterator[Opened]:
    """The page, at one of its masks or none; nothing may have gone wrong at the end, and nothing else been asked for."""
    with watched_page(chromium, **options) as found:
        found.page.goto(file.as_uri() + (f"#{slug}" if slug else ""))
        yield found
        assert found.troubles == []
        assert {request.split("#")[0] for request in found.requests} == {file.as_uri()}


def shown(page: Opened) -> list[str]:
    """The titles of the cards in sight, in their order."""
    titles: list[str] = page.page.locator(".card:visible h3").all_text_contents()
    return titles


def search(page: Opened, text: str) -> list[str]:
    page.page.get_by_role("searchbox").fill(text)
    return shown(page)


def matching(words: str = "", tags: tuple[str, ...] = ()) -> list[str]:
    """The titles of what has all words and all tags."""
    found = []
    for entry in ENTRIES:
        text = "\n".join(
            [entry.title, entry.family, entry.caption, entry.text, *entry.tags, *entry.aliases, entry.source]
        ).lower()
        if all(word in text for word in words.lower().split()) and all(tag in entry.tags for tag in tags):
            found.append(entry.title)
    return found


def focused(page: Opened) -> str:
    text: str = page.page.evaluate("() => document.activeElement.id || document.activeElement.textContent")
    return text


def test_search_finds_what_has_all_words(chromium: Browser, file: Path) -> None:
    with opened(chromium, file) as page:
        assert shown(page) == [entry.title for entry in ENTRIES]
        for words in (
            "longformer",
            "SLIDING_window",
            "video  tile",
            "document(lengths",
            "compositions padding",
            "cu_seqlens",
            "best-of-n",
            "zigzag",
        ):
            assert search(page, words) == matching(words), words
            assert page.page.locator("#count").inner_text() == f"{len(matching(words))} of {len(ENTRIES)} masks"
        assert len(matching("video tile")) not in (0, len(ENTRIES))
        assert search(page, "nothing has this") == []
        assert page.page.locator("#none").is_visible()
        assert page.page.locator("section:visible").count() == 0
        page.page.get_by_role("button", name="Clear").click()
        assert shown(page) == [entry.title for entry in ENTRIES]
        assert page.page.locator("#count").inner_text() == f"{len(ENTRIES)} masks"
        assert focused(page) == "query"


def test_search_finds_what_the_command_finds(chromium: Browser, file: Path) -> None:
    titles = {entry.title for entry in ENTRIES}
    with opened(chromium, file) as page:
        for words in (
            "llama4",
            "streaming llm",
            "bigbird",
            "Swin",
            "longfromer",
            "widnow vdieo",
            "swin zzzzz",
            "gema",
            "block-sparse",
            "nothingxx",
        ):
            answer = json.loads(run("find", *words.split(), "--json").stdout)
            found = {one["title"] for one in answer} & titles
            assert set(search(page, words)) == found, words
            assert bool(found) == (words not in ("swin zzzzz", "nothingxx"))


def test_tags_narrow_what_is_found(chromium: Browser, file: Path) -> None:
    with opened(chromium, file) as page:
        toggle = {tag: page.page.locator(f'[data-tag="{tag}"]') for tag in ("causal", "packing", "window", "graphs")}
        toggle["causal"].click()
        assert shown(page) == matching(tags=("causal",))
        toggle["packing"].click()
        assert shown(page) == matching(tags=("causal", "packing"))
        assert toggle["packing"].get_attribute("aria-pressed") == "true"
        assert toggle["window"].inner_text().split() == ["window", str(len(matching(tags=("causal", "packing", "window"))))]
        assert toggle["graphs"].is_disabled()
        assert search(page, "sinks") == matching("sinks", ("causal", "packing"))
        screenshot(page.page, "gallery-filtered", file.parent)
        toggle["causal"].click()
        assert shown(page) == matching("sinks", ("packing",))
        families = page.page.locator("section:visible h2").all_inner_texts()
        counts = [int(text.split()[-1]) for text in families]
        assert sum(counts) == len(matching("sinks", ("packing",)))


def test_keys_alone_are_enough(chromium: Browser, file: Path) -> None:
    (wanted,) = [entry for entry in ENTRIES if entry.title == "Global, near and random blocks"]
    with opened(chromium, file) as page:
        page.page.keyboard.press("/")
        assert focused(page) == "query"
        page.page.keyboard.type("bigbird")
        assert shown(page) == matching("bigbird")
        page.page.locator(".card:visible a").first.focus()
        page.page.keyboard.press("Enter")
        page.settle()
        assert focused(page) == "title"
        assert page.page.locator("#title").inner_text() == wanted.title
        assert page.page.evaluate("() => location.hash") == f"#{wanted.slug}"
        for _ in range(30):  # the focus stays in the dialog, or is the browser's own
            page.page.keyboard.press("Tab")
            inside = "() => document.activeElement === document.body || document.activeElement.closest('dialog') !== null"
            assert page.page.evaluate(inside)
        page.page.keyboard.press("Escape")
        page.page.wait_for_function("() => location.hash === ''")
        assert not page.page.locator("dialog").is_visible()
        assert focused(page) == wanted.title
        page.page.keyboard.press("/")
        page.page.keyboard.press("Escape")
        assert shown(page) == [entry.title for entry in ENTRIES]


def test_links_and_the_back_button(chromium: Browser, file: Path) -> None:
    first, second = ENTRIES[3], ENTRIES[4]
    with opened(chromium, file, first.slug) as page:
        page.settle()
        assert page.page.locator("#title").inner_text() == first.title
        assert page.page.title().startswith(first.title)
        page.page.get_by_role("button", name="Close").click()  # there is nothing to go back to
        page.page.wait_for_function("() => location.hash === ''")  # a dialog says later that it was closed
        assert not page.page.locator("dialog").is_visible()
        page.page.get_by_role("link", name=first.title).click()
        assert page.page.locator("#title").inner_text() == first.title
        page.page.get_by_role("button", name="Next mask").click()
        page.page.wait_for_function(f"() => location.hash === '#{second.slug}'")
        assert page.page.locator("#title").inner_text() == second.title
        page.page.get_by_role("button", name="Previous mask").click()
        page.page.wait_for_function(f"() => location.hash === '#{first.slug}'")
        page.page.go_back()  # one step, however many masks were seen
        assert page.page.evaluate("() => location.hash") == ""
        assert not page.page.locator("dialog").is_visible()
        page.page.go_forward()
        assert page.page.locator("#title").inner_text() == first.title
    with opened(chromium, file, "no-such-mask") as page:
        assert not page.page.locator("dialog").is_visible()


def test_next_is_among_what_is_found(chromium: Browser, file: Path) -> None:
    found = matching("longformer")
    with opened(chromium, file) as page:
        search(page, "longformer")
        page.page.get_by_role("link", name=found[-1]).click()
        page.page.get_by_role("button", name="Next mask").click()
        page.page.wait_for_function(f"() => document.getElementById('title').textContent === {found[0]!r}")
        assert page.page.locator("#title").inner_text() == found[0]


def test_left_and_right_keys_page(chromium: Browser, file: Path) -> None:
    first, second = ENTRIES[0], ENTRIES[1]
    with opened(chromium, file, first.slug) as page:
        page.settle()
        page.page.keyboard.press("ArrowRight")
        page.settle()
        assert page.page.locator("#title").inner_text() == second.title
        page.page.keyboard.press("Alt+ArrowRight")
        page.page.keyboard.press("ArrowLeft")
        page.settle()
        page.page.keyboard.press("ArrowLeft")
        page.settle()
        assert page.page.locator("#title").inner_text() == ENTRIES[-1].title
        page.page.locator("#view canvas").first.focus()
        page.page.keyboard.press("ArrowRight")  # moves the cursor in the picture
        page.settle()
        assert page.page.locator("#title").inner_text() == ENTRIES[-1].title


def test_names_in_the_legend_are_not_broken(chromium: Browser, file: Path) -> None:
    """Lines end between the parts of an expression: each word of a label is one box."""
    (wanted,) = [entry for entry in ENTRIES if entry.title == "Qwen with prompts padded on the left"]
    broken = """() => [...document.querySelectorAll("#view .flexmask-legend th span")].flatMap((label) =>
        [...label.childNodes].filter((node) => node.nodeType === Node.TEXT_NODE).flatMap((node) =>
            [...node.data.matchAll(/\\w+/g)].filter((word) => {
                const range = document.createRange();
                range.setStart(node, word.index);
                range.setEnd(node, word.index + word[0].length);
                return range.getClientRects().length > 1;
            }).map(String)))"""
    for width in (1280, 360):
        with opened(chromium, file, wanted.slug, viewport={"width": width, "height": 800}) as page:
            page.settle()
            assert page.page.locator("#view .flexmask-legend th span").count() >= 3
            assert page.page.evaluate(broken) == []


def test_one_view_at_a_time(chromium: Browser, file: Path) -> None:
    views = "() => [document.querySelectorAll('.flexmask').length, document.querySelectorAll('dialog canvas').length > 1]"
    with opened(chromium, file, ENTRIES[0].slug) as page:
        for _ in range(3):
            page.settle()
            assert page.page.evaluate(views) == [1, True]
            page.page.evaluate("() => { window.legend = document.querySelector('tbody'); window.row = legend.firstChild; }")
            label = page.page.locator(".flexmask-stage canvas").get_attribute("aria-label") or ""
            page.page.get_by_role("button", name="Next mask").click()
            page.page.wait_for_function(
                "(before) => document.querySelector('.flexmask-stage canvas').getAttribute('aria-label') !== before", arg=label
            )
            page.page.emulate_media(color_scheme="dark")
            assert page.page.evaluate("() => legend.firstChild === row")  # the view before does not follow any more
            page.page.emulate_media(color_scheme="light")
        page.page.get_by_role("button", name="Close").click()
        page.page.wait_for_function("() => location.hash === ''")
        assert page.page.evaluate(views) == [0, False]


def test_detail_says_all_and_copies(chromium: Browser, file: Path) -> None:
    (entry,) = [entry for entry in ENTRIES if entry.title == "A chunk of a prompt in a static cache"]
    with opened(chromium, file, entry.slug, permissions=["clipboard-read", "clipboard-write"]) as page:
        page.settle()
        stats = fm.parse(entry.text, **entry.params).stats(entry.q_len, entry.kv_len, q_offset=entry.q_offset, block_size=8)
        statistics = [text.split("\n") for text in page.page.locator("#statistics div").all_inner_texts()]
        assert statistics == [
            ["Visible, of all 3 sequences", f"{100 * stats.visible_fraction:.1f} %"],
            ["Block sparsity, blocks of 8", f"{100 * stats.block_sparsity:.1f} %"],
            ["Cost against dense", f"{100 * stats.cost:.1f} %"],
        ]
        assert page.page.locator("#caption").inner_text() == entry.caption
        link = page.page.locator("#source a")
        assert (link.get_attribute("href"), link.get_attribute("rel")) == (entry.source, "noreferrer")
        assert page.page.locator("#tags li").all_inner_texts() == list(entry.tags)
        for part, text in (("text", entry.text), ("command", command(entry)), ("python", python(entry))):
            button = page.page.locator(f'[data-copies="{part}"]')
            button.click()
            page.page.wait_for_function(f"""() => document.querySelector('[data-copies="{part}"]').textContent === 'Copied'""")
            assert page.page.evaluate("() => navigator.clipboard.readText()") == text
            assert page.page.locator("#said").text_content() == "Copied."


@pytest.mark.parametrize(
    "title", ["A padded batch in a decoder", *exhaustive(["Cross-attention of a translation", "Tree of drafts", "Causal"])]
)
def test_cells_tell_the_truth(chromium: Browser, file: Path, title: str) -> None:
    (entry,) = [entry for entry in ENTRIES if entry.title == title]
    with opened(chromium, file, entry.slug) as page:
        page.settle()
        page.page.locator("dialog .flexmask-stage canvas").scroll_into_view_if_needed()
        box = page.page.locator("dialog .flexmask-stage canvas").bounding_box()
        assert box is not None
        cells, seen = cells_of(entry), set[bool]()
        generator = random.Random(0)
        for _ in range(30):
            said = page.hover(generator.uniform(0.2, 0.9) * box["width"], generator.uniform(0.1, 0.9) * box["height"])
            place = re.match(r"b (\d+) +h (\d+) +q (\d+)[^:]* kv (\d+)[^:]*: (visible|hidden)", said)
            if place is None:  # beside the mask
                continue
            b, h, q, kv = (int(number) for number in place.groups()[:4])
            assert (place[5] == "visible") == cells[b][h][q - entry.q_offset][kv], said
            seen.add(cells[b][h][q - entry.q_offset][kv])
        assert seen == {True, False}


def cells_of(entry: Entry) -> list[list[list[list[bool]]]]:
    mask = fm.parse(entry.text, **entry.params)
    cells: list[list[list[list[bool]]]] = mask.dense(entry.q_len, entry.kv_len, q_offset=entry.q_offset).tolist()
    return cells


def test_small_drawings_are_the_masks(chromium: Browser, file: Path) -> None:
    """One pixel in the middle of each cell of the first panel, against the color of what is visible."""
    entries = [entry for entry in ENTRIES if {entry.batch, entry.head} == {0}][:12]
    with opened(chromium, file, color_scheme="light") as page:
        for entry in entries:
            card = page.page.locator(f'[data-slug="{entry.slug}"]')
            card.scroll_into_view_if_needed()
            page.page.wait_for_function(
                f"""() => document.querySelector('[data-slug="{entry.slug}"] canvas').style.width !== ''"""
            )
            page.page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
            blue: list[bool] = card.locator("canvas").evaluate(PIXELS, [entry.q_len, entry.kv_len])
            cells = cells_of(entry)[0][0]
            assert blue == [cell for row in cells for cell in row], entry.title


PIXELS = """(canvas, [down, across]) => {
  const copy = document.createElement("canvas");
  [copy.width, copy.height] = [canvas.width, canvas.height];
  const pen = copy.getContext("2d", { willReadFrequently: true });
  pen.drawImage(canvas, 0, 0);
  const cell = canvas.width / across, found = [];
  for (let q = 0; q < down; q++) {
    for (let kv = 0; kv < across; kv++) {
      const [red, green, blue] = pen.getImageData(Math.floor((kv + 0.4) * cell), Math.floor((q + 0.4) * cell), 1, 1).data;
      found.push(red === 0x00 && green === 0x72 && blue === 0xb2);
    }
  }
  return found;
}"""


@pytest.mark.parametrize(
    ("device", "scheme"), [("desktop", "light"), ("phone", "dark"), *exhaustive([("desktop", "dark"), ("phone", "light")])]
)
def test_nothing_is_wider_than_the_screen(chromium: Browser, file: Path, device: str, scheme: str) -> None:
    options: dict[str, Any] = {"color_scheme": scheme, "reduced_motion": "reduce", **(PHONE if device == "phone" else {})}
    wide = "(element) => element.scrollWidth - element.clientWidth"
    with opened(chromium, file, **options) as page:
        if device == "phone":
            page.page.get_by_text("Tags", exact=True).first.click()
        assert page.page.locator("html").evaluate(wide) == 0
        page.page.wait_for_function("() => document.querySelector('.card canvas').style.width !== ''")
        screenshot(page.page, f"gallery-{device}-{scheme}", file.parent)
        search(page, "MInference")
        assert page.page.locator("html").evaluate(wide) == 0
        page.page.locator(".card:visible a").click()
        page.settle()
        assert page.page.locator("html").evaluate(wide) == 0
        assert page.page.locator("dialog").evaluate(wide) == 0
        screenshot(page.page, f"gallery-{device}-{scheme}-detail", file.parent)
        assert page.page.evaluate("() => document.getAnimations().length") == 0


def test_headings_and_names(chromium: Browser, file: Path) -> None:
    unnamed = """() => [...document.querySelectorAll("a, button, input, canvas, select, dialog")].filter((element) =>
      element.getAttribute("aria-hidden") !== "true" && !(element.textContent.trim() || element.getAttribute("aria-label") ||
      element.getAttribute("aria-labelledby") || (element.labels && element.labels.length))).length"""
    with opened(chromium, file, ENTRIES[0].slug) as page:
        page.settle()
        assert page.page.evaluate(unnamed) == 0
        levels: list[str] = page.page.locator("h1, h2, h3").evaluate_all("(found) => found.map((element) => element.tagName)")
        assert levels[:3] == ["H1", "H2", "H3"]
        assert levels.count("H1") == 1
        assert page.page.get_by_role("dialog", name=ENTRIES[0].title).is_visible()
        assert page.page.locator("main, search, header.head").count() == 3


def test_without_scripts_all_can_be_read(chromium: Browser, file: Path) -> None:
    with opened(chromium, file, java_script_enabled=False, **PHONE) as page:
        text = page.page.locator("body").inner_text()
        assert "need a script" in text
        for entry in ENTRIES:
            assert entry.title in text
            assert entry.caption in text
            assert entry.text in text
        assert not page.page.locator("#query").is_visible()
        screenshot(page.page, "gallery-without-scripts", file.parent)
