"""The source of a gallery: a TOML file with one ``[[mask]]`` for each entry, the keys of an entry, and their types."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeAlias

from flexmask._checks import nearest
from flexmask.errors import RenderError
from flexmask.expr.mask import Mask

Parameter: TypeAlias = "int | float | list[Any]"
Index: TypeAlias = 'int | Literal["all"]'

#: The most queries or keys of an entry: every cell is drawn.
LONGEST = 512


@dataclass(frozen=True)
class Entry:
    """A mask, how it is drawn, and its description.

    Attributes:
        title: its title.
        family: its section.
        text: the mask, as :func:`flexmask.parse` reads it.
        q_len: queries.
        tags: search words, of a small vocabulary.
        aliases: further search words: names of models and methods.
        caption: the keys that a query attends to.
        source: the origin of the mask, with or without URLs.
        kv_len: keys.
        q_offset: position of the first query.
        block_size: tokens in a block of the grid that is drawn; None for no grid.
        batch: which sequence is drawn, or all.
        head: which head is drawn, or all.
        why: whether hidden cells are colored by the term that masks them out.
        q_tokens: labels of the queries.
        kv_tokens: labels of the keys.
        params: values of the text's parameters.
        computed: for values that a model computes, PyTorch code that computes them.
        score_mod: what the layers of a model do to scores next to the mask, as code that defines a ``score_mod``.
    """

    title: str
    family: str
    text: str
    q_len: int
    tags: tuple[str, ...]
    caption: str
    source: str
    kv_len: int
    q_offset: int = 0
    block_size: int | None = None
    batch: Index = 0
    head: Index = 0
    why: bool = False
    q_tokens: tuple[str, ...] | None = None
    kv_tokens: tuple[str, ...] | None = None
    params: Mapping[str, Parameter] = field(default_factory=dict)
    computed: Mapping[str, str] = field(default_factory=dict)
    score_mod: str = ""
    aliases: tuple[str, ...] = ()

    @property
    def slug(self) -> str:
        """The name of its files, and of its place on the page: its title in small letters and digits, with dashes between."""
        return "-".join(re.findall("[a-z0-9]+", self.title.lower()))

    def mask(self) -> Mask:
        """The mask, with its data."""
        from flexmask.parser import parse

        return parse(self.text, **self.params)


def parse_entry(given: Mapping[str, object], place: int) -> Entry:
    """The entry of a table of the source.

    Args:
        given: the table.
        place: which of the entries it is, counted from 1.

    Raises:
        RenderError: a key that is missing, unknown or of the wrong type, which the message names, as it does the entry.
    """
    title = given.get("title")
    where = f"entry {place}" + (f" ({title!r})" if isinstance(title, str) else "")
    known = [field.name for field in fields(Entry)]
    for key in given:
        if key not in known:
            raise RenderError(f"{where}: there is no key {key!r}.{nearest(key, known)} An entry has {', '.join(known)}")
    missing = [key for key in WANTED if key not in given]
    if missing:
        raise RenderError(f"{where}: {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing")
    for key, value in given.items():
        fits, wanted = KEYS[key]
        if not fits(value):
            raise RenderError(f"{where}: {key} must be {wanted}, got {value!r}")
    lists: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
    entry = Entry(**{"kv_len": given["q_len"], **lists})
    if not entry.slug:
        raise RenderError(f"{where}: title must have an ASCII letter or digit, for the names of its files")
    for key, labels, length in (("q_tokens", entry.q_tokens, entry.q_len), ("kv_tokens", entry.kv_tokens, entry.kv_len)):
        if labels is not None and len(labels) != length:
            raise RenderError(f"{where}: {key} must be {length} labels, one for each position, got {len(labels)}")
    if unknown := sorted(entry.computed.keys() - entry.params.keys()):
        raise RenderError(f"{where}: computed has {', '.join(unknown)}, which params does not have")
    return entry


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_text, value))


def _is_length(value: object) -> bool:
    return _is_index(value) and value in range(1, LONGEST + 1)


def _is_index(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_choice(value: object) -> bool:
    return value == "all" or _is_index(value)


def _is_data(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(data, int | float | list) for data in value.values())


def _is_code(value: object) -> bool:
    return isinstance(value, dict) and all(map(_is_text, value.values()))


#: What the keys of an entry must be.
RULES: list[tuple[str, Callable[[object], bool], str]] = [
    ("title family text caption source score_mod", _is_text, "a string"),
    ("tags aliases q_tokens kv_tokens", _are_texts, "a list of strings"),
    ("q_len kv_len block_size", _is_length, f"a number of tokens from 1 to {LONGEST}"),
    ("q_offset", _is_index, "a position from 0 on"),
    ("batch head", _is_choice, 'an index from 0 on or "all"'),
    ("why", lambda value: isinstance(value, bool), "true or false"),
    ("params", _is_data, "a table of numbers and lists"),
    ("computed", _is_code, "a table of strings"),
]
KEYS = {key: (fits, wanted) for keys, fits, wanted in RULES for key in keys.split()}
#: The keys that every entry has.
WANTED = ("title", "family", "text", "q_len", "tags", "caption", "source")


def own_source() -> Path:
    """The file of the gallery of flexmask itself: as installed, or in a checkout, next to the pictures.

    Raises:
        RenderError: it is in neither place.
    """
    here = Path(__file__).resolve()
    places = [here.with_name("gallery.toml"), here.parents[2] / "gallery" / "gallery.toml"]
    found = next((path for path in places if path.is_file()), None)
    if found is None:
        raise RenderError("the gallery's source was not installed; give a file of your own")
    return found


def read_entries(path: Path) -> tuple[Entry, ...]:
    """The entries of a file, in their order.

    Raises:
        RenderError: a file that cannot be read or is not such a list of entries, or two entries whose titles name the same files.
    """
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not a text file"
        raise RenderError(f"cannot read {str(path)!r}: {reason}") from error
    except tomllib.TOMLDecodeError as error:
        raise RenderError(f"{str(path)!r} is not TOML: {error}") from error
    tables = found.get("mask")
    if set(found) != {"mask"} or not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise RenderError(f"{str(path)!r} must hold one [[mask]] for each entry and nothing else")
    entries = tuple(parse_entry(table, place) for place, table in enumerate(tables, 1))
    places: dict[str, int] = {}
    for place, entry in enumerate(entries, 1):
        first = places.setdefault(entry.slug, place)
        if first != place:
            raise RenderError(
                f"entry {place} ({entry.title!r}): title names the same files as that of entry {first} "
                f"({entries[first - 1].title!r}): {entry.slug}"
            )
    return entries


def select_entries(entries: Sequence[Entry], names: Iterable[str]) -> tuple[Entry, ...]:
    """The entries that have one of some names as a tag, family, alias, title or file name, in any case; without names all.

    Raises:
        RenderError: a name that no entry has.
    """
    wanted = {name.lower(): name for name in names}
    known = set().union(*map(_names, entries))
    for name in sorted(wanted):
        if name not in known:
            raise RenderError(f"the gallery has no tag, family, alias or title {wanted[name]!r}.{nearest(name, known)}")
    return tuple(entry for entry in entries if not wanted or wanted.keys() & _names(entry))


def _names(entry: Entry) -> set[str]:
    """What an entry is found by, in lower case."""
    return {name.lower() for name in (*entry.tags, entry.family, *entry.aliases, entry.title, entry.slug)}
