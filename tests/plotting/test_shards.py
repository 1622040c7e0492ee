"""Pictures of shards: the visible cells by the rank that holds the query."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import flexmask as fm
from flexmask.distributed import shard_sequence
from flexmask.errors import RenderError
from flexmask.plotting.mpl.plot import draw_sheet
from flexmask.plotting.palette import SHARDS, looks_of
from flexmask.plotting.raster import rasterize
from flexmask.plotting.sheet import panel_sheet
from tests.support.cli import run

MASK = fm.causal() & fm.document(lengths=[9, 30, 25])


def test_cells_have_the_color_of_the_rank_of_the_query() -> None:
    plan = shard_sequence(MASK, 64, 3, block_size=2)
    shown = rasterize(MASK, 64, shards=plan)
    assert [category.label for category in shown.categories] == ["rank 0", "rank 1", "rank 2", "hidden"]
    assert [look.color for look in looks_of(shown.categories)[:3]] == [look.color for look in SHARDS[:3]]
    expected = np.full((64, 64), 3)
    for rank in range(3):
        for query in plan.positions(rank).tolist():
            expected[query, MASK.dense(64)[0, 0, query].numpy()] = rank
    assert np.array_equal(shown.cells, expected)


def test_of_many_ranks_some_share_a_color() -> None:
    plan = shard_sequence("causal", 50, 26, block_size=1)
    shown = rasterize("causal", 50, shards=plan)
    words = [category.label for category in shown.categories]
    assert words[:3] == ["ranks 0, 8, 16, ...", "ranks 1, 9, 17, ...", "ranks 2, 10, 18"]
    assert len(words) == 9
    for rank in (0, 9, 25):
        assert {int(shown.cells[query, 0]) for query in plan.positions(rank).tolist()} == {rank % 8}


def test_long_masks_and_several_heads() -> None:
    mask = fm.per_head([fm.causal(), fm.sliding_window(size=300)])
    plan = shard_sequence(mask, 3000, 4)
    shown = rasterize(mask, 3000, shards=plan, max_pixels=(100, 100))
    assert shown.shares[:, 0, 0].tolist() == pytest.approx([0.516667, 0, 0, 0, 0.483333], abs=1e-4)
    sheet = panel_sheet(mask, 3000, head="all", shards=plan, max_pixels=(50, 50))
    assert [len(picture.categories) for picture in sheet.pictures] == [5, 5]
    assert len(draw_sheet(sheet).axes) == 2


def test_every_method_that_draws(tmp_path: Any) -> None:
    plan = shard_sequence(MASK, 64, 3, block_size=2)
    legend = MASK.plot(64, shards=plan).get_legend()
    assert legend is not None
    assert legend.get_texts()[0].get_text().startswith("rank 0 (")
    MASK.plot_panels(64, shards=plan)
    MASK.save_picture(tmp_path / "shards.svg", 64, shards=plan)
    assert "rank 2" in (tmp_path / "shards.svg").read_text()
    with pytest.raises(RenderError, match=r"the interactive view does not show shards; write a \.png"):
        MASK.save_picture(tmp_path / "shards.html", 64, shards=plan)


def test_the_command_line_plans_and_draws() -> None:
    lines = run("render", "causal", "--seq-len", "8", "--ranks", "2").stdout.splitlines()
    rows = [line.split()[1:] for line in lines if line.split() and line.split()[0].isdigit() and len(line.split()) == 9]
    assert [row[0] for row in rows] == ["0", "0", "1", "1", "1", "1", "0", "0"]
    assert rows[3] == ["1", "1", "1", "1", ".", ".", ".", "."]
    assert "0 rank 0 (18)" in lines[-1]
    assert run("render", "causal", "--seq-len", "5000", "--ranks", "4").exit_code == 0
    assert run("render", "causal", "--q-len", "4", "--kv-len", "6", "--ranks", "2").exit_code == 2


@pytest.mark.parametrize("options", [{"why": True}, {"block_size": 4}, {"against": "full"}])
def test_one_coloring_at_a_time(options: dict[str, Any]) -> None:
    with pytest.raises(RenderError, match="shards= shows which rank holds each query; leave out why=, block_size= and against="):
        rasterize(MASK, 64, shards=shard_sequence(MASK, 64, 3), **options)


@pytest.mark.parametrize(
    "lengths",
    [
        {"q_len": 32, "kv_len": 64},
        {"q_len": 64, "kv_len": 80, "q_offset": 16},
        {"q_len": 64, "kv_len": 80, "q_offset": torch.tensor([16, 8])},
    ],
    ids=str,
)
def test_a_plan_of_another_sequence(lengths: dict[str, Any]) -> None:
    with pytest.raises(RenderError, match="shards= is a plan of 64 tokens; give q_len=64 and no q_offset"):
        rasterize("causal", **lengths, shards=shard_sequence("causal", 64, 3))
