"""The mask_mod lowering: a mask as the closure that FlexAttention takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from flexmask.errors import ExpressionError, LoweringError
from flexmask.intervals.bounds import RowBounds, analyse
from flexmask.intervals.closures import mask_closure
from flexmask.intervals.context import Context
from flexmask.intervals.rows import Rows

__all__ = ["Form", "MAX_INTERVALS", "MaskMod", "form_of", "mask_mod"]

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Form = Literal["auto", "interval", "expression"]

#: How many intervals of a row the interval form tests one by one: the first of these that is enough, so that a kernel which
#: was compiled for one mask serves nearly every other. Most masks need one interval or two; a second that is not used costs
#: a kernel about 3% of a window of 256 on the CPU.
INTERVALS = (2, 4, 8)
MAX_INTERVALS = INTERVALS[-1]


def mask_mod(context: Context, form: Form = "auto", rows: RowBounds | None = None) -> MaskMod:
    """The mask of a context as a closure: see :meth:`flexmask.expr.mask.Mask.mask_mod`.

    Args:
        context: the context of the lowering.
        form: which closure.
        rows: the rows of the mask, where they are known already.

    Raises:
        LoweringError: the interval form is asked for but the rows have too many intervals or are only bounded.
    """
    if not isinstance(form, str) or form not in ("auto", "interval", "expression"):
        raise ExpressionError(f"form must be 'auto', 'interval' or 'expression', got {form!r}")
    if form == "expression":
        return _expression_mod(context)
    rows = rows or analyse(context)
    if form_of(rows) is not None:
        return _interval_mod(rows.lower, context)
    if form == "interval":
        reason = f"its rows have {rows.upper.slots} intervals" if rows.exact else "a part of it does not separate"
        raise LoweringError(f"the mask has no interval form, which tests at most {MAX_INTERVALS} intervals: {reason}")
    return _expression_mod(context)


def form_of(rows: RowBounds) -> int | None:
    """How many intervals the interval form of a mask tests, or None where it has no such form."""
    return next((number for number in INTERVALS if number >= rows.lower.slots), None) if rows.exact else None


def _expression_mod(context: Context) -> MaskMod:
    """The predicate on copies of the data, so that it stays what it was when the mask was lowered."""
    copies = {key: data.clone() for key, data in context.tables.items()}
    return mask_closure(replace(context, tables=copies))


def _interval_mod(rows: Rows, context: Context) -> MaskMod:
    """``OR over i of lo[i][b, h, q] <= kv < hi[i][b, h, q]``.

    The tensors have the size of the whole batch, so that the code of the closure is the same whatever the mask depends on.
    Each slot has its own, so that no size changes with their number: torch would take the size for dynamic from then on, which
    its CPU kernels cannot.
    """
    slots = next(number for number in INTERVALS if number >= rows.slots)
    shape = context.full_batch, context.heads, context.q_len
    full = rows.expand(*shape)
    pairs = [(full.lo[..., slot].contiguous(), full.hi[..., slot].contiguous()) for slot in range(rows.slots)]
    while len(pairs) < slots:  # each tensor is one of its own, as those that are used are: torch looks at that, too
        pairs.append((torch.full_like(pairs[0][0], rows.kv_len), torch.full_like(pairs[0][0], rows.kv_len)))
    (lo, hi), *more = pairs
    # An axis of size 1 may stand for more: it is read at 0.
    b_step, h_step = int(context.full_batch > 1), int(context.heads > 1)

    def interval_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        b, h = b * b_step, h * h_step
        visible = (kv_idx >= lo[b, h, q_idx]) & (kv_idx < hi[b, h, q_idx])
        for next_lo, next_hi in more:
            visible = visible | ((kv_idx >= next_lo[b, h, q_idx]) & (kv_idx < next_hi[b, h, q_idx]))
        return visible

    return interval_mod
