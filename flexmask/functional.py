"""Attention under any mask, on the backend that suits it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from flexmask.algebra import Mask, Truth
from flexmask.analysis import analyse
from flexmask.closures import frame_closure
from flexmask.errors import ExpressionError, LoweringError, OperandError
from flexmask.index import Constant, q
from flexmask.preparation import frame_of
from flexmask.sdpa import ScoreMod, block_sdpa
from flexmask.separation import Span, separate
from flexmask.text import parse

__all__ = ["Backend", "attention", "check_backend", "choose_backend"]

Backend = Literal["auto", "flex", "sdpa"]

FLEX_DTYPES = {torch.float32, torch.bfloat16, torch.float16}
#: Kernels that are compiled, one for each combination of shapes, dtypes and kind of mask, before that is taken for a mistake.
MAX_KERNELS = 256
#: The smallest head that FlexAttention's CUDA kernels take.
FLEX_MIN_HEAD = 16


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | str | BlockMask | None = None,
    *,
    score_mod: ScoreMod | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    q_offset: int | Tensor = 0,
    backend: Backend = "auto",
) -> Tensor:
    """``softmax(scale * query @ key.T, where the mask is True) @ value``; 0 for a query that sees no key.

    Args:
        query: ``[B, H, q_len, D]``.
        key: ``[B, H_kv, kv_len, D]``.
        value: ``[B, H_kv, kv_len, D_v]``.
        mask: a mask, its text, a ready BlockMask (``flex`` only), or None for no mask.
        score_mod: ``(score, b, h, q_idx, kv_idx) -> score`` as in FlexAttention, applied to the scaled scores.
        scale: factor of the scores; ``1 / sqrt(D)`` by default.
        enable_gqa: allows fewer key heads than query heads: query head ``h`` uses key head ``h // (H // H_kv)``.
        q_offset: position of the first query, an int or an integer tensor ``[B]``, for the mask.
        backend: ``"flex"`` is compiled FlexAttention over the mask's BlockMask (no gradients on the CPU). ``"sdpa"`` goes
            through ``scaled_dot_product_attention`` in blocks of queries, each against the keys that it can see, with
            gradients on every device. ``"auto"``: see :func:`choose_backend`.

    Returns:
        ``[B, H, q_len, D_v]``, of the query's dtype. Without sequences, heads, queries, keys or channels it is 0 or empty,
        whatever the mask.

    Raises:
        OperandError: arguments of a wrong type or dtype.
        LoweringError: shapes that do not fit, a mask that contradicts them, or a backend that cannot do this.

    Source: ``torch.nn.functional.scaled_dot_product_attention``, ``torch.nn.attention.flex_attention.flex_attention``.
    """
    _check(query, key, value, enable_gqa)
    mask = _as_mask(mask)
    check_backend(backend)
    if 0 in query.shape or 0 in value.shape:
        return _nothing(query, key, value)
    if backend == "sdpa" or (backend == "auto" and choose_backend(query, value, mask) == "sdpa"):
        if isinstance(mask, BlockMask):
            raise LoweringError("a BlockMask needs backend='flex'; for backend='sdpa' give the Mask that it was made from")
        return _sdpa(query, key, value, mask, score_mod, scale, q_offset)
    return _flex(query, key, value, mask, score_mod, scale, enable_gqa, q_offset)


def check_backend(backend: str) -> None:
    """Raises an ExpressionError unless ``backend`` is one."""
    if backend not in ("auto", "flex", "sdpa"):
        raise ExpressionError(f"backend must be 'auto', 'flex' or 'sdpa', got {backend!r}")


def choose_backend(query: Tensor, value: Tensor, mask: Mask | str | BlockMask | None = None) -> Literal["flex", "sdpa"]:
    """The backend that ``backend="auto"`` takes: ``flex`` for a BlockMask, and on CUDA where its kernels can; else ``sdpa``.

    Args:
        query: ``[B, H, q_len, D]``.
        value: ``[B, H_kv, kv_len, D_v]``.
        mask: the mask, as for :func:`attention`.
    """
    if isinstance(mask, BlockMask):
        return "flex"
    able = query.dtype in FLEX_DTYPES and min(query.shape[-1], value.shape[-1]) >= FLEX_MIN_HEAD
    return "flex" if query.device.type == "cuda" and able else "sdpa"


@lru_cache(maxsize=256)
def _parsed(text: str) -> Mask:
    return parse(text)


def _as_mask(mask: Any) -> Mask | BlockMask | None:
    if isinstance(mask, str):
        return _parsed(mask)
    if mask is None or isinstance(mask, Mask | BlockMask):
        return mask
    raise OperandError(
        f"mask must be a Mask, its text, a BlockMask or None, got {type(mask).__name__}. "
        "A boolean tensor becomes a mask with flexmask.dense(tensor)."
    )


def _check(query: Any, key: Any, value: Any, enable_gqa: bool) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            raise OperandError(f"{name} must be a tensor, got {type(tensor).__name__}")
    shapes = f"query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}"
    if not query.dim() == key.dim() == value.dim() == 4:
        raise LoweringError(f"attention takes [B, H, length, D]; got {shapes}")
    if len({tensor.dtype for tensor in (query, key, value)}) > 1 or not query.is_floating_point():
        raise OperandError(
            f"query, key and value must have one floating point dtype, got {query.dtype}, {key.dtype}, {value.dtype}"
        )
    if len({tensor.device for tensor in (query, key, value)}) > 1:
        raise LoweringError(f"query, key and value must be on one device, got {query.device}, {key.device}, {value.device}")
    if query.shape[0] != key.shape[0] or key.shape[:3] != value.shape[:3] or query.shape[3] != key.shape[3]:
        raise LoweringError(f"batch, key length and head size must agree; got {shapes}")
    if query.shape[1] != key.shape[1]:
        if not enable_gqa:
            raise LoweringError(f"query has {query.shape[1]} heads, key {key.shape[1]}; say enable_gqa=True to share key heads")
        if key.shape[1] == 0 or query.shape[1] % key.shape[1]:
            raise LoweringError(f"the query's {query.shape[1]} heads must be a multiple of the key's {key.shape[1]}")


def _nothing(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The output where there are no sequences, heads, queries, keys or channels: 0, with gradients that are 0."""
    anchor = query[..., :0].sum() + key[..., :0].sum() + value[..., :0].sum()
    return query.new_zeros((*query.shape[:3], value.shape[3])) + anchor


def _sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | None,
    score_mod: ScoreMod | None,
    scale: float | None,
    q_offset: int | Tensor,
) -> Tensor:
    mask = mask if mask is not None else Truth(True)
    batch, heads, q_len, _ = query.shape
    frame = frame_of(mask, q_len, key.shape[2], batch=batch, heads=heads, q_offset=q_offset, device=query.device)
    if score_mod is None:
        settled = frame.settled(frame.mask)
        whole = settled == Truth(True)
        if whole or _is_fused_causal(settled, q_offset):
            grouped = query.shape[1] != key.shape[1]
            return F.scaled_dot_product_attention(query, key, value, is_causal=not whole, scale=scale, enable_gqa=grouped)
    rows = analyse(frame)
    cells = None if rows.exact else frame_closure(frame)
    return block_sdpa(query, key, value, rows.upper.bounds, cells=cells, score_mod=score_mod, scale=scale)


def _is_fused_causal(mask: Mask, q_offset: int | Tensor) -> bool:
    """Whether the mask is what SDPA's ``is_causal`` means: ``kv < q + 1`` with queries that start at 0."""
    return isinstance(q_offset, int) and q_offset == 0 and separate(mask) == Span(None, q + Constant(1))


def _flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | BlockMask | None,
    score_mod: ScoreMod | None,
    scale: float | None,
    enable_gqa: bool,
    q_offset: int | Tensor,
) -> Tensor:
    if query.dtype not in FLEX_DTYPES:
        raise LoweringError(f"FlexAttention takes float32, bfloat16 and float16, got {query.dtype}; use backend='sdpa'")
    batch, heads, q_len, _ = query.shape
    if isinstance(mask, Mask):
        mask = mask.block_mask(q_len, key.shape[2], batch=batch, heads=heads, q_offset=q_offset, device=query.device)
    elif mask is not None:
        _check_block_mask(mask, query, key, q_offset)
    if query.device.type == "cpu":
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value)):
            raise LoweringError("FlexAttention has no gradients on the CPU; use backend='sdpa', or torch.no_grad()")
        query, key, value = query.detach(), key.detach(), value.detach()
    options: dict[str, Any] = {"score_mod": score_mod, "block_mask": mask, "scale": scale, "enable_gqa": enable_gqa}
    if torch.compiler.is_compiling():
        return cast(Tensor, flex_attention(query, key, value, **options))
    with torch.compiler.config.patch(recompile_limit=MAX_KERNELS):  # type: ignore[attr-defined]
        try:
            return _compiled(query.device.type)(query, key, value, **options)
        except FailOnRecompileLimitHit:
            raise LoweringError(
                f"more than {MAX_KERNELS} kernels of different shapes and kinds of masks; pad to fewer lengths, use "
                "backend='sdpa', or forget the kernels with torch.compiler.reset()"
            ) from None


def _check_block_mask(mask: BlockMask, query: Tensor, key: Tensor, q_offset: int | Tensor) -> None:
    """A BlockMask that does not fit would read beyond its tensors."""
    if isinstance(q_offset, Tensor) or q_offset:
        raise LoweringError("a BlockMask knows its queries' positions; give q_offset to mask.block_mask() instead")
    wanted = (*query.shape[:2], query.shape[2], key.shape[2])
    fits = [given in (1, size) for given, size in zip(mask.shape[:-2], wanted[:2], strict=False)]
    if len(mask.shape) != 4 or not all(fits) or tuple(mask.seq_lengths) != wanted[2:]:
        raise LoweringError(
            f"the BlockMask is for [B, H, q_len, kv_len] = {list(mask.shape)}, but there are {list(wanted)} "
            "(B and H may be 1 in the BlockMask)"
        )
    if mask.kv_indices.device != query.device:
        raise LoweringError(f"the BlockMask is on {mask.kv_indices.device}, the query on {query.device}; move it with .to()")


@cache
def _compiled(device: str) -> Callable[..., Tensor]:
    # On the CPU a mask that captures tensors does not build once shapes turn dynamic, so each shape compiles its own kernel.
    return cast(Callable[..., Tensor], torch.compile(flex_attention, fullgraph=True, dynamic=False if device == "cpu" else None))
