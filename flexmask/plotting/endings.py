"""The files that pictures are written to."""

from __future__ import annotations

import os
from pathlib import Path

from flexmask._checks import kind_of
from flexmask.errors import OperandError, RenderError

__all__ = ["ENDINGS", "ending_of"]

ENDINGS = (".png", ".svg", ".html")


def ending_of(path: str | Path, endings: tuple[str, ...] = ENDINGS) -> str:
    """The ending of a file in small letters.

    Raises:
        RenderError: it is none of ``endings``.
        OperandError: ``path`` is no path.
    """
    if not isinstance(path, str | os.PathLike):
        raise OperandError(f"the path of a picture must be a text or a Path, got {kind_of(path)}")
    ending = Path(path).suffix.lower()
    if ending not in endings:
        raise RenderError(f"the file of a picture must end in {', '.join(endings[:-1])} or {endings[-1]}, got {str(path)!r}")
    return ending
