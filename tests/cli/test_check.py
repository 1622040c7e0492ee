"""``flexmask check``: its table, its picture, its exit codes, and what it refuses."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest

from flexmask.cli import main
from flexmask.intervals.rows import Rows
from tests.support.cli import run
from tests.support.imports import loaded_after

CHECKS = [
    "dense",
    "rows",
    "mask_mod (expression)",
    "mask_mod (interval)",
    "BlockMask (kv_indices)",
    "stats",
    "sdpa float32 output",
    "sdpa float32 gradient of value",
]

MODULE = """
import torch
import flexmask as fm

lengths = torch.tensor([3, 5])
mask = fm.causal() & fm.key_padding(lengths)

def right(b, h, q_idx, kv_idx):
    return (kv_idx <= q_idx) & (kv_idx < lengths[b])

def wrong(b, h, q_idx, kv_idx):
    return (kv_idx < q_idx) & (kv_idx < lengths[b])

def broken(b, h, q_idx, kv_idx):
    raise KeyError("no")
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module of the current folder."""
    name = f"masks_to_check_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    return name


def test_all_agree() -> None:
    result = run("check", "causal & document(lengths=[4, 6])")
    assert result.exit_code == 0, result.output
    assert [name for name in CHECKS if name not in result.stdout] == []
    assert result.stdout.isascii()
    assert "0 of 100 cells differ" in result.stdout
    assert "largest error" in result.stdout
    assert "differs" not in result.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["sliding_window(size=4)", "--against", "causal & (q - kv < 4)", "--seq-len", "20"],
        ["causal", "--against", "kv <= q", "--q-len", "2", "--kv-len", "9", "--q-offset", "5"],
        ["causal & ((q + b) % 2 == h)", "--batch", "2", "--heads", "3", "--block-size", "4,8"],
        ["key_padding(n) & document(ids)", "--against", "document(ids) - (kv >= n)", "-p", "n=3", "-p", "ids=[0,0,1,1]"],
        ["causal & key_padding(n)", "--against", "causal & (kv < 4)", "-p", "n=4"],
        ["causal & (kv < 4)", "--against", "causal & key_padding(n)", "-p", "n=4"],
    ],
    ids=" ".join,
)
def test_equal_masks(arguments: Sequence[str]) -> None:
    result = run("check", *arguments)
    assert result.exit_code == 0, result.output


def test_functions_of_a_module(module: str) -> None:
    for expression in (f"{module}:mask", f"{module}:right", "causal & key_padding([3, 5])"):
        result = run("check", expression, "--against", f"{module}:right", "--seq-len", "6", "--batch", "2")
        assert result.exit_code == 0, result.output
    result = run("check", f"{module}:mask", "--against", f"{module}:wrong", "--seq-len", "6", "--batch", "2")
    assert result.exit_code == 1
    assert "q\\kv 0 1 2 3 4 5\n   0 + . . . . .\n   1 # + . . . .\n   2 # # + . . .\n   3 # # # . . .\n" in result.stdout
    assert run("check", f"{module}:mask", "--against", f"{module}:mask", "--seq-len", "6").exit_code == 0


def test_a_difference_is_shown() -> None:
    result = run("check", "sliding_window(size=4)", "--against", "causal & (q - kv < 3)", "--seq-len", "6")
    assert result.exit_code == 1
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["dense", "differs", "3", "of", "36", "cells", "differ", "(0"] in [line[:8] for line in lines]
    assert "dense:\nq\\kv 0 1 2 3 4 5\n" in result.stdout
    assert "   3 + # # # . .\n" in result.stdout
    assert "- missing   + extra" in result.stdout


def test_a_lowering_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rows, "holds", lambda self, kv: kv > 3)
    result = run("check", "causal", "--seq-len", "8")
    assert result.exit_code == 1
    verdicts = [line.split()[:2] for line in result.stdout.splitlines()]
    assert ["dense", "ok"] in verdicts
    assert ["rows", "differs"] in verdicts
    assert "rows:\nq\\kv" in result.stdout


BAD: list[tuple[Sequence[str], str]] = [
    (["casual"], "Did you mean causal?"),
    (["causal", "--against", "casual"], "Did you mean causal?"),
    (["causal", "--against", "no.such:thing"], "cannot import no.such"),
    (["causal", "--against", "flexmask:__version__"], "this is not an expression"),
    (["causal", "--against", "flexmask:__all__"], "reference must be a Mask, its text, a mask_mod or a boolean tensor, got list"),
    (["causal", "--against", "key_padding(n)"], "needs a value for the parameter n"),
    (["causal", "--against", "full", "-p", "n=3"], "no parameter n"),
    (["causal", "--against", "key_padding([5])", "--seq-len", "4"], "at most kv_len = 4, got 5"),
    (["causal", "--device", "abacus"], "there is no device 'abacus'"),
    (["causal", "--seq-len", "100000"], "10,000,000,000 cells; at most"),
    (["causal & (h > 0)"], "give heads="),
    (["causal", "--backend", "cudnn"], "'cudnn' is not one of 'sdpa', 'flash', 'flex'"),
    (["causal", "--seq-len", "0"], "0 is not in the range x>=1"),
    ([], "Missing argument 'EXPR'"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[" ".join(row[0]) for row in BAD])
def test_bad_input(arguments: Sequence[str], message: str) -> None:
    result = run("check", *arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_a_function_that_fails(module: str) -> None:
    result = run("check", "causal", "--against", f"{module}:broken")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "the reference broken cannot be called" in result.stderr


@pytest.mark.parametrize(
    "line", [line.strip() for line in str(main.commands["check"].help).splitlines() if "flexmask check " in line]
)
def test_examples_of_the_help_work(line: str) -> None:
    assert run(*shlex.split(line)[1:]).exit_code == 0


def test_help_needs_no_torch() -> None:
    statement = "from flexmask.cli import main\ntry: main(['check', '--help'])\nexcept SystemExit: pass"
    assert "torch" not in loaded_after(statement, {"torch"})


def test_help_tells_all() -> None:
    text = run("check", "--help").stdout
    for option in (
        "--against",
        "--device",
        "--backend",
        "--batch",
        "--heads",
        "--block-size",
        "--seq-len",
        "--q-offset",
        "--param",
    ):
        assert option in text
    assert "check" in run("--help").stdout
