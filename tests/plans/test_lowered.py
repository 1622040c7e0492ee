"""The sequences of a lowered mask."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import flexmask as fm
from flexmask import attention
from flexmask.errors import OperandError
from flexmask.plans import LoweredMask
from tests.support import oracle
from tests.support.lowerings import check_lists
from tests.support.strategies import Shape


@pytest.mark.parametrize("index", [True, False, 1.0, "0", None, (0, 0), torch.tensor(0)], ids=repr)
def test_only_integers_and_slices_are_indices(index: Any) -> None:
    lowered = fm.plan("key_padding(lengths)", 4)(lengths=torch.tensor([3, 1]))
    assert lowered[1].dense().tolist() == lowered[1:].dense().tolist() == [[[[True, False, False, False]] * 4]]
    with pytest.raises(OperandError, match="indexed by sequences, an int or a slice, got "):
        lowered[index]


@pytest.mark.parametrize("index", range(-3, 3))
def test_an_index_is_one_sequence(index: int) -> None:
    lowered = fm.plan("key_padding(lengths)", 4)(lengths=torch.tensor([3, 1, 2]))
    assert lowered[index].dense()[:, 0, 0].tolist() == [
        [[True, True, True, False], [True, *[False] * 3], [True, True, False, False]][index]
    ]


@pytest.mark.parametrize(("intervals", "tested"), [(1, 2), (2, 2), (3, 4), (4, 4), (5, 8), (9, 16)])
def test_kernels_serve_several_numbers_of_intervals(intervals: int, tested: int) -> None:
    """So that a mask with another interval takes the kernel of the last: the mask_mod has two ends for each that it tests."""
    mask = fm.parse(" | ".join(f"((kv >= {4 * place}) & (kv < {4 * place} + n))" for place in range(intervals)))
    found = mask.plan(2, 4 * intervals)(n=torch.tensor(3)).mask_mod
    ends = dict(zip(found.__code__.co_freevars, found.__closure__ or (), strict=True))
    assert len(ends["intervals"].cell_contents) == tested


def test_a_block_that_one_query_skips_is_in_no_list() -> None:
    mask = ((fm.q + 7) * fm.kv) % 40 < 4
    found = fm.plan(mask, 1, 24, block_size=(1, 4))().block_mask
    check_lists(found, Shape(1, 24), oracle.classify_blocks(mask.dense(1, 24), 1, 4))


COPIES: dict[str, Callable[[LoweredMask], LoweredMask]] = {
    "pickled": lambda lowered: pickle.loads(pickle.dumps(lowered)),
    "copied": copy.deepcopy,
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", COPIES)
@pytest.mark.parametrize("is_copy", [[False, True], [True, False]], ids=["last", "first"])
def test_a_copy_is_no_other_graph(kind: str, is_copy: list[bool]) -> None:
    """As from the workers of a DataLoader in training, and from this process in validation."""
    torch._dynamo.reset()
    counter, plan = CompileCounterWithBackend("eager"), fm.plan("causal & key_padding(n)")
    compiled = torch.compile(lambda x, mask: attention(x, x, x, mask), fullgraph=True, backend=counter)
    for length in (150, 170, 190, 210):
        lengths, copied = torch.tensor([length, length - 9]), is_copy[length > 170]
        lowered = plan(length, n=lengths)
        x, at = torch.randn(2, 1, length, 8), torch.arange(length)
        wanted = oracle.attention(x, x, x, ((at <= at[:, None]) & (at < lengths[:, None, None]))[:, None])
        torch.testing.assert_close(
            compiled(x, COPIES[kind](lowered) if copied else lowered).double(), wanted, rtol=1e-5, atol=1e-5
        )
    assert counter.frame_count == 2
