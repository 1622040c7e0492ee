"""``flexmask list``: all named masks, or the documentation of one."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Any

import click

from flexmask import registry
from flexmask._checks import nearest, signature_of
from flexmask.cli.completion import complete_name
from flexmask.cli.inputs import json_option
from flexmask.cli.messages import UserError
from flexmask.cli.output import Cell, Row, echo, heading, print_json, print_table, to_stderr
from flexmask.expr.names import NAMES

__all__ = ["list_masks"]

#: A reference as documentation has it, such as :func:`flexmask.causal`.
ROLE = re.compile(r":\w+:`~?(?:flexmask\.)?([^`]*)`")


@click.command("list")
@click.argument("name", required=False, shell_complete=complete_name)
@json_option("a list of objects with name, signature, predicate, family, package and version; with NAME one, and its description")
def list_masks(name: str | None, as_json: bool) -> None:
    """List the named masks, or describe the one called NAME.

    Prints each with its parameters and its predicate: query `q` attends to key `kv` where it is true. Masks are grouped by
    family and package. With NAME, prints the whole documentation with a picture.

    \b
    Examples:
      flexmask list
      flexmask list sliding_window
      flexmask list --json
    """
    with to_stderr():  # plugins may print while they are imported
        names = registry.names() if name is None else []
        define = None if name is None else registry.find(name)
    if name is None:
        if as_json:
            print_json([_entry(each) for each in names])
        else:
            print_table(_rows(names), heading("mask", "q attends to kv where"))
        return
    if define is None:
        raise UserError(f"there is no named mask {name}.{nearest(name, registry.names())} `flexmask list` shows all")
    if as_json:
        print_json(_entry(name) | {"description": _document(define)})
    else:
        echo(_description(name, define))


def _entry(name: str) -> dict[str, str | None]:
    """The JSON document of a mask."""
    define, origin = NAMES[name], registry.origin(name)
    return {
        "name": name,
        "signature": f"{name}{signature_of(define)}",
        "predicate": _predicate(define),
        "family": origin.family,
        "package": origin.package,
        "version": origin.version,
    }


def _rows(names: Iterable[str]) -> list[Row]:
    """A row for each mask under a row for each family: flexmask's own families, then those of plugins."""

    def place(name: str) -> tuple[bool, str, str]:
        origin = registry.origin(name)
        return origin.package != registry.OWN, origin.package, origin.family

    rows: list[Row] = []
    for (_, package, family), members in groupby(sorted(names, key=place), key=place):
        rows += [("",), (Cell(family, "cyan", bold=True), Cell(f"package {package}", "cyan"))]
        rows += [(f"  {name}{signature_of(NAMES[name])}", _predicate(NAMES[name])) for name in members]
    return rows


def _predicate(define: Callable[..., Any]) -> str:
    """The ``Predicate:`` paragraph of a mask's docstring, else its first paragraph."""
    document = inspect.getdoc(define) or ""
    found = re.search(r"^Predicate:\s*(.+?)(?:\n\s*\n|\Z)", document, re.DOTALL | re.MULTILINE)
    text = found[1] if found else document.split("\n\n")[0]
    return " ".join(ROLE.sub(r"\1", text).replace("``", "").split())


def _document(define: Callable[..., Any]) -> str:
    return ROLE.sub(r"`\1`", inspect.getdoc(define) or "It has no description.")


def _description(name: str, define: Callable[..., Any]) -> str:
    origin = registry.origin(name)
    version = f" {origin.version}" if origin.version else ""
    return f"{name}{signature_of(define)}\n\n{_document(define)}\n\nFamily {origin.family}, package {origin.package}{version}"
