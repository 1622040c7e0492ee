"""Options of the commands that draw: sequences and heads, labels of the axes, and the output file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from flexmask.cli.messages import UserError
from flexmask.cli.output import echo
from flexmask.cli.values import read_text
from flexmask.plotting.files import picture_suffix

if TYPE_CHECKING:
    from flexmask.plotting.sheet import Indices

Command = TypeVar("Command", bound=Callable[..., Any])


class IndexList(click.ParamType):  # type: ignore[type-arg]  # generic only in the newest releases of click
    """``I``, ``I,J`` or ``all``: which sequences or heads."""

    name = "i|i,j|all"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Indices:
        text = str(value).strip()
        if text == "all":
            return "all"
        parts = [part.strip() for part in text.split(",")]
        if not all(part.isdecimal() for part in parts):
            self.fail(f"{text!r} is neither an index from 0, nor several of them, I,J, nor all", param, ctx)
        return int(parts[0]) if len(parts) == 1 else [int(part) for part in parts]


class TokenText(click.ParamType):  # type: ignore[type-arg]  # as above
    """A text of which each word is a token, a JSON list of tokens, or ``@FILE`` with either of them in it."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[str]:
        text = read_text(str(value), lambda reason: self.fail(reason, param, ctx))
        if not text.strip():
            self.fail("it has no token", param, ctx)
        if not text.lstrip().startswith("["):
            return text.split()
        try:
            found = json.loads(text)
        except ValueError:
            return text.split()  # a text that begins with a token such as [CLS]
        return found if isinstance(found, list) and all(isinstance(token, str) for token in found) else text.split()


def label_options(command: Command) -> Command:
    """Adds the labels of the axes."""
    options = [
        click.option(
            "--tokens",
            type=TokenText(),
            metavar="TEXT",
            help="Labels of the axes: a text of words, a JSON list, or @FILE with either.",
        ),
        click.option("--kv-tokens", type=TokenText(), metavar="TEXT", help="Labels of the keys, if they differ."),
        click.option("--no-bands", is_flag=True, help="Do not draw documents, prefix trees and padding along the edges."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def output_option(instead: str) -> Callable[[Command], Command]:
    """Adds ``-o``; ``instead`` completes its help text."""
    return click.option(
        "-o",
        "--output",
        type=click.Path(path_type=Path, dir_okay=False),
        callback=_output,
        metavar="FILE",
        help=f"Write a .png, .svg, .pdf or interactive .html {instead}.",
    )


def _output(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
    """Checks the output file before any work is done."""
    if value is None:
        return None
    picture_suffix(value)
    return value


@contextmanager
def writing(output: Path) -> Iterator[None]:
    """Reports that a file was written, or why it cannot be."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write {str(error.filename or output)!r}: {error.strerror or error}") from error
    echo(f"wrote {output}", err=True)
