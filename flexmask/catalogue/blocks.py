"""Masks over blocks of equal size: chunks, block-causal masks, block diffusion."""

from __future__ import annotations

from flexmask.catalogue.arguments import check_mask, int_or_index, per_sequence, with_local_positions
from flexmask.errors import ExpressionError
from flexmask.expr.choice import where
from flexmask.expr.data import Data, along
from flexmask.expr.index import Index, kv, q
from flexmask.expr.mask import Mask
from flexmask.expr.packing import document_ids, document_starts
from flexmask.expr.tables import Table
from flexmask.registry import named

__all__ = ["block_causal", "block_diffusion", "chunk_window", "chunked", "per_chunk"]


@named
def chunked(size: Index | int, *, start: Data = 0) -> Mask:
    """Queries attend to the keys of their own chunk only. Usually combined with :func:`flexmask.causal`.

    Predicate: ``(q - start[b]) // size == (kv - start[b]) // size``

    ``chunked(size=2)`` at 4 x 4 and 3 x 5::

        ■ ■ ⬚ ⬚     ■ ■ ⬚ ⬚ ⬚
        ■ ■ ⬚ ⬚     ■ ■ ⬚ ⬚ ⬚
        ⬚ ⬚ ■ ■     ⬚ ⬚ ■ ■ ⬚
        ⬚ ⬚ ■ ■

    ``chunked(size=2, start=1)`` at 4 x 4 and 3 x 5::

        ■ ⬚ ⬚ ⬚     ■ ⬚ ⬚ ⬚ ⬚
        ⬚ ■ ■ ⬚     ⬚ ■ ■ ⬚ ⬚
        ⬚ ■ ■ ⬚     ⬚ ■ ■ ⬚ ⬚
        ⬚ ⬚ ⬚ ■

    Args:
        size: tokens in a chunk.
        start: where the first chunk starts, an int or ``int[B]``: the tokens of padding on the left.

    Raises:
        ExpressionError: a size below 1, or a negative start.

    Source: Llama 4; ``ChunkedCausalMask`` of Splash attention.
    """
    n, first = int_or_index(size, "chunked: size", 1), per_sequence(start, "chunked: start")
    return (q - first) // n == (kv - first) // n


@named
def per_chunk(mask: Mask, size: Index | int) -> Mask:
    """A mask applied within each chunk, with positions that start at 0 in each.

    Predicate: ``(q // size == kv // size) & mask(b, h, q % size, kv % size)``

    ``per_chunk(prefix_lm(prefix_lengths=2), size=3)`` at 6 x 6 and 4 x 8::

        ■ ■ ⬚ ⬚ ⬚ ⬚     ■ ■ ⬚ ⬚ ⬚ ⬚ ⬚ ⬚
        ■ ■ ⬚ ⬚ ⬚ ⬚     ■ ■ ⬚ ⬚ ⬚ ⬚ ⬚ ⬚
        ■ ■ ■ ⬚ ⬚ ⬚     ■ ■ ■ ⬚ ⬚ ⬚ ⬚ ⬚
        ⬚ ⬚ ⬚ ■ ■ ⬚     ⬚ ⬚ ⬚ ■ ■ ⬚ ⬚ ⬚
        ⬚ ⬚ ⬚ ■ ■ ⬚
        ⬚ ⬚ ⬚ ■ ■ ■

    Args:
        mask: the mask to apply; it must not use ``q_len`` and ``kv_len``.
        size: tokens in a chunk.

    Raises:
        ExpressionError: a size below 1.

    Source: ``batchify_mask_mod`` of attention-gym.
    """
    n = int_or_index(size, "per_chunk: size", 1)
    own, other = q // n, kv // n
    return (own == other) & with_local_positions("per_chunk", check_mask(mask, "per_chunk"), own * n, own * n, other * n)


@named
def block_causal(size: Index | int) -> Mask:
    """Queries attend to all of their own block, and to all blocks before it.

    Predicate: ``kv // size <= q // size``

    ``block_causal(size=2)`` at 4 x 4 and 3 x 5::

        ■ ■ ⬚ ⬚     ■ ■ ⬚ ⬚ ⬚
        ■ ■ ⬚ ⬚     ■ ■ ⬚ ⬚ ⬚
        ■ ■ ■ ■     ■ ■ ■ ■ ⬚
        ■ ■ ■ ■

    Args:
        size: tokens in a block.

    Raises:
        ExpressionError: a size below 1.

    Source: the clean half of block diffusion, https://arxiv.org/abs/2503.09573; frame by frame in video models.
    """
    n = int_or_index(size, "block_causal: size", 1)
    return kv // n <= q // n


@named
def chunk_window(size: Index | int, *, left: Index | int) -> Mask:
    """Queries attend to all of their own chunk, and to a number of chunks before it: streaming.

    Predicate: ``(kv // size <= q // size) & (kv // size >= q // size - left)``

    ``chunk_window(size=2, left=1)`` at 6 x 6 and 4 x 8::

        ■ ■ ⬚ ⬚ ⬚ ⬚     ■ ■ ⬚ ⬚ ⬚ ⬚ ⬚ ⬚
        ■ ■ ⬚ ⬚ ⬚ ⬚     ■ ■ ⬚ ⬚ ⬚ ⬚ ⬚ ⬚
        ■ ■ ■ ■ ⬚ ⬚     ■ ■ ■ ■ ⬚ ⬚ ⬚ ⬚
        ■ ■ ■ ■ ⬚ ⬚     ■ ■ ■ ■ ⬚ ⬚ ⬚ ⬚
        ⬚ ⬚ ■ ■ ■ ■
        ⬚ ⬚ ■ ■ ■ ■

    Args:
        size: tokens in a chunk.
        left: chunks to the left of the query's own chunk.

    Raises:
        ExpressionError: a size below 1, or a negative number of chunks.

    Source: chunked-limited attention of streaming speech recognition, as in NVIDIA NeMo.
    """
    n, before = int_or_index(size, "chunk_window: size", 1), int_or_index(left, "chunk_window: left")
    return (kv // n <= q // n) & (kv // n >= q // n - before)


@named
def block_diffusion(
    length: Index | int,
    size: Index | int,
    ids: Data | None = None,
    *,
    lengths: Data | None = None,
    cu_seqlens: Data | None = None,
    position_ids: Data | None = None,
    padding: bool = False,
) -> Mask:
    """Training of block diffusion, on the noised sequence followed by the clean one.

    Noised tokens attend to their own noised block and the clean blocks before it, clean tokens to clean blocks up to their own.

    Predicate: ``(q < length) & (kv < length) & (block(kv) == block(q))``, or
    ``(q < length) & (kv >= length) & (block(kv) < block(q))``, or
    ``(q >= length) & (kv >= length) & (block(kv) <= block(q))`` with ``block(i) = i % length // size``; keys after
    the two halves are masked out. With packed documents both tokens are of one document, and
    ``block(i) = (i % length - start) // size`` with the first position of the document

    ``block_diffusion(length=4, size=2)`` at 8 x 8 and 4 x 8::

        ■ ■ ⬚ ⬚ ⬚ ⬚ ⬚ ⬚     ■ ■ ⬚ ⬚ ⬚ ⬚ ⬚ ⬚
        ■ ■ ⬚ ⬚ ⬚ ⬚ ⬚ ⬚     ■ ■ ⬚ ⬚ ⬚ ⬚ ⬚ ⬚
        ⬚ ⬚ ■ ■ ■ ■ ⬚ ⬚     ⬚ ⬚ ■ ■ ■ ■ ⬚ ⬚
        ⬚ ⬚ ■ ■ ■ ■ ⬚ ⬚     ⬚ ⬚ ■ ■ ■ ■ ⬚ ⬚
        ⬚ ⬚ ⬚ ⬚ ■ ■ ⬚ ⬚
        ⬚ ⬚ ⬚ ⬚ ■ ■ ⬚ ⬚
        ⬚ ⬚ ⬚ ⬚ ■ ■ ■ ■
        ⬚ ⬚ ⬚ ⬚ ■ ■ ■ ■

    Args:
        length: tokens of the sequence; the mask is for twice as many.
        size: tokens in a block.
        ids: the document of each of the ``length`` positions, where documents are packed into the sequence; each is one run of
            equal ids. Blocks begin anew in each. The other sources are those of :func:`document`.
        lengths: see :func:`document`.
        cu_seqlens: see :func:`document`.
        position_ids: see :func:`document`.
        padding: see :func:`document`.

    Raises:
        ExpressionError: a length or size below 1, several sources of documents, or ``padding`` without documents.

    Source: BD3-LM, https://arxiv.org/abs/2503.09573; ``generate_block_diffusion_mask`` of attention-gym.
    """
    total, n = int_or_index(length, "block_diffusion: length", 1), int_or_index(size, "block_diffusion: size", 1)
    if any(data is not None for data in (ids, lengths, cu_seqlens, position_ids)):
        documents = document_ids(ids, lengths=lengths, cu_seqlens=cu_seqlens, position_ids=position_ids, padding=padding)
        starts = document_starts(documents)
        (start, own_block), (_, block) = _block_start(starts, q % total, n), _block_start(starts, kv % total, n)
        own_half = (q < total) & (kv < total) & (block == own_block)
        last = where(q < total, own_block - 1, own_block)
        clean_half = (kv >= total) & (kv < total * 2) & (block >= start) & (block <= last)
        return (along(documents, q % total) >= 0) & (own_half | clean_half)
    if padding:
        raise ExpressionError("block_diffusion: padding= goes with lengths or cu_seqlens, which are missing")
    own = (q < total) & (kv < total) & (kv // n == q // n)
    last = where(q < total, q // n - 1, q % total // n)
    return own | ((kv >= total) & (kv < total * 2) & ((kv - total) // n <= last))


def _block_start(starts: Table, position: Index, size: Index | int) -> tuple[Index, Index]:
    """Where the document of a position begins, and where its block does."""
    start = along(starts, position)
    return start, start + (position - start) // size * size
