"""What masks lower to, made once and shared by the layers of a model that use the same mask."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from threading import RLock
from types import TracebackType
from typing import Any, Self, TypeVar, cast

import torch
from torch import Tensor

from flexmask import _sync
from flexmask._checks import checked_int, unfit
from flexmask._transforms import has_values, is_wrapped
from flexmask.errors import ExpressionError, OperandError
from flexmask.expr.mask import Mask
from flexmask.expr.opaque import CapturedTensor
from flexmask.expr.tables import TensorTable
from flexmask.tracing.as_mask import MaskLike, as_mask

__all__ = ["MaskCache", "shared"]

T = TypeVar("T")


@dataclass(frozen=True)
class _Entry:
    """A result, the tensors that it was made from, and what these held. They are kept, so that no id or memory is reused."""

    mask: Mask
    tensors: list[Tensor]
    stamps: list[Any]
    result: Any


class MaskCache:
    """Within ``with MaskCache(): model(x)`` each mask is lowered once, whatever number of layers use it. (With a KVCache in each
    layer, where the mask holds tensors and the sequences have one length; else the tables of each layer are its own.)

    Masks are the same where they are equal: the same text bound with the same tensors in two layers is. Sizes, ``q_offset``
    and device count as well. A result is made anew once a tensor of its mask holds other values: on the CPU the values are
    compared with a copy, which also sees writes through NumPy; elsewhere torch's count of changes is, which does not see writes
    through ``.data``. What a function that :func:`flexmask.from_mask_mod` kept as a call reads besides its tensors is not
    watched.
    Nothing is shared in code that ``torch.compile`` traces; give that a BlockMask.

    It may be used again, in several threads, and inside others, of which the innermost serves. A new thread starts outside of
    it, as with every context variable, and lowers its own masks unless it enters the cache itself.

    Args:
        size: results that are kept, those that were used last.

    Attributes:
        builds: how many results have been made.
        hits: how many times one was there.

    Raises:
        OperandError: ``size`` is no integer.
        ExpressionError: it is less than 1.
    """

    def __init__(self, size: int = 32) -> None:
        checked_int(size, "MaskCache: size", least=None)
        if size < 1:
            raise ExpressionError(f"MaskCache: size must be at least 1, got {size}; leave the cache out to keep nothing")
        self.size, self.builds, self.hits = size, 0, 0
        self._entries: OrderedDict[Any, _Entry] = OrderedDict()
        self._lock = RLock()

    def __enter__(self) -> Self:
        _ACTIVE.set((*_ACTIVE.get(), self))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        active = list(_ACTIVE.get())
        if self in active:
            del active[len(active) - 1 - active[::-1].index(self)]
        _ACTIVE.set(tuple(active))

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        """Forgets all results, and with them the tensors of their masks."""
        with self._lock:
            self._entries.clear()

    def get(self, mask: MaskLike, setting: tuple[Any, ...], q_offset: int | Tensor, build: Callable[[], T]) -> T:
        """The result for a mask in a setting: the one that is known, where it holds still, or a new one.

        Args:
            mask: the mask.
            setting: all else that the result depends on, hashable.
            q_offset: the offset of the lowering; a tensor counts by its values.
            build: makes the result.
        """
        mask = as_mask(mask)
        if not isinstance(q_offset, Tensor):
            checked_int(q_offset, "q_offset", least=0)
        elif reason := unfit(q_offset):
            raise OperandError(f"q_offset must be a plain tensor, got {reason}")
        tensors = _tensors_of(mask) + ([q_offset] if isinstance(q_offset, Tensor) else [])
        if not all(_has_stamp(tensor) for tensor in tensors):
            result = build()
            with self._lock:
                self.builds += 1
            return result
        # What is made in inference mode cannot be used in training.
        offset = ("tensor", tuple(q_offset.shape)) if isinstance(q_offset, Tensor) else q_offset
        key = (mask.key, setting, offset, torch.is_inference_mode_enabled())
        with self._lock:
            entry = self._entries.pop(key, None)
            if entry is not None and all(map(_is_unchanged, tensors, entry.stamps)):
                self.hits += 1
            else:
                stamps = [_stamp(tensor) for tensor in tensors]
                entry = _Entry(mask, tensors, stamps, build())
                self.builds += 1
            self._entries[key] = entry
            while len(self._entries) > self.size:
                self._entries.popitem(last=False)
            return cast(T, entry.result)


#: The caches that are entered, in the thread or task that runs.
_ACTIVE: ContextVar[tuple[MaskCache, ...]] = ContextVar("flexmask.MaskCache", default=())


def shared(mask: Mask, setting: tuple[Any, ...], q_offset: int | Tensor, build: Callable[[], T]) -> T:
    """What ``build`` makes of a mask, or what it made of it before within the same :class:`MaskCache`."""
    if torch.compiler.is_compiling():
        return build()
    caches = _ACTIVE.get()
    return caches[-1].get(mask, setting, q_offset, build) if caches else build()


def _tensors_of(mask: Mask) -> list[Tensor]:
    """The tensors that a mask holds, in the order of its expression."""
    if "tensors" not in mask.memo:
        nodes = [node for node in mask.expand().walk() if isinstance(node, TensorTable | CapturedTensor)]
        mask.memo["tensors"] = list({id(node.tensor): node.tensor for node in sorted(nodes, key=lambda n: id(n.tensor))}.values())
    return cast("list[Tensor]", mask.memo["tensors"])


def _has_stamp(tensor: Tensor) -> bool:
    return not (_sync.needs_sync(tensor) and tensor.is_inference()) and not is_wrapped(tensor) and has_values(tensor)


def _stamp(tensor: Tensor) -> Any:
    """What tells whether a tensor has changed: a copy on the CPU, elsewhere its place and torch's count of changes."""
    if not _sync.needs_sync(tensor):
        return tensor.detach().clone()
    return tensor.data_ptr(), tensor._version, tuple(tensor.shape), tensor.stride(), tensor.dtype


def _is_unchanged(tensor: Tensor, stamp: Any) -> bool:
    if isinstance(stamp, Tensor):
        return stamp.device == tensor.device and stamp.dtype == tensor.dtype and torch.equal(stamp, tensor.detach())
    return bool(_stamp(tensor) == stamp)
