"""Sheets of pictures with matplotlib: small panels in a grid, with one legend for all."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from matplotlib.figure import Figure

from flexmask.plotting.caption import check_frame, first_term_note, join_lines, notes, title_lines, visible_text
from flexmask.plotting.labels import FrameOptions, LabelOptions, Tokens
from flexmask.plotting.mpl.drawing import draw_cells
from flexmask.plotting.mpl.edges import NUMBER_CHARACTER, band_room, draw_bands, label_axes, token_room
from flexmask.plotting.mpl.legend import LEGEND, entries_of, legend_lines
from flexmask.plotting.mpl.plot import DPI, fit, new_figure, style, write
from flexmask.plotting.palette import FAINT, INK
from flexmask.plotting.raster import Picture
from flexmask.plotting.scores import score_sheet
from flexmask.plotting.sheet import Indices, Sheet

if TYPE_CHECKING:
    from torch import Tensor

    from flexmask.tracing.as_mask import MaskLike

#: Inches: a square of a small mask and the longer side of the others; between panels, and around all.
SQUARE, LONGEST, GAP, MARGIN = 0.15, 2.4, 0.25, 0.15
#: Inches: a line of a panel's title, of the title of all and of the legend, with their characters.
PANEL_LINE, TITLE_LINE, LEGEND_LINE = 0.14, 0.165, 0.175
PANEL_CHARACTER, TITLE_CHARACTER, NOTE_CHARACTER = 0.06, 0.0755, 0.0605
#: Inches that the text of the sheet, and of a panel, may take at least.
TEXT_WIDTH, PANEL_WIDTH = 4.2, 1.5


def plot_score_panels(
    weights: Tensor,
    mask: MaskLike | None = None,
    *,
    batch: Indices = 0,
    head: Indices = "all",
    q_offset: int | Tensor = 0,
    tokens: Tokens | None = None,
    kv_tokens: Tokens | None = None,
    bands: bool = True,
    title: str | None = None,
) -> Figure:
    """Draws attention weights of several heads, a heat map for each, on one scale.

    Args:
        weights: ``float[B, H, q_len, kv_len]``, as for :func:`flexmask.plotting.mpl.plot_scores`.
        mask: what it hides is drawn as hidden, instead of as a weight of 0.
        batch: which sequences: an index, a list of them, or ``"all"``.
        head: which heads, in the same way.
        q_offset: position of the first query.
        tokens: labels of the queries, and of the keys unless ``kv_tokens`` is given: a list, or a text of words.
        kv_tokens: labels of the keys.
        bands: whether documents, prefix trees and padding are shown along the edges.
        title: instead of the mask's text.
    """
    labels: LabelOptions = {"q_offset": q_offset, "tokens": tokens, "kv_tokens": kv_tokens, "bands": bands}
    return draw_sheet(score_sheet(weights, mask, batch=batch, head=head, **labels), title=title)


def save_sheet(shown: Sheet, path: str | Path, *, dpi: int = DPI, **frame: Unpack[FrameOptions]) -> None:
    """Writes a sheet as PNG, SVG or PDF, as the ending of ``path`` says; the bytes depend on nothing but what is given.

    Args:
        shown: the sheet.
        path: the file.
        dpi: pixels of an inch in a PNG.
        **frame: as for :func:`draw_sheet`.

    Raises:
        RenderError: another ending.
    """
    write(draw_sheet(shown, **frame), path, shown.text, dpi)


def draw_sheet(shown: Sheet, *, title: str | None = None, legend: bool = True, width: float | None = None) -> Figure:
    """Draws a sheet on a new figure; ``width`` is that of the cells of each panel, in inches."""
    check_frame(title, width)
    with style():
        return _drawn(shown, title, legend, width)


def _drawn(shown: Sheet, title: str | None, legend: bool, asked: float | None) -> Figure:
    last = shown.pictures[-1]
    width, height = fit(last, SQUARE, LONGEST, asked)
    label_width = max(NUMBER_CHARACTER * len(f"{last.q_offset + last.q_len:,}"), token_room(last.q_tokens)) + 0.1
    wide = max(label_width + width + band_room(last, "q"), PANEL_WIDTH)
    titles = [
        join_lines(_words(text, picture), wide / PANEL_CHARACTER, "  ·  ")
        for text, picture in zip(shown.titles, shown.pictures, strict=True)
    ]
    above = PANEL_LINE * max(map(len, titles)) + token_room(last.kv_tokens) + 0.2
    high = above + height + band_room(last, "kv")
    rows = -(-len(shown.pictures) // shown.columns)
    across, down = (count * size + (count - 1) * GAP for count, size in ((shown.columns, wide), (rows, high)))
    text_width = max(across, TEXT_WIDTH)
    lines = title_lines(shown.text, int(text_width / TITLE_CHARACTER)) if title is None else title.split("\n")
    said = join_lines([*notes(last, alone=False), *filter(None, [first_term_note(last)])], text_width / NOTE_CHARACTER, "  ·  ")
    entries, columns = entries_of(shown.pictures, int(text_width / NOTE_CHARACTER))
    top, bottom = MARGIN + TITLE_LINE * len(lines) + 0.1, MARGIN + LEGEND_LINE * (len(said) + legend_lines(entries, columns))
    size = (text_width + 2 * MARGIN, top + down + bottom)
    figure = new_figure(*size)
    family = "monospace" if title is None else None
    corner = (MARGIN / size[0], 1 - MARGIN / size[1])
    figure.text(*corner, "\n".join(lines), va="top", fontsize=9, fontfamily=family, color="black", parse_math=False)
    for place, (picture, words) in enumerate(zip(shown.pictures, titles, strict=True)):
        row, column = divmod(place, shown.columns)
        left = MARGIN + column * (wide + GAP) + label_width
        low = size[1] - top - row * (high + GAP) - above - height
        ax = figure.add_axes((left / size[0], low / size[1], width / size[0], height / size[1]))
        draw_cells(picture, ax)
        label_axes(picture, ax, names=False)
        draw_bands(picture, ax)
        ax.set_title("\n".join(words), loc="left", fontsize=7.5, color=INK, parse_math=False)
    if legend:
        below = figure.legend(
            handles=entries,
            ncols=columns,
            title="\n".join(said),
            loc="upper left",
            bbox_to_anchor=(MARGIN / size[0], (bottom - 0.08) / size[1]),
            **LEGEND,
        )
        below.get_title().set(color=FAINT, parse_math=False)
    return figure


def _words(title: str, shown: Picture) -> list[str]:
    """The title of a panel, and of a mask how much is visible."""
    visible = [visible_text(shown)] if shown.categories[0].role == "visible" and shown.scores is None else []
    return [part for part in (title, *visible) if part]
