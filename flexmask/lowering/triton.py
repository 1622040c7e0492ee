"""The ``mask_mod`` that Triton's kernels take the fewest instructions for on a GPU.

A kernel that reads two values of a row converts the layout of all its cells in each step, where heads have 64 channels: on an
H100 the forward pass of ``document`` took 1.8 to 2.6 times as long by both ends of an interval as with ids compared by hand.
So classes are compared where a mask has them, and both ends of an interval are made one value. Torch recognizes neither as
intervals, which FlashAttention 4 takes: they are in a module of their own, by which its backend refuses them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import reduce

import torch
from torch import Tensor

from flexmask.intervals.bands import compares_classes, has_whole_rows
from flexmask.intervals.closures import without_unit_axes
from flexmask.intervals.context import Context
from flexmask.intervals.rows import Rows
from flexmask.lowering.ends import Ends, is_within, key_of

#: The most keys for which the distances from both ends fit in the halves of 32 bits.
MOST_JOINT = 2**15
#: The signs of both halves.
SIGNS = 2**15 - 2**31


def classes(context: Context, rows: Rows) -> tuple[Tensor, ...]:
    """The classes of queries and of keys, which :func:`class_mod` compares; empty for a mask without classes.

    That of a query is the first key of its row, ``int32[B', H', q_len]``, and ``kv_len`` for a row without keys. That of a key is
    the first key of the rows that hold it, ``int32[B', H', kv_len]``, and -1 for a key of no row. Those of keys are left out
    where each row has all keys or none.

    Args:
        context: the lowering context.
        rows: the key intervals of its mask. Where it has classes, those of two queries are the same or have no key in common.
    """
    if not compares_classes(context):
        return ()
    lo, hi = rows.lo, rows.hi
    first = lo[..., 0]
    if has_whole_rows(context.mask):
        return (first,)
    places = lo.flatten(2).long()
    # By where an interval begins: its end, and the first key of the row.
    ends, firsts = lo.new_zeros(2, *lo.shape[:2], rows.kv_len + 1)
    ends = ends.scatter(2, places, hi.flatten(2))
    firsts = firsts.scatter(2, places, first[..., None].expand_as(lo).flatten(2))
    keys = torch.arange(rows.kv_len, device=lo.device)
    begins = torch.where(ends[..., :-1] > 0, keys, 0).cummax(2).values  # of the interval that is the last one to begin
    return first, torch.where(keys < ends.gather(2, begins), firsts.gather(2, begins), -1)


def class_mod(of_rows: Tensor, of_keys: Tensor | None = None) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """``of_rows[row] == of_keys[key]``, of the tensors of :func:`classes`; without those of keys ``of_rows[row] == 0``."""
    rows, axes = without_unit_axes(of_rows, 2)
    keys = None if of_keys is None else without_unit_axes(of_keys, 2)[0]

    def same_class(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        batch_and_head = [(b, h)[axis] for axis in axes]
        return rows[(*batch_and_head, q_idx)] == (0 if keys is None else keys[(*batch_and_head, kv_idx)])

    return same_class


def joint_mod(intervals: Sequence[tuple[Ends, Ends]]) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Whether a key is in any of the intervals of the row, where there are at most ``MOST_JOINT`` keys."""

    def visible_key(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        row, visible = (b, h, q_idx), []
        for lows, highs in intervals:
            if lows and highs:
                low, high = (_limited(key_of(end, row), q_idx) for end in (*lows, *highs))
                visible.append(is_between(low, high, kv_idx))
            else:
                visible.append(is_within(lows, highs, row, kv_idx))
        return reduce(operator.or_, visible)

    return visible_key


def _limited(end: Tensor | int, q_idx: Tensor) -> Tensor:
    """An end of a row as a tensor within the positions that :func:`is_between` compares."""
    return (end if isinstance(end, Tensor) else torch.full_like(q_idx, end)).clamp(0, MOST_JOINT)


def is_between(low: Tensor, high: Tensor, kv_idx: Tensor) -> Tensor:
    """``low <= kv < high`` for ends from 0 to 2**15, from one number of the row.

    ``kv - low`` and ``high - 1 - kv`` are its halves, both at least 0 for a visible key. A lower half below 0 takes 1 from the
    upper one, but its own sign hides the key already, also where the number is -2**31 - 1 and wraps around.
    """
    row = (high - 1) * 2**16 - low
    return ((row - kv_idx * (2**16 - 1)) & SIGNS) == 0
