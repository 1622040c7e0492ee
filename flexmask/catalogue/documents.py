"""Masks for documents packed into one sequence, and for prefixes."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from flexmask.algebra import Compare, Mask
from flexmask.errors import OperandError
from flexmask.index import Arithmetic, kv, kv_len, q
from flexmask.naming import named
from flexmask.nodes import Node
from flexmask.tables import Lookup, along, document_ids, document_starts, per_batch

if TYPE_CHECKING:
    from flexmask.tables import Data

__all__ = ["document", "per_document", "prefix_lm"]


@named
def document(
    ids: Data | None = None,
    kv_ids: Data | None = None,
    *,
    lengths: Data | None = None,
    cu_seqlens: Data | None = None,
    position_ids: Data | None = None,
) -> Mask:
    """Queries see the keys of their own document only.

    Predicate: ``(ids[b, q] == ids[b, kv]) & (ids[b, q] >= 0)``

    ``document(ids=[0, 0, 1, -1])`` at 4 x 4::

        ■ ■ ⬚ ⬚
        ■ ■ ⬚ ⬚
        ⬚ ⬚ ■ ⬚
        ⬚ ⬚ ⬚ ⬚

    ``document(ids=[0, 0, 1], kv_ids=[0, 1, 1, 1, -1])`` at 3 x 5::

        ■ ⬚ ⬚ ⬚ ⬚
        ■ ⬚ ⬚ ⬚ ⬚
        ⬚ ■ ■ ■ ⬚

    Args:
        ids: the document of each position, ``[S]`` or ``[B, S]``; below 0 for padding, which sees and is seen by nothing.
        kv_ids: the documents of the keys where they are another sequence; by default the same as ``ids``.
        lengths: instead of ids, the documents' lengths in tokens, ``[n]`` or ``[B, n]``; what lies behind is padding.
        cu_seqlens: instead of ids, cumulative lengths that start with 0, ``[n + 1]`` or ``[B, n + 1]``.
        position_ids: instead of ids, positions; a document starts wherever one is not the previous one plus 1.

    Raises:
        ExpressionError: no source or several, or values that contradict themselves.

    Source: packing as in ``torch.nn.attention.varlen`` and the segment ids of JAX.
    """
    queries = document_ids(ids, lengths=lengths, cu_seqlens=cu_seqlens, position_ids=position_ids)
    keys = queries if kv_ids is None else document_ids(kv_ids)
    own = along(queries, q)
    return (own == along(keys, kv)) & (own >= 0)


@named
def per_document(
    mask: Mask,
    ids: Data | None = None,
    *,
    lengths: Data | None = None,
    cu_seqlens: Data | None = None,
    position_ids: Data | None = None,
) -> Mask:
    """A mask within each document, whose positions restart at 0 there.

    Predicate: ``document(ids) & mask(q - start[b, q], kv - start[b, kv])`` with the first position of each document

    ``per_document(prefix_lm(prefix_lengths=2), ids=[0, 0, 0, 1, 1, 1])`` at 6 x 6::

        ■ ■ ⬚ ⬚ ⬚ ⬚
        ■ ■ ⬚ ⬚ ⬚ ⬚
        ■ ■ ■ ⬚ ⬚ ⬚
        ⬚ ⬚ ⬚ ■ ■ ⬚
        ⬚ ⬚ ⬚ ■ ■ ⬚
        ⬚ ⬚ ⬚ ■ ■ ■

    Args:
        mask: the mask to apply; it may not look at the lengths ``q_len`` and ``kv_len``.
        ids: the document of each position; each document is one run of equal ids. The other sources are those of
            :func:`document`.
        lengths: see :func:`document`.
        cu_seqlens: see :func:`document`.
        position_ids: see :func:`document`.

    Source: ``generate_doc_mask_mod`` of attention-gym.
    """
    if not isinstance(mask, Mask):
        raise OperandError(f"per_document: wanted a mask first, got {type(mask).__name__} {mask!r}")
    if mask.symbols & {"q_len", "kv_len"}:
        raise OperandError(f"per_document: {mask} looks at q_len or kv_len, which are not those of a document")
    table = document_ids(ids, lengths=lengths, cu_seqlens=cu_seqlens, position_ids=position_ids)
    starts = document_starts(table)
    own = along(table, q)

    def local(node: Node) -> Node | None:
        if not isinstance(node, Compare):
            return None
        # Both starts are the same within a document. The query's lets differences of positions cancel; the key's keeps the
        # indices of tables inside them, and what depends on the key alone so.
        start = along(starts, kv if any(_is_of_key(below) for below in node.walk()) else q)
        return node.substitute(q=q - along(starts, q), kv=kv - start)

    return (own == along(table, kv)) & (own >= 0) & cast(Mask, mask.expand().replace(local))


def _is_of_key(node: Node) -> bool:
    steps = isinstance(node, Lookup) or (isinstance(node, Arithmetic) and node.sign == "%")
    return steps and "kv" in node.symbols


@named
def prefix_lm(prefix_lengths: Data) -> Mask:
    """Causal, with a prefix that every query sees: prefix language modelling.

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
