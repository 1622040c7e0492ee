"""Names of devices, whether reading a value forces a host sync, and whether tensors hold the values that they held before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from flexmask._checks import not_plain_reason
from flexmask._transforms import has_values, is_captured, is_wrapped
from flexmask.errors import LoweringError, OperandError

T = TypeVar("T")

#: The most bytes in the message of an assertion on CUDA.
MAX_MESSAGE = 254


def needs_sync(tensor: Tensor) -> bool:
    """Whether reading a tensor forces a host sync, as on every device but the CPU, or is impossible: on ``meta``, in graphs.

    Then values are not checked, and sizes that depend on values are avoided.
    """
    return not tensor.is_cpu or is_captured() or not has_values(tensor)


def require(condition: Callable[[], Tensor], device: torch.device, message: str, *, everywhere: bool = False) -> None:
    """In a graph, an error where it runs unless a condition holds.

    Args:
        condition: gives truth values, all of which must be True.
        device: where the values are.
        message: of the error.
        everywhere: whether to check on every device; by default on the CPU alone, as outside graphs.
    """
    if is_captured() and (everywhere or device.type == "cpu"):
        assert_async(condition(), message)


def check(condition: Callable[[], Tensor], tensor: Tensor, message: str, given: Callable[[], str]) -> None:
    """An error unless a condition on a tensor holds: at once where its values can be read, in a graph as by :func:`require`.

    Args:
        condition: gives truth values, all of which must be True.
        tensor: what the condition reads.
        message: of the error.
        given: what was given, behind the message of the error that is raised at once.

    Raises:
        LoweringError: the values can be read, and the condition does not hold.
    """
    require(condition, tensor.device, message)
    if not needs_sync(tensor) and not bool(condition().all()):
        raise LoweringError(f"{message}{given()}")


def assert_async(condition: Tensor, message: str) -> None:
    """An error unless truth values hold, where the device comes to it: without a host sync, also in a graph.

    Args:
        condition: the truth values.
        message: of the error; cut at 254 bytes on other devices than the CPU.
    """
    if condition.device.type != "cpu" and len(encoded := message.encode()) > MAX_MESSAGE:
        message = encoded[: MAX_MESSAGE - 3].decode(errors="ignore") + "..."
    torch._assert_async(condition if condition.numel() == 1 else condition.all(), message)


def has_stamp(tensor: Tensor) -> bool:
    """Whether changes of a tensor can be detected: see :class:`Stamp`."""
    return not (tensor.is_inference() and needs_sync(tensor)) and not is_wrapped(tensor) and has_values(tensor)


class Stamp:
    """What some tensors hold at one time. On the CPU values are compared, elsewhere the memory and torch's version counter, which
    does not count writes through ``.data`` and in inference mode.

    Args:
        tensors: the tensors.
        setting: what else a result depends on that is made from them.
        copies: whether values are compared on the CPU; else only of tensors made in inference mode, which have no version.

    Attributes:
        kept: tensors of these values: copies on the CPU, else the same memory, which this keeps in use.
    """

    def __init__(self, tensors: Sequence[Tensor], setting: Any = None, *, copies: bool = True) -> None:
        self._setting = setting
        copied = [(copies or tensor.is_inference()) and not needs_sync(tensor) for tensor in tensors]
        own = list(zip(tensors, copied, strict=True))
        self.kept = [tensor.detach().clone() if is_copied else tensor.detach() for tensor, is_copied in own]
        self._places = [None if is_copied else _place(tensor) for tensor, is_copied in own]

    def holds(self, tensors: Sequence[Tensor], setting: Any = None) -> bool:
        """Whether as many tensors hold what those held, in an equal setting."""
        same = setting == self._setting and len(tensors) == len(self.kept)
        return same and all(map(_is_same, tensors, self.kept, self._places))


class Stamped(NamedTuple, Generic[T]):
    """A result, and what it was made from."""

    stamp: Stamp
    result: T


def _place(tensor: Tensor) -> tuple[Any, ...]:
    version = 0 if tensor.is_inference() else tensor._version
    return tensor.data_ptr(), version, tuple(tensor.shape), tensor.stride(), tensor.dtype


def _is_same(tensor: Tensor, kept: Tensor, place: tuple[Any, ...] | None) -> bool:
    if tensor.device != kept.device or tensor.dtype != kept.dtype:
        return False
    return torch.equal(kept, tensor.detach()) if place is None else _place(tensor) == place


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


def check_values(device: torch.device, what: str) -> None:
    """Raises a LoweringError where something that reads values is asked for on a device that has none."""
    if device.type == "meta":
        raise LoweringError(f"{what}, and nothing on meta has values; give device='cpu', and data there")


def listed(data: Any, what: str) -> Any:
    """Integers as lists, which reads those of a tensor.

    Raises:
        OperandError: a tensor that is no plain one or has no values.
    """
    if isinstance(data, Tensor):
        reason = not_plain_reason(data) or ("" if has_values(data) else "a tensor without values, as on meta: give a list")
        if reason:
            raise OperandError(f"{what} must be integers, not {reason}")
    return data.tolist() if hasattr(data, "tolist") else data


def move_remedy(where: torch.device, wanted: torch.device) -> str:
    """What to do about data on one device that is wanted on another, as the end of a message."""
    if where.type != "meta":
        return f"move it with .to({str(wanted)!r})"
    return (
        "data on meta has no values: make it again on a device of its own, as torch.tensor(data, device='cpu') does under "
        "torch.device('meta') too"
    )


class PerDevice(NamedTuple):
    """A per-device threshold: one number on the CPU, another elsewhere."""

    cpu: int
    elsewhere: int

    def on(self, tensor: Tensor) -> int:
        """The number for the device of a tensor."""
        return self.elsewhere if needs_sync(tensor) else self.cpu
