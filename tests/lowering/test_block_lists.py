"""Lists of blocks whose rows share memory."""

import pytest
import torch

from flexmask.intervals import Rows
from flexmask.lowering.block_lists import _diagonal_indices


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
