"""The lengths that masks imply, where none are given."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import flexmask as fm
from flexmask.errors import OperandError
from flexmask.report.lengths import implied_lengths, resolve_lengths

#: A mask, and the numbers of queries and keys that follow from it.
LENGTHS: list[tuple[str, int, int]] = [
    ("causal", 16, 16),
    ("document([0, 0, 1])", 3, 3),
    ("document([[0, 0, 1, 1], [0, 1, 1, 1]])", 4, 4),
    ("document([0, 0, 1], kv_ids=[0, 0, 1, 1, 1])", 3, 5),
    ("document(lengths=[3, 4])", 7, 7),
    ("document(lengths=[[3, 4], [5, 5]], padding=True)", 10, 10),
    ("document(cu_seqlens=[0, 3, 9])", 9, 9),
    ("document(position_ids=[0, 1, 0, 1, 2])", 5, 5),
    ("per_document(causal, lengths=[3, 4])", 7, 7),
    ("key_padding([3, 6, 4])", 6, 6),
    ("key_padding(5)", 5, 5),
    ("key_padding(start=[3, 5])", 16, 16),
    ("query_padding([3, 6, 4])", 6, 6),
    ("key_padding(keep=[True, False])", 2, 2),
    ("cross_length([3, 5, 4], q_lengths=[7, 6, 2])", 7, 5),
    ("prefix_lm([2, 3])", 16, 16),
    ("from_dense([[True, False, True], [True, True, True]])", 2, 3),
    ("key_padding(0)", 16, 16),
    ("document([0, 0, 1]) & key_padding(2)", 3, 3),
    ("eviction([1, 2, 1000000])", 3, 3),
    # Where a lookup is computed, the index ends where the table does.
    ("image_cross(spans=[[0, 3], [1, 3], [3, 5]], image_length=2)", 6, 6),
    ("paged(causal, pages=[1, -1, 0], page_size=2)", 6, 6),
    ("tile_topk(topk=[[0, 1], [1, 2], [0, 2]], size=2)", 6, 6),
    ("multi_item(prefix_length=2, positions=[0, 1, 2, 0, 1])", 7, 7),
    ("(table([0, 1, 1])[q // 4] == 1) & causal", 12, 12),
    ("(table([0, 1, 1])[2 * kv] == 1) & causal", 2, 2),
    ("(table([0, 1, 1])[q % 3] == 1) & causal", 16, 16),
    # A named mask implies a length where it has no visible cell from some position on.
    ("neighborhood(canvas=[8, 8], kernel=[3, 3])", 64, 64),
    ("neighborhood(canvas=[4, 4], kernel=[3, 3], tile=[2, 2])", 16, 16),
    ("causal & neighborhood(canvas=[2, 9], kernel=[1, 3])", 18, 18),
    ("sliding_tile(canvas=[4, 8], tile=[2, 2], kernel=[2, 2], text=3)", 35, 35),
    ("block_diffusion(length=11, size=4)", 22, 22),
    ("svg_temporal(frame_length=3, frames=3, width=1)", 9, 9),
    ("tree(parents=[-1, 0, 0, 1], prefix=2)", 4, 6),
    ("tree(parents=[-1, 0, 0, 1], prefix=[2, 5])", 4, 9),
    ("transpose(key_padding(5))", 5, 5),
    # A condition that is no named mask implies no length, nor does a mask without a limit.
    ("causal & (kv < 5)", 16, 16),
    ("sink_window(2, size=4)", 16, 16),
    ("prefix_lm(3)", 16, 16),
    ("chunk_window(4, left=1)", 16, 16),
    ("causal('lower_right')", 16, 16),
    ("empty", 16, 16),
]


@pytest.mark.parametrize(("text", "queries", "keys"), LENGTHS, ids=[row[0] for row in LENGTHS])
def test_lengths_come_from_the_mask(text: str, queries: int, keys: int) -> None:
    mask = fm.parse(text)
    assert resolve_lengths(mask) == (queries, keys)
    assert mask.dense(queries, keys).shape[2:] == (queries, keys)


@pytest.mark.parametrize(
    "text",
    [
        "neighborhood(canvas=[3, 5], kernel=[3, 3])",
        "sliding_tile(canvas=[4, 4], tile=[2, 2], kernel=[2, 2], text=3)",
        "block_diffusion(length=6, size=2)",
        "svg_temporal(frame_length=3, frames=3, width=1)",
    ],
)
def test_the_length_ends_with_the_last_visible_key(text: str) -> None:
    mask = fm.parse(text)
    _, keys = resolve_lengths(mask)
    seen = mask.dense(40, 40)[0, 0].any(0).tolist()
    assert keys == max(place for place, shown in enumerate(seen) if shown) + 1


def test_given_lengths_come_first() -> None:
    mask = fm.document([0, 0, 1], kv_ids=[0, 0, 1, 1, 1])
    assert resolve_lengths(mask) == (3, 5)
    assert resolve_lengths(mask, q_len=2) == (2, 5)
    assert resolve_lengths(mask, kv_len=4) == (3, 4)
    assert resolve_lengths(mask, q_len=7, kv_len=8) == (7, 8)
    assert resolve_lengths(fm.causal(), kv_len=4) == (4, 4)
    assert resolve_lengths(fm.causal(), q_len=5) == (5, 5)


def test_the_longest_of_several_masks_counts() -> None:
    assert resolve_lengths(fm.causal(), fm.key_padding([3, 9]), fm.query_padding(4)) == (4, 9)


def test_data_of_every_kind() -> None:
    assert implied_lengths(fm.document(torch.zeros(2, 9, dtype=torch.long))) == {"q": 9, "kv": 9}
    assert implied_lengths(fm.document(lengths=torch.tensor([2, 3]))) == {"q": 5, "kv": 5}
    assert implied_lengths(fm.key_padding(np.array([2, 7]))) == {"kv": 7}
    assert implied_lengths(fm.parse("document(ids)")) == {}


def test_no_mask() -> None:
    assert resolve_lengths("causal & key_padding(5)") == resolve_lengths(fm.causal() & fm.key_padding(5)) == (5, 5)
    with pytest.raises(OperandError, match="mask must be a Mask, its text or a mask_mod function, got int 3"):
        resolve_lengths(3)  # type: ignore[arg-type]
