"""The ``flexmask`` command that holds the others."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from inspect import signature
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import click

import flexmask
from flexmask.cli.completion import known_names
from flexmask.cli.exits import ProgramExit, exit_code
from flexmask.cli.messages import UserError
from flexmask.cli.output import echo
from flexmask.errors import PluginWarning
from flexmask.expr.names import NAMES

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

#: The entry points of packages that add commands; each loads a ``click.Command``.
GROUP = "flexmask.commands"


class Commands(click.Group):
    """A group with the exit codes of its help, whose commands report warnings about plugins in one line.

    Plugins add commands as entry points of `GROUP`. One is imported when it runs: the list of commands has its package's summary.
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
            warnings.showwarning = _in_a_line(warnings.showwarning)
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
        own, entry = super().get_command(ctx, cmd_name), _plugin_commands().get(cmd_name)
        if own is not None or entry is None:
            return own
        if ctx.resilient_parsing:  # completion in the shell
            return _placeholder(entry)
        try:
            command = entry.load()
        except Exception as error:
            raise UserError(f"the command {cmd_name} of {_package(entry)} cannot be imported: {error}") from error
        if not isinstance(command, click.Command):
            raise UserError(f"the command {cmd_name} of {_package(entry)} must be a click.Command, got {type(command).__name__}")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        plugins = {name: _placeholder(entry) for name, entry in _plugin_commands().items()}
        click.Group(commands={**plugins, **self.commands}).format_commands(ctx, formatter)


def _plugin_commands() -> dict[str, EntryPoint]:
    from importlib.metadata import entry_points  # slow to import

    return {entry.name: entry for entry in entry_points(group=GROUP)}


def _placeholder(entry: EntryPoint) -> click.Command:
    """A command with the summary of its package as help, in place of one that is not imported."""
    return click.Command(entry.name, help=str(entry.dist.metadata["Summary"]) if entry.dist is not None else None)


def _package(entry: EntryPoint) -> str:
    return entry.value if entry.dist is None else entry.dist.name


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
