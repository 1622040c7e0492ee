"""Texts that README and page share."""

from __future__ import annotations

import re
from collections.abc import Iterable

from flexmask.gallery.entry import Entry
from flexmask.gallery.rendered import RenderedEntry

__all__ = ["lengths", "linked", "sections", "statistics"]

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
