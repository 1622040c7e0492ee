"""The code of a page in Markdown: its blocks, in order, and what the page says that they print.

The output of a ``python`` block, and of the commands ``flexmask ...`` in a ``bash`` block, is the ``text`` block right after it,
if there is one; ``...`` stands for any text. A ``python`` block that prints has one. A command with the comment ``exit code 1``
has that exit code.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from click.testing import CliRunner

from flexmask.cli import main

__all__ = ["Block", "blocks_of", "run_page"]

FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A block of code.

    Attributes:
        language: ``python`` or ``bash``.
        code: its lines.
        line: the line of the page on which it starts, counted from 1.
        output: what it prints; None where the page does not say it.
    """

    language: str
    code: str
    line: int
    output: str | None

    @property
    def commands(self) -> list[str]:
        """The commands of flexmask in a ``bash`` block."""
        return [line for line in self.code.splitlines() if line.startswith("flexmask ")]


def blocks_of(page: Path) -> list[Block]:
    """The ``python`` and ``bash`` blocks of a page."""
    text = page.read_text(encoding="utf-8")
    fences = list(FENCE.finditer(text))
    found = []
    for fence, following in zip_longest(fences, fences[1:]):
        if fence[1] not in ("python", "bash"):
            continue
        is_output = following is not None and following[1] == "text" and not text[fence.end() : following.start()].strip()
        output = following[2] if following is not None and is_output else None
        found.append(Block(fence[1], fence[2], text.count("\n", 0, fence.start()) + 1, output))
    return found


def run_page(page: Path, change: Callable[[str], str] = str) -> dict[str, object]:
    """Runs the blocks of a page one after the other, and compares what they print with the page.

    Args:
        page: the page.
        change: gives the code that runs in place of that of a ``python`` block.

    Returns:
        The names that the ``python`` blocks define.

    Raises:
        AssertionError: a block prints something else than the page says, or a command fails.
    """
    names: dict[str, object] = {"__name__": "__main__"}
    for block in blocks_of(page):
        where = f"{page.name}, line {block.line}"
        if block.language == "bash":
            _check(_run_commands(block, where), block.output, where)
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(change(block.code), where, "exec"), names)
        _check(printed.getvalue(), block.output or "", where)
    return names


def _run_commands(block: Block, where: str) -> str:
    output = ""
    for command in block.commands:
        result = CliRunner().invoke(main, shlex.split(command.removeprefix("flexmask "), comments=True))
        expected = re.search(r"# .*exit code (\d)", command)
        assert result.exit_code == int(expected[1] if expected else 0), f"{where}: {command}\n{result.output}"
        output += result.output
    return output


def _check(printed: str, expected: str | None, where: str) -> None:
    if expected is None:
        return
    found, wanted = (re.sub(r" +$", "", text, flags=re.MULTILINE).rstrip() + "\n" for text in (printed, expected))
    same = doctest.OutputChecker().check_output(wanted, found, doctest.ELLIPSIS)
    assert same, f"{where} prints\n{found}\nand the page says\n{wanted}"
