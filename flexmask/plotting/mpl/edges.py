"""The labels around a picture on matplotlib axes: numbers or tokens, and bands of documents, prefix trees and padding."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from matplotlib.transforms import ScaledTranslation, Transform

from flexmask.plotting.annotations import PADDING, Band
from flexmask.plotting.caption import numbered
from flexmask.plotting.mpl.drawing import squares
from flexmask.plotting.palette import FAINT, INK, PADDED, STRETCHES
from flexmask.plotting.raster import Picture

#: Inches: a character of the numbers on an axis, and a band with the gap before it.
NUMBER_CHARACTER, BAND, GAP = 0.0625, 0.15, 0.04
#: Numbers along an axis at most, where there is not one for every index.
MAX_NUMBERS = 9
#: Characters of a token at most, and of the label of a band of queries, which is below the title.
MAX_CHARACTERS, MAX_UPRIGHT = 16, 10


def band_room(shown: Picture, axis: str) -> float:
    """Inches that the bands along an axis take."""
    return BAND * sum(band.axis == axis for band in shown.bands)


def token_room(tokens: tuple[str, ...] | None) -> float:
    """Inches that tokens take, written at a right angle to the axis or along it."""
    return 0.0 if tokens is None else NUMBER_CHARACTER * max(len(_cut(token)) for token in tokens)


def label_axes(shown: Picture, ax: Axes, *, names: bool = True) -> None:
    """Numbers the queries and keys, or writes their tokens; ``names`` says what the axes are."""
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
        numbered(length, room if length <= room else min(room, MAX_NUMBERS), block and block[axis])
        for length, room, axis in ((shown.kv_len, most["x"], 1), (shown.q_len, most["y"], 0))
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


def draw_bands(shown: Picture, ax: Axes) -> None:
    """Draws the bands below the cells for the keys, and to their right for the queries."""
    for axis in ("q", "kv"):
        for place, band in enumerate(band for band in shown.bands if band.axis == axis):
            _draw_band(shown, ax, band, place)


def _draw_band(shown: Picture, ax: Axes, band: Band, place: int) -> None:
    """One band, in the units of the axis along it, and in inches across."""
    figure = ax.get_figure(root=True)
    assert figure is not None
    along_keys = band.axis == "kv"
    length = shown.kv_len if along_keys else shown.q_len
    offset = GAP + BAND * place
    x, y = (0.0, -offset) if along_keys else (offset, 0.0)
    shift = ScaledTranslation(x, y, figure.dpi_scale_trans)
    box = ax.get_window_extent()
    thick = (BAND - GAP) * figure.dpi / (box.height if along_keys else box.width)
    transform: Transform = (ax.get_xaxis_transform() if along_keys else ax.get_yaxis_transform()) + shift
    at, apart = ((0, -thick / 2), (-0.02, 0)) if along_keys else ((1 + thick / 2, 0), (0, 0.02))
    ax.text(
        at[0],
        at[1],
        "" if band.label == PADDING else _cut(band.label, MAX_CHARACTERS if along_keys else MAX_UPRIGHT),
        transform=transform + ScaledTranslation(apart[0], apart[1], figure.dpi_scale_trans),
        rotation=0 if along_keys else 90,
        ha="right" if along_keys else "center",
        va="center_baseline" if along_keys else "bottom",
        fontsize=5.5,
        color=FAINT,
        parse_math=False,
    )
    inches = (box.width if along_keys else box.height) / figure.dpi / length  # of a position
    for number, (start, stop) in enumerate(zip(band.starts, (*band.starts[1:], length), strict=True)):
        value = band.values[number]
        if not value:
            continue
        padding = value == PADDING
        corner, size = ((start, -thick), (stop - start, thick)) if along_keys else ((1, start), (thick, stop - start))
        color = PADDED.color if padding else STRETCHES[number % 2]
        patch = Rectangle(corner, *size, transform=transform, facecolor=color, edgecolor="white", linewidth=0.6)
        patch.set(clip_on=False, hatch=PADDED.hatch if padding else None)
        ax.add_patch(patch)
        if len(value) * NUMBER_CHARACTER * 0.85 < (stop - start) * inches:
            x, y = corner[0] + size[0] / 2, corner[1] + size[1] / 2
            ax.text(
                x,
                y,
                value,
                transform=transform,
                rotation=0 if along_keys else 270,
                ha="center",
                va="center_baseline" if along_keys else "center",
                fontsize=5.5,
                color=INK,
            )


def _labels(indices: range, tokens: tuple[str, ...] | None, offset: int) -> list[str]:
    return [f"{index + offset:,}" if tokens is None else _cut(tokens[index]) for index in indices]


def _cut(token: str, most: int = MAX_CHARACTERS) -> str:
    return token if len(token) <= most else token[: most - 1] + "…"
