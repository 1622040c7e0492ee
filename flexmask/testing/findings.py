"""The findings of checks: a line of text, and a small ASCII picture if cells differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

#: The most rows and columns of a picture.
HEIGHT, WIDTH = 16, 24
CORNER = "q\\kv"
#: The signs of cells: hidden in both, visible in both, missing, extra.
SIGNS = ".#-+"
LEGEND = "# visible   . hidden   - missing   + extra"


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        name: what was checked.
        wrong: whether the check failed.
        text: the result in statistics.
        picture: the cells around the first difference, as lines; empty if there is nothing to draw.
    """

    name: str
    wrong: bool
    text: str
    picture: str = ""


def compare_cells(name: str, found: Tensor, wanted: Tensor, unit: str = "cells") -> Finding:
    """Compares cells with the expected ones.

    Args:
        name: what was checked.
        found: ``bool[B, H, rows, columns]``.
        wanted: the expected cells, of the same shape.
        unit: the name of an entry, ``"cells"`` or ``"blocks"``.
    """
    missing, extra = wanted & ~found, found & ~wanted
    wrong = missing | extra
    count = int(wrong.sum())
    if not count:
        return Finding(name, False, f"0 of {wrong.numel():,} {unit} differ")
    b, h, row, column = wrong.nonzero()[0].tolist()
    first = f"the first at b={b}, h={h}, q={row}, kv={column}"
    if unit != "cells":
        first = f"the first at b={b}, h={h} in row {row}, column {column} of the blocks"
    text = f"{count:,} of {wrong.numel():,} {unit} differ ({int(missing.sum()):,} missing, {int(extra.sum()):,} extra), {first}"
    marks = found[b, h] + 2 * wrong[b, h]  # 3 for extra cells
    return Finding(name, True, text, picture_around(marks, (row, column), SIGNS, LEGEND))


def compare_statistics(name: str, found: Mapping[str, int], wanted: Mapping[str, int]) -> Finding:
    """Compares statistics by name with the expected ones."""
    wrong = [f"{key} {found[key]:,}, not {wanted[key]:,}" for key in wanted if found[key] != wanted[key]]
    return Finding(name, bool(wrong), ", ".join(wrong) or f"{len(wanted)} statistics agree")


def picture_around(marks: Tensor, at: tuple[int, int], signs: str, legend: str) -> str:
    """A picture of the part of a table around one place.

    Args:
        marks: the index of the sign of each cell, ``int[rows, columns]``.
        at: row and column of the place.
        signs: the signs.
        legend: their meanings.
    """
    rows, columns = part_around(at, (marks.shape[0], marks.shape[1]))
    return picture_part(marks[rows, columns], (rows.start, columns.start), signs, legend)


def part_around(at: tuple[int, int], sizes: tuple[int, int]) -> tuple[slice, slice]:
    """The rows and columns of a table that a picture of one place shows."""
    starts = [max(0, min(place - most // 2, size - most)) for place, size, most in zip(at, sizes, (HEIGHT, WIDTH), strict=True)]
    rows, columns = (
        slice(start, min(start + most, size)) for start, size, most in zip(starts, sizes, (HEIGHT, WIDTH), strict=True)
    )
    return rows, columns


def picture_part(marks: Tensor, first: tuple[int, int], signs: str, legend: str) -> str:
    """A picture of a whole table; ``first`` is its first row and column in the larger one, the rest as in `picture_around`."""
    (top, left), cells = first, marks.tolist()
    margin = max(len(CORNER), len(str(top + len(cells) - 1)))
    step = (len(str(left + len(cells[0]) - 1)) + 2) // 2
    ruler = ""
    for column in range(0, len(cells[0]), step):
        ruler = f"{ruler:<{2 * column}}{left + column}"
    lines = [f"{CORNER:>{margin}} {ruler}"]
    lines += [f"{top + row:>{margin}} {' '.join(signs[mark] for mark in line)}" for row, line in enumerate(cells)]
    return "\n".join([*lines, "", legend])
