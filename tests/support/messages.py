"""Every message that flexmask and its plugins raise. ``python -m tests.support.messages`` prints them, to be read in one list."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import flexmask

__all__ = ["messages"]

ROOT = Path(flexmask.__file__).parents[1]


def messages() -> Iterator[tuple[str, str]]:
    """The place and the text of each message: the strings in ``raise`` statements and in functions that write messages.

    What is filled in is written as its expression in braces.
    """
    for path in sorted([*ROOT.glob("flexmask/**/*.py"), *ROOT.glob("plugins/*/flexmask_*/**/*.py")]):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if _writes_message(node):
                for line, text in _texts(node):
                    yield f"{path.relative_to(ROOT)}:{line}", text


def _writes_message(node: ast.AST) -> bool:
    if isinstance(node, ast.Raise):
        return True
    name = node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""
    name = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else name
    return name in ("fail", "warn") or (name.startswith(("_wrong", "_refuse", "_error")))


def _texts(node: ast.AST) -> Iterator[tuple[int, str]]:
    """The texts of one message, each joined from the parts that it is written in."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Constant) and isinstance(child.value, str):
            yield child.lineno, child.value
        elif isinstance(child, ast.JoinedStr):
            yield child.lineno, "".join(_part(value) for value in child.values)
        else:
            yield from _texts(child)


def _part(value: ast.expr) -> str:
    return str(value.value) if isinstance(value, ast.Constant) else "{" + ast.unparse(getattr(value, "value", value)) + "}"


if __name__ == "__main__":
    for place, text in messages():
        print(f"{place}: {text}")
