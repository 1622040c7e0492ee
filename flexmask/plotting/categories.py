"""The categories of cells in a picture: visible and hidden, hidden by which term, or in which of two masks."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Literal, TypeAlias

from flexmask.expr.mask import Mask, Truth
from flexmask.plotting.caption import shortened
from flexmask.plotting.terms import terms

__all__ = ["Category", "MAX_TERMS", "Role", "count_text", "difference", "is_detailed", "reasons", "visibility"]

#: What cells of a category are: in a picture of one mask the first two, in one of two masks the others.
Role: TypeAlias = Literal["visible", "hidden", "both", "only_a", "only_b", "neither"]

#: Terms that have a colour of their own; what later ones hide is shown together.
MAX_TERMS = 6
#: Values of a list in a label at most.
MAX_VALUES = 6


@dataclass(frozen=True)
class Category:
    """One category of cells. The categories of a picture together hold each cell once.

    Attributes:
        role: what its cells are.
        label: the same in words; of what a term hides, the term.
        cells: the mask that shows these cells, or None for all that the other categories leave.
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


def visibility(mask: Mask) -> tuple[Category, ...]:
    """What the mask shows, and what it hides."""
    return Category("visible", "visible", mask), Category("hidden", "hidden")


def reasons(mask: Mask, head: int | None) -> tuple[Category, ...]:
    """What the mask shows, and of what it hides what each term hides first, in reading order: see :func:`terms`."""
    found = terms(mask, head)
    labelled = [(shortened(str(term), MAX_VALUES), ~term) for term in found]
    if len(found) > MAX_TERMS:
        further = found[MAX_TERMS - 1 :]
        labelled[MAX_TERMS - 1 :] = [(f"{len(further)} further terms", ~reduce(operator.and_, further))]
    categories = [Category("visible", "visible", mask)]
    shown: Mask = Truth(True)  # by the terms before
    for label, hides in labelled[:-1]:
        categories.append(Category("hidden", label, shown & hides, hides))
        shown = shown - hides
    return *categories, Category("hidden", labelled[-1][0], None, labelled[-1][1])


def difference(mask: Mask, other: Mask) -> tuple[Category, ...]:
    """In which of two masks cells are visible."""
    return (
        Category("both", "in both", mask & other),
        Category("only_a", "only in A", mask - other),
        Category("only_b", "only in B", other - mask),
        Category("neither", "in neither"),
    )


def is_detailed(categories: Sequence[Category]) -> bool:
    """Whether there are more categories than visible and hidden."""
    return any(category.hides is not None or category.role not in ("visible", "hidden") for category in categories)


def count_text(pairs: tuple[int, int]) -> str:
    """How many cells there are, at least and at most."""
    least, most = pairs
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"
