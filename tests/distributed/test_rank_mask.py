"""The mask of one rank, against the oracle's cells at its queries and keys; no process group is needed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import flexmask as fm
from flexmask.distributed.query_units import KeyLists
from flexmask.distributed.rank_mask import mask_of_heads, mask_of_queries
from flexmask.errors import LoweringError
from flexmask.intervals.bind import bind
from tests.support.strategies import Shape, mask_cases

LONGEST = 14


def runs_of(chosen: list[bool]) -> Tensor:
    """The positions where a list is True as intervals, ``int64[n, 2]``."""
    edges = [at for at in range(len(chosen) + 1) if (at < len(chosen) and chosen[at]) != (at > 0 and chosen[at - 1])]
    return torch.tensor(edges, dtype=torch.int64).view(-1, 2)


def key_lists(chosen: list[list[bool]]) -> KeyLists:
    """The positions where the list of each unit is True."""
    runs = [runs_of(own) for own in chosen]
    unit = torch.repeat_interleave(torch.tensor([len(own) for own in runs]))
    return KeyLists.union(len(chosen), unit, *torch.cat(runs).unbind(1))


@given(st.data())
def test_cells_of_any_mask(data: st.DataObject) -> None:
    length = data.draw(st.integers(1, LONGEST))
    shape = Shape(length, length, data.draw(st.integers(1, 2)), data.draw(st.integers(1, 2)))
    case = data.draw(mask_cases(shape, depth=2))
    held = data.draw(st.lists(st.booleans(), min_size=length, max_size=length).filter(any))
    extra = torch.tensor(data.draw(st.lists(st.booleans(), min_size=length, max_size=length)))
    queries = torch.tensor(held).nonzero().squeeze(-1)
    cells = case.expected(shape)[:, :, queries]
    keys = (cells.flatten(0, 2).any(0) | extra).nonzero().squeeze(-1)
    if not len(keys):
        return
    context = bind(case.mask, length, batch=shape.batch, heads=shape.heads)
    lowered = mask_of_queries(context, runs_of(held), keys, (4, 4))
    wanted = cells[:, :, :, keys]
    assert torch.equal(lowered.dense().expand(wanted.shape), wanted)
    b, h, q, kv = (torch.arange(size).view([-1 if i == axis else 1 for i in range(4)]) for axis, size in enumerate(wanted.shape))
    assert torch.equal(lowered.block_mask.mask_mod(b, h, q, kv).expand(wanted.shape), wanted)


@given(st.data())
def test_heads_of_any_mask(data: st.DataObject) -> None:
    length = data.draw(st.integers(1, LONGEST))
    shape = Shape(length, length, data.draw(st.integers(1, 2)), 4)
    case = data.draw(mask_cases(shape, depth=2))
    start = data.draw(st.sampled_from([0, 2]))
    lowered = mask_of_heads(bind(case.mask, length, batch=shape.batch, heads=4), range(start, start + 2), (4, 4))
    wanted = case.expected(shape)[:, start : start + 2]
    assert torch.equal(lowered.dense().expand(wanted.shape), wanted)


def test_intervals_that_meet_after_keys_are_left_out_are_one() -> None:
    mask = (fm.kv < 2) | ((fm.kv >= 6) & (fm.kv <= fm.q))
    keys = torch.tensor([0, 1, 6, 7])
    lowered = mask_of_queries(bind(mask, 8), torch.tensor([[6, 8]]), keys, (4, 4))
    assert lowered.bounds.tolist() == [[[[[0, 3]], [[0, 4]]]]]


def test_a_shard_does_not_analyze_the_other_queries() -> None:
    length = 2**20
    context = bind(fm.sliding_window(size=100), length)
    lowered = mask_of_queries(context, torch.tensor([[500_000, 500_003]]), torch.arange(499_000, 500_010), (128, 128))
    assert lowered.bounds[0, 0, :, 0].tolist() == [[901, 1001], [902, 1002], [903, 1003]]
    assert lowered.bounds.numel() == 6


def test_too_many_cells() -> None:
    mask = (fm.q * fm.kv) % 7 == 3
    with pytest.raises(LoweringError, match=r"so 268435456 cells .* at most 67108864 are possible"):
        mask_of_queries(bind(mask, 2**15), torch.tensor([[0, 2**13]]), torch.arange(2**15), (128, 128))


@given(st.data())
def test_shards(data: st.DataObject) -> None:
    """Who holds a token, and how many move where each rank gets some tokens."""
    length, ranks = data.draw(st.integers(1, LONGEST)), data.draw(st.integers(1, 4))
    owners = data.draw(st.lists(st.integers(0, ranks - 1), min_size=length, max_size=length))
    needs = [data.draw(st.lists(st.booleans(), min_size=length, max_size=length)) for _ in range(ranks)]
    shards = key_lists([[owner == rank for owner in owners] for rank in range(ranks)])
    assert shards.sizes().tolist() == [owners.count(rank) for rank in range(ranks)]
    rank, place = shards.places(torch.arange(length))
    assert rank.tolist() == owners
    assert place.tolist() == [owners[:at].count(owner) for at, owner in enumerate(owners)]
    moved = sum(need and owner != rank for rank, own in enumerate(needs) for need, owner in zip(own, owners, strict=True))
    assert key_lists(needs).beyond(shards).sum() == moved
