"""The README's code runs as it stands there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from flexmask.cli import main

README = (Path(__file__).parent.parent / "README.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
LINES = [line for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL) for line in block.splitlines()]
COMMANDS = [line.removeprefix("flexmask ") for line in LINES if line.startswith("flexmask ")]


def test_python_blocks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each after the others, as a reader would type them."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for number, block in enumerate(PYTHON):
        exec(compile(block, f"README block {number}", "exec"), names)
    assert {"mask", "layer", "block_mask", "dilated", "cache"} <= set(names)


@pytest.mark.parametrize("line", COMMANDS)
def test_command_runs(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, shlex.split(line, comments=True))
    assert result.exit_code == 0, result.output


def test_there_is_something_to_run() -> None:
    assert len(PYTHON) >= 2
    assert len(COMMANDS) >= 3
    assert len(README.splitlines()) <= 150
