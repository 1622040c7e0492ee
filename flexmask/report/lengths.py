"""The lengths that a mask's own data and definitions speak of, for when none are given."""

from __future__ import annotations

from collections.abc import Iterator

from flexmask.expr.index import Arithmetic, Constant, Index, Symbol
from flexmask.expr.mask import SWAPPED, And, Compare, Mask, Named, Or, PerHead, Truth
from flexmask.expr.packing import DocumentTable
from flexmask.expr.tables import Literal, Lookup, Ranged, Table, TensorTable
from flexmask.intervals.extent import Extent, combined_extent
from flexmask.tracing.as_mask import MaskLike, as_mask

__all__ = ["lengths_of", "said_lengths"]

#: The length where neither the caller nor the mask says one.
DEFAULT_LENGTH = 16
#: Stands for the end of an axis that nothing ends.
FAR = 2**60
#: What lies behind this has no end; no length is as great.
NEAR = 2**31


def lengths_of(mask: MaskLike, q_len: int | None = None, kv_len: int | None = None, *others: MaskLike) -> tuple[int, int]:
    """The numbers of queries and keys: as given, else as the mask says, else the other one, else 16.

    Args:
        mask: the mask.
        q_len: queries, where they are given.
        kv_len: keys, likewise.
        others: masks that are lowered at the same lengths, which count as well.
    """
    if q_len is None or kv_len is None:
        said = said_lengths(as_mask(mask), *map(as_mask, others))
        q_len = said.get("q") if q_len is None else q_len
        kv_len = said.get("kv") if kv_len is None else kv_len
    q_len = (DEFAULT_LENGTH if kv_len is None else kv_len) if q_len is None else q_len
    return q_len, q_len if kv_len is None else kv_len


def said_lengths(*masks: Mask) -> dict[str, int]:
    """The length along ``q`` and along ``kv`` where masks say it, the greatest where several parts do.

    It is said by the size of a table that is looked up there, also by ``q - 2`` or ``kv // 8``, by the greatest of the
    lengths of padded sequences, by the sum of the lengths of documents, and by a named mask that shows nothing from some
    position on, such as the end of a canvas.
    """
    said: dict[str, int] = {}

    def say(axis: str, length: int) -> None:
        said[axis] = max(length, said.get(axis, 0))

    for node in (node for mask in masks for node in mask.expand().walk()):
        if not isinstance(node, Lookup) or not isinstance(node.table, Table):
            continue
        table = node.table
        for index, size in zip(node.indices, table.shape, strict=True):
            covered = size if size is not None else _covered(table)
            for axis, length in _positions(index, covered).items() if covered else ():
                say(axis, length)
        if isinstance(table, Ranged) and table.is_length and isinstance(table.high, Symbol):
            say(table.high.name.removesuffix("_len"), max(_values(table), default=0))
    for named in (named for mask in masks for named in _named(mask)):
        for axis, length in _reach(named.body).items():
            say(axis, length)
    return {axis: length for axis, length in said.items() if length > 0}


def _named(mask: Mask) -> Iterator[Named]:
    """The named masks that a mask is composed of, without those that they are defined by."""
    if isinstance(mask, Named):
        yield mask
        return
    for child in mask.children():
        if isinstance(child, Mask):
            yield from _named(child)


def _reach(mask: Mask) -> dict[str, int]:
    """For ``q`` and ``kv`` how many positions may show a cell, where the others cannot; of an empty mask none."""
    reach: dict[str, int] = {}
    match mask:
        case Named():
            return _reach(mask.body)
        case Truth(False):
            reach = {"kv": 0}
        case Compare(sign, left, right):
            for low, order, high in ((left, sign, right), (right, SWAPPED[sign], left)):
                extent = _extent(high) if order in {"<", "<=", "=="} else None
                if extent is not None and extent[1] < NEAR:
                    reach |= _positions(low, extent[1] + (order != "<"))
        case And(operands):
            for part in map(_reach, operands):
                reach |= {axis: min(length, reach.get(axis, length)) for axis, length in part.items()}
        case Or(parts) | PerHead(parts):
            shown = [part for part in map(_reach, parts) if 0 not in part.values()]
            axes = set[str].intersection(*map(set, shown)) if shown else {"kv"}
            reach = {axis: max((part[axis] for part in shown), default=0) for axis in axes}
    return {"q": 0, "kv": 0} if min(reach.values(), default=1) <= 0 else reach


def _positions(index: Index, limit: int) -> dict[str, int]:
    """The axis that an index rises along, and for how many positions it stays below a limit; nothing where it may go on."""
    match index:
        case Symbol("q" | "kv"):
            return {index.name: limit}
        case Arithmetic("//", inner, Constant(size)) if size > 0:
            return _positions(inner, limit * size)
        case Arithmetic("*", inner, Constant(size)) | Arithmetic("*", Constant(size), inner) if size > 0:
            return _positions(inner, -(-limit // size))
        case Arithmetic("-", inner, other) if (extent := _extent(other)) and extent[1] < NEAR:
            return _positions(inner, limit + extent[1])
        case Arithmetic("+", inner, other) | Arithmetic("+", other, inner) if (extent := _extent(other)) and extent[1] < NEAR:
            return _positions(inner, limit - extent[0])
        case Arithmetic("maximum", inner, Constant(least)) if least < limit:
            return _positions(inner, limit)
    return {}


def _extent(index: Index) -> Extent | None:
    """The least and greatest value of an index where the lengths are not known."""
    match index:
        case Symbol():
            return 0, FAR
        case Lookup(Ranged() as table):
            values = _values(table)
            return (min(values), max(values)) if values else None
    return combined_extent(index, _extent)


def _covered(table: Table) -> int | None:
    """The positions that documents cover, from their lengths."""
    if not isinstance(table, DocumentTable) or not isinstance(table.source, Table):
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
    """The values of data with up to two axes as a list of rows; nothing for what is derived."""
    match table:
        case Ranged(source):
            return _rows(source)
        case Literal() if len(table.size) <= 2:
            values = table.tolist()
        case TensorTable(tensor) if tensor.dim() <= 2:
            values = tensor.tolist()
        case _:
            return []
    if not isinstance(values, list):
        return [[values]]
    return values if values and isinstance(values[0], list) else [values]
