"""The lengths that a mask's own data speaks of, for when none are given."""

from __future__ import annotations

from flexmask.algebra import Mask
from flexmask.index import Symbol
from flexmask.packing import Derived
from flexmask.tables import Literal, Lookup, Ranged, Table

__all__ = ["said_lengths"]


def said_lengths(mask: Mask) -> dict[str, int]:
    """The length along ``q`` and along ``kv`` where data says it: by its own size, as the greatest of the lengths of padded
    sequences, or as the sum of the lengths of documents.
    """
    said: dict[str, int] = {}

    def say(axis: str, length: int) -> None:
        said[axis] = max(length, said.get(axis, 0))

    for node in mask.expand().walk():
        if not isinstance(node, Lookup) or not isinstance(node.table, Table):
            continue
        table = node.table
        for index, size in zip(node.indices, table.shape, strict=True):
            if isinstance(index, Symbol) and index.name in ("q", "kv"):
                length = size if size is not None else _covered(table)
                if length:
                    say(index.name, length)
        if isinstance(table, Ranged) and table.high is not None and not table.what.startswith("prefix"):
            say(table.high.name.removesuffix("_len"), max(_values(table.source), default=0))
    return {axis: length for axis, length in said.items() if length > 0}


def _covered(table: Table) -> int | None:
    """The positions that documents cover, from their lengths."""
    if not isinstance(table, Derived) or not isinstance(table.source, Table):
        return None
    rows = _rows(table.source)
    match table.rule:
        case "lengths":
            return max(map(sum, rows), default=None)
        case "cu_seqlens":
            return max((row[-1] for row in rows if row), default=None)
    return None


def _values(table: Table) -> list[int]:
    return [value for row in _rows(table) for value in row]


def _rows(table: Table) -> list[list[int]]:
    """The values of a literal table as a list of rows; nothing for other data."""
    if isinstance(table, Ranged):
        return _rows(table.source)
    if not isinstance(table, Literal):
        return []
    values = table.tolist()
    if not isinstance(values, list):
        return [[values]]
    return values if values and isinstance(values[0], list) else [values]
