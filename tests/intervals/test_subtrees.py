"""Rows of ``(kv <= q) & (q < end[kv])``, by segments where the ranges of keys nest, against a loop over cells."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

import flexmask as fm
from flexmask import b, kv, masks, q, table
from flexmask.errors import ExpressionError, LoweringError
from flexmask.intervals.bind import bind
from flexmask.intervals.bounds import RowBounds, analyze
from flexmask.intervals.subtrees import subtree_ends


def depths(draw: random.Random, n: int) -> list[int]:
    """The depths of the tokens of some trees in depth-first order."""
    found: list[int] = []
    for _ in range(n):
        deepest = found[-1] + 1 if found else 0
        found.append(draw.randint(0, deepest) if draw.random() < 0.3 else deepest)
    return found


def ends(depth: list[int]) -> list[int]:
    n = len(depth)
    return [next((j for j in range(i + 1, n) if depth[j] <= depth[i]), n) for i in range(n)]


def bounds(mask: fm.Mask, q_len: int, kv_len: int, q_offset: int = 0) -> RowBounds:
    return analyze(bind(mask, q_len, kv_len, None, None, q_offset, torch.device("cpu")))


def check_bounds(found: RowBounds, wanted: np.ndarray, *, exact: bool) -> None:
    """Checks bounds against ``bool[B, q_len, kv_len]``."""
    keys = torch.arange(wanted.shape[-1])
    lower, upper = (np.broadcast_to(rows.holds(keys).numpy()[:, 0], wanted.shape) for rows in (found.lower, found.upper))
    assert not (lower & ~wanted).any()
    assert not (wanted & ~upper).any()
    if exact:
        assert found.exact
        assert (lower == wanted).all()


@pytest.mark.parametrize("seed", range(20))
def test_tokens_in_another_order(seed: int) -> None:
    """A mask_mod over the times at which a walk enters and leaves the nodes; a node comes behind its parent."""
    draw = random.Random(seed)
    n = draw.randint(1, 40)
    parents = [-1, *(draw.randint(-1, node - 1) for node in range(1, n))]
    ticks = draw.randint(0, 1)  # whether leaving a node takes time too
    enter, leave, clock = [0] * n, [0] * n, 0

    def walk(node: int) -> None:
        nonlocal clock
        for child in (child for child in range(n) if parents[child] == node):
            enter[child], clock = clock, clock + 1
            walk(child)
            clock += ticks
            leave[child] = clock

    walk(-1)
    first, behind = torch.tensor(enter), torch.tensor(leave)
    mask = fm.from_mask_mod(lambda b, h, q, kv: (first[kv] <= first[q]) & (first[q] < behind[kv]))
    assert str(mask) == f"prefix_tree(end=<behind: int64[{n}]>, order=<first: int64[{n}]>)"
    wanted = torch.zeros(n, n, dtype=torch.bool)
    for node in range(n):
        above = node
        while above >= 0:
            wanted[node, above], above = True, parents[above]
    assert torch.equal(mask.dense(n)[0, 0], wanted)
    assert torch.equal(mask.block_mask(n, block_size=1).to_dense()[0, 0].bool(), wanted)


def test_an_order_goes_with_ends() -> None:
    with pytest.raises(ExpressionError, match=r"prefix_tree: order= goes with end=, got position_ids"):
        masks.prefix_tree(position_ids=[0, 1], order=[0, 1])


@pytest.mark.parametrize("seed", range(60))
def test_trees(seed: int) -> None:
    draw = random.Random(seed)
    n, batch = draw.randint(1, 40), draw.choice([1, 3])
    depth = [depths(draw, n) for _ in range(batch)]
    end = [ends(row) for row in depth]
    padding = draw.choice([0, draw.randint(0, n)])
    end = [[min(stop, n - padding) * (i < n - padding) for i, stop in enumerate(row)] for row in end]
    offset = draw.randint(0, n - 1)
    q_len = draw.randint(1, n - offset)
    size = draw.choice([None, 1, 2, 5])
    mask = (kv <= q) & (q < table(torch.tensor(end))[b, kv])
    if size is not None:
        mask &= table(torch.tensor(depth))[b, kv] > table(torch.tensor(depth))[b, q] - size
    at, key = np.arange(offset, offset + q_len)[:, None], np.arange(n)
    wanted = (key <= at) & (at < np.array(end)[:, None])
    if size is not None:
        wanted &= np.array(depth)[:, None] > np.array(depth)[:, offset : offset + q_len, None] - size
    check_bounds(bounds(mask, q_len, n, offset), wanted, exact=True)
    assert (mask.dense(q_len, n, q_offset=offset).numpy().reshape(wanted.shape) == wanted).all()


@pytest.mark.parametrize("seed", range(40))
def test_ranges_that_do_not_nest(seed: int) -> None:
    draw = random.Random(seed)
    n = draw.randint(2, 30)
    end = [ends(depths(draw, n)) for _ in range(2)]
    end[1] = [stop if draw.random() < 0.8 else draw.randint(-2, n + 3) for stop in end[1]]
    mask = (kv <= q) & (q < table(torch.tensor(end))[b, kv])
    at, key = np.arange(n)[:, None], np.arange(n)
    wanted = (key <= at) & (at < np.array(end)[:, None])
    check_bounds(bounds(mask, n, n), wanted, exact=False)
    assert (mask.dense(n).numpy()[:, 0] == wanted).all()


def test_entry_and_exit_times() -> None:
    """The times at which a walk enters and leaves the segment of each token, of a batch, whose columns are not thresholds."""
    enter = torch.tensor([[0, 0, 1, 1, 3, 3, 5], [0, 1, 1, 2, 2, 4, 4]])
    leave = torch.tensor([[6, 6, 3, 3, 5, 5, 6], [6, 4, 4, 3, 3, 5, 5]])
    mask = (kv <= q) & (table(enter)[b, kv] <= table(enter)[b, q]) & (table(enter)[b, q] < table(leave)[b, kv])
    key = np.arange(7)
    wanted = (key <= key[:, None]) & (enter.numpy()[:, :, None] < leave.numpy()[:, None])
    check_bounds(bounds(mask, 7, 7), wanted, exact=True)


def test_depths_near_the_ends_of_64_bits() -> None:
    depth = torch.tensor([2**63 - 2, 2**63 - 1, 2**63 - 1, 5])
    mask = (kv <= q) & (q < table([3, 2, 3, 4])[kv]) & (table(depth)[kv] >= table(depth)[q] - 0)
    key, great = np.arange(4), depth.numpy()
    wanted = (key <= key[:, None]) & (key[:, None] < [3, 2, 3, 4]) & (great >= great[:, None])
    assert (mask.dense(4).numpy()[0, 0] == wanted).all()


@pytest.mark.parametrize("levels", [3, 70])
def test_more_intervals_than_are_listed(levels: int) -> None:
    """A token with a leaf beside it on each level: the row of the last token has an interval for each."""
    depth = [depth for level in range(levels) for depth in (level, level + 1)] + [levels]
    n = len(depth)
    mask = (kv <= q) & (q < table(ends(depth))[kv])
    key = np.arange(n)
    wanted = (key <= key[:, None]) & (key[:, None] < np.array(ends(depth)))
    check_bounds(bounds(mask, n, n), wanted[None], exact=levels < 64)
    assert (mask.dense(n).numpy()[0, 0] == wanted).all()


@pytest.mark.parametrize("seed", range(10))
def test_in_a_graph(seed: int) -> None:
    """A graph lists a few intervals of each row, and knows nothing of a sequence whose ranges do not nest."""
    draw = random.Random(seed)
    n = 48
    end = torch.tensor([ends(depths(draw, n)), ends(depths(draw, n)), [draw.randint(0, n) for _ in range(n)]])
    lowered = fm.plan("causal & eviction(steps=s)", n, batch=3)(s=end)
    at = torch.arange(n)
    wanted = (at <= at[:, None]) & (at[:, None] < end[:, None])
    query, key, value = (torch.randn(3, 1, n, 8, dtype=torch.float64) for _ in range(3))
    score = (query @ key.mT / 8**0.5).masked_fill(~wanted[:, None], -torch.inf)
    oracle = score.softmax(-1).nan_to_num() @ value
    assert torch.allclose(fm.attention(query, key, value, lowered), oracle)


@pytest.mark.parametrize("seed", range(20))
def test_ends_from_depths(seed: int) -> None:
    draw = random.Random(seed)
    rows = [depths(draw, 33) for _ in range(draw.randint(1, 3))]
    assert subtree_ends(torch.tensor(rows)).tolist() == [ends(row) for row in rows]


@pytest.mark.parametrize(
    ("depth", "message"),
    [([[0, 1, 1], [0, 2, 1]], "got 2 after 0 at position 1"), ([[0], [3]], "got 3"), ([[0, 1, -1]], "got -1")],
)
def test_depths_of_no_tree(depth: list[list[int]], message: str) -> None:
    with pytest.raises(LoweringError, match=message):
        subtree_ends(torch.tensor(depth))


def test_a_plan_takes_the_depths_of_trees_alone() -> None:
    plan = fm.plan("prefix_tree(position_ids=depth)", 5, batch=2)
    rows, at = [[0, 1, 2, 1, 0], [0, 0, 1, 2, 3]], torch.arange(5)
    wanted = (at <= at[:, None]) & (at[:, None] < torch.tensor([ends(row) for row in rows])[:, None])
    assert torch.equal(plan(depth=torch.tensor(rows)).dense()[:, 0], wanted)
    for wrong in ([1, 2, 2, 1, 0], [0, 2, 2, 1, 0], [0, 1, -1, 0, 0]):
        with pytest.raises(LoweringError, match="prefix_tree"):
            plan(depth=torch.tensor([rows[0], wrong]))


@pytest.mark.parametrize("seed", range(20))
def test_trees_by_the_times_at_which_a_walk_enters_and_leaves(seed: int) -> None:
    """``enter[kv] <= enter[q] < leave[kv]``, whose times rise but are no positions."""
    draw = random.Random(seed)
    n, batch = draw.randint(1, 40), draw.choice([1, 3])
    end = [ends(depths(draw, n)) for _ in range(batch)]
    times = [sorted(draw.sample(range(-50, 200), n + 1)) for _ in range(batch)]
    if seed % 4 == 3:  # two tokens at one time see each other
        times[0][n // 2] = times[0][max(n // 2 - 1, 0)]
    enter = [row[:n] for row in times]
    leave = [[at[stop] for stop in row] for row, at in zip(end, times, strict=True)]
    enters, leaves = (table(torch.tensor(rows)) for rows in (enter, leave))
    mask = (enters[b, kv] <= enters[b, q]) & (enters[b, q] < leaves[b, kv])
    wanted = np.array([[[x[j] <= x[i] < y[j] for j in range(n)] for i in range(n)] for x, y in zip(enter, leave, strict=True)])
    check_bounds(bounds(mask, n, n), wanted, exact=seed % 4 < 3)


def test_a_row_without_keys_is_not_causal() -> None:
    """The last query sees no key, where the end of its keys is that of a causal mask."""
    first, last, until = [0, 1, 2, 3], [0, 1, 2, -1], [4, 2, 4, 4]
    mask = (table(torch.tensor(first))[kv] <= table(torch.tensor(last))[q]) & (q < table(torch.tensor(until))[kv])
    wanted = np.array([[[first[j] <= last[i] and i < until[j] for j in range(4)] for i in range(4)]])
    check_bounds(bounds(mask, 4, 4), wanted, exact=False)


def block_counts(cells: np.ndarray, q_size: int, kv_size: int) -> np.ndarray:
    """The visible cells of each block of ``bool[q_len, kv_len]``."""
    q_len, kv_len = cells.shape
    whole = np.zeros((-(-q_len // q_size) * q_size, -(-kv_len // kv_size) * kv_size), dtype=np.int64)
    whole[:q_len, :kv_len] = cells
    counts: np.ndarray = whole.reshape(-1, q_size, whole.shape[1] // kv_size, kv_size).sum((1, 3))
    return counts


@pytest.mark.parametrize("seed", range(40))
def test_blocks_of_trees(seed: int) -> None:
    """Rows of one segment are counted at once: with blocks that are not square the last of them touches more than the first."""
    draw = random.Random(seed)
    n, batch, branches = draw.randint(1, 200), draw.choice([1, 2]), draw.choice([0.01, 0.05, 0.3])
    depth: list[list[int]] = []
    for _ in range(batch):
        row = [0]
        while len(row) < n:
            row.append(draw.randint(0, row[-1]) if draw.random() < branches else row[-1] + 1)
        depth.append(row)
    offset = draw.choice([0, draw.randint(0, n - 1)])
    q_len = draw.randint(1, n - offset)
    q_size, kv_size = draw.choice([2, 4, 16, 64]), draw.choice([2, 4, 16, 64])
    at, key = np.arange(offset, offset + q_len)[:, None], np.arange(n)
    cells = (key <= at) & (at < np.array([ends(row) for row in depth])[:, None])
    mask = masks.prefix_tree(position_ids=torch.tensor(depth))
    blocks = mask.block_mask(q_len, n, q_offset=offset, block_size=(q_size, kv_size))
    for i in range(batch):
        count = block_counts(cells[i], q_size, kv_size)
        full = count == q_size * kv_size
        for number, index, wanted in (
            (blocks.kv_num_blocks, blocks.kv_indices, (count > 0) & ~full),
            (blocks.full_kv_num_blocks, blocks.full_kv_indices, full),
        ):
            assert number is not None
            assert index is not None
            found = [row[:k].tolist() for row, k in zip(index[i, 0], number[i, 0].tolist(), strict=True)]
            assert found == [row.nonzero()[0].tolist() for row in wanted]
