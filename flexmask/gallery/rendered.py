"""Rendered entries: the cells of their panels, and their statistics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flexmask.errors import FlexmaskError, RenderError
from flexmask.gallery.entry import Entry
from flexmask.plotting.html.view import block_size_for
from flexmask.plotting.sheet import Sheet, panel_sheet
from flexmask.report.stats import Stats

if TYPE_CHECKING:
    from flexmask.expr.mask import Mask


@dataclass(frozen=True, eq=False)
class RenderedEntry:
    """An entry with its panels and statistics.

    Attributes:
        entry: the entry.
        sheet: its panels.
        stats: the statistics of all sequences and heads, with the drawn block size, else with a suitable one.
    """

    entry: Entry
    sheet: Sheet
    stats: Stats


def render_entry(entry: Entry) -> RenderedEntry:
    """Renders an entry.

    Raises:
        RenderError: its text is no mask, or its data, lengths, sequence, head or labels do not fit; the message names the entry.
    """
    try:
        mask = entry.mask()
    except FlexmaskError as error:
        raise RenderError(f"entry {entry.title!r}: text, params: {error}") from error
    if mask.params:
        raise RenderError(f"entry {entry.title!r}: params has no value for {', '.join(mask.params)}")
    try:
        stats = _stats(entry, mask)
    except FlexmaskError as error:
        raise RenderError(f"entry {entry.title!r}: params, q_len, kv_len: {error}") from error
    try:
        return RenderedEntry(entry, _sheet(entry, mask), stats)
    except FlexmaskError as error:
        raise RenderError(f"entry {entry.title!r}: batch, head: {error}") from error


def _sheet(entry: Entry, mask: Mask) -> Sheet:
    return panel_sheet(
        mask,
        entry.q_len,
        entry.kv_len,
        batch=entry.batch,
        head=entry.head,
        q_offset=entry.q_offset,
        block_size=entry.block_size,
        why=entry.why,
        tokens=entry.q_tokens,
        kv_tokens=entry.kv_tokens,
    )


def _stats(entry: Entry, mask: Mask) -> Stats:
    size = entry.block_size or block_size_for(entry.q_len, entry.kv_len)
    return mask.stats(entry.q_len, entry.kv_len, q_offset=entry.q_offset, block_size=size)
