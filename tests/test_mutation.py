"""Mutants are what they say they are, and are caught where a test is there to catch them."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutation.mutants import mutants

ROOT = Path(__file__).parent.parent


def changes(source: str) -> list[str]:
    return [mutant.text for mutant in mutants(source)]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("return a < b", ["return a < b  ->  return None", "a < b  ->  a <= b", "a < b  ->  a >= b"]),
        ("x = a + 1", ["a + 1  ->  a - 1", "1  ->  2", "1  ->  0"]),
        ("f(not a)", ["f(not a)  ->  pass", "not a  ->  a"]),
        ("if a and b: f()", ["if a and b:  ->  if True:", "if a and b:  ->  if False:", "a and b  ->  a or b"]),
        ("x = min(a).clamp(b)", ["min(a).clamp(b)  ->  min(a)", "min  ->  max"]),
        ("x = a[b:]", ["b:  ->  :"]),
        ("raise ValueError(1)", ["raise ValueError(1)  ->  pass"]),
        ("x: int = cast(1, a)", []),
        ("x = isinstance(a, int | float)", []),
        ("'''1'''", []),
    ],
)
def test_changes_of_a_statement(body: str, expected: list[str]) -> None:
    assert changes(f"def f(a, b=1) -> 2:\n    {body}\n")[: len(expected) or None] == expected


def test_what_runs_at_import_is_left_out_but_constants() -> None:
    assert changes("N = 3\n@g(1)\nclass C:\n    x = 1\n    y: int = 2\n") == ["3  ->  4", "3  ->  2"]


@pytest.mark.parametrize("name", ["rows", "separation", "tiles"])
def test_every_mutant_is_another_program_that_compiles(name: str) -> None:
    source = (ROOT / "flexmask" / f"{name}.py").read_text(encoding="utf-8")
    original = ast.dump(ast.parse(source))
    found = mutants(source)
    assert len(found) > 100
    for mutant in found:
        tree = mutant.apply(ast.parse(source))
        assert ast.dump(tree) != original
        compile(tree, name, "exec")


MODULE = """
LIMIT = 10

def clipped(x):
    if x > LIMIT:
        return LIMIT
    return x

def doubled(x):
    y = x * 2
    return y

def never():
    return 1 + 1
"""
TESTS = """
from mutated.inner import clipped, doubled

def test_clipped():
    assert [clipped(9), clipped(10), clipped(12)] == [9, 10, 10]

def test_doubled():
    assert doubled(2) == 4
"""


def test_survivors_are_found(tmp_path: Path) -> None:
    """``x * 2`` with 2 for x is ``x + 2``, and at the limit ``>`` is ``>=``."""
    (tmp_path / "mutated").mkdir()
    (tmp_path / "mutated" / "__init__.py").touch()
    (tmp_path / "mutated" / "inner.py").write_text(MODULE)
    (tmp_path / "test_inner.py").write_text(TESTS)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    command = [sys.executable, "-m", "tests.mutation", "mutated/inner.py", "--tests", "test_inner.py", "--out", "found.json"]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True)
    found = json.loads((tmp_path / "found.json").read_text())["mutated/inner.py"]
    assert [one["change"] for one in found["survived"]] == ["x > LIMIT  ->  x >= LIMIT", "x * 2  ->  x + 2"]
    assert {one["statement"] for one in found["not_covered"]} == {"return 1 + 1"}
    assert found["caught"] + found["timed_out"] + 2 + len(found["not_covered"]) == found["mutants"]
