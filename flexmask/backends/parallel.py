"""Attention of which each process computes a part: what :func:`flexmask.attention` calls in place of a backend."""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from flexmask.backends.backend import Call
from flexmask.errors import LoweringError

__all__ = [
    "Parallel",
    "Run",
    "check_repeated",
    "enter_parallel",
    "entered_parallel",
    "leave_parallel",
    "refuse_in_parallel",
]

#: Computes a call in this process.
Run: TypeAlias = Callable[[Call], Tensor]


class Parallel(Protocol):
    """What :class:`flexmask.distributed.ContextParallel` is for the layers below it."""

    @property
    def positions(self) -> Tensor:
        """The positions of the tokens of this process in the whole sequence, ``int64[n]``."""
        ...

    def attend(self, call: Call, run: Run) -> Tensor:
        """The output of a call whose query, key and value have the tokens of this process alone."""
        ...


#: What was entered, the innermost last. It is not local to a thread: autograd repeats checkpointed layers in threads of its own.
#: ``torch.compile`` guards on a list, and traces no context variable.
ENTERED: list[Parallel] = []


@dataclass
class _Span:
    """The numbers of the autograd nodes that were made inside one entry, from ``first`` up to ``stop``."""

    parallel: weakref.ref[Parallel]
    first: int
    stop: float = math.inf


#: The last entries: autograd may repeat layers of any whose graph is still there.
_SPANS: deque[_Span] = deque(maxlen=1024)


def entered_parallel() -> Parallel | None:
    """The innermost that was entered, or None."""
    return ENTERED[-1] if ENTERED else None


def enter_parallel(parallel: Parallel) -> None:
    """Enters one; it may be entered again inside."""
    ENTERED.append(parallel)
    if not torch.compiler.is_compiling():
        _SPANS.append(_Span(weakref.ref(parallel), torch._C._autograd._get_sequence_nr()))


def leave_parallel(parallel: Parallel) -> None:
    """Takes back the innermost entry of one."""
    del ENTERED[len(ENTERED) - 1 - ENTERED[::-1].index(parallel)]
    if not torch.compiler.is_compiling():
        for span in reversed(_SPANS):
            if span.parallel() is parallel and span.stop == math.inf:
                span.stop = torch._C._autograd._get_sequence_nr()
                break


def check_repeated() -> None:
    """Raises a LoweringError where autograd repeats a call outside of what it was inside of."""
    if _is_repeated_elsewhere():
        raise LoweringError(
            "backward repeats attention of a checkpointed layer, whose tokens are those of this rank, outside "
            "`with ContextParallel(...)`; call backward() inside it"
        )


def _is_repeated_elsewhere() -> bool:
    """A checkpointed layer is repeated by a node that was made with it, whose number tells where that was."""
    node: Any = torch._C._current_autograd_node()
    if node is None:
        return False
    number, entered = node._sequence_nr(), entered_parallel()
    inside = [span.parallel for span in _SPANS if span.first <= number < span.stop]
    return bool(inside) and (entered is None or inside[-1]() is not entered)


_is_repeated_elsewhere._dynamo_marked_constant = True  # type: ignore[attr-defined] # compiled code knows it when it is traced


def refuse_in_parallel(what: str, instead: str = "") -> None:
    """Raises a LoweringError if one was entered, for what has no meaning there."""
    if ENTERED:
        raise LoweringError(
            f"{what} cannot be used inside `with ContextParallel(...)`, where a process has a part of the tokens{instead}"
        )
