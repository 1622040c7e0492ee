"""Completion in the shell: what is completed, through click and as a shell asks for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import BashComplete

from flexmask import registry
from flexmask.cli import main


def completed(*words: str) -> list[tuple[str, str]]:
    """The kinds and values that the last word may become."""
    complete = BashComplete(main, {}, "flexmask", "_FLEXMASK_COMPLETE")
    return [(item.type, item.value) for item in complete.get_completions(list(words[:-1]), words[-1])]


def values(*words: str) -> list[str]:
    return [value for _, value in completed(*words)]


@pytest.mark.parametrize(
    ("begun", "wanted"),
    [
        ("caus", ["causal"]),
        ("sliding_w", ["sliding_window"]),
        ("causal & sli", ["causal & sliding_tile", "causal & sliding_window"]),
        ("causal&sliding_w", ["causal&sliding_window"]),
        ("~(causal | ~key_p", ["~(causal | ~key_padding"]),
        ("document(lengths=[3, 4]) & caus", ["document(lengths=[3, 4]) & causal"]),
        ("per_document(caus", ["per_document(causal"]),
        ("causal & nosuch", []),
        ("causal & (q - kv < 3", []),
        ("causal(", [f"causal({name}" for name in registry.names()]),
        ("causal & document(lengths=[3]) ", []),
        ("my_package.masks:caus", []),
        ("my_package.caus", []),
        ("causal('caus", []),
        ("", registry.names()),
        ("causal & ", [f"causal & {name}" for name in registry.names()]),
    ],
)
def test_the_last_name_of_an_expression(begun: str, wanted: list[str]) -> None:
    assert values("explain", begun) == wanted


@pytest.mark.parametrize(
    "before",
    [["render"], ["stats", "causal"], ["diff"], ["diff", "causal"], ["check"], ["check", "causal", "--against"], ["list"]],
    ids=" ".join,
)
def test_wherever_a_mask_is_named(before: list[str]) -> None:
    assert values(*before, "key_p") == ["key_padding"]


def test_commands_options_and_files() -> None:
    assert {"check", "diff", "explain", "list", "render", "shard", "stats"} <= set(values(""))
    assert values("st") == ["stats"]
    assert values("diff", "--js") == ["--json"]
    assert values("check", "causal", "--backend", "") == ["sdpa", "flash", "flex", "varlen"]
    assert [kind for kind, _ in completed("render", "causal", "-o", "")] == ["file"]


def test_names_of_plugins_and_their_signatures() -> None:
    complete = BashComplete(main, {}, "flexmask", "_FLEXMASK_COMPLETE")
    (item,) = complete.get_completions(["list"], "sliding_w")
    assert item.help == "(*, left=..., right=..., size=None)"


ASKED = """
import sys
from flexmask.cli import main
try:
    main(prog_name="flexmask")
except SystemExit as done:
    print("loaded:", done.code, *(name for name in ("torch", "matplotlib", "rich", "numpy") if name in sys.modules))
"""


def asked(shell: str, **words: str) -> list[str]:
    env = {**os.environ, "_FLEXMASK_COMPLETE": shell, "PYTHONWARNINGS": "ignore", **words}
    done = subprocess.run([sys.executable, "-c", ASKED], capture_output=True, text=True, check=True, env=env)
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_as_a_shell_asks() -> None:
    """A shell gives the words as they stand in the line, with a quote that is still open."""
    lines = asked("bash_complete", COMP_WORDS='flexmask render "causal & sliding_w', COMP_CWORD="2")
    assert lines == ["plain,causal & sliding_window", "loaded: 0"]
    lines = asked("fish_complete", COMP_WORDS="flexmask list caus", COMP_CWORD="caus")
    assert lines[-1] == "loaded: 0"
    assert "causal" in lines[0]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_scripts_for_shells(shell: str) -> None:
    lines = asked(f"{shell}_source")
    assert lines[-1] == "loaded: 0"
    assert f"_FLEXMASK_COMPLETE={shell}_complete" in "\n".join(lines)


def test_a_plugin_that_cannot_be_loaded_says_nothing_here(tmp_path: Path) -> None:
    info = tmp_path / "broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[flexmask.masks]\nbroken = broken\n")
    (tmp_path / "broken.py").write_text("raise RuntimeError('no luck')")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {"COMP_WORDS": "flexmask list caus", "COMP_CWORD": "2", "PYTHONPATH": path, "PYTHONWARNINGS": "default"}
    assert asked("bash_complete", **env) == ["plain,causal", "loaded: 0"]
