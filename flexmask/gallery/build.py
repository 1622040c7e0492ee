"""A gallery as files: pictures, a README with a section for each family, and one page that asks for nothing from outside."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from flexmask._checks import lengths_text
from flexmask.gallery.rendered import RenderedEntry, command, python, render_entry
from flexmask.gallery.source import Entry
from flexmask.plotting.caption import visible_text
from flexmask.plotting.categories import count_text
from flexmask.plotting.html import document, inline_json, script, style, view_of, web
from flexmask.plotting.mpl.drawing import rectangles_of
from flexmask.plotting.mpl.plot import save
from flexmask.plotting.raster import EMPTY, FULL, PARTIAL, Picture


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


#: Pixels of an inch, twice those of most screens, and colors of a file: the letters' edges need more than the cells.
DPI, COLORS = 144, 128


def write_picture(found: RenderedEntry, path: Path) -> None:
    """Writes the panels of an entry as a PNG that holds the command that draws it; the bytes depend on nothing but the entry."""
    pictures = found.sheet.pictures
    save(found.sheet if len(pictures) > 1 else pictures[0], path, dpi=DPI)
    with Image.open(path) as drawn:
        few = drawn.convert("RGB").quantize(COLORS, dither=Image.Dither.NONE)
    about = PngInfo()
    about.add_itxt("Description", command(found.entry))
    few.save(path, optimize=True, pnginfo=about)


#: Runs of keys of a row that are listed.
MAX_RUNS = 3
ADDRESS = re.compile(r"(https?://[^\s;,]+)")


def sections(found: Iterable[RenderedEntry]) -> dict[str, list[RenderedEntry]]:
    """The entries of each family, under its name with a capital letter."""
    families: dict[str, list[RenderedEntry]] = {}
    for one in found:
        name = one.entry.family.replace("_", " ")
        families.setdefault(name[0].upper() + name[1:], []).append(one)
    return families


def linked(source: str) -> list[tuple[str, str | None]]:
    """A source in parts: texts, and what is written for an address, with the address."""
    parts = ADDRESS.split(source)
    return [(part.split("//")[1], part) if number % 2 else (part, None) for number, part in enumerate(parts) if part]


def lengths(entry: Entry) -> str:
    """How long it is, and which part is drawn."""
    said = [lengths_text(entry.q_len, entry.kv_len, "×")]
    if entry.q_offset:
        said.append(f"the first query at position {entry.q_offset}")
    for name, index in (("sequence", entry.batch), ("head", entry.head)):
        if index:
            said.append(f"all {name}s" if index == "all" else f"{name} {index}")
    return ", ".join(said)


def described(found: RenderedEntry) -> str:
    """What the picture of an entry shows, for those who do not see it: computed from its cells.

    Of each panel it says the visible share, the keys of the first, the middle and the last query, the numbers of blocks, and the
    cells that each term hides.
    """
    panels = zip(found.sheet.titles, found.sheet.pictures, strict=True)
    return " ".join([f"{lengths(found.entry)}.", *(_panel(title, shown) for title, shown in panels)])


def _panel(title: str, shown: Picture) -> str:
    rows = sorted({0, shown.q_len // 2, shown.q_len - 1})
    said = [visible_text(shown), *(f"query {row + shown.q_offset} attends to {_keys(shown.cells[row] == 0)}" for row in rows)]
    if shown.blocks is not None:
        states = {"full": FULL, "partial": PARTIAL, "empty": EMPTY}
        counts = [f"{shown.block_count(state)} {name}" for name, state in states.items()]
        said.append(f"{', '.join(counts)} blocks")
    hidden = zip(shown.categories, shown.pairs, strict=True)
    said += [
        f"{count_text(pairs)} cells {category.label}" for category, pairs in hidden if category.hides is not None and pairs[1]
    ]
    text = "; ".join(said)
    return f"{title}: {text}." if title else f"{text[0].upper()}{text[1:]}."


def _keys(visible: NDArray[np.bool_]) -> str:
    """The keys of a row: up to three runs of them, else their number."""
    found = [(start, stop - 1) for _, start, _, stop in rectangles_of(visible[None]).tolist()]
    if not found:
        return "no key"
    if len(found) > MAX_RUNS:
        return f"{visible.sum()} keys from {found[0][0]} to {found[-1][1]}"
    one = len(found) == 1 and found[0][0] == found[0][1]
    return f"key{'' if one else 's'} {', '.join(f'{start}' if start == stop else f'{start} to {stop}' for start, stop in found)}"


def statistics(found: RenderedEntry) -> list[tuple[str, str]]:
    """How much is visible and what it costs, as pairs of a label and a text."""
    stats = found.stats
    of = [f"{size} {name}" for size, name in ((stats.batch, "sequences"), (stats.heads, "heads")) if size > 1]
    size = stats.block_size[0]
    return [
        ("Visible" + (f", of all {' and '.join(of)}" if of else ""), _percent(stats.visible_fraction)),
        (f"Block sparsity, blocks of {size}", _percent(stats.block_sparsity)),
        ("Cost against dense", _percent(stats.cost)),
    ]


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


#: Pixels: how wide one picture is shown, and a row of panels.
WIDTH, PANELS_WIDTH = 400, 680

HEAD = """\
# Attention masks with flexmask

{count} masks as pictures: queries are rows, keys are columns, and a query attends to the blue keys of its row. Gray cells are
masked out. Where they have other colors, these show which term of the mask masks them out first. A grid shows the blocks of a
block-sparse kernel: it skips empty blocks, and computes and discards the darker gray cells of partial blocks.

[`index.html`](index.html) is a searchable page in one file, with pictures that explain each hidden cell. `flexmask render` draws
a mask in the terminal, and `flexmask find WORDS` finds masks by the names of models and methods:

```bash
flexmask render "{text}" --seq-len {q_len}
```

`flexmask gallery` writes the pictures, the page and this file from the entries in `gallery.toml`, and
`flexmask gallery --source FILE` from your own masks."""


def readme(found: Sequence[RenderedEntry]) -> str:
    """The README of some entries, in Markdown as GitHub shows it."""
    shown = sections(found)
    first = next((one.entry for one in found if not one.entry.params and one.entry.kv_len == one.entry.q_len), None)
    text, q_len = (first.text, first.q_len) if first else ("causal", 16)
    contents = ["| family | masks |", "|---|---|"]
    contents += [f"| [{_plain(family)}](#{_anchor(family)}) | {len(members)} |" for family, members in shown.items()]
    parts = [HEAD.format(count=len(found), text=text, q_len=q_len), "\n".join(contents)]
    for family, members in shown.items():
        parts += [f"## {_plain(family)}", *map(_readme_section, members)]
    return "\n\n".join(parts) + "\n"


def _readme_section(found: RenderedEntry) -> str:
    entry = found.entry
    width = PANELS_WIDTH if len(found.sheet.pictures) > 1 else WIDTH
    source = "".join(
        _plain(text) if address is None else f"[{_plain(text)}]({address})" for text, address in linked(entry.source)
    )
    paragraphs = [
        f"### {_plain(entry.title)}",
        f'<img src="pictures/{entry.slug}.png" width="{width}" alt="{escape(described(found))}">',
        _plain(entry.caption),
        f"```python\n{python(entry)}\n```",
        " · ".join([lengths(entry), " ".join(f"`{tag}`" for tag in entry.tags), *map(_plain, entry.aliases)]),
        f"Source: {source}",
        "<details><summary>Draw it</summary>",
        f"```bash\n{command(entry)}\n```",
        "</details>",
    ]
    return "\n\n".join(paragraphs)


def _plain(text: str) -> str:
    """A text that means nothing in Markdown."""
    return re.sub(r"([\\`*_<>\[\]|#~&])", r"\\\1", text)


def _anchor(heading: str) -> str:
    """The place of a heading, as GitHub names it."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


HERE = "flexmask.gallery"
PROJECT = "https://github.com/flexmask/flexmask"


def index(found: Sequence[RenderedEntry]) -> str:
    """The page of some entries: a whole HTML document, in which the views' data is unpacked when it is first shown."""
    tags = Counter(tag for one in found for tag in one.entry.tags)
    return document(
        web(HERE, "index.html"),
        css="\n".join([f":root {{\n{_colors()}\n}}", style(), web(HERE, "index.css")]),
        js="\n".join([script(), web(HERE, "index.js")]),
        count=str(len(found)),
        project=PROJECT,
        tags="\n".join(_tag(tag, tags[tag]) for tag in sorted(tags)),
        sections="\n".join(_section(family, members) for family, members in sections(found).items()),
        data=inline_json([_data(one) for one in found]),
    )


def _data(found: RenderedEntry) -> dict[str, object]:
    """What the page's script knows of an entry."""
    entry = found.entry
    return {
        "slug": entry.slug,
        "title": entry.title,
        "family": entry.family,
        "tags": entry.tags,
        "aliases": entry.aliases,
        "caption": entry.caption,
        "text": entry.text,
        "lengths": lengths(entry),
        "source": linked(entry.source),
        "command": command(entry),
        "python": python(entry),
        "statistics": statistics(found),
        "view": view_of(found.sheet, start="why" if entry.why else "blocks"),
    }


def _section(family: str, members: Sequence[RenderedEntry]) -> str:
    cards = "\n".join(_card(one) for one in members)
    name = escape(family)
    heading = f"<h2>{name} <span>{len(members)}</span></h2>"
    return f'<section aria-label="{name}">\n{heading}\n<ul class="cards">\n{cards}\n</ul>\n</section>'


def _card(found: RenderedEntry) -> str:
    entry = found.entry
    tags = "".join(f"<li>{escape(tag)}</li>" for tag in entry.tags)
    return (
        f'<li class="card" data-slug="{entry.slug}"><canvas aria-hidden="true"></canvas>'
        f'<h3><a href="#{entry.slug}">{escape(entry.title)}</a></h3>'
        f'<p>{escape(entry.caption)}</p><code>{escape(entry.text)}</code><ul class="tags" aria-label="Tags">{tags}</ul></li>'
    )


def _tag(tag: str, count: int) -> str:
    name = escape(tag)
    return f'<button type="button" aria-pressed="false" data-tag="{name}">{name} <span>{count}</span></button>'


def _colors() -> str:
    """The colors of the views, for the whole page."""
    return "\n".join(re.findall(r"^ *--flexmask-[\w-]+: .*;$", style(), re.MULTILINE))
