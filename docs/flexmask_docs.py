"""The parts of the documentation that the library itself writes: pictures of masks, named masks, and the help of its commands."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import click
from docutils import nodes
from docutils.parsers.rst import directives
from docutils.statemachine import StringList
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.docutils import SphinxDirective
from sphinx.util.nodes import make_refnode
from sphinx_gallery.scrapers import figure_rst

import flexmask
from flexmask import Mask, registry
from flexmask.cli import main
from flexmask.expr.mask import Named
from flexmask.gallery.source import own_source, read_entries

__all__ = ["TutorialOrder", "last_figure", "setup"]

#: The tutorials, in the order in which they build on each other.
TUTORIALS = ["padded_batches.py", "cross_attention.py", "packing.py", "windows_and_caches.py", "your_own_mask.py", "leaks.py"]


class TutorialOrder:
    """The place of a tutorial, for sphinx-gallery."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __call__(self, filename: str) -> int:
        return TUTORIALS.index(filename)


def last_figure(block: object, block_vars: dict[str, Any], gallery_conf: dict[str, Any]) -> str:
    """The figure that the last expression of a block of a tutorial gives, for sphinx-gallery.

    The methods of a mask draw on figures that pyplot does not know. sphinx-gallery keeps the value of the expression as ``___``.
    """
    names = block_vars["example_globals"]
    drawn, names["___"] = names.get("___"), None
    figure = drawn.figure if isinstance(drawn, Axes) else drawn
    if not isinstance(figure, Figure) or pyplot.fignum_exists(getattr(figure, "number", -1)):
        return ""
    path = Path(next(block_vars["image_path_iterator"])).with_suffix(".svg")
    figure.savefig(path)
    return str(figure_rst([str(path)], gallery_conf["src_dir"]))


class Picture(SphinxDirective):
    """``{mask} TEXT``: the picture of a mask, drawn when the page is built. The content is its caption."""

    required_arguments = 1
    final_argument_whitespace = True
    has_content = True
    option_spec: ClassVar[dict[str, Any]] = {
        **dict.fromkeys(("q-len", "kv-len", "q-offset", "block-size"), directives.nonnegative_int),
        **dict.fromkeys(("why", "terms"), directives.flag),
        **dict.fromkeys(("batch", "head", "against", "alt", "tokens", "kv-tokens"), directives.unchanged_required),
    }

    def run(self) -> list[nodes.Node]:
        text = " ".join(self.arguments[0].split())
        given = {name.replace("-", "_"): value for name, value in self.options.items() if name != "alt"}
        options: dict[str, Any] = {
            name: int(value) if name in {"batch", "head"} and value.isdigit() else True if value is None else value
            for name, value in given.items()
        }
        image = _draw(self, flexmask.parse(text), text, options)
        image["alt"] = self.options.get("alt") or f"{text}: queries down, keys across"
        is_sheet = "terms" in options or not {type(options.get(name, 0)) for name in ("batch", "head")} <= {int}
        figure = nodes.figure("", image, classes=[] if is_sheet else ["mask"])
        if self.content:
            caption = nodes.caption()
            caption += self.parse_inline("\n".join(self.content))[0]
            figure += caption
        return [figure]


def _draw(directive: SphinxDirective, mask: Mask, name: str, options: dict[str, Any]) -> nodes.image:
    """The picture of a mask as an image in the build folder."""
    folder = Path(directive.env.doctreedir).parent / "pictures"
    folder.mkdir(parents=True, exist_ok=True)
    key = hashlib.sha256(f"{name} {sorted(options.items())}".encode()).hexdigest()[:16]
    path = folder / f"{key}.svg"
    mask.save_picture(path, **options)
    page = Path(directive.env.doc2path(directive.env.docname)).parent
    return nodes.image(uri=Path(os.path.relpath(path, page)).as_posix())


class NamedMasks(SphinxDirective):
    """``.. named-masks:: FAMILY``: the named masks of a family, each with its documentation and a picture of the gallery."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        registry.load()
        family = self.arguments[0]
        names = [
            name
            for name in registry.names()
            if registry.origin(name) == registry.Origin("flexmask", flexmask.__version__, family)
        ]
        if not names:
            raise self.error(f"flexmask has no family of masks named {family}")
        found: list[nodes.Node] = []
        for name in names:
            section = nodes.section(ids=[name.replace("_", "-")], names=[name])
            section += nodes.title("", name)
            for text, mask, options in _example(name):
                image = _draw(self, mask, text, options)
                image["alt"] = f"{text}: queries down, keys across"
                section += nodes.figure("", image, classes=["mask"])
            lines = [f".. autofunction:: flexmask.masks.{name}"]
            self.state.nested_parse(StringList(lines, source=family), self.content_offset, section)
            self.state.document.note_explicit_target(section)
            found.append(section)
        return found


def _example(name: str) -> Iterator[tuple[str, Mask, dict[str, Any]]]:
    """An entry of the gallery that shows a named mask: alone where there is one, else in a composition."""
    alone, composed = [], []
    for entry in read_entries(own_source()):
        mask = entry.mask()
        if isinstance(mask, Named) and mask.name == name:
            alone.append((entry, mask))
        elif any(isinstance(node, Named) and node.name == name for node in mask.walk()):
            composed.append((entry, mask))
    for entry, mask in [*alone, *composed][:1]:
        yield entry.text, mask, {"q_len": entry.q_len, "kv_len": entry.kv_len, "q_offset": entry.q_offset, "head": entry.head}


class Commands(SphinxDirective):
    """``.. commands::``: the help of every command, as the command line prints it."""

    def run(self) -> list[nodes.Node]:
        return [node for names in [(), *[(name,) for name in sorted(main.commands)]] for node in self._command(names)]

    def _command(self, names: Sequence[str]) -> list[nodes.Node]:
        command: click.Command = main
        context = click.Context(main, info_name="flexmask", **main.context_settings)
        for name in names:
            command = main.commands[name]
            context = click.Context(command, parent=context, info_name=name, **command.context_settings)
        title = " ".join(("flexmask", *names))
        section = nodes.section(ids=[title.replace(" ", "-")], names=[title])
        section += nodes.title("", title)
        section += nodes.literal_block("", command.get_help(context), language="text")
        self.state.document.note_explicit_target(section)
        return [section]


def resolve(app: Sphinx, env: BuildEnvironment, node: Any, content: Any) -> Any:
    """The place of a name that docstrings give without its package, or at the top of flexmask, for Sphinx."""
    name = node.get("reftarget", "").rpartition(".")[2]
    known = env.domains.python_domain.objects
    found = [full for full in known if full.startswith("flexmask.") and full.rpartition(".")[2] == name]
    if node.get("refdomain") != "py" or not found:
        return None
    place = known[min(found, key=len)]
    return make_refnode(app.builder, node["refdoc"], place.docname, place.node_id, content)


def link_tutorials(app: Sphinx, docname: str, source: list[str]) -> None:
    """A page of Markdown links to the script of a tutorial, which is there on GitHub too; here to the page that it becomes."""
    source[0] = re.sub(r"\]\(((?:\.\./)*)tutorials/(\w+)\.py\)", r"](\1auto_tutorials/\2.rst)", source[0])


def setup(app: Sphinx) -> dict[str, Any]:
    """Registers the directives, and how names and tutorials are found."""
    app.add_directive("mask", Picture)
    app.add_directive("named-masks", NamedMasks)
    app.add_directive("commands", Commands)
    app.connect("missing-reference", resolve)
    app.connect("source-read", link_tutorials)
    return {"parallel_read_safe": True}
