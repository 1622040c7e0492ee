"""The capabilities of a terminal or file, and signs, texts and frames for it. No meaning is only a color: signs differ too."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from flexmask.plotting.raster import Picture

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
