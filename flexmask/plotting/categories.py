"""The categories of cells in a picture: visible and hidden, hidden by a term, or visible in one of two masks."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch

from flexmask.expr.data import table
from flexmask.expr.index import q
from flexmask.expr.mask import Mask, Truth
from flexmask.plotting.caption import shortened
from flexmask.report.terms import hidden_text, reason, terms

if TYPE_CHECKING:
    from flexmask.distributed.sharding import Sharding

#: The kinds of categories: the first two in a picture of one mask, the next four in a comparison of two masks, and the last one
#: for each shard of a sequence.
Role: TypeAlias = Literal["visible", "hidden", "both", "only_a", "only_b", "neither", "shard"]

#: Terms with a color each; later terms share one.
MAX_TERMS = 6
#: Shards with a color each; with more ranks every so many share one.
MAX_SHARDS = 8
#: The most values of a list in a label.
MAX_VALUES = 6


@dataclass(frozen=True)
class Category:
    """One category of cells. The categories of a picture together hold each cell once.

    Attributes:
        role: the kind of category.
        label: what it is, in words; for cells that a term masks out, which one.
        cells: a mask that is True on its cells, or None for all cells of no other category.
        hides: a mask that is True on all cells that the term masks out, including those of other terms; None without a term.
    """

    role: Role
    label: str
    cells: Mask | None = None
    hides: Mask | None = None


def visibility(mask: Mask) -> tuple[Category, ...]:
    """The visible and the hidden cells of a mask."""
    return Category("visible", "visible", mask), Category("hidden", "hidden")


def reasons(mask: Mask, head: int | None) -> tuple[Category, ...]:
    """The visible cells, and the hidden cells by the first term in reading order that masks them out: see :func:`terms`."""
    found = terms(mask, head)
    labeled = [(hidden_text(shortened(reason(term), MAX_VALUES)), ~term) for term in found]
    if len(found) > MAX_TERMS:
        further = found[MAX_TERMS - 1 :]
        labeled[MAX_TERMS - 1 :] = [(f"hidden by {len(further)} further terms", ~reduce(operator.and_, further))]
    categories = [Category("visible", "visible", mask)]
    shown: Mask = Truth(True)  # by the terms before
    for label, hides in labeled[:-1]:
        categories.append(Category("hidden", label, shown & hides, hides))
        shown = shown - hides
    return *categories, Category("hidden", labeled[-1][0], None, labeled[-1][1])


def difference(mask: Mask, other: Mask) -> tuple[Category, ...]:
    """The cells that are visible in both masks, in one, or in neither."""
    return (
        Category("both", "in both", mask & other),
        Category("only_a", "only in A", mask - other),
        Category("only_b", "only in B", other - mask),
        Category("neither", "in neither"),
    )


def shards(mask: Mask, sharding: Sharding) -> tuple[Category, ...]:
    """The visible cells by the rank that holds the query, and the hidden cells."""
    colors = torch.empty(sharding.seq_len, dtype=torch.int64, device="cpu")
    count = min(sharding.ranks, MAX_SHARDS)
    for rank in range(sharding.ranks):
        colors[sharding.positions(rank)] = rank % count
    color = table(colors)[q]
    return (
        *(Category("shard", _ranks_text(number, sharding.ranks), mask & (color == number)) for number in range(count)),
        Category("hidden", "hidden"),
    )


def _ranks_text(first: int, ranks: int) -> str:
    """The ranks that share a color."""
    found = range(first, ranks, MAX_SHARDS)
    if len(found) == 1:
        return f"rank {first}"
    return f"ranks {', '.join(map(str, found[:3]))}{', ...' if len(found) > 3 else ''}"


def is_detailed(categories: Sequence[Category]) -> bool:
    """Whether there are more categories than visible and hidden."""
    return any(category.hides is not None or category.role not in ("visible", "hidden") for category in categories)


def count_text(pairs: tuple[int, int]) -> str:
    """A number of cells as text: exact, or its lower and upper bound."""
    least, most = pairs
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"
