"""What the commands print into pipes, narrow terminals and poor encodings, and how they end."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from flexmask.cli import main, output
from flexmask.cli.output import Cell, print_table, printable
from tests.support.cli import PLAIN
from tests.support.exhaustive import exhaustive

COMMANDS = [
    ["list"],
    ["list", "causal"],
    ["explain", "causal & document(lengths=[7, 3, 10])", "--seq-len", "20"],
    ["explain", f"document({list(range(40))})"],
    ["stats", "causal & document(lengths=[7, 3, 10])"],
    ["stats", "causal", "sliding_window(size=256)", "chunked(256)", "--seq-len", "8192"],
    ["diff", "causal", "causal & document([0, 0, 1, 1])"],
    ["check", "causal", "--against", "kv < q", "--seq-len", "5"],
]


def environment(**changes: str) -> dict[str, str]:
    return {**{name: text for name, text in os.environ.items() if name not in PLAIN}, **changes}


def command(*arguments: str, **changes: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, "-m", "flexmask", *arguments], capture_output=True, env=environment(**changes))


def printed(arguments: list[str], columns: int) -> str:
    result = CliRunner(env=PLAIN | {"COLUMNS": str(columns)}).invoke(main, arguments, prog_name="flexmask")
    assert result.exit_code in (0, 1), result.output
    return result.stdout


# ---------------------------------------------------------------- width


@pytest.mark.parametrize("columns", [20, 40, 80])
@pytest.mark.parametrize("arguments", [row for row in COMMANDS if row != ["list", "causal"]], ids=lambda row: " ".join(row)[:30])
def test_nothing_is_lost_in_a_narrow_terminal(arguments: list[str], columns: int) -> None:
    narrow, wide = printed(arguments, columns), printed(arguments, 10_000)
    pictures = narrow.index("q\\kv") if "q\\kv" in narrow else len(narrow)
    assert max(map(len, narrow[:pictures].splitlines())) <= columns

    def signs(text: str) -> list[str]:
        return sorted(re.sub(r"[\s:]", "", text))

    missing = list(signs(wide))
    for sign in signs(narrow):
        if sign in missing:
            missing.remove(sign)
    # The headings of columns stand only once in a row, or before each cell.
    assert len(missing) <= len("mask q attends to kv where check result") - 8, missing
    assert "…" not in narrow.replace("…]", "")


def test_a_table_in_columns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    print_table([("one", Cell("x " * 20, "red"), "a " * 20), ("two", "", "b")], ["", "head", "tail"])
    assert capsys.readouterr().out.splitlines() == [
        "one",
        "  head: x x x x x x x x x x x x x x x x",
        "  x x x x",
        "  tail: a a a a a a a a a a a a a a a a",
        "  a a a a",
        "two",
        "  head:",
        "  tail: b",
    ]
    print_table([("  name(argument)", "x " * 20)])
    assert capsys.readouterr().out.splitlines() == ["  name(argument)", "    " + ("x " * 18).strip(), "    x x"]
    print_table([("label", "x " * 20), ("", "y")], ["", "text"])
    assert capsys.readouterr().out.splitlines() == [
        "       text",
        "label  x x x x x x x x x x x x x x x x x",
        "       x x x",
        "       y",
    ]


def test_words_longer_than_the_terminal_are_broken(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    print_table([("label", "x" * 50)])
    assert capsys.readouterr().out.splitlines() == ["label", "  " + "x" * 18, "  " + "x" * 18, "  " + "x" * 14]


# ---------------------------------------------------------------- colors and encodings


def test_colors_only_where_they_are_wanted() -> None:
    for changes, colored in (({}, False), ({"FORCE_COLOR": "1"}, True), ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False)):
        done = command("list", **changes)
        assert (b"\x1b[" in done.stdout) is colored


@pytest.mark.parametrize("arguments", [COMMANDS[place] for place in (0, 1)], ids=" ".join)
def test_an_encoding_without_the_signs(arguments: list[str]) -> None:
    done = command(*arguments, PYTHONIOENCODING="ascii")
    assert done.returncode in (0, 1)
    assert done.stderr == b""
    assert done.stdout.isascii()
    assert b"\\u" not in done.stdout
    if arguments == ["list", "causal"]:
        assert b"\n    # . . .     # . . . .\n" in done.stdout


def test_a_message_in_an_encoding_without_the_signs() -> None:
    done = command("list", "causal-é", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.startswith(b"Error: ")
    assert rb"causal-\xe9" in done.stderr


def test_the_c_locale() -> None:
    done = command("list", "causal", LC_ALL="C", LANG="C")
    assert (done.returncode, done.stderr) == (0, b"")
    assert "■ ⬚ ⬚ ⬚".encode() in done.stdout or b"# . . ." in done.stdout


def test_printable() -> None:
    assert printable("■ ⬚ … é", "utf-8") == printable("■ ⬚ … é", None) == "■ ⬚ … é"
    assert printable("■ ⬚ … é", "latin-1") == "# . ... é"
    assert printable("■ ⬚ … é", "ascii") == "# . ... \\xe9"


# ---------------------------------------------------------------- pipes and signals


@pytest.mark.parametrize("arguments", [["list"], *exhaustive([["stats", "causal"]])], ids=" ".join)
def test_a_pipe_that_nobody_reads(arguments: list[str]) -> None:
    """It ends quietly, and not with the exit code that says that something differs."""
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "wb") as pipe:
        done = subprocess.run(
            [sys.executable, "-m", "flexmask", *arguments], stdout=pipe, stderr=subprocess.PIPE, env=environment()
        )
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize(
    ("raised", "message"),
    [
        (MemoryError(), "Error: there is not enough memory for lengths and blocks of this size\n"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), "Error: there is not enough"),
        (RuntimeError("something is broken"), None),
    ],
)
def test_too_little_memory(raised: Exception, message: str | None) -> None:
    def fails() -> None:
        raise raised

    group = type(main)("flexmask", commands={"fails": click.Command("fails", callback=fails)})
    result = CliRunner().invoke(group, ["fails"])
    if message is None:
        assert (result.exit_code, result.stdout) == (3, "")
        assert "RuntimeError: something is broken" in result.stderr
        assert result.stderr.endswith("Error: the command failed with RuntimeError; please report it, with the lines above\n")
    else:
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr.startswith(message)


SLOW = """
import time
time.sleep({seconds})
import flexmask as fm
mask = fm.causal()
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="no such signals")
def test_an_interrupt_says_so(tmp_path: Path) -> None:
    (tmp_path / "slow_masks.py").write_text("open('begun', 'w').close()\n" + SLOW.format(seconds=60))
    ran = [sys.executable, "-m", "flexmask", "stats", "slow_masks:mask"]
    heeds = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # what a shell starts in the background ignores it
    with subprocess.Popen(
        ran, cwd=tmp_path, env=environment(), preexec_fn=heeds, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        while not (tmp_path / "begun").exists():
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    assert (process.returncode, out, err) == (130, b"", b"\nstopped\n")


# ---------------------------------------------------------------- progress


@contextlib.contextmanager
def terminal() -> Iterator[tuple[int, bytearray]]:
    """A terminal to write to, and in the end what it showed.

    It is read meanwhile: it holds a few thousand bytes, and a command that writes more would block.
    """
    import pty

    reading, writing = pty.openpty()
    shown = bytearray()

    def read() -> None:
        with contextlib.suppress(OSError):  # on Linux the end of a terminal is an error
            while part := os.read(reading, 4096):
                shown.extend(part)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield writing, shown
    finally:
        os.close(writing)
        reader.join()
        os.close(reading)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo terminals")
def test_a_sign_of_life_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_masks.py").write_text(SLOW.format(seconds=1.5))
    ran = ["check", "slow_masks:mask", "--seq-len", "4", "--backend", "sdpa"]
    with terminal() as (stderr, shown):
        done = subprocess.run(
            [sys.executable, "-m", "flexmask", *ran],
            cwd=tmp_path,
            env=environment(TERM="xterm", COLUMNS="80"),
            stdout=subprocess.PIPE,
            stderr=stderr,
        )
    assert done.returncode == 0
    assert b"preparing" in shown
    assert b"\x1b" not in done.stdout
    (tmp_path / "slow_masks.py").write_text(SLOW.format(seconds=0))
    monkeypatch.syspath_prepend(tmp_path)
    piped = CliRunner(env=PLAIN).invoke(main, ran)
    assert (piped.stdout, piped.stderr) == (done.stdout.decode(), "")


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo terminals")
def test_how_far_counting_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A mask of many blocks, all of which differ: the share that is done on a terminal, nothing elsewhere."""
    options = ["random_cells(0.5)", "--seq-len", "2048", "--block-size", "8", "--json"]
    monkeypatch.setattr(output, "DELAY", 0.0)  # however fast it counts
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    with terminal() as (stderr, shown), open(stderr, "w", closefd=False) as stream, contextlib.redirect_stderr(stream):
        main(["stats", *options], prog_name="flexmask", standalone_mode=False)
    out = capsys.readouterr().out
    assert b"% of the blocks" in shown
    assert 0.4 < json.loads(out)["visible_fraction"] < 0.6
    piped = CliRunner(env=PLAIN).invoke(main, ["stats", *options])
    assert (piped.stdout, piped.stderr) == (out, "")
