"""The ``mask_mod`` lowering: a mask as the closure ``(b, h, q_idx, kv_idx) -> bool`` that FlexAttention takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from flexmask import _sync
from flexmask.errors import ExpressionError, LoweringError
from flexmask.intervals.bounds import RowBounds, analyze
from flexmask.intervals.closures import mask_closure, without_unit_axes
from flexmask.intervals.context import Context
from flexmask.intervals.rows import Rows

#: A function of the integer tensors ``b``, ``h``, ``q_idx`` and ``kv_idx`` that gives a boolean tensor.
MaskMod: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
#: What a ``mask_mod`` computes: whether the key is in an interval of the row, or the expression of the mask.
Form: TypeAlias = Literal["auto", "interval", "expression"]

#: The most intervals of a row that the interval form tests.
MOST = 8
#: The fewest. On the CPU a second one that is unused costs about 3 % of a window of 256, and one kernel serves most masks.
#: Elsewhere it costs 3 to 19 % of the instructions of a kernel's masked loop.
FEWEST = _sync.PerDevice(cpu=2, elsewhere=1)


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
        return interval_mod(bounds.lower.expand(context.full_batch, context.heads, context.q_len), count, context.q_len)
    if form == "interval":
        reason = f"its rows have {bounds.upper.slots} intervals" if bounds.exact else "a part of it is not separable in q and kv"
        raise LoweringError(f"the mask has no interval form, which tests at most {MOST} intervals: {reason}")
    return _expression_mod(context)


def interval_count(bounds: RowBounds) -> int | None:
    """How many intervals the interval form of a mask tests, or None where it has no such form."""
    return tested_count(bounds.lower) if bounds.exact and bounds.lower.slots <= MOST else None


def tested_count(rows: Rows) -> int:
    """How many intervals are tested for some rows: a power of 2, so that a kernel serves most masks of a device."""
    return 1 << (max(rows.slots, FEWEST.on(rows.lo)) - 1).bit_length()


def _expression_mod(context: Context) -> MaskMod:
    """The expression on copies of the data, so that later changes of the data do not change the ``mask_mod``."""
    return mask_closure(replace(context, tables=context.tables.cloned()))


def interval_mod(rows: Rows, count: int, q_len: int) -> MaskMod:
    """``OR over i of lo[i][row] <= kv < hi[i][row]``.

    Args:
        rows: the intervals.
        count: how many intervals of a row are tested, at least as many as there are.
        q_len: number of rows.

    The tensors have the axes of the intervals whose size is not 1, or that of the queries. So torch recognizes the function as
    intervals and applies them as bits (``torch/_inductor/kernel/flex/interval_mask_packing.py``), which it does not where an
    index is multiplied by 0. Intervals at their full size have one code whatever the mask depends on. Each slot has two tensors,
    not a place on another axis: torch would take the size of that axis for dynamic once it changes, which its CPU kernels do not
    support.
    """
    (lows, axes), (highs, _) = (without_unit_axes(end, 3) for end in (rows.lo, rows.hi))
    if not axes:  # a kernel indexes by something
        axes, lows, highs = (2,), lows.expand(q_len, -1), highs.expand(q_len, -1)
    slots = lows.unbind(-1), highs.unbind(-1)
    pairs: list[tuple[Tensor, Tensor]] = [(lo.contiguous(), hi.contiguous()) for lo, hi in zip(*slots, strict=True)]
    while len(pairs) < count:  # two tensors, as for a used slot: torch compiles again where one tensor serves for both ends
        pairs.append((torch.full_like(pairs[0][0], rows.kv_len), torch.full_like(pairs[0][0], rows.kv_len)))
    (lo, hi), *more = pairs

    def visible_key(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        row = tuple([(b, h, q_idx)[axis] for axis in axes])
        visible = (kv_idx >= lo[row]) & (kv_idx < hi[row])
        for next_lo, next_hi in more:
            visible = visible | ((kv_idx >= next_lo[row]) & (kv_idx < next_hi[row]))
        return visible

    return visible_key
