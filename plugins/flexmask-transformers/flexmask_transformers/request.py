"""Adds to the masks that transformers requests: documents that it would drop, and masks that the user gives.

transformers reads the arguments of each mask in ``_preprocess_mask_arguments(config, inputs_embeds, attention_mask,
past_key_values, position_ids, layer_idx)`` and calls the mask function after it, without most of them. `preprocess` replaces it:
it keeps what the mask function (`masks`) needs in a `Request`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flexmask._sync import assert_async
from flexmask.errors import LoweringError, OperandError
from flexmask.plans import LoweredMask
from flexmask_transformers.arguments import GivenMask, check_attention_mask, check_padding, check_rows, is_user_mask
from flexmask_transformers.forwards import check_layers, running
from flexmask_transformers.model_mask import Request
from flexmask_transformers.packed_cache import note_keys, require_one_document
from flexmask_transformers.packing import Documents, check_document_numbers, is_packed, restarts, text_positions

__all__ = ["preprocess", "take_request"]


class _Next(threading.local):
    request: Request | None = None


_NEXT = _Next()


def take_request() -> Request:
    """The request of the mask that is being made; empty where a model calls a mask function directly."""
    request, _NEXT.request = _NEXT.request, None
    return request or Request()


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
            user_mask = attention_mask.mask if isinstance(attention_mask, GivenMask) else attention_mask
            attention_mask = None
        check_attention_mask(attention_mask, inputs_embeds)
        encoded = next((value for value in (*rest, *options.values()) if value is not None), None)
        is_cross = encoded is not None  # keys and a 2-D mask of an encoder
        if inputs_embeds.device.type == "meta":  # where positions have no values
            position_ids = None
        batch, q_len = inputs_embeds.shape[:2]
        positions = _positions(config, position_ids, batch, q_len, is_cross=is_cross)
        if not is_cross:
            check_document_numbers(attention_mask, positions)
        found = original(config, inputs_embeds, attention_mask, past_key_values, position_ids, layer_idx, *rest, **options)
        _NEXT.request = None
        if found[0]:
            return found
        _, keep, found_ids, _, kv_len, q_offset, kv_offset = found
        if keep is not None:
            check_rows(keep, len(encoded) if isinstance(encoded, Tensor) else batch)
        if keep is not None and not rest and not options:  # encoders may have keys before their tokens
            check_padding(keep, q_len, q_len if past_key_values is None else kv_len + kv_offset, q_offset)
        require_one_document(past_key_values, q_offset)
        if found_ids is not None and positions is not None:  # splits at gaps, too
            documents: Documents | None = Documents(found_ids, _of_text(positions))
        else:
            documents = _documents(positions, keep, past_key_values, q_len, kv_len, q_offset)
        if documents is not None:
            check_layers(is_packed(documents.ids) if torch.compiler.is_compiling() else True)
        forward = running()
        if forward is not None and not is_cross:
            forward.has_masks = forward.has_masks or positions is not None
            if torch.compiler.is_compiling():
                forward.documents, forward.cache = documents, past_key_values if _is_empty(q_offset) else None
        _NEXT.request = Request(documents, user_mask, keep, past_key_values, knows_positions=positions is not None)
        return False, keep, None, *found[3:]

    return wrapped


def _positions(config: Any, position_ids: Tensor | None, batch: int, q_len: int, *, is_cross: bool) -> Tensor | None:
    """The positions of the queries, ``int[B, q_len]`` or ``int[R, B, q_len]``: those that the model got, else those of its mask.

    A model may give others to its mask, such as those that it makes where an adapter around it has dropped the caller's.

    Raises:
        LoweringError: those that the model got restart, and are not of the queries and keys of this mask.
    """
    positions, forward = text_positions(position_ids), running()
    if forward is not None and forward.position_ids is not None:
        fits, is_own = forward.position_ids.shape[-1] == q_len, forward.is_of(config)
        if fits and is_own and not is_cross:
            positions = forward.position_ids
        elif is_own or is_cross or (fits and positions is None):  # else tokens of another kind, such as those of an image
            forward.require_unpacked("a mask is for other queries or keys than their tokens, as behind prompts of PEFT")
    if positions is None or positions.shape[-1] != q_len:
        return None
    return positions.expand(*positions.shape[:-2], batch, -1)


def _documents(
    positions: Tensor | None, keep: Tensor | None, cache: Any, q_len: int, kv_len: int, q_offset: int | Tensor
) -> Documents | None:
    """The documents of packed rows that transformers would treat as one sequence; None where rows are not packed.

    transformers ignores documents where there is a cache, which is the default, or a 2-D mask. In a graph, where values cannot be
    read, every row counts as packed; a row that is not has one document.

    Raises:
        LoweringError: there are documents, and keys of earlier forwards.
    """
    is_graph = torch.compiler.is_compiling()
    if q_len == 1 and not is_graph:
        return None
    is_first = _is_empty(q_offset)
    keys = note_keys(cache) if cache is not None and is_first else None
    if positions is None or q_len == 1:
        return None
    starts = restarts(positions, _keep_of_queries(keep, q_len, q_offset))
    if is_graph and not (is_first and q_len == kv_len):
        assert_async(
            ~starts,
            "position_ids restart inside a row, where the cache is not empty or has free places: in code that torch.compile "
            "traces, their documents are not known. Pack rows without a cache, or give each document a row",
        )
        return None
    if not is_graph and not starts.any():
        return None
    if not is_first:
        raise LoweringError(
            f"position_ids restart inside a row, where the cache holds {int(q_offset)} tokens already: their documents are not "
            "known. Pack rows only where the cache is empty, or give each document a row"
        )
    ids = starts.cumsum(-1)
    if keys is not None:
        keys.note(ids)
    free = (0, int(kv_len) - q_len)  # places of a static cache
    return Documents(F.pad(ids, free, value=-1), F.pad(_of_text(positions), free), keep)


def _of_text(positions: Tensor) -> Tensor:
    """``int[B, S]``; of time, height and width it is the time."""
    return positions if positions.dim() == 2 else positions[0]


def _is_empty(q_offset: int | Tensor) -> bool:
    """Whether a cache with so many tokens is empty; in a graph, whether that is known."""
    if torch.compiler.is_compiling():
        return isinstance(q_offset, int) and q_offset == 0
    return int(q_offset) == 0


def _keep_of_queries(keep: Tensor | None, q_len: int, q_offset: int | Tensor) -> Tensor | None:
    """The part of a 2-D mask ``bool[B, tokens]`` of the tokens so far that belongs to the queries, ``bool[B, q_len]``."""
    if keep is None:
        return None
    places = torch.arange(q_len, device=keep.device) + q_offset
    return keep[:, places.clamp(max=keep.shape[1] - 1)]
