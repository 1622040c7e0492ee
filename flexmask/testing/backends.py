"""Attention on each backend against dense masked softmax in float64: outputs, and gradients where the backend has them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias, cast

import torch
from torch import Tensor

from flexmask._checks import checked_number, kind_of
from flexmask.backends.api import attention
from flexmask.backends.backend import Backend, Call, get_backend, ordered_backends
from flexmask.errors import ExpressionError, OperandError
from flexmask.testing.findings import Finding
from flexmask.testing.settings import Setting

Inputs: TypeAlias = tuple[Tensor, Tensor, Tensor]

#: The greatest error of a number x against its value v, |x - v| / (1 + |v|).
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
#: GPUs may multiply float32 with fewer bits.
GPU_TOLERANCE = 1e-2
EXAMPLES = {"backends": '["sdpa"]', "dtypes": "[torch.float32]"}
#: Channels of a head. FlexAttention on CUDA takes no fewer.
WIDTH = 16


def own_backends(setting: Setting) -> tuple[str, ...]:
    """The registered backends that have gradients in a setting."""
    batch, heads, q_len, kv_len = setting.shape
    with torch.enable_grad():
        query = torch.empty(batch, heads, q_len, WIDTH, device=setting.device, requires_grad=True)
        key = torch.empty(batch, heads, kv_len, WIDTH, device=setting.device)
        call = Call(query, key, key, setting.mask, q_offset=setting.q_offset)
        return tuple(backend.name for backend in ordered_backends(call) if backend.reason_against(call) is None)


def check_backends(
    setting: Setting,
    visible: Tensor,
    backends: Sequence[str],
    dtypes: Sequence[torch.dtype],
    tolerance: float | None,
) -> Iterator[Finding]:
    """Checks :func:`flexmask.attention` under a mask.

    Args:
        setting: the mask with its lengths and device.
        visible: the expected cells, ``bool[B, H, q_len, kv_len]``.
        backends: names of backends. Gradients are checked where the backend supports them, and dtypes that it does not support
            are left out.
        dtypes: of query, key and value.
        tolerance: the greatest error of a number, relative to 1 plus its size; the default depends on the dtype.

    Raises:
        ExpressionError: a backend that is not registered, or a dtype without a tolerance.
        OperandError: what is no list of them, or a tolerance that is no number.
    """
    for name, given in (("backends", backends), ("dtypes", dtypes)):
        if not isinstance(given, list | tuple):
            raise OperandError(f"{name} must be a list, e.g. {name}={EXAMPLES[name]}, got {kind_of(given)}")
    if tolerance is not None:
        checked_number(tolerance, "tolerance")
    for backend in map(get_backend, backends):
        for dtype in dtypes:
            if not isinstance(dtype, torch.dtype) or dtype not in TOLERANCE:
                raise ExpressionError(f"dtypes are {', '.join(map(str, TOLERANCE))}, got {dtype}")
            yield from _check(setting, visible, backend, dtype, tolerance)


def _check(setting: Setting, visible: Tensor, backend: Backend, dtype: torch.dtype, tolerance: float | None) -> Iterator[Finding]:
    most = tolerance if tolerance is not None else TOLERANCE[dtype]
    if tolerance is None and setting.device.type != "cpu":
        most = max(most, GPU_TOLERANCE)
    draw = torch.Generator().manual_seed(0)
    batch, heads, q_len, kv_len = setting.shape
    lengths = (q_len, kv_len, kv_len)
    precise = [torch.randn(batch, heads, length, WIDTH, generator=draw, dtype=torch.float64, device="cpu") for length in lengths]
    given = [tensor.to(dtype) for tensor in precise]
    inputs = cast(Inputs, tuple(tensor.to(setting.device).requires_grad_() for tensor in given))
    copies = cast(Inputs, tuple(tensor.double().requires_grad_() for tensor in given))
    seen = visible.cpu()
    call = Call(*inputs, setting.mask, q_offset=setting.q_offset)
    with torch.enable_grad():
        has_gradients = backend.reason_against(call) is None
    with torch.set_grad_enabled(has_gradients):
        if backend.reason_against(call):
            return
        out = attention(*inputs, setting.mask, q_offset=setting.q_offset, backend=backend.name)
    wanted = _softmax(copies, seen)
    name = f"{backend.name} {str(dtype).removeprefix('torch.')}"
    fully_masked = out.detach().cpu()[~seen.any(-1)]
    if fully_masked.count_nonzero():
        yield Finding(f"{name} output", True, f"{fully_masked.abs().max():.3g} in a fully masked row, not exactly 0")
    else:
        yield _compare(f"{name} output", out, wanted, most)
    if has_gradients:
        weight = torch.randn(out.shape, generator=draw, dtype=torch.float64, device="cpu")
        found = torch.autograd.grad((out.double().cpu() * weight).sum(), inputs)
        expected = torch.autograd.grad((wanted * weight).sum(), copies)
        for which, gradient, value in zip(("query", "key", "value"), found, expected, strict=True):
            yield _compare(f"{name} gradient of {which}", gradient, value, most)


def _softmax(tensors: Inputs, visible: Tensor) -> Tensor:
    """Masked softmax attention; 0 in fully masked rows."""
    query, key, value = tensors
    fully_masked = ~visible.any(-1, keepdim=True)
    scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5
    weights = torch.softmax(scores.masked_fill(~visible, -torch.inf).masked_fill(fully_masked, 0), -1)
    return weights.masked_fill(fully_masked, 0) @ value


def _compare(name: str, found: Tensor, wanted: Tensor, tolerance: float) -> Finding:
    value = wanted.detach()
    error = (found.detach().double().cpu() - value).abs() / (1 + value.abs())
    largest = float(error.max())
    wrong = not largest <= tolerance  # also where it is no number
    text = f"largest error {largest:.1e}, at most {tolerance:.0e}"
    if wrong:
        worst = int(torch.where(error.isnan(), torch.inf, error).argmax())
        b, h, place, _ = (int(i) for i in torch.unravel_index(torch.tensor(worst, device="cpu"), error.shape))
        text = f"largest error {largest:.1e}, more than {tolerance:.0e}, at b={b}, h={h}, position {place}"
    return Finding(name, wrong, text)
