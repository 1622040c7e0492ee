"""Downsampled pictures as text: a pixel covers many cells, and is a colored half block or a sign.

A pixel with any visible cell, or with any cell that is visible in one mask only, looks different from others. A hidden pixel has
the sign of its most frequent category.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from rich.color import Color
from rich.style import Style
from rich.text import Text

from flexmask.plotting.caption import numbered
from flexmask.plotting.categories import count_text, is_detailed
from flexmask.plotting.terminal.canvas import Canvas, Drawing, LegendEntry, framed, ruler
from flexmask.plotting.terminal.signs import EITHER, SHADES, SHADES_OF_BOTH, Sign, signs_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from flexmask.plotting.categories import Category
    from flexmask.plotting.raster import Picture

RGB: TypeAlias = tuple[int, int, int]

#: The colors of pixels of one category.
DARK, BRIGHT = (58, 58, 58), (42, 147, 213)
COLORS: dict[str, RGB] = {
    "visible": BRIGHT,
    "hidden": DARK,
    "both": (157, 180, 198),
    "only_a": (142, 134, 224),
    "only_b": (213, 94, 0),
    "neither": DARK,
}
#: Categories that are drawn over the others in this order, and their least opacity.
FAINTEST = {"visible": 0.3, "both": 0.3, "only_a": 0.5, "only_b": 0.5, "shard": 0.5}
#: Shades of a color.
LEVELS = 20


def draw_area(shown: Picture, canvas: Canvas) -> Drawing:
    """Draws a picture as large as there is room."""
    high, wide = _step(shown, canvas)
    shown = coarsen(shown, (high, wide))
    drawn, legend = _halves(shown) if canvas.mixing else _signs(shown, canvas)
    row_labels, over = _numbers(shown, len(drawn), 2 if canvas.mixing else 1, canvas)
    lines = list(framed([over], row_labels, drawn, canvas.margin(shown)))
    return Drawing(shown, lines, legend, by_area=True)


def _step(shown: Picture, canvas: Canvas) -> tuple[int, int]:
    """Queries and keys in a pixel. A character is twice as high as wide; with colors it is two pixels."""
    side = max(1, -(-shown.kv_len // canvas.room(shown)), -(-shown.q_len // (2 * canvas.lines)))
    side = -(-side // shown.step[1]) * shown.step[1]
    every_cell = side == 1 and shown.q_len <= canvas.lines
    return side if canvas.mixing or every_cell else 2 * side, side


def _numbers(shown: Picture, lines: int, high: int, canvas: Canvas) -> tuple[list[str], str]:
    """The numbers, or tokens, of the first query of some lines, and the numbers of the first key of some columns."""
    marked, labels = set(numbered(lines, lines / 4)), canvas.row_labels(shown, high * shown.step[0])
    columns = shown.shares.shape[2]
    step = numbered(columns, columns / (len(f"{shown.kv_len:,}") + 2))
    over = ruler({column: f"{column * shown.step[1]:,}" for column in step}, canvas.room(shown))
    return [label if line in marked else "" for line, label in enumerate(labels)], over


def _signs(shown: Picture, canvas: Canvas) -> tuple[list[Text], list[LegendEntry]]:
    """A sign for each pixel: of a difference, else of the visible share, else of the category that is hidden."""
    signs, more = signs_of(shown.categories), is_detailed(shown.categories)
    amounts = [count_text(pairs) if more else "" for pairs in shown.pairs]
    legend = [canvas.entry(sign, amount) for sign, amount in zip(signs, amounts, strict=True)]
    if shown.every_cell:
        return _written(shown.cells, signs, canvas), legend
    if shown.categories[0].role == "shard":  # the most frequent shard in each pixel that has any visible cell
        marks = np.where(shown.shares[:-1].any(0), shown.shares[:-1].argmax(0), len(signs) - 1)
        return _written(marks, signs, canvas), legend
    shades = SHADES_OF_BOTH if shown.categories[0].role == "both" else SHADES
    marks = _levels(shown.shares[0], 3) + (shown.shares[0] == 1)
    if more:
        marks = np.where(marks == 0, len(shades) + shown.shares[1:].argmax(0), marks)
        by_share = Text("").join([canvas.sign(sign) for sign in shades[1:]])
        legend[0] = LegendEntry(by_share, f"{signs[0].meaning}, by share", amounts[0])
    else:
        legend = [canvas.entry(sign) for sign in shades]
    only = [place for place, category in enumerate(shown.categories) if category.role in ("only_a", "only_b")]
    for place in only:
        marks[shown.shares[place] > 0] = len(shades) + place - 1
    either = (shown.shares[only] > 0).sum(0) > 1
    if either.any():
        marks[either] = len(shades) + len(signs) - 1
        legend.append(canvas.entry(EITHER))
    return _written(marks, (*shades, *signs[1:], EITHER), canvas), legend


def _written(marks: NDArray[np.integer], signs: Sequence[Sign], canvas: Canvas) -> list[Text]:
    """Lines of signs, by the number of each."""
    drawn = [canvas.sign(sign) for sign in signs]
    return [Text("").join([drawn[mark] for mark in row]) for row in marks.tolist()]


def _halves(shown: Picture) -> tuple[list[Text], list[LegendEntry]]:
    """Two pixels per character, one above the other."""
    colors = _colors(shown.shares, shown.categories).tolist()
    lines = []
    for top, upper in enumerate(colors[::2]):
        under = colors[2 * top + 1] if 2 * top + 1 < len(colors) else [None] * len(upper)
        line = Text()
        for pair in zip(map(tuple, upper), [pixel and tuple(pixel) for pixel in under], strict=True):
            line.append("▀", _style(*pair))
        lines.append(line)
    if is_detailed(shown.categories):
        alone = _colors(np.eye(len(shown.categories))[:, :, None], shown.categories)[:, 0].tolist()
        said = [(sign.meaning, count_text(pairs)) for sign, pairs in zip(signs_of(shown.categories), shown.pairs, strict=True)]
    else:
        parts = {"none visible": 0.0, "a little": 1 / LEVELS, "half": 0.5, "all": 1.0}
        shares = np.array([[*parts.values()]])
        alone = _colors(np.stack([shares, 1 - shares]), shown.categories)[0].tolist()
        said = [(words, "") for words in parts]
    return lines, [LegendEntry(Text("█", _style(tuple(color), None)), *words) for color, words in zip(alone, said, strict=True)]


def _colors(shares: NDArray[np.floating], categories: Sequence[Category]) -> NDArray[np.uint8]:
    """The color of each pixel: the mixed colors of hidden categories, with the prominent ones drawn over them."""
    colors = [np.array(_color(category, sign)) for category, sign in zip(categories, signs_of(categories), strict=True)]
    under = [number for number, category in enumerate(categories) if category.role not in FAINTEST]
    weights = shares[under] / np.maximum(shares[under].sum(0), 1e-9)
    pixels: NDArray[np.float64] = np.einsum("krc,kx->rcx", weights, np.array([colors[number] for number in under]))
    for share, category, color in zip(shares, categories, colors, strict=True):
        if category.role in FAINTEST:
            least = FAINTEST[category.role]
            opacity = np.where(share > 0, least + (1 - least) * _levels(share, LEVELS) / LEVELS, 0.0)[..., None]
            pixels += opacity * (color - pixels)
    return pixels.round().astype(np.uint8)


def _color(category: Category, sign: Sign) -> RGB:
    """The color of pixels of one category; half as bright as its sign for cells that a term masks out."""
    if category.role in COLORS and category.hides is None:
        return COLORS[category.role]
    red, green, blue = Color.parse(sign.style).get_truecolor()
    if category.role == "shard":
        return red, green, blue
    return (red + DARK[0]) // 2, (green + DARK[1]) // 2, (blue + DARK[2]) // 2


@lru_cache(maxsize=4096)
def _style(upper: RGB, lower: RGB | None) -> Style:
    """The style of a half block that colors two pixels, or one."""
    return Style(color=Color.from_rgb(*upper), bgcolor=None if lower is None else Color.from_rgb(*lower))


def _levels(shares: NDArray[np.floating], levels: int) -> NDArray[np.int64]:
    """Shares as integers; a share above 0 is at least 1."""
    return np.where(shares > 0, np.ceil(levels * shares - 1e-6).clip(min=1), 0).astype(np.int64)


def coarsen(shown: Picture, step: tuple[int, int]) -> Picture:
    """The picture with larger pixels of at least ``step`` cells, each a whole number of its pixels.

    A share is 0 or 1 only if it is for all cells of the pixel.
    """
    factors = (-(-step[0] // shown.step[0]), -(-step[1] // shown.step[1]))
    if factors == (1, 1):
        return shown
    rows, columns = (
        np.diff([*range(0, length, size), length]) for length, size in zip((shown.q_len, shown.kv_len), shown.step, strict=True)
    )
    cells = np.multiply.outer(rows, columns).astype(np.float64)
    return replace(
        shown,
        step=(factors[0] * shown.step[0], factors[1] * shown.step[1]),
        shares=np.stack([_summed(np.add, share * cells, factors) for share in shown.shares]) / _summed(np.add, cells, factors),
        estimated=None if shown.estimated is None else _summed(np.logical_or, shown.estimated, factors),
        hidden_by=None,
    )


def _summed(operation: np.ufunc, pixels: NDArray[Any], factors: tuple[int, int]) -> NDArray[Any]:
    for axis in (0, 1):
        pixels = operation.reduceat(pixels, range(0, pixels.shape[axis], factors[axis]), axis=axis)
    return pixels
