"""Names of devices, and whether reading a value forces a host sync."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flexmask._transforms import has_values
from flexmask.errors import LoweringError, OperandError

__all__ = ["PerDevice", "needs_sync", "resolve_device"]


def needs_sync(tensor: Tensor) -> bool:
    """Whether reading values of a tensor would force a host sync, as everywhere but on the CPU, or find none.

    Where it would, values are not checked, and sizes that depend on values are avoided as far as possible.
    """
    return tensor.device.type != "cpu" or not has_values(tensor)


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
