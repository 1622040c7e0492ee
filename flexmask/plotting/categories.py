"""The kinds of cells that a picture tells apart: visible and hidden, hidden by which term, or in which of two masks."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Literal, TypeAlias

from flexmask.algebra import Mask, Truth
from flexmask.plotting.caption import shortened
from flexmask.plotting.terms import terms

__all__ = ["Kind", "MOST_TERMS", "Role", "count_text", "difference", "reasons", "tells_more", "visibility"]

#: What cells of a kind are: in a picture of one mask the first two, in one of two masks the others.
Role: TypeAlias = Literal["visible", "hidden", "both", "only_a", "only_b", "neither"]

#: Terms that have a colour of their own; what later ones hide is shown together.
MOST_TERMS = 6
#: Values of a list in a label at most.
MOST_VALUES = 6


@dataclass(frozen=True)
class Kind:
    """One kind of cells. The kinds of a picture together hold each cell once.

    Attributes:
        role: what its cells are.
        label: the same in words; of what a term hides, the term.
        cells: the mask that shows these cells, or None for all that the other kinds leave.
        hides: of what a term hides, all cells that it hides, others' too; else None.
    """

    role: Role
    label: str
    cells: Mask | None = None
    hides: Mask | None = None

    @property
    def words(self) -> str:
        """What its cells are, in a legend."""
        return self.label if self.hides is None else f"hidden by {self.label}"


def visibility(mask: Mask) -> tuple[Kind, ...]:
    """What the mask shows, and what it hides."""
    return Kind("visible", "visible", mask), Kind("hidden", "hidden")


def reasons(mask: Mask, head: int | None) -> tuple[Kind, ...]:
    """What the mask shows, and of what it hides what each term hides first, in reading order: see :func:`terms`."""
    found = terms(mask, head)
    labelled = [(shortened(str(term), MOST_VALUES), ~term) for term in found]
    if len(found) > MOST_TERMS:
        further = found[MOST_TERMS - 1 :]
        labelled[MOST_TERMS - 1 :] = [(f"{len(further)} further terms", ~reduce(operator.and_, further))]
    kinds = [Kind("visible", "visible", mask)]
    shown: Mask = Truth(True)  # by the terms before
    for label, hides in labelled[:-1]:
        kinds.append(Kind("hidden", label, shown & hides, hides))
        shown = shown - hides
    return *kinds, Kind("hidden", labelled[-1][0], None, labelled[-1][1])


def difference(mask: Mask, other: Mask) -> tuple[Kind, ...]:
    """In which of two masks cells are visible."""
    return (
        Kind("both", "in both", mask & other),
        Kind("only_a", "only in A", mask - other),
        Kind("only_b", "only in B", other - mask),
        Kind("neither", "in neither"),
    )


def tells_more(kinds: Sequence[Kind]) -> bool:
    """Whether kinds tell more apart than what is visible and what is hidden."""
    return any(kind.hides is not None or kind.role not in ("visible", "hidden") for kind in kinds)


def count_text(pairs: tuple[int, int]) -> str:
    """How many cells there are, at least and at most."""
    least, most = pairs
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"
