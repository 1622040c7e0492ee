"""A tree of drafts under a window that counts by depth, as the documentation writes it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flexmask import kv, maximum, minimum, parse, plan, q, table
from flexmask.masks import shift, tree

PARENTS, DEPTH = [-1, 0, 0, 1, 2, 4, 5, 5], [0, 1, 1, 2, 2, 3, 4, 4]
ANCESTORS = [{0}, {0, 1}, {0, 2}, {0, 1, 3}, {0, 2, 4}, {0, 2, 4, 5}, {0, 2, 4, 5, 6}, {0, 2, 4, 5, 7}]
NODES = len(PARENTS)


def expected(prefix: int, size: int, kv_len: int) -> list[list[bool]]:
    def visible(node: int, key: int) -> bool:
        if key < prefix:
            return prefix + DEPTH[node] - key < size
        return key - prefix in ANCESTORS[node] and DEPTH[node] - DEPTH[key - prefix] < size

    return [[visible(node, key) for key in range(kv_len)] for node in range(NODES)]


@pytest.mark.parametrize("prefix", [0, 3, 20])
@pytest.mark.parametrize("size", [1, 3, 5, 8])
def test_a_window_counts_by_depth(prefix: int, size: int) -> None:
    depth, kv_len = table(DEPTH), prefix + NODES + 2
    place = minimum(kv, prefix) + depth[maximum(minimum(kv - prefix, NODES - 1), 0)]
    masks = [tree(parents=PARENTS, prefix=prefix) & (place > prefix + depth[q] - size)]
    if size > max(DEPTH):
        masks.append(tree(parents=PARENTS, prefix=prefix) & (kv > prefix + depth[q] - size))
    for mask in masks:
        assert mask.dense(NODES, kv_len)[0, 0].tolist() == expected(prefix, size, kv_len)
        shifted = shift(mask, q=prefix).dense(NODES, kv_len, q_offset=prefix)
        assert shifted[0, 0].tolist() == expected(prefix, size, kv_len)


@pytest.mark.parametrize("given", [torch.tensor([3, 0], dtype=torch.int32), [3, 0], table([3, 0])], ids=str)
def test_each_sequence_has_its_own_prefix(given: Any) -> None:
    """``shift`` takes the prefix as ``tree`` does, also as a parameter."""
    text = parse(f"shift(tree(parents={PARENTS}, prefix=prefix), q=prefix)")
    for mask in (text.bind(prefix=given), shift(tree(parents=PARENTS, prefix=given), q=given)):
        found = mask.dense(NODES, NODES + 4, q_offset=torch.tensor([3, 0]))[:, 0].tolist()
        assert found == [expected(prefix, 10**6, NODES + 4) for prefix in (3, 0)]


@pytest.mark.parametrize("rows", [[2, -1], 2, -1, torch.tensor(1)], ids=str)
def test_rows_that_a_mask_is_moved_by(rows: Any) -> None:
    text = "shift(kv <= q, q=rows, kv=1)"
    masks = [shift(kv <= q, q=rows, kv=1), parse(text).bind(rows=rows)]
    found = [mask.dense(4, batch=2) for mask in masks] + [plan(text, 4, batch=2)(rows=rows).dense()]
    wanted = [[[k - 1 <= row - by for k in range(4)] for row in range(4)] for by in torch.as_tensor(rows).expand(2).tolist()]
    assert all(cells.expand(2, 1, 4, 4)[:, 0].tolist() == wanted for cells in found)
