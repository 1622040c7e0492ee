"""Output of the commands: text for any encoding, tables for any width, JSON, errors, and progress on stderr.

Tables are formatted here and not by rich, whose import takes half of the time of ``flexmask list``.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from itertools import zip_longest
from textwrap import wrap
from threading import Timer
from typing import IO, Any, NamedTuple, TypeAlias

import click

from flexmask.errors import TextError
from flexmask.plotting.caption import shortened

#: ASCII replacements of signs that an encoding lacks.
PLAIN = str.maketrans({"■": "#", "⬚": ".", "…": "...", "×": "x"})
#: Blanks between two columns.
GAP = 2
#: The least width of the last column; a narrower table has the cells of a row below each other.
LEAST = 24


class Cell(NamedTuple):
    """A cell of a table, with its color."""

    text: str
    color: str | None = None
    bold: bool = False

    def styled(self, text: str) -> str:
        """A part of the text in the cell's style."""
        return click.style(text, fg=self.color, bold=self.bold or None) if text and (self.color or self.bold) else text


Row: TypeAlias = "Sequence[str | Cell]"


def echo(text: str, *, err: bool = False) -> None:
    """Prints a text to stdout or stderr, with colors only on a terminal and without NO_COLOR."""
    color = False if os.environ.get("NO_COLOR") else True if os.environ.get("FORCE_COLOR") else None
    click.echo(printable(text, sys.stderr.encoding if err else sys.stdout.encoding), err=err, color=color)


@contextmanager
def to_stderr() -> Iterator[None]:
    """Redirects output to stderr, such as that of user modules, so that it is not part of the answer.

    Where there is a file descriptor it is redirected, too, for output of libraries and other processes.
    """
    stream = sys.stdout
    with ExitStack() as stack:
        with suppress(OSError):
            stream.flush()
            out, err = stream.fileno(), sys.stderr.fileno()
            kept = os.dup(out)
            stack.callback(os.close, kept)
            stack.callback(os.dup2, kept, out)
            stack.callback(stream.flush)
            os.dup2(err, out)
        stack.enter_context(redirect_stdout(sys.stderr))
        yield


def printable(text: str, encoding: str | None) -> str:
    """A text with signs that the encoding lacks replaced."""
    encoding = encoding or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.translate(PLAIN).encode(encoding, "backslashreplace").decode(encoding)
    return text


def print_json(answer: object) -> None:
    """Prints a command's answer as one JSON document."""
    click.echo(json.dumps(answer, indent=2))


def print_table(rows: Iterable[Row], header: Sequence[str] = (), *, labels: bool = False) -> None:
    """Prints rows of cells within the width of the terminal: in columns, or in lines if it is too narrow.

    Texts are wrapped, never cut, and keep their leading blanks.

    Args:
        rows: the cells, as texts where they have no color.
        header: the headings of the columns.
        labels: whether the texts of the first column are bold, as the headings are.
    """
    table = [[Cell(text, bold=True) for text in header]] if header else []
    for row in rows:
        table.append([Cell(cell, bold=labels and not place) if isinstance(cell, str) else cell for place, cell in enumerate(row)])
    width = shutil.get_terminal_size().columns
    limits = _limits(table, width)
    lines = (
        _stacked(table, width, bool(header)) if limits is None else (line for row in table for line in _side_by_side(row, limits))
    )
    echo("\n".join(lines))


def _limits(table: list[list[Cell]], width: int) -> list[int] | None:
    """The widths of the columns, or None if they do not fit."""
    natural = [max((len(cell.text) for cell in column if cell), default=0) for column in zip_longest(*table)]
    if sum(natural) + GAP * (len(natural) - 1) <= width:
        return natural
    most = max(LEAST, width // 2 - 1)
    limits = [min(size, most) for size in natural[:-1]]
    rest = width - sum(limits) - GAP * len(limits)
    return [*limits, rest] if rest >= min(LEAST, natural[-1]) else None


def _side_by_side(row: list[Cell], limits: list[int]) -> Iterator[str]:
    """The lines of a row with its cells side by side."""
    wrapped = [_wrapped(cell.text, limit) for cell, limit in zip(row, limits, strict=False)]
    for parts in zip_longest(*wrapped, fillvalue=""):
        cells = zip(row, parts, limits, strict=False)
        yield (" " * GAP).join(cell.styled(part) + " " * (limit - len(part)) for cell, part, limit in cells).rstrip()


def _stacked(table: list[list[Cell]], width: int, headed: bool) -> Iterator[str]:
    """The lines of a table with the cells of a row below each other, after the headings of their columns."""
    heads = [cell.text for cell in table[0]] if headed else []
    for first, *others in table[headed:]:
        yield from (first.styled(line) for line in _wrapped(first.text, width))
        indent = " " * (len(first.text) - len(first.text.lstrip()) + 2)
        for place, cell in enumerate(others, 1):
            head = f"{heads[place]}: " if len(others) > 1 and "".join(heads[place : place + 1]) else ""
            yield from (indent + cell.styled(line) for line in _wrapped(head + cell.text, width - len(indent)))


def _wrapped(text: str, width: int) -> list[str]:
    lines = []
    for line in text.split("\n"):
        before = line[: len(line) - len(line.lstrip())]
        after = before + "    " if before else ""
        lines += wrap(line.strip(), max(width, 8), initial_indent=before, subsequent_indent=after, break_on_hyphens=False) or [""]
    return lines


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


#: Seconds before progress is shown.
DELAY = 0.7


@contextmanager
def spinner(doing: str) -> Iterator[Callable[[str], None]]:
    """Shows a text with a spinner after a short delay; yields a function that changes the text.

    Nothing is shown if stderr is not a terminal. Output of user functions goes to stderr meanwhile, see :func:`to_stderr`; print
    the answer afterwards.
    """
    with to_stderr():
        if not sys.stderr.isatty():
            yield lambda text: None
            return
        from rich.console import Console

        status = Console(stderr=True).status(doing)
        timer = Timer(DELAY, status.start)
        timer.daemon = True
        timer.start()
        try:
            yield status.update
        finally:
            timer.cancel()
            timer.join()
            status.stop()  # rich restores the stream that it found


@contextmanager
def block_progress(doing: str) -> Iterator[None]:
    """As :func:`spinner`, with the share of the open blocks that are evaluated."""
    with spinner(doing) as update:
        from flexmask.blocks.survey import watched

        with watched(lambda share: update(f"{doing}: {share:.0%} of the blocks that have to be evaluated")):
            yield
