"""The sequences of a lowered mask."""

from typing import Any

import pytest
import torch

import flexmask as fm
from flexmask.errors import OperandError


@pytest.mark.parametrize("index", [True, False, 1.0, "0", None, (0, 0), torch.tensor(0)], ids=repr)
def test_only_integers_and_slices_are_indices(index: Any) -> None:
    lowered = fm.plan("key_padding(lengths)", 4)(lengths=torch.tensor([3, 1]))
    assert lowered[1].dense().tolist() == lowered[1:].dense().tolist() == [[[[True, False, False, False]] * 4]]
    with pytest.raises(OperandError, match="indexed by sequences, an int or a slice, got "):
        lowered[index]
