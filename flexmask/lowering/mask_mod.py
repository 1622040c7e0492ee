"""The ``mask_mod`` lowering: a mask as the closure ``(b, h, q_idx, kv_idx) -> bool`` that FlexAttention takes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce
from typing import Literal, TypeAlias, cast, get_args

import torch
from torch import Tensor

from flexmask import _sync
from flexmask.errors import ExpressionError, LoweringError
from flexmask.intervals.bands import READ, Band, End, Place, are_computed, band_of, has_gap
from flexmask.intervals.bounds import RowBounds, analyze
from flexmask.intervals.closures import mask_closure
from flexmask.intervals.context import Context
from flexmask.intervals.rows import Rows
from flexmask.lowering.ends import Ends, ReadEnd, is_within, position
from flexmask.lowering.triton import MOST_JOINT, class_mod, classes, joint_mod

#: A function of the integer tensors ``b``, ``h``, ``q_idx`` and ``kv_idx`` that gives a boolean tensor.
MaskMod: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
#: What a ``mask_mod`` computes: whether the key is in an interval of the row, the expression of the mask, or what takes Triton's
#: kernels the fewest instructions.
Form: TypeAlias = Literal["auto", "interval", "expression", "triton"]

#: The most intervals of a row that the interval form tests.
MOST = 8


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
    if not isinstance(form, str) or form not in get_args(Form):
        raise ExpressionError(f"form must be 'auto', 'interval', 'expression' or 'triton', got {form!r}")
    if form == "expression":
        return _expression_mod(context)
    bounds = bounds or analyze(context)
    if has_interval_form(bounds):
        is_read = not _sync.needs_sync(bounds.lower.lo)  # on the CPU each end is: see `interval_mod`
        if form == "triton" and not is_read and (found := classes(context, bounds.lower)):
            return class_mod(*found)
        sizes = context.full_batch, context.heads, context.q_len
        return interval_mod(bounds.lower, sizes, READ if is_read else band_of(context), joins_ends=form == "triton")
    if form == "interval":
        reason = f"its rows have {bounds.upper.slots} intervals" if bounds.exact else "a part of it is not separable in q and kv"
        raise LoweringError(f"the mask has no interval form, which tests at most {MOST} intervals: {reason}")
    return _expression_mod(context)


def has_interval_form(bounds: RowBounds) -> bool:
    """Whether the key intervals of a mask are few enough to be tested one by one."""
    return bounds.exact and bounds.lower.slots <= MOST


def tested_count(slots: int) -> int:
    """How many intervals a kernel tests for rows of at most so many: a power of 2, so that it serves several numbers of them."""
    return 1 << (slots - 1).bit_length()


def tests_both_ends(band: Band, kv_len: int) -> bool:
    """Whether Triton's kernels test both ends of an interval at once, of which one at least is read."""
    return kv_len <= MOST_JOINT and not has_gap(band) and any("read" in interval and () not in interval for interval in band)


def _expression_mod(context: Context) -> MaskMod:
    """The expression on copies of the data, so that later changes of the data do not change the ``mask_mod``."""
    return mask_closure(replace(context, tables=context.tables.cloned()))


def interval_mod(rows: Rows, sizes: tuple[int, int, int], band: Band = READ, *, joins_ends: bool = False) -> MaskMod:
    """``OR over i of lo[i][row] <= kv < hi[i][row]``, or around a gap ``(kv < stop[b, h] | kv >= start[row]) & kv < hi(q)``.

    Of the first keys and another interval it is ``kv < stop[row] | lo(q) <= kv < hi(q)``, or
    ``kv < stop[b, h] | lo[row] <= kv < hi[row]``.

    Args:
        rows: the intervals. Unused slots are ``[kv_len, kv_len)``.
        sizes: sequences, heads and queries.
        band: the ends that are computed.
        joins_ends: whether both ends of an interval are tested at once where one is read, and what is the same for all rows is
            read without an index, for Triton on a GPU.

    Other tensors have their axes whose size is not 1, or that of the queries. So torch recognizes the function as intervals and
    applies them as bits (``torch/_inductor/kernel/flex/interval_mask_packing.py``), which it does not where an index is
    multiplied by 0. A tensor without a batch axis serves any batch, as the lists of a BlockMask do. Each slot has two tensors,
    not a place on another axis: torch would take the size of that axis for dynamic once it changes, which its CPU kernels do not
    support.

    Outside of compiled code, where a mask is a part of its graph, a kernel serves several numbers of intervals. On the CPU one
    serves most masks: all ends of two intervals are read at their full size, which costs 3 % of a window of 256. Elsewhere all
    that is read costs registers and instructions of the innermost loop.
    """
    count = rows.slots if torch.compiler.is_compiling() else tested_count(rows.slots)
    if not _sync.needs_sync(rows.lo):
        rows = rows if rows.lo.shape[:3] == sizes else rows.expand(*sizes)
        return _any_interval(_read(rows, READ[0], max(count, 2), sizes[2]))
    q_len = None if joins_ends else sizes[2]
    if has_gap(band):
        intervals = _around_gap(rows, band, sizes[2], q_len)
    elif are_computed(band):
        intervals = _computed(band)
    elif len(band) > 1:
        first, last = band
        others = _computed([last]) if are_computed([last]) else _read(_last_interval(rows), last, 1, q_len)
        intervals = [_first_keys(rows, first, q_len), *others]
    else:
        intervals = _read(rows, band[0], count, q_len)
    if joins_ends and tests_both_ends(band, rows.kv_len):
        return joint_mod(intervals, rows.kv_len, rows.lo.device)
    return _any_interval(intervals)


def _any_interval(intervals: Sequence[tuple[Ends, Ends]]) -> MaskMod:
    def visible_key(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        row = b, h, q_idx
        return reduce(operator.or_, [is_within(lows, highs, row, kv_idx) for lows, highs in intervals])

    return visible_key


def _computed(intervals: Sequence[tuple[End, End]]) -> list[tuple[Ends, Ends]]:
    """Intervals of which no end is read."""
    return [*cast("Sequence[tuple[Ends, Ends]]", intervals)]


def _read(rows: Rows, interval: tuple[End, End], count: int, q_len: int | None) -> list[tuple[Ends, Ends]]:
    """The first intervals of each row, with the ends that are read as tensors.

    Args:
        rows: the intervals.
        interval: the ends of a single one, of which some may be computed.
        count: how many, at least those of the rows.
        q_len: as of :meth:`ReadEnd.each`.
    """
    low, high = interval if rows.slots == 1 else READ[0]
    lo, hi = rows.lo, rows.hi
    if low != "read":  # rows without keys are those whose lo is kv_len; where it is computed, their hi is 0
        hi = torch.where(lo < hi, hi, 0)
    starts, stops = ReadEnd.each(lo, q_len), ReadEnd.each(hi, q_len)
    for _ in range(count - rows.slots):  # two tensors also for an unused slot: torch compiles again where one serves for both
        for ends in (starts, stops):
            ends.append(ReadEnd(torch.full_like(ends[0].tensor, rows.kv_len), ends[0].axes))
    found: list[tuple[Ends, Ends]] = [((start,), (stop,)) for start, stop in zip(starts, stops, strict=True)]
    (start, stop), *others = found
    return [(start if isinstance(low, str) else low, stop if isinstance(high, str) else high), *others]


def _first_keys(rows: Rows, interval: tuple[End, End], q_len: int | None) -> tuple[Ends, Ends]:
    """The first keys of each row; where the end is shared, those of all rows of a sequence and a head."""
    stop = interval[1]
    if not isinstance(stop, str):
        return (), stop
    end = torch.where(rows.lo[..., :1] == 0, rows.hi[..., :1], 0)
    return (), tuple(ReadEnd.each(end.amin(2, keepdim=True) if stop == "shared" else end, q_len))


def _last_interval(rows: Rows) -> Rows:
    """The last one of each row, ``[0, 0)`` for a row without keys."""
    is_used = rows.lo < rows.hi  # other slots are [kv_len, kv_len)
    lo, hi = (end.where(is_used, 0).amax(-1, keepdim=True) for end in (rows.lo, rows.hi))
    return Rows(lo, hi, rows.kv_len)


def _around_gap(rows: Rows, band: Band, queries: int, q_len: int | None) -> list[tuple[Ends, Ends]]:
    """The keys before the gap of each row, whose end is the same for all queries, and those behind it.

    Args:
        rows: intervals of all keys up to the end of the band, but those of the gap.
        band: where the gap begins, and where rows end.
        queries: how many there are.
        q_len: as of :meth:`ReadEnd.each`.
    """
    before, high = band[0][1], cast("tuple[Place, ...]", band[1][1])
    lo, hi = rows.lo[..., :1], rows.hi[..., :1]
    at = torch.arange(queries if any(size for size, _ in high) else 1, device=lo.device).unsqueeze(-1)
    end = torch.full_like(at, rows.kv_len)
    for place in high:
        end = end.clamp(max=position(place, at))
    is_whole = (lo == 0) & (hi == end)
    is_cut = (lo == 0) & ~is_whole
    behind = rows.lo[..., 1:2] if rows.slots > 1 else rows.kv_len
    start = torch.where(is_whole, 0, torch.where(is_cut, behind, lo)).to(torch.int32)
    stop: Ends = cast("tuple[Place, ...]", before)
    if before == "shared":
        stop = (*ReadEnd.each(torch.where(is_cut, hi, 0).amax(2, keepdim=True), q_len), *high)
    return [((), stop), (tuple(ReadEnd.each(start, q_len)), high)]
