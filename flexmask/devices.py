"""Devices: where looking at a value has to wait until the device has worked it out."""

from __future__ import annotations

from torch import Tensor

__all__ = ["waits"]


def waits(tensor: Tensor) -> bool:
    """Whether reading values of a tensor would wait for its device: everywhere but on the CPU.

    Where it would, values are not checked, and sizes that depend on values are avoided as far as possible.
    """
    return tensor.device.type != "cpu"
