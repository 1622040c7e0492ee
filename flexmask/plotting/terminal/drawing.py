"""Pictures as text: a sign for each cell, or for each block of the block grid, else for a pixel that covers many cells.

A pixel is a colored half block or a sign. One with any visible cell, or with any cell that is visible in one mask only, looks
different from others. A hidden pixel has the sign of its most frequent category. Signs, texts and frames are those that the
terminal or file can show. No meaning is only a color: signs differ too.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, count, cycle, zip_longest
from string import ascii_lowercase
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from rich.cells import cell_len
from rich.color import Color
from rich.console import Console
from rich.style import Style
from rich.text import Text

from flexmask.plotting.annotations import PADDING
from flexmask.plotting.caption import numbered
from flexmask.plotting.categories import Category, count_text, is_detailed
from flexmask.plotting.density import cells_in, summed
from flexmask.plotting.palette import looks_of
from flexmask.plotting.raster import EMPTY, FULL, PARTIAL, UNKNOWN, Picture

FAINT = "bright_black"
#: The most lines of a drawing.
MAX_LINES = 64
CORNER = "q\\kv"
#: The most characters of a token: to the left of the lines, and above the columns, where each character takes a line.
LONGEST_ROW_LABEL, LONGEST_COLUMN_LABEL = 16, 12


@dataclass(frozen=True)
class Sign:
    """The sign of one category of cells, blocks or pixels.

    Attributes:
        glyph: in a terminal.
        plain: in ASCII.
        style: rich's style for either.
        meaning: its text in the legend.
    """

    glyph: str
    plain: str
    style: str
    meaning: str


class LegendEntry(NamedTuple):
    """An entry of a legend: a sign, its meaning, and optionally a number of cells."""

    sign: Text
    words: str
    amount: str = ""


@dataclass(frozen=True)
class Drawing:
    """A picture as lines.

    Attributes:
        shown: the picture as it is drawn, which may be downsampled; it has blocks only where these are drawn.
        lines: the cells with their labels, line by line.
        legend: the meanings of its signs and colors.
    """

    shown: Picture
    lines: list[Text]
    legend: list[LegendEntry]


@dataclass(frozen=True)
class Canvas:
    """The capabilities of a console.

    Attributes:
        plain: whether the drawing is ASCII.
        ascii_only: whether all other text must be ASCII too.
        mixing: whether there are enough colors to mix them.
        width: characters of a line.
        height: lines of the terminal; None for a file.
        lines: lines of a drawing at most.
    """

    plain: bool
    ascii_only: bool
    mixing: bool
    width: int
    height: int | None = None
    lines: int = MAX_LINES

    @staticmethod
    def from_console(console: Console) -> Canvas:
        """The canvas of a console."""
        ascii_only = console.options.ascii_only
        plain = ascii_only or not console.is_terminal
        mixing = not plain and not console.no_color and console.color_system in ("256", "truecolor")
        return Canvas(plain, ascii_only, mixing, console.width, console.height if console.is_terminal else None)

    def margin(self, shown: Picture) -> int:
        """Characters of the numbers or tokens to the left of the lines."""
        if shown.q_tokens is not None:
            return max(len(CORNER), *map(cell_len, self.row_labels(shown)))
        return max(len(CORNER), len(f"{shown.q_offset + shown.q_len - 1:,}"))

    def room(self, shown: Picture) -> int:
        """Characters of a line of the drawing."""
        return max(8, self.width - self.margin(shown) - 1)

    def sign(self, sign: Sign) -> Text:
        """The text of a sign."""
        return Text(sign.plain if self.plain else sign.glyph, sign.style)

    def entry(self, sign: Sign, amount: str = "") -> LegendEntry:
        """The entry of a sign in a legend."""
        return LegendEntry(Text("blank") if self.plain and sign.plain == " " else self.sign(sign), sign.meaning, amount)

    def written(self, text: str) -> str:
        """A text with characters that cannot be written replaced."""
        if self.plain:
            text = text.replace("…", "...").replace("×", "x")
        return text.encode("ascii", "backslashreplace").decode() if self.ascii_only else text

    def wrapped(self, text: str, indent: int = 0) -> list[str]:
        """A text in lines that fit behind an indentation."""
        return textwrap.wrap(self.written(text), max(8, self.width - indent), break_on_hyphens=False)

    def row_labels(self, shown: Picture, step: int = 1) -> list[str]:
        """The number or token of each query, or of each ``step``-th."""
        if shown.q_tokens is None:
            return [f"{query + shown.q_offset:,}" for query in range(0, shown.q_len, step)]
        most = min(LONGEST_ROW_LABEL, self.width // 3)
        return ["".join(self._characters(token, most)) for token in shown.q_tokens[::step]]

    def upright(self, tokens: Sequence[str]) -> list[str]:
        """Tokens written downwards, each over its column, ending above the cells."""
        columns = [self._characters(token, LONGEST_COLUMN_LABEL) for token in tokens]
        high = max(map(len, columns))
        columns = [[" "] * (high - len(column)) + column for column in columns]
        return ["".join(part + " " * (2 - cell_len(part)) for part in line).rstrip() for line in zip(*columns, strict=True)]

    def _characters(self, token: str, most: int) -> list[str]:
        """The characters of a token, cut to a width. Combining characters stay with their base; controls are escaped."""
        found: list[str] = []
        for character in self.written(token):
            if not character.isprintable():
                found += character.encode("unicode_escape").decode()
            elif found and not cell_len(character):
                found[-1] += character
            else:
                found.append(character)
        cut = [".", "."] if self.plain else ["…"]
        if cell_len("".join(found)) > most:
            while cell_len("".join(found)) > most - len(cut):
                found.pop()
            found += cut
        return found


def ruler(numbers: Mapping[int, str], room: int) -> str:
    """Numbers above the columns where they start, as far as they fit."""
    line = ""
    for column, number in numbers.items():
        if column + len(number) <= room:
            line += " " * (column - len(line)) + number
    return line


def framed(over: Sequence[str], rows: Iterable[tuple[str, Text]], margin: int) -> list[Text]:
    """Lines with a number or token to the left of each, below the labels of the columns."""
    corners = [""] * (len(over) - 1) + [CORNER]
    lines = [Text(f"{corner:>{margin}} {above}", FAINT) for corner, above in zip(corners, over, strict=True)]
    return lines + [Text(" " * (margin - cell_len(label)) + label + " ", FAINT).append_text(line) for label, line in rows]


# ---------------------------------------------------------------- cells, blocks and pixels


VISIBLE, HIDDEN = Sign("■", "#", "#2A93D5", "visible"), Sign("⬚", ".", FAINT, "hidden")
SKIPPED, WASTED = Sign("·", " ", FAINT, "hidden, empty block"), Sign("□", ".", "#8A9099", "hidden, partial block")
IN_PARTIAL, IN_FULL = Sign("▣", "x", "#56B4E9", "visible, partial block"), Sign("■", "#", "#0072B2", "visible, full block")
BLOCKS = {
    FULL: Sign("■", "#", "#0072B2", "full block"),
    PARTIAL: Sign("▣", "x", "#56B4E9", "partial block"),
    EMPTY: Sign("·", ".", FAINT, "empty block"),
    UNKNOWN: Sign("?", "?", "#E8967A", "not known"),
}
#: As in the findings of checks, + is visible only in the first mask and - only in the second.
ROLES = {
    "visible": VISIBLE,
    "hidden": HIDDEN,
    "both": Sign("■", "#", "#9DB4C6", "in both"),
    "only_a": Sign("◧", "+", "#8E86E0", "only in A"),
    "only_b": Sign("◨", "-", "#D55E00", "only in B"),
    "neither": Sign("⬚", ".", FAINT, "in neither"),
}
#: Pixels with cells that are only in A and cells that are only in B.
EITHER = Sign("◫", "x", "#D0509A", "some only in A, some only in B")
#: Signs of cells that terms mask out, in the order of the terms; x has another meaning.
LETTERS = ascii_lowercase.partition("x")[0]
SHAPES = "○△◇▽×▷◁" + LETTERS

SHARES = ("none visible", "up to a third", "up to two thirds", "more", "all")
#: Signs of pixels by their visible share; and by the share in both masks, where + and - have other meanings.
SHADES, SHADES_OF_BOTH = (
    tuple(map(Sign, "·░▒▓█", plain, (FAINT, *[sign.style] * 4), SHARES))
    for plain, sign in ((".-+*#", VISIBLE), (".:o8#", ROLES["both"]))
)
#: Lines between blocks, upright, flat and crossing, by whether they are plain.
RULES = {False: ("│", "─", "┼"), True: ("|", "-", "+")}
#: Characters between the cells and the band of the queries.
GAP = "  "
PADDED = "~"
RGB: TypeAlias = tuple[int, int, int]
#: The color of pixels that show nothing.
DARK: RGB = (58, 58, 58)
#: Categories that are drawn over the others in this order, and their least opacity.
FAINTEST = {"visible": 0.3, "both": 0.3, "only_a": 0.5, "only_b": 0.5, "shard": 0.5}
#: Shades of a color.
LEVELS = 20


def signs_of(categories: Sequence[Category]) -> tuple[Sign, ...]:
    """The sign of each category of cells."""
    shapes, letters, digits = cycle(SHAPES), cycle(LETTERS), count()
    return tuple(
        Sign(digit := str(next(digits)), digit, look.color, category.label)
        if category.role == "shard"
        else ROLES[category.role]
        if category.hides is None
        else Sign(next(shapes), next(letters), look.ink, category.label)
        for category, look in zip(categories, looks_of(categories), strict=True)
    )


def cells_width(shown: Picture, canvas: Canvas) -> int:
    """Characters of a line of a drawing of all cells."""
    bands = len(GAP) + 1 if any(band.axis == "q" for band in shown.bands) else 0
    return canvas.margin(shown) + 2 * shown.kv_len + bands


def cells_fit(shown: Picture, canvas: Canvas) -> bool:
    """Whether every cell can be drawn."""
    return shown.every_cell and shown.q_len <= canvas.lines and 2 * shown.kv_len <= canvas.room(shown) + 1


def blocks_fit(shown: Picture, canvas: Canvas) -> bool:
    """Whether every block can be drawn, and the picture has no further categories."""
    if shown.blocks is None or is_detailed(shown.categories):
        return False
    rows, columns = len(shown.blocks), len(shown.blocks[0])
    return rows <= canvas.lines and 2 * columns <= canvas.room(shown) + 1


def draw_cells(shown: Picture, canvas: Canvas) -> Drawing:
    """Draws every cell as a sign, with lines between blocks, and bands to the right and below."""
    marks, signs, legend = _cell_signs(shown, canvas)
    size = shown.block_size if shown.blocks is not None else None
    upright, flat, cross = RULES[canvas.plain]
    edges = [size is not None and key % size[1] == 0 for key in range(shown.kv_len)]
    rule = Text(flat + "".join((cross if edge else flat) + flat for edge in edges[1:]), FAINT)
    between = [Text(), *(Text(upright if edge else " ", FAINT) for edge in edges[1:])]
    drawn = [canvas.sign(sign) for sign in signs]
    down, across = (_band(shown, axis) for axis in ("q", "kv"))
    if cells_width(shown, canvas) > canvas.width:
        down = ""
    rows = []
    for query, label in enumerate(canvas.row_labels(shown)):
        if size is not None and query and query % size[0] == 0:
            rows.append(("", rule))
        line = Text().join(chain(*zip(between, [drawn[mark] for mark in marks[query]], strict=True)))
        rows.append((label, line.append(GAP + down[query], FAINT) if down else line))
    if across:
        rows.append(("", Text(" ".join(across), FAINT)))
    lines = framed(_over(shown, canvas), rows, canvas.margin(shown))
    return Drawing(shown, lines, [*legend, *_band_legend(down + across, shown)])


def draw_blocks(shown: Picture, canvas: Canvas) -> Drawing:
    """Draws every block as a sign."""
    assert shown.blocks is not None
    assert shown.block_size is not None
    high, wide = shown.block_size
    columns = shown.blocks.shape[1]
    lines = [Text(" ").join([canvas.sign(BLOCKS[int(state)]) for state in row]) for row in shown.blocks]
    rows = zip(canvas.row_labels(shown, high), lines, strict=True)
    step = numbered(columns, 2 * columns / (len(f"{shown.kv_len:,}") + 1))
    over = ruler({2 * column: f"{column * wide:,}" for column in step}, canvas.room(shown))
    counts = {sign: shown.block_count(state) for state, sign in BLOCKS.items()}
    legend = [canvas.entry(sign, f"{count:,}") for sign, count in counts.items() if count]
    return Drawing(shown, framed([over], rows, canvas.margin(shown)), legend)


def _category_signs(shown: Picture, canvas: Canvas) -> tuple[tuple[Sign, ...], list[LegendEntry]]:
    """The sign of each category, and its entry, with its cells if there are more categories than visible and hidden."""
    signs, more = signs_of(shown.categories), is_detailed(shown.categories)
    return signs, [canvas.entry(sign, count_text(pairs) if more else "") for sign, pairs in zip(signs, shown.pairs, strict=True)]


def _cell_signs(shown: Picture, canvas: Canvas) -> tuple[NDArray[np.integer], tuple[Sign, ...], list[LegendEntry]]:
    """The index of the sign of each cell, the signs, and the legend."""
    signs, entries = _category_signs(shown, canvas)
    marks, more = shown.cells, is_detailed(shown.categories)
    if shown.blocks is None or shown.block_size is None:
        return marks, signs, entries
    high, wide = shown.block_size
    blocks = shown.blocks[np.arange(shown.q_len)[:, None] // high, np.arange(shown.kv_len) // wide]
    in_blocks = (IN_FULL, IN_PARTIAL, *(() if more else (WASTED, SKIPPED)))
    visible = np.where(blocks == FULL, len(signs), len(signs) + 1)
    hidden = marks if more else np.where(blocks == EMPTY, len(signs) + 3, len(signs) + 2)
    marks = np.where(marks == 0, visible, hidden)
    return marks, (*signs, *in_blocks), [canvas.entry(sign) for sign in in_blocks] + (entries[1:] if more else [])


def _over(shown: Picture, canvas: Canvas) -> list[str]:
    """The numbers or tokens over the columns."""
    if shown.kv_tokens is not None:
        return canvas.upright(shown.kv_tokens)
    block = shown.block_size[1] if shown.blocks is not None and shown.block_size else None
    step = numbered(shown.kv_len, 2 * shown.kv_len / (len(f"{shown.kv_len - 1:,}") + 1), block)
    return [ruler({2 * key: f"{key:,}" for key in step}, canvas.room(shown))]


def _band(shown: Picture, axis: str) -> str:
    """The first band along an axis: for each position the last character of its value; empty without a band."""
    band = next((band for band in shown.bands if band.axis == axis), None)
    if band is None:
        return ""
    ends = (*band.starts[1:], shown.q_len if axis == "q" else shown.kv_len)
    characters = [PADDED if value == PADDING else value[-1:] or " " for value in band.values]
    return "".join(character * (end - start) for character, start, end in zip(characters, band.starts, ends, strict=True))


def _band_legend(characters: str, shown: Picture) -> Iterator[LegendEntry]:
    """The legend of the bands."""
    if any(character.isdigit() for character in characters):
        label = next(band.label for band in shown.bands if band.label != PADDING)
        yield LegendEntry(Text("0-9", FAINT), f"{label}, its last digit")
    if PADDED in characters:
        yield LegendEntry(Text(PADDED, FAINT), PADDING)


def draw_area(shown: Picture, canvas: Canvas) -> Drawing:
    """Draws a picture as large as there is room."""
    shown = coarsen(shown, _step(shown, canvas))
    drawn, legend = _halves(shown) if canvas.mixing else _signs(shown, canvas)
    row_labels, over = _numbers(shown, len(drawn), 2 if canvas.mixing else 1, canvas)
    lines = framed([over], zip(row_labels, drawn, strict=True), canvas.margin(shown))
    return Drawing(shown, lines, legend)


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
    signs, legend = _category_signs(shown, canvas)
    if shown.every_cell:
        return _written(shown.cells, signs, canvas), legend
    if shown.categories[0].role == "shard":  # the most frequent shard in each pixel that has any visible cell
        marks = np.where(shown.shares[:-1].any(0), shown.shares[:-1].argmax(0), len(signs) - 1)
        return _written(marks, signs, canvas), legend
    shades = SHADES_OF_BOTH if shown.categories[0].role == "both" else SHADES
    marks = _levels(shown.shares[0], 3) + (shown.shares[0] == 1)
    if is_detailed(shown.categories):
        marks = np.where(marks == 0, len(shades) + shown.shares[1:].argmax(0), marks)
        by_share = Text("").join([canvas.sign(sign) for sign in shades[1:]])
        legend[0] = LegendEntry(by_share, f"{signs[0].meaning}, by share", legend[0].amount)
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
    colors = [[tuple(color) for color in row] for row in _colors(shown.shares, shown.categories).tolist()]
    pairs_of_rows = zip_longest(colors[::2], colors[1::2], fillvalue=[None] * len(colors[0]))
    lines = [Text.assemble(*(("▀", _style(*pair)) for pair in zip(*rows, strict=True))) for rows in pairs_of_rows]
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
    """The color of pixels of one category: that of its sign; half as bright for cells that a term masks out."""
    if sign.style == FAINT:
        return DARK
    color = tuple(Color.parse(sign.style).get_truecolor())
    red, green, blue = color if category.hides is None else ((own + dark) // 2 for own, dark in zip(color, DARK, strict=True))
    return red, green, blue


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
    cells = cells_in(shown.q_len, shown.kv_len, shown.step).astype(np.float64)
    return replace(
        shown,
        step=(factors[0] * shown.step[0], factors[1] * shown.step[1]),
        shares=summed(np.add, shown.shares * cells, factors) / summed(np.add, cells, factors),
        estimated=None if shown.estimated is None else summed(np.logical_or, shown.estimated, factors),
        hidden_by=None,
    )
