"""The colors of pictures, after Okabe and Ito: distinguishable with color blindness, and with patterns in print.

A color has one meaning in every style. Blue is visible, gray is hidden, and darker gray is hidden in a block that is computed.
Each pale color with its pattern is hidden by one term. The differences between two masks have strong colors of their own, and so
has each shard of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle

from flexmask.plotting.categories import Category

VISIBLE = "#0072B2"
IN_PARTIAL = "#56B4E9"
WASTED = "#BFC3C8"
HIDDEN = "#EFEFEF"
UNDECIDED = "#F4B9A8"
INK = "#333333"
FAINT = "#666666"
#: Alternating colors of the stretches of a band.
STRETCHES = ("#D3E3EE", "#B4CDDF")


@dataclass(frozen=True)
class Look:
    """How the cells of one category are drawn.

    Attributes:
        color: their color.
        hatch: a pattern over it, as matplotlib names it; empty for none.
        ink: the color of the pattern.
        prominent: whether a few such cells in a pixel must stay clearly visible.
    """

    color: str
    hatch: str = ""
    ink: str = INK
    prominent: bool = False


#: Padding in a band.
PADDED = Look("#E2E2E2", "//////", "#FFFFFF")
LOOKS = {
    "visible": Look(VISIBLE, prominent=True),
    "hidden": Look(HIDDEN),
    "both": Look("#9DB4C6"),
    "only_a": Look("#332288", prominent=True),
    "only_b": Look("#D55E00", "////", "#FFFFFF", prominent=True),
    "neither": Look(HIDDEN),
}
#: The looks of cells that terms mask out, in the order of the terms.
TERMS = (
    Look("#F8E3BA", "", "#E69F00"),
    Look("#B5E0D0", "////", "#009E73"),
    Look("#E8BCD6", "....", "#CC79A7"),
    Look("#C9A27A", "\\\\\\\\", "#7D5A32"),
    Look("#FBF7A8", "||||", "#C9B900"),
    Look("#8FA35A", "xxxx", "#55662A"),
)
#: The looks of the shards of a sequence.
SHARDS = tuple(
    Look(color, prominent=True)
    for color in ("#88CCEE", "#0E6429", "#E3D47F", "#882255", "#44AA99", "#CC6677", "#AFAF3E", "#AA4499")
)


def looks_of(categories: Sequence[Category]) -> tuple[Look, ...]:
    """The look of each category of a picture."""
    terms, ranks = cycle(TERMS), iter(SHARDS)  # heads may have more terms than there are colors
    return tuple(
        next(ranks) if category.role == "shard" else LOOKS[category.role] if category.hides is None else next(terms)
        for category in categories
    )
