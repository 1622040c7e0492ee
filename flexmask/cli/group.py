"""The ``flexmask`` command that holds the others, and the one place where errors become messages and exit codes."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click

import flexmask
from flexmask.cli.messages import Refused, message_of
from flexmask.cli.output import say
from flexmask.errors import FlexmaskError, PluginWarning

__all__ = ["main"]

#: What a shell reports of a program that SIGINT or SIGPIPE ended: 1 would say that something differs.
INTERRUPTED, UNREAD = 130, 141


class Commands(click.Group):
    """A group whose commands report the library's errors as messages, with exit code 2, and warnings about plugins in a line."""

    def invoke(self, ctx: click.Context) -> Any:
        with warnings.catch_warnings(), _current_folder():
            warnings.showwarning = _in_a_line(warnings.showwarning)
            try:
                return super().invoke(ctx)
            except FlexmaskError as error:
                raise Refused(message_of(error)) from error
            except (MemoryError, RuntimeError) as error:
                if isinstance(error, MemoryError) or _is_out_of_memory(error):
                    raise Refused("there is not enough memory for lengths and blocks of this size") from error
                raise
            except (BrokenPipeError, SystemExit) as error:
                if isinstance(error, BrokenPipeError) or isinstance(error.__context__, BrokenPipeError):  # rich exits at once
                    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nobody reads what is still to be written
                    ctx.exit(UNREAD)
                raise
            except KeyboardInterrupt:
                say("\nstopped", err=True)
                ctx.exit(INTERRUPTED)


def _is_out_of_memory(error: RuntimeError) -> bool:
    """Whether torch's allocator has no more, on a device or, where the error has no name of its own, on the CPU."""
    return type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator" in str(error)


@contextmanager
def _current_folder() -> Iterator[None]:
    """Modules of the current folder can be imported, as with ``python -m``."""
    before = list(sys.path)
    sys.path.insert(0, "")
    try:
        yield
    finally:
        sys.path[:] = before


def _in_a_line(show: Callable[..., None]) -> Callable[..., None]:
    def line(message: Warning | str, category: type[Warning], *rest: Any, **options: Any) -> None:
        if issubclass(category, PluginWarning):
            say(f"Warning: {message}", err=True)
        else:
            show(message, category, *rest, **options)

    return line


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(flexmask.__version__, "-V", "--version", message="%(prog)s %(version)s")
def main() -> None:
    """Attention masks as values: compose, draw, test and run them.

    A mask is an expression such as

    \b
      causal & key_padding(lengths=[3, 5, 4])
      sliding_window(left=128, right=0) & document(ids)

    with the named masks, & | ^ - ~, and comparisons of b, h, q and kv (batch, head, query and key index). Quote it for
    your shell. Any other name, like ids, is a parameter: give its value with -p ids=...

    `flexmask list` shows the named masks, those of plugins too, and `flexmask COMMAND -h` all that a command takes.

    \b
    Exit codes:
      0  all is well
      1  the masks differ (diff), or something does not agree (check)
      2  bad input; the message is on stderr

    \b
    Completion of commands, options and names of masks in the shell, for its start-up file:
      bash  eval "$(_FLEXMASK_COMPLETE=bash_source flexmask)"
      zsh   eval "$(_FLEXMASK_COMPLETE=zsh_source flexmask)"
      fish  _FLEXMASK_COMPLETE=fish_source flexmask | source
    """
