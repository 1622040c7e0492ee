"""The ``flexmask`` command that holds the others."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import click

import flexmask
from flexmask.cli.exits import ProgramExit, exit_code
from flexmask.cli.output import echo
from flexmask.errors import PluginWarning

__all__ = ["main"]


class Commands(click.Group):
    """A group with the exit codes of its help, whose commands report warnings about plugins in one line."""

    def main(self, *args: Any, **options: Any) -> Any:
        run = partial(super().main, *args, **{**options, "standalone_mode": False})
        if not options.get("standalone_mode", True):
            return run()
        sys.exit(exit_code(run))

    def make_context(self, *args: Any, **options: Any) -> click.Context:
        with _kept_from_click():  # prints the help
            return super().make_context(*args, **options)

    def invoke(self, ctx: click.Context) -> Any:
        with warnings.catch_warnings(), _current_folder():
            warnings.showwarning = _in_a_line(warnings.showwarning)
            with _kept_from_click():
                return super().invoke(ctx)


@contextmanager
def _kept_from_click() -> Iterator[None]:
    """Wraps exceptions that click turns into exit code 1, which is an answer here, and exits of a user's functions."""
    try:
        yield
    except (BrokenPipeError, EOFError, KeyboardInterrupt, SystemExit) as error:
        raise ProgramExit from error


@contextmanager
def _current_folder() -> Iterator[None]:
    """Makes modules of the current folder importable, as with ``python -m``."""
    before = list(sys.path)
    sys.path.insert(0, "")
    try:
        yield
    finally:
        sys.path[:] = before


def _in_a_line(show: Callable[..., None]) -> Callable[..., None]:
    def line(message: Warning | str, category: type[Warning], *rest: Any, **options: Any) -> None:
        if issubclass(category, PluginWarning):
            echo(f"Warning: {message}", err=True)
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

    of named masks, & | ^ - ~, and comparisons of b, h, q and kv (batch, head, query and key index). Quote it for your
    shell. Any other name, like ids, is a parameter: give its value with -p ids=...

    `flexmask list` lists the named masks, including those of plugins. `flexmask COMMAND -h` explains a command.

    \b
    Exit codes:
      0  success
      1  the masks differ (diff), or a lowering is wrong (check)
      2  bad input, or a function that fails; the message is on stderr
      3  the command failed, or its output could not be written

    \b
    Completion of commands, options and masks in the shell, for its start-up file:
      bash  eval "$(_FLEXMASK_COMPLETE=bash_source flexmask)"
      zsh   eval "$(_FLEXMASK_COMPLETE=zsh_source flexmask)"
      fish  _FLEXMASK_COMPLETE=fish_source flexmask | source
    """
