"""The mask function of ``attn_implementation="flexmask"``: from transformers' closures to flexmask's masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, prepare_padding_mask, sdpa_mask

from flexmask import Mask, document, from_mask_mod, full, key_padding, kv
from flexmask.masks import reorder
from flexmask.nn import CallTokens
from flexmask_transformers.graphs import GraphMask, mask_in_graph
from flexmask_transformers.model_mask import ModelMask, Request
from flexmask_transformers.packing import Documents, check_branches, chunk_positions
from flexmask_transformers.request import take_request
from flexmask_transformers.user_masks import mask_of_call, user_mask_for

__all__ = ["in_documents", "make_mask"]

#: How transformers writes the mask of all cells, ``q_idx >= 0``.
BIDIRECTIONAL = from_mask_mod(bidirectional_mask_function)


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> Tensor | GraphMask | None:
    """The mask of one layer type in one forward.

    Args:
        batch_size: B.
        q_length: the number of queries.
        kv_length: the number of keys.
        q_offset: the position of the first query; a tensor without axes with a static cache.
        kv_offset: the position of the first key, with a cache of a sliding window.
        mask_function: ``(b, h, q_idx, kv_idx) -> bool`` of positions.
        attention_mask: ``bool[B, kv_offset + kv_length]``, True for real tokens, or shorter; None for no padding.
        options: what transformers passes in addition: ``config``, ``local_size``, ``device`` and others.

    Returns:
        A :class:`ModelMask`; in a graph of ``torch.compile`` see :func:`mask_in_graph`. For one query it is
        ``bool[B, 1, q_length, kv_length]``, or None where SDPA needs no mask.
    """
    config, device = options.get("config"), options.get("device") or "cpu"
    layer_type = _layer_type(config, options.get("local_size"))
    if torch.compiler.is_compiling():
        sizes = batch_size, q_length, kv_length, q_offset, kv_offset
        return mask_in_graph(*sizes, mask_function, attention_mask, layer_type, options, take_request())
    request = take_request()
    is_chunked = layer_type == "chunked_attention"
    user_mask, replaces, is_whole = user_mask_for(config, layer_type, request.user_mask)
    if q_length == 1 and user_mask is None:
        return sdpa_mask(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, **options)
    if user_mask is not None:
        begin = 0 if isinstance(q_offset, Tensor) and q_offset.device.type == "meta" else int(q_offset)
        end = max(begin + q_length, int(kv_offset) + kv_length)
        tokens = CallTokens(batch_size, q_length, begin, end, int(kv_offset), torch.device(device))
        user_mask = mask_of_call(user_mask, tokens, has_cache=request.cache is not None, replaces=replaces)
    if replaces:
        assert user_mask is not None
        mask = user_mask
    else:
        mask = _traced(mask_function, device)
        if request.documents is not None:
            check_branches(request.documents, q_length)
            mask = in_documents(mask, request.documents, q_length, is_chunked=is_chunked)
        padding = _padding(attention_mask, kv_length, int(kv_offset))
        mask = mask if padding is None else mask & padding
        mask = mask.substitute(kv=kv + int(kv_offset)) if kv_offset else mask
        mask = mask if user_mask is None else mask & user_mask
    arguments = batch_size, q_length, kv_length, q_offset, device
    if replaces:
        return ModelMask.make(mask, *arguments, is_whole=is_whole, request=Request(cache=request.cache, knows_positions=True))
    return ModelMask.make(mask, *arguments, is_chunked=is_chunked and request.documents is None, request=request)


def in_documents(mask: Mask, documents: Documents, q_len: int, *, is_chunked: bool = False) -> Mask:
    """A mask within each document of packed rows; chunks start with each document."""
    ids = documents.ids
    if is_chunked:
        places = chunk_positions(documents.positions, documents.keep)
        mask = reorder(mask, q=places[:, :q_len], kv=places)
    return mask & (document(ids) if ids.shape[1] == q_len else document(ids[:, :q_len], ids))


def _traced(mask_function: Callable[..., Any], device: torch.device | str) -> Mask:
    mask = from_mask_mod(mask_function, device=device)
    return cast(Mask, mask.replace(lambda node: full() if node.key == BIDIRECTIONAL.key else None))


def _padding(keep: Tensor | None, kv_len: int, kv_offset: int) -> Mask | None:
    """The mask of padding, of the positions of keys; None where there is none."""
    padding = prepare_padding_mask(keep, kv_len, kv_offset)
    # Reading it on a GPU would force a host sync.
    if padding is None or (padding.device.type == "cpu" and bool(padding[:, kv_offset : kv_offset + kv_len].all())):
        return None
    return key_padding(keep=padding)


def _layer_type(config: Any, local_size: int | None) -> str:
    if local_size is None:
        return "full_attention"
    return "chunked_attention" if local_size == getattr(config, "attention_chunk_size", None) else "sliding_attention"
