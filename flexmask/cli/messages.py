"""What a user reads instead of a traceback."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from flexmask.errors import TextError
from flexmask.render.caption import shortened

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["Refused", "message_of", "print_plainly"]

#: Characters of a long text that are shown around the place where it is wrong.
EXCERPT = 76
#: Values of a list that are shown at most.
MOST_VALUES = 8


class Refused(click.ClickException):
    """Bad input: its message is printed instead of a traceback."""

    exit_code = 2


def message_of(error: Exception) -> str:
    """The message of an error, with long lists and long texts cut short."""
    if isinstance(error, TextError) and error.column is not None:
        return f"{shortened(error.reason, MOST_VALUES)}\n{_excerpt(error.text, error.column)}"
    return shortened(str(error), MOST_VALUES)


def _excerpt(text: str, column: int) -> str:
    """The part of a long text around a column, with a caret under the column."""
    start = max(0, min(column - EXCERPT // 2, len(text) - EXCERPT))
    part = ("..." if start else "") + text[start : start + EXCERPT] + ("..." if start + EXCERPT < len(text) else "")
    return f"  {part}\n  {' ' * (column - start + (3 if start else 0))}^"


def print_plainly(console: Console, table: Table) -> None:
    """Prints a table, without blanks at the ends of its lines where the output is no terminal."""
    if console.is_terminal:
        console.print(table)
        return
    with console.capture() as captured:
        console.print(table)
    click.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))
