"""Adds to the masks that transformers requests: documents that it would drop, and masks that the user gives.

transformers reads the arguments of each mask in ``_preprocess_mask_arguments(config, inputs_embeds, attention_mask,
past_key_values, position_ids, layer_idx)`` and calls the mask function after it, without most of them. `preprocess` replaces it:
it keeps what the mask function (`masks`) needs in a `Request`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.masking_utils import find_packed_sequence_indices

from flexmask import Mask
from flexmask.errors import LoweringError, OperandError
from flexmask.plans import LoweredMask
from flexmask_transformers.arguments import check_attention_mask, check_padding
from flexmask_transformers.packed_cache import Keys, note_keys, require_one_document
from flexmask_transformers.packing import Documents, check_document_numbers, restarts

__all__ = [
    "Request",
    "documents_in_graph",
    "dropped_documents",
    "is_user_mask",
    "note_documents_in_graph",
    "preprocess",
    "take_request",
    "take_request_in_graph",
]


@dataclass(frozen=True)
class Request:
    """What the next mask needs in addition to the arguments of a mask function.

    Attributes:
        documents: the documents of packed rows; None where rows are not packed.
        user_mask: the Mask, text or mask_mod that the caller gave as ``attention_mask``, or a dict of them for each layer type.
        keep: the 2-D mask, ``bool[B, tokens]``, or None.
        cache: the model's cache of keys, or None.
        has_positions: whether the model gave its ``position_ids`` to the mask. Some give them to attention alone.
    """

    documents: Documents | None = None
    user_mask: Any = None
    keep: Tensor | None = None
    cache: Any = None
    has_positions: bool = True


_NEXT: ContextVar[Request | None] = ContextVar("flexmask_transformers.request", default=None)


class _InGraph:
    """The request of the masks in a graph of ``torch.compile``, which does not trace context variables.

    It is that of the last model that made masks, so it counts for the layers of that model's config alone.
    """

    config: Any = None
    keep: Tensor | None = None
    has_positions: bool = True
    position_ids: Tensor | None = None
    splits_at_gaps: bool = False
    keys: Keys | None = None
    documents: Tensor | None = None
    user_mask: Any = None


def take_request() -> Request:
    """The request of the mask that is being made; empty where a model calls a mask function directly."""
    request = _NEXT.get()
    _NEXT.set(None)
    return request or Request()


def take_request_in_graph() -> tuple[Tensor | None, Tensor | None, Any]:
    """The documents ``int[B, S]`` of the mask that is made next in a graph, their ``position_ids``, and the caller's mask."""
    found = _InGraph.documents, _InGraph.position_ids, _InGraph.user_mask
    _InGraph.documents = _InGraph.user_mask = None
    return found


def is_user_mask(value: object) -> bool:
    """Whether an ``attention_mask`` is a mask of flexmask: a Mask, a text, a mask_mod, or a dict of them."""
    if isinstance(value, dict):
        return bool(value) and all(map(is_user_mask, value.values()))
    return isinstance(value, Mask | str) or (callable(value) and not isinstance(value, Tensor) and not hasattr(value, "shape"))


def preprocess(original: Callable[..., Any]) -> Callable[..., Any]:
    """transformers' ``_preprocess_mask_arguments`` for models with ``attn_implementation="flexmask"``."""

    @functools.wraps(original)
    def wrapped(
        config: Any,
        inputs_embeds: Tensor,
        attention_mask: Any,
        past_key_values: Any,
        position_ids: Tensor | None,
        layer_idx: int | None,
        *rest: Any,
        **options: Any,
    ) -> Any:
        if isinstance(attention_mask, LoweredMask):
            raise OperandError(
                "attention_mask is a LoweredMask, which is for flexmask.attention; give the Mask of its plan, plan.mask"
            )
        if config._attn_implementation != "flexmask":
            return original(config, inputs_embeds, attention_mask, past_key_values, position_ids, layer_idx, *rest, **options)
        user_mask = None
        if is_user_mask(attention_mask):
            user_mask, attention_mask = attention_mask, None
        check_attention_mask(attention_mask, inputs_embeds)
        has_positions = position_ids is not None
        if inputs_embeds.device.type == "meta":  # where positions have no values
            position_ids = None
        if position_ids is not None:  # other models, such as GPT-OSS, give them to attention alone
            check_document_numbers(attention_mask, position_ids)
        found = original(config, inputs_embeds, attention_mask, past_key_values, position_ids, layer_idx, *rest, **options)
        if not rest and not options and not found[0] and found[1] is not None:  # they are for the keys of an encoder
            kv_end = found[3] if past_key_values is None else found[4] + found[6]
            check_padding(found[1], len(inputs_embeds), found[3], kv_end, found[5])
        if torch.compiler.is_compiling():
            splits_at_gaps = found[2] is not None
            found = _packed_in_graph(found, past_key_values, position_ids, inputs_embeds.shape[0])
            if not rest and not options:
                _InGraph.config, _InGraph.keep = config, found[1]
                _InGraph.has_positions = found[0] or has_positions
                _InGraph.position_ids, _InGraph.splits_at_gaps = None if found[2] is None else position_ids, splits_at_gaps
                _InGraph.keys = None if found[0] else _keys_in_graph(past_key_values, found[5], found[2])
            if found[0]:
                return found
            _InGraph.documents, _InGraph.user_mask = found[2], user_mask
            return *found[:2], None, *found[3:]
        _NEXT.set(None)
        early_exit, attention_mask, documents, q_len, kv_len, q_offset, kv_offset = found
        if early_exit:
            return found
        batch = inputs_embeds.shape[0]
        if documents is None:
            packed = dropped_documents(attention_mask, past_key_values, position_ids, batch, q_len, int(kv_len), q_offset)
        else:
            assert position_ids is not None
            packed = Documents(documents, position_ids.expand(batch, -1))
        _NEXT.set(Request(packed, user_mask, attention_mask, past_key_values, has_positions))
        return False, attention_mask, None, q_len, kv_len, q_offset, kv_offset

    return wrapped


def dropped_documents(
    keep: Tensor | None,
    cache: Any,
    position_ids: Tensor | None,
    batch: int,
    q_len: int,
    kv_len: int,
    q_offset: int | Tensor,
) -> Documents | None:
    """The documents of packed rows that transformers would treat as one sequence; None where rows are not packed.

    transformers ignores documents where there is a cache, which is the default, or a 2-D mask.

    Raises:
        LoweringError: there are documents, and keys of earlier forwards.
    """
    require_one_document(cache, q_offset)
    if q_len == 1:
        return None
    is_first = cache is None or int(q_offset) == 0
    if not isinstance(position_ids, Tensor) or position_ids.dim() != 2 or position_ids.shape[1] != q_len:
        return None
    if position_ids.device.type == "meta":
        return None
    positions = position_ids.expand(batch, -1)
    starts = restarts(positions, _keep_of_queries(keep, q_len, q_offset))
    is_packed = bool(starts.any())
    if cache is not None and is_first:
        note_keys(cache).several = is_packed
    if not is_packed:
        return None
    if not is_first:
        raise LoweringError(
            f"position_ids restart inside a row, where the cache holds {int(q_offset)} tokens already: their documents are not "
            "known. Pack rows only where the cache is empty, or give each document a row"
        )
    free = (0, kv_len - q_len)  # places of a static cache
    return Documents(F.pad(starts.cumsum(-1), free, value=-1), F.pad(positions, free), keep)


def documents_in_graph(
    config: Any, position_ids: Tensor | None, batch: int, q_len: int, kv_len: int
) -> tuple[Documents | None, bool]:
    """The documents of a layer's ``position_ids`` in a graph, and whether its mask has them already.

    Some models give their ``position_ids`` to attention and not to the mask.
    """
    is_known = _InGraph.config is config
    is_in_mask = is_known and _InGraph.has_positions
    keep = _InGraph.keep if is_known else None
    position_ids = _InGraph.position_ids if is_in_mask else position_ids
    if position_ids is None or position_ids.dim() != 2 or q_len == 1 or q_len != kv_len or position_ids.shape[1] != q_len:
        return None, is_in_mask
    if keep is not None and keep.shape[-1] != q_len:
        return None, is_in_mask
    positions = position_ids.expand(batch, -1)
    splits_at_gaps = is_in_mask and _InGraph.splits_at_gaps  # as transformers does without a cache and without a 2-D mask
    ids = find_packed_sequence_indices(positions) if splits_at_gaps else restarts(positions, keep).cumsum(-1)
    return Documents(ids, positions, keep), is_in_mask


def note_documents_in_graph(config: Any, documents: Tensor) -> None:
    """Notes the documents ``int[B, S]`` of a layer's arguments on the cache of its model, in a graph."""
    if _InGraph.config is config and _InGraph.keys is not None:
        _InGraph.keys.note(documents)


def _keys_in_graph(cache: Any, q_offset: int | Tensor, documents: Tensor | None) -> Keys | None:
    """The notes of an empty cache to which a graph adds keys."""
    if cache is None:
        return None
    require_one_document(cache, q_offset)
    if not (isinstance(q_offset, int) and q_offset == 0):
        return None
    keys = note_keys(cache)
    if documents is not None:
        keys.note(documents)
    return keys


def _packed_in_graph(found: Any, cache: Any, position_ids: Tensor | None, batch: int) -> Any:
    """The arguments of a mask with the documents that transformers would drop, in a graph.

    Values cannot be read there, so every row counts as packed; a row that is not has one document.
    """
    early_exit, attention_mask, documents, q_len, kv_len, q_offset, kv_offset = found
    if early_exit or documents is not None or position_ids is None or q_len == 1 or position_ids.dim() != 2:
        return found
    if (cache is not None and not (isinstance(q_offset, int) and q_offset == 0)) or q_len != kv_len:
        keep = _keep_of_queries(attention_mask, q_len, q_offset)
        torch._assert_async(
            ~restarts(position_ids.expand(batch, -1), keep).any(),
            "position_ids restart inside a row, where the cache is not empty or has free places: in code that torch.compile "
            "traces, their documents are not known. Pack rows without a cache, or give each document a row",
        )
        return found
    documents = restarts(position_ids.expand(batch, -1), attention_mask).cumsum(-1)
    return False, attention_mask, documents, q_len, kv_len, q_offset, kv_offset


def _keep_of_queries(keep: Tensor | None, q_len: int, q_offset: int | Tensor) -> Tensor | None:
    """The part of a 2-D mask ``bool[B, tokens]`` of the tokens so far that belongs to the queries, ``bool[B, q_len]``."""
    if keep is None:
        return None
    places = torch.arange(q_len, device=keep.device) + q_offset
    return keep[:, places.clamp(max=keep.shape[1] - 1)]
