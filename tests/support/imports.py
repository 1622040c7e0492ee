"""Which modules a statement imports."""

from __future__ import annotations

import subprocess
import sys

HEAVY = {"torch", "matplotlib", "click", "rich", "numpy"}


def loaded_after(statement: str, names: set[str]) -> set[str]:
    """Those of some modules that a new process has imported after a statement."""
    return loaded_after_each([statement], names)[0]


def loaded_after_each(statements: list[str], names: set[str]) -> list[set[str]]:
    """As :func:`loaded_after`, of statements that one process runs in turn."""
    tell = f"print('loaded:', *({names!r} & set(sys.modules)))"
    code = "import sys\n" + "".join(f"{statement}\n{tell}\n" for statement in statements)
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    return [set(line.split()[1:]) for line in printed.splitlines() if line.startswith("loaded:")]
