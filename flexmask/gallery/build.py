"""A gallery as files: pictures, a README and a page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from flexmask.gallery.entry import Entry
from flexmask.gallery.index import index
from flexmask.gallery.pictures import write_picture
from flexmask.gallery.readme import readme
from flexmask.gallery.rendered import render_entry


def build(entries: Sequence[Entry], folder: Path, done: Callable[[Entry], None] | None = None) -> None:
    """Writes ``pictures/SLUG.png`` for each entry, ``README.md`` and ``index.html``, the same bytes for the same entries.

    Nothing is written before all entries are rendered. Other files in the folder stay as they are.

    Args:
        entries: the entries.
        folder: the output folder; it is created if missing.
        done: called after each picture.

    Raises:
        RenderError: an entry that cannot be drawn, which the message names.
        OSError: a file that cannot be written.
    """
    found = [render_entry(entry) for entry in entries]
    pages = {"README.md": readme(found), "index.html": index(found)}
    pictures = folder / "pictures"
    pictures.mkdir(parents=True, exist_ok=True)
    for one in found:
        write_picture(one, pictures / f"{one.entry.slug}.png")
        if done is not None:
            done(one.entry)
    for name, text in pages.items():
        (folder / name).write_text(text, encoding="utf-8", newline="\n")
