"""Names of devices, and whether reading a value forces a host sync."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexmask._transforms import has_values, is_captured, is_wrapped
from flexmask.errors import LoweringError, OperandError

__all__ = ["PerDevice", "data_version", "has_data_version", "is_unchanged", "needs_sync", "require", "resolve_device"]


def needs_sync(tensor: Tensor) -> bool:
    """Whether reading values of a tensor forces a host sync, as on every device but the CPU, or is impossible, as on ``meta``.

    Then values are not checked, and sizes that depend on values are avoided.
    """
    return tensor.device.type != "cpu" or not has_values(tensor)


def require(condition: Callable[[], Tensor], device: torch.device, message: str, *, everywhere: bool = False) -> None:
    """In a graph, an error where it runs unless a condition holds.

    Args:
        condition: gives truth values, all of which must be True.
        device: where the values are.
        message: of the error.
        everywhere: whether to check on every device; by default on the CPU alone, as outside graphs.
    """
    if is_captured() and (everywhere or device.type == "cpu"):
        holds = condition()
        torch._assert_async(holds if holds.numel() == 1 else holds.all(), message)


def has_data_version(tensor: Tensor) -> bool:
    """Whether changes of a tensor can be detected: see :func:`data_version`."""
    return not (needs_sync(tensor) and tensor.is_inference()) and not is_wrapped(tensor) and has_values(tensor)


def data_version(tensor: Tensor) -> Any:
    """What :func:`is_unchanged` compares: a copy of the values on the CPU, elsewhere the memory and torch's version counter."""
    if not needs_sync(tensor):
        return tensor.detach().clone()
    return tensor.data_ptr(), tensor._version, tuple(tensor.shape), tensor.stride(), tensor.dtype


def is_unchanged(tensor: Tensor, version: Any) -> bool:
    """Whether a tensor holds the values of an earlier :func:`data_version`."""
    if isinstance(version, Tensor):
        return version.device == tensor.device and version.dtype == tensor.dtype and torch.equal(version, tensor.detach())
    return bool(data_version(tensor) == version)


def resolve_device(device: object) -> torch.device:
    """A device with its number, as tensors on it name it.

    Raises:
        LoweringError: there is none of that name.
        OperandError: what names no device.
    """
    if not isinstance(device, torch.device | str | int) or isinstance(device, bool):
        raise OperandError(f"device must be a torch.device or its name, e.g. 'cuda:0', got {type(device).__name__}")
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, ValueError, TypeError) as error:
        raise LoweringError(f"there is no device {device!r}: {str(error).splitlines()[0]}") from None


class PerDevice(NamedTuple):
    """A per-device threshold: one number on the CPU, another elsewhere."""

    cpu: int
    elsewhere: int

    def on(self, tensor: Tensor) -> int:
        """The number for the device of a tensor."""
        return self.elsewhere if needs_sync(tensor) else self.cpu
