"""Values of options: a parameter with its value, the size of a block, and the place of a cell."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import click


class Count(click.IntRange):
    """A whole number within limits."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            int(value)
        except ValueError:
            self.fail(f"{_short(value)} is not a whole number: write all its digits, e.g. 65536 for 64k", param, ctx)
        return super().convert(value, param, ctx)


class Parameter(click.ParamType):  # type: ignore[type-arg]  # generic only in the newest releases of click
    """``name=VALUE``, where VALUE is an integer, a list, or @FILE with either of them in it."""

    name = "name=value"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, object]:
        name, equals, text = str(value).partition("=")
        name = name.strip()
        if not equals or not name.isidentifier():
            self.fail(f"{_short(value)} is not of the form name=VALUE, e.g. ids=[0,0,1,1] or ids=@FILE", param, ctx)
        text = read_text(text.strip(), lambda reason: self.fail(f"{name}: {reason}", param, ctx))
        found = _value(text.strip())
        if not isinstance(found, int | float | list):
            self.fail(f"{name}: {_short(text)} is neither a number nor a list of integers or truth values", param, ctx)
        return name, found


class BlockSize(click.ParamType):  # type: ignore[type-arg]  # as above
    """``N`` or ``Q,KV``: tokens in a block."""

    name = "n|q,kv"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        sizes = [int(part) if part.strip().isdecimal() else 0 for part in str(value).split(",")]
        if len(sizes) > 2 or min(sizes) < 1:
            self.fail(f"{value!r} is neither a positive number nor two of them, Q,KV", param, ctx)
        return sizes[0], sizes[-1]


class Place(click.ParamType):  # type: ignore[type-arg]  # as above
    """``Q,KV`` or ``B,H,Q,KV``: a cell."""

    name = "q,kv"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        parts = [part.strip() for part in str(value).split(",")]
        if len(parts) not in (2, 4) or not all(part.isdecimal() for part in parts):
            self.fail(f"{value!r} is neither Q,KV nor B,H,Q,KV", param, ctx)
        return tuple(map(int, parts))


def read_text(text: str, fail: Callable[[str], NoReturn]) -> str:
    """The text, or for ``@FILE`` the content of the file; calls ``fail`` with the reason if it cannot be read."""
    if not text.startswith("@"):
        return text
    path = Path(text[1:])
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        fail(f"cannot read {str(path)!r}: {getattr(error, 'strerror', None) or 'it is not a text file'}")


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
