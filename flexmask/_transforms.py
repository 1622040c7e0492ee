"""What torch's function transforms, forward-mode derivatives, autocast and tensors without values do to a call.

torch has no public name for some of these questions; where a version lacks a private attribute, the answer is that of plain
tensors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.overrides import TorchFunctionMode

from flexmask.errors import FlexmaskError, LoweringError

_modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)
_functorch: Any = getattr(torch._C, "_functorch", None)


def has_values(tensor: Tensor) -> bool:
    """Whether a tensor holds values: not on the ``meta`` device, and not under ``FakeTensorMode``."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


class _Here(threading.local):
    captured = False


_here = _Here()


@contextmanager
def captured() -> Iterator[None]:
    """A context in which :func:`is_captured` holds: code that dynamo does not trace cannot see that a graph is made."""
    before, _here.captured = _here.captured, True
    try:
        yield
    finally:
        _here.captured = before


def is_captured() -> bool:
    """Whether operations become part of a graph that runs later: ``torch.compile``, ``torch.export`` and ``make_fx``."""
    return torch.compiler.is_dynamo_compiling() or _here.captured or get_proxy_mode() is not None


def are_ints(*sizes: Any) -> bool:
    """Whether sizes have values. Those of a graph for all lengths are ``torch.SymInt``: a comparison makes it one for some."""
    for size in sizes:  # noqa: SIM110 - in a third of the time of `all`
        if not isinstance(size, int):
            return False
    return True


def is_static(size: int) -> bool:
    """As :func:`are_ints`, also in code that dynamo traces, where symbols are ints."""
    if not is_captured():
        return True
    from torch.fx.experimental.symbolic_shapes import has_static_value  # of the compiler

    return has_static_value(size)


def number_text(number: float) -> str:
    """A number that a function holds for a kernel, as text, which ``int`` or ``float`` reads there.

    ``torch.compile`` makes a variable of a number that changes, with which not all kernels of FlexAttention compile, and a
    constant of a text.
    """
    return f"{int(number)}" if isinstance(number, int) else f"{float(number)}"  # f"" alone would keep a variable


def is_observed(*tensors: Tensor) -> bool:
    """Whether operations on tensors are computed by something else than their device, or recorded: tensors without values,
    graphs, and modes such as those of selective checkpoints."""
    return not all(map(has_values, tensors)) or is_captured() or _modes() > 0


def can_keep_tensors() -> bool:
    """Whether tensors made now are of use later: not within transforms, FakeTensorMode or a graph that is captured."""
    return not is_captured() and has_values(made := torch.empty(0, device="cpu")) and not is_wrapped(made)


def is_transformed(*tensors: Tensor) -> bool:
    """Whether ``torch.func`` transforms the code that runs, or a tensor has a forward-mode tangent."""
    if torch.compiler.is_compiling():
        return False
    if has_transforms():
        return True
    return _has_level() and any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)


def is_forward_mode(*tensors: Tensor) -> bool:
    """Whether tensors have forward-mode tangents, also of an outer transform."""
    return _has_level() and is_transformed(*tensors)


def _has_level() -> bool:
    return getattr(forward_ad, "_current_level", 0) >= 0


def is_wrapped(tensor: Tensor) -> bool:
    """Whether a tensor belongs to a transform, of no use once that has ended."""
    if torch.compiler.is_compiling() or _functorch is None:
        return False
    return bool(_functorch.is_functorch_wrapped_tensor(tensor))


def usable(tensor: Tensor, what: Callable[[], str]) -> Tensor:
    """The plain tensor within those of running transforms; under FakeTensorMode, of a tensor with values one without.

    Raises:
        LoweringError: ``torch.vmap`` maps over it.
    """
    if torch.compiler.is_compiling() or _here.captured:
        return tensor
    while is_wrapped(tensor):
        if _functorch.is_batchedtensor(tensor):
            raise LoweringError(
                f"torch.vmap maps over {what()}, so there is no one mask; give a mask its batch as the first axis of its data, "
                "[batch, ...], and call without vmap"
            )
        tensor = _functorch.get_unwrapped(tensor)
    if _modes() and has_values(tensor) and not has_values(torch.empty(0, device="cpu")) and not is_captured():
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return tensor


def outside_transforms() -> AbstractContextManager[Any]:
    """A context without transforms, so that tensors made in it from plain tensors are plain and can be kept."""
    if torch.compiler.is_compiling() or not has_transforms():
        return nullcontext()
    from torch._functorch import pyfunctorch

    cleared: Any = getattr(pyfunctorch, "temporarily_clear_interpreter_stack", nullcontext)
    return cleared()  # type: ignore[no-any-return]


def has_transforms() -> bool:
    """Whether a transform of ``torch.func`` runs."""
    return _functorch is not None and _functorch.peek_interpreter_stack() is not None


def autocast_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype to which autocast casts an input of ``scaled_dot_product_attention``: its own without autocast, and float64."""
    kind = tensor.device.type
    is_cast = tensor.is_floating_point() and tensor.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if is_cast and _is_on(kind) else tensor.dtype


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors of one device in their :func:`autocast_dtype`."""
    if not _is_on(tensors[0].device.type):
        return tensors
    return tuple([tensor.to(autocast_dtype(tensor)) for tensor in tensors])


def without_autocast(tensor: Tensor) -> AbstractContextManager[Any]:
    """A context in which autocast is off on the device of a tensor."""
    kind = tensor.device.type
    return torch.autocast(kind, enabled=False) if _is_on(kind) else nullcontext()


def _is_on(kind: str) -> bool:
    """Whether autocast is on for a type of devices; meta has none."""
    return kind != "meta" and torch.is_autocast_enabled(kind)


# ---------------------------------------------------------------- functions of scalars


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
        name = getattr(function, "__name__", "a function")
        raise LoweringError(f"{name}, which is an opaque call, fails for the indices of cells: {reason_of(error)}") from error
    return found.reshape(shape)


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
