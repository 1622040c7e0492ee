"""The ends of the key intervals of rows in a ``mask_mod``: read from memory, or computed from the query's position."""

from __future__ import annotations

import operator
from functools import reduce
from typing import NamedTuple, TypeAlias

from torch import Tensor

from flexmask.intervals.bands import Place
from flexmask.intervals.closures import without_unit_axes


class ReadEnd(NamedTuple):
    """An end of each row, ``tensor[(b, h, q)[axis] for axis in axes]``."""

    tensor: Tensor
    axes: tuple[int, ...]

    @classmethod
    def each(cls, ends: Tensor, q_len: int | None) -> list[ReadEnd]:
        """Ends ``[B, H, q_len, n]`` without axes of size 1; where none is left and ``q_len`` is given, with that of the query."""
        found, axes = without_unit_axes(ends, 3)
        if not axes and q_len is not None:
            found, axes = found.expand(q_len, -1), (2,)
        return [cls(end.contiguous(), axes) for end in found.unbind(-1)]


#: Where an interval begins, the last of some keys, or where it ends, the first of some; none where no key is left out.
Ends: TypeAlias = tuple[Place | ReadEnd, ...]
#: The row of a ``mask_mod``: ``b``, ``h`` and ``q_idx``.
Row: TypeAlias = tuple[Tensor, Tensor, Tensor]


def key_of(end: Place | ReadEnd, row: Row) -> Tensor | int:
    """The key of an end of a row."""
    if not isinstance(end, ReadEnd):
        return position(end, row[2])
    return end.tensor[tuple([row[axis] for axis in end.axes])] if end.axes else end.tensor  # torch 2.11 refuses tensor[()]


def position(place: Place, q_idx: Tensor) -> Tensor | int:
    """The position of a key, of a query."""
    size, n = place
    if not size:
        return n
    start = q_idx if size == 1 else q_idx // size * size
    return start + n if n else start


def is_within(lows: Ends, highs: Ends, row: Row, kv_idx: Tensor) -> Tensor:
    """``low <= kv < high``, each end compared by itself, as torch recognizes it."""
    tests = [kv_idx >= key_of(low, row) for low in lows]
    for high in highs:
        if isinstance(high, ReadEnd) or high[0] != 1:
            tests.append(kv_idx < key_of(high, row))
        else:  # kv <= q saves an instruction, but an end with a known divisor is tested for several keys at once by <
            last = position((1, high[1] - 1), row[2])
            tests.append(last >= kv_idx if last is row[2] else kv_idx <= last)  # q >= kv as by hand, which is the same kernel
    return reduce(operator.and_, tests) if tests else kv_idx >= 0


def in_memory(tensor: Tensor) -> Tensor:
    """The tensor as a view by strides, which Inductor writes to memory.

    Inductor repeats other operations in each kernel that reads their result. In a ``mask_mod`` on CUDA that costs registers for
    the numbers of keys, and Inductor fails where operations join tensors, or limit positions in joined tensors.
    """
    tensor = tensor.contiguous()
    return tensor.as_strided(tensor.shape, tensor.stride())
