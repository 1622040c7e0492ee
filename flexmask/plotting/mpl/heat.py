"""Attention weights as colors: a scale that grows steadily darker, and the numbers in cells that have room for them."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from numpy.typing import NDArray

from flexmask.plotting.palette import HIDDEN, INK, Look
from flexmask.plotting.raster import Picture, Scores

#: From no weight to the greatest.
SCALE = LinearSegmentedColormap.from_list("weights", ["#FFFFFF", "#9CCBEA", "#3B8FC9", "#0B4F8A", "#08264A"])
#: How masked-out cells are drawn, to differ from visible cells of weight 0.
UNSEEN = Look(HIDDEN, "////", "#CFCFCF")
#: Inches that a cell must have for its number, and from which lightness on the ink is white.
ROOM, DARK = 0.2, 0.5


def colored_scores(scores: Scores, visible: NDArray[np.float32]) -> NDArray[np.float32]:
    """The color of each pixel, ``float32[rows, columns, 3]``; of one that shows nothing that of hidden cells."""
    image = np.asarray(SCALE(_relative(scores)), dtype=np.float32)[..., :3]
    image[visible == 0] = [int(HIDDEN[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    return image


def draw_numbers(shown: Picture, ax: Axes) -> None:
    """Writes the weight into each visible cell, where they fit."""
    assert shown.scores is not None
    box = ax.get_window_extent()
    inches = min(box.width / shown.kv_len, box.height / shown.q_len) / ax.figure.dpi
    if inches < ROOM:
        return
    relative = _relative(shown.scores)
    places = np.argwhere(shown.shares[0] > 0).tolist()
    numbers = [_written(float(shown.scores.values[row, column])) for row, column in places]
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
    colors = [tuple(round(255 * part) for part in SCALE(share)[:3]) for share in shares]
    return [("#{:02X}{:02X}{:02X}".format(*c), f"{share * scores.most:.2g}") for c, share in zip(colors, shares, strict=True)]


def _relative(scores: Scores) -> NDArray[np.float32]:
    """The weights as parts of the greatest."""
    return (scores.values / (scores.most or 1.0)).clip(0, 1)
