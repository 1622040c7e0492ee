"""The gallery as one page: everything in one file, which asks for nothing from outside."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from html import escape

from flexmask.gallery.rendered import RenderedEntry
from flexmask.gallery.snippets import command, python
from flexmask.gallery.texts import lengths, linked, sections, statistics
from flexmask.plotting.html import page
from flexmask.plotting.html.view import view_of

HERE = "flexmask.gallery"
PROJECT = "https://github.com/flexmask/flexmask"


def index(found: Sequence[RenderedEntry]) -> str:
    """The page of some entries: a whole HTML document, in which the views' data is unpacked when it is first shown."""
    tags = Counter(tag for one in found for tag in one.entry.tags)
    return page.document(
        page.web(HERE, "index.html"),
        css="\n".join([f":root {{\n{_colors()}\n}}", page.style(), page.web(HERE, "index.css")]),
        js="\n".join([page.script(), page.web(HERE, "index.js")]),
        count=str(len(found)),
        project=PROJECT,
        tags="\n".join(_tag(tag, tags[tag]) for tag in sorted(tags)),
        sections="\n".join(_section(family, members) for family, members in sections(found).items()),
        data=page.inline_json([_data(one) for one in found]),
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
    return "\n".join(re.findall(r"^ *--flexmask-[\w-]+: .*;$", page.style(), re.MULTILINE))
