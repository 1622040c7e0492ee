"""How the command line ends: 0 and 1 are answers, and nothing that goes wrong ends in one of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from flexmask.cli import main
from tests.support.exhaustive import exhaustive

MODULE = '''
import os
import flexmask

print("printed while it is imported")
os.system("echo printed by a process")

def mask_mod(b, h, q_idx, kv_idx):
    print("printed while it is called")
    return q_idx >= kv_idx

def raises(b, h, q_idx, kv_idx):
    raise KeyError("mine")

def branches(b, h, q_idx, kv_idx):
    return q_idx if q_idx > kv_idx else kv_idx > 3

def raises_for_cells(b, h, q_idx, kv_idx):
    if int(q_idx) >= 0:
        raise ZeroDivisionError("mine")

def opens(b, h, q_idx, kv_idx):
    return open("/no/such/file")

def asks(b, h, q_idx, kv_idx):
    return input()

def leaves(b, h, q_idx, kv_idx):
    raise SystemExit(1)

def stops(b, h, q_idx, kv_idx):
    raise KeyboardInterrupt

def makes(b, h, q_idx, kv_idx):
    return flexmask.causal()

def made():
    return flexmask.causal()

def of_size(window=3):
    return f"sliding_window(size={window})"

def of_ids(ids):
    return flexmask.document(ids)

class Callable:
    def __call__(self, b, h, q_idx, kv_idx):
        return q_idx >= kv_idx

class Broken(flexmask.expr.mask.Truth):
    """A mask with a defect of its own."""

    def expand(self):
        raise ZeroDivisionError("within")

class Lazy:
    def __getattr__(self, name):
        raise ValueError("lazy " + name)

instance, broken, lazy = Callable(), Broken(True), Lazy()
text, misspelt, number, factory = "causal & (kv < 3)", "casual", 3, flexmask.causal
'''


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "of_a_user.py").write_text(MODULE)
    (tmp_path / "that_leaves.py").write_text("raise SystemExit(1)")
    (tmp_path / "that_is_lazy.py").write_text("def __getattr__(name):\n    raise ValueError('lazy ' + name)")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "of_a_user"
    for name in ("of_a_user", "that_leaves", "that_is_lazy"):
        sys.modules.pop(name, None)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments), prog_name="flexmask")


#: What a module of a user has, the exit code, and what is said.
REFERENCES: list[tuple[str, int, str]] = [
    ("of_a_user:mask_mod", 0, ""),
    ("of_a_user:mask_mod.__call__", 0, ""),
    ("of_a_user:instance", 0, ""),
    ("of_a_user:text", 0, ""),
    ("of_a_user:made", 0, ""),
    ("of_a_user:of_size", 0, ""),
    ("of_a_user:of_ids", 2, "of_a_user:of_ids is of_ids(ids), which is neither a mask_mod(b, h, q_idx, kv_idx) nor a function"),
    ("of_a_user:misspelt", 2, "casual is not a named mask. Did you mean causal?"),
    ("of_a_user:raises", 2, "of_a_user:raises fails: KeyError: 'mine'"),
    ("of_a_user:branches", 2, "as `if`, `and`, `or`, `not`"),
    ("of_a_user:raises_for_cells", 2, "raises_for_cells, which is an opaque call, fails"),
    ("of_a_user:opens", 2, "FileNotFoundError"),
    ("of_a_user:makes", 2, "makes gives a mask, causal"),
    ("of_a_user:factory", 2, "call it, causal()"),
    ("of_a_user:number", 2, "of_a_user:number must be a Mask, its text or a mask_mod function, got int 3"),
    ("of_a_user:mask_mod.__class__", 2, "got the class function; give an object of it"),
    ("of_a_user:Callable", 2, "got the class Callable; give an object of it"),
    ("of_a_user:mask_mod.__name__", 2, "mask_mod is not a named mask"),
    ("of_a_user:mask_mod.__dict__", 2, "got dict"),
    ("of_a_user:mask_mod.__init__", 2, "must give one truth value for a cell, got NoneType"),
    ("of_a_user:mask_mode", 2, "of_a_user has no mask_mode. Did you mean mask_mod?"),
    ("of_a_user:lazy.mask", 2, "cannot read mask of of_a_user:lazy.mask: ValueError: lazy mask"),
    ("that_is_lazy:mask", 2, "cannot read mask of that_is_lazy:mask: ValueError: lazy mask"),
    ("that_leaves:mask", 2, "cannot import that_leaves: SystemExit: 1"),
    ("of_a_user:asks", 2, "EOFError"),
    ("of_a_user:leaves", 3, "something that the command called exited with sys.exit(1)"),
    ("of_a_user:stops", 130, "stopped"),
    ("of_a_user:broken", 3, "the command failed with ZeroDivisionError; please report it, with the lines above"),
]


@pytest.mark.parametrize(("reference", "code", "said"), REFERENCES, ids=[row[0] for row in REFERENCES])
def test_what_a_user_has_never_ends_in_a_wrong_answer(module: str, reference: str, code: int, said: str) -> None:
    result = run("stats", reference, "--seq-len", "8", "--batch", "1", "--heads", "1", "--json")
    assert result.exit_code == code, result.stderr
    assert said in " ".join(result.stderr.split())
    assert ("Traceback" in result.stderr) == ("the lines above" in said)
    if code:
        assert result.stdout == ""
    else:
        assert json.loads(result.stdout)["q_len"] == 8
        assert "printed while it is imported" in result.stderr


COMMANDS = [
    ("check", "causal", "--against"),
    ("diff", "causal"),
    ("explain",),
    ("stats", "causal"),
    ("render",),
    ("shard", "--ranks", "2"),
]
NAMES = ["raises", "branches", "raises_for_cells", "leaves", "broken"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_no_command_answers_where_a_function_fails(module: str, command: tuple[str, ...], name: str) -> None:
    sizes = () if command[0] == "render" else ("--batch", "1", "--heads", "1")
    result = run(*command, f"{module}:{name}", "--seq-len", "8", *sizes)
    assert result.exit_code == (3 if name in ("leaves", "broken") else 2), result.output
    assert ("Traceback" in result.stderr) == (name == "broken")


@pytest.mark.slow
def test_what_is_printed_is_no_part_of_an_answer(module: str, tmp_path: Path) -> None:
    """Not what another process prints either, for which there has to be a real output."""
    command = [sys.executable, "-m", "flexmask", "diff", "causal", "of_a_user:mask_mod", "--seq-len", "8", "--json"]
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, cwd=tmp_path)
    assert done.returncode == 0
    assert json.loads(done.stdout)["differ"] is False
    for printed in ("while it is imported", "while it is called", "by a process"):
        assert f"printed {printed}" in done.stderr


#: Redirections of the shell, by their exit codes of a command that has an answer to write.
STREAMS = [(">&-", 3), (">/dev/full", 3), ("2>&-", 0), ("2>/dev/full", 0), (">&- 2>&-", 3), (">/dev/full 2>/dev/full", 3)]
ANSWERS = ["list", "list --json", "list causal", "--help", "list --help", "--version"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize(
    ("arguments", "streams", "code"),
    [
        *((ANSWERS[place], *row) for place, row in enumerate(STREAMS)),
        *exhaustive((ANSWERS[(place + 3) % 6], *row) for place, row in enumerate(STREAMS)),
    ],
)
def test_an_answer_that_cannot_be_written_is_none(arguments: str, streams: str, code: int) -> None:
    done = subprocess.run(f"{sys.executable} -m flexmask {arguments} {streams}", shell=True, capture_output=True, text=True)
    assert (done.returncode, "Traceback" in done.stderr) == (code, False)
    if code == 3 and "2>" not in streams:
        assert "Error: cannot read or write: " in done.stderr
    if code == 3:
        assert done.stdout == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("streams", ["", ">&-", "2>&-", "2>/dev/full"])
def test_bad_input_stays_bad_input(streams: str) -> None:
    command = f"{sys.executable} -m flexmask list no_such_mask {streams}"
    assert subprocess.run(command, shell=True, capture_output=True).returncode == 2


@pytest.mark.parametrize("arguments", ["--help", "list", "list --help"])
def test_nobody_reads(arguments: str) -> None:
    script = f"{sys.executable} -m flexmask {arguments} | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) in ((141, ""), (0, ""))  # 0 where the reader was slower


def test_help_says_every_exit_code() -> None:
    text = " ".join(run("--help").stdout.split())
    for line in ("0 success", "1 the masks differ", "2 bad input", "3 the command failed"):
        assert line in text
