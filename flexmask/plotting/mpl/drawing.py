"""A picture on matplotlib axes: its cells and blocks, and around them labels, bands and the legend of the colors.

Cells are rectangles of equal cells, else an image; attention weights are an image. Bands show documents, trees and padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from textwrap import TextWrapper
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, PathPatch, Rectangle
from matplotlib.path import Path
from matplotlib.transforms import ScaledTranslation
from numpy.typing import NDArray

from flexmask.plotting.annotations import PADDING, Band
from flexmask.plotting.caption import numbered
from flexmask.plotting.categories import count_text, is_detailed
from flexmask.plotting.palette import (
    FAINT,
    HIDDEN,
    IN_PARTIAL,
    INK,
    PADDED,
    STRETCHES,
    UNDECIDED,
    VISIBLE,
    WASTED,
    Look,
    looks_of,
)
from flexmask.plotting.raster import EMPTY, FULL, PARTIAL, UNKNOWN, Picture, Scores

#: Cells along the longer side up to which each is seen as a square of its own.
MAX_SQUARES = 64
#: Of longer masks, rectangles of equal cells up to which they are drawn as such, and pixels of a cell, so that none gets lost.
MAX_RECTANGLES, LEAST_PIXELS = 1024, 2
#: The roles that are drawn as the background of the axes.
BACKGROUND = ("hidden", "neither")
#: How much of the color is left to what empty blocks hide.
IN_EMPTY = 0.45


def squares(shown: Picture) -> bool:
    """Whether each cell is seen as a square."""
    return shown.every_cell and max(shown.q_len, shown.kv_len) <= MAX_SQUARES


def draw_cells(shown: Picture, ax: Axes) -> None:
    """Draws the cells and blocks of a picture, with queries and keys as units."""
    ax.set(xlim=(0, shown.kv_len), ylim=(shown.q_len, 0), facecolor=HIDDEN)
    if shown.scores is None:
        _draw_categories(shown, ax)
    else:
        _draw_scores(shown, shown.scores, ax)
    _draw_lines(shown, ax)


def _draw_scores(shown: Picture, scores: Scores, ax: Axes) -> None:
    _draw_image(shown, ax, _colored_scores(scores, shown.shares[0]))
    if squares(shown):
        _draw_rectangles(ax, rectangles_of(shown.cells > 0), (1, 1), UNSEEN)
        _draw_numbers(shown, scores, ax)


def _draw_categories(shown: Picture, ax: Axes) -> None:
    looks = looks_of(shown.categories)
    plain = not is_detailed(shown.categories)
    if shown.blocks is not None:
        looks = (Look(IN_PARTIAL, prominent=True), *looks[1:])
        if plain:
            _draw_blocks(shown, ax, PARTIAL, WASTED)
    areas = _areas(shown, ax, looks)
    for rectangles, look in areas:
        _draw_rectangles(ax, rectangles, (1, 1), look)
    if not areas:
        _draw_pixels(shown, ax, looks)
    _draw_blocks(shown, ax, FULL, VISIBLE)
    _draw_blocks(shown, ax, UNKNOWN, UNDECIDED)
    if not plain:
        _draw_blocks(shown, ax, EMPTY, "#FFFFFF", 1 - IN_EMPTY)


def _areas(shown: Picture, ax: Axes, looks: tuple[Look, ...]) -> list[tuple[NDArray[np.int64], Look]]:
    """The rectangles of each category and their look; none where an image is smaller, or shows what rectangles would not."""
    box, is_plain = ax.get_window_extent(), not squares(shown)
    if is_plain and (not shown.every_cell or min(box.width / shown.kv_len, box.height / shown.q_len) < LEAST_PIXELS):
        return []
    found = [
        (rectangles_of(shown.cells == number), Look(look.color) if is_plain else look)
        for number, (category, look) in enumerate(zip(shown.categories, looks, strict=True))
        if category.hides is not None or category.role not in BACKGROUND
    ]
    return [] if is_plain and sum(len(rectangles) for rectangles, _ in found) > MAX_RECTANGLES else found


def opacity(fraction: Any) -> Any:
    """How opaque a color is drawn for a share of a pixel: what is not 0 is never too faint to be seen."""
    return np.where(fraction > 0, 0.3 + 0.7 * fraction, 0)


def faded(color: str, share: float) -> str:
    """A color over the background of hidden cells."""
    red, green, blue = (share * x + (1 - share) * y for x, y in zip(to_rgb(color), to_rgb(HIDDEN), strict=True))
    return to_hex((red, green, blue))


def rectangles_of(marked: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Rectangles of the marked places, ``[n, 4]``: top, left, bottom, right. Equal runs of rows one below the other are one."""
    edges = np.diff(marked.astype(np.int8), prepend=0, append=0, axis=1)
    rows, starts = (edges == 1).nonzero()
    stops = (edges == -1).nonzero()[1]
    order = np.lexsort((rows, stops, starts))
    runs = np.stack((starts, stops, rows), 1)[order]
    first = np.ones(len(runs), dtype=np.bool_)
    first[1:] = (np.diff(runs, axis=0) != (0, 0, 1)).any(1)
    (starts, stops, tops), bottoms = runs[first].T, runs[np.roll(first, -1), 2] + 1
    return np.stack((tops, starts, bottoms, stops), 1)


def _draw_rectangles(
    ax: Axes, rectangles: NDArray[np.int64], unit: tuple[int, int], look: Look, alpha: float | None = None
) -> None:
    """Draws rectangles as one path, which files of vectors keep small, and viewers show without lines between them."""
    corners = rectangles[:, [[1, 0], [3, 0], [3, 2], [1, 2]]] * unit[::-1]
    drawn = PathPatch(
        Path.make_compound_path_from_polys(corners),
        facecolor=look.color,
        edgecolor=look.ink if look.hatch else "none",
        linewidth=0,
        hatch=look.hatch or None,
        antialiased=False,
        alpha=alpha,
        snap=True,
    )
    ax.add_artist(drawn)


def _draw_blocks(shown: Picture, ax: Axes, state: int, color: str, alpha: float | None = None) -> None:
    if shown.blocks is not None and shown.block_size is not None:
        _draw_rectangles(ax, rectangles_of(shown.blocks == state), shown.block_size, Look(color), alpha)


def _draw_pixels(shown: Picture, ax: Axes, looks: tuple[Look, ...]) -> None:
    """Images that show shares: the colors of what is not prominent mixed, and over them the others by their opacity."""
    ordinary = [number for number, look in enumerate(looks) if not look.prominent]
    if is_detailed(shown.categories):
        weights = shown.shares[ordinary]
        weights = weights / np.maximum(weights.sum(0), 1e-9)
        mixed = np.einsum("krc,kx->rcx", weights, np.array([to_rgb(looks[number].color) for number in ordinary]))
        _draw_image(shown, ax, mixed)
    if shown.estimated is not None:
        _draw_image(shown, ax, _colored(shown.estimated.astype(np.float32), UNDECIDED))
    for share, look in zip(shown.shares, looks, strict=True):
        if look.prominent:
            _draw_image(shown, ax, _colored(share, look.color))


def _colored(fraction: NDArray[np.float32], color: str) -> NDArray[np.float32]:
    image = np.empty((*fraction.shape, 4), dtype=np.float32)
    image[..., :3] = to_rgb(color)
    image[..., 3] = opacity(fraction)
    return image


def _draw_image(shown: Picture, ax: Axes, image: NDArray[Any]) -> None:
    bottom, right = image.shape[0] * shown.step[0], image.shape[1] * shown.step[1]
    ax.imshow(image, extent=(0, right, bottom, 0), aspect=ax.get_aspect(), zorder=1)  # keeps limits that are set


def _draw_lines(shown: Picture, ax: Axes) -> None:
    if squares(shown):
        width = min(1.2, 12 / max(shown.q_len, shown.kv_len))
        _draw_grid(shown, ax, (1, 1), color="white", linewidth=width)
    if shown.blocks is not None and shown.block_size is not None:
        width = min(1.0, 10 / max(shown.blocks.shape))
        _draw_grid(shown, ax, shown.block_size, color=INK, linewidth=width)
    ax.spines[:].set(color=INK if shown.blocks is not None or not squares(shown) else "white", linewidth=0.8)


def _draw_grid(shown: Picture, ax: Axes, step: tuple[int, int], *, color: str, linewidth: float) -> None:
    across = [[(0, y), (shown.kv_len, y)] for y in range(step[0], shown.q_len, step[0])]
    down = [[(x, 0), (x, shown.q_len)] for x in range(step[1], shown.kv_len, step[1])]
    for lines in filter(None, (across, down)):
        path = Path(np.concatenate(lines), [Path.MOVETO, Path.LINETO] * len(lines))
        ax.add_artist(PathPatch(path, fill=False, edgecolor=color, linewidth=linewidth, snap=True, zorder=2))


#: From no weight to the greatest.
SCALE = LinearSegmentedColormap.from_list("weights", ["#FFFFFF", "#9CCBEA", "#3B8FC9", "#0B4F8A", "#08264A"])
#: How masked-out cells are drawn, to differ from visible cells of weight 0.
UNSEEN = Look(HIDDEN, "////", "#CFCFCF")
#: Inches that a cell must have for its number, and from which lightness on the ink is white.
ROOM, DARK = 0.2, 0.5


def _colored_scores(scores: Scores, visible: NDArray[np.float32]) -> NDArray[np.float32]:
    """The color of each pixel, ``float32[rows, columns, 3]``; of one that shows nothing that of hidden cells."""
    image = np.asarray(SCALE(_relative(scores)), dtype=np.float32)[..., :3]
    image[visible == 0] = to_rgb(HIDDEN)
    return image


def _draw_numbers(shown: Picture, scores: Scores, ax: Axes) -> None:
    """Writes the weight into each visible cell, where they fit."""
    box = ax.get_window_extent()
    inches = min(box.width / shown.kv_len, box.height / shown.q_len) / ax.figure.dpi
    if inches < ROOM:
        return
    relative = _relative(scores)
    places = np.argwhere(shown.shares[0] > 0).tolist()
    numbers = [_written(float(scores.values[row, column])) for row, column in places]
    size = min(8.0, 72 * inches / (0.75 * max(map(len, numbers), default=1) + 0.65))
    for (row, column), number in zip(places, numbers, strict=True):
        color = "white" if relative[row, column] > DARK else INK
        ax.text(column + 0.5, row + 0.5, number, ha="center", va="center_baseline", fontsize=size, color=color, zorder=3)


def _written(weight: float) -> str:
    """A weight in three characters, if it is between 0 and 1."""
    if abs(weight) >= 10:
        return f"{weight:.3g}"
    return "1.0" if f"{weight:.2f}" == "1.00" else f"{weight:.2f}".removeprefix("0")


def scale_marks(scores: Scores) -> list[tuple[str, str]]:
    """Colors along the scale, each with its weight."""
    shares = (0.0, 0.25, 0.5, 0.75, 1.0)
    return [(to_hex(SCALE(share)), f"{share * scores.most:.2g}") for share in shares]


def _relative(scores: Scores) -> NDArray[np.float32]:
    """The weights as parts of the greatest."""
    return (scores.values / (scores.most or 1.0)).clip(0, 1)


# ---------------------------------------------------------------- around the cells


#: Inches: a character of the numbers on an axis, and a band with the gap before it.
NUMBER_CHARACTER, BAND, GAP = 0.0625, 0.15, 0.04
#: Numbers along an axis at most, where there is not one for every index.
MAX_NUMBERS = 9
#: Characters of a token at most, and of the label of a band of queries, which is below the title.
MAX_CHARACTERS, MAX_UPRIGHT = 16, 10
#: How legends are set.
LEGEND: dict[str, Any] = {
    "alignment": "left",
    "frameon": False,
    "fontsize": 7.5,
    "title_fontsize": 7.5,
    "borderpad": 0,
    "borderaxespad": 0,
    "handlelength": 1.1,
    "handleheight": 1.1,
    "handletextpad": 0.6,
    "labelspacing": 0.35,
    "columnspacing": 1.4,
    "labelcolor": INK,
}


def band_room(shown: Picture, axis: str) -> float:
    """Inches that the bands along an axis take."""
    return BAND * sum(band.axis == axis for band in shown.bands)


def token_room(tokens: tuple[str, ...] | None) -> float:
    """Inches that tokens take, written at a right angle to the axis or along it."""
    return 0.0 if tokens is None else NUMBER_CHARACTER * max(len(_cut(token)) for token in tokens)


def label_room(shown: Picture) -> float:
    """Inches that the numbers or tokens of the queries take."""
    return max(NUMBER_CHARACTER * len(f"{shown.q_offset + shown.q_len:,}"), token_room(shown.q_tokens))


def label_axes(shown: Picture, ax: Axes, *, names: bool = True) -> None:
    """Numbers the queries and keys, or writes their tokens, and draws the bands; ``names`` says what the axes are.

    Bands are below the cells for the keys, and to their right for the queries.
    """
    ax.apply_aspect()
    box, points = ax.get_window_extent(), 72 / ax.figure.dpi
    block = shown.block_size if shown.blocks is not None else None
    rooms = [box.height * points / 9, box.width * points / (72 * NUMBER_CHARACTER * len(f"{shown.kv_len:,}") + 6)]
    if shown.q_len == shown.kv_len:
        rooms = [min(rooms)] * 2
    down, across = (
        numbered(length, room if length <= room else min(room, MAX_NUMBERS), size)
        for length, room, size in zip((shown.q_len, shown.kv_len), rooms, block or (None, None), strict=True)
    )
    ax.xaxis.tick_top()
    ax.xaxis.set_label_position("top")
    if shown.kv_tokens is not None:
        across = numbered(shown.kv_len, box.width * points / 9)
    upright: dict[str, Any] = {} if shown.kv_tokens is None else {"rotation": 90}
    ax.set_xticks([x + 0.5 for x in across], _labels(across, shown.kv_tokens, 0), parse_math=False, **upright)
    ax.set_yticks([y + 0.5 for y in down], _labels(down, shown.q_tokens, shown.q_offset), parse_math=False)
    length = 0 if squares(shown) else 2.5
    ax.tick_params(labelsize="x-small", colors=FAINT, labelcolor=INK, length=length, width=0.6, pad=2)
    if names:
        ax.set_xlabel("key index" if shown.kv_tokens is None else "key", fontsize="small", color=INK)
        ax.set_ylabel("query index" if shown.q_tokens is None else "query", fontsize="small", color=INK)
    for axis in ("q", "kv"):
        for place, band in enumerate(band for band in shown.bands if band.axis == axis):
            _draw_band(shown, ax, band, place)


def _draw_band(shown: Picture, ax: Axes, band: Band, place: int) -> None:
    """One band, in the units of the axis along it, and in inches across."""
    figure = ax.figure
    along_keys = band.axis == "kv"
    length = shown.kv_len if along_keys else shown.q_len
    inch, box, offset = figure.dpi_scale_trans, ax.get_window_extent(), GAP + BAND * place
    along, across = (box.width, box.height) if along_keys else (box.height, box.width)
    thick, inches = (BAND - GAP) * figure.dpi / across, along / figure.dpi / length  # inches of a position
    transform = ax.get_xaxis_transform() if along_keys else ax.get_yaxis_transform()
    transform += ScaledTranslation(*((0.0, -offset) if along_keys else (offset, 0.0)), inch)
    font: dict[str, Any] = {"fontsize": 5.5, "parse_math": False, "color": FAINT}
    label = "" if band.label == PADDING else _cut(band.label, MAX_CHARACTERS if along_keys else MAX_UPRIGHT)
    if along_keys:
        at = transform + ScaledTranslation(-0.02, 0, inch)
        ax.text(0, -thick / 2, label, transform=at, ha="right", va="center_baseline", **font)
        font |= {"va": "center_baseline", "color": INK}
    else:
        at = transform + ScaledTranslation(0, 0.02, inch)
        ax.text(1 + thick / 2, 0, label, transform=at, rotation=90, ha="center", va="bottom", **font)
        font |= {"va": "center", "color": INK, "rotation": 270}
    for number, (start, stop, value) in enumerate(zip(band.starts, (*band.starts[1:], length), band.values, strict=True)):
        if not value:
            continue
        padding = value == PADDING
        corner, size = ((start, -thick), (stop - start, thick)) if along_keys else ((1, start), (thick, stop - start))
        color = PADDED.color if padding else STRETCHES[number % 2]
        patch = Rectangle(corner, *size, transform=transform, facecolor=color, edgecolor="white", linewidth=0.6)
        patch.set(clip_on=False, hatch=PADDED.hatch if padding else None)
        ax.add_patch(patch)
        if len(value) * NUMBER_CHARACTER * 0.85 < (stop - start) * inches:
            ax.text(corner[0] + size[0] / 2, corner[1] + size[1] / 2, value, transform=transform, ha="center", **font)


def _labels(indices: range, tokens: tuple[str, ...] | None, offset: int) -> list[str]:
    return [f"{index + offset:,}" if tokens is None else _cut(tokens[index]) for index in indices]


def _cut(token: str, most: int = MAX_CHARACTERS) -> str:
    return token if len(token) <= most else token[: most - 1] + "…"


def entries_of(pictures: Sequence[Picture], characters: int) -> tuple[list[Patch], int]:
    """The entries, their labels wrapped to a width in characters, and the number of columns.

    Args:
        pictures: the picture, or those of a sheet, whose counts differ and are left out.
        characters: characters of a line at most.
    """
    found: dict[str, Look] = {}
    for shown in pictures:
        for look, label, count in _entries(shown):
            found.setdefault(f"{label} ({count})" if count and len(pictures) == 1 else label, look)
    fill = TextWrapper(characters, break_long_words=False, break_on_hyphens=False).fill  # no name is broken
    return [_patch(look, fill(label)) for label, look in found.items()], min(map(_columns, pictures))


def legend_lines(entries: list[Patch], columns: int) -> int:
    """The lines that entries take."""
    if columns > 1:
        return -(-len(entries) // columns)
    return sum(str(entry.get_label()).count("\n") + 1 for entry in entries)


def draw_legend(
    owner: Axes | Figure, entries: tuple[list[Patch], int], said: list[str], corner: tuple[float, float], **place: Any
) -> None:
    """Draws notes and the entries of the legend, in so many columns, with their upper left corner at a place."""
    handles, columns = entries
    legend = owner.legend(
        handles=handles, ncols=columns, title="\n".join(said), loc="upper left", bbox_to_anchor=corner, **place, **LEGEND
    )
    legend.get_title().set(color=FAINT, parse_math=False)


def _entries(shown: Picture) -> Iterator[tuple[Look, str, str]]:
    """How something looks, what it is, and how many there are, of all that the picture has."""
    if shown.scores is not None:
        yield from ((Look(color), label, "") for color, label in scale_marks(shown.scores))
        if shown.pairs[1][1]:
            yield UNSEEN, "hidden", ""
    elif is_detailed(shown.categories):
        yield from _of_categories(shown)
    elif shown.blocks is not None:
        yield from _of_blocks(shown)
    elif shown.step == (1, 1):
        yield Look(VISIBLE), "visible", ""
        yield Look(HIDDEN), "hidden", ""
    else:
        for label, share in {"none visible": 0.0, "25 %": 0.25, "50 %": 0.5, "75 %": 0.75, "all": 1.0}.items():
            yield Look(faded(VISIBLE, float(opacity(share)))), label, ""
    if unknown := shown.block_count(UNKNOWN):
        yield Look(UNDECIDED), "blocks of unknown kind", f"{unknown:,}"
    if shown.estimated is not None:
        yield Look(UNDECIDED), "estimated", ""
    if any(PADDING in band.values for band in shown.bands):
        yield PADDED, "padding", ""


def _of_categories(shown: Picture) -> Iterator[tuple[Look, str, str]]:
    """The categories with their cells; of terms only those that hide some."""
    for look, category, pairs in zip(looks_of(shown.categories), shown.categories, shown.pairs, strict=True):
        if category.role == "visible" and shown.blocks is not None and shown.block_size is not None:
            in_full = shown.block_count(FULL) * shown.block_size[0] * shown.block_size[1]
            if in_full:
                yield Look(VISIBLE), "visible, in full blocks", f"{in_full:,}"
            yield Look(IN_PARTIAL), "visible, in partial blocks", count_text((pairs[0] - in_full, pairs[1] - in_full))
        elif category.hides is None or pairs[1]:
            yield look if squares(shown) else replace(look, hatch=""), category.label, count_text(pairs)
    if shown.block_count(EMPTY):
        yield Look("#FFFFFF"), "paler: in empty blocks, skipped", ""


def _of_blocks(shown: Picture) -> Iterator[tuple[Look, str, str]]:
    """The states of blocks with their number."""
    if full := shown.block_count(FULL):
        yield Look(VISIBLE), "full blocks", f"{full:,}"
    if partial := shown.block_count(PARTIAL):
        yield Look(IN_PARTIAL), "partial blocks, visible cells", f"{partial:,}"
        yield Look(WASTED), "partial blocks, hidden cells: computed, then discarded", ""
    if empty := shown.block_count(EMPTY):
        yield Look(HIDDEN), "empty blocks, skipped", f"{empty:,}"


def _columns(shown: Picture) -> int:
    if shown.blocks is not None or is_detailed(shown.categories):
        return 1
    return 3 if shown.step == (1, 1) and shown.scores is None else 6


def _patch(look: Look, label: str) -> Patch:
    options: dict[str, Any] = {"hatch": look.hatch or None, "edgecolor": look.ink if look.hatch else FAINT}
    return Patch(facecolor=look.color, linewidth=0.4, label=label, **options)
