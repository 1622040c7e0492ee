"""Attention ``[B, H, q_len, D_v]`` under any mask: checks the arguments, picks a backend and runs it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, FlexKernelOptions

from flexmask._checks import check_flag, check_plain, checked_number, kind_of, names_explained, nearest
from flexmask._transforms import autocast, without_autocast
from flexmask.backends.backend import (
    Call,
    check_backend,
    check_sizes,
    entered_parallel,
    ordered_backends,
    refuse_in_parallel,
    register_backend,
    select,
)
from flexmask.backends.dropout import check_dropout
from flexmask.backends.flash import FLASH
from flexmask.backends.flex import FLEX
from flexmask.backends.problem import precise_dtype
from flexmask.backends.tiled_sdpa import TILED_SDPA
from flexmask.backends.varlen import VARLEN
from flexmask.errors import ExpressionError, FlexmaskError, LoweringError, OperandError
from flexmask.expr.mask import Mask
from flexmask.intervals.bind import bind, check_bound
from flexmask.plans.api import Plan
from flexmask.plans.lowered import LoweredMask, outside_inference_mode
from flexmask.scores.placed import PlacedScore, placed_score
from flexmask.scores.score import ScoreLike
from flexmask.tracing.trace import MaskLike, as_mask

#: The remedy for tensors with the axes in another order.
SWAPPED_AXES_HINT = "as [B, length, H, D]: if they are that, take tensor.transpose(1, 2)"
#: The remedies for tensors with fewer axes, by their number.
FEWER_AXES_HINTS = {
    2: "; of one sequence and one head, [length, D], take tensor[None, None]",
    3: "; of [B, length, H * D] take tensor.unflatten(-1, (H, D)).transpose(1, 2), of [length, H, D] "
    "tensor.transpose(0, 1).unsqueeze(0), of [H, length, D] tensor.unsqueeze(0)",
}

#: The names of the options of FlexAttention's kernels.
KERNEL_OPTIONS = tuple(sorted(FlexKernelOptions.__annotations__))

for _backend in (TILED_SDPA, FLASH, FLEX, VARLEN):
    register_backend(_backend)

#: For the padding masks of other libraries, what to write.
PADDING_MASKS = {
    "attention_mask": "its 1 is for a real token: mask=flexmask.key_padding(keep=attention_mask), joined with other masks by &",
    "key_padding_mask": "its True is for padding: mask=flexmask.key_padding(hide=key_padding_mask), joined with other masks by &",
}
#: For arguments of torch's functions, what to write.
EQUIVALENTS = {
    **PADDING_MASKS,
    "attn_mask": "give it as mask=, a boolean one of scaled_dot_product_attention as flexmask.from_dense(attn_mask)",
    "block_mask": "give it as mask=",
    "is_causal": "write mask='causal'",
}


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: MaskLike | LoweredMask | BlockMask | None = None,
    *,
    score_mod: ScoreLike | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    q_offset: int | Tensor = 0,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    backend: str = "auto",
    kernel_options: Mapping[str, object] | None = None,
    return_lse: Literal[False] = False,
    **parameters: Any,
) -> Tensor: ...


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: MaskLike | LoweredMask | BlockMask | None = None,
    *,
    return_lse: Literal[True],
    **options: Any,
) -> tuple[Tensor, Tensor]: ...


@names_explained(EQUIVALENTS)
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: MaskLike | LoweredMask | BlockMask | None = None,
    *,
    score_mod: ScoreLike | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    q_offset: int | Tensor = 0,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    backend: str = "auto",
    kernel_options: Mapping[str, object] | None = None,
    return_lse: bool = False,
    **parameters: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """``softmax(scale * query @ key.T, where the mask is True) @ value``; a fully masked row gives 0.

    Args:
        query: ``[B, H, q_len, D]``.
        key: ``[B, H_kv, kv_len, D]``.
        value: ``[B, H_kv, kv_len, D_v]``.
        mask: a mask, its text, a ``mask_mod`` (which is traced at each call), a LoweredMask (from a
            :func:`flexmask.plan`), a BlockMask, or None for no mask.
        score_mod: what becomes of the scaled scores: one of :mod:`flexmask.scores`, its text, as ``"alibi() >> softcap(50.0)"``,
            or a function ``(score, b, h, q_idx, kv_idx) -> score`` as in FlexAttention. In a function the queries and keys of
            this call count from 0, whatever ``q_offset`` is: for positions write ``q_idx + q_offset``.
        scale: factor of the scores; ``1 / sqrt(D)`` by default.
        enable_gqa: allows fewer key heads than query heads: query head ``h`` uses key head ``h // (H // H_kv)``.
        q_offset: position of the first query, an int or an integer tensor ``[B]``, for the mask and a score of
            :mod:`flexmask.scores`.
        dropout_p: probability that a weight is dropped after the softmax; the others are multiplied by ``1 / (1 - dropout_p)``.
            Give 0 to evaluate.
        dropout_seed: an int, or one integer in a tensor. The same seed drops the same weights on every backend and device (see
            :func:`flexmask.backends.dropout.dropout_cells`). By default torch's generator draws one.
        backend: the name of a registered backend, or ``"auto"`` for the first that supports the call: see
            :func:`choose_backend`. ``"flex"`` is compiled FlexAttention over the mask's BlockMask; on the CPU it has no
            gradients, and is not for code that ``torch.compile`` traces. ``"sdpa"`` calls ``scaled_dot_product_attention`` on
            blocks of queries, each against the keys that it attends to, with gradients on every device. ``"flash"`` is
            FlexAttention with the kernels of FlashAttention 4, where it is installed. ``"varlen"``, by its name alone, is
            ``torch.nn.attention.varlen.varlen_attn`` on CUDA, for the masks of :meth:`flexmask.Mask.varlen`.
        kernel_options: of ``"flex"``, which gives them to FlexAttention: see torch's ``FlexKernelOptions``. Where ``"auto"``
            takes ``"sdpa"``, as on the CPU, or ``"flash"``, they have no effect; these by name refuse them. What they promise
            must hold: ``ROWS_GUARANTEED_SAFE`` of a mask with fully masked rows gives NaN.
        return_lse: whether to return the logsumexp of each row's scores too, by which :func:`flexmask.merge_attention` joins
            attention to several parts of the keys.
        parameters: the values of the mask's parameters, e.g. ``n=`` for ``"causal & key_padding(n)"``.

    Under ``torch.autocast`` query, key and value are cast to its dtype, as by ``scaled_dot_product_attention``. So theirs may
    differ there, as after rotary embeddings in float32. It is off for what a backend and ``score_mod`` compute.

    ``sdpa`` has derivatives of any order, in forward and reverse mode, and the transforms of ``torch.func``. Only the first
    derivative in reverse mode is fast. ``vmap`` maps over query, key and value, not over the data of a mask. Tensors on the
    ``meta`` device and under ``FakeTensorMode`` give an output without values. ``flex`` has the first derivative in reverse mode,
    on CUDA.

    NaN and inf in keys or values reach the rows that attend to them. On ``sdpa`` on the CPU they reach no other row, forward and
    in the gradient, except where the mask is ``causal`` alone, which is one call of torch's kernel. In that call, on ``sdpa`` on
    other devices and on ``flex`` they may reach other rows of the same block of queries, since a weight of 0 times NaN is NaN.
    For the same reason NaN and inf in a query, or in the gradient of its row of the output, may reach the gradients of keys and
    values that the row does not attend to, as in ``scaled_dot_product_attention``. In a fully masked row the gradient of the
    output counts as 0, but NaN in the query still reaches the gradients of keys.

    Data of a mask may be written after the forward pass where its key intervals are the mask. Where cells are computed, and with
    a ``score_mod``, what they read must not be written before the backward pass, which computes them again: it raises as for
    tensors that autograd saves, by their version counters, which count no writes through NumPy or ``.data``. It must read the
    same tensors: what a function captures is not to be assigned anew before. ``torch.utils.checkpoint`` repeats the call and
    reads all data then: give it the data as positional arguments, of which torch sees that they were written.

    In code that ``torch.compile`` traces the lowering of a Mask is a part of the whole graph: no value of its data is read. Masks
    that differ in their tensors alone, lengths and batch sizes run without compiling again. A mask may be made there (``~`` needs
    torch 2.14); a ``mask_mod`` and a plan are made outside.

    Returns:
        ``[B, H, q_len, D_v]``, of the query's dtype, or that of autocast. Where an axis has size 0 it is 0 or empty under any
        mask. With ``return_lse`` a pair of it and ``log(sum(exp(scores)))`` over the keys that a row attends to,
        ``float32[B, H, q_len]``, float64 for float64 queries: the natural logarithm, of scores after ``scale`` and
        ``score_mod``, before dropout. It is -inf in a fully masked row, and has gradients where the output has.

    Raises:
        ExpressionError: no backend has the name ``backend``, this torch knows no kernel option of a name, or ``dropout_p`` is
            not between 0 and 1.
        OperandError: arguments of a wrong type or dtype.
        LoweringError: shapes that do not fit, a mask that contradicts them, or a backend that cannot do this.

    Source: ``torch.nn.functional.scaled_dot_product_attention``, ``torch.nn.attention.flex_attention.flex_attention``.
    """
    check_backend(backend)
    change = placed_score(score_mod, q_offset)
    options = change, scale, enable_gqa, q_offset, dropout_p, dropout_seed, None, kernel_options, return_lse
    call = checked_call(Call(query, key, value, None, *options), mask, parameters, "attention")
    out, lse = attend(call, backend, names_axes=True)
    return out if lse is None else (out, lse)


def attend(call: Call, backend: str, *, names_axes: bool = False) -> tuple[Tensor, Tensor | None]:
    """The output of a call on a backend, and the logsumexp where it is asked for; inside a ContextParallel those of its rank.

    Args:
        call: the call.
        backend: see :func:`attention`.
        names_axes: whether an error says that the mask fits tensors with the axes in another order, where it does.
    """
    parallel = entered_parallel()
    run = partial(_run, backend=backend, names_axes=names_axes)
    return run(call) if parallel is None else parallel.attend(call, run)


def _run(call: Call, backend: str, *, names_axes: bool) -> tuple[Tensor, Tensor | None]:
    """As :func:`attend`, on one rank."""
    query, key, value = call.query, call.key, call.value
    if 0 in query.shape or 0 in value.shape:
        return _empty_outputs(call)
    chosen = select(call, backend)
    with without_autocast(query):
        if torch.compiler.is_compiling():  # a graph cannot break within a try block on every version of torch
            return chosen.outputs(call)
        try:
            return chosen.outputs(call)
        except LoweringError as error:
            if names_axes and isinstance(call.mask, Mask) and _is_swapped(call.mask, query, key, call.q_offset):
                raise LoweringError(f"{error}. The mask fits query {list(query.shape)} {SWAPPED_AXES_HINT}") from error
            raise


def _is_swapped(mask: Mask, query: Tensor, key: Tensor, q_offset: int | Tensor) -> bool:
    """Whether a mask does not fit tensors ``[B, H, length, D]``, but fits them as ``[B, length, H, D]``.

    Never with a ``q_offset``: data of the whole sequence fits any few queries.
    """
    if isinstance(q_offset, Tensor) or q_offset:
        return False
    return not _fits(mask, query, key) and _fits(mask, query.transpose(1, 2), key.transpose(1, 2))


def _fits(mask: Mask, query: Tensor, key: Tensor) -> bool:
    batch, heads, q_len, _ = query.shape
    try:
        bind(mask, q_len, key.shape[2], batch=batch, heads=heads, device=query.device)
    except FlexmaskError:
        return False
    return True


class ChosenBackend(str):
    """The name of a backend, with the reasons against the others.

    Attributes:
        reasons: for each other backend, why it was not chosen.
    """

    reasons: dict[str, str]


def choose_backend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: MaskLike | LoweredMask | BlockMask | None = None,
    *,
    score_mod: ScoreLike | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    q_offset: int | Tensor = 0,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    kernel_options: Mapping[str, object] | None = None,
    return_lse: bool = False,
    **parameters: Any,
) -> ChosenBackend:
    """The backend that ``backend="auto"`` takes for the same arguments of :func:`attention`: the first that supports the call.

    The order is that of registration, ``"sdpa"`` before ``"flash"`` and ``"flex"``, where backends that prefer the query's device
    come first: ``"flash"`` and ``"flex"`` on CUDA. Under the transforms of ``torch.func``, with forward-mode derivatives and for
    tensors without values only ``"sdpa"`` supports a call.

    Returns:
        The name, a str. Its attribute ``reasons`` says for each other backend why it was not chosen.

    Raises:
        ExpressionError, OperandError: as of :func:`attention`.
        LoweringError: as of :func:`attention`, no backend supports the call, or it is inside a ContextParallel.
    """
    refuse_in_parallel("choose_backend")
    change = placed_score(score_mod, q_offset)
    options = change, scale, enable_gqa, q_offset, dropout_p, dropout_seed, None, kernel_options, return_lse
    call = checked_call(Call(query, key, value, None, *options), mask, parameters, "choose_backend")
    chosen = select(call)
    name = ChosenBackend(chosen.name)
    name.reasons = {
        other.name: other.reason_against(call) or f"{chosen.name} comes first on {query.device.type}"
        for other in ordered_backends(call)
        if other is not chosen
    }
    return name


def check_kernel_options(options: object) -> None:
    """Checks options of FlexAttention's kernels, where they are given.

    Raises:
        OperandError: they are no dictionary of numbers and texts.
        ExpressionError: torch knows no option of a name.
    """
    if options is None:
        return
    if not isinstance(options, Mapping):
        raise OperandError(f"kernel_options must be a dictionary, as {{'BLOCK_M': 64}}, got {kind_of(options)}")
    for name, value in options.items():
        known = str(name)
        if (known[4:] if known[:4] in ("fwd_", "bwd_") else known) not in KERNEL_OPTIONS:
            hint = "" if torch.compiler.is_compiling() else nearest(known, KERNEL_OPTIONS)
            raise ExpressionError(
                f"torch {torch.__version__} has no kernel option {name!r}.{hint} It has {', '.join(KERNEL_OPTIONS)}, also with "
                "fwd_ or bwd_ before, for one pass"
            )
        if not isinstance(value, int | str):
            raise OperandError(f"the kernel option {name} must be a number, a truth value or a text, got {kind_of(value)}")


def checked_call(call: Call, mask: Any, parameters: Mapping[str, Any] | None = None, caller: str = "") -> Call:
    """A call with a mask, where the arguments fit each other. Under autocast the tensors are cast here.

    The parameters are those of the mask, of which ``caller`` takes the values.
    """
    query, key, value = _cast(call)
    if call.scale is not None and not torch.compiler.is_compiling():
        checked_number(call.scale, "scale")
    check_flag(call.enable_gqa, "enable_gqa")
    check_flag(call.return_lse, "return_lse")
    check_kernel_options(call.kernel_options)
    score_mod = call.score_mod
    if isinstance(score_mod, PlacedScore):
        score_mod = score_mod.of_call(query, key)
    if isinstance(mask, LoweredMask | BlockMask):
        refuse_in_parallel(f"a {type(mask).__name__}", "; give the Mask")
        check_sizes(mask, query, key, call.q_offset)
        if isinstance(mask, LoweredMask):
            mask = outside_inference_mode(mask)
    elif isinstance(mask, Plan):
        raise OperandError("mask is a plan: call it with the mask's data, as in attention(query, key, value, plan(cu=cu))")
    elif mask is not None:
        mask = as_mask(mask, also="a LoweredMask, a BlockMask, None", device=query.device)
    if parameters:
        if unknown := sorted(set(parameters) - set(mask.params if isinstance(mask, Mask) else ())):
            raise OperandError(unknown_names(caller, unknown, mask, OPTIONS, 'mask="key_padding(n)", n=n'))
        mask = mask.bind(**parameters)
    if caller and isinstance(mask, Mask):
        check_bound(mask, caller)
    check_dropout(call.dropout_p)
    return call._replace(query=query, key=key, value=value, mask=mask, score_mod=score_mod)


def unknown_names(
    caller: str, unknown: Sequence[str], mask: Mask | LoweredMask | BlockMask | None, options: Iterable[str], example: str
) -> str:
    """The message for arguments by name that neither a function nor the mask of its call has.

    Args:
        caller: the function.
        unknown: these names.
        mask: the mask of the call.
        options: the arguments of the function.
        example: how the data of a mask is given to it.
    """
    known = mask.params if isinstance(mask, Mask) else ()
    if known:
        has = f"the parameters of {described(mask)} are {', '.join(sorted(known))}"
    else:
        what = "no mask is given" if mask is None else f"{described(mask)} has no parameters"
        has = f"{what}; data goes with its mask, as in {example}"
    hint = "" if torch.compiler.is_compiling() else nearest(unknown[0], {*known, *options} - {unknown[0]})
    return f"{caller} has no argument {', '.join(unknown)}, and {has}.{hint}"


def described(mask: object) -> str:
    """A mask, or what it was lowered to, as a part of a sentence."""
    return f"the mask {mask.brief()}" if isinstance(mask, Mask) else f"a {type(mask).__name__}"


def _cast(call: Call) -> tuple[Tensor, ...]:
    """Query, key and value of a call as autocast casts them, where they fit each other."""
    given = query, key, value = call.query, call.key, call.value
    for name, tensor in zip(("query", "key", "value"), given, strict=True):
        if not isinstance(tensor, Tensor):
            raise OperandError(f"{name} must be a tensor, got {type(tensor).__name__}")
        check_plain(tensor, name)
    if not query.dim() == key.dim() == value.dim() == 4:
        hint = FEWER_AXES_HINTS.get(query.dim(), "")
        raise LoweringError(f"attention takes [B, H, length, D]; got {_shapes(*given)}{hint}")
    if not query.device == key.device == value.device:
        raise LoweringError(f"query, key and value must be on one device, got {query.device}, {key.device}, {value.device}")
    cast = autocast(*given)
    if not cast[0].dtype == cast[1].dtype == cast[2].dtype or not query.is_floating_point():
        raise OperandError(
            f"query, key and value must have one floating point dtype, got {query.dtype}, {key.dtype}, {value.dtype}; convert "
            "them with .to(), or use torch.autocast, which casts all but float64"
        )
    reason = _misfit(query.shape, key.shape, value.shape, call.enable_gqa)
    if reason:
        swapped = [(shape[0], shape[2], shape[1], shape[3]) for shape in (query.shape, key.shape, value.shape)]
        hint = "" if _misfit(swapped[0], swapped[1], swapped[2], call.enable_gqa) else f". They fit {SWAPPED_AXES_HINT}"
        raise LoweringError(f"{reason}; attention takes [B, H, length, D], got {_shapes(*given)}{hint}")
    return cast


def _shapes(query: Tensor, key: Tensor, value: Tensor) -> str:
    return f"query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}"


def _misfit(query: Sequence[int], key: Sequence[int], value: Sequence[int], enable_gqa: bool) -> str:
    """The reason why shapes ``[B, H, length, D]`` do not fit each other; empty where they do."""
    if query[0] != key[0] or tuple(key[:3]) != tuple(value[:3]) or query[3] != key[3]:
        return "batch, key length and head size must agree"
    if query[1] == key[1]:
        return ""
    if not enable_gqa:
        return f"query has {query[1]} heads, key {key[1]}; give enable_gqa=True to share key heads"
    return "" if key[1] and not query[1] % key[1] else f"the query's {query[1]} heads must be a multiple of the key's {key[1]}"


#: The arguments of :func:`attention`.
OPTIONS = tuple(name for name in inspect.signature(inspect.unwrap(attention)).parameters if name != "parameters")


def _empty_outputs(call: Call) -> tuple[Tensor, Tensor | None]:
    """As of :func:`attend` where an axis has size 0: zeros and -inf, with gradients of zeros."""
    query, key, value = call.query, call.key, call.value
    tables = call.score_mod.score.tensors if isinstance(call.score_mod, PlacedScore) else ()
    anchor = sum(table.flatten()[:0].sum().to(query.dtype) for table in (key, value, *tables)) + query[..., :0].sum()
    out = query.new_zeros((*query.shape[:3], value.shape[3])) + anchor
    if not call.return_lse:
        return out, None
    if 0 in (query.shape[3], value.shape[3]):
        raise LoweringError(f"return_lse=True needs heads with channels, got {_shapes(query, key, value)}")
    return out, torch.full_like(out[..., 0], -math.inf, dtype=precise_dtype(out)) + anchor
