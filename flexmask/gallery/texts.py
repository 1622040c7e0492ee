"""Texts that README and page share."""

from __future__ import annotations

import re
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from flexmask.gallery.entry import Entry
from flexmask.gallery.rendered import RenderedEntry
from flexmask.plotting.caption import visible_text
from flexmask.plotting.categories import count_text
from flexmask.plotting.raster import EMPTY, FULL, PARTIAL, Picture

#: Runs of keys of a row that are listed.
MAX_RUNS = 3
ADDRESS = re.compile(r"https?://[^\s;,]+")


def sections(found: Iterable[RenderedEntry]) -> dict[str, list[RenderedEntry]]:
    """The entries of each family, under its name with a capital letter."""
    families: dict[str, list[RenderedEntry]] = {}
    for one in found:
        name = one.entry.family.replace("_", " ")
        families.setdefault(name[0].upper() + name[1:], []).append(one)
    return families


def linked(source: str) -> list[tuple[str, str | None]]:
    """A source in parts: texts, and what is written for an address, with the address."""
    parts: list[tuple[str, str | None]] = []
    end = 0
    for address in ADDRESS.finditer(source):
        parts.append((source[end : address.start()], None))
        parts.append((address[0].split("//")[1], address[0]))
        end = address.end()
    return [(text, address) for text, address in [*parts, (source[end:], None)] if text]


def lengths(entry: Entry) -> str:
    """How long it is, and which part is drawn."""
    said = [f"{entry.q_len} queries × {entry.kv_len} keys"]
    if entry.q_offset:
        said.append(f"the first query at position {entry.q_offset}")
    for name, plural, index in (("sequence", "sequences", entry.batch), ("head", "heads", entry.head)):
        if index:
            said.append(f"all {plural}" if index == "all" else f"{name} {index}")
    return ", ".join(said)


def described(found: RenderedEntry) -> str:
    """What the picture of an entry shows, for those who do not see it: computed from its cells.

    Of each panel it says the visible share, the keys of the first, the middle and the last query, the numbers of blocks, and the
    cells that each term hides.
    """
    panels = zip(found.sheet.titles, found.sheet.pictures, strict=True)
    return " ".join([f"{lengths(found.entry)}.", *(_panel(title, shown) for title, shown in panels)])


def _panel(title: str, shown: Picture) -> str:
    rows = sorted({0, shown.q_len // 2, shown.q_len - 1})
    said = [visible_text(shown), *(f"query {row + shown.q_offset} attends to {_keys(shown.cells[row] == 0)}" for row in rows)]
    if shown.blocks is not None:
        counts = [
            f"{(shown.blocks == state).sum()} {name}" for state, name in ((FULL, "full"), (PARTIAL, "partial"), (EMPTY, "empty"))
        ]
        said.append(f"{', '.join(counts)} blocks")
    hidden = zip(shown.categories, shown.pairs, strict=True)
    said += [
        f"{count_text(pairs)} cells {category.label}" for category, pairs in hidden if category.hides is not None and pairs[1]
    ]
    text = "; ".join(said)
    return f"{title}: {text}." if title else f"{text[0].upper()}{text[1:]}."


def _keys(visible: NDArray[np.bool_]) -> str:
    """The keys of a row: up to three runs of them, else their number."""
    edges = np.diff(visible.astype(np.int8), prepend=0, append=0)
    runs = [
        (int(start), int(stop) - 1) for start, stop in zip((edges == 1).nonzero()[0], (edges == -1).nonzero()[0], strict=True)
    ]
    if not runs:
        return "no key"
    if len(runs) > MAX_RUNS:
        return f"{visible.sum()} keys from {runs[0][0]} to {runs[-1][1]}"
    one = len(runs) == 1 and runs[0][0] == runs[0][1]
    return f"key{'' if one else 's'} {', '.join(f'{start}' if start == stop else f'{start} to {stop}' for start, stop in runs)}"


def statistics(found: RenderedEntry) -> list[tuple[str, str]]:
    """How much is visible and what it costs, as pairs of a label and a text."""
    stats = found.stats
    of = [f"{size} {name}" for size, name in ((stats.batch, "sequences"), (stats.heads, "heads")) if size > 1]
    size = stats.block_size[0]
    return [
        ("Visible" + (f", of all {' and '.join(of)}" if of else ""), _percent(stats.visible_fraction)),
        (f"Block sparsity, blocks of {size}", _percent(stats.block_sparsity)),
        ("Cost against dense", _percent(stats.cost)),
    ]


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
