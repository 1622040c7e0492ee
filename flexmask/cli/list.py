"""``flexmask list`` and ``flexmask find``: named masks, the documentation of one, and masks by the names of models."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

import click

from flexmask import registry
from flexmask._checks import closest, nearest, signature_of
from flexmask.cli.inputs import complete_name, json_option
from flexmask.cli.output import Cell, Row, UserError, echo, print_json, print_table, to_stderr
from flexmask.expr.names import NAMES

#: A reference as documentation has it, such as :func:`flexmask.causal`.
ROLE = re.compile(r":\w+:`~?(?:flexmask\.)?([^`]*)`")
#: What is found that is printed.
MOST = 12
#: How close a misspelled word is to the one that is meant: of both words three of four letters match.
CLOSE = 0.75


@click.command("list")
@click.argument("name", required=False, shell_complete=complete_name)
@json_option("a list of objects with name, signature, predicate, family, package and version; with NAME one, and its description")
def list_masks(name: str | None, as_json: bool) -> None:
    """List the named masks, or describe the one called NAME.

    Prints each with its parameters and its predicate: query `q` attends to key `kv` where it is true. Masks are grouped by
    family and package. With NAME, prints the whole documentation with a picture.

    \b
    Examples:
      flexmask list
      flexmask list sliding_window
      flexmask list --json
    """
    with to_stderr():  # plugins may print while they are imported
        names = registry.names() if name is None else []
        define = None if name is None else registry.find(name)
    if name is None:
        entries = [_entry(each) for each in names]
        if as_json:
            print_json(entries)
        else:
            print_table(_rows(entries), ["mask", "q attends to kv where"])
        return
    if define is None:
        raise UserError(f"there is no named mask {name}.{_instead(name)}")
    entry = _entry(name)
    document = ROLE.sub(r"`\1`", inspect.getdoc(define) or "It has no description.")
    if as_json:
        print_json(entry | {"description": document})
        return
    version = f" {entry['version']}" if entry["version"] else ""
    echo(f"{entry['signature']}\n\n{document}\n\nFamily {entry['family']}, package {entry['package']}{version}")


def _instead(name: str) -> str:
    """What to write for a name that no mask has: the nearest one, or what is found by it."""
    hint = nearest(name, registry.names())
    found = [] if hint else _found(name)
    return f" `flexmask find {name}` finds {found[0].title}: {found[0].text}" if found else f"{hint} `flexmask list` shows all"


def _entry(name: str) -> dict[str, Any]:
    """What is said of a named mask, as its JSON document has it."""
    define, origin = NAMES[name], registry.origin(name)
    return {
        "name": name,
        "signature": f"{name}{signature_of(define)}",
        "predicate": _predicate(define),
        "family": origin.family,
        "package": origin.package,
        "version": origin.version,
    }


def _rows(entries: Iterable[dict[str, Any]]) -> list[Row]:
    """A row for each mask under a row for each family: flexmask's own families, then those of plugins."""

    def place(entry: dict[str, Any]) -> tuple[bool, str, str]:
        return entry["package"] != registry.OWN, entry["package"], entry["family"]

    rows: list[Row] = []
    for (_, package, family), members in groupby(sorted(entries, key=place), key=place):
        rows += [("",), (Cell(family, "cyan", bold=True), Cell(f"package {package}", "cyan"))]
        rows += [(f"  {entry['signature']}", entry["predicate"]) for entry in members]
    return rows


def _predicate(define: Callable[..., Any]) -> str:
    """The ``Predicate:`` paragraph of a mask's docstring, else its first paragraph."""
    document = inspect.getdoc(define) or ""
    found = re.search(r"^Predicate:\s*(.+?)(?:\n\s*\n|\Z)", document, re.DOTALL | re.MULTILINE)
    text = found[1] if found else document.split("\n\n")[0]
    return " ".join(ROLE.sub(r"\1", text).replace("``", "").split())


@dataclass(frozen=True)
class Found:
    """A mask with what is said of it, by which it is found.

    It is found where it has each word: as it stands anywhere in its texts, or without blanks and signs in one of its names, so
    that ``llama4`` and ``streaming llm`` find what is called Llama 4 and StreamingLLM. A word that no mask has is read as the
    nearest one of a name. The search of the gallery's page (``gallery/web/index.js``) finds the same.

    Attributes:
        title: its name.
        text: its expression, of a named mask with the parameters.
        caption: the keys that a query attends to.
        source: its origin.
        aliases: other names.
        tags: further search words.
    """

    title: str
    text: str
    caption: str
    source: str
    aliases: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The texts that are also found by part, joined or apart."""
        return self.title, *self.aliases, *self.tags

    def has(self, word: str) -> bool:
        """Whether a word in small letters is in a text, or joined in a name."""
        return _fit(word, self.names) > 0 or word in "\n".join((*self.names, self.text, self.caption, self.source)).lower()

    def words(self) -> set[str]:
        """The words of the names, and each name as one word."""
        return {word for name in self.names for word in (*_words(name), _joined(name))}

    def fit(self, words: Sequence[str]) -> int:
        """How well words fit that it has: one that is a name counts more than one that begins or is in one, or is elsewhere."""
        whole = "".join(map(_joined, words))
        return sum(_fit(word, self.names) for word in words) + (4 if whole in map(_joined, self.names) else 0)


def _words(name: str) -> list[str]:
    return re.findall("[a-z0-9]+", name.lower())


def _joined(name: str) -> str:
    return "".join(_words(name))


def _fit(word: str, names: Sequence[str]) -> int:
    """Of a word that is a name 3, that begins a word of one 2, that is in one, joined, 1; else 0."""
    joined = [_joined(name) for name in names]
    if _joined(word) in joined:
        return 3
    if any(part.startswith(word) for name in names for part in _words(name)):
        return 2
    return int(bool(_joined(word)) and any(_joined(word) in name for name in joined))


@click.command("find")
@click.argument("words", nargs=-1, required=True)
@json_option("a list of objects with title, text, caption, source, aliases and tags")
def find_masks(words: tuple[str, ...], as_json: bool) -> None:
    """Find masks by the names of models, papers and methods.

    Searches the named masks, including those of plugins, and the gallery, and prints each that has all WORDS: a named mask with
    its signature, an entry of the gallery with its expression, whose other names are data that you give. A word may be a part
    of another, joined or apart, or misspelled. `flexmask list NAME` describes a named mask, and `flexmask render` draws an
    expression.

    \b
    Examples:
      flexmask find longformer
      flexmask find streaming llm
      flexmask find video tile
    """
    found = _found(" ".join(words))
    if as_json:
        print_json([asdict(one) for one in found])
        return
    if not found:
        raise UserError(f"no mask is found by {' '.join(words)}; `flexmask list` shows all named masks")
    for one in found[:MOST]:
        title = Cell(one.title, bold=True)
        echo(f"{title.styled(title.text)}: {one.caption}\n  {one.text}")
    if len(found) > MOST:
        echo(f"{len(found) - MOST} more; another word leaves fewer")


def _found(words: str) -> list[Found]:
    """The named masks and the entries of the gallery that have all words, those that fit best first."""
    from flexmask.gallery.source import own_source, read_entries

    with to_stderr():  # plugins may print while they are imported
        names = registry.names()
    masks = [
        Found(one["name"], one["signature"], one["predicate"], one["package"], tags=(one["family"],))
        for one in map(_entry, names)
    ]
    masks += [
        Found(entry.title, entry.text, entry.caption, entry.source, entry.aliases, (entry.family, *entry.tags))
        for entry in read_entries(own_source())
    ]
    wanted = words.lower().split()
    known = sorted(set[str]().union(*(mask.words() for mask in masks)))
    for place, word in enumerate(wanted):
        if not any(mask.has(word) for mask in masks):
            wanted[place] = closest(word, known, cutoff=CLOSE) or word
    return sorted((mask for mask in masks if all(map(mask.has, wanted))), key=lambda mask: -mask.fit(wanted))
