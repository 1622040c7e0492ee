"""Pictures with matplotlib: PNG and SVG for papers and pull requests, always the same bytes for the same picture.

Nothing here touches pyplot, so drawing opens no window and changes no global state.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.transforms import ScaledTranslation
from numpy.typing import NDArray

from flexmask.errors import RenderError
from flexmask.render.caption import notes, numbered, packed, title_lines
from flexmask.render.picture import EMPTY, FULL, PARTIAL, UNKNOWN, Picture, picture

if TYPE_CHECKING:
    from torch import Tensor

    from flexmask.algebra import Mask

__all__ = ["ENDINGS", "draw", "plot", "save"]

#: The files that can be written.
ENDINGS = (".png", ".svg")

# After Okabe and Ito: told apart with any common colour blindness, and by lightness alone in print.
VISIBLE = "#0072B2"
IN_PARTIAL = "#56B4E9"
WASTED = "#FBE3B8"
HIDDEN = "#EFEFEF"
UNDECIDED = "#F2D5E4"
INK = "#333333"
FAINT = "#666666"

DPI = 200
#: Cells along the longer side up to which each is drawn as a square of its own.
MOST_SQUARES = 64
#: Inches: a square of a small mask, the longer side of the others, and the least that the shorter side may have.
SQUARE, LONGEST, SHORTEST = 0.24, 5.12, 0.15
#: Inches: around the axes, a line of the title and of the legend, and the characters of title, notes and axis numbers.
MARGIN, ABOVE, TITLE_LINE, LEGEND_LINE = 0.15, 0.5, 0.165, 0.175
TITLE_CHARACTER, NOTE_CHARACTER, NUMBER_CHARACTER = 0.0755, 0.0605, 0.0625
#: Inches that text may take beside a narrow mask.
TEXT_WIDTH = 4.2
#: Numbers along an axis at most, where there is not one for every index.
MOST_NUMBERS = 9

STYLE: dict[str, Any] = {"font.family": ["DejaVu Sans"], "svg.hashsalt": "flexmask", "svg.fonttype": "path"}


def plot(
    mask: Mask,
    q_len: int,
    kv_len: int | None = None,
    *,
    batch: int = 0,
    head: int = 0,
    block_size: int | tuple[int, int] | None = None,
    q_offset: int | Tensor = 0,
    ax: Axes | None = None,
    title: str | None = None,
) -> Axes:
    """Draws a mask: queries down, keys across, coloured where the query may attend to the key.

    Args:
        mask: the mask.
        q_len: number of queries.
        kv_len: number of keys, by default ``q_len``.
        batch: which sequence of the batch.
        head: which head.
        block_size: also draws the block grid: queries and keys in a block, or one number for both.
        q_offset: position of the first query.
        ax: where to draw; by default a new figure of a fitting size.
        title: instead of the mask's text.

    Returns:
        The axes, with queries and keys as units; ``axes.figure.savefig(...)`` writes them.
    """
    shown = picture(mask, q_len, kv_len, batch=batch, head=head, block_size=block_size, q_offset=q_offset)
    return draw(shown, ax=ax, title=title)


def save(shown: Picture, path: str | Path, *, title: str | None = None) -> None:
    """Writes a picture as PNG or SVG, as the ending of ``path`` says; the bytes depend on nothing but the picture.

    Raises:
        RenderError: another ending.
    """
    ending = Path(path).suffix.lower()
    if ending not in ENDINGS:
        raise RenderError(f"a picture is written as {' or '.join(ENDINGS)}, got the file {str(path)!r}")
    about = {"Software": None} if ending == ".png" else {"Date": None, "Creator": None, "Title": shown.title}
    with matplotlib.style.context(["default", STYLE]):
        figure = draw(shown, title=title).get_figure(root=True)
        assert figure is not None
        figure.savefig(path, format=ending[1:], dpi=DPI, metadata=about, bbox_inches="tight", pad_inches=MARGIN)


def draw(shown: Picture, *, ax: Axes | None = None, title: str | None = None) -> Axes:
    """Draws a picture on given axes, or on those of a new figure."""
    if ax is None:
        with matplotlib.style.context(["default", STYLE]):
            return _drawn(shown, _new_axes(shown, title), title)
    return _drawn(shown, ax, title)


def _new_axes(shown: Picture, title: str | None) -> Axes:
    """Axes of a new figure that has room for the picture, its title and its legend."""
    longer = max(shown.q_len, shown.kv_len)
    scale = min(SQUARE, LONGEST / longer) if longer <= MOST_SQUARES else LONGEST / longer
    width, height = (max(length * scale, SHORTEST) for length in (shown.kv_len, shown.q_len))
    text_width = max(width, TEXT_WIDTH)
    above = ABOVE + TITLE_LINE * len(_title(shown, title, text_width))
    handles, columns = _legend(shown)
    below = MARGIN + LEGEND_LINE * (len(_notes(shown, text_width)) + -(-len(handles) // columns))
    left = 3 * MARGIN + NUMBER_CHARACTER * len(f"{shown.q_offset + shown.q_len:,}")
    size = (left + text_width + MARGIN, above + height + below)
    figure = Figure(figsize=size, dpi=DPI)
    FigureCanvasAgg(figure)
    return figure.add_axes((left / size[0], below / size[1], width / size[0], height / size[1]))


def _drawn(shown: Picture, ax: Axes, title: str | None) -> Axes:
    squares = shown.every_cell and max(shown.q_len, shown.kv_len) <= MOST_SQUARES
    ax.set(xlim=(0, shown.kv_len), ylim=(shown.q_len, 0), facecolor=HIDDEN)
    ax.set_aspect("equal" if _to_scale(shown) else "auto")
    _draw_blocks(shown, ax, PARTIAL, WASTED)
    color = VISIBLE if shown.blocks is None else IN_PARTIAL
    if squares:
        _draw_rectangles(ax, _runs(shown.visible > 0), (1, 1), color)
    else:
        if shown.estimated is not None:
            _draw_pixels(shown, ax, shown.estimated.astype(np.float32), UNDECIDED)
        _draw_pixels(shown, ax, shown.visible, color)
    _draw_blocks(shown, ax, FULL, VISIBLE)
    _draw_blocks(shown, ax, UNKNOWN, UNDECIDED)
    _draw_lines(shown, ax, squares)
    _label_axes(shown, ax, squares)
    _caption(shown, ax, title)
    return ax


def _to_scale(shown: Picture) -> bool:
    """Whether the shorter side can be drawn to the scale of the longer one and still be seen."""
    return min(shown.q_len, shown.kv_len) * LONGEST >= max(shown.q_len, shown.kv_len) * SHORTEST


def _runs(marked: NDArray[np.bool_]) -> list[tuple[int, int, int]]:
    """The runs of marked places in each row: row, first column, the column behind the last."""
    edges = np.diff(marked.astype(np.int8), prepend=0, append=0, axis=1)
    rows, starts = (edges == 1).nonzero()
    stops = (edges == -1).nonzero()[1]
    return list(zip(rows.tolist(), starts.tolist(), stops.tolist(), strict=True))


def _draw_rectangles(ax: Axes, runs: Iterable[tuple[int, int, int]], unit: tuple[int, int], color: str) -> None:
    high, wide = unit
    corners = []
    for row, start, stop in runs:
        top, left, bottom, right = row * high, start * wide, (row + 1) * high, stop * wide
        corners.append([(left, top), (right, top), (right, bottom), (left, bottom)])
    ax.add_collection(PolyCollection(corners, facecolors=color, edgecolors="none", antialiaseds=False), autolim=False)


def _draw_blocks(shown: Picture, ax: Axes, kind: int, color: str) -> None:
    if shown.blocks is not None and shown.block_size is not None:
        _draw_rectangles(ax, _runs(shown.blocks == kind), shown.block_size, color)


def _draw_pixels(shown: Picture, ax: Axes, fraction: NDArray[np.float32], color: str) -> None:
    """An image that shows the fraction by its opacity; what is not 0 is never too faint to be seen."""
    image = np.empty((*fraction.shape, 4), dtype=np.float32)
    image[..., :3] = to_rgb(color)
    image[..., 3] = _opacity(fraction)
    bottom, right = fraction.shape[0] * shown.step[0], fraction.shape[1] * shown.step[1]
    limits = ax.get_xlim(), ax.get_ylim()
    ax.imshow(image, extent=(0, right, bottom, 0), aspect=ax.get_aspect(), zorder=1)
    ax.set(xlim=limits[0], ylim=limits[1])


def _opacity(fraction: Any) -> Any:
    return np.where(fraction > 0, 0.3 + 0.7 * fraction, 0)


def _draw_lines(shown: Picture, ax: Axes, squares: bool) -> None:
    if squares:
        width = min(1.2, 12 / max(shown.q_len, shown.kv_len))
        _draw_grid(shown, ax, (1, 1), color="white", linewidth=width)
    if shown.blocks is not None and shown.block_size is not None:
        width = min(1.0, 10 / max(shown.blocks.shape))
        _draw_grid(shown, ax, shown.block_size, color=INK, linewidth=width)
    for spine in ax.spines.values():
        spine.set(color=INK if shown.blocks is not None or not squares else "white", linewidth=0.8)


def _draw_grid(shown: Picture, ax: Axes, step: tuple[int, int], *, color: str, linewidth: float) -> None:
    lines: list[list[tuple[int, int]]] = [[(0, y), (shown.kv_len, y)] for y in range(step[0], shown.q_len, step[0])]
    lines += [[(x, 0), (x, shown.q_len)] for x in range(step[1], shown.kv_len, step[1])]
    ax.add_collection(LineCollection(lines, colors=color, linewidths=linewidth, zorder=2), autolim=False)


def _label_axes(shown: Picture, ax: Axes, squares: bool) -> None:
    ax.apply_aspect()
    box, points = ax.get_window_extent(), 72 / ax.figure.dpi
    block = shown.block_size if shown.blocks is not None else None
    most = {
        "x": box.width * points / (72 * NUMBER_CHARACTER * len(f"{shown.kv_len:,}") + 6),
        "y": box.height * points / 9,
    }
    if shown.q_len == shown.kv_len:
        most = dict.fromkeys(most, min(most.values()))
    across, down = (
        numbered(length, room if length <= room else min(room, MOST_NUMBERS), block and block[axis])
        for length, room, axis in ((shown.kv_len, most["x"], 1), (shown.q_len, most["y"], 0))
    )
    ax.xaxis.tick_top()
    ax.xaxis.set_label_position("top")
    ax.set_xticks([x + 0.5 for x in across], [f"{x:,}" for x in across])
    ax.set_yticks([y + 0.5 for y in down], [f"{y + shown.q_offset:,}" for y in down])
    ax.tick_params(labelsize="x-small", colors=FAINT, labelcolor=INK, length=0 if squares else 2.5, width=0.6, pad=2)
    ax.set_xlabel("key index", fontsize="small", color=INK)
    ax.set_ylabel("query index", fontsize="small", color=INK)


def _caption(shown: Picture, ax: Axes, title: str | None) -> None:
    figure = ax.get_figure(root=True)
    assert figure is not None
    width = max(ax.get_window_extent().width / figure.dpi, TEXT_WIDTH)
    lines = _title(shown, title, width)
    family = "monospace" if title is None else None
    ax.set_title("\n".join(lines), loc="left", fontsize=9, fontfamily=family, color="black", parse_math=False)
    handles, columns = _legend(shown)
    legend = ax.legend(
        handles=handles,
        ncols=columns,
        title="\n".join(_notes(shown, width)),
        loc="upper left",
        bbox_to_anchor=(0, 0),
        bbox_transform=ax.transAxes + ScaledTranslation(0, -4 / 72, figure.dpi_scale_trans),
        alignment="left",
        frameon=False,
        fontsize=7.5,
        title_fontsize=7.5,
        borderpad=0,
        borderaxespad=0,
        handlelength=1.1,
        handleheight=1.1,
        handletextpad=0.6,
        labelspacing=0.35,
        columnspacing=1.4,
        labelcolor=INK,
    )
    legend.get_title().set(color=FAINT, parse_math=False)


def _title(shown: Picture, title: str | None, width: float) -> list[str]:
    return title_lines(shown.title, int(width / TITLE_CHARACTER)) if title is None else title.split("\n")


def _notes(shown: Picture, width: float) -> list[str]:
    """The notes in lines that fit into a width in inches."""
    said = [*notes(shown), *([] if _to_scale(shown) else ["not to scale"])]
    return packed(said, width / NOTE_CHARACTER, "  ·  ")


def _legend(shown: Picture) -> tuple[list[Patch], int]:
    """What the colours say, and in how many columns."""

    def patch(color: str, label: str, opacity: float = 1.0) -> Patch:
        red, green, blue = (opacity * x + (1 - opacity) * y for x, y in zip(to_rgb(color), to_rgb(HIDDEN), strict=True))
        return Patch(facecolor=(red, green, blue), edgecolor=FAINT, linewidth=0.4, label=label)

    if shown.blocks is not None:
        count = [int((shown.blocks == kind).sum()) for kind in range(4)]
        patches = []
        if count[FULL]:
            patches.append(patch(VISIBLE, f"full blocks ({count[FULL]:,})"))
        if count[PARTIAL]:
            patches.append(patch(IN_PARTIAL, f"partial blocks ({count[PARTIAL]:,}), visible cells"))
            patches.append(patch(WASTED, "partial blocks, hidden cells: computed, then discarded"))
        if count[EMPTY]:
            patches.append(patch(HIDDEN, f"empty blocks ({count[EMPTY]:,}), skipped"))
        if count[UNKNOWN]:
            patches.append(patch(UNDECIDED, f"blocks of unknown kind ({count[UNKNOWN]:,})"))
        columns = 1
    elif shown.step == (1, 1):
        patches = [patch(VISIBLE, "visible"), patch(HIDDEN, "hidden")]
        columns = 3
    else:
        shades = {"none visible": 0.0, "25 %": 0.25, "50 %": 0.5, "75 %": 0.75, "all": 1.0}
        patches = [patch(VISIBLE, label, float(_opacity(fraction))) for label, fraction in shades.items()]
        columns = 6
    if shown.estimated is not None:
        patches.append(patch(UNDECIDED, "estimated"))
    return patches, columns
