"""The benchmarks: what they measure is what they say, and the README quotes the results that are committed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask

from benchmarks.compiled import Decoder
from benchmarks.kernel_workloads import counted_workloads, further_kernel_workloads, kernel_workloads
from benchmarks.measuring import CLEAR, Measurement, measure
from benchmarks.report import write
from benchmarks.rows import Row, Section
from benchmarks.workloads import (
    Workload,
    causal_work,
    dilated_work,
    even_work,
    heads_work,
    packed_work,
    prefix_work,
    table_work,
    tree_work,
    window_work,
)

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "cpu.md"


@pytest.mark.slow
def test_each_run_gets_what_was_prepared_for_it() -> None:
    prepared, seen = iter(range(100)), list[int]()
    found = measure(seen.append, lambda: next(prepared), seconds=0.0)
    assert seen == list(range(len(seen)))
    assert found.seconds > 0
    assert found.runs >= 1


@pytest.mark.slow
@pytest.mark.skipif(not CLEAR.exists(), reason="the system does not say how much memory a process held at the most")
def test_memory_that_was_freed_again_counts() -> None:
    def run(_: None) -> None:
        torch.ones(2**26)

    found = measure(run, seconds=0.0)
    assert found.peak is not None
    assert 0.9 * 2**28 < found.peak < 2**29


SHORT = [
    *(packed_work(300, "cpu", batch) for batch in (1, 3)),
    *(make(300) for make in (causal_work, window_work, dilated_work)),
    even_work(600, "cpu"),
    prefix_work(1200, "cpu"),
    tree_work(400, "cpu", 20),
    heads_work(300, 3),
    table_work(300, "cpu"),
    *kernel_workloads(1200, "cpu"),
    *further_kernel_workloads(1200, "cpu"),
    *counted_workloads(1200, "cpu"),
]


@pytest.mark.parametrize("work", SHORT, ids=lambda work: work.name)
def test_both_sides_of_a_workload_are_one_mask(work: Workload) -> None:
    sizes = work.batch or 1, work.heads or 1, work.length, work.length
    cells = create_mask(work.mask_mod, *sizes, device="cpu")
    assert torch.equal(work.mask().dense(work.length, batch=work.batch, heads=work.heads).expand(sizes), cells)


def test_both_decoders_are_one_model() -> None:
    torch.manual_seed(0)
    ours, dense = Decoder(16, 40, "flexmask"), Decoder(16, 40, "dense")
    dense.load_state_dict(ours.state_dict())
    tokens, cu = torch.randint(256, (1, 40)), torch.tensor([0, 9, 25, 31, 40])
    found, wanted = ours(tokens, cu), dense(tokens, cu)
    torch.testing.assert_close(found, wanted)
    found.backward(), wanted.backward()
    for own, other in zip(ours.parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad)


def test_report(tmp_path: Path) -> None:
    slow, fast = Measurement(1.5, 3, 2**30), Measurement(0.003, 9, None, "1 graph")
    rows = [
        Row("packed", 8192, {}, {"flexmask": fast, "create_block_mask": slow}),
        Row("packed", 32768, {}, {"flexmask": slow}),
    ]
    write([Section("BlockMask", "What it says.", "flexmask", rows)], "cpu", tmp_path, "python -m benchmarks")
    text = (tmp_path / "cpu.md").read_text()
    assert "| packed | 8,192 | 3.0 ms, 1 graph | 1.5 s | 500x | - | 1,024.0 MiB |" in text
    assert "| packed | 32,768 | 1.5 s | - | - | 1,024.0 MiB | - |" in text
    assert "![time" in text
    assert (tmp_path / "cpu-time.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "cpu-memory.png").read_bytes().startswith(b"\x89PNG")


ROWS = {"": "causal & document & key_padding", "BlockMask": "causal & document & key_padding"}
ROWS |= {"batch 16": "causal & document & key_padding, batch 16", "dilated window": "dilated window (does not separate)"}
ROWS |= {"a decoding step, causal": "causal, q_offset an int"}


def cells_of(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def test_readme_quotes_the_committed_results() -> None:
    """Each figure stands in the same row and column of the report."""
    lines = RESULTS.read_text().splitlines()
    rows = [cells_of(line) for line in lines if line.startswith("| ")]
    report = {tuple(row[:2]): row for row in rows}
    section = (ROOT / "README.md").read_text().split("## Speed")[1].split("\n## ")[0]
    quoted = [cells_of(line) for line in section.splitlines() if re.match(r"\|[^|]*\| [\d,]+ \|", line)]
    assert len(quoted) >= 5
    for name, tokens, *figures in quoted:
        row = report[ROWS[name], tokens]
        for column, figure in enumerate(figures):
            time, _, memory = figure.partition(", ")
            assert not time or time == row[2 + column].removesuffix(", 1 run")
            assert not memory or memory == row[7 + column]
    in_text = re.findall(r"[\d,.]+x\b|[\d,.]+ (?:µs|ms)\b", "\n".join(line for line in section.splitlines() if "|" not in line))
    assert len(in_text) >= 5
    found = {cell for row in rows for cell in row}  # sections may have rows of one name
    assert [figure for figure in in_text if figure not in found] == []
