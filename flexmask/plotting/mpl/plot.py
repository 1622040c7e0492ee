"""Pictures with matplotlib: PNG, SVG and PDF for papers and pull requests, always the same bytes for the same picture.

Nothing here touches pyplot, so drawing opens no window and changes no global state.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import fontManager
from matplotlib.transforms import ScaledTranslation

from flexmask._checks import kind_of
from flexmask.errors import OperandError
from flexmask.plotting.caption import check_frame, first_term_note, join_lines, notes, title_lines
from flexmask.plotting.files import picture_suffix
from flexmask.plotting.labels import FrameOptions, LabelOptions, Tokens
from flexmask.plotting.mpl.drawing import MAX_SQUARES, draw_cells
from flexmask.plotting.mpl.edges import NUMBER_CHARACTER, band_room, draw_bands, label_axes, token_room
from flexmask.plotting.mpl.legend import LEGEND, entries_of, legend_lines
from flexmask.plotting.palette import FAINT
from flexmask.plotting.raster import Picture
from flexmask.plotting.scores import score_picture

if TYPE_CHECKING:
    from torch import Tensor

    from flexmask.tracing.as_mask import MaskLike

#: Pixels of an inch.
DPI = 200
#: Inches: a square of a small mask, also with a number in it, the longer side of the others, and the least that the shorter
#: side may have.
SQUARE, NUMBERED, LONGEST, SHORTEST = 0.24, 0.32, 5.12, 0.15
#: Inches: around the axes, a line of the title and of the legend, and the characters of title and notes.
MARGIN, ABOVE, TITLE_LINE, LEGEND_LINE = 0.15, 0.5, 0.165, 0.175
TITLE_CHARACTER, NOTE_CHARACTER = 0.0755, 0.0605
#: Inches that text may take next to a narrow mask, and below one on narrow axes of the user.
TEXT_WIDTH, LEAST_WIDTH = 4.2, 1.2
#: Fonts for the tokens of scripts that DejaVu Sans does not have, of which those are used that are installed.
SCRIPTS = ["Noto Sans CJK JP", "Noto Sans CJK SC", "Source Han Sans", "WenQuanYi Zen Hei", "PingFang SC", "Hiragino Sans"]
SCRIPTS += ["Microsoft YaHei", "Yu Gothic", "Malgun Gothic", "Noto Sans Devanagari", "Noto Sans Arabic", "Noto Emoji"]

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


def save(shown: Picture, path: str | Path, *, dpi: int = DPI, **frame: Unpack[FrameOptions]) -> None:
    """Writes a picture as PNG, SVG or PDF, as the ending of ``path`` says; the bytes depend on nothing but what is given.

    Args:
        shown: the picture.
        path: the file.
        dpi: pixels of an inch in a PNG.
        **frame: as for :func:`draw`.

    Raises:
        RenderError: another ending.
    """
    with style():
        write(_figure(draw(shown, **frame)), path, shown.text, dpi)


def write(figure: Figure, path: str | Path, about: str, dpi: int = DPI) -> None:
    """Writes a figure that was drawn in the style of pictures, with a text that says what it shows."""
    suffix = picture_suffix(path, (".png", ".svg", ".pdf"))
    words = ABOUT[suffix] if suffix == ".png" else {**ABOUT[suffix], "Title": about}
    with style():
        figure.savefig(path, format=suffix[1:], dpi=dpi, metadata=words, bbox_inches="tight", pad_inches=MARGIN)


@contextmanager
def style() -> Iterator[None]:
    """The settings of all pictures, whatever those of the user."""
    with matplotlib.style.context(["default", STYLE, {"font.family": _families()}]):
        yield


@cache
def _families() -> list[str]:
    installed = set(fontManager.get_font_names())
    return ["DejaVu Sans", *(name for name in SCRIPTS if name in installed)]


def _figure(ax: Axes) -> Figure:
    figure = ax.get_figure(root=True)
    assert isinstance(figure, Figure)
    return figure


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


def new_figure(width: float, height: float) -> Figure:
    """A figure of a size in inches."""
    figure = Figure(figsize=(width, height), dpi=DPI)
    FigureCanvasAgg(figure)
    return figure


def fit(shown: Picture, square: float, longest: float, width: float | None) -> tuple[float, float]:
    """Width and height of the cells in inches, with the sizes of a square and of the longer side at most, or of a width."""
    if width is not None:
        return width, max(width * shown.q_len / shown.kv_len, SHORTEST)
    longer = max(shown.q_len, shown.kv_len)
    scale = min(square, longest / longer) if longer <= MAX_SQUARES else longest / longer
    return max(shown.kv_len * scale, SHORTEST), max(shown.q_len * scale, SHORTEST)


def _new_axes(shown: Picture, title: str | None, asked: float | None) -> Axes:
    """Axes of a new figure that has room for the picture, its labels, its title and its legend."""
    width, height = fit(shown, SQUARE if shown.scores is None else NUMBERED, LONGEST, asked)
    text_width = max(width, TEXT_WIDTH)
    above = ABOVE + TITLE_LINE * len(_title(shown, title, text_width)) + token_room(shown.kv_tokens)
    handles, columns = entries_of([shown], int(text_width / NOTE_CHARACTER))
    below = MARGIN + band_room(shown, "kv") + LEGEND_LINE * (len(_notes(shown, text_width)) + legend_lines(handles, columns))
    left = 3 * MARGIN + max(NUMBER_CHARACTER * len(f"{shown.q_offset + shown.q_len:,}"), token_room(shown.q_tokens))
    size = (left + text_width + MARGIN + band_room(shown, "q"), above + height + below)
    return new_figure(*size).add_axes((left / size[0], below / size[1], width / size[0], height / size[1]))


def _drawn(shown: Picture, ax: Axes, title: str | None, least: float, legend: bool) -> Axes:
    """Draws on axes, with text as wide as they are, or as ``least`` in inches."""
    width = max(ax.get_position(original=True).width * _figure(ax).get_figwidth(), least)
    draw_cells(shown, ax)
    ax.set_aspect("equal" if _to_scale(shown) else "auto")
    label_axes(shown, ax)
    draw_bands(shown, ax)
    _caption(shown, ax, title, width)
    if legend:
        _explain(shown, ax, width)
    return ax


def _to_scale(shown: Picture) -> bool:
    """Whether the shorter side can be drawn to the scale of the longer one and still be seen."""
    return min(shown.q_len, shown.kv_len) * LONGEST >= max(shown.q_len, shown.kv_len) * SHORTEST


def _caption(shown: Picture, ax: Axes, title: str | None, width: float) -> None:
    lines = _title(shown, title, width)
    family = "monospace" if title is None else None
    ax.set_title("\n".join(lines), loc="left", fontsize=9, fontfamily=family, color="black", parse_math=False)


def _explain(shown: Picture, ax: Axes, width: float) -> None:
    """Writes the notes and the legend."""
    handles, columns = entries_of([shown], int(width / NOTE_CHARACTER))
    below = ScaledTranslation(0, -4 / 72 - band_room(shown, "kv"), _figure(ax).dpi_scale_trans)
    legend = ax.legend(
        handles=handles,
        ncols=columns,
        title="\n".join(_notes(shown, width)),
        loc="upper left",
        bbox_to_anchor=(0, 0),
        bbox_transform=ax.transAxes + below,
        **LEGEND,
    )
    legend.get_title().set(color=FAINT, parse_math=False)


def _title(shown: Picture, title: str | None, width: float) -> list[str]:
    return title_lines(shown.text, int(width / TITLE_CHARACTER)) if title is None else title.split("\n")


def _notes(shown: Picture, width: float) -> list[str]:
    """The notes in lines that fit into a width in inches."""
    said = [*notes(shown), *([] if _to_scale(shown) else ["not to scale"]), *filter(None, [first_term_note(shown)])]
    return join_lines(said, width / NOTE_CHARACTER, "  ·  ")
