"""The gallery's source: every entry draws something, and every named mask stands in one."""

import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import flexmask as fm
from flexmask.algebra import Named, Truth
from flexmask.catalogue import __all__ as named_masks

SOURCE = Path(__file__).parent.parent / "gallery" / "gallery.toml"
ENTRIES: list[dict[str, Any]] = tomllib.loads(SOURCE.read_text())["mask"]
WANTED = {"title", "family", "text", "q_len", "source"}
FAMILIES = {path.stem for path in (Path(fm.__file__).parent / "catalogue").glob("*.py")}
#: Entries that show everything, or nothing.
PLAIN = {"full": 1.0, "empty": 0.0}

each = pytest.mark.parametrize("entry", ENTRIES, ids=[entry["title"] for entry in ENTRIES])


def mask_of(entry: dict[str, Any]) -> fm.Mask:
    return fm.parse(entry["text"]).bind(**entry.get("params", {}))


@each
def test_entry_is_declared_in_full(entry: dict[str, Any]) -> None:
    assert WANTED <= set(entry) <= WANTED | {"kv_len", "params"}
    assert entry["family"] in FAMILIES
    assert entry["title"][0].isupper()
    assert entry["source"]
    assert 16 <= entry["q_len"] <= 64
    assert 24 <= entry.get("kv_len", entry["q_len"]) <= 64


@each
def test_entry_lowers(entry: dict[str, Any]) -> None:
    mask = mask_of(entry)
    lengths = entry["q_len"], entry.get("kv_len", entry["q_len"])
    assert not mask.params
    seen = mask.dense(*lengths)
    fraction = float(seen.double().mean())
    assert fraction == PLAIN.get(entry["text"], fraction)
    assert entry["text"] in PLAIN or 0.02 < fraction < 0.98
    cells = torch.arange(lengths[1])
    rows = mask.rows(*lengths)
    assert not (rows.lower.holds(cells) & ~seen).any()
    assert not (seen & ~rows.upper.holds(cells)).any()


def test_titles_and_masks_differ() -> None:
    assert len({entry["title"] for entry in ENTRIES}) == len(ENTRIES)
    assert len({mask_of(entry) for entry in ENTRIES}) == len(ENTRIES)


def test_families_stand_together() -> None:
    families = [entry["family"] for entry in ENTRIES]
    assert len(set(families)) == 1 + sum(before != here for before, here in pairwise(families))


def test_every_named_mask_has_an_entry() -> None:
    nodes = [node for entry in ENTRIES for node in mask_of(entry).walk()]
    shown = {node.name for node in nodes if isinstance(node, Named)} | {str(node) for node in nodes if isinstance(node, Truth)}
    assert set(named_masks) - shown == set()
