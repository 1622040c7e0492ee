"""How far back the rows of a mask attend, and the keys that a cache may drop."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import flexmask as fm
from flexmask import KVCache
from flexmask.errors import LoweringError
from flexmask.intervals.context import MAX_LENGTH
from flexmask.nn import CallTokens, lookback, mask_over_cache
from flexmask.nn.cache_masks import lookback_of
from flexmask.nn.hidden_keys import check_window
from tests.nn.cache_cases import (
    CASES,
    Case,
    check_close,
    decode,
    dense_forward,
    inputs,
)
from tests.support import oracle
from tests.support.strategies import Case as DrawnCase
from tests.support.strategies import Shape, mask_cases

SHAPE = Shape(12, 12, batch=2, heads=4, lengths=())


@given(mask_cases(SHAPE, 2), st.sampled_from([[7, 1, 1, 1, 1, 1], [4, 3, 5], [1] * 12]), st.sampled_from([None, 1, 3, 6]))
def test_a_cache_is_right_or_raises(case: DrawnCase, chunks: list[int], window: int | None) -> None:
    """For any mask and window, no row differs from that of the whole sequence."""
    past, shown = (
        (fm.sliding_window(size=window), oracle.sliding_window(size=window)) if window else (fm.causal(), oracle.causal())
    )
    mask, allowed = past & case.mask, oracle.both(shown, case.allowed)
    module, x, cache = CASES["causal"].module(), inputs(12), KVCache(12, window=window)
    with torch.no_grad():
        expected = dense_forward(Case("", allowed), module, x)
        done = 0
        for part in x.split(chunks, 1):
            try:
                found = module(part, mask, cache=cache)
            except LoweringError as error:
                padding = "makes every token of this call padding"
                if not re.search(padding, str(error)):
                    raise
                return
            check_close(found, expected[:, done : done + part.shape[1]])
            done += part.shape[1]


@given(mask_cases(SHAPE, 3))
def test_visible_keys_are_within_the_lookback(case: DrawnCase) -> None:
    whole, most, ahead = lookback_of(case.mask)
    _, _, query, key = case.expected(SHAPE).nonzero().unbind(-1)
    assert max((query - key).tolist(), default=0) <= most
    assert max((key - query).tolist(), default=0) <= ahead
    _, _, query, key = (~case.expected(SHAPE)).nonzero().unbind(-1)
    assert all(distance < 0 or distance > whole for distance in (query - key).tolist())


@pytest.mark.parametrize(
    ("text", "whole", "most", "ahead"),
    [
        ("sliding_window(size=4)", 3, 3, 0),
        ("sliding_window(size=4) & document(ids)", -1, 3, 0),
        ("abs(q - kv) <= 3", 3, 3, 3),
        ("(abs(q - kv) <= 3) | (kv == q - 9)", 3, 9, 3),
        ("per_head([sliding_window(size=2), sliding_window(left=6, right=2)])", 1, 6, 2),
        ("dilated_window(left=3, right=0, dilation=2)", -1, 3, 0),
        ("empty | (kv > q)", -1, 0, MAX_LENGTH),
        ("causal", MAX_LENGTH, MAX_LENGTH, 0),
        ("causal & (kv < q)", -1, MAX_LENGTH, 0),
        ("causal | (kv < lengths[b])", -1, MAX_LENGTH, MAX_LENGTH),
        ("sliding_window(size=4) | causal", MAX_LENGTH, MAX_LENGTH, 0),
        ("chunked(5)", 0, 4, 4),
        ("block_causal(5)", MAX_LENGTH, MAX_LENGTH, 4),
        ("causal & chunked(5) | sliding_window(size=3)", 2, 4, 0),
        ("sink_window(4, size=3)", 2, MAX_LENGTH, 0),
        ("kv >= q - lengths[b]", -1, MAX_LENGTH, MAX_LENGTH),
    ],
)
def test_lookback(text: str, whole: int, most: int, ahead: int) -> None:
    assert lookback_of(fm.parse(text)) == (whole, most, ahead)


#: Masks of 6 tokens whose data shows a key after the first 3, and the query and the key that the message names.
LATER = {
    "(causal & (kind[b, q] == kind[b, kv])) | (system[b, kv] == 1)": "0 attend to the key at position 4",
    "causal | (kv < reach[b, q])": "2 .* at position 3",
    "key_padding(keep=system)": "0 .* at position 4",
    "causal | (kv < prefix[b])": "0 .* at position 3",
    "prefix_lm(prefix)": "0 .* at position 3",
    "key_padding(prefix)": "0 .* at position 3",
    "document(lengths=[2, 4])": "2 .* at position 3",
}
DATA = {
    "kind": torch.tensor([[0, 1, 0, 1, 0, 0]]).expand(2, -1),
    "system": torch.tensor([[1, 0, 0, 0, 1, 0], [1, 1, 0, 0, 0, 0]]),
    "reach": torch.tensor([[1, 2, 4, 4, 5, 6]]).expand(2, -1),
    "prefix": torch.tensor([2, 5]),
}


@pytest.mark.parametrize("text", LATER)
def test_data_that_shows_a_later_key_is_an_error(text: str) -> None:
    module, x, mask = CASES["causal"].module(), inputs(6), fm.parse(text)
    mask = mask.bind(**{name: DATA[name] for name in mask.params})
    cache = KVCache(8)
    with pytest.raises(LoweringError, match=f"the query at position {LATER[text]}, which comes after .* mask & causal"):
        module(x[:, :3], mask, cache=cache)
    assert cache.length == 0
    for hidden in (mask & fm.causal(), fm.causal() & mask):
        check_close(decode(module, x, [3, 1, 2], KVCache(8), mask=hidden), module(x, hidden))
    check_close(decode(module, x, [6], KVCache(8), mask=mask), module(x, mask))


def test_later_keys_that_data_hides_are_no_error() -> None:
    """Rows are compared where the expression does not hide later keys, and not where it does or where data ends."""
    module, x = CASES["causal"].module(), inputs(6)
    lower = torch.ones(6, 6, dtype=torch.bool).tril()
    for mask in (fm.from_dense(lower), fm.document(torch.tensor([0, 0, 0, 1, 2, 2]))):
        check_close(decode(module, x, [3, 1, 2], KVCache(8), mask=mask), module(x, mask))
    steps = [lower[: n + 1, : n + 1] for n in range(6)]
    cache = KVCache(8)
    found = torch.cat([module(x[:, n : n + 1], fm.key_padding(keep=steps[n][n]), cache=cache) for n in range(6)], 1)
    check_close(found, module(x, "causal"))


def test_later_keys_are_compared_only_where_the_expression_shows_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flexmask.nn.hidden_keys.analyze", lambda *_: pytest.fail("rows are compared"))
    module, x = CASES["causal"].module(), inputs(6)
    for mask in (fm.causal() & fm.document(DATA["kind"]), fm.sliding_window(size=3) & fm.key_padding(keep=DATA["system"])):
        decode(module, x, [3, 1, 2], KVCache(8), mask=mask)


@pytest.mark.parametrize(
    ("mask", "keys", "is_needed"),
    [
        ("causal", 6, False),
        ("sliding_window(size=6)", 6, False),
        ("sliding_window(size=4)", 4, False),
        ("sink_window(1, size=4)", 6, True),
    ],
)
def test_one_query_that_attends_to_the_last_keys_needs_no_mask(mask: str, keys: int, is_needed: bool) -> None:
    cache, (query, key, value) = KVCache(12), torch.randn(3, 2, 2, 6, 4)
    cache.step(query[:, :, :5], key[:, :, :5], value[:, :, :5], "causal").commit()
    step = cache.step(query[:, :, 5:], key[:, :, 5:], value[:, :, 5:], mask)
    assert (step.mask is not None) == is_needed
    assert torch.equal(step.key, key[:, :, 6 - keys :])


def test_a_window_on_another_device() -> None:
    """Nothing is read there, and nothing needs to be."""
    ids = torch.zeros(8, dtype=torch.int64, device="meta")
    for mask in (fm.causal(), fm.parse("chunked(8) & causal"), fm.causal() & fm.document(ids)):
        with pytest.raises(LoweringError, match="holds the last 3 keys"):
            check_window(mask, 3)
    for mask in (fm.sliding_window(size=3) & fm.document(ids), fm.parse("causal & chunked(2)")):
        check_window(mask, 3)


def test_masks_for_a_cache_of_your_own() -> None:
    """Cells are places in the cache. Data may be longer."""
    device, ids = torch.device("cpu"), torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 2]])
    mask = fm.causal() & fm.document(ids)
    whole = [[k <= q and bool(ids[0, q] == ids[0, k]) for k in range(8)] for q in range(8)]
    assert mask_over_cache(fm.causal(), CallTokens(1, 9, 0, 9, 0, device)) == fm.causal()
    assert mask_over_cache(mask, CallTokens(1, 8, 0, 8, 0, device)).dense(8)[0, 0].tolist() == whole
    tokens = CallTokens(1, 2, 6, 8, 4, device)
    assert mask_over_cache(mask, tokens).dense(2, 4, q_offset=6)[0, 0].tolist() == [row[4:] for row in whole[6:]]
    assert lookback(mask) is None
    assert lookback(mask & fm.sliding_window(size=3)) == 2
