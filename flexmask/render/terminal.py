"""Pictures in a terminal, with rich; in plain ASCII where the output is not one.

There are three ways to draw, and the first that fits is taken: every cell, every block of the block grid, or the visible
fraction by area.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from rich.color import Color
from rich.console import Console
from rich.style import Style
from rich.text import Text

from flexmask.render.caption import notes, numbered, packed, title_lines
from flexmask.render.picture import EMPTY, FULL, PARTIAL, UNKNOWN, Picture, picture

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from flexmask.algebra import Mask

__all__ = ["show"]

#: Lines of a drawing at most.
MOST_LINES = 64
CORNER = "q\\kv"
#: Without colour: nothing visible, up to a third, up to two thirds, more, all.
SHADES = {False: "·░▒▓█", True: ".-+*#"}
RULES = {False: "│─┼", True: "|-+"}
#: The colours of a pixel in which nothing is visible, and in which everything is.
DARK, BRIGHT = np.array([58, 58, 58]), np.array([86, 180, 233])
#: Shades between the two.
LEVELS = 20
FAINT = "bright_black"


@dataclass(frozen=True)
class Look:
    """How cells or blocks of one kind are drawn: in a terminal, in ASCII, in rich's style; and what the legend says."""

    glyph: str
    plain: str
    style: str
    meaning: str


HIDDEN, VISIBLE = Look("⬚", ".", FAINT, "hidden"), Look("■", "#", "#2A93D5", "visible")
SKIPPED, WASTED = Look("·", " ", FAINT, "hidden, empty block"), Look("□", ".", "#E69F00", "hidden, partial block")
IN_PARTIAL, IN_FULL = Look("▣", "x", "#56B4E9", "visible, partial block"), Look("■", "#", "#0072B2", "visible, full block")
BLOCKS = {
    FULL: Look("■", "#", "#0072B2", "full block"),
    PARTIAL: Look("▣", "x", "#E69F00", "partial block"),
    EMPTY: Look("·", ".", FAINT, "empty block"),
    UNKNOWN: Look("?", "?", "#CC79A7", "not known"),
}


@dataclass(frozen=True)
class _Canvas:
    """What there is to draw on.

    Attributes:
        plain: ASCII only.
        colored: colours can be shown.
        margin: characters of the numbers beside the lines.
        width: characters of a line.
    """

    plain: bool
    colored: bool
    margin: int
    width: int

    @property
    def room(self) -> int:
        """Characters of a line of the drawing."""
        return max(8, self.width - self.margin - 1)

    def pixels(self, q_len: int, kv_len: int) -> tuple[int, int]:
        """Rows and columns for a drawing by area. A character is twice as high as wide; with colour it is two pixels."""
        step = max(1, -(-kv_len // self.room), -(-q_len // (2 * MOST_LINES)))
        every_cell = step == 1 and q_len <= MOST_LINES
        high = step if self.colored or every_cell else 2 * step
        return max(1, -(-q_len // high)), -(-kv_len // step)

    def glyph(self, look: Look) -> Text:
        return Text(look.plain if self.plain else look.glyph, look.style)

    def meaning(self, look: Look) -> Text:
        sign = Text("blank") if self.plain and look.plain == " " else self.glyph(look)
        return sign.append(f" {look.meaning}", "default")


@dataclass(frozen=True)
class _Drawing:
    """Lines with the number beside each, numbers over the columns where they start, and the legend."""

    lines: list[Text]
    beside: list[str]
    over: dict[int, str]
    legend: list[Text]


def show(
    mask: Mask,
    q_len: int,
    kv_len: int | None = None,
    *,
    batch: int = 0,
    head: int = 0,
    block_size: int | tuple[int, int] | None = None,
    q_offset: int | Tensor = 0,
    console: Console | None = None,
) -> None:
    """Draws a mask in the terminal: queries down, keys across.

    Args:
        mask: the mask.
        q_len: number of queries.
        kv_len: number of keys, by default ``q_len``.
        batch: which sequence of the batch.
        head: which head.
        block_size: also draws the block grid: queries and keys in a block, or one number for both.
        q_offset: position of the first query.
        console: where to draw; by default the standard output. Where that is no terminal, the drawing is plain ASCII.
    """
    console = console or Console()
    plain = not console.is_terminal or console.options.ascii_only
    colored = not plain and console.color_system is not None and not console.no_color
    last = q_len - 1 + (q_offset if isinstance(q_offset, int) else int(q_offset.max()))
    canvas = _Canvas(plain, colored, max(len(CORNER), len(f"{last:,}")), console.width)
    keys = q_len if kv_len is None else kv_len
    every_cell = 0 < q_len <= MOST_LINES and 0 < 2 * keys <= canvas.room + 1
    shown = picture(
        mask,
        q_len,
        kv_len,
        batch=batch,
        head=head,
        block_size=block_size,
        q_offset=q_offset,
        most_pixels=(q_len, keys) if every_cell else canvas.pixels(q_len, keys),
        most_blocks=(MOST_LINES, canvas.room // 2),
    )
    if every_cell:
        drawing = _cells(shown, canvas)
    elif shown.blocks is not None:
        drawing = _blocks(shown, shown.blocks, canvas)
    else:
        drawing = _halves(shown) if colored else _shades(shown, canvas)
    said = notes(shown, pixels=every_cell or shown.blocks is None)
    for line in _page(shown.title, said, drawing, canvas):
        if plain:
            line.rstrip()
        console.print(line, no_wrap=True, overflow="ignore", crop=False, soft_wrap=True)


def _page(title: str, said: list[str], drawing: _Drawing, canvas: _Canvas) -> Iterator[Text]:
    for line in title_lines(title, canvas.width):
        yield Text(line.replace("…", "...") if canvas.plain else line, "bold")
    for line in packed(said, canvas.width, ", "):
        yield Text(line.replace("×", "x") if canvas.plain else line, FAINT)
    yield Text()
    ruler = ""
    for column, number in drawing.over.items():
        if canvas.margin + 1 + column + len(number) <= canvas.width:
            ruler += " " * (column - len(ruler)) + number
    yield Text(f"{CORNER:>{canvas.margin}} {ruler}", FAINT)
    for number, drawn in zip(drawing.beside, drawing.lines, strict=True):
        yield Text(f"{number:>{canvas.margin}} ", FAINT).append_text(drawn)
    yield Text()
    pending = Text()
    for entry in drawing.legend:
        if pending and len(pending) + 3 + len(entry) > canvas.width:
            yield pending
            pending = Text()
        pending.append("   " if pending else "").append_text(entry)
    yield pending


def _cells(shown: Picture, canvas: _Canvas) -> _Drawing:
    """Every cell as a glyph, with lines between the blocks."""
    size, kinds = None, np.zeros(shown.visible.shape, dtype=np.int8)
    looks = {0: (HIDDEN, VISIBLE)}
    if shown.blocks is not None and shown.block_size is not None:
        size = shown.block_size
        kinds = shown.blocks[np.arange(shown.q_len)[:, None] // size[0], np.arange(shown.kv_len) // size[1]]
        looks = {FULL: (WASTED, IN_FULL), PARTIAL: (WASTED, IN_PARTIAL), EMPTY: (SKIPPED, IN_PARTIAL)}
    upright, flat, cross = tuple(RULES[canvas.plain])
    edges = [size is not None and key % size[1] == 0 for key in range(shown.kv_len)]
    rule = Text(flat + "".join((cross if edge else flat) + flat for edge in edges[1:]), FAINT)
    lines, beside = [], []
    for row in range(shown.q_len):
        if size is not None and row and row % size[0] == 0:
            lines.append(rule)
            beside.append("")
        line = Text()
        for key, edge in enumerate(edges):
            if key:
                line.append(upright if edge else " ", FAINT)
            line.append_text(canvas.glyph(looks[int(kinds[row, key])][int(shown.visible[row, key])]))
        lines.append(line)
        beside.append(f"{row + shown.q_offset:,}")
    step = numbered(shown.kv_len, 2 * shown.kv_len / (len(f"{shown.kv_len - 1:,}") + 1), size[1] if size else None)
    used = [VISIBLE, HIDDEN] if size is None else [IN_FULL, IN_PARTIAL, WASTED, SKIPPED]
    return _Drawing(lines, beside, {2 * key: f"{key:,}" for key in step}, [canvas.meaning(look) for look in used])


def _blocks(shown: Picture, blocks: NDArray[np.int8], canvas: _Canvas) -> _Drawing:
    """Every block as a glyph."""
    assert shown.block_size is not None
    high, wide = shown.block_size
    lines = [Text(" ").join([canvas.glyph(BLOCKS[int(kind)]) for kind in row]) for row in blocks]
    beside = [f"{row * high + shown.q_offset:,}" for row in range(blocks.shape[0])]
    step = numbered(blocks.shape[1], 2 * blocks.shape[1] / (len(f"{shown.kv_len:,}") + 1))
    over = {2 * column: f"{column * wide:,}" for column in step}
    legend = []
    for kind, look in BLOCKS.items():
        if count := int((blocks == kind).sum()):
            legend.append(canvas.meaning(look).append(f" ({count:,})", "default"))
    return _Drawing(lines, beside, over, legend)


def _halves(shown: Picture) -> _Drawing:
    """Two pixels in each character, one above the other, coloured by the visible fraction."""
    levels = np.ceil(LEVELS * shown.visible.astype(np.float64)).astype(np.int64)
    lines = []
    for top in range(0, levels.shape[0], 2):
        under = levels[top + 1].tolist() if top + 1 < levels.shape[0] else [None] * levels.shape[1]
        line = Text()
        for pair in zip(levels[top].tolist(), under, strict=True):
            line.append("▀", _style(*pair))
        lines.append(line)
    legend = [
        Text("█", _style(level, None)).append(f" {label}", "default")
        for level, label in ((0, "none visible"), (1, "a little"), (LEVELS // 2, "half"), (LEVELS, "all"))
    ]
    return _Drawing(lines, *_numbers(shown, len(lines), 2), legend)


@cache
def _style(upper: int, lower: int | None) -> Style:
    """The colours of two pixels; what is not 0 is never too faint to be seen."""
    opacity = (0.0 if level == 0 else 0.3 + 0.7 * level / LEVELS for level in (upper, lower or 0))
    front, back = (Color.from_rgb(*(DARK + mixed * (BRIGHT - DARK))) for mixed in opacity)
    return Style(color=front, bgcolor=None if lower is None else back)


def _shades(shown: Picture, canvas: _Canvas) -> _Drawing:
    """A character for each pixel, darker the more is visible."""
    shades = np.array(list(SHADES[canvas.plain]))
    level = np.ceil(3 * shown.visible.astype(np.float64)).astype(np.int64) + (shown.visible == 1)
    lines = [Text("".join(row)) for row in shades[level]]
    labels = ("none visible", "up to a third", "up to two thirds", "more", "all")
    legend = [Text(f"{shade} {label}") for shade, label in zip(shades.tolist(), labels, strict=True)]
    return _Drawing(lines, *_numbers(shown, len(lines), 1), legend)


def _numbers(shown: Picture, lines: int, high: int) -> tuple[list[str], dict[int, str]]:
    """The numbers of a drawing by area: of the first query of some lines, and the first key of some columns."""
    marked = set(numbered(lines, lines / 4))
    beside = [f"{line * high * shown.step[0] + shown.q_offset:,}" if line in marked else "" for line in range(lines)]
    columns = shown.visible.shape[1]
    step = numbered(columns, columns / (len(f"{shown.kv_len:,}") + 2))
    return beside, {column: f"{column * shown.step[1]:,}" for column in step}
