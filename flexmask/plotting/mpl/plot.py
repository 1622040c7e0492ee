"""Pictures and sheets with matplotlib: PNG, SVG and PDF for papers and pull requests, always the same bytes for the same mask.

Nothing here touches pyplot, so drawing opens no window and changes no global state.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Unpack

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import fontManager
from matplotlib.transforms import ScaledTranslation
from torch import Tensor

from flexmask._checks import kind_of
from flexmask.errors import OperandError
from flexmask.plotting.annotations import FrameOptions, LabelOptions, Tokens
from flexmask.plotting.caption import check_frame, first_term_note, join_lines, notes, panel_notes, picture_suffix, title_lines
from flexmask.plotting.mpl.drawing import (
    band_room,
    draw_cells,
    draw_legend,
    entries_of,
    label_axes,
    label_room,
    legend_lines,
    token_room,
)
from flexmask.plotting.palette import INK
from flexmask.plotting.raster import Picture
from flexmask.plotting.scores import score_picture, score_sheet
from flexmask.plotting.sheet import Indices, Sheet
from flexmask.tracing.trace import MaskLike

#: Pixels of an inch.
DPI = 200
#: Inches: a square of a small mask, also with a number in it, the longer side of the others, and the least that the shorter
#: side may have; a square of a panel, and its longer side.
SQUARE, NUMBERED, LONGEST, SHORTEST = 0.24, 0.32, 5.12, 0.15
PANEL_SQUARE, PANEL_LONGEST = 0.15, 2.4
#: Inches: around all, above the cells, between panels, and a line of the title, of that of a panel and of the legend.
MARGIN, ABOVE, GAP, TITLE_LINE, PANEL_LINE, LEGEND_LINE = 0.15, 0.5, 0.25, 0.165, 0.14, 0.175
#: Inches: a character of the title, of that of a panel and of the notes.
TITLE_CHARACTER, PANEL_CHARACTER, NOTE_CHARACTER = 0.0755, 0.06, 0.0605
#: Inches that text may take next to a narrow mask, below one on narrow axes of the user, and at a panel.
TEXT_WIDTH, LEAST_WIDTH, PANEL_WIDTH = 4.2, 1.2, 1.5
#: Fonts for the tokens of scripts that DejaVu Sans does not have, of which those are used that are installed.
SCRIPTS = ["Noto Sans CJK JP", "Noto Sans CJK SC", "Source Han Sans", "WenQuanYi Zen Hei", "PingFang SC", "Hiragino Sans"]
SCRIPTS += ["Microsoft YaHei", "Yu Gothic", "Malgun Gothic", "Noto Sans Devanagari", "Noto Sans Arabic", "Noto Emoji"]

SEPARATOR = "  ·  "  # of notes in a line
#: What files say of how they were made: nothing that differs between two runs or versions.
ABOUT: dict[str, dict[str, None]] = {
    ".png": {"Software": None},
    ".svg": {"Date": None, "Creator": None},
    ".pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}
STYLE: dict[str, Any] = {
    "hatch.linewidth": 0.5,
    "svg.hashsalt": "flexmask",
    "svg.fonttype": "none",  # half the size, and text that LaTeX and editors set in their own fonts
}


@contextmanager
def style() -> Iterator[None]:
    """The settings of all pictures, whatever those of the user."""
    installed = fontManager.get_font_names()
    families = ["DejaVu Sans", *(name for name in SCRIPTS if name in installed)]
    with matplotlib.style.context(["default", STYLE, {"font.family": families}]):
        yield


def plot_scores(
    weights: Tensor,
    mask: MaskLike | None = None,
    *,
    batch: int = 0,
    head: int | None = None,
    q_offset: int | Tensor = 0,
    tokens: Tokens | None = None,
    kv_tokens: Tokens | None = None,
    bands: bool = True,
    ax: Axes | None = None,
    title: str | None = None,
) -> Axes:
    """Draws attention weights as a heat map, of one head or the mean of all, with numbers where they fit.

    Args:
        weights: ``float[B, H, q_len, kv_len]``, as :func:`flexmask.backends.attention_weights` and
            :meth:`flexmask.MultiheadFlexAttention.attention_weights` give them.
        mask: what it hides is drawn as hidden, instead of as a weight of 0.
        batch: which sequence.
        head: which head; None for the mean of all.
        q_offset: position of the first query.
        tokens: labels of the queries, and of the keys unless ``kv_tokens`` is given: a list, or a text of words.
        kv_tokens: labels of the keys.
        bands: whether documents, prefix trees and padding are shown along the edges.
        ax: where to draw; by default a new figure of a fitting size.
        title: instead of the mask's text.

    Returns:
        The axes, with queries and keys as units.
    """
    labels: LabelOptions = {"q_offset": q_offset, "tokens": tokens, "kv_tokens": kv_tokens, "bands": bands}
    return draw(score_picture(weights, mask, batch=batch, head=head, **labels), ax=ax, title=title)


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


@style()
def save(shown: Picture | Sheet, path: str | Path, *, dpi: int = DPI, **frame: Unpack[FrameOptions]) -> None:
    """Writes a picture or a sheet as PNG, SVG or PDF, as the ending of ``path`` says.

    The bytes depend on nothing but what is given.

    Args:
        shown: the picture or the sheet.
        path: the file.
        dpi: pixels of an inch in a PNG.
        **frame: as for :func:`draw` and :func:`draw_sheet`.

    Raises:
        RenderError: another ending.
    """
    suffix = picture_suffix(path, (".png", ".svg", ".pdf"))
    words = ABOUT[suffix] if suffix == ".png" else {**ABOUT[suffix], "Title": shown.text}
    figure = draw_sheet(shown, **frame) if isinstance(shown, Sheet) else draw(shown, **frame).figure.figure
    figure.savefig(path, format=suffix[1:], dpi=dpi, metadata=words, bbox_inches="tight", pad_inches=MARGIN)


def draw(
    shown: Picture, *, ax: Axes | None = None, title: str | None = None, legend: bool = True, width: float | None = None
) -> Axes:
    """Draws a picture on given axes, or on those of a new figure.

    Args:
        shown: the picture.
        ax: the axes.
        title: instead of the mask's text.
        legend: whether the notes and the meaning of the colors are below the cells.
        width: inches that the cells take across on a new figure; by default a size that suits their number.
    """
    check_frame(title, width)
    if ax is not None and not isinstance(ax, Axes):
        raise OperandError(f"ax must be the Axes of a figure of matplotlib, got {kind_of(ax)}")
    if ax is None:
        with style():
            return _drawn(shown, _new_axes(shown, title, width), title, TEXT_WIDTH, legend)
    return _drawn(shown, ax, title, LEAST_WIDTH, legend)


def _fit(shown: Picture, square: float, longest: float, width: float | None) -> tuple[float, float]:
    """Width and height of the cells in inches, with the sizes of a square and of the longer side at most, or of a width."""
    if width is not None:
        return width, max(width * shown.q_len / shown.kv_len, SHORTEST)
    scale = min(square, longest / max(shown.q_len, shown.kv_len))
    return max(shown.kv_len * scale, SHORTEST), max(shown.q_len * scale, SHORTEST)


def _new_figure(width: float, height: float) -> Figure:
    """A figure of a size in inches."""
    figure = Figure(figsize=(width, height), dpi=DPI)
    FigureCanvasAgg(figure)
    return figure


def _new_axes(shown: Picture, title: str | None, asked: float | None) -> Axes:
    """Axes of a new figure that has room for the picture, its labels, its title and its legend."""
    width, height = _fit(shown, SQUARE if shown.scores is None else NUMBERED, LONGEST, asked)
    text_width = max(width, TEXT_WIDTH)
    above = ABOVE + TITLE_LINE * len(_title(shown, title, text_width)) + token_room(shown.kv_tokens)
    entries, columns = entries_of([shown], int(text_width / NOTE_CHARACTER))
    below = MARGIN + band_room(shown, "kv") + LEGEND_LINE * (len(_notes(shown, text_width)) + legend_lines(entries, columns))
    left = 3 * MARGIN + label_room(shown)
    size = (left + text_width + MARGIN + band_room(shown, "q"), above + height + below)
    return _new_figure(*size).add_axes((left / size[0], below / size[1], width / size[0], height / size[1]))


def _drawn(shown: Picture, ax: Axes, title: str | None, least: float, legend: bool) -> Axes:
    """Draws on axes, with text as wide as they are, or as ``least`` in inches."""
    root = ax.figure.figure  # that of a subfigure is the figure which it is a part of
    width = max(ax.get_position(original=True).width * root.get_figwidth(), least)
    draw_cells(shown, ax)
    ax.set_aspect("equal" if _to_scale(shown) else "auto")
    label_axes(shown, ax)
    ax.set_title("\n".join(_title(shown, title, width)), loc="left", **_font(title))
    if legend:
        below = ScaledTranslation(0, -4 / 72 - band_room(shown, "kv"), root.dpi_scale_trans)
        entries = entries_of([shown], int(width / NOTE_CHARACTER))
        draw_legend(ax, entries, _notes(shown, width), (0, 0), bbox_transform=ax.transAxes + below)
    return ax


@style()
def draw_sheet(shown: Sheet, *, title: str | None = None, legend: bool = True, width: float | None = None) -> Figure:
    """Draws a sheet on a new figure; ``width`` is that of the cells of each panel, in inches."""
    check_frame(title, width)
    last = shown.pictures[-1]
    width, height = _fit(last, PANEL_SQUARE, PANEL_LONGEST, width)
    label_width = label_room(last) + 0.1
    wide = max(label_width + width + band_room(last, "q"), PANEL_WIDTH)
    titles = [
        join_lines(panel_notes(text, picture), wide / PANEL_CHARACTER, SEPARATOR)
        for text, picture in zip(shown.titles, shown.pictures, strict=True)
    ]
    above = PANEL_LINE * max(map(len, titles)) + token_room(last.kv_tokens) + 0.2
    high = above + height + band_room(last, "kv")
    rows = -(-len(shown.pictures) // shown.columns)
    across, down = (count * size + (count - 1) * GAP for count, size in ((shown.columns, wide), (rows, high)))
    text_width = max(across, TEXT_WIDTH)
    lines, said = _title(shown, title, text_width), _notes(last, text_width, alone=False)
    entries, columns = entries_of(shown.pictures, int(text_width / NOTE_CHARACTER))
    top, bottom = MARGIN + TITLE_LINE * len(lines) + 0.1, MARGIN + LEGEND_LINE * (len(said) + legend_lines(entries, columns))
    size = (text_width + 2 * MARGIN, top + down + bottom)
    figure = _new_figure(*size)
    figure.text(MARGIN / size[0], 1 - MARGIN / size[1], "\n".join(lines), va="top", **_font(title))
    for place, (picture, words) in enumerate(zip(shown.pictures, titles, strict=True)):
        row, column = divmod(place, shown.columns)
        left = MARGIN + column * (wide + GAP) + label_width
        low = size[1] - top - row * (high + GAP) - above - height
        ax = figure.add_axes((left / size[0], low / size[1], width / size[0], height / size[1]))
        draw_cells(picture, ax)
        label_axes(picture, ax, names=False)
        ax.set_title("\n".join(words), loc="left", fontsize=7.5, color=INK, parse_math=False)
    if legend:
        draw_legend(figure, (entries, columns), said, (MARGIN / size[0], (bottom - 0.08) / size[1]))
    return figure


def _to_scale(shown: Picture) -> bool:
    """Whether the shorter side can be drawn to the scale of the longer one and still be seen."""
    return min(shown.q_len, shown.kv_len) * LONGEST >= max(shown.q_len, shown.kv_len) * SHORTEST


def _font(title: str | None) -> dict[str, Any]:
    """How a title is written: the mask's text, or that of the user."""
    return {"fontsize": 9, "fontfamily": "monospace" if title is None else None, "color": "black", "parse_math": False}


def _title(shown: Picture | Sheet, title: str | None, width: float) -> list[str]:
    return title_lines(shown.text, int(width / TITLE_CHARACTER)) if title is None else title.split("\n")


def _notes(shown: Picture, width: float, *, alone: bool = True) -> list[str]:
    """The notes in lines that fit into a width in inches; ``alone`` is False for a sheet."""
    said = [*notes(shown, alone=alone), *(["not to scale"] if alone and not _to_scale(shown) else [])]
    return join_lines([*said, *filter(None, [first_term_note(shown)])], width / NOTE_CHARACTER, SEPARATOR)
