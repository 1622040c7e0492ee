"""The commands that draw: ``render``, a picture of a mask as a file or in the terminal, and ``gallery``, many with a page."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from flexmask._checks import lengths_text
from flexmask.cli import inputs
from flexmask.cli.inputs import Count, LengthOptions, index_list
from flexmask.cli.output import UserError, spinner, to_stderr

if TYPE_CHECKING:
    from flexmask.gallery.source import Entry
    from flexmask.plotting.annotations import ContentOptions, FrameOptions
    from flexmask.plotting.sheet import Indices

#: Characters of a line of the terminal at least.
LEAST_WIDTH = 16


@click.command()
@inputs.expression_argument("expression", "EXPR")
@inputs.length_options
@click.option("--why", is_flag=True, help="Color each hidden cell by the first term of the mask that masks it out.")
@click.option("--terms", is_flag=True, help="Draw each term of the mask, then the whole with the cells that each masks out.")
@click.option("--batch", type=index_list, metavar="I|I,J|all", help="Which sequences of the batch are drawn. [default: 0]")
@click.option("--head", type=index_list, metavar="I|I,J|all", help="Which heads are drawn. [default: 0]")
@click.option(
    "--block-size",
    type=inputs.block_size,
    metavar="N|Q,KV",
    help="Also draw the blocks that a kernel skips, computes or masks, e.g. 128.",
)
@click.option(
    "--ranks",
    type=Count(min=1),
    metavar="N",
    help="Color the cells by the rank that holds the query under context parallelism, planned in blocks of --block-size.",
)
@click.option(
    "--tokens",
    type=inputs.token_text,
    metavar="TEXT",
    help="Labels of the axes: a text of words, a JSON list, or @FILE with either.",
)
@click.option("--kv-tokens", type=inputs.token_text, metavar="TEXT", help="Labels of the keys, if they differ.")
@click.option("--no-bands", is_flag=True, help="Do not draw documents, prefix trees and padding along the edges.")
@click.option("--title", metavar="TEXT", help="A title instead of the mask's text.")
@click.option("--no-legend", is_flag=True, help="Leave out the notes and the meaning of the colors or signs.")
@click.option("--width", type=float, metavar="N", help="Width: inches of the cells in a file, characters in the terminal.")
@inputs.output_option("instead of drawing in the terminal")
def render(
    expression: str,
    options: LengthOptions,
    why: bool,
    terms: bool,
    batch: Indices | None,
    head: Indices | None,
    block_size: tuple[int, int] | None,
    ranks: int | None,
    tokens: list[str] | None,
    kv_tokens: list[str] | None,
    no_bands: bool,
    title: str | None,
    no_legend: bool,
    width: float | None,
    output: Path | None,
) -> None:
    """Draw the mask EXPR, or MODULE:NAME of a mask or mask_mod function: queries down, keys across.

    Lengths that are not given come from the tokens or the mask's data (document ids, keep-masks, tables, lengths of
    documents and of padded sequences); else both are equal; else they are 16. The picture is plain text if the output is
    not a terminal. An .html file is interactive: it shows for each cell the term that masks it out, and its block.

    \b
    Examples:
      flexmask render causal
      flexmask render "causal & key_padding(lengths=[3, 5, 4])" --batch all --why
      flexmask render "sliding_window(left=3, right=0) | causal & (kv < 2)" --seq-len 24 --block-size 8
      flexmask render "causal & document(ids)" -p "ids=[0,0,0,1,1,2,2,2]" --terms -o packed.svg
      flexmask render "causal & document(ids)" -p ids=@ids.json --block-size 128 -o packed.html
      flexmask render "causal & document(lengths=[9, 30, 25])" --ranks 4
      flexmask render "causal & document(lengths=[3, 5])" --title "Two documents" --no-legend --width 2.5 -o packed.pdf
      flexmask render "causal & key_padding(lengths=4)" --tokens "The cat sat down <pad>"
    """
    with to_stderr():
        (mask,) = options.masks(expression)
    if options.seq_len is None:
        keys = tokens if kv_tokens is None else kv_tokens
        if keys is not None and options.kv_len is None:
            options = replace(options, kv_len=len(keys))
        if tokens is not None and options.q_len is None:
            if len(tokens) <= (at := options.q_offset):
                raise UserError(f"{len(tokens)} tokens do not reach --q-offset {at}; label all positions, or give --q-len")
            options = replace(options, q_len=len(tokens) - at)
    q_len, kv_len = options.lengths(mask)
    content: ContentOptions = {"q_offset": options.q_offset, "tokens": tokens, "kv_tokens": kv_tokens, "bands": not no_bands}
    content["why"] = why or None  # an interactive view has it by default
    if ranks is not None:
        if q_len != kv_len:
            raise UserError(
                f"with --ranks a sequence attends to itself: give --seq-len, not {lengths_text(q_len, kv_len, 'and')}"
            )
        from flexmask.distributed.sharding import shard_sequence

        content["shards"] = shard_sequence(mask, q_len, ranks, block_size=block_size or _block_size(q_len, ranks))
    elif block_size is not None:
        content["block_size"] = block_size
    if output is not None:
        with inputs.writing(output), spinner("drawing the mask"):
            frame: FrameOptions = {"title": title, "legend": not no_legend, "width": width}
            mask.save_picture(output, q_len, kv_len, batch=batch, head=head, terms=terms, **frame, **content)
        return
    if width is not None and not (width >= LEAST_WIDTH and width.is_integer()):
        raise UserError(f"--width is a whole number of characters from {LEAST_WIDTH} on in the terminal, got {width:g}")
    from rich.console import Console

    from flexmask.plotting.sheet import picture_or_sheet
    from flexmask.plotting.terminal.show import print_drawing

    with spinner("drawing the mask"):
        shown = picture_or_sheet(mask, q_len, kv_len, batch=batch, head=head, terms=terms, **content)
    shown = shown if title is None else replace(shown, text=title)
    console = Console(width=None if width is None else int(width))
    print_drawing(shown, console=console, legend=not no_legend)


def _block_size(seq_len: int, ranks: int) -> int:
    """A power of two up to 128, with which each rank has about 8 blocks."""
    return int(min(128, 2 ** max(0, (seq_len // (8 * ranks)).bit_length() - 1)))


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
    pictures = "1 picture" if len(entries) == 1 else f"{len(entries)} pictures"
    with inputs.writing(output, f"{pictures}, README.md and index.html to {output}"), _bar(len(entries)) as done:
        build(entries, output, done)


@contextmanager
def _bar(count: int) -> Iterator[Callable[[Entry], None]]:
    """A progress bar on stderr, if that is a terminal; yields a function to call after each entry."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("preparing", total=count)
        yield lambda entry: progress.update(task, advance=1, description=entry.title)
