"""Keys after the tokens of a call with a KVCache, against the cells of the whole sequence in plain Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import flexmask as fm
from flexmask import KVCache, MultiheadFlexAttention
from flexmask.errors import LoweringError
from flexmask.nn import CallTokens, mask_over_cache
from flexmask.nn.hidden_keys import mask_over_places
from tests.support import oracle

S, CAPACITY = 6, 8
NO_LIMIT = 2**40
#: Conditions on the key, by data ``n`` of each sequence.
LIMITS: dict[str, Callable[[int, int], bool]] = {
    "kv < n[b]": lambda k, n: k < n,
    "n[b] >= kv": lambda k, n: k <= n,
    "kv == n[b]": lambda k, n: k == n,
    "kv - 1 < n[b]": lambda k, n: k - 1 < n,
    "kv < n[b] + 1": lambda k, n: k < n + 1,
    "2 * kv // 3 < n[b]": lambda k, n: 2 * k // 3 < n,
    "abs(kv - 2) < n[b]": lambda k, n: abs(k - 2) < n,
    "kv * kv < n[b]": lambda k, n: k * k < n,
    "kv % 4 < n[b]": lambda k, n: k % 4 < n,
    "(kv <= n[b]) & (kv % 2 == 1)": lambda k, n: k <= n and k % 2 == 1,
    "~((kv >= n[b]) | (kv % 2 == 0))": lambda k, n: k < n and k % 2 == 1,
    "(kv < 2) ^ (kv < n[b])": lambda k, n: (k < 2) != (k < n),
    "~((kv < 2) ^ (kv >= n[b]))": lambda k, n: (k < 2) == (k >= n),
}


def layer() -> MultiheadFlexAttention:
    torch.manual_seed(0)
    return MultiheadFlexAttention(6, 8, 2).double()


def inputs(length: int = S) -> Tensor:
    return torch.randn(2, length, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("text", LIMITS)
def test_a_limit_is_an_error_exactly_where_it_shows_a_key_that_may_come(text: str) -> None:
    module, x, allowed = layer(), inputs(), LIMITS[text]
    for n in (0, 2, 3, 4, NO_LIMIT):
        data = torch.tensor([0, n])
        mask = fm.parse(f"causal | ({text})").bind(n=data)
        later = [k for i in (0, n) for k in range(3, CAPACITY) if allowed(k, i)]
        cache = KVCache(CAPACITY)
        if later:
            with pytest.raises(LoweringError, match=f"query at position 0 attend to the key at position {later[0]}, which comes"):
                module(x[:, :3], mask, cache=cache)
        else:
            found = [module(part, mask, cache=cache) for part in x.split([3, 2, 1], 1)]
            torch.testing.assert_close(torch.cat(found, 1), module(x, mask))


@pytest.mark.parametrize("n", [S + 1, 100, NO_LIMIT])
def test_keys_that_do_not_fit_in_the_cache_are_not_shown(n: int) -> None:
    module, x = layer(), inputs()
    mask = fm.parse("causal | (kv < n[b])").bind(n=torch.tensor([n, 2]))
    torch.testing.assert_close(module(x, mask, cache=KVCache(S)), module(x, mask))
    with pytest.raises(LoweringError, match="the query at position 0 attend to the key at position 6, which comes"):
        module(x, mask, cache=KVCache(window=S))


#: Masks that show keys which may come, with the first query of the first 3 that attends to one, or of the token after them.
SHOWN: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {
    "full": ((0, 3), (3, 4)),
    "q >= 0": ((0, 3), (3, 4)),
    "kv % 2 == 1": ((0, 3), (3, 5)),
    "sliding_window(left=2, right=2)": ((1, 3), (3, 4)),
    "sliding_window(left=2, right=2) & ((q + kv) % 3 == 0)": ((2, 4), (3, 3)),
    "kv >= start[b]": ((0, 3), (3, 4)),
    "sliding_window(left=2, right=2) & (kv >= start[b])": ((1, 3), (3, 4)),
    "prefix_lm(5)": ((0, 3), (3, 4)),
    "per_head([causal, full])": ((0, 3), (3, 4)),
}


@pytest.mark.parametrize("text", SHOWN)
def test_a_mask_that_shows_keys_which_may_come_is_an_error(text: str) -> None:
    """Whatever the capacity, and also for a mask whose cells are computed one by one."""
    module, x, mask = layer(), inputs(), fm.parse(text)
    mask = mask.bind(start=torch.tensor([1, 0])) if mask.params else mask
    for capacity in (CAPACITY, 100_000):
        for first, (query, key) in zip((0, 3), SHOWN[text], strict=True):
            cache = KVCache(capacity)
            if first:
                module(x[:, :first], "causal", cache=cache)
            if key == query:  # none
                continue
            with pytest.raises(
                LoweringError, match=f"query at position {query} attend to the key at position {key}, which comes"
            ):
                module(x[:, first : first + (1 if first else 3)], mask, cache=cache)
            assert cache.length == first
            cache = KVCache(capacity)
            hidden = [module(part, mask & fm.causal(), cache=cache) for part in x.split([3, 3], 1)]
            torch.testing.assert_close(torch.cat(hidden, 1), module(x, mask & fm.causal()))


@pytest.mark.parametrize("mask", ["prefix_lm(3)", "kv // 3 <= q // 3", "kv < 3", "(kv - 1) // 3 < q // 3"])
def test_keys_of_the_tokens_of_a_call_may_come_after_the_query(mask: str) -> None:
    module, x, cache = layer(), inputs(), KVCache(CAPACITY)
    torch.testing.assert_close(torch.cat([module(part, mask, cache=cache) for part in x.split(3, 1)], 1), module(x, mask))


def test_lengths_that_differ_end_each_sequence() -> None:
    """The tokens of a sequence may end before those of the longest, whose position is no token of the shorter one."""
    module, x = layer(), inputs()
    for ids, is_error in ([[0, 0, 0, 0, 0], [0, 0, 0, 0, 0]], True), ([[0, 0, 0, 1, 1], [0, 0, 0, 0, 0]], False):
        cache = KVCache(CAPACITY)
        module(x[:, :4], "causal", cache=cache)
        cache.truncate([2, 4])
        mask = fm.document(torch.tensor(ids))
        if is_error:
            with pytest.raises(LoweringError, match="the query at position 2 attend to the key at position 3, which comes"):
                module(x[:, 4:5], mask, cache=cache)
        else:
            first = torch.cat([x[:1, :2], x[:1, 4:5]], 1)
            found = module(x[:, 4:5], mask, cache=cache)
            torch.testing.assert_close(found[0, 0], module(first, "full")[0, 2])
            torch.testing.assert_close(found[1, 0], module(x[1:, :5], "full")[0, 4])


@pytest.mark.parametrize("capacity", [4, S])
@pytest.mark.parametrize("mask", ["causal", "sink_window(1, size=2)"])
def test_a_window_of_all_places_drops_nothing(mask: str, capacity: int) -> None:
    module, x, cache = layer(), inputs(4), KVCache(capacity, window=S)
    found = [module(x[:, n : n + 1], mask, cache=cache) for n in range(4)]
    torch.testing.assert_close(torch.cat(found, 1), module(x, mask))


@pytest.mark.parametrize("kv_end", [11, 20])
def test_one_query_over_a_static_cache_attends_to_no_free_places(kv_end: int) -> None:
    tokens = CallTokens(1, 1, 10, kv_end, 0, torch.device("cpu"))
    for text in ("causal", "sliding_window(size=12)"):
        row = mask_over_cache(fm.parse(text), tokens).dense(1, kv_end, q_offset=10).flatten()
        assert row.tolist() == [k <= 10 for k in range(kv_end)]


@pytest.mark.parametrize("end", [3, [2, 5]])
def test_places_behind_the_tokens_are_hidden(end: Any) -> None:
    found = mask_over_places(fm.causal(), torch.tensor(end)).dense(6, batch=2)
    ends = torch.tensor(end).expand(2).tolist()
    assert found.expand(2, -1, -1, -1).tolist() == oracle.table_of(
        lambda b, h, q, kv, q_len, kv_len: kv <= q and kv < ends[b], 6, 6, batch=2
    )


@pytest.mark.parametrize(("condition", "is_compared"), [("kv == q + 5000", True), ("kv % (q + 5000) == 4999", False)])
def test_distant_keys_are_compared_where_the_mask_is_separable(condition: str, is_compared: bool) -> None:
    module, x, cache = layer(), inputs(), KVCache(2**13)
    mask = fm.parse(f"causal | ({condition})")
    if is_compared:
        with pytest.raises(LoweringError, match="attend to the key at position 5000, which comes"):
            module(x, mask, cache=cache)
    else:
        assert torch.equal(module(x, mask, cache=cache), module(x, "causal"))
