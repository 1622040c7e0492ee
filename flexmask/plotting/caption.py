"""What is around a picture: the mask's text, shortened, notes on lengths, blocks and visible cells, and the name of its file."""

from __future__ import annotations

import os
import re
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexmask._checks import count_text, kind_of, lengths_text
from flexmask.errors import OperandError, RenderError

if TYPE_CHECKING:
    from flexmask.plotting.raster import Picture

SUFFIXES = (".png", ".svg", ".pdf", ".html")
#: The most values of a list to write.
MAX_VALUES = 32
#: Inches that the cells of a picture take across at most.
MAX_WIDTH = 100


def check_frame(title: object, width: object) -> None:
    """Raises an OperandError unless a title is a string or None, and a width a positive number or None."""
    if title is not None and not isinstance(title, str):
        raise OperandError(f"title must be a string or None, got {kind_of(title)}")
    if width is not None and not (isinstance(width, int | float) and not isinstance(width, bool) and 0 < width <= MAX_WIDTH):
        raise OperandError(f"width must be a number of inches above 0 and up to {MAX_WIDTH}, got {width!r}")


def picture_suffix(path: str | Path, suffixes: tuple[str, ...] = SUFFIXES) -> str:
    """The suffix of a picture file, in lower case.

    Raises:
        RenderError: it is not one of ``suffixes``.
        OperandError: ``path`` is not a path.
    """
    if not isinstance(path, str | os.PathLike):
        raise OperandError(f"the path of a picture must be a string or a Path, got {kind_of(path)}")
    suffix = Path(path).suffix.lower()
    if suffix not in suffixes:
        raise RenderError(f"the file of a picture must end in {', '.join(suffixes[:-1])} or {suffixes[-1]}, got {str(path)!r}")
    return suffix


def shortened(text: str, most: int = MAX_VALUES) -> str:
    """The text of a mask with only the first values of lists that hold more than ``most``."""
    values = rf"\[((?:[\w-]+, ){{{most}}})[\w, …-]+\]"
    lists = rf"\[((?:\[[^][]*\], ){{{most}}})(?:\[[^][]*\]|…)(?:, (?:\[[^][]*\]|…))*\]"
    return re.sub(lists, r"[\1…]", re.sub(values, r"[\1…]", text))


def title_lines(text: str, width: int) -> list[str]:
    """Each line of a text in at most three lines of ``width`` characters, never broken inside a list.

    Lists are shortened to avoid further lines; text that still does not fit is cut.
    """
    return [part for line in text.split("\n") for part in _fitted(line, max(width, 8))]


def _fitted(text: str, width: int) -> list[str]:
    for lines in (1, 2, 3):
        for most in (MAX_VALUES, 16, 8, 4):
            wrapped = _wrapped(shortened(text, most), width, break_long_words=False)
            if len(wrapped) <= lines and max(map(len, wrapped)) <= width:
                return wrapped
    return _wrapped(shortened(text, 4), width, max_lines=3, placeholder=" …")


def _wrapped(text: str, width: int, **options: Any) -> list[str]:
    whole = re.sub(r"\[[-\w, …]*\]", lambda found: found[0].replace(" ", "\u00a0"), text)
    lines = textwrap.wrap(whole, width, break_on_hyphens=False, **options)
    return [line.replace("\u00a0", " ") for line in lines] or [""]


def join_lines(parts: list[str], width: float, between: str) -> list[str]:
    """Parts joined into lines of at most ``width`` characters where possible."""
    lines = parts[:1]
    for part in parts[1:]:
        joined = lines[-1] + between + part
        if len(joined) <= width:
            lines[-1] = joined
        else:
            lines.append(part)
    return lines


def numbered(length: int, most: float, block: int | None = None) -> range:
    """The indices to label: all if at most ``most``, else some at round distances or at the edges of blocks.

    Round distances are powers of two where they divide the length, else 1, 2 or 5 times a power of ten.
    """
    if length <= most:
        return range(length)
    binary, decimal = (
        next(step for step in steps if length / step <= most or step >= length)
        for steps in (
            [(block or 1) * 2**power for power in range(31)],
            [digit * 10**power for power in range(10) for digit in (1, 2, 5)],
        )
    )
    return range(0, length, binary if block is not None or (length % 64 == 0 and length % binary == 0) else decimal)


def notes(picture: Picture, *, pixels: bool = True, alone: bool = True) -> list[str]:
    """Notes below a picture: sequence, head, lengths, visible share, blocks and the size of a pixel.

    Args:
        picture: the picture.
        pixels: whether to add notes about pixels.
        alone: False for a sheet of several pictures, whose notes apply to all.
    """
    parts = selection_notes(picture) if alone else []
    parts.append(lengths_text(picture.q_len, picture.kv_len, "×"))
    if picture.scores is not None and picture.scores.averaged is not None:
        parts.append(f"mean of {count_text(picture.scores.averaged, 'head')}")
    if alone and picture.categories[0].role == "visible" and (picture.scores is None or picture.pairs[1][1]):
        parts.append(visible_text(picture))
    if picture.blocks is not None and picture.block_size:
        parts.append("blocks of {:,} × {:,}".format(*picture.block_size))
    if pixels and picture.step != (1, 1):
        parts.append(f"a pixel is {picture.step[0]:,} × {picture.step[1]:,} cells")
    if pixels and picture.estimated is not None:
        parts.append("shades estimated from samples")
    if picture.block_size and picture.blocks is None:
        parts.append("blocks of {:,} × {:,} are too small to draw".format(*picture.block_size))
    return parts


def first_term_note(picture: Picture, look: str = "color") -> str | None:
    """A note on the colors, or the signs, of cells that several terms hide; None for a picture with less than two terms."""
    several = sum(category.hides is not None for category in picture.categories) > 1
    return f"a cell has the {look} of the first term that hides it" if several else None


def selection_notes(picture: Picture) -> list[str]:
    """The sequence and the head of a picture, if there are several."""
    places = (("sequence", picture.batch, picture.batches), ("head", picture.head, picture.heads))
    return [f"{name} {index}" if size is None else f"{name} {index} of {size}" for name, index, size in places if size != 1]


def visible_text(picture: Picture) -> str:
    """The visible share in percent."""
    least, most = (100 * pairs / (picture.q_len * picture.kv_len) for pairs in picture.pairs[0])
    return f"{least:.3g} % visible" if least == most else f"{least:.3g} to {most:.3g} % visible"


def panel_notes(title: str, picture: Picture) -> list[str]:
    """The title of a picture on a sheet, and of a mask how much is visible."""
    visible = [visible_text(picture)] if picture.categories[0].role == "visible" and picture.scores is None else []
    return [part for part in (title, *visible) if part]
