"""The dense lowerings: a mask as ``bool[B, H, q_len, kv_len]``, evaluated cell by cell, or as numbers to add to scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from flexmask.errors import LoweringError, OperandError
from flexmask.intervals.closures import mask_closure
from flexmask.intervals.context import Context

#: The largest dense mask in bytes, one for each cell; the other lowerings serve longer masks.
MAX_BYTES = 4 * 2**30
#: Cells evaluated at a time, which bounds the memory of intermediate results.
CHUNK = 2**22

#: ``evaluate(q_start, q_stop, kv_start, kv_stop)`` gives that rectangle of a mask as ``bool[B, H, q, kv]``.
Evaluator: TypeAlias = Callable[[int, int, int, int], Tensor]


def dense(context: Context) -> Tensor:
    """The mask of a lowering context as a tensor: see :meth:`flexmask.Mask.dense`.

    Raises:
        LoweringError: the tensor would be larger than 4 GiB.
    """
    shape = (context.batch, context.heads, context.q_len, context.kv_len)
    size = torch.Size(shape).numel()
    if size > MAX_BYTES:
        raise LoweringError(
            f"a dense mask of {list(shape)} takes {size / 2**30:.1f} GiB; block_mask, mask_mod, rows and stats need none"
        )
    evaluate = cell_evaluator(context)
    rows = max(1, CHUNK * context.q_len // size)
    result = torch.empty(shape, dtype=torch.bool, device=context.device)
    for start in range(0, context.q_len, rows):
        stop = min(start + rows, context.q_len)
        result[:, :, start:stop] = evaluate(start, stop, 0, context.kv_len)
    return result


def bias(context: Context, dtype: torch.dtype | None) -> Tensor:
    """The mask of a lowering context as numbers to add to scores: see :meth:`flexmask.Mask.to_bias`."""
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise OperandError(f"to_bias: dtype must be a floating-point dtype such as torch.float32, got {dtype!r}")
    visible = dense(context)
    return torch.zeros(visible.shape, dtype=dtype, device=context.device).masked_fill_(~visible, torch.finfo(dtype).min)


def cell_evaluator(context: Context) -> Evaluator:
    """A function that evaluates rectangles of the mask of a lowering context."""
    closure = mask_closure(context)
    b, h, q, kv = context.grid()

    def evaluate(q_start: int, q_stop: int, kv_start: int, kv_stop: int) -> Tensor:
        cells: Tensor = closure(b, h, q[:, :, q_start:q_stop], kv[..., kv_start:kv_stop])
        return cells.expand(context.batch, context.heads, q_stop - q_start, kv_stop - kv_start)

    return evaluate
