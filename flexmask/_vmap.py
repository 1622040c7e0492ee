"""Applies functions of scalars to tensors of positions ``[B, H, q_len, kv_len]``, as FlexAttention applies a ``mask_mod``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from flexmask.errors import FlexmaskError, LoweringError


class _ScalarIndices(TorchFunctionMode):
    """Looks up ``data[i, j]`` by tensors without axes, which ``torch.vmap`` takes for an attempt to read their values."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__:
            data, index = args
            indices = list(index) if isinstance(index, tuple) else [index]
            scalars = [isinstance(i, Tensor) and i.dim() == 0 and i.dtype != torch.bool for i in indices]
            if any(scalars) and all(isinstance(i, Tensor | int) and not isinstance(i, bool) for i in indices):
                at = [i if isinstance(i, Tensor) else torch.tensor(i, device=data.device) for i in indices]
                return torch.ops.aten.index(data, at)
        return func(*args, **(kwargs or {}))


def vectorized(function: Callable[..., Any], *values: Any) -> Any:
    """``function`` at every combination of positions along the axes of tensors that broadcast.

    Args:
        function: takes tensors without axes and gives one.
        values: tensors, each with all axes or with none, and plain values.

    Raises:
        LoweringError: the function fails.
    """
    depth = max((value.dim() for value in values if isinstance(value, Tensor)), default=0)
    values = tuple(value.clone() if isinstance(value, Tensor) else value for value in values)  # it may change them in place
    if depth == 0:
        return function(*values)
    sizes = [_sizes(value, depth) for value in values]
    shape = [max(column) for column in zip(*sizes, strict=True)]
    for axis in reversed(range(depth)):  # the outermost comes last and takes the first axis of what is left
        if shape[axis] > 1:
            function = torch.vmap(function, in_dims=tuple(0 if size[axis] > 1 else None for size in sizes))
    squeezed = [value.squeeze() if isinstance(value, Tensor) else value for value in values]
    try:
        with _ScalarIndices():
            found = function(*squeezed)
    except (FlexmaskError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever a function of the user raises
        raise LoweringError(_failed(function, error)) from error
    return found.reshape(shape)


def _failed(function: Callable[..., Any], error: Exception) -> str:
    name = getattr(function, "__name__", "a function")
    return f"{name}, which is an opaque call, fails for the indices of cells: {reason_of(error)}"


def reason_of(error: Exception) -> str:
    """Why a function of the user fails under ``torch.vmap``."""
    reason = (str(error).strip().splitlines() or [""])[0]
    if "data-dependent control flow" in reason or ".item()" in reason:
        return (
            "it needs the value of a tensor, as `if`, `and`, `or`, `not`, a chain a < b < c, functions of math and .item() do; "
            "write torch.where, &, | and ~, (a < b) & (b < c), and functions of torch"
        )
    return f"{type(error).__name__}: {reason}"


def _sizes(value: Any, depth: int) -> list[int]:
    sizes = list(value.shape) if isinstance(value, Tensor) else []
    return [1] * (depth - len(sizes)) + sizes
