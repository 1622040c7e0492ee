"""The ``mask_mod`` lowering: a mask as the closure ``(b, h, q_idx, kv_idx) -> bool`` that FlexAttention takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, TypeAlias, cast

from torch import Tensor

from flexmask.errors import ExpressionError, LoweringError
from flexmask.intervals.bounds import RowBounds, analyze
from flexmask.intervals.closures import mask_closure
from flexmask.intervals.context import Context
from flexmask.intervals.rows import Rows

__all__ = ["Form", "INTERVALS", "MaskMod", "interval_count", "interval_mod", "mask_mod"]

#: A function of the integer tensors ``b``, ``h``, ``q_idx`` and ``kv_idx`` that gives a boolean tensor.
MaskMod: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
#: What a ``mask_mod`` computes: whether the key is in an interval of the row, or the expression of the mask.
Form: TypeAlias = Literal["auto", "interval", "expression"]

#: How many intervals of a row the interval form tests: the least of these that is enough, so that a kernel compiled for one
#: mask serves nearly every other mask. Most masks need one interval or two; a second one that is unused costs a kernel about
#: 3% of a window of 256 on the CPU.
INTERVALS = (2, 4, 8)


def mask_mod(context: Context, form: Form = "auto", bounds: RowBounds | None = None) -> MaskMod:
    """The mask of a lowering context as a closure: see :meth:`flexmask.Mask.mask_mod`.

    Args:
        context: the lowering context.
        form: which closure.
        bounds: the key intervals of the mask, where they are computed already.

    Raises:
        ExpressionError: there is no such form.
        LoweringError: ``form`` is ``"interval"``, but the rows have too many intervals or the mask is not separable.
    """
    if not isinstance(form, str) or form not in ("auto", "interval", "expression"):
        raise ExpressionError(f"form must be 'auto', 'interval' or 'expression', got {form!r}")
    if form == "expression":
        return _expression_mod(context)
    bounds = bounds or analyze(context)
    count = interval_count(bounds)
    if count is not None:
        return interval_mod(bounds.lower, count, (context.full_batch, context.heads, context.q_len))
    if form == "interval":
        reason = f"its rows have {bounds.upper.slots} intervals" if bounds.exact else "a part of it is not separable in q and kv"
        raise LoweringError(f"the mask has no interval form, which tests at most {INTERVALS[-1]} intervals: {reason}")
    return _expression_mod(context)


def interval_count(bounds: RowBounds) -> int | None:
    """How many intervals the interval form of a mask tests, or None where it has no such form."""
    return next((count for count in INTERVALS if count >= bounds.lower.slots), None) if bounds.exact else None


def _expression_mod(context: Context) -> MaskMod:
    """The expression on copies of the data, so that later changes of the data do not change the ``mask_mod``."""
    return mask_closure(replace(context, tables=context.tables.cloned()))


def interval_mod(rows: Rows, count: int, shape: tuple[int, int, int], *, own_axes: bool = False) -> MaskMod:
    """``OR over i of lo[i][b, h, q] <= kv < hi[i][b, h, q]``.

    Args:
        rows: the intervals.
        count: how many intervals of a row are tested, at least as many as there are.
        shape: ``(batch, heads, q_len)``.
        own_axes: whether the tensors have only the axes that the intervals vary along. Torch then recognizes the function as
            intervals and applies them as bits (``torch/_inductor/kernel/flex/interval_mask_packing.py``), which it does not where
            an index is multiplied by 0; and nothing is copied.

    Else the tensors are ``int32[B, H, q_len]`` with B of the whole batch, so that the code of the closure is the same whatever
    the mask depends on. Each slot has two tensors, not a place on a fourth axis: torch would take the size of that axis for
    dynamic once it changes, which its CPU kernels do not support.
    """
    axes = [0, 1, 2]
    if own_axes:
        axes = [axis for axis in axes if rows.lo.shape[axis] != 1] or [2]
        shape = cast(Any, tuple(size if axis in axes else 1 for axis, size in enumerate(shape)))
    ends = [end.expand(*shape, -1).unbind(-1) for end in (rows.lo, rows.hi)]
    pairs: list[tuple[Tensor, Tensor]] = [(lo.contiguous(), hi.contiguous()) for lo, hi in zip(*ends, strict=True)]
    while len(pairs) < count:  # two tensors, as for a used slot: torch compiles again where one tensor serves for both ends
        pairs.append((rows.lo.new_full(shape, rows.kv_len), rows.lo.new_full(shape, rows.kv_len)))
    if own_axes:
        return _own_axes_mod(pairs, axes)
    (lo, hi), *more = pairs
    # An axis of size 1 is broadcast: it is read at 0.
    b_step, h_step = int(shape[0] > 1), int(shape[1] > 1)

    def visible_key(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        b, h = b * b_step, h * h_step
        visible = (kv_idx >= lo[b, h, q_idx]) & (kv_idx < hi[b, h, q_idx])
        for next_lo, next_hi in more:
            visible = visible | ((kv_idx >= next_lo[b, h, q_idx]) & (kv_idx < next_hi[b, h, q_idx]))
        return visible

    return visible_key


def _own_axes_mod(pairs: list[tuple[Tensor, Tensor]], axes: list[int]) -> MaskMod:
    """As :func:`interval_mod`, by tensors that vary along some axes alone."""
    others = [axis for axis in range(3) if axis not in axes]
    (lo, hi), *more = [(lo.squeeze(others), hi.squeeze(others)) for lo, hi in pairs]

    def visible_key(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        at = tuple([(b, h, q_idx)[axis] for axis in axes])
        visible = (kv_idx >= lo[at]) & (kv_idx < hi[at])
        for next_lo, next_hi in more:
            visible = visible | ((kv_idx >= next_lo[at]) & (kv_idx < next_hi[at]))
        return visible

    return visible_key
