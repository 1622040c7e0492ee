"""Values of options: a parameter with its value, the size of a block, a cell, masks in modules, and completion in the shell."""

from __future__ import annotations

import ast
import json
import re
import warnings
from contextlib import suppress
from importlib import import_module
from inspect import isfunction, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from flexmask import registry
from flexmask._checks import misfit, nearest, signature_of
from flexmask.cli.output import UserError, to_stderr
from flexmask.errors import FlexmaskError
from flexmask.expr.mask import Mask
from flexmask.expr.names import NAMES, call_hint

if TYPE_CHECKING:
    from flexmask.plotting.sheet import Indices


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
    from flexmask.tracing.as_mask import as_mask

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
