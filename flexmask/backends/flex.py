"""The backend ``flex``: compiled FlexAttention over the mask's BlockMask, with exact dropout."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from flexmask import _sync
from flexmask._transforms import are_ints, has_values, is_captured, is_transformed, number_text
from flexmask.backends.backend import Backend, Call, Output
from flexmask.backends.cache import shared
from flexmask.backends.dropout import Hashes, keep_weights
from flexmask.backends.score_mods import check_scores
from flexmask.errors import LoweringError
from flexmask.expr.mask import Mask
from flexmask.intervals.bands import Fused, fused_kind
from flexmask.lowering.block_mask import block_mask
from flexmask.lowering.mask_mod import Form
from flexmask.plans.capture import lower_in_graph
from flexmask.plans.lowered import LoweredMask
from flexmask.scores.placed import PlacedScore
from flexmask.scores.score import ScoreMod

DTYPES = {torch.float32, torch.bfloat16, torch.float16}
#: The least channels of a head that the CUDA kernels take.
MIN_HEAD = 16
#: The most rows in a tile of the decoding kernel: the queries of all heads that share a key head.
MAX_TILE = 128
#: The most kernels to compile, one for each combination of shapes, dtypes and kind of mask, before an error.
MAX_KERNELS = 256
#: The fewest channels of a head on the CPU: with fewer, torch's GEMM without AVX-512 writes over the scores of other rows.
MIN_CPU_HEAD = 24


def _supports(call: Call) -> str | None:
    query, value = call.query, call.value
    if is_transformed(query, call.key, value) or not (has_values(query) or is_captured()):
        return (
            "FlexAttention takes no transforms of torch.func, no forward-mode derivatives, and no tensors without values (meta, "
            "FakeTensorMode); give a Mask with backend='sdpa'"
        )
    if query.dtype not in DTYPES:
        return f"FlexAttention takes float32, bfloat16 and float16, got {query.dtype}; use backend='sdpa'"
    if query.device.type == "cuda" and min(query.shape[-1], value.shape[-1]) < MIN_HEAD:
        return (
            f"FlexAttention takes heads of at least {MIN_HEAD} channels on CUDA, got D={query.shape[-1]} and "
            f"D_v={value.shape[-1]}; use backend='sdpa'"
        )
    if _inference_only(query) and torch.compiler.is_compiling():
        return (
            "FlexAttention on the CPU reads wrong values in code that torch.compile traces; use backend='sdpa', which compiles, "
            "has gradients and is faster there"
        )
    if _inference_only(query) and call.needs_gradients():
        return "FlexAttention has no gradients on the CPU; use backend='sdpa', or torch.no_grad()"
    return None


def run_flex(call: Call, block_size: tuple[int, int] = (128, 128)) -> Output:
    """Attention by FlexAttention, as of ``run`` of a Backend.

    Args:
        call: the call.
        block_size: queries and keys in a block of a Mask.
    """
    query, key, value, mask = call.query, call.key, call.value, call.mask
    batch, heads, q_len, _ = query.shape
    given = call.kernel_options or {}
    is_flash = given.get("BACKEND") == "FLASH"
    if isinstance(call.score_mod, PlacedScore):
        call = call._replace(score_mod=call.score_mod.function())
    elif call.score_mod is not None and not torch.compiler.is_compiling():
        check_scores(call.score_mod, query, key)
    fused: Fused = None
    if isinstance(mask, Mask) and torch.compiler.is_compiling():
        mask = lower_in_graph(mask, query, key, call.q_offset, block_size)
    elif isinstance(mask, Mask):
        form: Form = "auto" if is_flash else "triton"
        setting = batch, heads, q_len, key.shape[2], query.device, block_size, form
        mask, fused = shared(mask, ("flex", *setting), call.q_offset, partial(_block_mask_and_kind, mask, call, block_size, form))
    if isinstance(mask, LoweredMask):
        fused = mask.fused
        mask = mask.block_mask if is_flash else mask.triton_block_mask
    proved: dict[str, object] = {}
    if fused and mask is not None and are_ints(q_len) and not q_len % mask.BLOCK_SIZE[0]:
        # Each list is one run of blocks, and kernels need not read where the next one is. Where the last block of queries reaches
        # beyond the last of them, its blocks are partial, and lists of queries have a gap before it.
        proved = {"BLOCKS_ARE_CONTIGUOUS": True}
        # All queries attend to the first key that their kernel visits. Its score is finite for finite queries and keys, as no
        # function changes it.
        if _is_prefill(query, key, mask) and call.score_mod is None and not call.dropout_p:
            proved["ROWS_GUARANTEED_SAFE"] = True
    scale = call.scale
    if _inference_only(query):
        query, key, value = query.detach(), key.detach(), value.detach()
        if query.shape[-1] < MIN_CPU_HEAD:
            scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
            query, key = (F.pad(tensor, (0, MIN_CPU_HEAD - query.shape[-1])) for tensor in (query, key))
    options: dict[str, Any] = {"block_mask": mask, "scale": scale, "enable_gqa": call.enable_gqa}
    chosen = dict(given)
    if "BACKEND" not in chosen:
        chosen = proved | ({"FORCE_USE_FLEX_ATTENTION": True} if _is_prefill(query, key, mask) else {}) | chosen
    if chosen:
        options["kernel_options"] = chosen
    hashes = call.hashes()
    if hashes is not None:
        out, lse = _call_with_dropout(query, key, value, call.score_mod, call.dropout_p, hashes, options)
    elif call.return_lse:
        out, lse = _call_with_lse(query, key, value, score_mod=call.score_mod, **options)
    else:
        return cast(Tensor, _call(query, key, value, score_mod=call.score_mod, **options))
    return (out, lse) if call.return_lse else out


def _block_mask_and_kind(mask: Mask, call: Call, block_size: tuple[int, int], form: Form) -> tuple[BlockMask, Fused]:
    """The BlockMask of a mask, and its kind, but on the CPU: options for a kind would be another kernel to compile there."""
    context = call.bound(mask)
    return block_mask(context, block_size, form), fused_kind(context) if _sync.needs_sync(call.query) else None


def _is_prefill(query: Tensor, key: Tensor, mask: BlockMask | None) -> bool:
    """Whether a call is for torch's kernel for prompts. Torch chooses by the number of queries alone: fewer than 128 decode.

    A tile of the decoding kernel holds the queries of all heads that share a key head, rounded up to a power of 2, and must
    divide the block of queries. Where it does not, torch ends in an error.
    """
    tile = MAX_TILE if mask is None else math.gcd(mask.BLOCK_SIZE[0], MAX_TILE)
    q_len, group = query.shape[2], query.shape[1] // key.shape[1]
    return q_len >= MAX_TILE or q_len * group > tile


def _call_with_dropout(
    query: Tensor, key: Tensor, value: Tensor, score_mod: ScoreMod | None, p: float, hashes: Hashes, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Attention with dropped scores at -inf, rescaled from the sum of the kept weights to that of all, and the logsumexp of all.

    The hashes of rows and keys are computed before the kernel, which reads them: Inductor repeats an expression of a
    ``score_mod`` at each use, so that hashing there would take minutes to compile.
    """
    first, second = (part.contiguous() for part in hashes.rows.unbind(-1))
    keys, share_dropped = hashes.keys.flatten(), number_text(p)

    def dropped(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        if score_mod is not None:
            score = score_mod(score, b, h, q_idx, kv_idx)
        keep = keep_weights(first[b, h, q_idx], second[b, h, q_idx], keys[kv_idx], float(share_dropped))
        return torch.where(keep > 0, score, -math.inf)

    out, remaining = _call_with_lse(query, key, value, score_mod=dropped, **options)
    _, complete = _call_with_lse(query, key, value, score_mod=score_mod, **options)
    seen = complete > -math.inf
    share = torch.where(seen, remaining - torch.where(seen, complete, 0), -math.inf).exp()
    return (out * (share / (1 - p if p < 1 else 1)).unsqueeze(-1)).to(out.dtype), complete


def _call_with_lse(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    call = _uncompiled if _inference_only(query) else _call  # the compiled CPU kernels return no logsumexp
    out, aux = call(query, key, value, return_aux=AuxRequest(lse=True), **options)
    if torch.compiler.is_compiling() and torch.is_grad_enabled():
        # Where a graph has no gradient of the output, as nothing else uses it, torch does not compile the backward pass.
        unused = torch.zeros((), dtype=torch.bool, device=out.device)
        return out, aux.lse + torch.where(unused, out[..., 0], 0)
    return out, aux.lse


def _inference_only(tensor: Tensor) -> bool:
    """Whether compiled FlexAttention returns neither gradients nor the logsumexp on a tensor's device."""
    return tensor.device.type == "cpu"


def _uncompiled(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
        return flex_attention(query, key, value, **options)


def _call(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    if torch.compiler.is_compiling():
        return flex_attention(query, key, value, **options)
    # A number that a function holds is a part of its kernel: torch 2.15 fails for another one, which it takes for a variable.
    with torch._dynamo.config.patch(recompile_limit=MAX_KERNELS, specialize_float=True):
        try:
            return _compiled(query.device.type)(query, key, value, **options)
        except getattr(torch._dynamo.exc, "FailOnRecompileLimitHit", ()):  # private to torch, so a version may not have it
            raise LoweringError(
                f"more than {MAX_KERNELS} kernels of different shapes and kinds of masks; pad to fewer lengths, use "
                "backend='sdpa', or drop the compiled kernels with torch.compiler.reset()"
            ) from None


@cache
def _compiled(device: str) -> Callable[..., Any]:
    # With dynamic shapes torch 2.13 writes C++ that does not compile: causal at another batch size, from_dense at another length.
    return torch.compile(flex_attention, fullgraph=True, dynamic=False if device == "cpu" else None)


FLEX = Backend("flex", supports=_supports, run=run_flex, preferred_on=("cuda",))
