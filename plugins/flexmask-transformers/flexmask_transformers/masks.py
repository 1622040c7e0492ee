"""The mask function of ``attn_implementation="flexmask"``: from transformers' closures to flexmask's masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    padding_mask_function,
    prepare_padding_mask,
    sdpa_mask,
)

from flexmask import Mask, from_mask_mod, full, kv
from flexmask_transformers.graphs import GraphMask, mask_in_graph
from flexmask_transformers.model_mask import ModelMask
from flexmask_transformers.request import take_request
from flexmask_transformers.user_masks import user_mask_for

__all__ = ["make_mask"]

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
        return mask_in_graph(*sizes, mask_function, attention_mask, layer_type, options)
    request = take_request()
    is_chunked = layer_type == "chunked_attention"
    user_mask, replaces, is_whole = user_mask_for(config, layer_type, request.user_mask)
    if q_length == 1 and user_mask is None:
        return sdpa_mask(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, **options)
    mask = user_mask if replaces else _traced(kv_length, int(kv_offset), mask_function, attention_mask, device)
    assert mask is not None
    arguments = batch_size, q_length, kv_length, q_offset, device
    if request.documents is not None and not replaces:
        mask = ModelMask.make(mask, *arguments, is_chunked=is_chunked).within(request.documents)
    if user_mask is not None and not replaces:
        mask &= user_mask
    if kv_offset:
        mask = mask.substitute(kv=kv + int(kv_offset))
    if replaces:
        return ModelMask.make(mask, *arguments, is_whole=is_whole)
    return ModelMask.make(mask, *arguments, is_chunked=is_chunked and request.documents is None, request=request)


def _traced(
    kv_len: int, kv_offset: int, mask_function: Callable[..., Any], keep: Tensor | None, device: torch.device | str
) -> Mask:
    padding = prepare_padding_mask(keep, kv_len, kv_offset)
    # Reading it on a GPU would force a host sync.
    if padding is not None and not (padding.device.type == "cpu" and bool(padding[:, kv_offset : kv_offset + kv_len].all())):
        mask_function = and_masks(mask_function, padding_mask_function(padding))
    mask = from_mask_mod(mask_function, device=device)
    return cast(Mask, mask.replace(lambda node: full() if node.key == BIDIRECTIONAL.key else None))


def _layer_type(config: Any, local_size: int | None) -> str:
    if local_size is None:
        return "full_attention"
    return "chunked_attention" if local_size == getattr(config, "attention_chunk_size", None) else "sliding_attention"
