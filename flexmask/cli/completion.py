"""Completion in the shell: the last name of an expression, from the named masks."""

from __future__ import annotations

import re
import warnings
from typing import TYPE_CHECKING

from click.shell_completion import CompletionItem

from flexmask import registry
from flexmask._checks import signature_of
from flexmask.cli.output import to_stderr
from flexmask.errors import FlexmaskError
from flexmask.expr.names import NAMES

if TYPE_CHECKING:
    import click

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
    with warnings.catch_warnings(), to_stderr():
        warnings.simplefilter("ignore")
        try:
            return registry.names()
        except FlexmaskError:
            return sorted(NAMES)
