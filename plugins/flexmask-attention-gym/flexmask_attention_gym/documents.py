"""attention-gym's masks for packed documents, groups of tokens and prefixes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flexmask import Mask
from flexmask.errors import ExpressionError
from flexmask.expr import Index
from flexmask.registry import named
from flexmask_attention_gym.generators import MaskMod, generated, inner, offsets, positive, tensor

if TYPE_CHECKING:
    from flexmask.expr import Data

__all__ = ["gym_batchify", "gym_causal_document", "gym_document", "gym_prefix_lm", "gym_shared_prefix"]


@named
@generated
def gym_document(mask: Mask, *, lengths: Data | None = None, cu_seqlens: Data | None = None) -> MaskMod:
    """A mask within each document, whose positions restart at 0 there.

    Predicate: ``(document[q] == document[kv]) & mask(q - start[q], kv - start[kv])``

    ``gym_document(causal, lengths=[2, 3])`` at 5 x 5::

        ■ ⬚ ⬚ ⬚ ⬚
        ■ ■ ⬚ ⬚ ⬚
        ⬚ ⬚ ■ ⬚ ⬚
        ⬚ ⬚ ■ ■ ⬚
        ⬚ ⬚ ■ ■ ■

    Args:
        mask: the mask to apply; it must not use ``q_len`` and ``kv_len``. attention-gym's ``mask_mod``.
        lengths: the documents' lengths in tokens, ``[n]``; the same for all sequences, which are as long as their sum.
        cu_seqlens: instead of lengths, cumulative lengths that start with 0, ``[n + 1]``. attention-gym's ``offsets``.

    Source: ``generate_doc_mask_mod`` of attention-gym; flexmask's own mask, also for batches and padding, is
    :func:`flexmask.per_document`.
    """
    from attn_gym.masks import generate_doc_mask_mod

    starts = offsets("gym_document", lengths, cu_seqlens)
    return generate_doc_mask_mod(inner(mask, "gym_document", max(1, int(starts[-1]))), starts)


@named
@generated
def gym_causal_document(*, lengths: Data | None = None, cu_seqlens: Data | None = None) -> MaskMod:
    """Causal within each document.

    Predicate: ``(kv >= start[q]) & (kv <= q)`` with the first position of each document

    ``gym_causal_document(lengths=[2, 3])`` at 5 x 5::

        ■ ⬚ ⬚ ⬚ ⬚
        ■ ■ ⬚ ⬚ ⬚
        ⬚ ⬚ ■ ⬚ ⬚
        ⬚ ⬚ ■ ■ ⬚
        ⬚ ⬚ ■ ■ ■

    Args:
        lengths: the documents' lengths in tokens, ``[n]``; the same for all sequences, which are as long as their sum.
        cu_seqlens: instead of lengths, cumulative lengths that start with 0, ``[n + 1]``. attention-gym's ``offsets``.

    Source: ``generate_packed_causal_doc_mask_mod`` of attention-gym; flexmask's own is ``causal & document(lengths)``.
    """
    from attn_gym.masks import generate_packed_causal_doc_mask_mod

    return generate_packed_causal_doc_mask_mod(offsets("gym_causal_document", lengths, cu_seqlens))


@named
@generated
def gym_shared_prefix(prefix_of: Data, *, lengths: Data | None = None, cu_seqlens: Data | None = None) -> MaskMod:
    """Causal within each document, and the whole of the document that is its prefix: one prompt with several answers.

    Predicate: ``((kv >= start[q]) & (kv <= q)) | ((prefix[q] != document[q]) & (document[kv] == prefix[q]))``

    ``gym_shared_prefix(prefix_of=[0, 0, 0], lengths=[2, 1, 2])`` at 5 x 5::

        ■ ⬚ ⬚ ⬚ ⬚
        ■ ■ ⬚ ⬚ ⬚
        ■ ■ ■ ⬚ ⬚
        ■ ■ ⬚ ■ ⬚
        ■ ■ ⬚ ■ ■

    Args:
        prefix_of: the prefix of each document, ``[n]``; a prefix is its own. attention-gym's ``prefix_document_id``.
        lengths: the documents' lengths in tokens, ``[n]``; the same for all sequences, which are as long as their sum.
        cu_seqlens: instead of lengths, cumulative lengths that start with 0, ``[n + 1]``. attention-gym's ``offsets``.

    Raises:
        ExpressionError: not one prefix for each document.

    Source: ``generate_shared_prefix_mask_mod`` of attention-gym.
    """
    from attn_gym.masks import generate_shared_prefix_mask_mod

    starts = offsets("gym_shared_prefix", lengths, cu_seqlens)
    prefixes = tensor(prefix_of, "gym_shared_prefix: prefix_of", "[documents]").to(starts.device)
    if len(prefixes) != len(starts) - 1:
        raise ExpressionError(
            f"gym_shared_prefix: prefix_of must have one entry for {len(starts) - 1} documents, got {prefix_of}"
        )
    return generate_shared_prefix_mask_mod(starts, prefixes)


@named
@generated
def gym_batchify(mask: Mask, size: Index | int) -> MaskMod:
    """A mask within each group of so many tokens, whose positions restart at 0 there.

    Predicate: ``(q // size == kv // size) & mask(q % size, kv % size)``

    ``gym_batchify(causal, size=2)`` at 4 x 4 and 3 x 5::

        ■ ⬚ ⬚ ⬚     ■ ⬚ ⬚ ⬚ ⬚
        ■ ■ ⬚ ⬚     ■ ■ ⬚ ⬚ ⬚
        ⬚ ⬚ ■ ⬚     ⬚ ⬚ ■ ⬚ ⬚
        ⬚ ⬚ ■ ■

    Args:
        mask: the mask to apply; it must not use ``q_len`` and ``kv_len``. attention-gym's ``mask_mod``.
        size: tokens in a group. attention-gym's ``batchify_size``.

    Source: ``batchify_mask_mod`` of attention-gym.
    """
    from attn_gym.masks import batchify_mask_mod

    length = positive(size, "gym_batchify: size")
    return batchify_mask_mod(inner(mask, "gym_batchify", length), length)


@named
@generated
def gym_prefix_lm(prefix_length: Index | int) -> MaskMod:
    """Causal, with a prefix that every query sees.

    Predicate: ``(kv < prefix_length) | (kv <= q)``

    ``gym_prefix_lm(prefix_length=2)`` at 4 x 4 and 3 x 5::

        ■ ■ ⬚ ⬚     ■ ■ ⬚ ⬚ ⬚
        ■ ■ ⬚ ⬚     ■ ■ ⬚ ⬚ ⬚
        ■ ■ ■ ⬚     ■ ■ ■ ⬚ ⬚
        ■ ■ ■ ■

    Args:
        prefix_length: tokens in the prefix, the same for all sequences.

    Source: ``generate_prefix_lm_mask`` of attention-gym; flexmask's own mask, also for batches, is :func:`flexmask.prefix_lm`.
    """
    from attn_gym.masks import generate_prefix_lm_mask

    return generate_prefix_lm_mask(positive(prefix_length, "gym_prefix_lm: prefix_length", 0))
