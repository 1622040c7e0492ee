"""Devices: where looking at a value has to wait until the device has worked it out."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

__all__ = ["Limit", "waits"]


def waits(tensor: Tensor) -> bool:
    """Whether reading values of a tensor would wait for its device: everywhere but on the CPU.

    Where it would, values are not checked, and sizes that depend on values are avoided as far as possible.
    """
    return tensor.device.type != "cpu"


class Limit(NamedTuple):
    """A number that is one on the CPU and another elsewhere."""

    cpu: int
    elsewhere: int

    def on(self, tensor: Tensor) -> int:
        """The number for the device of a tensor."""
        return self.elsewhere if waits(tensor) else self.cpu
