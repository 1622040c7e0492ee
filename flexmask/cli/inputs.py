"""Values of options, and the options that the commands share.

Values are a parameter with its value, the size of a block, a cell, and masks in modules, with their completion in the shell.
Options are the mask's text, its parameters, the lengths and sizes of the lowering, and files.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from functools import reduce, wraps
from importlib import import_module
from inspect import isfunction, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click
from click.shell_completion import CompletionItem

from flexmask import registry
from flexmask._checks import misfit, nearest, signature_of
from flexmask.cli.output import UserError, echo, to_stderr
from flexmask.errors import FlexmaskError
from flexmask.expr.mask import Mask
from flexmask.expr.names import NAMES, call_hint
from flexmask.parser import parse
from flexmask.plotting.caption import picture_suffix

if TYPE_CHECKING:
    from flexmask.plotting.sheet import Indices

# ---------------------------------------------------------------- values


class Count(click.IntRange):
    """A whole number within limits."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            int(value)
        except ValueError:
            self.fail(f"{_short(value)} is not a whole number: write all its digits, e.g. 65536 for 64k", param, ctx)
        return super().convert(value, param, ctx)


def parameter(given: str) -> tuple[str, object]:
    """``name=VALUE``, where VALUE is an integer, a list, or @FILE with either of them in it."""
    name, equals, text = given.partition("=")
    name = name.strip()
    if not equals or not name.isidentifier():
        raise click.BadParameter(f"{_short(given)} is not of the form name=VALUE, e.g. ids=[0,0,1,1] or ids=@FILE")
    text = _read_text(text.strip(), f"{name}: ")
    found = _value(text.strip())
    if not isinstance(found, int | float | list):
        raise click.BadParameter(f"{name}: {_short(text)} is neither a number nor a list of integers or truth values")
    return name, found


def block_size(given: str) -> tuple[int, int]:
    """``N`` or ``Q,KV``: tokens in a block."""
    sizes = [int(part) if part.strip().isdecimal() else 0 for part in given.split(",")]
    if len(sizes) > 2 or min(sizes) < 1:
        raise click.BadParameter(f"{given!r} is neither a positive number nor two of them, Q,KV")
    return sizes[0], sizes[-1]


def place(given: str) -> tuple[int, ...]:
    """``Q,KV`` or ``B,H,Q,KV``: a cell."""
    parts = [part.strip() for part in given.split(",")]
    if len(parts) not in (2, 4) or not all(part.isdecimal() for part in parts):
        raise click.BadParameter(f"{given!r} is neither Q,KV nor B,H,Q,KV, numbers from 0 on")
    return tuple(map(int, parts))


def index_list(given: str) -> Indices:
    """``I``, ``I,J`` or ``all``: which sequences or heads."""
    text = given.strip()
    if text == "all":
        return "all"
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise click.BadParameter(f"{text!r} is neither an index from 0, nor several of them, I,J, nor all")
    return int(parts[0]) if len(parts) == 1 else [int(part) for part in parts]


def token_text(given: str) -> list[str]:
    """A text of which each word is a token, a JSON list of tokens, or ``@FILE`` with either of them in it."""
    text = _read_text(given)
    if not text.strip():
        raise click.BadParameter("it has no token")
    try:
        found = json.loads(text) if text.lstrip().startswith("[") else None
    except ValueError:  # a text that begins with a token such as [CLS]
        found = None
    return found if isinstance(found, list) and all(isinstance(token, str) for token in found) else text.split()


def backend(given: str) -> str:
    """The name of a registered backend. The registry is read when a name is given: its import takes torch's time."""
    from flexmask.backends import backend_names

    return click.Choice(backend_names()).convert(given, None, None)


def complete_backend(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The registered backends that start with ``incomplete``."""
    from flexmask.backends import backend_names

    return click.Choice(backend_names()).shell_complete(ctx, param, incomplete)


def _read_text(text: str, before: str = "") -> str:
    """The text, or for ``@FILE`` the content of the file; the message where it cannot be read begins with ``before``."""
    if not text.startswith("@"):
        return text
    path = Path(text[1:])
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not a text file"
        raise click.BadParameter(f"{before}cannot read {str(path)!r}: {reason}") from error


def _value(text: str) -> object:
    """The value of a text: JSON, which is fast for long lists, or a Python literal."""
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


#: The name at the end of an expression, and the text before it. A name does not follow a dot, a digit or a quote.
LAST = re.compile(r"(?:(.*)(?<![\w.'\":]))?([A-Za-z_]\w*)", re.DOTALL)


def complete_name(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The named masks that start with ``incomplete``."""
    return [CompletionItem(name, help=signature_of(NAMES[name])) for name in known_names() if name.startswith(incomplete)]


def complete_expression(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The expression with its last name completed; every name after an operator; nothing for ``module:name``."""
    found = LAST.fullmatch(incomplete)
    if found is not None:
        before, begun = found[1] or "", found[2]
    elif not incomplete or incomplete.rstrip()[-1:] in set("&|^-~(,["):
        before, begun = incomplete, ""
    else:
        return []
    return [CompletionItem(before + item.value, help=item.help) for item in complete_name(ctx, param, begun)]


def known_names() -> list[str]:
    """The registered names, without warnings about plugins."""
    with suppress(FlexmaskError), warnings.catch_warnings(), to_stderr():
        warnings.simplefilter("ignore")
        registry.load()
    return sorted(NAMES)


def resolve_mask(reference: str) -> Mask:
    """The mask of ``module:name``, which is a mask, its text, a ``mask_mod``, or a function without arguments that gives one.

    Raises:
        UserError: there is no such module or name, or the module or function raises.
        FlexmaskError: it is not a mask, a text or a ``mask_mod``.
    """
    found = resolve_reference(reference)
    from flexmask.tracing.trace import as_mask

    try:
        return as_mask(found() if _makes_a_mask(found, reference) else found, reference)
    except (FlexmaskError, UserError):
        raise
    except Exception as error:  # a user's function may raise anything
        raise UserError(f"{reference} fails: {type(error).__name__}: {error}") from error


def _makes_a_mask(found: Any, reference: str) -> bool:
    """Whether a function is called without arguments, as it does not take those of a ``mask_mod``.

    Raises:
        UserError: a function takes neither.
    """
    if not isfunction(found) or call_hint(found):
        return False
    cell, nothing = (not misfit(found, range(count), {}) for count in (4, 0))
    if not cell and not nothing:
        takes = f"{found.__name__}{signature(found)}"
        raise UserError(
            f"{reference} is {takes}, which is neither a mask_mod(b, h, q_idx, kv_idx) nor a function without arguments that "
            "gives a mask; give the name of a mask that it makes"
        )
    return nothing and not cell


def resolve_reference(reference: str) -> Any:
    """The object that ``module:name`` refers to.

    Raises:
        UserError: there is no such module or name, or the module raises.
    """
    module_name, _, names = reference.partition(":")
    try:
        found: Any = import_module(module_name)
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        reason = error if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
        raise UserError(f"cannot import {module_name}: {reason}") from error
    for name in names.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            raise UserError(f"{module_name} has no {names}.{nearest(name, dir(found))}") from None
        except Exception as error:  # as above
            raise UserError(f"cannot read {name} of {reference}: {type(error).__name__}: {error}") from error
    return found


# ---------------------------------------------------------------- options


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
