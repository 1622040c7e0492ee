"""The cells of a picture on matplotlib axes: rectangles of equal cells, else an image; attention weights; and the blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_hex, to_rgb
from matplotlib.patches import PathPatch
from matplotlib.path import Path
from numpy.typing import NDArray

from flexmask.plotting.categories import is_detailed
from flexmask.plotting.palette import HIDDEN, IN_PARTIAL, INK, UNDECIDED, VISIBLE, WASTED, Look, looks_of
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
