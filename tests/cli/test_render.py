"""``flexmask render`` and the pictures of ``flexmask diff``: what is drawn of which part, and with which labels."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from matplotlib.image import imread

import flexmask as fm
from flexmask.cli import main
from tests.support.exhaustive import one_in

PADDED = "causal & key_padding(lengths=[3, 5, 4])"


def run(*arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(main, list(arguments))
    assert result.exit_code == code, result.output
    return result


def cells(line: str) -> str:
    return line.split(maxsplit=1)[1].replace(" ", "")


def test_why_has_a_letter_for_each_term() -> None:
    lines = run("render", PADDED, "--why", "--batch", "2", "--no-bands").stdout.splitlines()
    drawn = [line for line in lines if line.strip()[:1].isdecimal()][-5:]
    assert [cells(line) for line in drawn] == ["#aaaa", "##aaa", "###aa", "####a", "####b"]
    legend = " ".join(lines[-3:])
    assert "a hidden by causal (10)" in legend
    assert "b hidden by key_padding(lengths=[3, 5, 4]) (1)" in legend


def test_all_sequences_or_some() -> None:
    out = run("render", PADDED, "--batch", "all").stdout
    assert [place for place in range(3) if f"sequence {place}, " in out] == [0, 1, 2]
    out = run("render", PADDED, "--batch", "2,0").stdout
    assert [place for place in range(3) if f"sequence {place}, " in out] == [0, 2]
    out = run("render", "per_head([causal, full])", "--head", "all", "--seq-len", "3").stdout
    assert "head 0, 66.7 % visible" in out
    assert "head 1, 100 % visible" in out


def test_terms_then_the_whole() -> None:
    out = run("render", PADDED, "--terms").stdout
    found = [out.find(words) for words in ("\ncausal, 60 % visible", "together, sequence 0 of", "hidden by causal")]
    assert -1 not in found
    assert max(found) == found[-1]  # titles may be wrapped, the legend comes last


def test_tokens_say_the_lengths(tmp_path: Path) -> None:
    (tmp_path / "source.txt").write_text("the cat\nsat down")
    (tmp_path / "target.json").write_text(json.dumps(["le chat", "[CLS]"]))
    tokens = ["--tokens", f"@{tmp_path / 'target.json'}", "--kv-tokens", f"@{tmp_path / 'source.txt'}"]
    out = run("render", "full", *tokens).stdout
    assert "2 queries x 4 keys" in out
    assert [line.split("  ")[0].strip() for line in out.splitlines() if "# # # #" in line.replace("  ", " ")] != []
    assert "le chat" in out
    assert "5 queries x 5 keys" in run("render", "causal", "--tokens", "[CLS] a b c [SEP]").stdout
    later = run("render", "causal", "--tokens", "a b c d", "--q-offset", "3").stdout
    assert "1 query x 4 keys" in later


@pytest.mark.parametrize(
    ("options", "ending"),
    one_in(
        2,
        [["--why"], ["--terms"], ["--batch", "all"], ["--batch", "0,2", "--why", "--block-size", "2"], ["--no-bands"]],
        ["png", "svg"],
    ),
)
def test_files(tmp_path: Path, ending: str, options: list[str]) -> None:
    path = tmp_path / f"mask.{ending}"
    assert run("render", PADDED, *options, "-o", str(path)).stderr == f"wrote {path}\n"
    same = tmp_path / f"same.{ending}"
    keywords: dict[str, object] = {
        "--why": {"why": True},
        "--terms": {"terms": True},
        "--batch all": {"batch": "all"},
        "--batch 0,2 --why --block-size 2": {"batch": [0, 2], "why": True, "block_size": 2},
        "--no-bands": {"bands": False},
    }
    fm.parse(PADDED).save_picture(same, **keywords[" ".join(options)])  # type: ignore[arg-type]
    assert path.read_bytes() == same.read_bytes()


def test_an_interactive_file_has_every_sequence(tmp_path: Path) -> None:
    path, same = tmp_path / "mask.html", tmp_path / "same.html"
    run("render", PADDED, "-o", str(path))
    fm.parse(PADDED).save_picture(same)
    assert path.read_bytes() == same.read_bytes()
    assert path.read_text().count('"batch":') == 3


def test_the_frame_of_a_file(tmp_path: Path) -> None:
    """A title, no legend and a width, in a folder that is not there yet."""
    path, same, wide = (tmp_path / "new" / "folder" / name for name in ("mask.svg", "same.svg", "wide.svg"))
    frame = ("--title", "Three sentences", "--no-legend")
    run("render", PADDED, *frame, "--width", "1.5", "-o", str(path))
    fm.parse(PADDED).save_picture(same, title="Three sentences", legend=False, width=1.5)
    assert path.read_bytes() == same.read_bytes()
    written = path.read_text()
    assert ">Three sentences</text>" in written  # text as text, which LaTeX and editors set in their own fonts
    assert "visible" not in written
    fm.parse(PADDED).save_picture(wide, title="Three sentences", legend=False, width=6)
    sizes = [float(re.findall(r'width="([\d.]+)pt"', file.read_text())[0]) for file in (path, wide)]
    assert sizes[1] - sizes[0] == pytest.approx(72 * 4.5, abs=2)
    run("render", PADDED, *frame, "--batch", "all", "-o", str(tmp_path / "panels.svg"))
    assert "visible (" not in (tmp_path / "panels.svg").read_text()


def test_the_frame_in_the_terminal() -> None:
    for options in ([], ["--batch", "all"]):
        lines = run("render", PADDED, "--title", "Three sentences", "--no-legend", "--width", "40", *options).stdout.splitlines()
        assert lines[0] == "Three sentences"
        assert not any("# visible" in line or "hidden" in line for line in lines)
        assert max(map(len, lines)) <= 40
    assert "the letter of the first term" in run("render", PADDED, "--why").stdout


BAD: list[tuple[Sequence[str], str]] = [
    (["render", PADDED, "--batch", "x"], "neither an index from 0, nor several of them"),
    (["render", PADDED, "--batch", "0,7"], "batch 7 is out of range: the sequences are 0 to 2"),
    (["render", PADDED, "--batch", "all", "--terms"], "draws one sequence and one head"),
    (["render", "q - b >= kv", "--batch", "all"], "does not determine the size of batch"),
    (["render", PADDED, "--tokens", "a b"], "at most kv_len = 2, got 5"),
    (["render", "causal", "--seq-len", "3", "--tokens", "a b"], "tokens must label each of the 3 positions, got 2"),
    (["render", "causal", "--tokens", ""], "it has no token"),
    (["render", "causal", "--tokens", "a b", "--q-offset", "5"], "2 tokens do not reach --q-offset 5"),
    (["render", "causal", "--tokens", "@no/file"], "cannot read 'no/file'"),
    (["render", "causal", "--terms", "-o", "mask.html"], "terms"),
    (["render", "causal", "--title", "mine", "-o", "mask.html"], "the interactive view has its own title"),
    (
        ["render", "causal", "--width", "0", "-o", "new/mask.png"],
        "width must be a number of inches above 0 and up to 100, got 0.0",
    ),
    (["render", "causal", "--width", "2.5"], "--width is a whole number of characters from 16 on in the terminal, got 2.5"),
    (["diff", "causal", "full", "-o", "mask.gif"], "must end in .png, .svg, .pdf or .html"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[" ".join(row[0])[:60] for row in BAD])
def test_bad_input(arguments: Sequence[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(*arguments, code=2)
    assert message in result.stderr
    assert "Traceback" not in result.output
    assert list(tmp_path.iterdir()) == []


def test_a_difference_is_drawn_where_it_is() -> None:
    out = run("diff", "key_padding([3, 3])", "key_padding([3, 2])", "--q-len", "2", code=1).stdout
    drawn = [line for line in out.splitlines() if line.strip()[:1] in ("0", "1") and "#" in line]
    assert [cells(line) for line in drawn] == ["##+", "##+"]
    assert "sequence 1 of 2" in out
    assert "q\\kv" not in run("diff", "causal", "causal").stdout


def test_a_difference_as_a_file(tmp_path: Path) -> None:
    path, same = tmp_path / "mask.png", tmp_path / "same.png"
    run("diff", "causal", "full", "--seq-len", "4", "-o", str(path), code=1)
    fm.causal().save_picture(same, 4, against=fm.full())
    assert (imread(path) == imread(same)).all()
    run("diff", "causal", "full", "--seq-len", "4", "-o", str(tmp_path / "mask.html"), code=1)
    assert '"only_a"' in (tmp_path / "mask.html").read_text()
