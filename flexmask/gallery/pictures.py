"""The picture of an entry, as a small file."""

from __future__ import annotations

from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from flexmask.gallery.rendered import RenderedEntry
from flexmask.gallery.snippets import command
from flexmask.plotting.mpl.panels import save_sheet
from flexmask.plotting.mpl.plot import save

#: Pixels of an inch, twice those of most screens, and colors of a file: the letters' edges need more than the cells.
DPI, COLORS = 144, 128


def write_picture(found: RenderedEntry, path: Path) -> None:
    """Writes the panels of an entry as a PNG that holds the command that draws it; the bytes depend on nothing but the entry."""
    if len(found.sheet.pictures) > 1:
        save_sheet(found.sheet, path, dpi=DPI)
    else:
        save(found.sheet.pictures[0], path, dpi=DPI)
    with Image.open(path) as drawn:
        few = drawn.convert("RGB").quantize(COLORS, dither=Image.Dither.NONE)
    about = PngInfo()
    about.add_itxt("Description", command(found.entry))
    few.save(path, optimize=True, pnginfo=about)
