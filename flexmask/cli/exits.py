"""How the command line ends: the one place where errors become messages and exit codes.

0 and 1 are answers, so that nothing else may end in them: neither an exception nor an answer that nobody could read.
"""

from __future__ import annotations

import errno
import io
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any

import click

from flexmask.cli.messages import message_of
from flexmask.cli.output import echo
from flexmask.errors import FlexmaskError

__all__ = ["ProgramExit", "exit_code"]

#: No answer for bad input, for a crash and for an answer that could not be written, and what a shell reports of a program that
#: SIGINT or SIGPIPE ended.
REFUSED, FAILED, INTERRUPTED, UNREAD = 2, 3, 130, 141
NO_MEMORY = "Error: there is not enough memory for lengths and blocks of this size"


class ProgramExit(Exception):  # noqa: N818 - it is no error of its own
    """Something within a command ended the program by itself, as ``sys.exit()`` does."""


class _Closed(io.RawIOBase):
    """Stands for an output that was closed before the program started."""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        raise OSError(errno.EBADF, "standard output is closed")


def exit_code(run: Callable[[], object]) -> int:
    """The exit code of a run, whose errors are reported on stderr.

    Args:
        run: does all, and gives the exit code of an answer, or None for 0.
    """
    with _streams():
        try:
            found = run()
            sys.stdout.flush()
        except BaseException as error:  # whatever it is, it is no answer
            code = _reported(error)
        else:
            code = found if isinstance(found, int) else 0
        _settle(sys.stdout)
        _settle(sys.stderr)
    return code


def _reported(error: BaseException) -> int:
    """Says on stderr, where that can be written, why there is no answer; gives the exit code."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else FAILED  # of click, which completes in a shell
    if isinstance(error, ProgramExit):
        error = error.__cause__ or error
    code, text = _ending(error)
    with suppress(OSError):
        if code == FAILED and not isinstance(error, OSError | SystemExit):
            traceback.print_exception(error)
        if isinstance(error, click.ClickException):
            error.show()
        elif text:
            echo(text, err=True)
    return code


def _ending(error: BaseException) -> tuple[int, str]:
    """The exit code of an error, and what is said about it."""
    match error:
        case KeyboardInterrupt():
            return INTERRUPTED, "\nstopped"
        case BrokenPipeError() | SystemExit(__context__=BrokenPipeError()):  # nobody reads; rich and click exit at once
            return UNREAD, ""
        case SystemExit():
            return FAILED, f"Error: something that the command called ended it with sys.exit({error.code!r})"
        case click.ClickException():
            return REFUSED, ""
        case FlexmaskError():
            return REFUSED, f"Error: {message_of(error)}"
        case MemoryError():
            return REFUSED, NO_MEMORY
        case RuntimeError() if _is_out_of_memory(error):
            return REFUSED, NO_MEMORY
        case OSError():
            return FAILED, f"Error: cannot read or write: {error}"
    return FAILED, f"Error: the command failed with {type(error).__name__}; the lines above say where, and please report it"


def _is_out_of_memory(error: RuntimeError) -> bool:
    """Whether torch's allocator has no more, on a device or, where the error has no name of its own, on the CPU."""
    return type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator" in str(error)


@contextmanager
def _streams() -> Iterator[None]:
    """Streams that can be written to, where some were closed before the program started."""
    before = sys.stdout, sys.stderr
    if sys.stdout is None:
        sys.stdout = io.TextIOWrapper(_Closed())
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - it is open until the program ends
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def _settle(stream: IO[str]) -> None:
    """Drops what cannot be written, since Python would try again when it ends, and end with another exit code."""
    try:
        stream.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
