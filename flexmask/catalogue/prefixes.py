"""Masks with a part of the sequence that others attend to in full: prefixes, shared prompts, demonstrations, spans, items."""

from __future__ import annotations

from flexmask.catalogue.arguments import lookup, per_sequence
from flexmask.errors import ExpressionError
from flexmask.expr.data import Data, along, as_table, per_batch
from flexmask.expr.index import b, kv, kv_len, maximum, q
from flexmask.expr.mask import Mask
from flexmask.expr.packing import document_ids
from flexmask.expr.tables import Literal, Param, Ranged, Table
from flexmask.registry import named

__all__ = ["bidirectional_spans", "in_context", "multi_item", "prefix_lm", "shared_prefix"]


@named
def prefix_lm(prefix_lengths: Data) -> Mask:
    """Causal, with a prefix that every query attends to: prefix language modeling.

    Predicate: ``(kv < prefix_lengths[b]) | (kv <= q)``

    ``prefix_lm(prefix_lengths=2)`` at 4 x 4 and 3 x 5::

        ■ ■ ⬚ ⬚     ■ ■ ⬚ ⬚ ⬚
        ■ ■ ⬚ ⬚     ■ ■ ⬚ ⬚ ⬚
        ■ ■ ■ ⬚     ■ ■ ■ ⬚ ⬚
        ■ ■ ■ ■

    Args:
        prefix_lengths: tokens in the prefix of each sequence, an int or ``int[B]``, between 0 and ``kv_len``.

    Source: T5, https://arxiv.org/abs/1910.10683
    """
    return (kv < per_batch(prefix_lengths, "prefix_lm: prefix_lengths", kv_len)) | (kv <= q)


@named
def bidirectional_spans(ids: Data) -> Mask:
    """Causal, with spans whose tokens all attend to each other, e.g. the images in a text.

    Predicate: ``(kv <= q) | ((ids[b, q] == ids[b, kv]) & (ids[b, q] >= 0))``

    ``bidirectional_spans(ids=[-1, 0, 0, -1, 1, 1])`` at 6 x 6 and 4 x 6::

        ■ ⬚ ⬚ ⬚ ⬚ ⬚     ■ ⬚ ⬚ ⬚ ⬚ ⬚
        ■ ■ ■ ⬚ ⬚ ⬚     ■ ■ ■ ⬚ ⬚ ⬚
        ■ ■ ■ ⬚ ⬚ ⬚     ■ ■ ■ ⬚ ⬚ ⬚
        ■ ■ ■ ■ ⬚ ⬚     ■ ■ ■ ■ ⬚ ⬚
        ■ ■ ■ ■ ■ ■
        ■ ■ ■ ■ ■ ■

    Args:
        ids: the span of each position, ``[S]`` or ``[B, S]``; below 0 for a token outside of spans.

    Source: Transfusion, https://arxiv.org/abs/2408.11039; the image blocks of ``transformers.masking_utils``.
    """
    spans = document_ids(ids)
    own = along(spans, q)
    return (kv <= q) | ((own == along(spans, kv)) & (own >= 0))


@named
def shared_prefix(
    ids: Data | None = None,
    *,
    lengths: Data | None = None,
    cu_seqlens: Data | None = None,
    position_ids: Data | None = None,
    padding: bool = False,
    prefix_of: Data,
) -> Mask:
    """Causal within each document, plus all of the document that is its prefix: one question with several answers.

    Predicate: ``(own >= 0) & (((own == ids[b, kv]) & (kv <= q)) | ((prefix == ids[b, kv]) & (prefix != own)))`` with
    ``own = ids[b, q]`` and ``prefix = prefix_of[b, own]``

    ``shared_prefix(ids=[0, 0, 1, 1, 2, 2], prefix_of=[0, 0, 0])`` at 6 x 6 and 4 x 6::

        ■ ⬚ ⬚ ⬚ ⬚ ⬚     ■ ⬚ ⬚ ⬚ ⬚ ⬚
        ■ ■ ⬚ ⬚ ⬚ ⬚     ■ ■ ⬚ ⬚ ⬚ ⬚
        ■ ■ ■ ⬚ ⬚ ⬚     ■ ■ ■ ⬚ ⬚ ⬚
        ■ ■ ■ ■ ⬚ ⬚     ■ ■ ■ ■ ⬚ ⬚
        ■ ■ ⬚ ⬚ ■ ⬚
        ■ ■ ⬚ ⬚ ■ ■

    Args:
        ids: the document of each position, counted from 0; below 0 for padding. The other sources are those of
            :func:`flexmask.document`.
        lengths: see :func:`flexmask.document`.
        cu_seqlens: see :func:`flexmask.document`.
        position_ids: see :func:`flexmask.document`.
        padding: see :func:`flexmask.document`.
        prefix_of: the prefix of each document, ``[n]`` or ``[B, n]``; a document without one is its own prefix.

    Raises:
        LoweringError: a document id that ``prefix_of`` has no entry for.

    Source: ``generate_shared_prefix_mask_mod`` of attention-gym; the shared question of FlashMask,
    https://arxiv.org/abs/2410.01359
    """
    documents = document_ids(ids, lengths=lengths, cu_seqlens=cu_seqlens, position_ids=position_ids, padding=padding)
    own, other = along(documents, q), along(documents, kv)
    if not isinstance(prefix_of, Param):
        table = as_table(prefix_of, "shared_prefix: prefix_of")
        _check_documents(table)
        prefix_of = Ranged(table, "shared_prefix: prefix_of", 0, None)
    at = maximum(own, 0)
    prefix = lookup(prefix_of, "shared_prefix: prefix_of", "[n] or [B, n]", (at,), (b, at))
    return (own >= 0) & (((own == other) & (kv <= q)) | ((prefix == other) & (prefix != own)))


def _check_documents(prefix_of: Table) -> None:
    """Checks the values of a list, whose length is the number of documents."""
    if not isinstance(prefix_of, Literal) or prefix_of.truth or len(prefix_of.size) not in (1, 2):
        return
    rows = prefix_of.rows()
    wrong = next((value for row in rows for value in row if not 0 <= value < len(row)), None)
    if wrong is not None:
        raise ExpressionError(
            f"shared_prefix: prefix_of names the document {wrong}, but it is for {len(rows[0])} documents, from 0 up; a document "
            "without a prefix names itself"
        )


@named
def in_context(
    ids: Data | None = None,
    *,
    lengths: Data | None = None,
    cu_seqlens: Data | None = None,
    position_ids: Data | None = None,
    padding: bool = False,
    test_start: Data,
) -> Mask:
    """Causal within each demonstration; the test example at the end attends to all of them: in-context learning.

    Predicate: ``(kv <= q) & (ids[b, q] >= 0) & (ids[b, kv] >= 0) & ((ids[b, q] == ids[b, kv]) | (q >= test_start[b]))``

    ``in_context(ids=[0, 0, 1, 1, 2, 2], test_start=4)`` at 6 x 6 and 4 x 6::

        ■ ⬚ ⬚ ⬚ ⬚ ⬚     ■ ⬚ ⬚ ⬚ ⬚ ⬚
        ■ ■ ⬚ ⬚ ⬚ ⬚     ■ ■ ⬚ ⬚ ⬚ ⬚
        ⬚ ⬚ ■ ⬚ ⬚ ⬚     ⬚ ⬚ ■ ⬚ ⬚ ⬚
        ⬚ ⬚ ■ ■ ⬚ ⬚     ⬚ ⬚ ■ ■ ⬚ ⬚
        ■ ■ ■ ■ ■ ⬚
        ■ ■ ■ ■ ■ ■

    Args:
        ids: the example of each position; below 0 for padding. The other sources are those of :func:`flexmask.document`.
        lengths: see :func:`flexmask.document`.
        cu_seqlens: see :func:`flexmask.document`.
        position_ids: see :func:`flexmask.document`.
        padding: see :func:`flexmask.document`.
        test_start: where the test example starts, an int or ``int[B]``.

    Source: the causal blockwise mask of FlashMask, https://arxiv.org/abs/2410.01359
    """
    examples = document_ids(ids, lengths=lengths, cu_seqlens=cu_seqlens, position_ids=position_ids, padding=padding)
    own, other = along(examples, q), along(examples, kv)
    return (kv <= q) & (own >= 0) & (other >= 0) & ((own == other) | (q >= per_sequence(test_start, "in_context: test_start")))


@named
def multi_item(prefix_length: Data, positions: Data) -> Mask:
    """Causal over a prefix, then items that attend to the prefix and to themselves, not to other items: multi-item scoring.

    Predicate: ``(kv <= q) & ((q < prefix_length[b]) | (kv < prefix_length[b]) | (kv > q - positions[b, q - prefix_length]))``

    ``multi_item(prefix_length=2, positions=[0, 1, 2, 0, 1])`` at 7 x 7 and 4 x 7::

        ■ ⬚ ⬚ ⬚ ⬚ ⬚ ⬚     ■ ⬚ ⬚ ⬚ ⬚ ⬚ ⬚
        ■ ■ ⬚ ⬚ ⬚ ⬚ ⬚     ■ ■ ⬚ ⬚ ⬚ ⬚ ⬚
        ■ ■ ⬚ ⬚ ⬚ ⬚ ⬚     ■ ■ ⬚ ⬚ ⬚ ⬚ ⬚
        ■ ■ ⬚ ■ ⬚ ⬚ ⬚     ■ ■ ⬚ ■ ⬚ ⬚ ⬚
        ■ ■ ⬚ ■ ■ ⬚ ⬚
        ■ ■ ⬚ ⬚ ⬚ ⬚ ⬚
        ■ ■ ⬚ ⬚ ⬚ ⬚ ■

    Args:
        prefix_length: tokens before the first item, an int or ``int[B]``.
        positions: the position of each later token within its item, ``[n]`` or ``[B, n]``. A delimiter has 0 and
            attends to the prefix only; the tokens of an item count from 1.

    Source: ``prefix_len_ptr`` and ``token_pos_in_items_ptr`` of FlashInfer.
    """
    prefix = per_sequence(prefix_length, "multi_item: prefix_length")
    at = maximum(q - prefix, 0)
    position = lookup(positions, "multi_item: positions", "[n] or [B, n]", (at,), (b, at))
    return (kv <= q) & ((kv < prefix) | (kv > q - position))  # keys up to a query in the prefix are in it
