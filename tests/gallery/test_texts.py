"""What the gallery's README says of pictures, for those who do not see them."""

from __future__ import annotations

import re
from pathlib import Path

from flexmask.gallery.build import described
from flexmask.gallery.rendered import RenderedEntry, render_entry
from flexmask.gallery.source import read_entries
from flexmask.plotting.raster import Picture

ENTRIES = read_entries(Path(__file__).parents[2] / "gallery" / "gallery.toml")


def test_descriptions_are_those_of_the_cells() -> None:
    """The words of a picture for those who do not see it, against the cells of its mask."""
    found = [render_entry(entry) for entry in ENTRIES]
    said = {one.entry.title: described(one) for one in found}
    assert said["A causal mask"] == (
        "12 queries × 12 keys. 54.2 % visible; query 0 attends to key 0; query 6 attends to keys 0 to 6; query 11 attends to "
        "keys 0 to 11."
    )
    assert said["A causal mask in blocks"].endswith("; 6 full, 4 partial, 6 empty blocks.")
    assert "120 cells hidden by causal; 28 cells hidden by key_padding" in said["A padded batch in a decoder"]
    for one in found:
        entry = one.entry
        cells = entry.mask().dense(entry.q_len, entry.kv_len, q_offset=entry.q_offset)
        for shown in one.sheet.pictures:
            panel = cells[min(shown.batch, len(cells) - 1), min(shown.head, cells.shape[1] - 1)]
            text = _of_panel(said[entry.title], one, shown)
            for row in (0, entry.q_len // 2, entry.q_len - 1):
                (keys,) = re.findall(rf"query {row + shown.q_offset} attends to ([^;]*?)[;.]", text)
                assert _named(keys) in (panel[row].nonzero().flatten().tolist(), int(panel[row].sum()))


def _of_panel(text: str, one: RenderedEntry, shown: Picture) -> str:
    """The part of a description that is about one panel."""
    place = one.sheet.pictures.index(shown)
    parts = re.split(r"(?:sequence|head) \d+: ", text) if len(one.sheet.pictures) > 1 else ["", text]
    return parts[place + 1]


def _named(keys: str) -> list[int] | int:
    """The keys that a description names, or their number where it does not name each."""
    if keys == "no key":
        return []
    if number := re.fullmatch(r"(\d+) keys from \d+ to \d+", keys):
        return int(number[1])
    runs = [part.split(" to ") for part in re.sub(r"keys? ", "", keys).split(", ")]
    return [key for run in runs for key in range(int(run[0]), int(run[-1]) + 1)]
