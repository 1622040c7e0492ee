"""The backend ``varlen``: torch's variable-length attention, for masks that are segments of queries with keys of their own."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from flexmask._transforms import has_values, is_captured, is_transformed
from flexmask.backends.backend import Backend, Call, Output
from flexmask.backends.cache import shared
from flexmask.expr.mask import Mask, Truth

#: Torch's operators have kernels for these.
DEVICES, DTYPES = {"cuda"}, {torch.float16, torch.bfloat16}
#: Before, it takes a causal mask in cuDNN, which aligns the first query and the first key.
OLDEST = "2.15"


def _supports(call: Call) -> str | None:
    query = call.query
    if torch.__version__ < OLDEST:
        return (
            f"variable-length attention takes torch {OLDEST} or newer, this is {torch.__version__}; use backend='flex' or 'sdpa'"
        )
    if torch.compiler.is_compiling():
        return (
            "variable-length attention reads the values of a mask's data, so compiled code takes it as varlen_attn(query, key, "
            "value, ...) of torch, with the arguments of mask.varlen(), made outside"
        )
    if query.device.type not in DEVICES:
        return f"variable-length attention takes tensors on CUDA, got {query.device.type}; use backend='sdpa'"
    if not has_values(query) or is_captured() or is_transformed(query, call.key, call.value):
        return "variable-length attention takes no transforms of torch.func and no tensors without values; use backend='sdpa'"
    if query.dtype not in DTYPES:
        return f"variable-length attention takes float16 and bfloat16, got {query.dtype}"
    if not isinstance(call.mask, Mask | None):
        return f"variable-length attention takes a Mask, got a {type(call.mask).__name__}"
    if unused := [name for name in ("score_mod", "dropout_p", "kernel_options") if getattr(call, name)]:
        return f"variable-length attention has no {unused[0]}; use backend='flex' or 'sdpa'"
    if call.scale is not None and call.scale <= 0:
        return f"variable-length attention takes a scale above 0, got {call.scale}"
    if call.return_lse and call.needs_gradients():
        return "the logsumexp of variable-length attention has no gradients; use torch.no_grad(), or backend='flex' or 'sdpa'"
    return None


def _run(call: Call) -> Output:
    from torch.nn.attention.varlen import AuxRequest, varlen_attn  # imports cuDNN's and FlashAttention's operators

    query, key, value = call.query, call.key, call.value
    mask = Truth(True) if call.mask is None else call.mask
    batch, heads, q_len, _ = query.shape
    assert isinstance(mask, Mask), "_supports refuses what is lowered"
    sizes = q_len, key.shape[2]
    made = partial(mask.varlen, *sizes, batch=batch, heads=heads, q_offset=call.q_offset, device=query.device)
    segments = shared(mask, ("varlen", *sizes, batch, heads, query.device), call.q_offset, made)
    out, lse = varlen_attn(
        _tokens(query, segments.queries),
        _tokens(key, segments.keys),
        _tokens(value, segments.keys),
        *segments[:4],
        window_size=segments.window_size,
        scale=call.scale,
        enable_gqa=call.enable_gqa,
        return_aux=AuxRequest(lse=True),
    )
    places = segments.queries
    if places is not None:
        out = out.new_zeros(batch * q_len, *out.shape[1:]).index_copy(0, places, out)
        lse = lse.new_full((heads, batch * q_len), -torch.inf).index_copy(1, places, lse)
    out = out.unflatten(0, (batch, q_len)).transpose(1, 2)
    return (out, lse.unflatten(1, (batch, q_len)).transpose(0, 1)) if call.return_lse else out


def _tokens(tensor: Tensor, places: Tensor | None) -> Tensor:
    """``[B, H, S, D]`` as ``[tokens, H, D]``, all of them or those at some places."""
    tokens = tensor.transpose(1, 2).flatten(0, 1)
    return tokens if places is None else tokens.index_select(0, places)


VARLEN = Backend("varlen", supports=_supports, run=_run, automatic=False)
