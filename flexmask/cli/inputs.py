"""What the commands share: the mask's text, its parameters, and the lengths it is lowered with."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from flexmask.cli.messages import Refused

if TYPE_CHECKING:
    from flexmask.algebra import Mask

__all__ = ["BlockSize", "REFERENCE", "lengths_of", "mask_options", "read_mask"]

#: A function or a mask in a module, as entry points are written.
REFERENCE = re.compile(r"[A-Za-z_]\w*(\.\w+)*:[A-Za-z_]\w*(\.\w+)*")

Command = TypeVar("Command", bound=Callable[..., Any])

#: The length that is drawn where neither the options nor the mask's data say one.
DEFAULT_LENGTH = 16


class Parameter(click.ParamType[tuple[str, object]]):
    """``name=VALUE``, where VALUE is an integer, a list, or @FILE with either of them in it."""

    name = "name=value"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, object]:
        name, equals, text = str(value).partition("=")
        name = name.strip()
        if not equals or not name.isidentifier():
            self.fail(f"{_short(value)} is not of the form name=VALUE, e.g. ids=[0,0,1,1] or ids=@FILE", param, ctx)
        if text.strip().startswith("@"):
            path = Path(text.strip()[1:])
            try:
                text = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                reason = getattr(error, "strerror", None) or "it is not a text file"
                self.fail(f"{name}: cannot read {str(path)!r}: {reason}", param, ctx)
        found = _value(text.strip())
        if not isinstance(found, int | float | list):
            self.fail(f"{name}: {_short(text)} is neither a number nor a list of integers or truth values", param, ctx)
        return name, found


class BlockSize(click.ParamType[tuple[int, int]]):
    """``N`` or ``Q,KV``: tokens in a block."""

    name = "n|q,kv"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        sizes = [int(part) if part.strip().isdecimal() else 0 for part in str(value).split(",")]
        if len(sizes) > 2 or min(sizes) < 1:
            self.fail(f"{value!r} is neither a positive number nor two of them, Q,KV", param, ctx)
        return sizes[0], sizes[-1]


def mask_options(command: Command) -> Command:
    """Adds the mask's text and all that says how it is lowered."""
    decorators = [
        click.argument("expression", metavar="EXPR"),
        click.option("--seq-len", type=int, metavar="N", help="Number of queries and of keys."),
        click.option("--q-len", type=int, metavar="N", help="Number of queries."),
        click.option("--kv-len", type=int, metavar="N", help="Number of keys."),
        click.option("--q-offset", type=int, default=0, metavar="N", help="Position of the first query. [default: 0]"),
        click.option(
            "-p",
            "--param",
            "parameters",
            type=Parameter(),
            multiple=True,
            metavar="NAME=VALUE",
            help="Value of a parameter: an integer, a list such as [0,0,1,1], or @FILE that holds one. Repeatable.",
        ),
    ]
    for decorator in reversed(decorators):
        command = decorator(command)
    return command


def read_mask(expression: str, parameters: tuple[tuple[str, object], ...]) -> Mask:
    """The mask of a text, or of a function in a module, with its parameters bound.

    Raises:
        FlexmaskError: text that is not a mask, a function that cannot be traced, or a value that does not fit.
        Refused: a parameter without a value or with two, or a function that is not there.
    """
    names = [name for name, _ in parameters]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise Refused(f"the parameter {twice[0]} is given twice")
    if REFERENCE.fullmatch(expression.strip()):
        from flexmask.cli.references import referred_mask

        bound = referred_mask(expression.strip()).bind(**dict(parameters))
    else:
        from flexmask.text import parse

        bound = parse(expression, **dict(parameters))
    if bound.params:
        missing = " ".join(f"-p '{name}=...'" for name in bound.params)
        plural = "values for the parameters" if len(bound.params) > 1 else "a value for the parameter"
        raise Refused(
            f"the mask needs {plural} {', '.join(bound.params)}: add {missing} with an integer, a list such as [0,0,1,1], "
            "or @FILE that holds one"
        )
    return bound


def lengths_of(mask: Mask, seq_len: int | None, q_len: int | None, kv_len: int | None) -> tuple[int, int]:
    """The numbers of queries and keys: as given, else as the mask's data says, else the other one, else 16."""
    if seq_len is not None:
        if q_len is not None or kv_len is not None:
            raise click.UsageError("give --seq-len, or --q-len and --kv-len, not both")
        return seq_len, seq_len
    if q_len is None or kv_len is None:
        from flexmask.cli.lengths import said_lengths

        said = said_lengths(mask)
        q_len = said.get("q") if q_len is None else q_len
        kv_len = said.get("kv") if kv_len is None else kv_len
    q_len = (DEFAULT_LENGTH if kv_len is None else kv_len) if q_len is None else q_len
    return q_len, q_len if kv_len is None else kv_len


def _value(text: str) -> object:
    """What a text says: JSON, which is fast for long lists, or a Python literal."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


def _short(value: object) -> str:
    text = str(value)
    return repr(text if len(text) <= 40 else f"{text[:40]}...")
