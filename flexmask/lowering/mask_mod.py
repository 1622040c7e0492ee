"""The ``mask_mod`` lowering: a mask as the closure ``(b, h, q_idx, kv_idx) -> bool`` that FlexAttention takes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from itertools import chain
from typing import Any, Literal, NamedTuple, TypeAlias, cast, get_args

import torch
from torch import Tensor

from flexmask import _sync
from flexmask.errors import ExpressionError, LoweringError
from flexmask.intervals.bands import READ, Band, Place, band_of, compares_classes, has_gap
from flexmask.intervals.bounds import RowBounds, analyze
from flexmask.intervals.closures import mask_closure, without_unit_axes
from flexmask.intervals.context import Context
from flexmask.intervals.rows import Rows
from flexmask.lowering.classes import class_mod, classes

#: A function of the integer tensors ``b``, ``h``, ``q_idx`` and ``kv_idx`` that gives a boolean tensor.
MaskMod: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
#: What a ``mask_mod`` computes: whether the key is in an interval of the row, the expression of the mask, or whichever code with
#: the fewest instructions Triton has for the mask.
Form: TypeAlias = Literal["auto", "interval", "expression", "triton"]

#: The most intervals of a row that the interval form tests.
MOST = 8
#: The most keys of which two distances are added up as the halves of one number, and the signs of these.
MOST_PACKED = 2**15
SIGNS = 2**15 - 2**31


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
        if form == "triton" and compares_classes(context) and _sync.needs_sync(bounds.lower.lo):
            return class_mod(*classes(bounds.lower))
        sizes = context.full_batch, context.heads, context.q_len
        return interval_mod(bounds.lower, sizes, band_of(context), packs=form == "triton")
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


def _expression_mod(context: Context) -> MaskMod:
    """The expression on copies of the data, so that later changes of the data do not change the ``mask_mod``."""
    return mask_closure(replace(context, tables=context.tables.cloned()))


def interval_mod(rows: Rows, sizes: tuple[int, int, int], band: Band = READ, *, packs: bool = False) -> MaskMod:
    """``OR over i of lo[i][row] <= kv < hi[i][row]``, or around a gap ``(kv < stop[b, h] | kv >= start[row]) & kv < hi(q)``.

    Args:
        rows: the intervals. Unused slots are ``[kv_len, kv_len)``.
        sizes: sequences, heads and queries.
        band: the ends that are computed.
        packs: whether intervals with an end that is read are tested as for Triton, on a GPU: both ends at once.

    Each tensor has its axes whose size is not 1, or that of the queries. So torch recognizes the function as intervals and
    applies them as bits (``torch/_inductor/kernel/flex/interval_mask_packing.py``), which it does not where an index is
    multiplied by 0. A tensor without a batch axis serves any batch, as the lists of a BlockMask do. Each slot has two tensors,
    not a place on another axis: torch would take the size of that axis for dynamic once it changes, which its CPU kernels do not
    support.

    Outside of compiled code, where a mask is a part of its graph, a kernel serves several numbers of intervals. On the CPU one
    serves most masks: all ends of two intervals are read at their full size, which costs 3 % of a window of 256. Elsewhere all
    that is read costs registers and instructions of the innermost loop, and Triton converts the layout of all cells in each step
    where a row has two values: see :func:`_is_between`, which torch does not recognize as an interval.
    """
    is_packed, count = False, rows.slots
    if not torch.compiler.is_compiling():
        count = tested_count(count)
    if not _sync.needs_sync(rows.lo):
        rows, count, band = rows.expand(*sizes), max(count, 2), READ
    intervals: list[Any] = list(band)
    if has_gap(band):
        before, behind = band[0][1], cast("tuple[Place, ...]", band[1][1])
        stop, start = _around_gap(rows, sizes[2], behind)
        intervals = [
            ((), (_read(stop, sizes[2]), *behind) if before == "shared" else before),
            ((_read(start, sizes[2]),), behind),
        ]
    elif any(isinstance(end, str) for end in chain.from_iterable(band)):
        is_packed = packs and _sync.needs_sync(rows.lo) and rows.kv_len <= MOST_PACKED
        low, high = band[0] if rows.slots == len(band) == 1 else READ[0]
        lo, hi = rows.lo, rows.hi
        if low != "read":  # rows without keys are those whose lo is kv_len; where it is computed, their hi is 0
            hi = torch.where(lo < hi, hi, 0)
        # Two tensors for each slot, also for one without use: torch compiles again where one tensor serves for both ends.
        unused = [
            (torch.full_like(lo[..., 0], rows.kv_len), torch.full_like(lo[..., 0], rows.kv_len))
            for _ in range(count - rows.slots)
        ]
        ends = [*zip(lo.unbind(-1), hi.unbind(-1), strict=True), *unused]
        intervals = [((_read(lo, sizes[2]),), (_read(hi, sizes[2]),)) for lo, hi in ends]
        intervals[0] = tuple(read if end == "read" else end for end, read in zip((low, high), intervals[0], strict=True))

    def visible_key(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        def bound(end: Place | _Read) -> Tensor | int:
            if isinstance(end, _Read):
                return end.tensor[tuple([(b, h, q_idx)[axis] for axis in end.axes])]
            return _position(end, q_idx)

        visible = []
        for lows, highs in intervals:
            if is_packed and lows and highs:
                low, high = (_limited(bound(end), q_idx) for end in (*lows, *highs))
                visible.append(_is_between(low, high, kv_idx))
                continue
            tests = [kv_idx >= bound(low) for low in lows]
            tests += [kv_idx < bound(high) for high in highs]
            visible.append(reduce(operator.and_, tests) if tests else kv_idx >= 0)
        return reduce(operator.or_, visible)

    return visible_key


def _around_gap(rows: Rows, q_len: int, high: tuple[Place, ...]) -> tuple[Tensor, Tensor]:
    """Where the keys before the gap of each row end, the same for all queries, and where those behind it begin.

    Args:
        rows: intervals of all keys up to ``high``, but those of the gap.
        q_len: the number of queries.
        high: the places of which the innermost is where the rows end.
    """
    lo, hi = rows.lo[..., 0], rows.hi[..., 0]
    at = torch.arange(q_len if any(size for size, _ in high) else 1, device=lo.device)
    end = torch.full_like(at, rows.kv_len)
    for place in high:
        end = end.clamp(max=_position(place, at))
    is_whole = (lo == 0) & (hi == end)
    is_cut = (lo == 0) & ~is_whole
    stop = torch.where(is_cut, hi, 0).amax(2, keepdim=True)
    behind = rows.lo[..., 1] if rows.slots > 1 else rows.kv_len
    return stop, torch.where(is_whole, 0, torch.where(is_cut, behind, lo)).to(torch.int32)


class _Read(NamedTuple):
    """An end of each row, ``tensor[(b, h, q)[axis] for axis in axes]``."""

    tensor: Tensor
    axes: tuple[int, ...]


def _read(end: Tensor, q_len: int) -> _Read:
    """An end ``[B, H, q_len]`` without the axes of size 1. A kernel indexes by something: at least by the query."""
    found, axes = without_unit_axes(end, 3)
    if not axes:
        found, axes = found.expand(q_len), (2,)
    return _Read(found.contiguous(), axes)


def _position(place: Place, q_idx: Tensor) -> Tensor | int:
    """The position of a key, of a query."""
    size, n = place
    if not size:
        return n
    return (q_idx if size == 1 else q_idx // size * size) + n


def _limited(end: Tensor | int, q_idx: Tensor) -> Tensor:
    """An end of a row as a tensor within the positions that :func:`_is_between` compares."""
    return (end if isinstance(end, Tensor) else torch.full_like(q_idx, end)).clamp(0, MOST_PACKED)


def _is_between(low: Tensor, high: Tensor, kv_idx: Tensor) -> Tensor:
    """``low <= kv < high`` for ends from 0 to 2**15, from one number of the row: two take up to 1.7 times the instructions.

    ``kv - low`` and ``high - 1 - kv`` are its halves, both at least 0 for a visible key. A lower half below 0 takes 1 from the
    upper one, but its own sign hides the key already.
    """
    row = (high - 1) * 2**16 - low
    return ((row - kv_idx * (2**16 - 1)) & SIGNS) == 0
