"""Options that the commands share: the mask's text, its parameters, the lengths and sizes of the lowering, and files."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import reduce, wraps
from pathlib import Path
from typing import Any, TypeVar, cast

import click

from flexmask.cli.output import UserError, echo
from flexmask.cli.values import Count, block_size, complete_expression, parameter, resolve_mask
from flexmask.expr.mask import Mask
from flexmask.parser import parse
from flexmask.plotting.caption import picture_suffix

#: A function or a mask in a module, as entry points are written.
REFERENCE = re.compile(r"[A-Za-z_]\w*(\.\w+)*:[A-Za-z_]\w*(\.\w+)*")

Command = TypeVar("Command", bound=Callable[..., Any])

#: The most queries over all sequences and heads: their rows take about 6 GB.
MAX_QUERIES = 2**27
#: The greatest position of the first query.
MAX_OFFSET = 2**30


@dataclass(frozen=True)
class LengthOptions:
    """The values of the options of :data:`length_options`."""

    seq_len: int | None
    q_len: int | None
    kv_len: int | None
    q_offset: int
    parameters: tuple[tuple[str, object], ...]

    def masks(self, *texts: str) -> list[Mask]:
        """The masks of texts, or of functions in modules, with their parameters bound.

        Raises:
            FlexmaskError: text that is not a mask, a function that cannot be traced, a value that does not fit, or a value for a
                parameter that no mask has.
            UserError: a parameter without a value or with two, or a function that does not exist.
        """
        names = [name for name, _ in self.parameters]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise UserError(f"the parameter {twice[0]} is given twice")
        masks = [resolve_mask(text.strip()) if REFERENCE.fullmatch(text.strip()) else None for text in texts]
        known = [
            set(re.findall(r"[^\W\d]\w*", text)) if mask is None else set(mask.params)
            for text, mask in zip(texts, masks, strict=True)
        ]
        # A parameter that no mask has goes to the first mask, which raises.
        known[0] |= set(names).difference(*known)
        return [
            _bound(text, mask, {name: value for name, value in self.parameters if name in own})
            for text, mask, own in zip(texts, masks, known, strict=True)
        ]

    def lengths(self, *masks: Mask) -> tuple[int, int]:
        """The lengths as given, else as the masks imply: see :func:`flexmask.report.lengths.resolve_lengths`.

        Raises:
            UsageError: ``seq_len`` together with another length.
            UserError: lengths whose rows do not fit into memory.
        """
        if self.seq_len is not None and (self.q_len is not None or self.kv_len is not None):
            raise click.UsageError("give --seq-len, or --q-len and --kv-len, not both")
        q_len, kv_len = (self.seq_len if length is None else length for length in (self.q_len, self.kv_len))
        from flexmask.report.lengths import resolve_lengths

        found = resolve_lengths(*masks, q_len=q_len, kv_len=kv_len)
        for name, length in zip(("q_len", "kv_len"), found, strict=True):
            if length > MAX_QUERIES:
                raise UserError(f"{name} {length:,} is too long; at most {MAX_QUERIES:,}")
        return found


@dataclass(frozen=True)
class LoweringOptions(LengthOptions):
    """The values of the options of :data:`lowering_options`, and of ``--json`` and ``--block-size`` where a command has it."""

    batch: int | None
    heads: int | None
    device: str
    as_json: bool
    block_size: tuple[int, int] = (128, 128)

    def masks(self, *texts: str) -> list[Mask]:
        """The masks of texts, with their data on the device."""
        return [mask.to(self.device) for mask in super().masks(*texts)]

    def lowering(self, *masks: Mask) -> dict[str, Any]:
        """The arguments of lowerings that the masks share.

        Raises:
            UsageError: contradicting options of lengths.
            UserError: more rows than fit into memory.
        """
        q_len, kv_len = self.lengths(*masks)
        symbols = {symbol for mask in masks for symbol in mask.expand().symbols}
        rows = q_len * ((self.batch or 1) if "b" in symbols else 1) * ((self.heads or 1) if "h" in symbols else 1)
        if rows > MAX_QUERIES:
            raise UserError(f"{rows:,} queries in all sequences and heads are too many; at most {MAX_QUERIES:,}")
        sizes = {"batch": self.batch, "heads": self.heads, "q_offset": self.q_offset, "device": self.device}
        return {"q_len": q_len, "kv_len": kv_len, **sizes}


def _bound(text: str, mask: Mask | None, values: dict[str, object]) -> Mask:
    bound = parse(text, **values) if mask is None else mask.bind(**values)
    if bound.params:
        missing = " ".join(f"-p '{name}=...'" for name in bound.params)
        plural = "values for the parameters" if len(bound.params) > 1 else "a value for the parameter"
        raise UserError(
            f"the mask needs {plural} {', '.join(bound.params)}: add {missing} with a number, a list such as [0,0,1,1], "
            "or @FILE with one of these"
        )
    return bound


def expression_argument(name: str, metavar: str, **settings: Any) -> Callable[[Command], Command]:
    """Adds the text of a mask, or MODULE:NAME."""
    return click.argument(name, metavar=metavar, shell_complete=complete_expression, **settings)


def block_size_option(default: str) -> Callable[[Command], Command]:
    """Adds ``--block-size``."""
    text = f"Tokens in a block. [default: {default}]"
    return click.option("--block-size", type=block_size, default=default, metavar="N|Q,KV", help=text)


def json_option(what: str) -> Callable[[Command], Command]:
    """Adds ``--json``; ``what`` describes the document in its help text."""
    return click.option("--json", "as_json", is_flag=True, help=f"Print one JSON document instead: {what}.")


def _collected(kind: type[LengthOptions], *options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Adds options to a command in this order, which takes their values as one argument, ``options``."""

    def add(command: Command) -> Command:
        @wraps(command)
        def collected(**values: Any) -> Any:
            given = kind(**{field.name: values.pop(field.name) for field in fields(kind) if field.name in values})
            return command(options=given, **values)

        return reduce(lambda found, option: option(found), reversed(options), cast(Command, collected))

    return add


#: The parameters and lengths of a mask.
LENGTHS: list[Any] = [
    click.option("--seq-len", type=Count(min=1), metavar="N", help="Number of queries and of keys. [default: from the data]"),
    click.option("--q-len", type=Count(min=1), metavar="N", help="Number of queries."),
    click.option("--kv-len", type=Count(min=1), metavar="N", help="Number of keys."),
    click.option(
        "--q-offset", type=Count(0, MAX_OFFSET), default=0, metavar="N", help="Position of the first query. [default: 0]"
    ),
    click.option(
        "-p",
        "--param",
        "parameters",
        type=parameter,
        multiple=True,
        metavar="NAME=VALUE",
        help="Value of a parameter: a number, a list such as [0,0,1,1], or @FILE with one of these. Repeatable.",
    ),
]
#: Adds parameters and lengths, which the command takes as ``options``.
length_options = _collected(LengthOptions, *LENGTHS)
#: Adds parameters and the arguments of lowerings, which the command takes as ``options``.
lowering_options = _collected(
    LoweringOptions,
    *LENGTHS,
    click.option(
        "--batch", type=Count(min=1), metavar="N", help="Number of sequences, if the mask's data does not determine it."
    ),
    click.option("--heads", type=Count(min=1), metavar="N", help="Number of heads, if the mask's data does not determine it."),
    click.option("--device", default="cpu", metavar="DEVICE", help="The device of the lowering. [default: cpu]"),
)


def output_option(instead: str) -> Callable[[Command], Command]:
    """Adds ``-o``; ``instead`` completes its help text."""
    return click.option(
        "-o",
        "--output",
        type=click.Path(path_type=Path, dir_okay=False),
        callback=_output,
        metavar="FILE",
        help=f"Write a .png, .svg, .pdf or interactive .html {instead}.",
    )


def _output(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
    """Checks the output file before any work is done."""
    if value is not None:
        picture_suffix(value)
    return value


@contextmanager
def writing(output: Path, what: str | None = None) -> Iterator[None]:
    """Reports that a file was written, or ``what``, or why it cannot be."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write {str(error.filename or output)!r}: {error.strerror or error}") from error
    echo(f"wrote {what or output}", err=True)
