"""Pictures as files: PNG, SVG and PDF with matplotlib, and the interactive view as HTML."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from flexmask._checks import kind_of
from flexmask.errors import OperandError, RenderError
from flexmask.plotting.caption import check_frame

if TYPE_CHECKING:
    from flexmask.expr.mask import Mask
    from flexmask.plotting.labels import ContentOptions, FrameOptions
    from flexmask.plotting.sheet import Indices

SUFFIXES = (".png", ".svg", ".pdf", ".html")


def save(
    mask: Mask,
    path: str | Path,
    q_len: int | None = None,
    kv_len: int | None = None,
    *,
    batch: Indices | None = None,
    head: Indices | None = None,
    terms: bool = False,
    frame: FrameOptions | None = None,
    **options: Unpack[ContentOptions],
) -> None:
    """Writes a picture of a mask, in the format of the suffix of ``path``: see :meth:`flexmask.Mask.save_picture`."""
    suffix, frame = picture_suffix(path), frame or {}
    check_frame(frame.get("title"), frame.get("width"))
    if suffix == ".html":
        from flexmask.plotting.html.view import html

        if terms:
            raise RenderError("the interactive view shows the terms itself; leave out terms=")
        if frame:
            raise RenderError(f"the interactive view has its own title, legend and width; leave out {' and '.join(frame)}")
        places = {"batch": "some" if batch is None else batch, "head": "some" if head is None else head}
        text = html(mask, q_len, kv_len, **places, **options)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text, encoding="utf-8", newline="\n")
        return
    from flexmask.plotting.mpl.panels import save_sheet
    from flexmask.plotting.mpl.plot import save as save_picture
    from flexmask.plotting.raster import Picture
    from flexmask.plotting.sheet import picture_or_sheet

    shown = picture_or_sheet(mask, q_len, kv_len, batch=batch, head=head, terms=terms, **options)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    if isinstance(shown, Picture):
        save_picture(shown, path, **frame)
    else:
        save_sheet(shown, path, **frame)


def picture_suffix(path: str | Path, suffixes: tuple[str, ...] = SUFFIXES) -> str:
    """The suffix of a picture file, in lower case.

    Raises:
        RenderError: it is not one of ``suffixes``.
        OperandError: ``path`` is not a path.
    """
    if not isinstance(path, str | os.PathLike):
        raise OperandError(f"the path of a picture must be a string or a Path, got {kind_of(path)}")
    suffix = Path(path).suffix.lower()
    if suffix not in suffixes:
        raise RenderError(f"the file of a picture must end in {', '.join(suffixes[:-1])} or {suffixes[-1]}, got {str(path)!r}")
    return suffix
