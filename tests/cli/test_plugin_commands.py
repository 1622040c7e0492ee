"""Commands of plugins: listed without an import, imported when they run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = """
import click

@click.command()
@click.argument("name")
def greet(name):
    "Greet NAME."
    print("hello", name)
"""


def run(folder: Path, *arguments: str, **variables: str) -> tuple[int, str, str]:
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    found = subprocess.run(
        [sys.executable, "-m", "flexmask", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path, **variables},
    )
    return found.returncode, found.stdout, found.stderr


def install(folder: Path, entry: str, source: str) -> None:
    info = folder / "greetings-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: greetings\nVersion: 1.0\nSummary: Friendly words\n")
    (info / "entry_points.txt").write_text(f"[flexmask.commands]\n{entry}\n")
    (folder / "greetings.py").write_text(source)


def test_it_runs(tmp_path: Path) -> None:
    install(tmp_path, "greet = greetings:greet", COMMAND)
    assert run(tmp_path, "greet", "you") == (0, "hello you\n", "")
    code, out, _ = run(tmp_path, "greet", "--help")
    assert code == 0
    assert "Greet NAME." in out


def test_the_list_has_the_summary_of_its_package_and_imports_nothing(tmp_path: Path) -> None:
    install(tmp_path, "greet = greetings:greet", "raise RuntimeError('imported')")
    code, out, err = run(tmp_path, "--help")
    assert (code, err) == (0, "")
    assert "greet    Friendly words" in out


@pytest.mark.parametrize(
    ("entry", "source", "message"),
    [
        (
            "greet = greetings:greet",
            "raise RuntimeError('no luck')",
            "the command greet of greetings cannot be imported: no luck",
        ),
        ("greet = greetings:greet", "greet = 3", "the command greet of greetings must be a click.Command, got int"),
    ],
)
def test_what_is_wrong_with_it(tmp_path: Path, entry: str, source: str, message: str) -> None:
    install(tmp_path, entry, source)
    code, out, err = run(tmp_path, "greet")
    assert (code, out) == (2, "")
    assert message in err


def test_it_does_not_replace_a_command(tmp_path: Path) -> None:
    install(tmp_path, "list = greetings:greet", COMMAND)
    code, out, _ = run(tmp_path, "list", "causal")
    assert code == 0
    assert "hello" not in out
