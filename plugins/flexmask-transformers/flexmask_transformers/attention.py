"""The attention function of ``attn_implementation="flexmask"``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import has_static_value

import flexmask
from flexmask import Mask, causal, document, full
from flexmask._transforms import autocast
from flexmask.backends import attention_weights
from flexmask.errors import LoweringError
from flexmask.plans import LoweredMask
from flexmask.tracing import as_mask
from flexmask_transformers.arguments import GivenMask, as_cells, is_user_mask, require
from flexmask_transformers.dense import dense_attention
from flexmask_transformers.forwards import check_layers, require_unpacked, running
from flexmask_transformers.graphs import GraphMask
from flexmask_transformers.model_mask import ModelMask, to_mask
from flexmask_transformers.packed_cache import note_keys
from flexmask_transformers.packing import document_ids, is_packed, packing_arguments, text_positions
from flexmask_transformers.recording import record
from flexmask_transformers.scores import Scores, append_sink, with_sink

__all__ = ["attention_forward"]

#: Arguments of attention that change its result and are not supported.
UNSUPPORTED = {"cache": "continuous batching", "sinks": "sinks for each token", "block_indices": "blocks chosen by an indexer"}


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention of one layer, as transformers calls it.

    Args:
        module: the layer.
        query: ``[B, H, q_len, D]``.
        key: ``[B, H_kv, kv_len, D]``.
        value: ``[B, H_kv, kv_len, D_v]``.
        attention_mask: a :class:`ModelMask` or :class:`GraphMask`; a Mask, its text or a mask_mod; ``bool`` or additive ``float``
            ``[B, 1 or H, q_len, kv_len]``; None for no mask, or the causal one where the layer is causal, as in SDPA.
        scaling: factor of the scores; ``1 / sqrt(D)`` by default.
        dropout: probability that a weight is dropped.
        softcap: scores become ``softcap * tanh(score / softcap)``.
        s_aux: ``[H]``, the score of a sink, a further key with the value 0.
        position_bias: ``[B or 1, H, q_len, kv_len]``, added to the scores.
        is_causal: whether None as a mask means causal; by default the layer's ``is_causal``, and not in a model that runs without
            ``torch.compile``, whose causal masks are never None.
        kwargs: ``cu_seq_lens_q`` or ``seq_idx`` of packed rows, and ``output_attentions``. Others do not change attention.

    Returns:
        ``[B, q_len, H, D_v]``, and with ``output_attentions`` the weights ``[B, H, q_len, kv_len]`` before dropout, else None.

    Raises:
        LoweringError: the mask does not fit the keys, or an argument of `UNSUPPORTED` is given.
    """
    for name, what in UNSUPPORTED.items():
        if kwargs.get(name) is not None:
            raise LoweringError(f"flexmask does not support {what} ({name}=); use another attn_implementation for this model")
    query, key, value = autocast(query, key, value)
    query = query.expand(key.shape[0], -1, -1, -1)
    (batch, _, q_len, width), kv_len = query.shape, key.shape[2]
    scores = Scores(width**-0.5 if scaling is None else scaling, softcap, position_bias, s_aux)
    if is_causal is None:  # without a mask eager models attend to all keys; in graphs causal masks may be None
        is_causal = getattr(module, "is_causal", True) and (running() is None or torch.compiler.is_compiling())
    _require_known_documents(module, attention_mask, batch, q_len, kv_len, kwargs)
    is_causal = is_causal and q_len > 1 and attention_mask is None
    is_dense = isinstance(attention_mask, Tensor) or torch.compiler.is_compiling()
    if is_dense and not isinstance(attention_mask, ModelMask):
        if isinstance(attention_mask, Tensor):
            attention_mask = as_cells(attention_mask, query, kv_len)
        is_whole = isinstance(attention_mask, GraphMask) and attention_mask.is_whole
        documents = None if is_whole else _dense_documents(batch, q_len, kv_len, kwargs)
        tiled = _tiled_mask(attention_mask, is_causal, documents, kwargs) if scores.sink is None else None
        if tiled is not None:
            options: dict[str, Any] = {"enable_gqa": query.shape[1] != key.shape[1], "dropout_p": dropout}
            own = scores.score_mod(batch, kv_len)
            out = flexmask.attention(query, key, value, tiled, score_mod=own, scale=scores.scale, **options)
            return out.transpose(1, 2).contiguous(), None
        if isinstance(attention_mask, GraphMask):
            attention_mask = attention_mask.lowered.dense()

        def mask() -> Mask:
            dense = _dense_mask(attention_mask, is_causal)
            return dense if documents is None else dense & document(documents)

        record(module, mask)
        out = dense_attention(
            query, key, value, attention_mask, scores, is_causal=is_causal, documents=documents, dropout=dropout
        )
        weights = None
        if kwargs.get("output_attentions") and not torch.compiler.is_compiling():
            weights = _weights(query, key, mask(), scores, 0)
    else:
        if not isinstance(attention_mask, ModelMask):
            whole = causal() if is_causal else full() if attention_mask is None else _user_mask(attention_mask, q_len, kv_len)
            attention_mask = ModelMask.make(whole, batch, q_len, kv_len, 0, query.device)
        out, weights = _attend(module, query, key, value, attention_mask, scores, dropout, kwargs)
    return out.transpose(1, 2).contiguous(), weights


@torch.compiler.disable  # type: ignore[untyped-decorator] # layers compiled one by one get masks that are made outside of their graphs
def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    model_mask: ModelMask,
    scores: Scores,
    dropout: float,
    kwargs: Mapping[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """Attention ``[B, H, q_len, D_v]`` under a mask of flexmask, and its weights where ``kwargs`` ask for them."""
    (batch, _, q_len, _), kv_len = query.shape, key.shape[2]
    mask = _packed(model_mask, batch, q_len, kv_len, kwargs)
    record(module, lambda: model_mask.placed(mask))
    weights = _weights(query, key, mask, scores, model_mask.q_offset) if kwargs.get("output_attentions") else None
    sunk = mask
    if scores.sink is not None:
        query, key, value = append_sink(query, key, value, scores.sink, scores.scale)
        sunk = model_mask.variant("sink", (mask,), lambda: with_sink(mask))
    with model_mask.cache:
        out = flexmask.attention(
            query,
            key,
            value,
            sunk,
            score_mod=scores.score_mod(batch, kv_len, model_mask.q_offset),
            scale=scores.scale,
            enable_gqa=query.shape[1] != key.shape[1],
            q_offset=model_mask.q_offset,
            dropout_p=dropout,
        )
    return out, weights


def _weights(query: Tensor, key: Tensor, mask: Mask, scores: Scores, q_offset: int | Tensor) -> Tensor:
    """The weights ``[B, H, q_len, kv_len]``, without the weight of the sink."""
    batch, kv_len = len(query), key.shape[2]
    if scores.sink is not None:
        query, key, _ = append_sink(query, key, key, scores.sink, scores.scale)
        mask = with_sink(mask)
    score_mod = scores.score_mod(batch, kv_len, q_offset)
    found = attention_weights(query, key, mask, scale=scores.scale, score_mod=score_mod, q_offset=q_offset)
    return found[..., :kv_len].to(query.dtype)


def _packed(model_mask: ModelMask, batch: int, q_len: int, kv_len: int, kwargs: Mapping[str, Any]) -> Mask:
    """The mask of a layer within the documents that its arguments describe."""
    if model_mask.shape[-1] != kv_len:
        keep = model_mask.request.keep
        if keep is not None and keep.shape[1] == model_mask.shape[-1]:
            raise LoweringError(f"attention_mask has {keep.shape[1]} tokens for {kv_len} keys; it must have {kv_len}")
        raise LoweringError(
            f"the model made a mask for {model_mask.shape[-1]} keys, and its attention has {kv_len}; flexmask does not support "
            "this combination of model and cache. Use attn_implementation='sdpa' for it"
        )
    if model_mask.is_whole:
        return model_mask.mask
    packing = packing_arguments(kwargs)
    if not packing:
        return model_mask.mask

    def within_documents() -> Mask:
        if model_mask.is_chunked:
            raise LoweringError(
                "this model's chunks start with each document, whose positions cu_seq_lens and seq_idx do not give; also give "
                "position_ids that restart at each document"
            )
        ids = document_ids(packing, batch, q_len, kv_len, model_mask.request.documents)
        check_layers(is_packed(ids))
        if model_mask.request.cache is not None:
            note_keys(model_mask.request.cache).note(ids)
        return model_mask.mask & document(ids)

    return model_mask.variant("documents", tuple(packing.values()), within_documents)


def _dense_documents(batch: int, q_len: int, kv_len: int, kwargs: Mapping[str, Any]) -> Tensor | None:
    """The documents ``int[B, S]`` that the arguments of a layer describe, next to a mask that is a tensor."""
    packing = packing_arguments(kwargs)
    if not packing:
        return None
    forward = running() if torch.compiler.is_compiling() else None
    ids = document_ids(packing, batch, q_len, kv_len, None if forward is None else forward.documents)
    check_layers(is_packed(ids))
    if forward is not None and forward.cache is not None:
        note_keys(forward.cache).note(ids)
    return ids


def _require_known_documents(
    module: torch.nn.Module, mask: Any, batch: int, q_len: int, kv_len: int, kwargs: Mapping[str, Any]
) -> None:
    """An error where a layer attends to tokens of several documents, with neither a mask nor arguments that describe them."""
    forward, layer = running(), type(module).__name__
    if q_len == 1 or packing_arguments(kwargs):
        return
    is_separated = isinstance(mask, ModelMask) and (mask.is_whole or mask.request.documents is not None)
    if forward is not None and forward.packing and not is_separated:
        ids = document_ids(forward.packing, batch, q_len, kv_len)
        message = (
            f"this model does not pass {', '.join(forward.packing)} on to {layer}; pack with position_ids that restart alone, or "
            f"an EncoderDecoderModel with {' and '.join(f'decoder_{name}' for name in forward.packing)} as well"
        )
        require(~is_packed(ids), message, LoweringError)
    if isinstance(mask, ModelMask):
        is_known = mask.request.knows_positions
    else:
        is_known = isinstance(mask, GraphMask) or (mask is not None and (forward is None or forward.has_masks))
    if is_known:
        return
    if forward is None:
        positions, keep = text_positions(kwargs.get("position_ids")), None
    else:
        positions, keep = forward.position_ids, forward.keep
    if positions is not None and positions.shape[-1] == q_len:
        require_unpacked(positions, keep, f"{layer} attends with a mask that was made without them")


def _tiled_mask(mask: Any, is_causal: bool, documents: Tensor | None, kwargs: Mapping[str, Any]) -> Mask | LoweredMask | None:
    """The mask that a layer in a graph attends with in tiles; None where its attention is dense."""
    if documents is None:
        return mask.lowered if isinstance(mask, GraphMask) else None
    is_contiguous = packing_arguments(kwargs).keys() - {"seq_idx"} and has_static_value(documents.shape[1])
    if isinstance(mask, Tensor) or not is_contiguous or not torch.compiler.is_compiling():
        return None
    own: Mask = mask.mask if isinstance(mask, GraphMask) else causal() if is_causal else full()
    return own & document(documents, contiguous=True)


def _dense_mask(mask: Tensor | None, is_causal: bool) -> Mask:
    return causal() if is_causal else full() if mask is None else to_mask(mask)


def _user_mask(mask: Any, q_len: int, kv_len: int) -> Mask:
    """A mask that a caller gave for a layer type, in the dict that models of several types take."""
    if not is_user_mask(mask):
        raise LoweringError(f"attention_mask must be a Mask, its text, a mask_mod, a tensor or None, got {type(mask).__name__}")
    if q_len != kv_len:
        raise LoweringError(
            f"the position of {q_len} queries among {kv_len} keys is not known for a mask in a dict; give it with "
            "flexmask_transformers.use_mask(model, {...}, combine='replace')"
        )
    return as_mask(mask.mask if isinstance(mask, GivenMask) else mask, "attention_mask")
