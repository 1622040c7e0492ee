"""The examples run as they stand, and show what they say."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from click.testing import CliRunner, Result

EXAMPLES = Path(__file__).parent.parent / "examples"
SMALL = ["--steps", "12", "--seq-len", "64", "--batch", "4"]


@pytest.fixture(scope="module")
def packed_text() -> ModuleType:
    spec = importlib.util.spec_from_file_location("packed_text", EXAMPLES / "packed_text.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["packed_text"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def run(module: ModuleType, *arguments: str | Path) -> Result:
    return CliRunner().invoke(module.main, [str(argument) for argument in arguments])


def losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"step +\d+ +loss ([\d.]+)", output)]


def leaks(output: str) -> list[float]:
    return [float(moved) for moved in re.findall(r"([\d.e-]+) with causal", output)]


def test_loss_falls_and_documents_do_not_leak(packed_text: ModuleType) -> None:
    result = run(packed_text, *SMALL)
    assert result.exit_code == 0, result.output
    assert losses(result.output)[-1] < losses(result.output)[0] - 0.5
    with_documents, alone = leaks(result.output)
    assert with_documents == 0.0
    assert alone > 0
    assert "causal & document(ids" in result.output
    assert "64 queries" in result.output


def test_runs_on_given_files_and_draws_into_one(packed_text: ModuleType, tmp_path: Path) -> None:
    one, two, drawn = tmp_path / "one.txt", tmp_path / "two.txt", tmp_path / "mask.png"
    one.write_text("\n\n".join(["one two three", "four", "five six"] * 20))
    two.write_bytes(b"\xff\xfe not UTF-8\r\n\r\n\r\nstill text\n")
    result = run(packed_text, one, two, *SMALL, "-o", drawn)
    assert result.exit_code == 0, result.output
    assert "62 documents" in result.output
    assert leaks(result.output)[0] == 0.0
    assert drawn.read_bytes().startswith(b"\x89PNG")


def test_packing(packed_text: ModuleType) -> None:
    """Whole documents share a sequence while they fit; one that is longer than a sequence is cut."""
    packed = packed_text.pack([b"abc", b"de", b"fghijklmnop", b"q"], 8)
    assert [bytes(row) for row in packed.tokens.tolist()] == [b"abcde\0\0\0", b"fghijklm", b"nopq\0\0\0\0"]
    assert packed.ids.tolist() == [[0, 0, 0, 1, 1, -1, -1, -1], [0] * 8, [0, 0, 0, 1, -1, -1, -1, -1]]
    assert packed.positions.tolist()[0] == [0, 1, 2, 0, 1, 0, 0, 0]
    assert packed.targets.tolist()[0] == [ord("b"), ord("c"), -1, ord("e"), -1, -1, -1, -1]
    visible = packed.mask.dense(8)[0, 0]
    same = [[q < 5 and kv < 5 and (q < 3) == (kv < 3) and kv <= q for kv in range(8)] for q in range(8)]
    assert torch.equal(visible, torch.tensor(same))


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        (None, [], "missing.txt' does not exist"),
        (b" \n\n ", [], "missing.txt has no text"),
        (b"one passage alone", [], "no sequence holds two documents"),
        (b"one\n\ntwo", ["-o", "mask.gif"], "mask.gif"),
        (b"one\n\ntwo", ["-o", "no_such_folder/mask.png"], "no_such_folder"),
        (b"one\n\ntwo", ["--steps", "0"], "--steps"),
    ],
    ids=["missing", "empty", "one document", "ending", "folder", "steps"],
)
def test_bad_input_is_explained(
    packed_text: ModuleType, tmp_path: Path, text: bytes | None, arguments: list[str], message: str
) -> None:
    path = tmp_path / "missing.txt"
    if text is not None:
        path.write_bytes(text)
    result = run(packed_text, path, *arguments)
    assert result.exit_code == 2
    assert message in re.sub(r"\s*\n\s*", " ", result.output)
    assert "Traceback" not in result.output
