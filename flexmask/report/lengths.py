"""The lengths that the data and the definitions of masks imply, as defaults for ``q_len`` and ``kv_len``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import cast

import torch

from flexmask.expr.index import Arithmetic, Constant, Index, Symbol
from flexmask.expr.mask import SWAPPED, And, Compare, Mask, Named, Or, PerHead, Truth
from flexmask.expr.packing import DocumentTable
from flexmask.expr.tables import Literal, Lookup, Ranged, Table, TensorTable
from flexmask.intervals.extent import Extent, value_range
from flexmask.tracing.trace import MaskLike, as_mask

#: The length where neither the caller nor the mask determines it.
DEFAULT_LENGTH = 16
#: The number of tokens of some documents, from a row of the data that describes them.
TOKENS: dict[str, Callable[[list[int]], int]] = {"lengths": sum, "cu_seqlens": itemgetter(-1)}
#: The greatest value of an index that has no limit.
UNLIMITED = 2**60
#: Limits from here on count as none; every length is less.
MAX_LIMIT = 2**31


def resolve_lengths(*masks: MaskLike, q_len: int | None = None, kv_len: int | None = None) -> tuple[int, int]:
    """The numbers of queries and keys: as given, else as the masks imply, else the other one, else 16.

    Args:
        masks: masks that are lowered at the same lengths.
        q_len: queries, if given.
        kv_len: keys, if given.
    """
    found = {axis: length for axis, length in (("q", q_len), ("kv", kv_len)) if length is not None}
    if len(found) < 2:
        found = implied_lengths(*map(as_mask, masks)) | found
    return found.get("q", found.get("kv", DEFAULT_LENGTH)), found.get("kv", found.get("q", DEFAULT_LENGTH))


def implied_lengths(*masks: Mask) -> dict[str, int]:
    """The lengths along ``q`` and along ``kv`` that masks imply, the greatest where several parts imply one.

    A length follows from the size of a table that is looked up along the axis, also by ``q - 2`` or ``kv // 8``, from the
    greatest of the lengths of padded sequences, from the sum of the lengths of documents, and from a named mask without visible
    cells from some position on, such as the end of a canvas.
    """
    implied: dict[str, int] = {}

    def add(axis: str, length: int) -> None:
        implied[axis] = max(length, implied.get(axis, 0))

    for node in (node for mask in masks for node in mask.expand().walk()):
        if not isinstance(node, Lookup) or not isinstance(node.table, Table):
            continue
        table = node.table
        for index, size in zip(node.indices, table.shape, strict=True):
            limit = size if size is not None else _document_tokens(table)
            for axis, length in _positions(index, limit).items() if limit else ():
                add(axis, length)
        if isinstance(table, Ranged) and table.role == "length" and isinstance(table.high, Symbol):
            add(table.high.name.removesuffix("_len"), max(_values(table), default=0))
    for named in (named for mask in masks for named in _named(mask)):
        for axis, length in _visible_positions(named.body).items():
            add(axis, length)
    return {axis: length for axis, length in implied.items() if length > 0}


def _named(mask: Mask) -> Iterator[Named]:
    """The named masks in a composition, without those in their definitions."""
    if isinstance(mask, Named) and not mask.label:
        yield mask
        return
    for child in mask.below:
        if isinstance(child, Mask):
            yield from _named(child)


def _visible_positions(mask: Mask) -> dict[str, int]:
    """For ``q`` and ``kv`` the number of positions with visible cells at most, where it is limited; 0 for an empty mask."""
    limits: dict[str, int] = {}
    match mask:
        case Named():
            return _visible_positions(mask.body)
        case Truth(False):
            limits = {"kv": 0}
        case Compare(sign, left, right):
            for low, order, high in ((left, sign, right), (right, SWAPPED[sign], left)):
                if order in {"<", "<=", "=="} and (extent := _limited_extent(high)):
                    limits |= _positions(low, extent[1] + (order != "<"))
        case And(operands):
            for part in map(_visible_positions, operands):
                limits |= {axis: min(length, limits.get(axis, length)) for axis, length in part.items()}
        case Or(parts) | PerHead(parts):
            parts_with_cells = [part for part in map(_visible_positions, parts) if 0 not in part.values()]
            axes = set[str].intersection(*map(set, parts_with_cells)) if parts_with_cells else {"kv"}
            limits = {axis: max((part[axis] for part in parts_with_cells), default=0) for axis in axes}
    return {"q": 0, "kv": 0} if min(limits.values(), default=1) <= 0 else limits


def _positions(index: Index, limit: int) -> dict[str, int]:
    """The axis along which an index increases, and the number of positions at which it is below a limit; else nothing."""
    match index:
        case Symbol("q" | "kv"):
            return {index.name: limit}
        case Arithmetic("//", inner, Constant(size)) if size > 0:
            return _positions(inner, limit * size)
        case Arithmetic("*", inner, Constant(size)) | Arithmetic("*", Constant(size), inner) if size > 0:
            return _positions(inner, -(-limit // size))
        case Arithmetic("-", inner, other) if extent := _limited_extent(other):
            return _positions(inner, limit + extent[1])
        case Arithmetic("+", inner, other) | Arithmetic("+", other, inner) if extent := _limited_extent(other):
            return _positions(inner, limit - extent[0])
        case Arithmetic("maximum", inner, Constant(least)) if least < limit:
            return _positions(inner, limit)
    return {}


def _limited_extent(index: Index) -> Extent | None:
    """The least and greatest value of an index at unknown lengths, or None where it has no limit."""
    extent = value_range(index, _leaf_extent, {}, None, is_clamped=False)
    return extent if extent is not None and extent[1] < MAX_LIMIT else None


def _leaf_extent(leaf: Index) -> Extent | None:
    match leaf:
        case Symbol():
            return 0, UNLIMITED
        case Lookup(Ranged() as table):
            values = _values(table)
            return (min(values), max(values)) if values else None
    return None


def _document_tokens(table: Table) -> int | None:
    """The number of tokens of documents, from their lengths."""
    if not isinstance(table, DocumentTable) or not isinstance(table.source, Table) or table.rule not in TOKENS:
        return None
    return max(map(TOKENS[table.rule], filter(None, _rows(table.source))), default=None)


def _values(table: Table) -> list[int]:
    return [value for row in _rows(table) for value in row]


def _rows(table: Table) -> list[list[int]]:
    """The values of data with up to two axes as a list of rows; empty for derived data, and on ``meta``."""
    source = table.source if isinstance(table, Ranged) else table
    if not isinstance(source, Literal | TensorTable):
        return []
    values = source.to_tensor()
    return [] if values.dim() > 2 or values.is_meta else cast("list[list[int]]", torch.atleast_2d(values).tolist())
