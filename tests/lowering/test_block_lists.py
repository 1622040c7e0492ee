"""Lists of blocks whose rows share memory."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import flexmask as fm
from flexmask.intervals import Rows
from flexmask.lowering.block_lists import _diagonal_indices
from tests.support.block_lists import check_lists


@pytest.mark.parametrize("pitch", [0, 1, 2, 5])
def test_rows_that_start_at_one_distance_are_views_of_one_range(pitch: int) -> None:
    height, width = 4, 20
    lo = (3 + pitch * torch.arange(height, dtype=torch.int32)).view(1, 1, height, 1)
    found = _diagonal_indices(Rows(lo, lo + 2, width), pitch)
    assert found is not None
    assert found[0, 0, :, :2].tolist() == [[3 + pitch * row, 4 + pitch * row] for row in range(height)]
    assert found.shape == (1, 1, height, width)
    assert found.untyped_storage().nbytes() == 4 * (width + pitch * (height - 1))


def test_rows_at_another_distance_are_none() -> None:
    lo = torch.tensor([0, 2, 3], dtype=torch.int32).view(1, 1, 3, 1)
    assert _diagonal_indices(Rows(lo, lo + 1, 9), 1) is None


@pytest.mark.parametrize("share", [0.0, 0.02, 0.2])
def test_many_blocks_of_several_sequences_and_heads(share: float) -> None:
    """More than are ranked together, of a grid that is not square, with few and with many blocks."""
    cells = torch.rand(2, 3, 72, 90, generator=torch.Generator().manual_seed(0)) < share
    cells[:, :, 8:12, 30:32] = True  # full blocks
    wanted = create_block_mask(lambda b, h, q, kv: cells[b, h, q, kv], 2, 3, 72, 90, device="cpu", BLOCK_SIZE=2)
    check_lists(fm.from_dense(cells).block_mask(72, 90, block_size=2), wanted)
