"""``flexmask shard``: which rank holds which tokens under context parallelism, its work, and the keys that it exchanges."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from flexmask.cli.inputs import LoweringOptions, block_size_option, expression_argument, json_option, lowering_options
from flexmask.cli.messages import UserError
from flexmask.cli.output import echo, print_json
from flexmask.cli.progress import block_progress
from flexmask.cli.values import Count

if TYPE_CHECKING:
    from flexmask import Mask
    from flexmask.distributed.sharding import Balance


@click.command()
@expression_argument("expressions", "EXPR...", nargs=-1, required=True)
@click.option("--ranks", type=Count(min=1), required=True, metavar="N", help="Number of processes.")
@click.option(
    "--balance",
    type=click.Choice(["work", "head_tail", "contiguous"]),
    default="work",
    help="How the tokens are distributed. [default: work]",
)
@lowering_options
@block_size_option("128")
@json_option("an object with a list of ranks")
def shard(
    expressions: tuple[str, ...],
    ranks: int,
    balance: Balance,
    options: LoweringOptions,
    block_size: tuple[int, int],
    as_json: bool,
) -> None:
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
        masks = options.masks(*expressions)
        _require_length(masks, options)
        lowering: dict[str, Any] = {**options.lowering(*masks)}
        if lowering["q_len"] != lowering["kv_len"] or lowering["q_offset"]:
            raise UserError(
                f"a sequence attends to itself: give --seq-len, not {lowering['q_len']:,} queries from position "
                f"{lowering['q_offset']:,} and {lowering['kv_len']:,} keys"
            )
        from flexmask.distributed.sharding import shard_sequence

        sizes = {name: lowering[name] for name in ("batch", "heads")}
        found = shard_sequence(masks, lowering["q_len"], ranks, balance=balance, block_size=block_size, **sizes)
    if not as_json:
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


def _require_length(masks: list[Mask], options: LoweringOptions) -> None:
    """An error where no option and no mask determines the length; the default of other commands is for pictures."""
    from flexmask.report.lengths import implied_lengths

    if options.seq_len is None and options.q_len is None and options.kv_len is None and not implied_lengths(*masks):
        raise UserError("the masks have no data that determines the length of the sequence: give --seq-len")
