"""A cache of lowered masks, so that the layers of a model lower an equal mask once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextvars import ContextVar
from threading import RLock
from types import TracebackType
from typing import Any, Self, TypeVar, cast

import torch
from torch import Tensor

from flexmask import _sync
from flexmask._checks import check_plain, checked_int
from flexmask.errors import ExpressionError
from flexmask.expr.mask import Mask
from flexmask.tracing.trace import MaskLike, as_mask

T = TypeVar("T")


class MaskCache:
    """Within ``with MaskCache(): model(x)`` each mask is lowered once for all layers that use it. (With a KVCache in each layer
    only where the mask holds tensors and the sequences have one length; else each layer has its own tables.)

    The key is an equal mask, such as the same text bound to the same tensors, with equal sizes, ``q_offset`` and device. A result
    is rebuilt when a tensor of its mask holds other values. On the CPU the values are compared with a copy, which also detects
    writes through NumPy. Elsewhere torch's version counter is compared, which does not count writes through ``.data``. Values
    that an opaque call of :func:`flexmask.from_mask_mod` reads from elsewhere than its tensors are not compared.
    Code that ``torch.compile`` traces does not use the cache; there the layers share a LoweredMask, from :func:`flexmask.plan`.

    A cache may be entered again, by several threads, and within another, where the innermost is used. A new thread starts with no
    active cache, as with every context variable.

    Args:
        size: the most results to keep, the last used ones.

    Attributes:
        builds: how many results were built.
        hits: how many times a result was reused.

    Raises:
        OperandError: ``size`` is not an integer.
        ExpressionError: ``size`` is less than 1.
    """

    def __init__(self, size: int = 32) -> None:
        checked_int(size, "MaskCache: size", least=None)
        if size < 1:
            raise ExpressionError(f"MaskCache: size must be at least 1, got {size}; leave the cache out to keep nothing")
        self.size, self.builds, self.hits = size, 0, 0
        self._entries: OrderedDict[Any, _sync.Stamped[Any]] = OrderedDict()
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

    def __reduce__(self) -> tuple[type[MaskCache], tuple[int]]:
        return MaskCache, (self.size,)  # a copy, as of a model that holds it, is empty

    def clear(self) -> None:
        """Drops all results, and the tensors of their masks."""
        with self._lock:
            self._entries.clear()

    def get(self, mask: MaskLike, setting: tuple[Any, ...], q_offset: int | Tensor, build: Callable[[], T]) -> T:
        """The result for a mask in a setting: the cached one where it is still valid, or a new one.

        Args:
            mask: the mask.
            setting: everything else that the result depends on, hashable.
            q_offset: the offset of the lowering; a tensor is compared by value.
            build: builds the result.
        """
        mask = as_mask(mask)
        if isinstance(q_offset, Tensor):
            check_plain(q_offset, "q_offset")
        else:
            checked_int(q_offset, "q_offset", least=0)
        tensors = [*mask.tensors, *([q_offset] if isinstance(q_offset, Tensor) else [])]
        if not all(map(_sync.has_stamp, tensors)):
            result = build()
            with self._lock:
                self.builds += 1
            return result
        # Tensors made in inference mode cannot be used in training.
        offset = ("tensor", tuple(q_offset.shape)) if isinstance(q_offset, Tensor) else q_offset
        key = (mask.form.digest, *map(id, mask.tensors), setting, offset, torch.is_inference_mode_enabled())
        with self._lock:
            entry = self._entries.pop(key, None)
            if entry is not None and entry.stamp.holds(tensors, mask):
                self.hits += 1
            else:  # the stamp keeps the mask, and so the ids of its tensors, in use
                entry = _sync.Stamped(_sync.Stamp(tensors, mask), build())
                self.builds += 1
            self._entries[key] = entry
            while len(self._entries) > self.size:
                self._entries.popitem(last=False)
            return cast(T, entry.result)


#: The entered caches of the current thread or task.
_ACTIVE: ContextVar[tuple[MaskCache, ...]] = ContextVar("flexmask.MaskCache", default=())


def shared(mask: Mask, setting: tuple[Any, ...], q_offset: int | Tensor, build: Callable[[], T]) -> T:
    """The result of ``build`` for a mask, from the active :class:`MaskCache` where there is one."""
    if torch.compiler.is_compiling():
        return build()
    caches = _ACTIVE.get()
    return caches[-1].get(mask, setting, q_offset, build) if caches else build()
