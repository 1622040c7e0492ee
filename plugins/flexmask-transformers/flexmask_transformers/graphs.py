"""Masks in graphs of ``torch.compile``: those of flexmask where the mask is known, else dense ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import has_static_value
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    packed_sequence_mask_function,
    prepare_padding_mask,
    sdpa_mask,
)

from flexmask import Mask, causal, document, full, key_padding, sliding_window
from flexmask.errors import LoweringError
from flexmask.plans.capture import lower_in_graph
from flexmask.plans.lowered import MAX_CELLS, LoweredMask
from flexmask_transformers.model_mask import Request
from flexmask_transformers.packing import check_branches, chunk_positions
from flexmask_transformers.user_masks import user_mask_for

__all__ = ["GraphMask", "mask_in_graph"]


class GraphMask:
    """The mask of one layer type in a graph, in place of the tensor ``[B, 1, q_len, kv_len]`` that transformers passes on.

    Attributes:
        mask: the mask.
        lowered: what it is lowered to, for all layers.
        is_whole: whether it replaces the documents of ``cu_seq_lens`` and ``seq_idx``.
    """

    def __init__(self, mask: Mask, lowered: LoweredMask, *, is_whole: bool) -> None:
        self.mask, self.lowered, self.is_whole = mask, lowered, is_whole

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """``(B, 1, q_len, kv_len)``."""
        batch, _, q_len, kv_len = self.lowered.shape
        return batch, 1, q_len, kv_len


def mask_in_graph(
    batch: int,
    q_len: int,
    kv_len: int,
    q_offset: int | Tensor,
    kv_offset: int | Tensor,
    mask_function: Callable[..., Any],
    keep: Tensor | None,
    layer_type: str,
    options: dict[str, Any],
    request: Request,
) -> GraphMask | Tensor | None:
    """The mask of one layer type in a graph; the arguments are those of the mask function.

    It is dense where queries follow keys in a cache, where its function is not known, and for lengths that change from call to
    call. Otherwise it is a :class:`GraphMask`, if it has documents, a window, or a mask of the user.
    """
    documents = None if request.documents is None else request.documents.ids
    user_mask, replaces, is_whole = user_mask_for(options.get("config"), layer_type, request.user_mask)
    if request.documents is not None and not replaces:
        check_branches(request.documents, q_len)
    is_chunked = layer_type == "chunked_attention"
    own = None if is_chunked else _known_mask(mask_function, options)
    starts_at_0 = isinstance(q_offset, int) and isinstance(kv_offset, int) and q_offset == 0 and kv_offset == 0
    if user_mask is None:
        is_dense = documents is None and options.get("local_size") is None
        is_dense = is_dense or own is None or not starts_at_0 or q_len != kv_len or not has_static_value(q_len)
        if is_dense or (keep is not None and batch * q_len * kv_len > MAX_CELLS):
            if documents is not None:
                if is_chunked:
                    assert request.documents is not None
                    mask_function = _in_documents(mask_function, documents, request.documents.positions, keep)
                mask_function = and_masks(mask_function, packed_sequence_mask_function(documents))
                options = {**options, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
            return sdpa_mask(batch, q_len, kv_len, q_offset, kv_offset, mask_function, keep, **options)
    elif not starts_at_0 or q_len != kv_len or (own is None and not replaces):
        raise LoweringError(
            "in code that torch.compile traces, a mask of your own needs as many queries as keys, and goes with the model's mask "
            "where that is causal, bidirectional or a window. Call the model without torch.compile, or give the mask with "
            "combine='replace'"
        )
    if user_mask is not None and replaces:
        mask = user_mask
    else:
        assert own is not None
        mask = own if user_mask is None else own & user_mask
        padding = prepare_padding_mask(keep, kv_len, 0)
        if padding is not None:
            mask = mask & key_padding(keep=padding[:, :kv_len])
        if documents is not None:
            mask = mask & document(documents, contiguous=True)
    query = torch.empty(batch, 1, q_len, 1, device=options.get("device") or "cpu")
    return GraphMask(mask, lower_in_graph(mask, query, query, block_size=(0, 0)), is_whole=is_whole)


def _in_documents(
    mask_function: Callable[..., Any], documents: Tensor, positions: Tensor, keep: Tensor | None
) -> Callable[..., Any]:
    """A chunked mask function whose chunks start with each document, if there are several in some row."""
    columns = torch.arange(positions.shape[1], device=positions.device)
    places = torch.where((documents > 0).any(), chunk_positions(positions, keep), columns)

    def of_row(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Any:
        return mask_function(b, h, places[b, q_idx], places[b, kv_idx])

    return of_row


def _known_mask(mask_function: Callable[..., Any], options: dict[str, Any]) -> Mask | None:
    """The mask of a function of transformers; None where it has parts that a graph does not tell, such as overlays."""
    size = options.get("local_size")
    if size is None:
        is_full = mask_function is bidirectional_mask_function
        return causal() if mask_function is causal_mask_function else full() if is_full else None
    if options.get("allow_is_causal_skip", True):
        return sliding_window(size=size)
    return sliding_window(left=size, right=size) if options.get("allow_is_bidirectional_skip", False) else None
