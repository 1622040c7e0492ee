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
RENDER = [line for line in re.findall(r"flexmask (render .*)", README) if "&&" not in line]


@pytest.mark.parametrize("number", range(len(PYTHON)))
def test_python_block_runs(number: int) -> None:
    names: dict[str, object] = {}
    exec(compile(PYTHON[number], f"README block {number}", "exec"), names)
    assert len(names) > 3


@pytest.mark.parametrize("line", RENDER)
def test_render_line_runs(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, shlex.split(line, comments=True))
    assert result.exit_code == 0, result.output


def test_there_is_something_to_run() -> None:
    assert len(PYTHON) >= 2
    assert len(RENDER) >= 3
    assert len(README.splitlines()) <= 150
