"""Values of options: a parameter with its value, and the size of a block."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import click

__all__ = ["BlockSize", "Parameter"]


class Parameter(click.ParamType):  # type: ignore[type-arg]  # generic only in the newest releases of click
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


class BlockSize(click.ParamType):  # type: ignore[type-arg]  # likewise
    """``N`` or ``Q,KV``: tokens in a block."""

    name = "n|q,kv"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        sizes = [int(part) if part.strip().isdecimal() else 0 for part in str(value).split(",")]
        if len(sizes) > 2 or min(sizes) < 1:
            self.fail(f"{value!r} is neither a positive number nor two of them, Q,KV", param, ctx)
        return sizes[0], sizes[-1]


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
