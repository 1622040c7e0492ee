"""The signs and colors of a drawing in characters. Signs differ in themselves too, so that no meaning is only a color."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, cycle
from string import ascii_lowercase

from flexmask.plotting.categories import Category
from flexmask.plotting.palette import looks_of
from flexmask.plotting.raster import EMPTY, FULL, PARTIAL, UNKNOWN

FAINT = "bright_black"


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

LEVELS = ("none visible", "up to a third", "up to two thirds", "more", "all")
#: Signs of pixels by their visible share; and by the share in both masks, where + and - have other meanings.
STYLES = (FAINT, *[VISIBLE.style] * 4)
SHADES = tuple(map(Sign, "·░▒▓█", ".-+*#", STYLES, LEVELS))
STYLES_OF_BOTH = (FAINT, *[ROLES["both"].style] * 4)
SHADES_OF_BOTH = tuple(map(Sign, "·░▒▓█", ".:o8#", STYLES_OF_BOTH, LEVELS))


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
