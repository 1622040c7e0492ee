"""``flexmask gallery``: many masks as pictures, with a README and a searchable page."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from flexmask.cli.messages import UserError
from flexmask.cli.output import echo

if TYPE_CHECKING:
    from flexmask.gallery.entry import Entry


@click.command()
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    default="gallery",
    metavar="DIR",
    help="The folder to write to. [default: gallery]",
)
@click.option(
    "--only",
    multiple=True,
    metavar="NAME",
    help="Only entries with this tag, family, title, model or method. Repeatable.",
)
@click.option(
    "--source",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="A TOML file of your own entries. [default: flexmask's gallery]",
)
def gallery(output: Path, only: tuple[str, ...], source: Path | None) -> None:
    """Draw the gallery of masks: pictures, README.md and index.html, a page that needs no other file.

    With --only, README.md and index.html have the selected entries only. FILE has a [[mask]] for each entry, with title,
    family, text (the expression), q_len, tags, caption and source, and optionally kv_len, q_offset, block_size, batch and
    head (an index or "all"), why, q_tokens, kv_tokens, aliases, params with the values of parameters, and computed with the
    code that computes them in a model.

    \b
    Examples:
      flexmask gallery -o masks
      flexmask gallery --only video --only padding -o masks
      flexmask gallery --source masks.toml -o masks
    """
    from flexmask.gallery.build import build
    from flexmask.gallery.source import own_source, read_entries, select_entries

    entries = select_entries(read_entries(own_source() if source is None else source), only)
    try:
        with _bar(len(entries)) as done:
            build(entries, output, done)
    except OSError as error:
        raise UserError(f"cannot write {str(error.filename or output)!r}: {error.strerror or error}") from error
    pictures = "1 picture" if len(entries) == 1 else f"{len(entries)} pictures"
    echo(f"wrote {pictures}, README.md and index.html to {output}", err=True)


@contextmanager
def _bar(count: int) -> Iterator[Callable[[Entry], None]]:
    """A progress bar on stderr, if that is a terminal; yields a function to call after each entry."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("preparing", total=count)
        yield lambda entry: progress.update(task, advance=1, description=entry.title)
