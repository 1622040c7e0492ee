"""The shape of the package: imports go one way, light imports stay light, exports are sorted, docstrings tell the truth."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import tomllib
from pathlib import Path

import pytest

import flexmask
from flexmask.expr.names import NAMES
from tests.support.examples import OWN_MASKS
from tests.support.imports import HEAVY, loaded_after, loaded_after_each

PACKAGE = Path(flexmask.__file__).parent


def modules() -> list[str]:
    found = [name.removeprefix("flexmask.") for _, name, _ in pkgutil.walk_packages([str(PACKAGE)], "flexmask.")]
    assert len(found) > 20
    return sorted(found)


def test_expressions_import_without_torch() -> None:
    statement = "import flexmask; m = flexmask.parse('causal & key_padding(lengths=[3, 5])'); str(m), hash(m)"
    assert loaded_after(statement, HEAVY) == set()


@pytest.mark.slow
def test_attention_imports_neither_drawing_nor_the_compiler_and_drawing_no_pyplot() -> None:
    """The compiler takes longer to import than everything else, and only code that is compiled needs it.

    What one statement may import shows that the check of the next can fail.
    """
    attention, drawing, pyplot = loaded_after_each(
        [
            "import flexmask; flexmask.attention; flexmask.plan; flexmask.MultiheadFlexAttention",
            "flexmask.causal().plot(4)",
            "import matplotlib.pyplot",
        ],
        {*HEAVY, "torch._dynamo", "matplotlib.pyplot"},
    )
    assert {"torch"} <= attention <= {"torch", "numpy"}
    assert {"matplotlib"} <= drawing - attention <= {"matplotlib", "numpy"}
    assert "matplotlib.pyplot" in pyplot


def test_exports_are_sorted_and_exist() -> None:
    for module in ("", *(name for name in modules() if name != "__main__")):
        loaded = importlib.import_module(f"flexmask.{module}".rstrip("."))
        exported = getattr(loaded, "__all__", [])
        assert list(exported) == sorted(exported), module
        assert [name for name in exported if not hasattr(loaded, name)] == [], module


PICTURE = re.compile(r"``([^`\n]+)`` at ([^:\n]+)::\n\n((?: +[■⬚][ ■⬚]*\n?)+)")


@pytest.mark.parametrize("name", OWN_MASKS)
def test_docstrings_draw_what_the_mask_says(name: str) -> None:
    doc = (inspect.getdoc(NAMES[name]) or "") + "\n"
    pictures = PICTURE.findall(doc)
    assert "Predicate: ``" in doc
    assert pictures, f"{name} has no picture"
    for text, shapes, drawing in pictures:
        lines = [re.split(r" {3,}", line.strip()) for line in drawing.rstrip().split("\n")]
        for column, shape in enumerate(re.findall(r"(\d+) x (\d+)", shapes)):
            drawn = [[cell == "■" for cell in line[column].split()] for line in lines if column < len(line)]
            q_len, kv_len = map(int, shape)
            cells = flexmask.parse(text).dense(q_len, kv_len)[0]
            head = column if cells.shape[0] > 1 else 0
            assert drawn == cells[head].tolist(), f"{text} at {shape}"


def test_readme_and_package_agree_on_python() -> None:
    root = PACKAGE.parent
    declared = re.search(r'requires-python = ">=(\d\.\d+)"', (root / "pyproject.toml").read_text())
    assert declared is not None
    assert f"Python {declared[1]}" in (root / "README.md").read_text()


def test_what_the_package_claims_is_what_the_matrix_runs() -> None:
    root = PACKAGE.parent
    script = (root / ".ci" / "run").read_text()
    (pairs,) = re.findall(r"^PAIRS=\$\{PAIRS:-(.+)\}", script, re.MULTILINE)
    pythons, torches = (
        list(dict.fromkeys(versions)) for versions in zip(*(pair.split(":") for pair in pairs.split()), strict=True)
    )
    oldest = torches[0].rpartition(".")[0]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == f">={pythons[0]}"
    assert [found for line in project["classifiers"] for found in re.findall(r"Python :: (3\.\d+)$", line)] == pythons
    assert f"torch>={oldest}" in project["dependencies"]
    assert f"tested with {oldest} to " in (readme := (root / "README.md").read_text())
    assert f" on Python {pythons[0]} to {pythons[-1]}" in readme
