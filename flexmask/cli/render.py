"""``flexmask render``: a picture of a mask, as a file or in the terminal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from flexmask.cli.drawings import IndexList, label_options, output_option, writing
from flexmask.cli.inputs import Parameters, checked_lengths, mask_options, read_mask
from flexmask.cli.messages import UserError
from flexmask.cli.progress import spinner
from flexmask.cli.values import BlockSize, Count

if TYPE_CHECKING:
    from flexmask.plotting.labels import ContentOptions, FrameOptions
    from flexmask.plotting.sheet import Indices

#: Characters of a line of the terminal at least.
LEAST_WIDTH = 16


@click.command()
@mask_options
@click.option("--why", is_flag=True, help="Color each hidden cell by the first term of the mask that masks it out.")
@click.option("--terms", is_flag=True, help="Draw each term of the mask, then the whole with the cells that each masks out.")
@click.option("--batch", type=IndexList(), metavar="I|I,J|all", help="Which sequences of the batch are drawn. [default: 0]")
@click.option("--head", type=IndexList(), metavar="I|I,J|all", help="Which heads are drawn. [default: 0]")
@click.option(
    "--block-size",
    type=BlockSize(),
    metavar="N|Q,KV",
    help="Also draw the blocks that a kernel skips, computes or masks, e.g. 128.",
)
@click.option(
    "--ranks",
    type=Count(min=1),
    metavar="N",
    help="Color the cells by the rank that holds the query under context parallelism, planned in blocks of --block-size.",
)
@label_options
@click.option("--title", metavar="TEXT", help="A title instead of the mask's text.")
@click.option("--no-legend", is_flag=True, help="Leave out the notes and the meaning of the colors or signs.")
@click.option("--width", type=float, metavar="N", help="Width: inches of the cells in a file, characters in the terminal.")
@output_option("instead of drawing in the terminal")
def render(
    expression: str,
    seq_len: int | None,
    q_len: int | None,
    kv_len: int | None,
    q_offset: int,
    parameters: Parameters,
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
    mask = read_mask(expression, parameters)
    if seq_len is None:
        keys = tokens if kv_tokens is None else kv_tokens
        kv_len = len(keys) if keys is not None and kv_len is None else kv_len
        if tokens is not None and q_len is None:
            if len(tokens) <= q_offset:
                raise UserError(f"{len(tokens)} tokens do not reach --q-offset {q_offset}; label all positions, or give --q-len")
            q_len = len(tokens) - q_offset
    queries, across = checked_lengths(mask, seq_len=seq_len, q_len=q_len, kv_len=kv_len)
    options: ContentOptions = {"q_offset": q_offset, "tokens": tokens, "kv_tokens": kv_tokens, "bands": not no_bands}
    if why:
        options["why"] = True
    if ranks is not None:
        if queries != across:
            lengths = f"{queries:,} queries and {across:,} keys"
            raise UserError(f"with --ranks a sequence attends to itself: give --seq-len, not {lengths}")
        from flexmask.distributed.sharding import shard_sequence

        options["shards"] = shard_sequence(mask, queries, ranks, block_size=block_size or _block_size(queries, ranks))
    elif block_size is not None:
        options["block_size"] = block_size
    if output is not None:
        with writing(output), spinner("drawing the mask"):
            frame: FrameOptions = {"title": title, "legend": not no_legend, "width": width}
            mask.save_picture(output, queries, across, batch=batch, head=head, terms=terms, **frame, **options)
        return
    if width is not None and not (width >= LEAST_WIDTH and width.is_integer()):
        raise UserError(f"--width is a whole number of characters from {LEAST_WIDTH} on in the terminal, got {width:g}")
    from rich.console import Console

    from flexmask.plotting.raster import Picture
    from flexmask.plotting.sheet import picture_or_sheet
    from flexmask.plotting.terminal.show import show_picture, show_sheet

    with spinner("drawing the mask"):
        shown = picture_or_sheet(mask, queries, across, batch=batch, head=head, terms=terms, **options)
    shown = shown if title is None else replace(shown, text=title)
    console = Console(width=None if width is None else int(width))
    if isinstance(shown, Picture):
        show_picture(shown, console=console, legend=not no_legend)
    else:
        show_sheet(shown, console=console, legend=not no_legend)


def _block_size(seq_len: int, ranks: int) -> int:
    """A power of two up to 128, with which each rank has about 8 blocks."""
    return int(min(128, 2 ** max(0, (seq_len // (8 * ranks)).bit_length() - 1)))
