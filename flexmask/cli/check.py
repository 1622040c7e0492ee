"""``flexmask check``: whether all that a mask lowers to agrees, with each other or with another mask."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import click

from flexmask.cli.inputs import REFERENCE, BlockSize, lengths_of, mask_options, read_mask
from flexmask.cli.messages import print_plainly

if TYPE_CHECKING:
    from collections.abc import Iterable

    from flexmask.testing.findings import Finding
    from flexmask.testing.settings import Reference

__all__ = ["check"]

Parameters = tuple[tuple[str, object], ...]


@click.command()
@mask_options
@click.option(
    "--against",
    metavar="EXPR|MODULE:NAME",
    help="What the mask should be: another mask, or a mask_mod function, which is called.",
)
@click.option("--device", default="cpu", metavar="DEVICE", help="Where all is done. [default: cpu]")
@click.option("--batch", type=int, metavar="N", help="Number of sequences, where the mask's data does not say it.")
@click.option("--heads", type=int, metavar="N", help="Number of heads, where the mask's data does not say it.")
@click.option("--block-size", type=BlockSize(), default="8", metavar="N|Q,KV", help="Tokens in a block. [default: 8]")
@click.option(
    "--backend",
    "backends",
    multiple=True,
    type=click.Choice(["sdpa", "flex"]),
    help="Backend of attention to check, repeatable. [default: sdpa, on CUDA also flex]",
)
@click.pass_context
def check(
    ctx: click.Context,
    expression: str,
    seq_len: int | None,
    q_len: int | None,
    kv_len: int | None,
    q_offset: int,
    parameters: Parameters,
    against: str | None,
    device: str,
    batch: int | None,
    heads: int | None,
    block_size: tuple[int, int],
    backends: tuple[str, ...],
) -> None:
    """Check that all that the mask EXPR lowers to agrees.

    Its dense form, rows, mask_mod, BlockMask and figures are held against each other, and attention with its gradients
    against dense masked softmax in float64. With --against they are held against another mask, or against a function
    (b, h, q_idx, kv_idx) in a module. EXPR may be MODULE:NAME too. Parameters count for both.

    Exits with 0 where all agree, with 1 where something differs, and with 2 for bad input.

    \b
    Examples:
      flexmask check "causal & document(lengths=[40, 60])"
      flexmask check "sliding_window(size=4)" --against "causal & (q - kv < 4)" --seq-len 32
      flexmask check "causal & key_padding(n)" --against "causal - (kv >= 5)" -p n=5
    """
    own, its = _shared(parameters, expression, against)
    mask = read_mask(expression, own)
    reference = None if against is None else _reference(against, its)
    queries, keys = lengths_of(mask, seq_len, q_len, kv_len)
    from flexmask import devices
    from flexmask.testing.equivalence import agreement
    from flexmask.testing.settings import setting_of

    where = devices.found(device)
    setting = setting_of(mask, queries, keys, batch=batch, heads=heads, q_offset=q_offset, device=where, reference=reference)
    if not _report(agreement(setting, reference, block_size, backends or None)):  # type: ignore[arg-type]
        ctx.exit(1)


def _shared(parameters: Parameters, expression: str, against: str | None) -> tuple[Parameters, Parameters]:
    """The parameters of each of the two masks; one that neither has goes to the first, which refuses it."""
    if against is None or REFERENCE.fullmatch(against.strip()):
        return parameters, ()
    theirs, ours = (set(re.findall(r"[A-Za-z_]\w*", text)) for text in (against, expression))
    its = tuple(pair for pair in parameters if pair[0] in theirs)
    return tuple(pair for pair in parameters if pair[0] in ours or pair[0] not in theirs), its


def _reference(against: str, parameters: Parameters) -> Reference:
    if not REFERENCE.fullmatch(against.strip()):
        return read_mask(against, parameters)
    from flexmask.cli.references import referred

    return referred(against.strip())


def _report(findings: Iterable[Finding]) -> bool:
    """Prints a table of findings and where the first that is wrong is; whether none is."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("check", "", "result"):
        table.add_column(column)
    wrong = []
    for finding in findings:
        verdict = Text("differs", "bold red") if finding.wrong else Text("ok", "green")
        table.add_row(Text(finding.name), verdict, Text(finding.text))
        wrong += [finding] if finding.wrong else []
    console = Console()
    print_plainly(console, table)
    drawn = next((finding for finding in wrong if finding.picture), None)
    if drawn is not None:
        console.print(Text(f"\n{drawn.name}:\n{drawn.picture}"))
    return not wrong
