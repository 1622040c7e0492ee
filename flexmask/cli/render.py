"""``flexmask render``: a picture of a mask, as a file or in the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from flexmask.cli.inputs import BlockSize, lengths_of, mask_options, read_mask
from flexmask.cli.messages import Refused

__all__ = ["render"]

ENDINGS = (".png", ".svg")


def _output(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
    """Refuses a file that cannot be written before any work is done."""
    if value is None:
        return None
    if value.suffix.lower() not in ENDINGS:
        raise click.BadParameter(f"{str(value)!r} must end in {' or '.join(ENDINGS)}", ctx, param)
    if not value.parent.is_dir():
        raise click.BadParameter(f"there is no folder {str(value.parent)!r}", ctx, param)
    return value


@click.command()
@mask_options
@click.option("--batch", type=int, default=0, metavar="I", help="Which sequence of the batch. [default: 0]")
@click.option("--head", type=int, default=0, metavar="I", help="Which head. [default: 0]")
@click.option(
    "--block-size",
    type=BlockSize(),
    metavar="N|Q,KV",
    help="Also draw the blocks that a kernel skips, computes or masks, e.g. 128.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    callback=_output,
    metavar="FILE",
    help="Write a .png or .svg instead of drawing in the terminal.",
)
def render(
    expression: str,
    seq_len: int | None,
    q_len: int | None,
    kv_len: int | None,
    parameters: tuple[tuple[str, object], ...],
    output: Path | None,
    **options: Any,
) -> None:
    """Draw the mask EXPR, or MODULE:NAME of a mask or mask_mod function: queries down, keys across.

    Lengths that are not given come from the mask's own data (document ids, keep-masks, tables, lengths of documents and
    of padded sequences), else one is as long as the other, else they are 16. Of a batch one sequence is drawn.
    Where the output is no terminal, the picture is plain text.

    \b
    Examples:
      flexmask render causal
      flexmask render "causal & key_padding(lengths=[3, 5, 4])" --batch 2
      flexmask render "sliding_window(left=3, right=0) | (kv < 1)" --seq-len 24 --block-size 8
      flexmask render "causal & document(ids)" -p "ids=[0,0,0,1,1,2,2,2]" -o packed.svg
      flexmask render "causal & document(ids)" -p ids=@ids.json --block-size 128 -o packed.png
    """
    mask = read_mask(expression, parameters)
    queries, keys = lengths_of(mask, seq_len, q_len, kv_len)
    if output is None:
        from flexmask.render.terminal import show

        show(mask, queries, keys, **options)
        return
    from flexmask.render.picture import picture
    from flexmask.render.plot import save

    shown = picture(mask, queries, keys, **options)
    try:
        save(shown, output)
    except OSError as error:
        raise Refused(f"cannot write {str(output)!r}: {error.strerror or error}") from error
    click.echo(f"wrote {output}", err=True)
