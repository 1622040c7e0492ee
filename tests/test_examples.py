"""The examples run as they stand, and show what they say."""

from __future__ import annotations

import importlib.util
import os
import re
import socket
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from tests.support.exhaustive import exhaustive
from tests.support.ranks import fork_ranks

EXAMPLES = Path(__file__).parent.parent / "examples"
SMALL = ["--steps", "12", "--seq-len", "64", "--batch", "4"]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def packed_text() -> ModuleType:
    return load("packed_text")


@pytest.fixture(scope="module")
def translate() -> ModuleType:
    return load("translate")


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


def by_torchrun(ranks: int, arguments: list[str], folder: Path) -> str:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES.parent)}
    command = [*torchrun, str(EXAMPLES / "packed_text.py"), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    return result.stdout


def by_forks(ranks: int, arguments: list[str], folder: Path) -> str:
    """Processes with what torchrun says to them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    fork_ranks(ranks, train, (ranks, port, folder, arguments))
    return "".join(path.read_text() for path in sorted(folder.glob("rank*.txt")))


def train(rank: int, world: int, port: int, folder: Path, arguments: list[str]) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    with open(folder / f"rank{rank}.txt", "w") as file, redirect_stdout(file):
        load("packed_text").main(arguments, standalone_mode=False)


@pytest.mark.slow
@pytest.mark.parametrize("launch", [by_forks, *exhaustive([by_torchrun])])
def test_tokens_distributed_over_processes(packed_text: ModuleType, tmp_path: Path, launch: Any) -> None:
    """The losses are those of one process, also after a run that was stopped, with another number of processes."""
    text = EXAMPLES.parent / "README.md"
    whole = run(packed_text, text, *SMALL)
    saved, drawn = tmp_path / "packed_text.pt", tmp_path / "mask.png"
    found = []
    for ranks, steps in ((2, 10), (1, 12)):
        given = [text, *SMALL, "--steps", steps, "--context-parallel", "--checkpoint", saved, "-o", drawn]
        folder = tmp_path / str(ranks)
        folder.mkdir()
        found += re.findall(r"step +\d+ +loss [\d.]+", launch(ranks, [str(argument) for argument in given], folder))
    assert [re.findall(r"\d+", line)[0] for line in found] == ["1", "2", "3", "4", "5", "6", "7", "8", "9", "10", "12"]
    wanted = re.findall(r"step +\d+ +loss [\d.]+", whole.output)
    assert [line for line in found if line in wanted] == wanted
    assert drawn.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        (None, [], "missing.txt' does not exist"),
        (b" \n\n ", [], "missing.txt has no text"),
        (b"one passage alone", [], "no sequence holds two documents"),
        (b"one\n\ntwo", ["-o", "mask.gif"], "mask.gif"),
        (b"one\n\ntwo", ["-o", "/dev/null/mask.png"], "/dev/null"),
        (b"one\n\ntwo", ["--steps", "0"], "--steps"),
        (b"one\n\ntwo", ["--context-parallel"], "run the script with torchrun --nproc-per-node 4"),
    ],
    ids=["missing", "empty", "one document", "ending", "folder", "steps", "no torchrun"],
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


# ---------------------------------------------------------------- translate


def test_numbers_in_words(translate: ModuleType) -> None:
    found = {number: " ".join(translate.words_of(number)) for number in (0, 8, 13, 20, 101, 999, 1000, 40017, 999999)}
    assert found == {
        0: "zero",
        8: "eight",
        13: "thirteen",
        20: "twenty",
        101: "one hundred one",
        999: "nine hundred ninety nine",
        1000: "one thousand",
        40017: "forty thousand seventeen",
        999999: "nine hundred ninety nine thousand nine hundred ninety nine",
    }
    longest = max(len(translate.words_of(number)) for number in range(0, 10**6, 37))
    assert longest + 1 <= translate.LONGEST


def test_decoding_with_caches_equals_the_whole(translate: ModuleType) -> None:
    torch.manual_seed(0)
    model = translate.Translator().eval()
    pairs = translate.Pairs.of([40017, 8, 999])
    masks = pairs.masks | {"decoder": translate.causal()}
    with torch.no_grad():
        source = model.encode(model.embed_source(pairs), masks["encoder"])
        whole = model.decode(model.embed_words(pairs.target), source, masks)
        caches = [(translate.KVCache(20), translate.KVCache()) for _ in model.decoder]
        words = pairs.target.split(1, 1)
        steps = [model.decode(model.embed_words(word, step), source, masks, caches) for step, word in enumerate(words)]
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("steps", "percent"), [("2", 0), *exhaustive([("250", 80)])])
def test_translates_and_attends_no_padding(translate: ModuleType, tmp_path: Path, steps: str, percent: int) -> None:
    result = run(translate, "--steps", steps, "-o", tmp_path, "40017", "8")
    assert result.exit_code == 0, result.output
    share = re.search(r"([\d.]+)% of the numbers held back are right", result.output)
    assert share is not None
    assert float(share[1]) >= percent
    assert "No output depends on padding" in result.output
    drawn = {"encoder.png", "decoder.png", "cross-attention.png", "attention.png"}
    assert {path.name for path in tmp_path.iterdir()} == drawn
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in drawn)


def test_a_decoder_that_sees_padding_is_caught(translate: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, pairs = translate.Translator().eval(), translate.Pairs.of([40017, 8])
    translate.check(model, pairs)
    masks = pairs.masks
    wrong = masks | {"encoder": translate.cross_length(5)}
    honest = model.encode
    monkeypatch.setattr(model, "encode", lambda x, mask: honest(x, wrong["encoder"]))
    with pytest.raises(AssertionError, match="in batch 1 the output of query 0 depends on key 1 of context"):
        translate.check(model, pairs)
