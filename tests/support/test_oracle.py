"""The oracle itself, held to small cases written by hand and to torch."""

import pytest
import torch
from hypothesis.vendor.pretty import pretty
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.functional import scaled_dot_product_attention

import flexmask as fm
from tests.support import oracle
from tests.support.lowerings import check_lists_of_cells, element_mask
from tests.support.strategies import Case, Shape


def test_blocks_of_a_ragged_table() -> None:
    cells = torch.tensor([[1, 1, 1, 0, 1], [1, 1, 0, 0, 1], [1, 1, 0, 0, 1]]).bool()
    full, partial, empty = oracle.FULL, oracle.PARTIAL, oracle.EMPTY
    assert oracle.classify_blocks(cells, 2, 2).tolist() == [[full, partial, partial], [partial, empty, partial]]
    assert oracle.classify_blocks(cells, 3, 1).tolist() == [[full, full, partial, empty, full]]


@pytest.mark.parametrize("block_size", [1, 3, (2, 4), 16])
def test_blocks_are_those_of_torch(block_size: int | tuple[int, int]) -> None:
    cells = torch.rand(2, 3, 9, 13) < torch.tensor([0.05, 0.5, 0.95]).view(1, 3, 1, 1)
    made = create_block_mask(lambda b, h, q, kv: cells[b, h, q, kv], 2, 3, 9, 13, "cpu", BLOCK_SIZE=block_size)
    check_lists_of_cells(made, Shape(9, 13, 2, 3), cells)
    assert torch.equal(element_mask(made, Shape(9, 13, 2, 3)), cells)


@pytest.mark.parametrize(
    ("picture", "intervals"),
    [("....", []), ("####", [(0, 4)]), ("#.##", [(0, 1), (2, 4)]), (".##.", [(1, 3)]), ("...#", [(3, 4)])],
)
def test_intervals_of_a_row(picture: str, intervals: list[tuple[int, int]]) -> None:
    assert oracle.intervals_of([cell == "#" for cell in picture]) == intervals


def test_documents_from_each_source() -> None:
    assert oracle.ids_of_lengths([2, 0, 1], 5) == [0, 0, 2, -1, -1]
    assert oracle.ids_of_cu_seqlens([0, 2, 2, 3], 5) == [0, 0, 2, -1, -1]
    assert oracle.ids_of_position_ids([0, 1, 0, 1, 2, 7]) == [0, 0, 1, 1, 1, 2]


def test_attention_is_that_of_torch() -> None:
    query, key, value = (torch.randn(2, 4, n, 8, dtype=torch.float64) for n in (5, 7, 7))
    allowed = torch.rand(2, 4, 5, 7) < 0.6
    allowed[..., 3] = True
    wanted = scaled_dot_product_attention(query, key, value, attn_mask=allowed)
    torch.testing.assert_close(oracle.attention(query, key, value, allowed), wanted, rtol=0, atol=1e-12)
    wanted = scaled_dot_product_attention(query, key[:, :2], value[:, :2], attn_mask=allowed, scale=0.3, enable_gqa=True)
    found = oracle.attention(query, key[:, :2], value[:, :2], allowed, scale=0.3)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def test_attention_of_a_row_without_keys_is_zero() -> None:
    query, key, value = (torch.randn(1, 1, 3, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    allowed = torch.tensor([[True, False, False], [False, False, False], [True, True, True]])
    found = oracle.attention(query, key, value, allowed)
    assert not found[0, 0, 1].any()
    found.sum().backward()
    assert query.grad is not None
    assert not query.grad[0, 0, 1].any()
    assert all(tensor.grad is not None and tensor.grad.isfinite().all() for tensor in (query, key, value))


def test_a_drawn_mask_prints_as_what_makes_it() -> None:
    mask = fm.causal() & fm.key_padding([3, 5])
    assert pretty(Case(mask, oracle.causal())) == "fm.parse('causal & key_padding(lengths=[3, 5])')"
