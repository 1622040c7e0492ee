"""Options that the commands share: the mask's text, its parameters, and the lengths and sizes of the lowering."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, cast

import click

from flexmask.cli.completion import complete_expression
from flexmask.cli.messages import UserError
from flexmask.cli.output import to_stderr
from flexmask.cli.values import BlockSize, Count, Parameter

if TYPE_CHECKING:
    from flexmask.expr.mask import Mask

#: A function or a mask in a module, as entry points are written.
REFERENCE = re.compile(r"[A-Za-z_]\w*(\.\w+)*:[A-Za-z_]\w*(\.\w+)*")

Command = TypeVar("Command", bound=Callable[..., Any])
Parameters = tuple[tuple[str, object], ...]

#: The most queries over all sequences and heads: their rows take about 6 GB.
MAX_QUERIES = 2**27
#: The greatest position of the first query.
MAX_OFFSET = 2**30


class Lowering(TypedDict):
    """The arguments of a lowering."""

    q_len: int
    kv_len: int
    batch: int | None
    heads: int | None
    q_offset: int
    device: str


@dataclass(frozen=True)
class LoweringOptions:
    """The values of the options of :func:`lowering_options`."""

    seq_len: int | None
    q_len: int | None
    kv_len: int | None
    q_offset: int
    parameters: Parameters
    batch: int | None
    heads: int | None
    device: str

    def masks(self, *texts: str) -> list[Mask]:
        """The masks of texts, as for :func:`read_masks`, with their data on the device."""
        from flexmask import _sync

        where = _sync.resolve_device(self.device)
        return [mask.to(where) for mask in read_masks(texts, self.parameters)]

    def lowering(self, *masks: Mask) -> Lowering:
        """The arguments of lowerings that the masks share.

        Raises:
            UsageError: contradicting options of lengths.
            UserError: more rows than fit into memory.
        """
        q_len, kv_len = checked_lengths(*masks, seq_len=self.seq_len, q_len=self.q_len, kv_len=self.kv_len)
        symbols = {symbol for mask in masks for symbol in mask.expand().symbols}
        rows = q_len * ((self.batch or 1) if "b" in symbols else 1) * ((self.heads or 1) if "h" in symbols else 1)
        if rows > MAX_QUERIES:
            raise UserError(f"{rows:,} queries in all sequences and heads are too many; at most {MAX_QUERIES:,}")
        return Lowering(
            q_len=q_len, kv_len=kv_len, batch=self.batch, heads=self.heads, q_offset=self.q_offset, device=self.device
        )


def expression_argument(name: str, metavar: str, **settings: Any) -> Callable[[Command], Command]:
    """Adds the text of a mask, or MODULE:NAME."""
    return click.argument(name, metavar=metavar, shell_complete=complete_expression, **settings)


def block_size_option(default: str) -> Callable[[Command], Command]:
    """Adds ``--block-size``."""
    text = f"Tokens in a block. [default: {default}]"
    return click.option("--block-size", type=BlockSize(), default=default, metavar="N|Q,KV", help=text)


def json_option(what: str) -> Callable[[Command], Command]:
    """Adds ``--json``; ``what`` describes the document in its help text."""
    return click.option("--json", "as_json", is_flag=True, help=f"Print one JSON document instead: {what}.")


def mask_options(command: Command) -> Command:
    """Adds the text of one mask, its parameters and its lengths."""
    return expression_argument("expression", "EXPR")(_length_options(command))


def lowering_options(command: Command) -> Command:
    """Adds parameters and the arguments of lowerings, which the command takes as ``options``."""
    options = [
        click.option(
            "--batch",
            type=Count(min=1),
            metavar="N",
            help="Number of sequences, if the mask's data does not determine it.",
        ),
        click.option(
            "--heads", type=Count(min=1), metavar="N", help="Number of heads, if the mask's data does not determine it."
        ),
        click.option("--device", default="cpu", metavar="DEVICE", help="The device of the lowering. [default: cpu]"),
    ]

    @wraps(command)
    def collected(**values: Any) -> Any:
        options = LoweringOptions(**{name: values.pop(name) for name in LoweringOptions.__dataclass_fields__})
        return command(options=options, **values)

    for option in reversed(options):
        collected = option(collected)
    return cast(Command, _length_options(collected))


def _length_options(command: Command) -> Command:
    length = Count(min=1)
    options = [
        click.option("--seq-len", type=length, metavar="N", help="Number of queries and of keys. [default: from the data]"),
        click.option("--q-len", type=length, metavar="N", help="Number of queries."),
        click.option("--kv-len", type=length, metavar="N", help="Number of keys."),
        click.option(
            "--q-offset",
            type=Count(0, MAX_OFFSET),
            default=0,
            metavar="N",
            help="Position of the first query. [default: 0]",
        ),
        click.option(
            "-p",
            "--param",
            "parameters",
            type=Parameter(),
            multiple=True,
            metavar="NAME=VALUE",
            help="Value of a parameter: a number, a list such as [0,0,1,1], or @FILE with one of these. Repeatable.",
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def read_mask(expression: str, parameters: Parameters) -> Mask:
    """The mask of one text: see :func:`read_masks`. Output of user modules goes to stderr."""
    with to_stderr():
        return read_masks([expression], parameters)[0]


def read_masks(texts: Sequence[str], parameters: Parameters) -> list[Mask]:
    """The masks of texts, or of functions in modules, with their parameters bound.

    Raises:
        FlexmaskError: text that is not a mask, a function that cannot be traced, a value that does not fit, or a value for a
            parameter that no mask has.
        UserError: a parameter without a value or with two, or a function that does not exist.
    """
    names = [name for name, _ in parameters]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UserError(f"the parameter {twice[0]} is given twice")
    masks = [_resolve(text.strip()) if REFERENCE.fullmatch(text.strip()) else None for text in texts]
    known = [
        set(re.findall(r"[^\W\d]\w*", text)) if mask is None else set(mask.params)
        for text, mask in zip(texts, masks, strict=True)
    ]
    # A parameter that no mask has goes to the first mask, which raises.
    known[0] |= set(names).difference(*known)
    return [
        _bound(text, mask, {name: value for name, value in parameters if name in own})
        for text, mask, own in zip(texts, masks, known, strict=True)
    ]


def _resolve(reference: str) -> Mask:
    from flexmask.cli.references import resolve_mask

    return resolve_mask(reference)


def _bound(text: str, mask: Mask | None, values: dict[str, object]) -> Mask:
    if mask is None:
        from flexmask.parser import parse

        bound = parse(text, **values)
    else:
        bound = mask.bind(**values)
    if bound.params:
        missing = " ".join(f"-p '{name}=...'" for name in bound.params)
        plural = "values for the parameters" if len(bound.params) > 1 else "a value for the parameter"
        raise UserError(
            f"the mask needs {plural} {', '.join(bound.params)}: add {missing} with a number, a list such as [0,0,1,1], "
            "or @FILE with one of these"
        )
    return bound


def checked_lengths(*masks: Mask, seq_len: int | None, q_len: int | None, kv_len: int | None) -> tuple[int, int]:
    """As :func:`flexmask.report.lengths.resolve_lengths`, of the options for lengths.

    Raises:
        UsageError: ``seq_len`` together with another length.
        UserError: lengths whose rows do not fit into memory.
    """
    if seq_len is not None:
        if q_len is not None or kv_len is not None:
            raise click.UsageError("give --seq-len, or --q-len and --kv-len, not both")
        q_len = kv_len = seq_len
    from flexmask.report.lengths import resolve_lengths

    found = resolve_lengths(*masks, q_len=q_len, kv_len=kv_len)
    for name, length in zip(("q_len", "kv_len"), found, strict=True):
        if length > MAX_QUERIES:
            raise UserError(f"{name} {length:,} is too long; at most {MAX_QUERIES:,}")
    return found
