"""The legend of a picture: the meaning of each color, with its number of cells or blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from textwrap import TextWrapper
from typing import Any

import numpy as np
from matplotlib.patches import Patch
from numpy.typing import NDArray

from flexmask.plotting.annotations import PADDING
from flexmask.plotting.categories import count_text, is_detailed
from flexmask.plotting.mpl.drawing import faded, opacity, squares
from flexmask.plotting.mpl.heat import UNSEEN, scale_marks
from flexmask.plotting.palette import FAINT, HIDDEN, IN_PARTIAL, INK, PADDED, UNDECIDED, VISIBLE, WASTED, Look, looks_of
from flexmask.plotting.raster import EMPTY, FULL, PARTIAL, UNKNOWN, Picture

#: How legends are set.
LEGEND: dict[str, Any] = {
    "alignment": "left",
    "frameon": False,
    "fontsize": 7.5,
    "title_fontsize": 7.5,
    "borderpad": 0,
    "borderaxespad": 0,
    "handlelength": 1.1,
    "handleheight": 1.1,
    "handletextpad": 0.6,
    "labelspacing": 0.35,
    "columnspacing": 1.4,
    "labelcolor": INK,
}


def entries_of(pictures: Sequence[Picture], characters: int) -> tuple[list[Patch], int]:
    """The entries, their labels wrapped to a width in characters, and the number of columns.

    Args:
        pictures: the picture, or those of a sheet, whose counts differ and are left out.
        characters: characters of a line at most.
    """
    found: dict[str, Look] = {}
    for shown in pictures:
        for look, label, count in _entries(shown):
            found.setdefault(f"{label} ({count})" if count and len(pictures) == 1 else label, look)
    fill = TextWrapper(characters, break_long_words=False, break_on_hyphens=False).fill  # no name is broken
    return [_patch(look, fill(label)) for label, look in found.items()], min(map(_columns, pictures))


def legend_lines(entries: list[Patch], columns: int) -> int:
    """The lines that entries take."""
    if columns > 1:
        return -(-len(entries) // columns)
    return sum(str(entry.get_label()).count("\n") + 1 for entry in entries)


def _entries(shown: Picture) -> Iterator[tuple[Look, str, str]]:
    """How something looks, what it is, and how many there are, of all that the picture has."""
    if shown.scores is not None:
        yield from ((Look(color), label, "") for color, label in scale_marks(shown.scores))
        if shown.pairs[1][1]:
            yield UNSEEN, "hidden", ""
    elif is_detailed(shown.categories):
        yield from _of_categories(shown)
    elif shown.blocks is not None:
        yield from _of_blocks(shown.blocks)
    elif shown.step == (1, 1):
        yield Look(VISIBLE), "visible", ""
        yield Look(HIDDEN), "hidden", ""
    else:
        for label, share in {"none visible": 0.0, "25 %": 0.25, "50 %": 0.5, "75 %": 0.75, "all": 1.0}.items():
            yield Look(faded(VISIBLE, float(opacity(share)))), label, ""
    if shown.blocks is not None and (shown.blocks == UNKNOWN).any():
        yield Look(UNDECIDED), "blocks of unknown kind", f"{(shown.blocks == UNKNOWN).sum():,}"
    if shown.estimated is not None:
        yield Look(UNDECIDED), "estimated", ""
    if any(PADDING in band.values for band in shown.bands):
        yield PADDED, "padding", ""


def _of_categories(shown: Picture) -> Iterator[tuple[Look, str, str]]:
    """The categories with their cells; of terms only those that hide some."""
    for look, category, pairs in zip(looks_of(shown.categories), shown.categories, shown.pairs, strict=True):
        if category.role == "visible" and shown.blocks is not None and shown.block_size is not None:
            in_full = int((shown.blocks == FULL).sum()) * shown.block_size[0] * shown.block_size[1]
            if in_full:
                yield Look(VISIBLE), "visible, in full blocks", f"{in_full:,}"
            yield Look(IN_PARTIAL), "visible, in partial blocks", count_text((pairs[0] - in_full, pairs[1] - in_full))
        elif category.hides is None or pairs[1]:
            yield look if squares(shown) else replace(look, hatch=""), category.label, count_text(pairs)
    if shown.blocks is not None and (shown.blocks == EMPTY).any():
        yield Look("#FFFFFF"), "paler: in empty blocks, skipped", ""


def _of_blocks(blocks: NDArray[np.int8]) -> Iterator[tuple[Look, str, str]]:
    """The states of blocks with their number."""
    count = {state: int((blocks == state).sum()) for state in (FULL, PARTIAL, EMPTY)}
    some = [state for state, number in count.items() if number]
    if FULL in some:
        yield Look(VISIBLE), "full blocks", f"{count[FULL]:,}"
    if PARTIAL in some:
        yield Look(IN_PARTIAL), "partial blocks, visible cells", f"{count[PARTIAL]:,}"
        yield Look(WASTED), "partial blocks, hidden cells: computed, then discarded", ""
    if EMPTY in some:
        yield Look(HIDDEN), "empty blocks, skipped", f"{count[EMPTY]:,}"


def _columns(shown: Picture) -> int:
    if shown.blocks is not None or is_detailed(shown.categories):
        return 1
    return 3 if shown.step == (1, 1) and shown.scores is None else 6


def _patch(look: Look, label: str) -> Patch:
    options: dict[str, Any] = {"hatch": look.hatch or None, "edgecolor": look.ink if look.hatch else FAINT}
    return Patch(facecolor=look.color, linewidth=0.4, label=label, **options)
