"""The rows of the report, and the sections that they are in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from benchmarks.measuring import Measurement

__all__ = ["Candidate", "Row", "Section"]

#: Measures something, or says in a warning why it cannot be.
Candidate: TypeAlias = Callable[[], Measurement | None]


@dataclass
class Row:
    """One row: how it is named, and what was measured of each candidate that could be."""

    name: str
    length: int
    candidates: Mapping[str, Candidate]
    found: dict[str, Measurement] = field(default_factory=dict)


@dataclass
class Section:
    """A table of the report.

    Attributes:
        title: its heading.
        text: what is measured, and how.
        ours: the candidate that the others are compared with.
        rows: what is measured.
    """

    title: str
    text: str
    ours: str
    rows: list[Row]
