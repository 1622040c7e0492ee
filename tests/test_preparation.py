"""What is checked, and what is promised, between a mask and the lengths that it is lowered at."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import flexmask as fm
from flexmask import LoweringError, attention, b, kv, q


@pytest.mark.parametrize(
    "mask",
    [
        fm.cross_length([6], [6]),
        fm.key_padding([6]) & fm.query_padding([6]),
        fm.prefix_lm([6]) & fm.key_padding([6]),
        fm.query_padding(torch.tensor([6])) & fm.key_padding(torch.tensor([6])),
    ],
)
def test_data_used_twice_is_checked_for_each_use(mask: fm.Mask) -> None:
    with pytest.raises(LoweringError, match="kv_len = 4"):
        mask.dense(8, 4)


def test_sequences_with_very_different_numbers_of_documents_stay_exact() -> None:
    ids = torch.stack((torch.zeros(400, dtype=torch.long), torch.arange(400) // 4))
    mask = fm.causal() & fm.document(ids)
    rows = mask.rows(400)
    assert rows.exact
    assert rows.lower.slots == 1
    assert torch.equal(rows.lower.holds(torch.arange(400)), mask.dense(400))


def test_overflow_is_refused() -> None:
    with pytest.raises(LoweringError, match="beyond 64-bit"):
        (kv * 2**62 >= 0).dense(5)
    with pytest.raises(fm.ExpressionError, match="64-bit"):
        _ = kv < 10**30
    with pytest.raises(fm.OperandError, match="uint64"):
        fm.document(torch.zeros(3, dtype=torch.uint64))


def test_truth_values_count_as_numbers_at_an_offset_of_each_sequence() -> None:
    mask = fm.table([True, True, False])[q] + fm.table([True, True, True])[q] == 2
    rows = mask.rows(2, q_offset=torch.tensor([1]))
    assert rows.exact
    assert torch.equal(rows.lower.counts().flatten(), torch.tensor([2, 0]))
    assert torch.equal(mask.dense(2, q_offset=torch.tensor([1])).sum(-1).flatten(), torch.tensor([2, 0]))


def test_a_mask_mod_keeps_what_the_data_was() -> None:
    ids = torch.tensor([0, 0, 1, 1])
    mask = fm.document(ids)
    index = torch.arange(4)
    expected = mask.dense(4)[0, 0]
    closures = [mask.mask_mod(4, form="interval"), mask.mask_mod(4, form="expression")]
    ids.zero_()
    for closure in closures:
        assert torch.equal(closure(torch.tensor(0), torch.tensor(0), index[:, None], index[None, :]), expected)
    assert mask.dense(4).all()


def test_a_mask_of_one_sequence_serves_any_batch() -> None:
    mask = fm.key_padding([5]) & ((q - kv) % 2 == 0)
    closure = mask.mask_mod(8, form="expression")
    index = torch.arange(8)
    found = closure(torch.arange(3).view(3, 1, 1), torch.tensor(0), index[:, None], index[None, :])
    assert torch.equal(found, mask.dense(8)[0].expand(3, 8, 8))


def test_lengths_are_indices_too() -> None:
    assert (fm.table([1, 2, 3])[fm.q_len] == kv).dense(2, 5)[0, 0, 0].tolist() == [False, False, False, True, False]
    with pytest.raises(LoweringError, match="3 values"):
        (fm.table([1, 2, 3])[fm.q_len] == kv).dense(3, 5)


def test_a_longer_table_of_queries_is_refused_without_an_offset() -> None:
    mask = fm.query_padding(keep=[True] * 10)
    with pytest.raises(LoweringError, match="10 values along q, but q_len is 4"):
        mask.dense(4)
    assert mask.dense(4, q_offset=6).all()
    assert fm.document([0, 0, 1, 1]).dense(2, 4).sum() == 4


def test_shared_parts_are_visited_once() -> None:
    index: fm.Index = q
    for _ in range(200):
        index = fm.minimum(index + index, index + 3)
    mask = index <= kv
    assert mask.params == ()
    assert len(mask.walk()) < 1000


def test_a_dense_mask_of_one_sequence_serves_any_batch() -> None:
    cells = fm.causal().dense(5)
    query = torch.randn(3, 2, 5, 4)
    torch.testing.assert_close(attention(query, query, query, fm.dense(cells)), attention(query, query, query, "causal"))


def test_numpy_scalars_are_integers() -> None:
    one: Any = np.int64(1)
    four: Any = np.int32(4)
    assert fm.causal(offset=one) == fm.causal(offset=1)
    assert fm.sliding_window(size=four) == fm.sliding_window(size=4)
    assert (q - kv < fm.param("w")).bind(w=np.int64(3)) == (q - kv < 3)
    with pytest.raises(fm.OperandError, match="ndarray"):
        np.ones((4, 4), bool) & fm.causal()


def test_parameters_inside_derived_tables_are_bound() -> None:
    mask = fm.parse("document_ids(lengths=n)[q] == document_ids(lengths=n)[kv]").bind(n=[3, 4])
    assert mask.params == ()
    assert torch.equal(mask.dense(7), fm.document(lengths=[3, 4]).dense(7))
    assert fm.parse("sliding_window(size=w)").bind(w=4).dense(6).equal(fm.sliding_window(size=4).dense(6))


def test_tables_compare_by_value() -> None:
    assert fm.table([1, 2]) == fm.table([1, 2])
    assert fm.table([1, 2]) != fm.table([1, 3])
    assert len({fm.table([1, 2]), fm.table([1, 2])}) == 1


@pytest.mark.parametrize("device", ["foo", "cuda:99"])
def test_unknown_devices_are_refused(device: str) -> None:
    with pytest.raises(LoweringError, match=device):
        fm.causal().dense(4, device=device)


def test_an_empty_offset_is_refused() -> None:
    with pytest.raises(LoweringError, match="q_offset"):
        fm.causal().dense(4, q_offset=torch.zeros(0, dtype=torch.long))


NO_LIMIT = 2**63 - 1


@pytest.mark.parametrize(
    "mask",
    [
        kv <= fm.table([NO_LIMIT])[b],
        kv > fm.table([NO_LIMIT])[b],
        fm.causal(offset=fm.table(torch.tensor([NO_LIMIT]))[b]),
        abs(q - kv) <= fm.table([NO_LIMIT])[b],
        fm.table([-NO_LIMIT] * 4)[kv] < q,
    ],
    ids=str,
)
def test_data_that_would_overflow_is_refused(mask: fm.Mask) -> None:
    for lower in (mask.dense, mask.block_mask, mask.rows):
        with pytest.raises(LoweringError, match="between -2"):
            lower(4)


def test_data_that_is_only_compared_may_be_large() -> None:
    assert fm.document([NO_LIMIT, NO_LIMIT, 0, 0]).dense(4).sum() == 8
    assert fm.document([NO_LIMIT, NO_LIMIT, 0, 0]).block_mask(4, block_size=1).to_dense().sum() == 8
    assert (kv <= fm.table([2**60])[b]).block_mask(4, block_size=1).to_dense().sum() == 16


def test_a_block_may_be_larger_than_the_mask() -> None:
    assert fm.causal().block_mask(16, block_size=2**29).kv_num_blocks.tolist() == [[[1]]]
    assert (fm.causal() & ((q - kv) % 3 == 0)).block_mask(16, block_size=2**29).kv_num_blocks.tolist() == [[[1]]]
    with pytest.raises(LoweringError, match="block_size"):
        fm.causal().block_mask(16, block_size=2**40)


def test_truth_values_are_no_lengths() -> None:
    with pytest.raises(fm.OperandError, match="q_len must be an integer"):
        fm.causal().dense(True)
    with pytest.raises(fm.OperandError, match="q_offset"):
        fm.causal().dense(4, q_offset=True)


def test_one_sequence_is_not_every_sequence() -> None:
    with pytest.raises(LoweringError, match=r"two sizes of batch.*has no batch axis"):
        fm.document(lengths=[[2, 2]]).dense(4, batch=3)
    assert fm.document(lengths=[2, 2]).dense(4, batch=3).shape == (1, 1, 4, 4)
