"""Attention of which each process computes a part: what :func:`flexmask.attention` calls in place of a backend."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from flexmask.backends.backend import Call
from flexmask.errors import LoweringError

__all__ = ["Parallel", "Run", "entered_parallel", "leave_parallel", "refuse_in_parallel", "refuse_repeated"]

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


#: Of autograd's pass that runs in this thread; -1 for none. torch has no public name for it.
_pass_id: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)

#: What was entered, the innermost last. It is not local to a thread: autograd repeats checkpointed layers in threads of its own.
#: ``torch.compile`` guards on a list, and traces no context variable.
ENTERED: list[Parallel] = []
#: The one that was left last, while it is in use.
LEFT: list[weakref.ref[Parallel]] = []


def entered_parallel() -> Parallel | None:
    """The innermost that was entered, or None."""
    return ENTERED[-1] if ENTERED else None


def leave_parallel(parallel: Parallel) -> None:
    """Takes back the innermost entry of one."""
    del ENTERED[len(ENTERED) - 1 - ENTERED[::-1].index(parallel)]
    LEFT[:] = [weakref.ref(parallel)]


def refuse_repeated(length: int) -> None:
    """Raises a LoweringError where autograd repeats a call of ``length`` queries outside of what it was inside of."""
    left = LEFT[0]() if LEFT else None
    if left is not None and len(left.positions) == length and _pass_id() != -1:
        raise LoweringError(
            "backward repeats attention of a checkpointed layer, whose tokens are those of this rank, outside "
            "`with ContextParallel(...)`; call backward() inside it"
        )


def refuse_in_parallel(what: str) -> None:
    """Raises a LoweringError if one was entered, for what has no meaning there."""
    if ENTERED:
        raise LoweringError(f"{what} cannot be used inside `with ContextParallel(...)`, where a process has a part of the tokens")
