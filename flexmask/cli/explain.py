"""``flexmask explain``: the meaning, the lowering and the cost of a mask."""

from __future__ import annotations

import click

from flexmask.cli.inputs import LoweringOptions, block_size_option, expression_argument, json_option, lowering_options
from flexmask.cli.messages import brief
from flexmask.cli.output import Cell, print_json, print_table
from flexmask.cli.progress import block_progress
from flexmask.cli.statistics import statistics
from flexmask.cli.values import Place


@click.command()
@expression_argument("expression", "EXPR")
@lowering_options
@block_size_option("128")
@click.option(
    "--cell", type=Place(), metavar="Q,KV|B,H,Q,KV", help="Also say which terms of the mask hide this cell, or show it."
)
@click.option("--kernel", is_flag=True, help="Also say what the kernels of attention do with the mask.")
@json_option("the attributes of flexmask.explain(), with all statistics under stats")
def explain(
    expression: str,
    options: LoweringOptions,
    block_size: tuple[int, int],
    cell: tuple[int, ...] | None,
    kernel: bool,
    as_json: bool,
) -> None:
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

        found = explained(mask, **options.lowering(mask), block_size=block_size, cell=cell, kernel=kernel)
    if as_json:
        leaves = [{"text": leaf.text, "kind": leaf.kind, "separable": leaf.separable} for leaf in found.leaves]
        plain = (
            "mask",
            "definition",
            "recognized",
            "exact",
            "intervals",
            "mean_intervals",
            "form",
            "open_blocks",
            "row_bytes",
            "dense_bytes",
        )
        document = {name: getattr(found, name) for name in plain} | {"leaves": leaves, "stats": statistics(found.stats)}
        if (reason := found.cell) is not None:
            document["cell"] = {**reason.cell._asdict(), "shown_by": reason.shown_by, "hidden_by": reason.hidden_by}
        if kernel:
            document["kernel"] = found.kernel
        print_json(document)
        return
    print_table([(Cell(label, bold=True), brief(text)) for label, text in found.lines()])
