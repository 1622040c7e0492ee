"""``flexmask list``: every named mask, or one of them with its whole description."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable
from itertools import groupby
from textwrap import fill
from typing import TYPE_CHECKING, Any

import click

from flexmask import registry
from flexmask.cli.messages import Refused, print_plainly
from flexmask.naming import NAMES, nearest, signature_of

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["list_masks"]

#: A reference as documentation has it, such as :func:`flexmask.causal`.
ROLE = re.compile(r":\w+:`~?(?:flexmask\.)?([^`]*)`")
#: Where the output cannot show the glyphs of a picture.
PLAIN = str.maketrans({"■": "#", "⬚": "."})


@click.command("list")
@click.argument("name", required=False)
def list_masks(name: str | None) -> None:
    """List the named masks, or describe the one called NAME.

    Each is shown with its parameters and with its predicate: which key `kv` a query `q` sees. They are grouped by family,
    beside the package that brings the family. NAME shows the whole description with a picture.

    \b
    Examples:
      flexmask list
      flexmask list sliding_window
    """
    if name is None:
        _print_table(registry.names())
        return
    define = registry.find(name)
    if define is None:
        raise Refused(f"there is no named mask {name}.{nearest(name, registry.names())} `flexmask list` shows all")
    click.echo(_printable(_description(name, define)))


def _print_table(names: Iterable[str]) -> None:
    from rich.console import Console

    console = Console()
    print_plainly(console, _table(names, console.width))


def _table(names: Iterable[str], width: int) -> Table:
    """A row for each mask under a row for each family: flexmask's own families, then those of plugins."""
    from rich.table import Table
    from rich.text import Text

    def place(name: str) -> tuple[bool, str, str]:
        origin = registry.origin(name)
        return origin.package != registry.OWN, origin.package, origin.family

    calls = {name: f"{name}{signature_of(NAMES[name])}" for name in names}
    left = min(max(map(len, calls.values())) + 2, max(24, width // 2 - 1))
    table = Table("mask", "a query sees a key where", box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for (_, package, family), members in groupby(sorted(calls, key=place), key=place):
        table.add_row("")
        table.add_row(Text(family, "bold cyan"), Text(f"package {package}", "cyan"))
        for name in members:
            call = fill(calls[name], left - 1, initial_indent="  ", subsequent_indent="      ")
            table.add_row(Text(call), Text(_predicate(NAMES[name])))  # as Text, so that brackets are no markup
    return table


def _predicate(define: Callable[..., Any]) -> str:
    """The ``Predicate:`` line of a mask's docstring, which may go on below; else its first line."""
    document = inspect.getdoc(define) or ""
    found = re.search(r"^Predicate:\s*(.+?)(?:\n\s*\n|\Z)", document, re.DOTALL | re.MULTILINE)
    text = found[1] if found else document.split("\n\n")[0]
    return " ".join(ROLE.sub(r"\1", text).replace("``", "").split())


def _description(name: str, define: Callable[..., Any]) -> str:
    origin = registry.origin(name)
    version = f" {origin.version}" if origin.version else ""
    document = inspect.getdoc(define) or "It has no description."
    document = ROLE.sub(r"`\1`", document)
    return f"{name}{signature_of(define)}\n\n{document}\n\nFamily {origin.family}, package {origin.package}{version}"


def _printable(text: str) -> str:
    encoding = sys.stdout.encoding or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.translate(PLAIN).encode(encoding, "replace").decode(encoding)
    return text
