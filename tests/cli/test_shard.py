"""``flexmask shard``: the plan of context parallelism as a table and as JSON."""

from __future__ import annotations

import json
import shlex

import pytest

from flexmask.cli import main
from flexmask.distributed import shard_sequence
from tests.support.cli import run

MASKS = ["causal & document(lengths=[300, 20, 680])", "sliding_window(size=64)"]


def test_the_table_is_that_of_the_plan() -> None:
    result = run("shard", *MASKS, "--ranks", "4", "--block-size", "32", "--balance", "head_tail")
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{shard_sequence(MASKS, 1000, 4, block_size=32, balance='head_tail')}\n"


def test_json_has_every_rank() -> None:
    found = json.loads(run("shard", *MASKS, "--ranks", "3", "--json").stdout)
    plan = shard_sequence(MASKS, 1000, 3)
    assert {name: found[name] for name in ("seq_len", "balance")} == {"seq_len": 1000, "balance": "work"}
    assert (found["imbalance"], found["received_fraction"]) == (plan.imbalance, plan.received_fraction)
    assert found["ranks"] == [
        {
            "runs": plan.runs(rank).tolist(),
            "tokens": int(plan.tokens[rank]),
            "work": int(plan.work[rank]),
            "visible": int(plan.visible[rank]),
            "received": int(plan.received[rank]),
            "sent": int(plan.sent[rank]),
        }
        for rank in range(3)
    ]


def test_sequences_and_heads_are_those_of_the_options() -> None:
    arguments = ["shard", "(q + b) % 2 == h", "--seq-len", "8", "--ranks", "2", "--json"]
    found = json.loads(run(*arguments, "--batch", "3", "--heads", "2").stdout)
    assert sum(rank["visible"] for rank in found["ranks"]) == 8 * 8 * 3
    assert run(*arguments, "--batch", "3").exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["causal"], "Missing option '--ranks'"),
        (["causal", "--ranks", "8"], "no data that determines the length of the sequence: give --seq-len"),
        (["causal", "--ranks", "0"], "0 is not in the range x>=1"),
        (
            ["causal", "--ranks", "2", "--q-len", "3", "--kv-len", "5"],
            "a sequence attends to itself: give --seq-len, not 3 queries",
        ),
        (["causal", "--ranks", "2", "--seq-len", "8", "--q-offset", "4"], "8 queries from position 4 and 8 keys"),
        (["causal", "--ranks", "2", "--balance", "even"], "'even' is not one of 'work', 'head_tail', 'contiguous'"),
    ],
)
def test_bad_input(arguments: list[str], message: str) -> None:
    result = run("shard", *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    "line", [line.strip() for line in str(main.commands["shard"].help).splitlines() if "flexmask shard " in line]
)
def test_examples_of_the_help_work(line: str) -> None:
    result = run(*shlex.split(line)[1:])
    assert result.exit_code == 0, result.output
