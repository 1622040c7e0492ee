"""The commands that say something of masks: ``explain``, ``stats``, ``diff``, ``check`` and ``shard``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from string import ascii_uppercase
from typing import TYPE_CHECKING, Any

import click

from flexmask._checks import lengths_text
from flexmask.cli import inputs
from flexmask.cli.inputs import Count, LoweringOptions, complete_expression, resolve_reference
from flexmask.cli.output import Cell, Row, UserError, block_progress, brief, echo, print_json, print_table, spinner
from flexmask.expr.mask import Mask

if TYPE_CHECKING:
    from flexmask.distributed.sharding import Balance
    from flexmask.report.compare import Difference
    from flexmask.report.stats import Stats
    from flexmask.testing.settings import Finding


@click.command()
@inputs.expression_argument("expression", "EXPR")
@inputs.lowering_options
@inputs.block_size_option("128")
@click.option(
    "--cell", type=inputs.place, metavar="Q,KV|B,H,Q,KV", help="Also say which terms of the mask hide this cell, or show it."
)
@click.option("--kernel", is_flag=True, help="Also say what the kernels of attention do with the mask.")
@inputs.json_option("the attributes of flexmask.explain(), with all statistics under stats")
def explain(expression: str, options: LoweringOptions, cell: tuple[int, ...] | None, kernel: bool) -> None:
    """Explain the meaning, the lowering and the cost of the mask EXPR.

    EXPR may be MODULE:NAME of a mask or mask_mod function. Prints the mask with its named masks, its definition, its
    conditions and whether they are separable in q and kv, the key intervals of its rows, its blocks, its memory, and the
    cost of attention. `flexmask stats` has the statistics alone, for several masks side by side.

    \b
    Examples:
      flexmask explain "causal & document(lengths=[400, 600])"
      flexmask explain "sliding_window(left=256, right=0)" --seq-len 8192
      flexmask explain "causal & document(lengths=[400, 600])" --cell 500,300
      flexmask explain "causal & document(lengths=[400, 600])" --kernel
      flexmask explain my_package.masks:my_mask_mod --seq-len 4096
    """
    with block_progress("explaining the mask"):
        (mask,) = options.masks(expression)
        from flexmask.report.explain import explain as explained

        found = explained(mask, **options.lowering(mask), block_size=options.block_size, cell=cell, kernel=kernel)
    if options.as_json:
        document = asdict(found)
        leaves, _, reason, lines = (document.pop(name) for name in ("leaves", "stats", "cell", "kernel"))
        document |= {"leaves": leaves, "stats": statistics(found.stats)}
        if reason is not None:
            document["cell"] = {**reason.pop("cell")._asdict(), **reason}
        if kernel:
            document["kernel"] = lines
        print_json(document)
        return
    print_table([(label, brief(text)) for label, text in found.lines()], labels=True)


@click.command()
@inputs.expression_argument("expressions", "EXPR...", nargs=-1, required=True)
@inputs.lowering_options
@inputs.block_size_option("128")
@inputs.json_option("an object of all statistics, or a list of them for several masks")
def stats(expressions: tuple[str, ...], options: LoweringOptions) -> None:
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
        found = [mask.stats(**lowering, block_size=options.block_size) for mask in masks]
    if options.as_json:
        answers = [{"mask": str(mask)} | statistics(one) for mask, one in zip(masks, found, strict=True)]
        print_json(answers if len(answers) > 1 else answers[0])
        return
    letters = ascii_uppercase[: len(masks)] if len(masks) > 1 else ["mask"]
    size = " x ".join(map(str, found[0].block_size))
    lengths = f"{lengths_text(lowering['q_len'], lowering['kv_len'])}, blocks of {size}"
    print_table([*zip(letters, map(brief, masks), strict=True), ("lengths", lengths)], labels=True)
    echo("")
    columns = [statistics_texts(one) for one in found]
    rows = [(label, *(column[label] for column in columns)) for label in columns[0]]
    print_table(rows, ["", *letters] if len(masks) > 1 else (), labels=True)


def statistics(stats: Stats) -> dict[str, object]:
    """Every figure by its name."""
    derived = ("visible_fraction", "empty_blocks", "block_sparsity", "partial_fill", "cost")
    return asdict(stats) | {name: getattr(stats, name) for name in derived}


def statistics_texts(stats: Stats) -> dict[str, str]:
    """The statistics as texts by their labels."""
    from flexmask.report.explain import memory_text

    return {
        "cells": f"{stats.cells:,}",
        "visible": f"{stats.visible:,}",
        "visible fraction": f"{stats.visible_fraction:.2%}",
        "fully masked rows": f"{stats.fully_masked_rows:,}",
        "blocks": f"{stats.blocks:,}",
        "  full": f"{stats.full_blocks:,}",
        "  partial": f"{stats.partial_blocks:,}",
        "  empty": f"{stats.empty_blocks:,}",
        "block sparsity": f"{stats.block_sparsity:.2%}",
        "partial fill": f"{stats.partial_fill:.2%}",
        "BlockMask": memory_text(stats.block_mask_bytes),
        "  torch's own": memory_text(stats.torch_block_mask_bytes),
        "cost against dense": f"{stats.cost:,.2%}",
    }


@click.command()
@inputs.expression_argument("a", "A")
@inputs.expression_argument("b", "B")
@inputs.lowering_options
@inputs.output_option("with the cells that only one of them shows")
@inputs.json_option(
    "differ, cells, only_a, only_b, the first cells first_a and first_b or null, the masks a and b, q_len, kv_len"
)
def diff(a: str, b: str, options: LoweringOptions, output: Path | None) -> int:
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
    if options.as_json:
        print_json(_document(found, masks, lowering))
    else:
        print_table(_rows(found, masks, lowering), labels=True)
    if output is not None:
        with inputs.writing(output), spinner("drawing the masks"):
            masks[0].save_picture(output, **_place(found, lowering), against=masks[1])
    elif found and not options.as_json:
        echo("")
        masks[0].show(**_place(found, lowering), against=masks[1])
    return int(bool(found))


def _place(found: Difference, lowering: dict[str, Any]) -> dict[str, Any]:
    """The lengths, and the sequence and head of the first cell that differs, to be drawn."""
    cell = found.first_self or found.first_other
    where = (cell.b, cell.h) if cell else (0, 0)
    return {**{name: lowering[name] for name in ("q_len", "kv_len", "q_offset")}, "batch": where[0], "head": where[1]}


def _document(found: Difference, masks: list[Mask], lowering: dict[str, Any]) -> dict[str, object]:
    return {
        "differ": bool(found),
        "cells": found.cells,
        "only_a": found.only_self,
        "only_b": found.only_other,
        "first_a": found.first_self and found.first_self._asdict(),
        "first_b": found.first_other and found.first_other._asdict(),
        "a": str(masks[0]),
        "b": str(masks[1]),
        "q_len": lowering["q_len"],
        "kv_len": lowering["kv_len"],
    }


def _rows(found: Difference, masks: list[Mask], lowering: dict[str, Any]) -> list[Row]:
    rows: list[Row] = [*zip("AB", map(brief, masks), strict=True)]
    rows.append(("lengths", lengths_text(lowering["q_len"], lowering["kv_len"])))
    for letter, count, first in (("A", found.only_self, found.first_self), ("B", found.only_other, found.first_other)):
        where = "" if first is None else f", the first at {first}"
        rows.append((f"only in {letter}", f"{count:,} of {found.cells:,} cells{where}"))
    verdict = Cell("they differ", "red", bold=True) if found else Cell("both show the same", "green")
    return [*rows, ("result", verdict)]


@click.command()
@inputs.expression_argument("expression", "EXPR")
@click.option(
    "--against",
    metavar="EXPR|MODULE:NAME",
    shell_complete=complete_expression,
    help="The expected mask: another mask, or a mask_mod function.",
)
@inputs.lowering_options
@inputs.block_size_option("8")
@click.option(
    "--backend",
    "backends",
    multiple=True,
    type=inputs.backend,
    shell_complete=inputs.complete_backend,
    help="Backend of attention to check, repeatable. [default: those with gradients: sdpa, on CUDA also flex]",
)
@inputs.json_option("agrees, the mask, against or null, and the findings, each with name, wrong, text and picture")
def check(expression: str, against: str | None, options: LoweringOptions, backends: tuple[str, ...]) -> int:
    """Check that all lowerings of the mask EXPR agree. EXPR may be MODULE:NAME of a mask or mask_mod function.

    Compares the dense form, rows, mask_mod, BlockMask and statistics with each other, and attention with its gradients
    with dense masked softmax in float64. With --against, compares them with another mask, or with a function
    (b, h, q_idx, kv_idx) in a module. Parameters apply to both. `flexmask diff` compares two masks at any length.

    Exits with 0 if all agree, with 1 if something differs, and with 2 for bad input.

    \b
    Examples:
      flexmask check "causal & document(lengths=[40, 60])"
      flexmask check "sliding_window(size=4)" --against "causal & (q - kv < 4)" --seq-len 32
      flexmask check "causal & key_padding(n)" --against "causal - (kv >= 5)" -p n=5
    """
    with spinner("preparing") as doing:
        from flexmask.testing.equivalence import agreement
        from flexmask.testing.settings import make_setting

        function = None if against is None else inputs.REFERENCE.fullmatch(against.strip())
        masks = options.masks(*([expression] if against is None or function else [expression, against]))
        reference = resolve_reference(function[0]) if function else masks[-1]
        setting = make_setting(masks[0], **options.lowering(*masks), reference=reference)
        findings = []
        for finding in agreement(setting, options.block_size, backends or None):
            findings.append(finding)
            doing(f"{len(findings)} checks done, the last: {finding.name}")
    agrees = not any(finding.wrong for finding in findings)
    if options.as_json:
        print_json({"agrees": agrees, "mask": expression, "against": against, "findings": [asdict(one) for one in findings]})
    else:
        _report(findings)
    return int(not agrees)


def _report(findings: list[Finding]) -> None:
    """Prints a table of findings, and a picture of the first one that is wrong."""
    rows = [
        (finding.name, Cell("differs", "red", bold=True) if finding.wrong else Cell("ok", "green"), finding.text)
        for finding in findings
    ]
    print_table(rows, ["check", "", "result"])
    drawn = next((finding for finding in findings if finding.wrong and finding.picture), None)
    if drawn is not None:
        echo(f"\n{drawn.name}:\n{drawn.picture}")


@click.command()
@inputs.expression_argument("expressions", "EXPR...", nargs=-1, required=True)
@click.option("--ranks", type=Count(min=1), required=True, metavar="N", help="Number of processes.")
@click.option(
    "--balance",
    type=click.Choice(["work", "head_tail", "contiguous"]),
    default="work",
    help="How the tokens are distributed. [default: work]",
)
@inputs.lowering_options
@inputs.block_size_option("128")
@inputs.json_option("an object with a list of ranks")
def shard(expressions: tuple[str, ...], ranks: int, balance: Balance, options: LoweringOptions) -> None:
    """Plan context parallelism for a model whose layers have the masks EXPR.

    EXPR may be MODULE:NAME of a mask or mask_mod function; each is the mask of one layer, and may be repeated. Prints for each
    rank its tokens, in how many runs they lie, its work relative to the mean, and the keys that it receives and sends in
    all layers. A key and its value are 2 * kv_heads * d_head * itemsize * batch bytes. Masks without data have no length of
    their own: give --seq-len.

    \b
    Examples:
      flexmask shard "causal & document(lengths=[4000, 90, 6000, 2294])" --ranks 4
      flexmask shard causal "sliding_window(size=1024)" --seq-len 65536 --ranks 8
      flexmask shard causal --seq-len 1000000 --ranks 64 --balance contiguous --json
    """
    with block_progress("planning"):
        from flexmask.distributed.sharding import shard_sequence
        from flexmask.report.lengths import implied_lengths

        masks = options.masks(*expressions)
        given = (options.seq_len, options.q_len, options.kv_len)
        if given == (None, None, None) and not implied_lengths(*masks):  # the default of other commands is for pictures
            raise UserError("the masks have no data that determines the length of the sequence: give --seq-len")
        lowering = options.lowering(*masks)
        if lowering["q_len"] != lowering["kv_len"] or lowering["q_offset"]:
            raise UserError(
                f"a sequence attends to itself: give --seq-len, not {lowering['q_len']:,} queries from position "
                f"{lowering['q_offset']:,} and {lowering['kv_len']:,} keys"
            )
        sizes = {"batch": options.batch, "heads": options.heads}
        found = shard_sequence(masks, lowering["q_len"], ranks, balance=balance, block_size=options.block_size, **sizes)
    if not options.as_json:
        echo(str(found))
        return
    columns = {name: getattr(found, name).tolist() for name in ("tokens", "work", "visible", "received", "sent")}
    print_json(
        {
            "seq_len": found.seq_len,
            "balance": balance,
            "imbalance": found.imbalance,
            "received_fraction": found.received_fraction,
            "ranks": [
                {"runs": found.runs(rank).tolist()} | {name: values[rank] for name, values in columns.items()}
                for rank in range(ranks)
            ],
        }
    )
