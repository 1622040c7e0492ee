"""``flexmask check``: compares the lowerings of a mask with each other, or with another mask."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from flexmask.cli.completion import complete_expression
from flexmask.cli.inputs import REFERENCE, LoweringOptions, block_size_option, expression_argument, json_option, lowering_options
from flexmask.cli.output import Cell, echo, heading, print_json, print_table
from flexmask.cli.progress import spinner

if TYPE_CHECKING:
    from collections.abc import Iterator

    from click.shell_completion import CompletionItem

    from flexmask.testing.findings import Finding
    from flexmask.testing.settings import Reference


class _BackendName(click.ParamType):  # type: ignore[type-arg]  # generic only in the newest releases of click
    """The name of a registered backend. The registry is read when a name is given: its import takes torch's time."""

    name = "backend"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return self._choice().convert(value, param, ctx)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return self._choice().shell_complete(ctx, param, incomplete)

    def _choice(self) -> click.Choice[str]:
        from flexmask.backends import backend_names

        return click.Choice(backend_names())


@click.command()
@expression_argument("expression", "EXPR")
@click.option(
    "--against",
    metavar="EXPR|MODULE:NAME",
    shell_complete=complete_expression,
    help="The expected mask: another mask, or a mask_mod function.",
)
@lowering_options
@block_size_option("8")
@click.option(
    "--backend",
    "backends",
    multiple=True,
    type=_BackendName(),
    help="Backend of attention to check, repeatable. [default: those with gradients: sdpa, on CUDA also flex]",
)
@json_option("agrees, the mask, against or null, and the findings, each with name, wrong, text and picture")
@click.pass_context
def check(
    ctx: click.Context,
    expression: str,
    against: str | None,
    options: LoweringOptions,
    block_size: tuple[int, int],
    backends: tuple[str, ...],
    as_json: bool,
) -> None:
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
        findings = []
        for finding in _findings(expression, against, options, block_size, backends):
            findings.append(finding)
            doing(f"{len(findings)} checks done, the last: {finding.name}")
    agrees = not any(finding.wrong for finding in findings)
    if as_json:
        said = [{"name": one.name, "wrong": one.wrong, "text": one.text, "picture": one.picture} for one in findings]
        print_json({"agrees": agrees, "mask": expression, "against": against, "findings": said})
    else:
        _report(findings)
    if not agrees:
        ctx.exit(1)


def _findings(
    expression: str, against: str | None, options: LoweringOptions, block_size: tuple[int, int], backends: tuple[str, ...]
) -> Iterator[Finding]:
    """The findings of the checks, one by one."""
    from flexmask.testing.equivalence import agreement
    from flexmask.testing.settings import make_setting

    reference: Reference | None = None
    if against is None:
        masks = options.masks(expression)
    elif REFERENCE.fullmatch(against.strip()):
        from flexmask.cli.references import resolve_reference

        masks, reference = options.masks(expression), resolve_reference(against.strip())
    else:
        masks = options.masks(expression, against)
        reference = masks[1]
    setting = make_setting(masks[0], **options.lowering(*masks), reference=reference)
    yield from agreement(setting, reference, block_size, backends or None)


def _report(findings: list[Finding]) -> None:
    """Prints a table of findings, and a picture of the first one that is wrong."""
    rows = [
        (finding.name, Cell("differs", "red", bold=True) if finding.wrong else Cell("ok", "green"), finding.text)
        for finding in findings
    ]
    print_table(rows, heading("check", "", "result"))
    drawn = next((finding for finding in findings if finding.wrong and finding.picture), None)
    if drawn is not None:
        echo(f"\n{drawn.name}:\n{drawn.picture}")
