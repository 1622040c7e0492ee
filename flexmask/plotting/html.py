"""The interactive view of a mask: one HTML file with everything in it, which asks for nothing from outside.

The page holds its data as JSON, with the pixels as compressed bytes; the scripts in ``web`` draw them. A page is the same
bytes for the same data.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from dataclasses import asdict
from html import escape
from importlib.resources import files
from string import Template
from typing import Any, Literal, TypeAlias, Unpack

import numpy as np
from numpy.typing import NDArray

from flexmask._checks import lengths_text
from flexmask.errors import FlexmaskError, RenderError
from flexmask.expr.mask import Mask
from flexmask.plotting.annotations import ContentOptions, picture_lengths
from flexmask.plotting.caption import shortened
from flexmask.plotting.categories import count_text
from flexmask.plotting.raster import Picture
from flexmask.plotting.sheet import Indices, Sheet, panel_sheet

HERE = "flexmask.plotting"
#: The parts of the script, each built on those before it.
PARTS = ("data.js", "elements.js", "colors.js", "legend.js", "stage.js", "view.js", "thumbnail.js")
#: Blocks along each side at most; a finer grid is left out.
MAX_BLOCKS = (512, 512)
#: Pixels: the height of a view in a notebook.
HEIGHT = 560

#: What a page holds as JSON.
Data: TypeAlias = dict[str, Any]


def page(view: Data) -> str:
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


def _statistics(view: Data) -> list[str]:
    """What is said where no script runs: the lengths, and the cells of each category in each panel."""
    cells = view["q_len"] * view["kv_len"]
    lines = [lengths_text(view["q_len"], view["kv_len"], "×")]
    for panel in view["panels"]:
        counts = []
        for category, (least, most) in zip(view["categories"], panel["pairs"], strict=True):
            counts.append(f"{category['label']}: {count_text((least, most))} ({100 * least / cells:.1f} %)")
        lines.append(f"sequence {panel['batch']}, head {panel['head']}: {'; '.join(counts)}")
    return lines


def html(
    mask: Mask,
    q_len: int | None = None,
    kv_len: int | None = None,
    *,
    batch: Indices = "some",
    head: Indices = "some",
    **options: Unpack[ContentOptions],
) -> str:
    """The interactive view of a mask as one HTML document: see :meth:`flexmask.Mask.html`."""
    if options.get("shards") is not None:
        raise RenderError("the interactive view does not show shards; write a .png, .svg or .pdf, or draw in the terminal")
    asked = options.get("block_size")
    start: Literal["why", "blocks"] = "why" if asked is None or options.get("why") else "blocks"
    if options.get("against") is None:
        q_len, kv_len = picture_lengths(mask, q_len, kv_len, options)
        blocks = block_size_for(q_len, kv_len) if asked is None else asked
        options |= {"block_size": blocks, "max_blocks": options.get("max_blocks") or MAX_BLOCKS}
        options |= {"why": options.get("why") is not False}
    shown = panel_sheet(mask, q_len, kv_len, batch=batch, head=head, **options)
    return page(view_of(shown, start=start))


def notebook_html(mask: Mask) -> str:
    """A mask as a notebook shows it: the view, or the text alone where the mask cannot be lowered yet."""
    text = escape(shortened(mask.spoken()))
    if mask.params:
        return f"<code>{text}</code> with the parameters {', '.join(mask.params)}"
    try:
        document = html(mask)
    except FlexmaskError as error:
        return f"<code>{text}</code>: {escape(str(error))}"
    frame = f'<iframe title="{text}" srcdoc="{escape(document)}" sandbox="allow-scripts" loading="lazy"'
    return f'{frame} style="width: 100%; height: {HEIGHT}px; border: 0"></iframe>'


def block_size_for(q_len: int, kv_len: int) -> int:
    """A size of blocks that shows something: a power of two up to 128, of which a few go into the longer side."""
    return int(min(128, max(2, 2 ** ((max(q_len, kv_len) // 4).bit_length() - 1))))


def view_of(shown: Sheet, *, start: Literal["why", "blocks"] = "why") -> Data:
    """The data of the page of a sheet.

    Args:
        shown: the sheet.
        start: what is on at first where the view has it: the terms that hide cells, or the blocks.

    Returns:
        text: the mask's text.
        q_len: number of queries.
        kv_len: number of keys.
        batches: number of sequences that the mask distinguishes; None if unknown.
        heads: number of heads, in the same way.
        categories: the role and the label of each category of cells.
        step: queries and keys in one pixel.
        shape: rows and columns of pixels.
        block_size: queries and keys in a block, or None.
        q_tokens: a label for each query, or None.
        kv_tokens: a label for each key, or None.
        start: as given.
        panels: the sequences and heads that are shown, see :func:`_panel`.
    """
    first = shown.pictures[0]
    return {
        "text": shown.text,
        "q_len": first.q_len,
        "kv_len": first.kv_len,
        "batches": first.batches,
        "heads": first.heads,
        "categories": [{"role": category.role, "label": category.label} for category in first.categories],
        "step": first.step,
        "shape": list(first.shares.shape[1:]),
        "block_size": None if first.blocks is None or first.block_size is None else list(first.block_size),
        "q_tokens": first.q_tokens,
        "kv_tokens": first.kv_tokens,
        "start": start,
        "panels": [_panel(picture) for picture in shown.pictures],
    }


def _panel(shown: Picture) -> Data:
    """The data of one sequence and one head. What is packed goes through the pixels row by row.

    Returns:
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
        bands: stretches along the axes, from the mask outwards: where each begins, the last one to the end of the axis, and its
            name; ``""`` draws nothing, ``"padding"`` is gray.
    """
    cells = shown.every_cell
    hidden_by = shown.hidden_by if len(shown.categories) > 2 else None
    return {
        "batch": shown.batch,
        "head": shown.head,
        "q_offset": shown.q_offset,
        "pairs": shown.pairs,
        "cells": compressed(shown.cells.tobytes()) if cells else None,
        "hidden_by": None if hidden_by is None else compressed(hidden_by.astype("<u4").tobytes()),
        "shares": None if cells else compressed(_bytes(shown.shares).tobytes()),
        "estimated": None if shown.estimated is None else compressed(shown.estimated.tobytes()),
        "blocks": None if shown.blocks is None else compressed(shown.blocks.tobytes()),
        "bands": [asdict(band) for band in shown.bands],
    }


def _bytes(shares: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Shares from 0 to 255; what is not 0 is at least 1."""
    return np.where(shares > 0, (255 * shares).round().clip(1, 255), 0).astype(np.uint8)
