"""``Mask.varlen``: the mask that variable-length attention computes from the arguments, cell by cell, is the mask."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import flexmask as fm
from flexmask import kv, masks, q
from flexmask.errors import LoweringError
from flexmask.lowering.varlen import VarlenArguments


def shown(found: VarlenArguments, batch: int, q_len: int, kv_len: int) -> Tensor:
    """The cells of all tokens, as FlashAttention documents its arguments: ``bool[B * q_len, B * kv_len]``."""
    cells = torch.zeros(batch * q_len, batch * kv_len, dtype=torch.bool)
    queries, keys = (
        range(size) if index is None else index.tolist()
        for index, size in ((found.queries, batch * q_len), (found.keys, batch * kv_len))
    )
    starts, key_starts = found.cu_seq_q.tolist(), found.cu_seq_k.tolist()
    assert (starts[-1], key_starts[-1]) == (len(queries), len(keys))
    left, right = found.window_size
    for first, stop, first_key, end in zip(starts, starts[1:], key_starts, key_starts[1:], strict=False):
        assert 0 < stop - first <= found.max_q
        assert 0 < end - first_key <= found.max_k
        for row in range(first, stop):
            for column in range(first_key, end):
                after = (column - end) - (row - stop)  # keys after the diagonal
                if (left < 0 or after >= -left) and (right < 0 or after <= right):
                    cells[queries[row], keys[column]] = True
    return cells


def whole(dense: Tensor) -> Tensor:
    """``[B, 1, q_len, kv_len]`` as the cells of all tokens."""
    cells: Tensor = torch.block_diag(*dense[:, 0].int())
    return cells.bool()


IDS = torch.tensor([[0, 0, 0, 1, 1, 2, -1], [5, 5, 5, 5, 5, 3, 3]])
CASES: dict[str, tuple[fm.Mask, tuple[int, int], tuple[int, int]]] = {
    "full": (fm.full(), (3, 5), (-1, -1)),
    "causal": (fm.causal(), (5, 5), (-1, 0)),
    "lower right": (fm.causal(align="lower_right"), (3, 5), (-1, 0)),
    "lower right, with empty rows": (fm.causal(align="lower_right"), (5, 3), (-1, 0)),
    "strictly causal": (q > kv, (5, 5), (-1, 0)),
    "window": (fm.sliding_window(left=2, right=1), (9, 9), (2, 1)),
    "window as long as the keys": (fm.sliding_window(left=9, right=0), (5, 5), (-1, 0)),
    "documents": (fm.causal() & fm.document(IDS), (7, 7), (-1, 0)),
    "documents with a window": (fm.sliding_window(left=1, right=0) & fm.document(lengths=[3, 1, 5]), (9, 9), (1, 0)),
    "documents that are empty": (fm.document(cu_seqlens=[0, 3, 3, 7]), (7, 7), (-1, -1)),
    "key padding": (fm.key_padding([3, 7]), (7, 7), (-1, -1)),
    "padding on the left": (fm.causal() & fm.key_padding([3, 7], side="left"), (7, 7), (-1, 0)),
    "padding on the right": (fm.causal() & fm.query_padding([3, 7]) & fm.key_padding([3, 7]), (7, 7), (-1, 0)),
    "a sequence without keys": (fm.key_padding([3, 0]), (4, 4), (-1, -1)),
    "chunks": (fm.causal() & masks.chunked(3), (8, 8), (-1, 0)),
    "other documents of keys": (
        masks.cross_document(fm.full(), q_lengths=[1, 3], kv_lengths=[4, 2], align="upper_left"), (4, 6), (-1, -1),
    ),
    "crossed, lower right": (
        masks.cross_document(fm.causal(), q_lengths=[1, 3], kv_lengths=[4, 5], align="lower_right"), (4, 9), (-1, 0),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_arguments(name: str) -> None:
    mask, (q_len, kv_len), window = CASES[name]
    found = mask.varlen(q_len, kv_len)
    dense = mask.dense(q_len, kv_len)
    assert found.window_size == window
    assert torch.equal(shown(found, len(dense), q_len, kv_len), whole(dense))
    assert found.cu_seq_q.dtype == found.cu_seq_k.dtype == torch.int32
    assert (found.cu_seq_k is found.cu_seq_q) == torch.equal(found.cu_seq_q, found.cu_seq_k)
    assert found.max_q == found.cu_seq_q.diff().max()
    assert found.max_k == found.cu_seq_k.diff().max()


def test_the_tokens_of_a_chunk() -> None:
    mask = fm.causal() & fm.sliding_window(size=3)
    found = mask.varlen(2, 9, q_offset=torch.tensor([3, 6]))
    assert found.cu_seq_k.tolist() == [0, 4, 8]
    assert found.keys is not None
    assert found.keys.tolist() == [1, 2, 3, 4, 13, 14, 15, 16]
    assert found.queries is None


def test_equal_segments_share_a_tensor() -> None:
    found = fm.document(lengths=[3, 4]).varlen(7, device="cpu")
    assert found.cu_seq_q.tolist() == [0, 3, 7]
    assert found.cu_seq_k is found.cu_seq_q
    assert (found.queries, found.keys) == (None, None)


@given(
    st.lists(st.lists(st.integers(0, 4), min_size=3, max_size=3), min_size=1, max_size=2),
    st.sampled_from([fm.full(), fm.causal(), fm.sliding_window(left=1, right=0), fm.sliding_window(left=2, right=1)]),
)
def test_documents(lengths: list[list[int]], inside: fm.Mask) -> None:
    mask = inside & fm.document(lengths=lengths, padding=True)
    dense = mask.dense(12)
    if not dense.any():
        return
    found = mask.varlen(12)
    assert torch.equal(shown(found, len(dense), 12, 12), whole(dense.expand(len(lengths), -1, -1, -1)))


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ((q - kv) % 2 == 0, "not separable in q and kv; use backend"),
        (fm.causal() & fm.from_dense(torch.eye(6).bool()), r"not separable in q and kv; try mask.recognize\(\)"),
        (masks.sink_window(1, size=2), "2 key intervals"),
        (fm.per_head([fm.causal(), fm.full()]), "heads differ"),
        (fm.causal() & fm.key_padding([3, 6]), r"query 0 of sequence 0 .* \[0, 1\).* \(-1, 0\) .* add query_padding"),
        (fm.prefix_lm(3), r"query 0 of sequence 0 attends to the keys \[0, 3\), .* window \(-1, 0\)"),
        (masks.block_causal(2), r"query 0 .* \[0, 2\).* window \(-1, 0\)"),
        (fm.where(q < 3, fm.causal() & (kv < 3), kv >= 3), r"query 3 .* window \(-1, 0\)"),
        (fm.empty(), "no query attends to a key"),
    ],
    ids=str,
)  # fmt: skip
def test_masks_that_do_not_fit(mask: fm.Mask, message: str) -> None:
    with pytest.raises(LoweringError, match=message):
        mask.varlen(6)
