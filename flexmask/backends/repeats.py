"""Whether backward repeats a checkpointed layer elsewhere than it ran at first: in, or outside of, another ContextParallel.

Checkpoints keep no state of other libraries. So what is entered around a checkpointed function is noted when its attention runs
at first. Of a function that is not known the number of the node that repeats it tells: the nodes that a thread makes inside an
entry have the numbers from its first to its last.
"""

from __future__ import annotations

import math
import sys
import threading
from collections import deque
from dataclasses import dataclass
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.autograd.function import FunctionCtx

MODULE = "torch.utils.checkpoint"


@dataclass(eq=False)
class _Entry:
    """One entry.

    Attributes:
        token: of what was entered, see :class:`flexmask.backends.parallel.Parallel`.
        thread: the thread that entered it.
        node: the node of autograd in which it was entered, by what the node repeats; None after it was left.
        first: the number of the first node that the thread makes inside.
        stop: that of the first one after it was left.
    """

    token: object
    thread: int
    node: Any
    first: int
    stop: float = math.inf

    def holds(self, number: int) -> bool:
        """Whether a node may have been made inside. Threads count for themselves, and nodes do not tell theirs."""
        is_of_another = self.thread == threading.get_ident() and number >= torch._C._autograd._get_sequence_nr()
        return self.first <= number < self.stop and not is_of_another


#: The entries that were not left, the innermost last.
_OPEN: list[_Entry] = []
#: The last entries: autograd may repeat layers of any whose graph is still there.
_LAST: deque[_Entry] = deque(maxlen=1024)
#: What was entered around a checkpointed function when it ran at first; None for nothing.
_AROUND: WeakKeyDictionary[Any, object] = WeakKeyDictionary()


def entered(token: object) -> None:
    """Something was entered."""
    _note()
    thread, node = threading.get_ident(), torch._C._current_autograd_node()
    _OPEN.append(_Entry(token, thread, node, torch._C._autograd._get_sequence_nr()))
    _LAST.append(_OPEN[-1])


def left(token: object) -> None:
    """The innermost entry of something was left."""
    entry = next(entry for entry in reversed(_OPEN) if entry.token is token)
    _OPEN.remove(entry)
    entry.node, entry.stop = None, torch._C._autograd._get_sequence_nr()


def _is_elsewhere() -> bool:
    if not _LAST:
        return False
    _note()
    node: Any = torch._C._current_autograd_node()
    inner = _OPEN[-1] if _OPEN else None
    if node is None or (inner is not None and inner.node is node):  # not repeated, or entered by what is
        return False
    number = node._sequence_nr()
    checkpoint = _local("unpack_hook", "frame", MODULE)  # of use_reentrant=False, whose function is repeated
    repeated = next((one for one in (node, checkpoint) if one in _AROUND), None)
    if repeated is not None:
        around = _AROUND[repeated]
    elif holding := [entry.token for entry in tuple(_LAST) if entry.holds(number)]:
        around = holding[-1]
    elif inner is None or (inner.thread == threading.get_ident() and number < inner.first):
        around = None
    else:  # made by another thread, perhaps inside
        return False
    return around is not (inner.token if inner else None)


def _note() -> None:
    """Notes what is entered around the checkpointed function that runs."""
    running = _running()
    if running is not None:
        _AROUND.setdefault(running, _OPEN[-1].token if _OPEN else None)


def _running() -> Any:
    """The checkpoint whose function runs for the first time, or None."""
    if not torch.is_grad_enabled():  # as in the forward of an autograd function, such as that of use_reentrant=True
        ctx = _local("forward", "ctx")
        return ctx if isinstance(ctx, FunctionCtx) else None
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    pack: Any = None if hooks is None else hooks[0]
    if getattr(pack, "__module__", None) != MODULE or "frame" not in pack.__code__.co_freevars:
        return None
    return pack.__closure__[pack.__code__.co_freevars.index("frame")].cell_contents


def _local(function: str, name: str, module: str | None = None) -> Any:
    """A variable of the innermost function of a name that has it, of those that run in this thread; None where there is none."""
    caller: FrameType | None = sys._getframe()
    while caller is not None:
        code = caller.f_code
        is_wanted = code.co_name == function and name in (*code.co_varnames[:1], *code.co_freevars)
        if is_wanted and module in (None, caller.f_globals.get("__name__")):
            return caller.f_locals[name]
        caller = caller.f_back
    return None


def __getattr__(name: str) -> bool:
    """``IS_ELSEWHERE``, read at each access: ``torch.compile`` guards on attributes of modules, and reads them at each call."""
    if name == "IS_ELSEWHERE":
        return _is_elsewhere()
    raise AttributeError(name)
