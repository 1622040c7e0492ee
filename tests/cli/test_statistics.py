"""``flexmask stats`` and ``flexmask diff``, and what each command prints for programs."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import flexmask as fm
from flexmask.cli import main
from tests.support import oracle
from tests.support.cli import run

MODULE = """
import flexmask as fm

window = fm.sliding_window(left=2, right=0)

def mask_mod(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx < 3)

bound_later = fm.key_padding(fm.param("n"))
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module in the current folder."""
    name = f"masks_to_count_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    return name


def answer(*arguments: str, code: int = 0) -> Any:
    """The JSON document that a command prints, and nothing else."""
    result = run(*arguments, "--json")
    assert (result.exit_code, result.stderr) == (code, ""), result.output
    assert result.stdout.isascii()
    return json.loads(result.stdout)


def visible(mask: fm.Mask, q_len: int, kv_len: int) -> list[list[bool]]:
    """The cells of a mask that is the same for every sequence and head."""
    rows: list[list[bool]] = mask.dense(q_len, kv_len)[0, 0].tolist()
    return rows


# ---------------------------------------------------------------- stats


@pytest.mark.parametrize(
    ("text", "q_len", "kv_len"),
    [("causal", 10, 10), ("sliding_window(size=3) - (q == 4)", 9, 14), ("empty", 5, 5), ("full", 8, 8)],
)
def test_statistics(text: str, q_len: int, kv_len: int) -> None:
    found = answer("stats", text, "--q-len", str(q_len), "--kv-len", str(kv_len), "--block-size", "4,2")
    cells = visible(fm.parse(text), q_len, kv_len)
    kinds = oracle.classify_blocks(torch.tensor(cells), 4, 2).flatten().tolist()
    shown = sum(map(sum, cells))
    partial = kinds.count(oracle.PARTIAL)
    in_full = kinds.count(oracle.FULL) * 8
    wanted = {
        "mask": str(fm.parse(text)),
        "batch": 1,
        "heads": 1,
        "q_len": q_len,
        "kv_len": kv_len,
        "cells": q_len * kv_len,
        "visible": shown,
        "visible_fraction": shown / (q_len * kv_len),
        "fully_masked_rows": sum(not any(row) for row in cells),
        "blocks": len(kinds),
        "full_blocks": kinds.count(oracle.FULL),
        "partial_blocks": partial,
        "empty_blocks": kinds.count(oracle.EMPTY),
        "block_sparsity": kinds.count(oracle.EMPTY) / len(kinds),
        "partial_fill": (shown - in_full) / (partial * 8) if partial else 1.0,
        "cost": (partial * 8 + in_full) / (q_len * kv_len),
    }
    assert found.pop("block_mask_bytes") > 0
    assert found.pop("torch_block_mask_bytes") > 0
    assert found.pop("block_size") == [4, 2]
    assert found == pytest.approx(wanted)


def test_the_table_of_one_mask() -> None:
    result = run("stats", "causal & document(lengths=[4, 6])", "--block-size", "5")
    assert result.exit_code == 0, result.output
    lines = {line[:20].strip(): line[20:] for line in result.stdout.splitlines()[3:]}
    assert result.stdout.startswith(
        "mask     causal & document(lengths=[4, 6])\nlengths  10 queries x 10 keys, blocks of 5 x 5\n\n"
    )
    assert lines == {
        "cells": "100",
        "visible": "31",
        "visible fraction": "31.00%",
        "fully masked rows": "0",
        "blocks": "4",
        "full": "0",
        "partial": "3",
        "empty": "1",
        "block sparsity": "25.00%",
        "partial fill": "41.33%",
        "BlockMask": "96 bytes",
        "torch's own": "96 bytes",
        "cost against dense": "75.00%",
    }


def test_masks_next_to_each_other(module: str) -> None:
    arguments = ["stats", "causal", "key_padding(n)", f"{module}:mask_mod", "-p", "n=5", "--seq-len", "8"]
    lines = [re.split(r"  +", line.strip()) for line in run(*arguments).stdout.splitlines()]
    assert lines[:3] == [["A", "causal"], ["B", "key_padding(lengths=5)"], ["C", "sliding_window(left=2, right=0)"]]
    assert ["A", "B", "C"] in lines
    assert ["visible", "36", "40", "21"] in lines
    assert ["cells", "64", "64", "64"] in lines
    found = answer(*arguments)
    assert [one["visible"] for one in found] == [36, 40, 21]
    assert [one["mask"] for one in found] == ["causal", "key_padding(lengths=5)", "sliding_window(left=2, right=0)"]


def test_all_masks_have_the_longest_lengths() -> None:
    assert {(one["q_len"], one["kv_len"]) for one in answer("stats", "key_padding(5)", "query_padding(9)", "causal")} == {(9, 5)}


def test_batch_and_heads() -> None:
    found = answer("stats", "causal & ((q + b) % 2 == h)", "--batch", "3", "--heads", "2", "--seq-len", "4", "--q-offset", "1")
    assert (found["batch"], found["heads"], found["cells"]) == (3, 2, 96)
    assert found["visible"] == sum(
        kv <= q + 1 and (q + 1 + b) % 2 == h for b in range(3) for h in (0, 1) for q in range(4) for kv in range(4)
    )


# ---------------------------------------------------------------- diff

DIFFERENT = [
    ("sliding_window(size=4)", "causal & (q - kv < 3)", 6, 6),
    ("causal", "full", 4, 7),
    ("kv % 2 == 0", "q % 2 == 0", 5, 5),
    ("causal", "kv <= q", 5, 5),
    ("(q - kv) % 3 == 0", "(q + 2 * kv) % 3 == 0", 7, 7),
]


@pytest.mark.parametrize(("a", "b", "q_len", "kv_len"), DIFFERENT, ids=[f"{row[0]} {row[1]}" for row in DIFFERENT])
def test_difference(a: str, b: str, q_len: int, kv_len: int) -> None:
    one, other = (visible(fm.parse(text), q_len, kv_len) for text in (a, b))
    places = [(q, kv) for q in range(q_len) for kv in range(kv_len)]
    only_a = [place for place in places if one[place[0]][place[1]] and not other[place[0]][place[1]]]
    only_b = [place for place in places if other[place[0]][place[1]] and not one[place[0]][place[1]]]
    differ = bool(only_a or only_b)
    found = answer("diff", a, b, "--q-len", str(q_len), "--kv-len", str(kv_len), code=int(differ))
    first = [None if not cells else {"b": 0, "h": 0, "q": cells[0][0], "kv": cells[0][1]} for cells in (only_a, only_b)]
    assert found == {
        "differ": differ,
        "cells": q_len * kv_len,
        "only_a": len(only_a),
        "only_b": len(only_b),
        "first_a": first[0],
        "first_b": first[1],
        "a": str(fm.parse(a)),
        "b": str(fm.parse(b)),
        "q_len": q_len,
        "kv_len": kv_len,
    }


def test_the_table_of_a_difference() -> None:
    result = run("diff", "causal", "causal & document(ids)", "-p", "ids=[0,0,0,1]")
    assert result.exit_code == 1
    assert result.stdout.split("\n\n")[0].splitlines() == [
        "A          causal",
        "B          causal & document(ids=[0, 0, 0, 1])",
        "lengths    4 queries x 4 keys",
        "only in A  3 of 16 cells, the first at b=0, h=0, q=3, kv=0",
        "only in B  0 of 16 cells",
        "result     they differ",
    ]
    same = run("diff", "sliding_window(size=4)", "causal & (q - kv < 4)")
    assert (same.exit_code, same.stdout.splitlines()[-1]) == (0, "result     both show the same")


def test_at_lengths_that_no_table_of_cells_has() -> None:
    found = answer("diff", "causal", "causal - (kv == 3)", "--seq-len", "1000000", code=1)
    assert (found["cells"], found["only_a"], found["only_b"]) == (10**12, 10**6 - 3, 0)
    assert found["first_a"] == {"b": 0, "h": 0, "q": 3, "kv": 3}


def test_functions_and_masks_of_modules(module: str) -> None:
    assert answer("diff", f"{module}:mask_mod", f"{module}:window")["differ"] is False
    assert answer("diff", f"{module}:bound_later", "kv < n", "-p", "n=3")["differ"] is False
    assert answer("diff", f"{module}:bound_later", "kv < 2", "-p", "n=3", code=1)["first_a"] == {"b": 0, "h": 0, "q": 0, "kv": 2}


def test_parameters_go_where_they_are_needed() -> None:
    assert answer(
        "diff", "key_padding(n) & document(ids)", "document(ids) - (kv >= m)", "-p", "n=3", "-p", "m=3", "-p", "ids=[0,0,1,1]"
    )
    assert "no parameter m" in run("diff", "key_padding(n)", "full", "-p", "n=3", "-p", "m=3").stderr


# ---------------------------------------------------------------- JSON of the others


def test_list() -> None:
    found = answer("list")
    assert [entry["name"] for entry in found] == sorted(entry["name"] for entry in found)
    assert {tuple(entry) for entry in found} == {("name", "signature", "predicate", "family", "package", "version")}
    (causal,) = (entry for entry in found if entry["name"] == "causal")
    assert causal == {
        "name": "causal",
        "signature": "causal(align='upper_left', *, offset=0)",
        "predicate": 'kv <= q + offset, and kv <= q + kv_len - q_len + offset for align="lower_right"',
        "family": "windows",
        "package": "flexmask",
        "version": fm.__version__,
    }


def test_list_of_one() -> None:
    found = answer("list", "causal")
    assert found.pop("description").startswith("Each query attends to the keys up to its own position.\n\nPredicate: ")
    assert found in answer("list")


def test_explain() -> None:
    found = answer("explain", "causal & (q * kv % 3 == 1)", "--seq-len", "6", "--block-size", "3")
    assert {
        "mask",
        "definition",
        "recognized",
        "leaves",
        "exact",
        "intervals",
        "form",
        "open_blocks",
        "row_bytes",
        "dense_bytes",
    } <= set(found)
    assert found["mask"] == "causal & (q * kv % 3 == 1)"
    assert found["exact"] is False
    assert sorted(leaf["separable"] for leaf in found["leaves"]) == [False, True]
    assert {"mask": found["mask"]} | found["stats"] == answer("stats", found["mask"], "--seq-len", "6", "--block-size", "3")


def test_check() -> None:
    found = answer("check", "causal", "--against", "kv <= q", "--seq-len", "6")
    assert (found["agrees"], found["mask"], found["against"]) == (True, "causal", "kv <= q")
    assert {tuple(one) for one in found["findings"]} == {("name", "wrong", "text", "picture")}
    assert not any(one["wrong"] for one in found["findings"])
    found = answer("check", "causal", "--against", "kv < q", "--seq-len", "6", code=1)
    assert found["agrees"] is False
    assert next(one for one in found["findings"] if one["wrong"])["picture"].startswith("q\\kv 0 1 2")


# ---------------------------------------------------------------- bad input

BAD: list[tuple[Sequence[str], str]] = [
    (["stats"], "Missing argument 'EXPR...'"),
    (["stats", ""], "the text is empty"),
    (["stats", "causal", "casual"], "Did you mean causal?"),
    (["stats", *["causal"] * 27], "at most 26 masks fit in one table, got 27"),
    (["stats", "causal", "--block-size", "0"], "'0' is neither a positive number nor two of them"),
    (["stats", "causal", "--batch", "0"], "'--batch': 0 is not in the range x>=1"),
    (["stats", "causal & (b > 2)", "--batch", "1000000000"], "16,000,000,000 queries in all sequences and heads are too many"),
    (["stats", "causal", "--seq-len", "4", "--kv-len", "5"], "--seq-len, or --q-len and --kv-len"),
    (["diff", "causal"], "Missing argument 'B'"),
    (["diff", "causal", "key_padding(n)"], "needs a value for the parameter n"),
    (["diff", "causal", "full", "-p", "n=3"], "the mask causal has no parameter n"),
    (["diff", "key_padding(n)", "full", "-p", "n=3", "-p", "n=4"], "the parameter n is given twice"),
    (["diff", "key_padding(n)", "full", "-p", "n=@/"], "n: cannot read '/'"),
    (["diff", "key_padding(n)", "full", "-p", f"n={'9' * 5000}"], "is neither a number nor a list"),
    (["diff", "causal", "full", "--device", "abacus"], "there is no device 'abacus'"),
    (["diff", "document([[0], [1]])", "document([[0], [1], [1]])"], "two sizes of batch: 2 by document"),
    (["diff", "causal", "os:getcwd"], "wanted a function of (b, h, q_idx, kv_idx)"),
    (["diff", "causal", "(" * 50_000], "brackets are nested more than 110 deep"),
    (["diff", "causal", " | ".join(["(kv == q)"] * 20_000)], "too long or too deeply nested"),
    (["explain", "causal", "--heads", "-1"], "'--heads': -1 is not in the range x>=1"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[" ".join(row[0])[:40] for row in BAD])
def test_bad_input(arguments: Sequence[str], message: str) -> None:
    result = run(*arguments, "--json")
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert message in result.stderr
    assert result.stderr.count("Error: ") == 1
    assert len(result.stderr) < 1000


EXAMPLES = [
    line.strip()
    for command in ("diff", "list", "stats")
    for line in str(main.commands[command].help).splitlines()
    if f"flexmask {command}" in line and "my_package" not in line
]


@pytest.mark.parametrize("line", EXAMPLES)
def test_examples_of_the_help_work(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(*shlex.split(line)[1:]).exit_code == int("causal & document(ids)" in line or "size=5" in line)
