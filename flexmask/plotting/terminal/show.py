"""Pictures in a terminal, with rich; in ASCII if the output is not a terminal.

Draws every cell if there is room, else every block of the block grid, else the picture downsampled. In a terminal a picture with
its title and its legend is not higher than the screen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Unpack

from rich.console import Console
from rich.text import Text

from flexmask._checks import kind_of
from flexmask.errors import OperandError
from flexmask.expr.mask import Mask
from flexmask.plotting.annotations import PictureOptions
from flexmask.plotting.caption import first_term_note, join_lines, notes, panel_notes, title_lines
from flexmask.plotting.raster import Picture, rasterize
from flexmask.plotting.sheet import Sheet
from flexmask.plotting.terminal.drawing import (
    FAINT,
    MAX_LINES,
    Canvas,
    Drawing,
    LegendEntry,
    blocks_fit,
    cells_fit,
    cells_width,
    draw_area,
    draw_blocks,
    draw_cells,
)

#: Characters between pictures in a row, and between entries of the legend.
BETWEEN = 3
#: Characters per line of a downsampled picture in a row of several.
NARROW = 36
#: Lines: of the shell's prompt, of a drawing at least, and of what stands around a row of pictures.
PROMPT, LEAST_LINES, TITLES = 1, 6, 5


def show(
    mask: Mask,
    q_len: int | None = None,
    kv_len: int | None = None,
    *,
    console: Console | None = None,
    **options: Unpack[PictureOptions],
) -> None:
    """Draws a mask in the terminal: see :meth:`flexmask.Mask.show`."""
    console = Console() if console is None else console
    if not isinstance(console, Console):
        raise OperandError(f"console must be a rich.console.Console, got {kind_of(console)}")
    asked: PictureOptions = {"max_blocks": (MAX_LINES, console.width), **options}
    print_drawing(rasterize(mask, q_len, kv_len, **asked), console=console)


def print_drawing(shown: Picture | Sheet, *, console: Console, legend: bool = True) -> None:
    """Draws a picture in the terminal, or the pictures of a sheet, as many in a row as there is room for.

    Args:
        shown: the picture or the sheet.
        console: where to draw.
        legend: whether the meaning of the signs is below the drawing.
    """
    canvas = Canvas.from_console(console)
    lines = _picture_lines(shown, canvas, legend) if isinstance(shown, Picture) else _sheet_lines(shown, canvas, legend)
    for line in lines:
        if canvas.plain:
            line.rstrip()
        console.print(line, soft_wrap=True)


def _picture_lines(shown: Picture, canvas: Canvas, legend: bool) -> list[Text]:
    while True:
        drawing = _drawn(shown, canvas)
        head = _head(drawing.shown.text, notes(drawing.shown, pixels=drawing.shown.blocks is None), canvas)
        lines = [*head, *drawing.lines]
        if legend:
            lines += [Text(), *_legend(drawing.legend, drawing.shown, canvas)]
        beyond = 0 if canvas.height is None else len(lines) + PROMPT - canvas.height
        if beyond <= 0 or canvas.lines <= LEAST_LINES:
            return lines
        canvas = replace(canvas, lines=max(LEAST_LINES, min(canvas.lines, len(drawing.lines)) - beyond))


def _sheet_lines(shown: Sheet, canvas: Canvas, legend: bool) -> Iterator[Text]:
    """The lines of the pictures, row by row, with one legend."""
    wanted = max(_width(one, canvas) for one in shown.pictures)
    columns = max(1, min(shown.columns, (canvas.width + BETWEEN) // (wanted + BETWEEN)))
    narrow = replace(canvas, width=(canvas.width + BETWEEN) // columns - BETWEEN)
    if canvas.height is not None:  # of one row of pictures with their titles
        narrow = replace(narrow, lines=min(MAX_LINES, max(LEAST_LINES, canvas.height - TITLES)))
    drawings = [_drawn(one, narrow) for one in shown.pictures]
    last = drawings[-1]
    yield from _head(shown.text, notes(last.shown, pixels=last.shown.blocks is None, alone=False), canvas)
    said = [", ".join(panel_notes(title, drawing.shown)) for title, drawing in zip(shown.titles, drawings, strict=True)]
    titles = [[Text(line, "bold") for line in narrow.wrapped(text)] for text in said]
    for first in range(0, len(drawings), columns):
        row = slice(first, first + columns)
        high = max(map(len, titles[row]))
        panels = [
            [*[Text()] * (high - len(title)), *title, *drawing.lines]
            for title, drawing in zip(titles[row], drawings[row], strict=True)
        ]
        yield from (*_side_by_side(panels, narrow.width), Text())
    entries = {(entry.sign.plain, entry.words): entry._replace(amount="") for drawing in drawings for entry in drawing.legend}
    if legend:
        yield from _legend(entries.values(), last.shown, canvas)


def _drawn(shown: Picture, canvas: Canvas) -> Drawing:
    if cells_fit(shown, canvas):
        return draw_cells(shown, canvas)
    if blocks_fit(shown, canvas):
        return draw_blocks(shown, canvas)
    return draw_area(replace(shown, blocks=None), canvas)


def _width(shown: Picture, canvas: Canvas) -> int:
    """The characters per line of a picture in a row of several."""
    return cells_width(shown, canvas) if cells_fit(shown, canvas) else NARROW


def _head(text: str, said: list[str], canvas: Canvas) -> Iterator[Text]:
    for style, lines in (("bold", title_lines(text, canvas.width)), (FAINT, join_lines(said, canvas.width, ", "))):
        yield from (Text(part, style) for line in lines for part in canvas.wrapped(line))
    yield Text()


def _side_by_side(panels: Sequence[Sequence[Text]], width: int) -> Iterator[Text]:
    """The lines of several panels side by side."""
    for parts in zip_longest(*panels, fillvalue=Text()):
        line = Text()
        for place, part in enumerate(parts):
            line.append(" " * (place * (width + BETWEEN) - line.cell_len)).append_text(part)
        yield line


def _legend(entries: Iterable[LegendEntry], shown: Picture, canvas: Canvas) -> Iterator[Text]:
    """The lines of the legend; long entries are wrapped."""
    pending = Text()
    for sign, words, amount in entries:
        said = f"{words} ({amount})" if amount else words
        indent = len(sign) + 1
        if pending and len(pending) + BETWEEN + indent + len(said) > canvas.width:
            yield pending
            pending = Text()
        line, *further = canvas.wrapped(said, indent)
        pending.append(" " * BETWEEN if pending else "").append_text(sign).append(f" {line}")
        for line in further:
            yield pending
            pending = Text(" " * indent + line)
    yield pending
    if note := first_term_note(shown, "letter" if canvas.plain else "sign"):
        yield from (Text(line, FAINT) for line in canvas.wrapped(note))
