"""Masks for documents packed into one sequence."""

from __future__ import annotations

from itertools import accumulate
from typing import Literal, cast

from flexmask._checks import check_flag
from flexmask.catalogue.arguments import check_mask, of_rows, with_local_positions
from flexmask.errors import ExpressionError
from flexmask.expr import tables
from flexmask.expr.data import Data, along
from flexmask.expr.index import Index, kv, maximum, q
from flexmask.expr.mask import Mask
from flexmask.expr.packing import document_ids, document_starts
from flexmask.expr.tables import Param, Table
from flexmask.registry import named

__all__ = ["cross_document", "document", "per_document"]


@named
def document(
    ids: Data | None = None,
    kv_ids: Data | None = None,
    *,
    lengths: Data | None = None,
    cu_seqlens: Data | None = None,
    position_ids: Data | None = None,
    padding: bool = False,
    contiguous: bool = False,
) -> Mask:
    """Queries attend to the keys of their own document only.

    Predicate: ``(ids[b, q] == ids[b, kv]) & (ids[b, q] >= 0)``

    ``document(ids=[0, 0, 1, -1])`` at 4 x 4::

        ■ ■ ⬚ ⬚
        ■ ■ ⬚ ⬚
        ⬚ ⬚ ■ ⬚
        ⬚ ⬚ ⬚ ⬚

    ``document(lengths=[2, 1], padding=True)`` at 4 x 4::

        ■ ■ ⬚ ⬚
        ■ ■ ⬚ ⬚
        ⬚ ⬚ ■ ⬚
        ⬚ ⬚ ⬚ ⬚

    ``document(ids=[0, 0, 1], kv_ids=[0, 1, 1, 1, -1])`` at 3 x 5::

        ■ ⬚ ⬚ ⬚ ⬚
        ■ ⬚ ⬚ ⬚ ⬚
        ⬚ ■ ■ ■ ⬚

    Args:
        ids: the document of each position, ``[S]`` or ``[B, S]``; below 0 for padding, which is masked out as query and as key.
            ``document([7, 4, 5])`` has 3 tokens, each a document of its own: lengths are ``lengths=[7, 4, 5]``.
        kv_ids: the documents of the keys if they are another sequence; by default ``ids``.
        lengths: instead of ids, the documents' lengths in tokens, ``[n]`` or ``[B, n]``. They must cover all tokens, unless
            ``padding`` is True.
        cu_seqlens: instead of ids, cumulative lengths that start with 0, ``[n + 1]`` or ``[B, n + 1]``.
        position_ids: instead of ids, positions; a document starts where a position is not the previous one plus 1.
        padding: whether tokens after the last document are padding, which is masked out. Otherwise tokens that belong to no
            document are an error on the CPU. On other devices lengths are not read, and such tokens are padding.
        contiguous: whether each document of ``ids`` is one run of equal ids. Then the key intervals follow without a host sync.
            That it is one is checked on the CPU, and on every device in the graph of a :func:`flexmask.plan`.

    Raises:
        ExpressionError: none or several of ids, lengths, cu_seqlens and position_ids, inconsistent values, or ``contiguous``
            without ``ids`` or with ``kv_ids``.
        LoweringError: lengths that leave tokens out, without ``padding=True``.

    Source: packing as in ``torch.nn.attention.varlen`` and the segment ids of JAX.
    """
    queries = document_ids(ids, lengths=lengths, cu_seqlens=cu_seqlens, position_ids=position_ids, padding=padding)
    check_flag(contiguous, "document: contiguous")
    keys = queries if kv_ids is None else document_ids(kv_ids)
    own = along(queries, q)
    if not contiguous:
        return (own == along(keys, kv)) & (own >= 0)
    if ids is None or kv_ids is not None:
        raise ExpressionError(
            "document: contiguous=True is a promise of ids alone; lengths, cu_seqlens and position_ids give contiguous documents "
            "anyway, and ids with kv_ids are two sequences"
        )
    starts = document_starts(queries)
    return (along(starts, q) == along(starts, kv)) & (own >= 0)


@named
def per_document(
    mask: Mask,
    ids: Data | None = None,
    *,
    lengths: Data | None = None,
    cu_seqlens: Data | None = None,
    position_ids: Data | None = None,
    padding: bool = False,
) -> Mask:
    """A mask applied within each document, with positions that start at 0 in each.

    Predicate: ``document(ids) & mask(q - start[b, q], kv - start[b, kv])`` with the first position of each document

    ``per_document(prefix_lm(prefix_lengths=2), ids=[0, 0, 0, 1, 1, 1])`` at 6 x 6::

        ■ ■ ⬚ ⬚ ⬚ ⬚
        ■ ■ ⬚ ⬚ ⬚ ⬚
        ■ ■ ■ ⬚ ⬚ ⬚
        ⬚ ⬚ ⬚ ■ ■ ⬚
        ⬚ ⬚ ⬚ ■ ■ ⬚
        ⬚ ⬚ ⬚ ■ ■ ■

    Args:
        mask: the mask to apply; it must not use ``q_len`` and ``kv_len``.
        ids: the document of each position; each document is one run of equal ids. The other sources are those of
            :func:`document`.
        lengths: see :func:`document`.
        cu_seqlens: see :func:`document`.
        position_ids: see :func:`document`.
        padding: see :func:`document`.

    Source: ``generate_doc_mask_mod`` of attention-gym.
    """
    inner = check_mask(mask, "per_document")
    table = document_ids(ids, lengths=lengths, cu_seqlens=cu_seqlens, position_ids=position_ids, padding=padding)
    starts = document_starts(table)
    own, start = along(table, q), along(starts, q)
    return (
        (start == along(starts, kv)) & (own >= 0) & with_local_positions("per_document", inner, start, start, along(starts, kv))
    )


@named
def cross_document(
    mask: Mask | None = None,
    *,
    q_lengths: Data | None = None,
    kv_lengths: Data | None = None,
    q_cu_seqlens: Data | None = None,
    kv_cu_seqlens: Data | None = None,
    align: Literal["upper_left", "lower_right"] | None = None,
    padding: bool = False,
) -> Mask:
    """Packed documents with different numbers of queries and keys: queries attend to the keys of their own document.

    Predicate: ``(q_ids[b, q] == kv_ids[b, kv]) & (q_ids[b, q] >= 0)``, and ``mask`` at the positions within the document

    ``cross_document(causal, q_lengths=[2, 1], kv_lengths=[3, 2], align='lower_right')`` at 3 x 5::

        ■ ■ ⬚ ⬚ ⬚
        ■ ■ ■ ⬚ ⬚
        ⬚ ⬚ ⬚ ■ ■

    ``cross_document(causal, q_lengths=[2, 1], kv_lengths=[3, 2], align='upper_left')`` at 3 x 5::

        ■ ⬚ ⬚ ⬚ ⬚
        ■ ■ ⬚ ⬚ ⬚
        ⬚ ⬚ ⬚ ■ ⬚

    Args:
        mask: the mask within each document, which must not use ``q_len`` and ``kv_len``; by default all cells.
        q_lengths: queries of each document, ``[n]`` or ``[B, n]``.
        kv_lengths: keys of each document, ``[n]`` or ``[B, n]``.
        q_cu_seqlens: instead of lengths, cumulative lengths that start with 0, ``[n + 1]`` or ``[B, n + 1]``. As tensors
            these give few key intervals per row, whereas lengths are evaluated cell by cell.
        kv_cu_seqlens: the cumulative lengths of the keys.
        align: how the queries of a document are aligned with its keys; required with a mask. ``"upper_left"``: the first
            query has the position of the first key. ``"lower_right"``: the last query has the position of the last key.
        padding: whether queries and keys after the last document are padding: see :func:`document`.

    Raises:
        ExpressionError: not one source for the queries and one for the keys, another ``align``, or none with a mask.

    Source: ``BlockDiagonalMask.from_seqlens`` of xFormers, ``cu_seq_q`` and ``cu_seq_k`` of variable-length kernels.
    """
    if align not in ("upper_left", "lower_right", None) or (align is None and mask is not None):
        missing = "; with a mask it says whether the first query of a document is at its first key, or the last at the last"
        raise ExpressionError(
            f"cross_document: align must be 'upper_left' or 'lower_right', got {align!r}{missing if align is None else ''}"
        )
    queries = _Packed("q", q_lengths, q_cu_seqlens, padding)
    keys = _Packed("kv", kv_lengths, kv_cu_seqlens, padding)
    if None not in (queries.count, keys.count) and queries.count != keys.count:
        raise ExpressionError(f"cross_document: {queries.count} documents of queries and {keys.count} of keys; give as many")
    own, first, last = along(queries.ids, q), along(queries.starts, q), along(keys.starts, kv)
    same = (own == along(keys.ids, kv)) & (own >= 0)
    if mask is None:
        return same
    document = maximum(own, 0)
    near = last if keys.ends is None else along(keys.ends, document)
    offset = keys.length(document) - queries.length(document) if align == "lower_right" else 0
    return same & with_local_positions("cross_document", check_mask(mask, "cross_document"), first - offset, near, last)


class _Packed:
    """The documents of the queries, or of the keys.

    Attributes:
        ids: the document of each position.
        starts: the first position of the document of each position.
        lengths: the length of each document, or None if cumulative lengths are given.
        ends: cumulative lengths, or None if they are computed when the mask is lowered.
        count: the number of documents, or None if the data's shape is unknown.
    """

    def __init__(self, side: str, lengths: Data | None, cu_seqlens: Data | None, padding: bool) -> None:
        if (lengths is None) == (cu_seqlens is None):
            got = "neither" if lengths is None else "both"
            raise ExpressionError(f"cross_document: give exactly one of {side}_lengths and {side}_cu_seqlens; got {got}")
        self.ids = document_ids(lengths=lengths, cu_seqlens=cu_seqlens, padding=padding)
        self.starts = document_starts(self.ids)
        self.lengths = cast("Table | Param | None", lengths)
        self.ends = cast("Table | Param | None", _cumulated(lengths) if cu_seqlens is None else cu_seqlens)
        given = cast("Table | Param", cu_seqlens if lengths is None else lengths)
        size = None if isinstance(given, Param) else given.shape[-1]
        self.count = size - 1 if size is not None and lengths is None else size

    def length(self, document: Index) -> Index:
        if self.lengths is not None:
            return along(self.lengths, document)
        ends = cast("Table | Param", self.ends)
        return along(ends, document + 1) - along(ends, document)


def _cumulated(lengths: object) -> Table | None:
    """The cumulative lengths of lists."""
    if not isinstance(lengths, tables.Literal):
        return None
    return of_rows([list(accumulate(row, initial=0)) for row in lengths.rows()], lengths, "cross_document")
