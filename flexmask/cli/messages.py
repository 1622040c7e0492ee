"""Messages for users, in place of tracebacks."""

from __future__ import annotations

from typing import IO, Any

import click

from flexmask.cli.output import echo
from flexmask.errors import TextError
from flexmask.plotting.caption import shortened

#: Characters of a long text to show around an error.
EXCERPT = 76
#: Values of a list that a message shows at most.
MAX_VALUES = 8


class UserError(click.ClickException):
    """Bad input: the command line prints the message without a traceback."""

    exit_code = 2

    def show(self, file: IO[Any] | None = None) -> None:
        echo(f"Error: {self.format_message()}", err=True)


def brief(text: object) -> str:
    """A text with only the first values of long lists."""
    return shortened(str(text), 12)


def message_of(error: Exception) -> str:
    """The message of an error, with long lists and texts shortened."""
    if isinstance(error, TextError) and error.column is not None:
        return f"{shortened(error.reason, MAX_VALUES)}\n{_excerpt(error.text, error.column)}"
    return shortened(str(error), MAX_VALUES)


def _excerpt(text: str, column: int) -> str:
    """The part of a long text around a column, with a caret under the column."""
    start = max(0, min(column - EXCERPT // 2, len(text) - EXCERPT))
    part = ("..." if start else "") + text[start : start + EXCERPT] + ("..." if start + EXCERPT < len(text) else "")
    return f"  {part}\n  {' ' * (column - start + (3 if start else 0))}^"
