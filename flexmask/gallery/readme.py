"""The gallery as a README: a section for each family, with links to the pictures."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

from flexmask.gallery.rendered import RenderedEntry
from flexmask.gallery.snippets import command, python
from flexmask.gallery.texts import described, lengths, linked, sections

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
`flexmask gallery --source FILE` from your own masks.
"""


def readme(found: Sequence[RenderedEntry]) -> str:
    """The README of some entries, in Markdown as GitHub shows it."""
    shown = sections(found)
    first = next((one.entry for one in found if not one.entry.params and one.entry.kv_len == one.entry.q_len), None)
    text, q_len = (first.text, first.q_len) if first else ("causal", 16)
    contents = ["| family | masks |", "|---|---|"]
    contents += [f"| [{_plain(family)}](#{_anchor(family)}) | {len(members)} |" for family, members in shown.items()]
    parts = [HEAD.format(count=len(found), text=text, q_len=q_len), "\n".join(contents) + "\n"]
    for family, members in shown.items():
        parts += [f"## {_plain(family)}\n", *map(_section, members)]
    return "\n".join(parts)


def _section(found: RenderedEntry) -> str:
    entry = found.entry
    width = PANELS_WIDTH if len(found.sheet.pictures) > 1 else WIDTH
    source = "".join(
        _plain(text) if address is None else f"[{_plain(text)}]({address})" for text, address in linked(entry.source)
    )
    return "\n".join(
        [
            f"### {_plain(entry.title)}",
            "",
            f'<img src="pictures/{entry.slug}.png" width="{width}" alt="{escape(described(found))}">',
            "",
            _plain(entry.caption),
            "",
            "```python",
            python(entry),
            "```",
            "",
            " · ".join([lengths(entry), " ".join(f"`{tag}`" for tag in entry.tags), *map(_plain, entry.aliases)]),
            "",
            f"Source: {source}",
            "",
            "<details><summary>Draw it</summary>",
            "",
            "```bash",
            command(entry),
            "```",
            "",
            "</details>",
            "",
        ]
    )


def _plain(text: str) -> str:
    """A text that means nothing in Markdown."""
    return re.sub(r"([\\`*_<>\[\]|#~&])", r"\\\1", text)


def _anchor(heading: str) -> str:
    """The place of a heading, as GitHub names it."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
