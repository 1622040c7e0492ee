"""The ``flexmask`` command that holds the others, and its exit codes: the one place where errors become messages and exit codes.

0 and 1 are answers. A crash, or an answer that cannot be written, must have another exit code.
"""

from __future__ import annotations

import errno
import io
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from functools import partial
from inspect import signature
from itertools import pairwise
from typing import IO, TYPE_CHECKING, Any

import click

import flexmask
from flexmask.cli.inputs import known_names
from flexmask.cli.output import UserError, echo, message_of
from flexmask.errors import FlexmaskError, PluginWarning
from flexmask.expr.names import NAMES

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

#: Bad input; a crash, or an answer that cannot be written; and the codes that shells report for SIGINT and SIGPIPE.
REFUSED, FAILED, INTERRUPTED, UNREAD = 2, 3, 130, 141


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
    # Streams that were closed before the program started are None.
    out = sys.stdout or io.TextIOWrapper(_Closed())
    err = sys.stderr or open(os.devnull, "w")  # noqa: SIM115 - stays open until the program ends
    with redirect_stdout(out), redirect_stderr(err):
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
        case MemoryError() | RuntimeError() if _is_out_of_memory(error):
            return REFUSED, "Error: there is not enough memory for lengths and blocks of this size"
        case OSError():
            return FAILED, f"Error: cannot read or write: {error}"
    return FAILED, f"Error: the command failed with {type(error).__name__}; please report it, with the lines above"


def _is_out_of_memory(error: MemoryError | RuntimeError) -> bool:
    """Whether Python or torch's allocator is out of memory, on a device or on the CPU, whose error is a plain RuntimeError."""
    is_on_the_cpu = isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error)
    return is_on_the_cpu or type(error).__name__ == "OutOfMemoryError"


def _drop_unwritten(stream: IO[str]) -> None:
    """Drops output that cannot be written: Python would retry at exit, and change the exit code."""
    try:
        stream.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


#: The entry points of packages that add commands; each loads a ``click.Command``.
GROUP = "flexmask.commands"


class Commands(click.Group):
    """A group with the exit codes of its help, whose commands report warnings about plugins in one line.

    Plugins add commands as entry points of `GROUP`: see `PluginCommand`.
    """

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
            warnings.showwarning = partial(_show, warnings.showwarning)
            given = list(ctx.args)
            with _kept_from_click():
                try:
                    return super().invoke(ctx)
                except click.NoSuchOption as error:
                    if hint := _argument_hint(error.option_name, given):
                        raise click.UsageError(f"{error.message} {hint}", error.ctx) from error
                    raise

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *_plugin_commands()})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return super().get_command(ctx, cmd_name) or _plugin_commands().get(cmd_name)


class PluginCommand(click.Command):
    """A command of a plugin, with the summary of its package as help until it runs. Completion does not import it."""

    def __init__(self, entry: EntryPoint) -> None:
        super().__init__(entry.name, help=str(entry.dist.metadata["Summary"]) if entry.dist is not None else None)
        self.entry = entry

    def make_context(self, *args: Any, **options: Any) -> click.Context:
        if options.get("resilient_parsing"):
            return super().make_context(*args, **options)
        return self.loaded().make_context(*args, **options)

    def loaded(self) -> click.Command:
        package = self.entry.value if self.entry.dist is None else self.entry.dist.name
        try:
            command = self.entry.load()
        except Exception as error:
            raise UserError(f"the command {self.name} of {package} cannot be imported: {error}") from error
        if not isinstance(command, click.Command):
            raise UserError(f"the command {self.name} of {package} must be a click.Command, got {type(command).__name__}")
        return command


def _plugin_commands() -> dict[str, PluginCommand]:
    from importlib.metadata import entry_points  # slow to import

    return {entry.name: PluginCommand(entry) for entry in entry_points(group=GROUP)}


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


def _argument_hint(option: str, given: list[str]) -> str:
    """How a mask takes an argument that was given as an option; nothing where no mask of the command has it."""
    argument = option.lstrip("-").replace("-", "_")
    words = [word for text in given for word in re.findall(r"[^\W\d]\w*", text)]
    known = known_names()
    name = next((word for word in words if word in known and argument in signature(NAMES[word]).parameters), None)
    if name is None:
        return ""
    after = (value for text, value in pairwise([*given, "..."]) if text == option)
    value = next((text.partition("=")[2] for text in given if text.startswith(f"{option}=")), None) or next(after, "...")
    return f'It is an argument of the mask {name}: write "{name}({argument}={value})".'


def _show(show: Callable[..., None], message: Warning | str, category: type[Warning], *rest: Any, **options: Any) -> None:
    """Shows a warning: about a plugin in one line, others as ``show`` does."""
    if issubclass(category, PluginWarning):
        echo(f"Warning: {message}", err=True)
    else:
        show(message, category, *rest, **options)


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
