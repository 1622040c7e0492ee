"""Random blocks: a fixed number for each block, the same each time."""

from __future__ import annotations

import pytest
import torch

import flexmask as fm
from flexmask.errors import ExpressionError


@pytest.mark.parametrize(
    ("blocks", "random_blocks", "global_blocks", "around"), [(12, 3, 1, 1), (9, 2, 2, 0), (8, 0, 1, 2), (5, 9, 0, 1)]
)
def test_the_number_of_blocks(blocks: int, random_blocks: int, global_blocks: int, around: int) -> None:
    size = 3
    mask = fm.masks.bigbird(blocks, size, random_blocks=random_blocks, global_blocks=global_blocks, around=around, seed=blocks)
    cells = mask.dense(blocks * size, blocks * size + 2)[0, 0]
    assert not cells[:, blocks * size :].any()
    tiles = cells[:, : blocks * size].view(blocks, size, blocks, size)
    seen = tiles[:, 0, :, 0]
    assert torch.equal(tiles, seen[:, None, :, None].expand_as(tiles))
    for own in range(blocks):
        near = {y for y in range(blocks) if own < global_blocks or y < global_blocks or abs(own - y) <= around}
        found = {y for y in range(blocks) if seen[own, y]}
        assert near <= found
        assert len(found - near) == min(random_blocks, blocks - len(near))


def test_queries_after_the_blocks_have_no_random_ones() -> None:
    cells = fm.masks.bigbird(12, 1, random_blocks=4).dense(16, 12)[0, 0]
    assert cells[12:].nonzero().tolist() == [[0, 0], [0, 11], [1, 0], [2, 0], [3, 0]]


def test_limit() -> None:
    assert fm.masks.bigbird(3, 1, random_blocks=64).dense(3).all()
    with pytest.raises(ExpressionError, match=r"bigbird: random_blocks must be at most 64, got 65"):
        fm.masks.bigbird(200, 1, random_blocks=65)


def test_seeds() -> None:
    first, again, other = (fm.masks.bigbird(12, 1, seed=seed) for seed in (0, 0, 1))
    assert first == again
    assert not torch.equal(first.dense(12), other.dense(12))
