"""Pictures as files: PNG and SVG with matplotlib, and the interactive view as HTML."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from flexmask.errors import RenderError
from flexmask.plotting.endings import ending_of
from flexmask.plotting.options import Contents
from flexmask.plotting.raster import Picture
from flexmask.plotting.sheet import Indices, chosen

if TYPE_CHECKING:
    from flexmask.expr.mask import Mask

__all__ = ["save"]


def save(
    mask: Mask,
    path: str | Path,
    q_len: int | None = None,
    kv_len: int | None = None,
    *,
    batch: Indices | None = None,
    head: Indices | None = None,
    terms: bool = False,
    **options: Unpack[Contents],
) -> None:
    """Writes a picture of a mask, as the ending of ``path`` says: see :meth:`flexmask.Mask.save_picture`."""
    ending = ending_of(path)
    if ending == ".html":
        from flexmask.plotting.html.view import html

        if terms:
            raise RenderError("the interactive view shows the terms itself; leave out terms=")
        places = {"batch": "some" if batch is None else batch, "head": "some" if head is None else head}
        text = html(mask, q_len, kv_len, **places, **options)
        Path(path).write_text(text, encoding="utf-8", newline="\n")
        return
    from flexmask.plotting.mpl.panels import save_sheet
    from flexmask.plotting.mpl.plot import save as save_picture

    shown = chosen(mask, q_len, kv_len, batch=batch, head=head, terms=terms, **options)
    if isinstance(shown, Picture):
        save_picture(shown, path)
    else:
        save_sheet(shown, path)
