"""Documents and trees packed into one sequence: tables computed from lengths or positions when a mask is lowered."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from flexmask._checks import check_flag
from flexmask.errors import ExpressionError, OperandError
from flexmask.expr.data import as_table, ranged
from flexmask.expr.form import made
from flexmask.expr.index import PRECEDENCE
from flexmask.expr.tables import Literal as ListTable
from flexmask.expr.tables import Param, Ranged, Table, write_data

if TYPE_CHECKING:
    from flexmask.expr.data import Data
    from flexmask.expr.form import Held

#: What the values of a source are for, by its name.
AXES = {"ids": "positions", "lengths": "documents", "cu_seqlens": "documents + 1", "position_ids": "positions"}
#: The sources that give the number of positions that the documents cover.
COVERING = {"lengths", "cu_seqlens"}


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class DocumentTable(Table):
    """The document id or the first position of the document of each position, or the end of its subtree, as a mask is lowered.

    Args:
        rule: how it is computed: see :func:`flexmask.intervals.documents.document_table`.
        source: the lengths, offsets, positions or ids that it is computed from.
        padding: whether positions beyond ``lengths`` or ``cu_seqlens`` are allowed, as padding.
        may_be_longer: whether these may cover more positions than there are, as those of a sequence that grows.
    """

    rule: Literal["lengths", "cu_seqlens", "position_ids", "starts", "subtrees"]
    source: Table | Param
    padding: bool = False
    may_be_longer: bool = False

    def shape_of(self, held: tuple[Held, ...]) -> tuple[int | None, ...]:
        source: tuple[int | None, ...] = (None,) if isinstance(self.source, Param) else self.source.shape_of(held)
        return source if self.rule not in COVERING else source[:-1] + (None,)  # noqa: RUF005, as Sizes have no values

    @property
    def constant(self) -> bool:
        return isinstance(self.source, Table) and self.source.constant

    def write(self, bare: bool) -> tuple[str, int]:
        text = write_data(self.source, bare)
        padding = ", padding=True" if self.padding else ""
        function = {"starts": "document_starts", "subtrees": "subtree_ends"}.get(self.rule)
        call = f"{function}({text})" if function else f"document_ids({self.rule}={text}{padding})"
        return call, PRECEDENCE["atom"]


def sequence_table(data: object, what: str, axis: str = "positions") -> Table | Param:
    """Integers along one axis, or for each sequence of a batch."""
    if isinstance(data, Param):
        return data
    values = as_table(data, what)
    if len(values.shape) not in {1, 2}:
        raise ExpressionError(f"{what} must have the axes [{axis}] or [batch, {axis}], got shape {list(values.shape)}")
    if values.boolean:
        instead = "; of an attention_mask take flexmask.key_padding(keep=tensor), of two documents tensor.long()"
        raise OperandError(f"{what} must hold integers, got truth values{instead if what.endswith(': ids') else ''}")
    return values


def document_ids(
    ids: Data | None = None,
    *,
    lengths: Data | None = None,
    cu_seqlens: Data | None = None,
    position_ids: Data | None = None,
    padding: bool = False,
) -> Table | Param:
    """The document of each position, from exactly one source. Ids below 0 are padding.

    Args:
        ids: the ids themselves, ``[S]`` or ``[B, S]``.
        lengths: the documents' lengths in tokens, ``[n]`` or ``[B, n]``.
        cu_seqlens: their cumulative lengths from 0, ``[n + 1]`` or ``[B, n + 1]``, as variable-length kernels take them.
        position_ids: positions that restart in each document, ``[S]`` or ``[B, S]``; a document starts wherever a
            position is not the previous one plus 1.
        padding: whether positions after the last document are padding. Otherwise the documents must cover every
            position, which is checked when a mask is lowered; values in another device's memory are not read.

    Raises:
        ExpressionError: no source or several, a wrong shape, values that contradict themselves, or ``padding`` with ids.
        OperandError: ``padding`` that is no truth value.
    """
    check_flag(padding, "document: padding")
    given = {"ids": ids, "lengths": lengths, "cu_seqlens": cu_seqlens, "position_ids": position_ids}
    sources = {name: data for name, data in given.items() if data is not None}
    if len(sources) != 1:
        got = ", ".join(sources) or "none"
        raise ExpressionError(f"documents come from exactly one of ids, lengths, cu_seqlens and position_ids; got {got}")
    ((name, data),) = sources.items()
    if padding and name not in COVERING:
        raise ExpressionError(f"document: padding= goes with lengths or cu_seqlens, got {name}; an id below 0 is padding")
    values = sequence_table(data, f"document: {name}", AXES[name])
    if name == "ids":
        return values
    if isinstance(values, Table):
        values = ranged(values, f"document: {name}", 0, None)
        if name == "cu_seqlens" and isinstance(values, Ranged) and isinstance(values.form.source, ListTable):
            _check_cumulative(values.form.source)
    return made(DocumentTable, name, values, padding)


def _check_cumulative(given: ListTable) -> None:
    """Raises where listed cumulative lengths are none; those of tensors are checked when a mask is lowered."""
    for row in given.rows():
        if row[0] != 0 or any(stop < start for start, stop in pairwise(row)):
            raise ExpressionError(
                f"document: cu_seqlens must start with 0 and not decrease, got {given.tolist()}; the lengths themselves are "
                "lengths="
            )


def document_starts(ids: Data) -> Table:
    """For each position the first position of its document; each document must be one run of equal ids."""
    return made(DocumentTable, "starts", sequence_table(ids, "document_starts: ids"))


def subtree_ends(position_ids: Data) -> Table:
    """For each token of a tree in depth-first order the first position behind its subtree: see :func:`~masks.prefix_tree`."""
    depths = sequence_table(position_ids, "prefix_tree: position_ids")
    depths = ranged(depths, "prefix_tree: position_ids", 0, None) if isinstance(depths, Table) else depths
    return made(DocumentTable, "subtrees", depths)
