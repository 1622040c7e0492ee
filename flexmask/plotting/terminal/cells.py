"""Pictures as text with a sign for each cell, or for each block of the block grid."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from rich.text import Text

from flexmask.plotting.annotations import PADDING
from flexmask.plotting.caption import numbered
from flexmask.plotting.categories import count_text, is_detailed
from flexmask.plotting.raster import EMPTY, FULL, Picture
from flexmask.plotting.terminal.canvas import Canvas, Drawing, LegendEntry, framed, ruler
from flexmask.plotting.terminal.signs import BLOCKS, FAINT, IN_FULL, IN_PARTIAL, SKIPPED, WASTED, Sign, signs_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: Lines between blocks, upright, flat and crossing, by whether they are plain.
RULES = {False: ("│", "─", "┼"), True: ("|", "-", "+")}
#: Characters between the cells and the band of the queries.
GAP = "  "
PADDED = "~"


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
    marks, signs, legend = _signs(shown, canvas)
    size = shown.block_size if shown.blocks is not None else None
    upright, flat, cross = RULES[canvas.plain]
    edges = [size is not None and key % size[1] == 0 for key in range(shown.kv_len)]
    rule = Text(flat + "".join((cross if edge else flat) + flat for edge in edges[1:]), FAINT)
    drawn = [canvas.sign(sign) for sign in signs]
    down, across = (_band(shown, axis) for axis in ("q", "kv"))
    if cells_width(shown, canvas) > canvas.width:
        down = ""
    lines, row_labels = [], []
    for query, label in enumerate(canvas.row_labels(shown)):
        if size is not None and query and query % size[0] == 0:
            lines.append(rule)
            row_labels.append("")
        line = Text()
        for key, edge in enumerate(edges):
            if key:
                line.append(upright if edge else " ", FAINT)
            line.append_text(drawn[marks[query, key]])
        lines.append(line.append(GAP + down[query], FAINT) if down else line)
        row_labels.append(label)
    if across:
        lines.append(Text(" ".join(across), FAINT))
        row_labels.append("")
    return Drawing(
        shown,
        list(framed(_over(shown, canvas), row_labels, lines, canvas.margin(shown))),
        [*legend, *_band_legend(down + across, shown)],
    )


def draw_blocks(shown: Picture, canvas: Canvas) -> Drawing:
    """Draws every block as a sign."""
    assert shown.blocks is not None
    assert shown.block_size is not None
    high, wide = shown.block_size
    columns = shown.blocks.shape[1]
    lines = [Text(" ").join([canvas.sign(BLOCKS[int(state)]) for state in row]) for row in shown.blocks]
    row_labels = canvas.row_labels(shown, high)
    step = numbered(columns, 2 * columns / (len(f"{shown.kv_len:,}") + 1))
    over = ruler({2 * column: f"{column * wide:,}" for column in step}, canvas.room(shown))
    legend = []
    for state, sign in BLOCKS.items():
        if count := int((shown.blocks == state).sum()):
            legend.append(canvas.entry(sign, f"{count:,}"))
    return Drawing(shown, list(framed([over], row_labels, lines, canvas.margin(shown))), legend)


def _signs(shown: Picture, canvas: Canvas) -> tuple[NDArray[np.uint8], tuple[Sign, ...], list[LegendEntry]]:
    """The index of the sign of each cell, the signs, and the legend."""
    marks, signs, more = shown.cells.copy(), signs_of(shown.categories), is_detailed(shown.categories)
    entries = [canvas.entry(sign, count_text(pairs) if more else "") for sign, pairs in zip(signs, shown.pairs, strict=True)]
    if shown.blocks is None or shown.block_size is None:
        return marks, signs, entries
    high, wide = shown.block_size
    blocks = shown.blocks[np.arange(shown.q_len)[:, None] // high, np.arange(shown.kv_len) // wide]
    in_blocks = (IN_FULL, IN_PARTIAL, *(() if more else (WASTED, SKIPPED)))
    visible = marks == 0
    marks[visible] = np.where(blocks == FULL, len(signs), len(signs) + 1)[visible]
    if not more:
        marks[~visible] = np.where(blocks == EMPTY, len(signs) + 3, len(signs) + 2)[~visible]
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
