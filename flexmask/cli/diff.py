"""``flexmask diff``: where two masks differ."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flexmask.cli.drawings import output_option, writing
from flexmask.cli.inputs import LoweringOptions, expression_argument, json_option, lowering_options
from flexmask.cli.messages import brief
from flexmask.cli.output import Cell, echo, print_json, print_table
from flexmask.cli.progress import block_progress, spinner

if TYPE_CHECKING:
    from flexmask.cli.inputs import Lowering
    from flexmask.expr.mask import Mask
    from flexmask.report.compare import Difference


@click.command()
@expression_argument("a", "A")
@expression_argument("b", "B")
@lowering_options
@output_option("with the cells that only one of them shows")
@json_option("differ, cells, only_a, only_b, the first cells first_a and first_b or null, the masks a and b, q_len, kv_len")
@click.pass_context
def diff(ctx: click.Context, a: str, b: str, options: LoweringOptions, output: Path | None, as_json: bool) -> None:
    """Show where the masks A and B differ.

    Prints the number of cells that are visible in only one of them, and the first of these. Each mask is an expression,
    or MODULE:NAME of a mask or mask_mod function. Both have the same lengths, and parameters apply to both. Queries are
    counted from 0, also with --q-offset.

    Exits with 0 if the cells are the same, with 1 if they differ, and with 2 for bad input.

    \b
    Examples:
      flexmask diff "sliding_window(size=4)" "causal & (q - kv < 4)"
      flexmask diff causal "causal & document(ids)" -p "ids=[0,0,0,1,1,2,2,2]"
      flexmask diff "sliding_window(size=4)" "sliding_window(size=5)" --seq-len 16 -o windows.png
      flexmask diff causal my_package.masks:my_mask_mod --seq-len 4096 --json
    """
    with block_progress("comparing the masks"):
        masks = options.masks(a, b)
        lowering = options.lowering(*masks)
        found = masks[0].difference(masks[1], **lowering)
    if as_json:
        print_json(_document(found, masks, lowering))
    else:
        print_table(_rows(found, masks, lowering))
    if output is not None:
        with writing(output), spinner("drawing the masks"):
            masks[0].save_picture(output, **_place(found, lowering), against=masks[1])
    elif found and not as_json:
        echo("")
        masks[0].show(**_place(found, lowering), against=masks[1])
    if found:
        ctx.exit(1)


def _place(found: Difference, lowering: Lowering) -> dict[str, Any]:
    """The lengths, and the sequence and head of the first cell that differs, to be drawn."""
    cell = found.first_self or found.first_other
    where = (cell.b, cell.h) if cell else (0, 0)
    lengths = {name: lowering[name] for name in ("q_len", "kv_len", "q_offset")}
    return {**lengths, "batch": where[0], "head": where[1]}


def _document(found: Difference, masks: list[Mask], lowering: Lowering) -> dict[str, object]:
    firsts = [None if cell is None else cell._asdict() for cell in (found.first_self, found.first_other)]
    return {
        "differ": bool(found),
        "cells": found.cells,
        "only_a": found.only_self,
        "only_b": found.only_other,
        "first_a": firsts[0],
        "first_b": firsts[1],
        "a": str(masks[0]),
        "b": str(masks[1]),
        "q_len": lowering["q_len"],
        "kv_len": lowering["kv_len"],
    }


def _rows(found: Difference, masks: list[Mask], lowering: Lowering) -> list[tuple[Cell, str | Cell]]:
    rows: list[tuple[Cell, str | Cell]] = [
        (Cell(letter, bold=True), brief(mask)) for letter, mask in zip("AB", masks, strict=True)
    ]
    rows.append((Cell("lengths", bold=True), f"{lowering['q_len']:,} queries x {lowering['kv_len']:,} keys"))
    for letter, count, first in (("A", found.only_self, found.first_self), ("B", found.only_other, found.first_other)):
        where = "" if first is None else f", the first at {first}"
        rows.append((Cell(f"only in {letter}", bold=True), f"{count:,} of {found.cells:,} cells{where}"))
    verdict = Cell("they differ", "red", bold=True) if found else Cell("both show the same", "green")
    return [*rows, (Cell("result", bold=True), verdict)]
