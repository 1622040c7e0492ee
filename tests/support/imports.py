"""Which modules a statement imports."""

from __future__ import annotations

import subprocess
import sys


def loaded_after(statement: str, names: set[str]) -> set[str]:
    code = f"{statement}\nimport sys\nprint(*({names!r} & set(sys.modules)))"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


HEAVY = {"torch", "matplotlib", "click", "rich", "numpy"}
