"""The gallery as files: what is drawn is the mask, what is committed is up to date, and what is wrong with a source is said.

After a change of the entries, of the drawing or of the page, write ``gallery/`` again with ``flexmask gallery`` in the checkout.
"""

from __future__ import annotations

import base64
import json
import re
import shlex
import tomllib
import zlib
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from matplotlib.image import imread
from PIL import Image

import flexmask as fm
from flexmask.cli import main
from flexmask.errors import FlexmaskError
from flexmask.gallery.build import PROJECT, build, index, readme, write_picture
from flexmask.gallery.rendered import RenderedEntry, command, python, render_entry
from flexmask.gallery.source import Entry, own_source, read_entries, select_entries
from flexmask.plotting.mpl.drawing import entries_of
from tests.support.exhaustive import each_run, one_in

FOLDER = Path(__file__).parents[2] / "gallery"
ENTRIES = read_entries(FOLDER / "gallery.toml")
#: Root mean square of the differences of a committed picture, of 255: letters may move by a hair, no cell may change.
TOLERANCE = 1.5
ANEW = "gallery/ is out of date: run `flexmask gallery` in the checkout"

#: Pictures that are drawn again: each third, and those with several panels or with labels; some of them in each run.
SAMPLE = [entry for n, entry in enumerate(ENTRIES) if n % 3 == 0 or "all" in (entry.batch, entry.head) or entry.q_tokens]

each = pytest.mark.parametrize("entry", ENTRIES, ids=[entry.slug for entry in ENTRIES])


@cache
def worked_out(place: int) -> RenderedEntry:
    return render_entry(ENTRIES[place])


@pytest.fixture(scope="module")
def found() -> list[RenderedEntry]:
    return [worked_out(place) for place in range(len(ENTRIES))]


@pytest.fixture(scope="module")
def page(found: list[RenderedEntry]) -> str:
    return index(found)


def data_of(page: str) -> list[dict[str, Any]]:
    """What the page's script reads."""
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    entries: list[dict[str, Any]] = json.loads(text)
    return entries


def cells_of(entry: Entry) -> torch.Tensor:
    """All sequences and heads of an entry's mask."""
    mask = fm.parse(entry.text).bind(**entry.params)
    return mask.dense(entry.q_len, entry.kv_len, q_offset=entry.q_offset)


def panels_of(entry: Entry) -> list[torch.Tensor]:
    """The cells of those that are drawn, row by row."""
    cells = cells_of(entry)
    chosen = [range(n) if index == "all" else [index] for n, index in zip(cells.shape, (entry.batch, entry.head), strict=False)]
    return [cells[row, head] for row in chosen[0] for head in chosen[1]]


# ---------------------------------------------------------------- what is drawn


@each
def test_pictures_are_the_mask(entry: Entry) -> None:
    pictures = worked_out(ENTRIES.index(entry)).sheet.pictures
    panels = panels_of(entry)
    assert len(pictures) == len(panels)
    for shown, cells in zip(pictures, panels, strict=True):
        assert shown.categories[0].role == "visible"
        assert np.array_equal(shown.cells == 0, cells.numpy())


def test_page_holds_the_masks(page: str) -> None:
    data = data_of(page)
    assert [one["slug"] for one in data] == [entry.slug for entry in ENTRIES]
    for one, entry in zip(data, ENTRIES, strict=True):
        shown = [zlib.decompress(base64.b64decode(panel["cells"])) for panel in one["view"]["panels"]]
        assert [[kind == 0 for kind in panel] for panel in shown] == [cells.flatten().tolist() for cells in panels_of(entry)]
        assert {key: one[key] for key in ("title", "family", "caption", "text")} == {
            "title": entry.title,
            "family": entry.family,
            "caption": entry.caption,
            "text": entry.text,
        }
        assert "".join(text if address is None else address for text, address in one["source"]) == entry.source


def test_page_holds_the_figures(page: str) -> None:
    for one, entry in zip(data_of(page), ENTRIES, strict=True):
        cells = cells_of(entry)
        (label, visible), (sparsity_label, sparsity), (_, cost) = one["statistics"]
        size = entry.block_size or int(sparsity_label.split()[-1])
        blocks = [block for panel in cells.flatten(0, 1) for rows in panel.split(size) for block in rows.split(size, 1)]
        computed = sum(bool(block.any()) for block in blocks)
        assert visible == f"{100 * float(cells.double().mean()):.1f} %"
        assert sparsity == f"{100 * (1 - computed / len(blocks)):.1f} %"
        assert cost == f"{100 * computed * size * size / cells.numel():.1f} %"
        assert sparsity_label == f"Block sparsity, blocks of {size}"
        assert ("of all" in label) == (max(cells.shape[:2]) > 1)


@each
def test_snippets_give_the_mask(entry: Entry) -> None:
    made: dict[str, Any] = {}
    exec(python(entry), made)
    assert made["mask"] == fm.parse(entry.text).bind(**entry.params)
    assert made["block_mask"].shape[-2:] == (entry.q_len, entry.kv_len)


@pytest.mark.parametrize("entry", one_in(8, ENTRIES), ids=lambda entry: entry.slug)
def test_command_draws_the_entry(entry: Entry) -> None:
    words = shlex.split(command(entry))
    assert words[0] == "flexmask"
    result = CliRunner(env={"COLUMNS": "400"}).invoke(main, words[1:])
    assert result.exit_code == 0, result.output
    assert f"{entry.q_len} queries x {entry.kv_len} keys" in result.stdout
    shown = re.findall(r"([\d.]+) % visible", result.stdout)
    assert shown == [f"{100 * float(cells.double().mean()):.3g}" for cells in panels_of(entry)]


# ---------------------------------------------------------------- what is committed


def unpacked(page: str) -> str:
    """A page with the contents of its packed data instead of what the compression of this machine makes of them."""
    packed = r'(?<=")eN[\w+/=]+(?=")'
    return re.sub(packed, lambda text: sha256(zlib.decompress(base64.b64decode(text[0]))).hexdigest(), page)


def test_committed_readme_is_up_to_date(found: list[RenderedEntry]) -> None:
    assert (FOLDER / "README.md").read_text(encoding="utf-8") == readme(found), ANEW


def test_committed_page_is_up_to_date(page: str) -> None:
    committed = (FOLDER / "index.html").read_text(encoding="utf-8")
    assert len(unpacked(committed)) != len(committed)
    assert unpacked(committed) == unpacked(page), ANEW


def test_committed_pictures_are_those_of_the_entries() -> None:
    pictures = {path.name for path in (FOLDER / "pictures").iterdir()}
    wanted = {f"{entry.slug}.png" for entry in ENTRIES}
    assert wanted - pictures == set(), ANEW
    assert pictures - wanted == set(), "gallery/pictures has files of no entry: remove them"
    for entry in ENTRIES:
        path = FOLDER / "pictures" / f"{entry.slug}.png"
        with Image.open(path) as picture:
            assert picture.info["Description"] == command(entry), ANEW
        assert path.stat().st_size < 40_000


@pytest.mark.parametrize("slug", each_run([entry.slug for entry in SAMPLE], *(entry.slug for entry in SAMPLE[::28])))
def test_committed_picture_is_up_to_date(slug: str, tmp_path: Path) -> None:
    (entry,) = (entry for entry in ENTRIES if entry.slug == slug)
    committed = FOLDER / "pictures" / f"{entry.slug}.png"
    path = tmp_path / "now.png"
    write_picture(worked_out(ENTRIES.index(entry)), path)
    one, other = (imread(file)[..., :3].astype(np.float64) * 255 for file in (path, committed))
    assert one.shape == other.shape, ANEW
    assert float(np.sqrt(((one - other) ** 2).mean())) <= TOLERANCE, ANEW


def test_committed_page_is_small_and_asks_for_nothing() -> None:
    page = (FOLDER / "index.html").read_text(encoding="utf-8")
    assert len(page) < 1_000_000
    assert re.findall(r'(?:src|href)="([^"#]+)"', page) == ["data:,", PROJECT]
    pyproject = tomllib.loads((FOLDER.parent / "pyproject.toml").read_text(encoding="utf-8"))
    assert pyproject["project"]["urls"]["Source"] == PROJECT
    assert "url(" not in page
    assert "@import" not in page
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]+)"', page)
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


def test_readme_has_all_there_is_to_say(found: list[RenderedEntry]) -> None:
    text = readme(found)
    for family in {entry.family for entry in ENTRIES}:
        count = sum(entry.family == family for entry in ENTRIES)
        assert f"[{family.capitalize()}](#{family.replace(' ', '-')}) | {count} |" in text
    plain = text.replace("\\", "")
    for entry in ENTRIES:
        _, section = plain.split(f"\n### {entry.title}\n")
        section = section.split("\n### ")[0]
        wanted = [
            f'src="pictures/{entry.slug}.png"',
            entry.caption,
            f"```python\n{python(entry)}\n```\n",
            f"{entry.q_len} queries × ",
        ]
        wanted += [f"`{tag}`" for tag in entry.tags]
        wanted += [f" · {alias}" for alias in entry.aliases]
        wanted += [f"({address})" for address in re.findall(r"https://[^\s;,]+", entry.source)]
        assert [part for part in wanted if part not in section] == []


def test_code_of_the_readme_runs() -> None:
    """Each block of Python runs as it stands, and makes the mask of its section."""
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)\n```$", text, re.DOTALL | re.MULTILINE)
    assert len(blocks) == len(ENTRIES)
    for block, entry in zip(blocks, ENTRIES, strict=True):
        made: dict[str, Any] = {}
        exec(block, made)
        assert made["mask"] == entry.mask()


def test_no_picture_has_six_entries_in_its_legend(found: list[RenderedEntry]) -> None:
    for one in found:
        entries, _ = entries_of(one.sheet.pictures, 60)
        assert len(entries) < 6, one.entry.title


# ---------------------------------------------------------------- the files, and the command


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.exhaustive
def test_same_entries_same_bytes(tmp_path: Path) -> None:
    some = select_entries(ENTRIES, ["a-mask-for-each-head"])
    seen: list[str] = []
    build(some, tmp_path / "one", lambda entry: seen.append(entry.slug))
    with matplotlib.rc_context({"font.size": 20, "axes.grid": True, "savefig.dpi": 30}):
        build(some, tmp_path / "other")
    assert seen == [entry.slug for entry in some]
    assert contents(tmp_path / "one") == contents(tmp_path / "other")
    assert set(contents(tmp_path / "one")) == {f"pictures/{slug}.png" for slug in seen} | {"README.md", "index.html"}


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["gallery", *arguments])


def test_only_some_are_written(tmp_path: Path) -> None:
    result = run(
        "--only", "Medusa", "--only", "graphs", "--only", "causal-sliding-window", "-o", str(tmp_path / "new" / "folder")
    )
    wanted = [entry for entry in ENTRIES if "graphs" in entry.tags or entry.slug in ("medusa", "causal-sliding-window")]
    assert len(wanted) == 3
    assert result.exit_code == 0, result.output
    assert result.stderr == f"wrote 3 pictures, README.md and index.html to {tmp_path / 'new' / 'folder'}\n"
    assert {path.stem for path in (tmp_path / "new" / "folder" / "pictures").iterdir()} == {entry.slug for entry in wanted}
    page = (tmp_path / "new" / "folder" / "index.html").read_text(encoding="utf-8")
    assert [one["title"] for one in data_of(page)] == [entry.title for entry in wanted]


def test_families_can_be_chosen() -> None:
    assert {entry.family for entry in select_entries(ENTRIES, ["trees"])} == {"trees"}
    assert select_entries(ENTRIES, []) == ENTRIES


def test_unknown_name_is_refused(tmp_path: Path) -> None:
    result = run("--only", "videos", "-o", str(tmp_path / "new"))
    assert result.exit_code == 2
    assert result.stderr == "Error: the gallery has no tag, family, alias or title 'videos'. Did you mean video?\n"
    assert not (tmp_path / "new").exists()


def test_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "pictures").write_text("")
    result = run("--only", "graphs", "-o", str(tmp_path))
    assert result.exit_code == 2
    assert result.stderr.startswith(f"Error: cannot write '{tmp_path / 'pictures'}'")


def test_own_source_is_that_of_the_checkout() -> None:
    assert own_source() == FOLDER / "gallery.toml"


# ---------------------------------------------------------------- sources of users

MINE = {
    "title": '"Mine <b>& all"',
    "family": '"my_masks"',
    "text": '"causal & document(ids)"',
    "q_len": "6",
    "tags": '["a<b>", "b"]',
    "caption": '"It *hides* <i>what</i> is $not there & more."',
    "source": '"me, https://example.org/?a=1&b=2; you"',
    "params": "{ ids = [0, 0, 0, 1, 1, 2] }",
}


def source(folder: Path, *tables: dict[str, str]) -> Path:
    path = folder / "mine.toml"
    lines = ["\n".join(["[[mask]]", *(f"{key} = {value}" for key, value in table.items())]) for table in tables]
    path.write_text("\n\n".join(lines), encoding="utf-8")
    return path


def test_own_masks(tmp_path: Path) -> None:
    given = source(tmp_path, MINE, MINE | {"title": '"Other"', "why": "true", "kv_len": "6", "block_size": "2"})
    result = run("--source", str(given), "-o", str(tmp_path / "new"))
    assert result.exit_code == 0, result.output
    page = (tmp_path / "new" / "index.html").read_text(encoding="utf-8")
    assert page.count("Mine &lt;b&gt;&amp; all") == 1
    assert "<i>" not in page
    assert data_of(page)[0]["caption"] == "It *hides* <i>what</i> is $not there & more."
    text = (tmp_path / "new" / "README.md").read_text(encoding="utf-8")
    assert "### Mine \\<b\\>\\& all\n" in text
    assert "## My masks\n" in text
    assert {path.name for path in (tmp_path / "new" / "pictures").iterdir()} == {"mine-b-all.png", "other.png"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"titel": '"x"'}, r"entry 1 \('Mine'\): there is no key 'titel'\. Did you mean title\?"),
        ({"caption": None}, r"entry 1 \('Mine'\): caption is missing"),
        ({"title": None, "tags": None}, r"entry 1: title and tags are missing"),
        ({"title": '"漢字"'}, r"entry 1 \('漢字'\): title must have an ASCII letter or digit"),
        ({"title": '" "'}, r"entry 1 \(' '\): title must be a string, got ' '"),
        ({"q_len": "0"}, r"entry 1 \('Mine'\): q_len must be a number of tokens from 1 to 512, got 0"),
        ({"q_len": "true"}, r"q_len must be .* got True"),
        ({"kv_len": "513"}, r"kv_len must be .* got 513"),
        ({"q_offset": "-1"}, r"q_offset must be a position from 0 on, got -1"),
        ({"batch": '"some"'}, r"batch must be an index from 0 on or \"all\", got 'some'"),
        ({"head": "7"}, r"entry 'Mine': batch, head: .*head"),
        ({"why": "1"}, r"why must be true or false, got 1"),
        ({"tags": "[]"}, r"tags must be a list of strings, got \[\]"),
        ({"q_tokens": '["a"]'}, r"q_tokens must be 6 labels, one for each position, got 1"),
        ({"params": "{ ids = 'a' }"}, r"params must be a table of numbers and lists, got \{'ids': 'a'\}"),
        ({"params": "{}"}, r"entry 'Mine': params has no value for ids"),
        ({"params": "{ id = [0] }"}, r"entry 'Mine': text, params: .*id"),
        ({"params": "{ ids = [0, 0] }"}, r"entry 'Mine': params, q_len, kv_len: .*2 values along q, but q_len is 6"),
        ({"computed": "{ ids = 3 }"}, r"computed must be a table of strings, got \{'ids': 3\}"),
        ({"computed": "{ idz = 'x' }"}, r"entry 1 \('Mine'\): computed has idz, which params does not have"),
        ({"text": '"causal &"'}, r"entry 'Mine': text, params: "),
        ({"text": '"casual"'}, r"entry 'Mine': .*casual"),
    ],
)
def test_wrong_entry_is_named(tmp_path: Path, change: dict[str, str | None], message: str) -> None:
    table = {key: value for key, value in (MINE | {"title": '"Mine"'} | change).items() if value is not None}
    result = run("--source", str(source(tmp_path, table)), "-o", str(tmp_path / "new"))
    assert result.exit_code == 2, result.output
    assert re.search(message, result.stderr.replace("\n", " ")), result.stderr
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[mask]\n", "is not TOML: "),
        ("[mask]\ntitle = 'x'\n", r"must hold one \[\[mask\]\] for each entry and nothing else"),
        ("", r"must hold one \[\[mask\]\] for each entry"),
        (None, "cannot read '.*mine.toml': No such file or directory"),
    ],
)
def test_wrong_file_is_named(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "mine.toml").write_text(text)
    result = run("--source", str(tmp_path / "mine.toml"), "-o", str(tmp_path / "new"))
    assert result.exit_code == 2
    assert re.search(message, result.stderr), result.stderr


def test_titles_that_name_the_same_files(tmp_path: Path) -> None:
    given = source(tmp_path, MINE | {"title": '"One, two"'}, MINE | {"title": '"one two"'})
    with pytest.raises(FlexmaskError, match=r"entry 2 \('one two'\): title names the same files as that of entry 1 .*: one-two"):
        read_entries(given)
