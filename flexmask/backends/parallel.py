"""Attention of which each process computes a part: what :func:`flexmask.attention` calls in place of a backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

from torch import Tensor

from flexmask.backends.backend import Call
from flexmask.errors import LoweringError

#: Computes a call in this process.
Run: TypeAlias = Callable[[Call], tuple[Tensor, Tensor | None]]


class Parallel(Protocol):
    """What :class:`flexmask.distributed.ContextParallel` is for the layers below it."""

    @property
    def positions(self) -> Tensor:
        """The positions of the tokens of this process in the whole sequence, ``int64[n]``."""
        ...

    def attend(self, call: Call, run: Run) -> tuple[Tensor, Tensor | None]:
        """The output and the logsumexp of a call whose query, key and value have the tokens of this process alone."""
        ...


#: What was entered, the innermost last. It is not local to a thread: autograd repeats checkpointed layers in threads of its own.
#: ``torch.compile`` guards on a list, and traces no context variable.
ENTERED: list[Parallel] = []


def entered_parallel() -> Parallel | None:
    """The innermost that was entered, or None."""
    return ENTERED[-1] if ENTERED else None


def refuse_in_parallel(what: str, instead: str = "") -> None:
    """Raises a LoweringError if one was entered, for what has no meaning there."""
    if ENTERED:
        raise LoweringError(
            f"{what} cannot be used inside `with ContextParallel(...)`, where a process has a part of the tokens{instead}"
        )
