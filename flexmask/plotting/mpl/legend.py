"""What is around a picture on matplotlib axes: labels, bands of documents, trees and padding, and the legend of the colors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from textwrap import TextWrapper
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.transforms import ScaledTranslation

from flexmask.plotting import palette
from flexmask.plotting.annotations import PADDING, Band
from flexmask.plotting.caption import numbered
from flexmask.plotting.categories import count_text, is_detailed
from flexmask.plotting.mpl.drawing import UNSEEN, faded, opacity, scale_marks, squares
from flexmask.plotting.palette import FAINT, INK, Look, looks_of
from flexmask.plotting.raster import EMPTY, FULL, PARTIAL, UNKNOWN, Picture

#: Inches: a character of the numbers on an axis, and a band with the gap before it.
NUMBER_CHARACTER, BAND, GAP = 0.0625, 0.15, 0.04
#: Numbers along an axis at most, where there is not one for every index.
MAX_NUMBERS = 9
#: Characters of a token at most, and of the label of a band of queries, which is below the title.
MAX_CHARACTERS, MAX_UPRIGHT = 16, 10
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


def band_room(shown: Picture, axis: str) -> float:
    """Inches that the bands along an axis take."""
    return BAND * sum(band.axis == axis for band in shown.bands)


def token_room(tokens: tuple[str, ...] | None) -> float:
    """Inches that tokens take, written at a right angle to the axis or along it."""
    return 0.0 if tokens is None else NUMBER_CHARACTER * max(len(_cut(token)) for token in tokens)


def label_room(shown: Picture) -> float:
    """Inches that the numbers or tokens of the queries take."""
    return max(NUMBER_CHARACTER * len(f"{shown.q_offset + shown.q_len:,}"), token_room(shown.q_tokens))


def label_axes(shown: Picture, ax: Axes, *, names: bool = True) -> None:
    """Numbers the queries and keys, or writes their tokens, and draws the bands; ``names`` says what the axes are.

    Bands are below the cells for the keys, and to their right for the queries.
    """
    ax.apply_aspect()
    box, points = ax.get_window_extent(), 72 / ax.figure.dpi
    block = shown.block_size if shown.blocks is not None else None
    rooms = [box.height * points / 9, box.width * points / (72 * NUMBER_CHARACTER * len(f"{shown.kv_len:,}") + 6)]
    if shown.q_len == shown.kv_len:
        rooms = [min(rooms)] * 2
    down, across = (
        numbered(length, room if length <= room else min(room, MAX_NUMBERS), size)
        for length, room, size in zip((shown.q_len, shown.kv_len), rooms, block or (None, None), strict=True)
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
    for axis in ("q", "kv"):
        for place, band in enumerate(band for band in shown.bands if band.axis == axis):
            _draw_band(shown, ax, band, place)


def _draw_band(shown: Picture, ax: Axes, band: Band, place: int) -> None:
    """One band, in the units of the axis along it, and in inches across."""
    figure = ax.figure
    along_keys = band.axis == "kv"
    length = shown.kv_len if along_keys else shown.q_len
    inch, box, offset = figure.dpi_scale_trans, ax.get_window_extent(), GAP + BAND * place
    along, across = (box.width, box.height) if along_keys else (box.height, box.width)
    thick, inches = (BAND - GAP) * figure.dpi / across, along / figure.dpi / length  # inches of a position
    transform = ax.get_xaxis_transform() if along_keys else ax.get_yaxis_transform()
    transform += ScaledTranslation(*((0.0, -offset) if along_keys else (offset, 0.0)), inch)
    font: dict[str, Any] = {"fontsize": 5.5, "parse_math": False, "color": FAINT}
    label = "" if band.label == PADDING else _cut(band.label, MAX_CHARACTERS if along_keys else MAX_UPRIGHT)
    if along_keys:
        at = transform + ScaledTranslation(-0.02, 0, inch)
        ax.text(0, -thick / 2, label, transform=at, ha="right", va="center_baseline", **font)
        font |= {"va": "center_baseline", "color": INK}
    else:
        at = transform + ScaledTranslation(0, 0.02, inch)
        ax.text(1 + thick / 2, 0, label, transform=at, rotation=90, ha="center", va="bottom", **font)
        font |= {"va": "center", "color": INK, "rotation": 270}
    for number, (start, stop, value) in enumerate(zip(band.starts, (*band.starts[1:], length), band.values, strict=True)):
        if not value:
            continue
        padding = value == PADDING
        corner, size = ((start, -thick), (stop - start, thick)) if along_keys else ((1, start), (thick, stop - start))
        color = palette.PADDED.color if padding else palette.STRETCHES[number % 2]
        patch = Rectangle(corner, *size, transform=transform, facecolor=color, edgecolor="white", linewidth=0.6)
        patch.set(clip_on=False, hatch=palette.PADDED.hatch if padding else None)
        ax.add_patch(patch)
        if len(value) * NUMBER_CHARACTER * 0.85 < (stop - start) * inches:
            ax.text(corner[0] + size[0] / 2, corner[1] + size[1] / 2, value, transform=transform, ha="center", **font)


def _labels(indices: range, tokens: tuple[str, ...] | None, offset: int) -> list[str]:
    return [f"{index + offset:,}" if tokens is None else _cut(tokens[index]) for index in indices]


def _cut(token: str, most: int = MAX_CHARACTERS) -> str:
    return token if len(token) <= most else token[: most - 1] + "…"


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


def draw_legend(
    owner: Axes | Figure, entries: tuple[list[Patch], int], said: list[str], corner: tuple[float, float], **place: Any
) -> None:
    """Draws notes and the entries of the legend, in so many columns, with their upper left corner at a place."""
    handles, columns = entries
    legend = owner.legend(
        handles=handles, ncols=columns, title="\n".join(said), loc="upper left", bbox_to_anchor=corner, **place, **LEGEND
    )
    legend.get_title().set(color=FAINT, parse_math=False)


def _entries(shown: Picture) -> Iterator[tuple[Look, str, str]]:
    """How something looks, what it is, and how many there are, of all that the picture has."""
    if shown.scores is not None:
        yield from ((Look(color), label, "") for color, label in scale_marks(shown.scores))
        if shown.pairs[1][1]:
            yield UNSEEN, "hidden", ""
    elif is_detailed(shown.categories):
        yield from _of_categories(shown)
    elif shown.blocks is not None:
        yield from _of_blocks(shown)
    elif shown.step == (1, 1):
        yield Look(palette.VISIBLE), "visible", ""
        yield Look(palette.HIDDEN), "hidden", ""
    else:
        for label, share in {"none visible": 0.0, "25 %": 0.25, "50 %": 0.5, "75 %": 0.75, "all": 1.0}.items():
            yield Look(faded(palette.VISIBLE, float(opacity(share)))), label, ""
    if unknown := shown.block_count(UNKNOWN):
        yield Look(palette.UNDECIDED), "blocks of unknown kind", f"{unknown:,}"
    if shown.estimated is not None:
        yield Look(palette.UNDECIDED), "estimated", ""
    if any(PADDING in band.values for band in shown.bands):
        yield palette.PADDED, "padding", ""


def _of_categories(shown: Picture) -> Iterator[tuple[Look, str, str]]:
    """The categories with their cells; of terms only those that hide some."""
    for look, category, pairs in zip(looks_of(shown.categories), shown.categories, shown.pairs, strict=True):
        if category.role == "visible" and shown.blocks is not None and shown.block_size is not None:
            in_full = shown.block_count(FULL) * shown.block_size[0] * shown.block_size[1]
            if in_full:
                yield Look(palette.VISIBLE), "visible, in full blocks", f"{in_full:,}"
            yield Look(palette.IN_PARTIAL), "visible, in partial blocks", count_text((pairs[0] - in_full, pairs[1] - in_full))
        elif category.hides is None or pairs[1]:
            yield look if squares(shown) else replace(look, hatch=""), category.label, count_text(pairs)
    if shown.block_count(EMPTY):
        yield Look("#FFFFFF"), "paler: in empty blocks, skipped", ""


def _of_blocks(shown: Picture) -> Iterator[tuple[Look, str, str]]:
    """The states of blocks with their number."""
    if full := shown.block_count(FULL):
        yield Look(palette.VISIBLE), "full blocks", f"{full:,}"
    if partial := shown.block_count(PARTIAL):
        yield Look(palette.IN_PARTIAL), "partial blocks, visible cells", f"{partial:,}"
        yield Look(palette.WASTED), "partial blocks, hidden cells: computed, then discarded", ""
    if empty := shown.block_count(EMPTY):
        yield Look(palette.HIDDEN), "empty blocks, skipped", f"{empty:,}"


def _columns(shown: Picture) -> int:
    if shown.blocks is not None or is_detailed(shown.categories):
        return 1
    return 3 if shown.step == (1, 1) and shown.scores is None else 6


def _patch(look: Look, label: str) -> Patch:
    options: dict[str, Any] = {"hatch": look.hatch or None, "edgecolor": look.ink if look.hatch else FAINT}
    return Patch(facecolor=look.color, linewidth=0.4, label=label, **options)
