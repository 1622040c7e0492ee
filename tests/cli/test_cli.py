"""The command line: what it draws and writes, its messages and exit codes, and that help needs no torch."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner
from matplotlib.image import imread

import flexmask as fm
from flexmask.cli import main
from tests.support.cli import PLAIN, run


def render(*arguments: str) -> str:
    """What ``flexmask render`` prints on success."""
    result = run("render", *arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def grid(output: str) -> list[str]:
    """The lines of the drawn cells."""
    return [line[5:] for line in output.splitlines() if line[:4].strip().isdecimal()]


# ---------------------------------------------------------------- drawing


def test_render_draws_in_the_terminal() -> None:
    output = render("causal & key_padding(lengths=[3, 5, 4])", "--batch", "2")
    assert output.splitlines()[:2] == [
        "causal & key_padding(lengths=[3, 5, 4])",
        "sequence 2 of 3, 5 queries x 5 keys, 56 % visible",
    ]
    assert grid(output) == ["# . . . .", "# # . . .", "# # # . .", "# # # # .", "# # # # ."]


def test_piped_output_is_plain() -> None:
    for block in ((), ("--block-size", "4,2")):
        output = render("causal", *block)
        assert output.isascii()
        assert "\x1b" not in output


def test_narrow_terminal() -> None:
    result = CliRunner(env=PLAIN | {"COLUMNS": "24"}).invoke(main, ["render", "causal", "--seq-len", "300"])
    assert result.exit_code == 0
    assert max(map(len, grid(result.stdout))) <= 24 - 5


def test_head_offset_and_rectangle() -> None:
    output = render("per_head([full, causal])", "--head", "1", "--q-len", "2", "--kv-len", "5", "--q-offset", "3")
    assert "head 1 of 2, 2 queries x 5 keys" in output
    assert [line[:4] for line in output.splitlines()[4:6]] == ["   3", "   4"]
    assert grid(output) == ["# # # # .", "# # # # #"]


def test_block_grid() -> None:
    output = render("causal", "--seq-len", "4", "--block-size", "2")
    assert grid(output) == ["x .|", "x x|", "# #|x .", "# #|x x"]
    assert "blocks of 2 x 2" in output
    assert "blocks of 4 x 2" in render("causal", "--seq-len", "4", "--block-size", "4,2")


def shows(cells: str, *arguments: str) -> bool:
    """Whether a mask with its parameters shows just these cells, ``#`` or ``.`` in rows between blanks."""
    table = [[cell == "#" for cell in row] for row in cells.split()]
    result = run("diff", *arguments, f"from_dense({table})")
    assert result.exit_code in (0, 1), result.output
    return result.exit_code == 0


@pytest.mark.parametrize(("value", "cells"), [("[0, 0, 1]", "##. ##. ..#"), ("[0,1,1]", "#.. .## .##"), ("[[0, 0]]", "## ##")])
def test_parameters(value: str, cells: str) -> None:
    assert shows(cells, "-p", f"ids={value}", "document(ids)")
    assert not shows(cells.replace("##", "#.", 1), "-p", f"ids={value}", "document(ids)")


def test_parameters_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "ids.json").write_text(json.dumps([0, 0, 1, 1]))
    (tmp_path / "keep.txt").write_text("[True, False,\n True, True]\n")
    values = ("-p", f"ids=@{tmp_path / 'ids.json'}", "-p", f"keep=@{tmp_path / 'keep.txt'}")
    assert shows("#... #... ..## ..##", *values, "document(ids) & key_padding(keep=keep)")


def test_integer_parameter() -> None:
    assert shows("#.. ##. .##", "-p", "w=2", "--seq-len", "3", "(q - kv < w) & causal")


@pytest.mark.parametrize(
    ("options", "lengths"),
    [
        (["--seq-len", "3"], (3, 3)),
        (["--q-len", "3"], (3, 3)),
        (["--kv-len", "3"], (3, 3)),
        (["--q-len", "1", "--kv-len", "3"], (1, 3)),
        ([], (16, 16)),
    ],
)
@pytest.mark.parametrize("command", [["stats"], ["diff", "full"]], ids=" ".join)
def test_lengths_as_given(command: list[str], options: list[str], lengths: tuple[int, int]) -> None:
    found = json.loads(run(*command, "causal", *options, "--json").stdout)
    assert (found["q_len"], found["kv_len"]) == lengths


# ---------------------------------------------------------------- files


@pytest.mark.parametrize("ending", ["png", "PNG"])
def test_png(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"mask.{ending}"
    result = run("render", "causal", "--block-size", "4", "-o", str(path))
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", f"wrote {path}\n")
    assert imread(path, format="png").shape[2] == 4


def test_svg(tmp_path: Path) -> None:
    path = tmp_path / "mask.svg"
    assert run("render", "causal & (kv < 5)", "-o", str(path)).exit_code == 0
    title = ElementTree.parse(path).getroot().find("{http://www.w3.org/2000/svg}title")
    assert title is not None
    assert title.text == "causal & (kv < 5)"


# ---------------------------------------------------------------- bad input

BAD: list[tuple[Sequence[str], str]] = [
    (["explain", "casual & full"], "Error: casual is not a named mask. Did you mean causal?\n  casual & full\n  ^\n"),
    (["explain", "causal & (kv < "], "Error: this is not an expression ... \n  causal & (kv <\n           ^\n"),
    (["explain", "causal.__class__"], "attributes are not part of a mask's text"),
    (["explain", "kv + 1"], "not a mask"),
    (["explain", ""], "empty"),
    (["explain", "causal & document(ids)"], "needs a value for the parameter ids: add -p 'ids=...'"),
    (["explain", "key_padding(n) & document(ids)"], "needs values for the parameters ids, n: add -p 'ids=...' -p 'n=...'"),
    (["explain", "key_padding(n) & document(ids)", "-p", "n=3"], "parameter ids"),
    (["explain", "causal", "-p", "ids=[0]"], "no parameter ids"),
    (["explain", "document(ids)", "-p", "ids=[0]", "-p", "ids=[1]"], "ids is given twice"),
    (["explain", "document(ids)", "-p", "ids"], "'ids' is not of the form name=VALUE"),
    (["explain", "document(ids)", "-p", "2=3"], "name=VALUE"),
    (["explain", "document(ids)", "-p", "ids=0 0 1"], "ids: '0 0 1' is neither a number nor a list"),
    (["explain", "document(ids)", "-p", "ids={}"], "neither a number nor a list"),
    (["explain", "document(ids)", "-p", "ids=open('x')"], "neither a number nor a list"),
    (["explain", "document(ids)", "-p", "ids=[0.5]"], "0.5"),
    (["explain", "document(ids)", "-p", "ids=(0, 0, 0)"], "neither a number nor a list"),
    (["explain", "document(ids)", "-p", "ids=[[0], [0, 1]]"], "uneven"),
    (["explain", "document(ids)", "-p", "ids=@no/such/file"], "cannot read 'no/such/file': No such file"),
    (["explain", "key_padding([3, 5, 4])", "--seq-len", "4"], "at most kv_len = 4, got 5"),
    (["explain", "causal", "--seq-len", "0"], "'--seq-len': 0 is not in the range x>=1"),
    (["explain", "causal", "--q-len", "4", "--kv-len", "-2"], "'--kv-len': -2 is not in the range x>=1"),
    (["explain", "causal", "--seq-len", "many"], "'--seq-len': 'many' is not a whole number"),
    (["stats", "causal", "--seq-len", "64k"], "'64k' is not a whole number: write all its digits, e.g. 65536 for 64k"),
    (["shard", "causal", "--seq-len", "64", "--ranks", "2.5"], "'--ranks': '2.5' is not a whole number"),
    (["explain", "causal", "--seq-len", "4", "--q-len", "4"], "--seq-len, or --q-len and --kv-len"),
    (["explain", "causal", "--seq-len", "99999999999"], "q_len 99,999,999,999 is too long; at most 134,217,728"),
    (["explain", "causal & key_padding(99999999999)"], "is too long; at most 134,217,728"),
    (["explain", "causal", "--q-offset", "-1"], "'--q-offset': -1 is not in the range"),
    (["explain", "causal", "--q-offset", "99999999999999999999"], "'--q-offset': 99999999999999999999 is not in the range"),
    (["explain", "causal", "--block-size", "0"], "'0' is neither a positive number nor two of them"),
    (["explain", "causal", "--block-size", "4,4,4"], "'4,4,4' is neither"),
    (["explain", "causal", "--block-size", "big"], "'big' is neither"),
    (["explain"], "Missing argument 'EXPR'"),
    (["explain", "causal", "--color"], "No such option"),
    (
        ["render", "causal & sliding_window", "--size", "4"],
        'No such option ... It is an argument of the mask sliding_window: write "sliding_window(size=4)".',
    ),
    (["explain", "chunked", "--size=8"], 'write "chunked(size=8)"'),
    (["explain", "chunked", "--size="], 'write "chunked(size=...)"'),
    (["stats", "sliding_window", "--seq-len", "8", "--left"], 'write "sliding_window(left=...)"'),
    (["render", "causal", "--size", "4"], "No such option ... Did you mean"),
    (
        ["explain", "document([80, 300, 132])", "--cell", "100,2"],
        "cell: q must be at most 2, got 100; ids have a value for each token, the lengths of documents are lengths=",
    ),
    (["explain", "document(lengths=[3, 5])", "--cell", "2,8"], "cell: kv must be at most 7, got 8\n"),
    (["render", "key_padding([3, 5, 4])", "--batch", "3"], "batch 3 is out of range: the sequences are 0 to 2"),
    (["render", "causal", "--batch", "1"], "batch 1 is out of range"),
    (["render", "causal", "--batch", "-1"], "-1"),
    (["render", "causal", "--head", "2"], "head 2 is out of range"),
    (["render", "causal", "-o", "mask.gif"], "must end in .png, .svg, .pdf or .html, got 'mask.gif'"),
    (["render", "causal", "-o", "mask"], "must end in .png, .svg, .pdf or .html, got 'mask'"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[" ".join(row[0])[:70] for row in BAD])
def test_bad_input(arguments: Sequence[str], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Traceback" not in result.output
    at = 0
    for part in message.split(" ... "):
        assert part in result.stderr[at:]
        at = result.stderr.index(part, at)
    assert result.stderr.count("Error: ") == 1


def test_unknown_command() -> None:
    result = run("rendre")
    assert (result.exit_code, "rendre" in result.stderr) == (2, True)


def test_long_text_is_cut_around_the_caret() -> None:
    long = f"document({[0] * 500}) & nothing & document({[0] * 500})"
    lines = run("explain", long).stderr.splitlines()
    assert lines[0].startswith("Error: nothing is not a named mask. ")
    assert max(map(len, lines[1:])) < 90
    assert lines[1][lines[2].index("^") :].startswith("nothing & ")


def test_long_data_is_cut_in_messages() -> None:
    result = run("explain", f"key_padding({[3] * 5000})", "--seq-len", "2")
    assert result.exit_code == 2
    assert len(result.stderr) < 500


def test_file_that_cannot_be_written(tmp_path: Path) -> None:
    folder = tmp_path / "folder.png"
    folder.mkdir()
    result = run("render", "causal", "-o", str(folder))
    assert (result.exit_code, "folder.png" in result.stderr) == (2, True)


# ---------------------------------------------------------------- help

CHECK = """
import sys
from flexmask.cli import main
for arguments in {arguments!r}:
    sys.argv = ["flexmask", *arguments]
    try:
        main()
    except SystemExit as done:
        print("loaded:", done.code, *(name for name in ("torch", "matplotlib", "rich", "numpy") if name in sys.modules))
"""
#: What each command ends with, one after the other in one process, and what it needs; the last shows that the check can fail.
LOADED = [
    (["--help"], "0"),
    (["--version"], "0"),
    (["render", "--help"], "0"),
    (["list"], "0"),
    (["list", "--json"], "0"),
    (["list", "causal"], "0"),
    (["stats", "--help"], "0"),
    (["diff", "causal"], "2"),
    (["render", "causal", "-o", "mask.gif"], "2"),
    (["stats", "causal"], "0 torch numpy"),
]


@pytest.mark.slow
def test_help_needs_no_torch() -> None:
    command = [sys.executable, "-c", CHECK.format(arguments=[arguments for arguments, _ in LOADED])]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONWARNINGS": "ignore"})
    assert re.findall("^loaded: (.*)$", done.stdout, re.MULTILINE) == [loaded for _, loaded in LOADED]


def test_help_tells_all() -> None:
    text = run("render", "--help").stdout
    for option in ("--seq-len", "--q-len", "--kv-len", "--q-offset", "--batch", "--head", "--block-size", "--param", "--output"):
        assert option in text
    assert "Examples:" in text
    assert "render" in run("--help").stdout
    assert "flexmask list" in run("list", "-h").stdout
    assert run("-h").stdout == run("--help").stdout
    assert run("--version").stdout == f"flexmask {fm.__version__}\n"
    for text in ("Exit codes:", "_FLEXMASK_COMPLETE=bash_source", "zsh_source", "fish_source"):
        assert text in run("--help").stdout


#: The options that every command which lowers masks has.
SHARED = ("--seq-len", "--q-len", "--kv-len", "--q-offset", "--param", "--batch", "--heads", "--device", "--json")


def test_the_same_options_for_the_same_thing() -> None:
    described: dict[str, set[tuple[object, ...]]] = {}
    for command in ("check", "diff", "explain", "shard", "stats"):
        options = {name: option for option in main.commands[command].params for name in option.opts}
        assert set(SHARED) <= set(options)
        assert "Examples:" in run(command, "--help").stdout
        for name in SHARED[:-1]:
            option = options[name]
            described.setdefault(name, set()).add(
                (getattr(option, "help", ""), option.metavar, option.default, type(option.type).__name__)
            )
    assert {name: len(texts) for name, texts in described.items()} == dict.fromkeys(SHARED[:-1], 1)


@pytest.mark.parametrize("command", ["check", "diff"])
def test_commands_that_can_differ_say_so(command: str) -> None:
    assert "with 1 if" in " ".join(run(command, "--help").stdout.split())


@pytest.mark.parametrize(
    "line", [line.strip() for line in str(main.commands["render"].help).splitlines() if "flexmask render " in line]
)
def test_examples_of_the_help_work(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shlex

    monkeypatch.chdir(tmp_path)
    Path("ids.json").write_text(json.dumps([0] * 300 + [1] * 200))
    result = run(*shlex.split(line)[1:])
    assert result.exit_code == 0, result.output


def test_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "flexmask", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"flexmask {fm.__version__}\n"
