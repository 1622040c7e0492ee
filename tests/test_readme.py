"""The README's code runs as it stands there and prints what it shows, and its links work wherever it is read."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from tests.support.exhaustive import each_run
from tests.support.pages import blocks_of, run_page

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
TEXT = README.read_text()
URLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
#: Where the files of the main branch are on the web, as pages and as pictures.
WEB = rf"{URLS['Source']}/(?:blob|tree)/main/|{URLS['Source'].replace('github.com', 'raw.githubusercontent.com')}/main/"


@pytest.mark.parametrize("backend", each_run(["aot_eager", "inductor"], "aot_eager"))
def test_code_runs(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block after the others, as a reader would type them. Inductor takes 15 seconds on a new machine."""
    monkeypatch.chdir(tmp_path)
    found = run_page(README, lambda code: code.replace("fullgraph=True)", f"fullgraph=True, backend={backend!r})"))
    assert {"layer", "packed", "plan", "block_mask", "cache", "compiled"} <= set(found)
    assert (tmp_path / "mask.png").is_file()


def test_there_is_something_to_run() -> None:
    blocks = blocks_of(README)
    assert sum(block.language == "python" for block in blocks) >= 10
    assert sum(len(block.commands) for block in blocks) >= 3
    assert len(TEXT.splitlines()) <= 220


def test_links_are_absolute_and_lead_to_files() -> None:
    """A relative link works on no page of a package index."""
    links = re.findall(r"\]\(([^)]+)\)", TEXT)
    assert len(links) >= 10
    assert [link for link in links if not link.startswith("https://")] == []
    for place in [re.sub(WEB, "", link) for link in [*links, *URLS.values()] if re.match(WEB, link)]:
        assert (ROOT / place.partition("#")[0]).exists(), place
