"""The interactive view of a mask: the data of its page, and the page as a file or in a notebook."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Literal, Unpack

import numpy as np
from numpy.typing import NDArray

from flexmask.errors import FlexmaskError, RenderError
from flexmask.plotting.caption import shortened
from flexmask.plotting.html.page import PanelData, ViewData, compressed, page
from flexmask.plotting.labels import ContentOptions, picture_lengths
from flexmask.plotting.raster import Picture
from flexmask.plotting.sheet import Indices, Sheet, panel_sheet

if TYPE_CHECKING:
    from flexmask.expr.mask import Mask

#: Blocks along each side at most; a finer grid is left out.
MAX_BLOCKS = (512, 512)
#: Pixels: the height of a view in a notebook.
HEIGHT = 560


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
        options = {"why": True, "max_blocks": MAX_BLOCKS, **options, "block_size": blocks}
    shown = panel_sheet(mask, q_len, kv_len, batch=batch, head=head, **options)
    return page(view_of(shown, start=start))


def notebook_html(mask: Mask) -> str:
    """A mask as a notebook shows it: the view, or the text alone where the mask cannot be lowered yet."""
    text = f"<code>{escape(shortened(mask.spoken()))}</code>"
    if mask.params:
        return f"{text} with the parameters {', '.join(mask.params)}"
    try:
        document = html(mask)
    except FlexmaskError as error:
        return f"{text}: {escape(str(error))}"
    frame = (
        f'<iframe title="{escape(shortened(mask.spoken()))}" srcdoc="{escape(document)}" sandbox="allow-scripts" loading="lazy"'
    )
    return f'{frame} style="width: 100%; height: {HEIGHT}px; border: 0"></iframe>'


def block_size_for(q_len: int, kv_len: int) -> int:
    """A size of blocks that shows something: a power of two up to 128, of which a few go into the longer side."""
    return int(min(128, max(2, 2 ** ((max(q_len, kv_len) // 4).bit_length() - 1))))


def view_of(shown: Sheet, *, start: Literal["why", "blocks"] = "why") -> ViewData:
    """The data of the page of a sheet, with what is on at first where it has it."""
    first = shown.pictures[0]
    return {
        "text": shown.text,
        "q_len": first.q_len,
        "kv_len": first.kv_len,
        "batches": first.batches,
        "heads": first.heads,
        "categories": [{"role": category.role, "label": category.label} for category in first.categories],
        "step": list(first.step),
        "shape": list(first.shares.shape[1:]),
        "block_size": None if first.blocks is None or first.block_size is None else list(first.block_size),
        "q_tokens": None if first.q_tokens is None else list(first.q_tokens),
        "kv_tokens": None if first.kv_tokens is None else list(first.kv_tokens),
        "start": start,
        "panels": [_panel(picture) for picture in shown.pictures],
    }


def _panel(shown: Picture) -> PanelData:
    cells = shown.every_cell
    hidden_by = shown.hidden_by if len(shown.categories) > 2 else None
    return {
        "batch": shown.batch,
        "head": shown.head,
        "q_offset": shown.q_offset,
        "pairs": [list(pair) for pair in shown.pairs],
        "cells": _compressed(shown.cells) if cells else None,
        "hidden_by": None if hidden_by is None else _compressed(hidden_by.astype("<u4")),
        "shares": None if cells else _compressed(_bytes(shown.shares)),
        "estimated": None if shown.estimated is None else _compressed(shown.estimated.astype(np.uint8)),
        "blocks": None if shown.blocks is None else _compressed(shown.blocks.astype(np.uint8)),
        "bands": [
            {"axis": band.axis, "label": band.label, "starts": list(band.starts), "values": list(band.values)}
            for band in shown.bands
        ],
    }


def _bytes(shares: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Shares from 0 to 255; what is not 0 is at least 1."""
    return np.where(shares > 0, (255 * shares).round().clip(1, 255), 0).astype(np.uint8)


def _compressed(values: NDArray[np.generic]) -> str:
    return compressed(np.ascontiguousarray(values).tobytes())
