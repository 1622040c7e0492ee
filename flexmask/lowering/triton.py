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
from flexmask.lowering.ends import Ends, Row, in_memory, key_of

#: The most keys for which the distances from both ends fit in the halves of 32 bits.
MOST_JOINT = 2**15
#: The signs of both halves.
SIGNS = 2**15 - 2**31
#: A step by one key takes 1 from the upper half, and adds 1 to the lower one.
KEY_STEP = 2**16 - 1


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


def joint_mod(
    intervals: Sequence[tuple[Ends, Ends]], kv_len: int, device: torch.device
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Whether a key is in any of the intervals of the row, where there are at most ``MOST_JOINT`` keys.

    A row has one number for each interval, ``(high - 1) * 2**16 - low`` for ends from 0 to 2**15, and a key has one,
    ``kv * KEY_STEP``. The halves of their difference are ``high - 1 - kv`` and ``kv - low``, both at least 0 for a visible key. A
    lower half below 0 takes 1 from the upper one, but its own sign hides the key already, also where the difference is
    -2**31 - 1 and wraps around. A difference below 0 says that the interval ends before the key, so that the next one decides;
    only the last one may wrap around.

    The number of a key is read, as its class is in :func:`class_mod`: where it is computed, kernels spill registers, on Blackwell
    for one interval and on Hopper for two.

    Args:
        intervals: sorted, where unused ones come last, each with one low and one high end. The first keys of the row may come
            before them, as one without a low end.
        kv_len: number of keys; those that are asked for are 0 to ``kv_len - 1``.
        device: where the kernel runs.
    """
    keys = in_memory(torch.arange(kv_len, dtype=torch.int32, device=device) * KEY_STEP)
    firsts = [highs or ((0, kv_len),) for lows, highs in intervals if not lows]

    def visible_key(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        row, key = (b, h, q_idx), keys[kv_idx]
        differences = [(_limited(highs, row) - 1) * 2**16 - _limited(lows, row) - key for lows, highs in intervals if lows]
        deciding = reduce(lambda interval, following: torch.where(interval < 0, following, interval), differences)
        return reduce(operator.or_, [key < _limited(highs, row) * KEY_STEP for highs in firsts], (deciding & SIGNS) == 0)

    return visible_key


def _limited(ends: Ends, row: Row) -> Tensor:
    """The one end of a row on a side, within the positions that :func:`joint_mod` compares."""
    (end,) = ends
    key = key_of(end, row)
    return (key if isinstance(key, Tensor) else torch.full_like(row[2], key)).clamp(0, MOST_JOINT)
