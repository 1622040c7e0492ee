"""The source of a gallery: a TOML file with one ``[[mask]]`` for each entry."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path

from flexmask._checks import nearest
from flexmask.errors import RenderError
from flexmask.gallery.entry import Entry, parse_entry


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
