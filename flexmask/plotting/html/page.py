"""The interactive view of a mask: one HTML file with everything in it, which asks for nothing from outside.

The page holds its data as JSON, with the pixels as compressed bytes; the scripts in ``web`` draw them. A page is the same
bytes for the same data.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from html import escape
from importlib.resources import files
from string import Template
from typing import Literal, TypedDict

from flexmask.plotting.categories import Role, count_text

HERE = "flexmask.plotting.html"
#: The parts of the script, each built on those before it.
PARTS = ("data.js", "elements.js", "colors.js", "legend.js", "stage.js", "view.js", "thumbnail.js")


class CategoryData(TypedDict):
    """One category of cells.

    Attributes:
        role: what it means for attention, or, where two masks are compared, which of them show the cell.
        label: its name; for hidden cells the text of the condition that hides them, or ``"hidden"``.
    """

    role: Role
    label: str


class BandData(TypedDict):
    """Stretches along an axis, drawn next to it.

    Attributes:
        axis: the axis.
        label: what the stretches are.
        starts: where each begins; it ends where the next does, the last at the end of the axis.
        values: the name of each; ``""`` draws nothing, ``"padding"`` is gray.
    """

    axis: Literal["q", "kv"]
    label: str
    starts: list[int]
    values: list[str]


class PanelData(TypedDict):
    """One sequence and one head. What is ``packed`` goes through the pixels row by row.

    Attributes:
        batch: index of the sequence.
        head: index of the head.
        q_offset: position of the first query.
        pairs: cells of each category, at least and at most.
        cells: packed uint8, the category of each cell; None where a pixel covers several cells or is estimated.
        hidden_by: packed little-endian uint32, bit ``i`` set where category ``i`` hides the cell; None with
            less than two such categories.
        shares: packed uint8, for each category its share of each pixel from 0 to 255, at least 1 where it is not 0; None
            where ``cells`` is given.
        estimated: packed uint8, 1 where the shares are estimates; None where all is exact.
        blocks: packed uint8, the category of each block: 0 empty, 1 partial, 2 full, 3 not known; None where they are not drawn.
        bands: stretches along the axes, from the mask outwards.
    """

    batch: int
    head: int
    q_offset: int
    pairs: list[list[int]]
    cells: str | None
    hidden_by: str | None
    shares: str | None
    estimated: str | None
    blocks: str | None
    bands: list[BandData]


class ViewData(TypedDict):
    """One mask, ready to be shown.

    Attributes:
        text: the mask's text.
        q_len: number of queries.
        kv_len: number of keys.
        batches: number of sequences that the mask distinguishes; None if unknown.
        heads: number of heads, in the same way.
        categories: the categories of the cells.
        step: queries and keys in one pixel.
        shape: rows and columns of pixels.
        block_size: queries and keys in a block, or None.
        q_tokens: a label for each query, or None.
        kv_tokens: a label for each key, or None.
        start: what is on at first where the view has it: the terms that hide cells, or the blocks.
        panels: the sequences and heads that are shown.
    """

    text: str
    q_len: int
    kv_len: int
    batches: int | None
    heads: int | None
    categories: list[CategoryData]
    step: list[int]
    shape: list[int]
    block_size: list[int] | None
    q_tokens: list[str] | None
    kv_tokens: list[str] | None
    start: Literal["why", "blocks"]
    panels: list[PanelData]


def page(view: ViewData) -> str:
    """The page that shows a mask: a whole HTML document."""
    return document(
        web(HERE, "page.html"),
        css=f"{style()}\n{web(HERE, 'page.css')}",
        js=f"{script()}\n{web(HERE, 'page.js')}",
        title=escape(view["text"]),
        statistics="\n".join(f"<li>{escape(line)}</li>" for line in _statistics(view)),
        data=inline_json(view),
    )


def document(template: str, *, css: str, js: str, **parts: str) -> str:
    """A page whose policy allows its one style sheet and its one script, and nothing else.

    Args:
        template: the page, with ``$policy`` for its policy, ``<style>$css</style>`` and ``<script>$js</script>``.
        css: the style sheet.
        js: the script.
        **parts: what else the template names.
    """
    allowed = f"style-src {_digest(css)}; script-src {_digest(js)}; img-src data:"
    policy = f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"
    return Template(template).substitute(parts, policy=policy, css=css, js=js)


def compressed(data: bytes) -> str:
    """Bytes as the view's data holds them: compressed, in base64."""
    return base64.b64encode(zlib.compress(data, 9)).decode("ascii")


def inline_json(data: object) -> str:
    """The data as JSON that is safe inside a ``<script>`` element."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")  # all but ASCII is escaped already


def script() -> str:
    """The script of the view: it defines ``flexmaskView(element, data)``, with what else it offers as attributes."""
    parts = [web(HERE, part) for part in PARTS]
    return "\n".join(['const flexmaskView = (() => {\n"use strict";', *parts, "return flexmaskView;\n})();"])


def style() -> str:
    """The style sheet of the view; its colors are custom properties that a page may set."""
    return web(HERE, "viewer.css")


def web(package: str, name: str) -> str:
    """A file in the folder ``web`` of a package."""
    return files(package).joinpath("web", name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    """What a policy calls the one script, or the one style sheet, that it allows."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _statistics(view: ViewData) -> list[str]:
    """What is said where no script runs: the lengths, and the cells of each category in each panel."""
    cells = view["q_len"] * view["kv_len"]
    lines = [f"{view['q_len']:,} queries × {view['kv_len']:,} keys"]
    for panel in view["panels"]:
        counts = []
        for category, (least, most) in zip(view["categories"], panel["pairs"], strict=True):
            counts.append(f"{category['label']}: {count_text((least, most))} ({100 * least / cells:.1f} %)")
        lines.append(f"sequence {panel['batch']}, head {panel['head']}: {'; '.join(counts)}")
    return lines
