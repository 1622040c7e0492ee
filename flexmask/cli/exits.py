"""The exit codes of the command line: the one place where errors become messages and exit codes.

0 and 1 are answers. A crash, or an answer that cannot be written, must have another exit code.
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

#: Bad input; a crash, or an answer that cannot be written; and the codes that shells report for SIGINT and SIGPIPE.
REFUSED, FAILED, INTERRUPTED, UNREAD = 2, 3, 130, 141
NO_MEMORY = "Error: there is not enough memory for lengths and blocks of this size"


class ProgramExit(Exception):  # noqa: N818 - it wraps another error
    """Something inside a command raised SystemExit or another exception that click turns into an exit code."""


class _Closed(io.RawIOBase):
    """An output that was closed before the program started; writing to it fails."""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        raise OSError(errno.EBADF, "standard output is closed")


def exit_code(run: Callable[[], object]) -> int:
    """Runs a command, reports its errors on stderr, and returns the exit code.

    Args:
        run: the command; returns the exit code of its answer, or None for 0.
    """
    with _streams():
        try:
            found = run()
            sys.stdout.flush()
        except BaseException as error:  # no exception is an answer
            code = _reported(error)
        else:
            code = found if isinstance(found, int) else 0
        _drop_unwritten(sys.stdout)
        _drop_unwritten(sys.stderr)
    return code


def _reported(error: BaseException) -> int:
    """Reports an error on stderr, if that can be written; returns the exit code."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else FAILED  # click's completion in a shell
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
    """The exit code of an error, and its message."""
    match error:
        case KeyboardInterrupt():
            return INTERRUPTED, "\nstopped"
        case BrokenPipeError() | SystemExit(__context__=BrokenPipeError()):  # the reader is gone; rich and click exit at once
            return UNREAD, ""
        case SystemExit():
            return FAILED, f"Error: something that the command called exited with sys.exit({error.code!r})"
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
    return FAILED, f"Error: the command failed with {type(error).__name__}; please report it, with the lines above"


def _is_out_of_memory(error: RuntimeError) -> bool:
    """Whether torch's allocator is out of memory, on a device or on the CPU, whose error is a plain RuntimeError."""
    return type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator" in str(error)


@contextmanager
def _streams() -> Iterator[None]:
    """Replaces streams that were closed before the program started."""
    before = sys.stdout, sys.stderr
    if sys.stdout is None:
        sys.stdout = io.TextIOWrapper(_Closed())
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - stays open until the program ends
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def _drop_unwritten(stream: IO[str]) -> None:
    """Drops output that cannot be written: Python would retry at exit, and change the exit code."""
    try:
        stream.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
