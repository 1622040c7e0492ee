"""``flexmask explain``: what a mask means, how it is lowered, and what it costs."""

from __future__ import annotations

import click

from flexmask.cli.inputs import BlockSize, lengths_of, mask_options, read_mask
from flexmask.cli.messages import print_plainly
from flexmask.render.caption import shortened

__all__ = ["explain"]

#: Values of a list that are shown at most.
MOST_VALUES = 12


@click.command()
@mask_options
@click.option("--batch", type=int, metavar="N", help="Number of sequences, where the mask's data does not say it.")
@click.option("--heads", type=int, metavar="N", help="Number of heads, where the mask's data does not say it.")
@click.option("--block-size", type=BlockSize(), default="128", metavar="N|Q,KV", help="Tokens in a block. [default: 128]")
def explain(
    expression: str,
    seq_len: int | None,
    q_len: int | None,
    kv_len: int | None,
    q_offset: int,
    parameters: tuple[tuple[str, object], ...],
    batch: int | None,
    heads: int | None,
    block_size: tuple[int, int],
) -> None:
    """Explain the mask EXPR, or the mask_mod function NAME of a MODULE.

    Shown are the mask under the names that it has, its definition, the conditions it comes down to and whether query and
    key stand apart in them, the intervals of its rows, its blocks, its memory, and what attention costs with it.

    \b
    Examples:
      flexmask explain "causal & document(lengths=[400, 600])"
      flexmask explain "sliding_window(left=256, right=0)" --seq-len 8192
      flexmask explain my_package.masks:my_mask_mod --seq-len 4096
    """
    mask = read_mask(expression, parameters)
    queries, keys = lengths_of(mask, seq_len, q_len, kv_len)
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from flexmask.explaining import explain as explained

    found = explained(mask, queries, keys, batch=batch, heads=heads, q_offset=q_offset, block_size=block_size)
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for label, text in found.lines():
        table.add_row(Text(label, "bold"), Text(shortened(text, MOST_VALUES)))
    print_plainly(Console(), table)
