"""``flexmask stats``: visible cells, blocks and cost of masks, side by side."""

from __future__ import annotations

from string import ascii_uppercase

import click

from flexmask.cli.inputs import LoweringOptions, block_size_option, expression_argument, json_option, lowering_options
from flexmask.cli.messages import UserError, brief
from flexmask.cli.output import Cell, echo, heading, print_json, print_table
from flexmask.cli.progress import block_progress
from flexmask.cli.statistics import statistics, statistics_rows


@click.command()
@expression_argument("expressions", "EXPR...", nargs=-1, required=True)
@lowering_options
@block_size_option("128")
@json_option("an object of all statistics, or a list of them for several masks")
def stats(expressions: tuple[str, ...], options: LoweringOptions, block_size: tuple[int, int], as_json: bool) -> None:
    """Show the statistics of one mask EXPR, or of several.

    EXPR may be MODULE:NAME of a mask or mask_mod function. The statistics are the visible cells, the fully masked rows, the
    blocks (full: computed without a test, partial: computed and masked, empty: skipped), the share of empty blocks, the
    visible share of partial blocks, the memory of the BlockMask and of the one that torch would make, and the work of
    attention in percent of dense attention. All masks have the same lengths, and parameters apply to all.

    \b
    Examples:
      flexmask stats "causal & document(lengths=[400, 600])"
      flexmask stats causal "sliding_window(size=256)" "chunked(256)" --seq-len 8192
      flexmask stats "causal & key_padding(n)" -p n=1000 --json
    """
    if len(expressions) > len(ascii_uppercase):
        raise UserError(f"at most {len(ascii_uppercase)} masks fit in one table, got {len(expressions)}")
    with block_progress("counting"):
        masks = options.masks(*expressions)
        lowering = options.lowering(*masks)
        found = [mask.stats(**lowering, block_size=block_size) for mask in masks]
    if as_json:
        answers = [{"mask": str(mask)} | statistics(one) for mask, one in zip(masks, found, strict=True)]
        print_json(answers if len(answers) > 1 else answers[0])
        return
    letters = ascii_uppercase[: len(masks)] if len(masks) > 1 else ["mask"]
    texts = [*zip(letters, (brief(mask) for mask in masks), strict=True)]
    size = " x ".join(map(str, found[0].block_size))
    texts += [("lengths", f"{lowering['q_len']:,} queries x {lowering['kv_len']:,} keys, blocks of {size}")]
    print_table([(Cell(label, bold=True), text) for label, text in texts])
    echo("")
    columns = (statistics_rows(one) for one in found)
    rows = [(Cell(row[0][0], bold=True), *(text for _, text in row)) for row in zip(*columns, strict=True)]
    print_table(rows, heading("", *letters) if len(masks) > 1 else ())
