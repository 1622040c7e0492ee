"""What a decoding step with a KVCache costs, and that its rows are those of the whole sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flexmask as fm
from flexmask import KVCache, MultiheadFlexAttention, _sync
from flexmask.errors import LoweringError
from flexmask.intervals import solve
from flexmask.nn import CallTokens, mask_over_cache
from tests.support import oracle
from tests.support.lowerings import LargestTensor

KEYS = 5000
MASKS: dict[str, dict[str, Any]] = {
    "causal & key_padding(start=n)": {"n": torch.tensor([3, 0])},
    "causal & key_padding(lengths=n)": {"n": torch.tensor([6000, 7000])},
    "causal & document(cu_seqlens=n)": {"n": torch.tensor([[0, 100, 4000, 7000], [0, 7, 8, 7000]])},
    "causal & document(lengths=n)": {"n": torch.tensor([[100, 3900, 3000], [7, 1, 6992]])},
    "per_document(sliding_window(size=100), lengths=n)": {"n": torch.tensor([[100, 3900, 3000], [7, 1, 6992]])},
    "sliding_window(size=100)": {},
}


def over_cache(mask: fm.Mask, position: int) -> fm.Mask:
    return mask_over_cache(mask, CallTokens(2, 1, position, position + 1, 0, torch.device("cpu")))


@pytest.mark.parametrize("text", MASKS)
def test_a_step_repeats_no_analysis(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mask = fm.parse(text).bind(**MASKS[text])
    positions = range(KEYS, KEYS + 3)
    whole = [mask.rows(1, 7000, q_offset=position, batch=2).lower.holds(torch.arange(7000)) for position in positions]
    first = over_cache(mask, KEYS - 1)
    first.rows(1, KEYS, q_offset=KEYS - 1)
    monkeypatch.setattr(solve, "_separated", lambda node: pytest.fail(f"{node} is solved again"))
    for position, row in zip(positions, whole, strict=True):
        step = over_cache(mask, position)
        assert step is first
        rows = step.rows(1, position + 1, q_offset=position, batch=2)
        assert rows.exact
        assert torch.equal(rows.lower.holds(torch.arange(position + 1)), row[..., : position + 1])


@pytest.mark.parametrize("text", [*MASKS, "prefix_lm(16)", "causal | (kv < 7)"])
def test_the_checks_of_a_step_repeat_no_analysis(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of masks whose rows are compared with the keys after the tokens, as the expression does not hide these."""
    mask, cache, tokens = fm.parse(text).bind(**MASKS.get(text, {})), KVCache(100), torch.randn(2, 2, 24, 4)
    for number, part in enumerate(tokens.split([20, 1, 1, 1, 1], 2)):
        cache.step(part, part, part, mask).commit()
        if number:
            monkeypatch.setattr(solve, "_separated", lambda node: pytest.fail(f"{node} is solved again"))


@pytest.mark.parametrize("text", MASKS)
def test_a_step_makes_nothing_as_long_as_the_keys(text: str) -> None:
    mask = fm.parse(text).bind(**MASKS[text])
    over_cache(mask, KEYS).rows(1, KEYS + 1, q_offset=KEYS)  # analyzed, as by the step before
    with LargestTensor() as largest:
        over_cache(mask, KEYS).rows(1, KEYS + 1, q_offset=KEYS)
    assert 0 < largest.elements < 100


@pytest.mark.parametrize(
    "text",
    [
        "causal & sliding_window(size=8) & document(cu_seqlens=n)",
        "per_document(sliding_window(size=4), cu_seqlens=n)",
        "sliding_window(size=8) & document(cu_seqlens=n)",
    ],
)
@pytest.mark.parametrize("is_read", [True, False])
def test_documents_in_a_window_of_sequences_of_several_lengths(text: str, is_read: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where no value is read, as on a GPU: the documents are those of positions in the whole sequence."""
    mask = fm.parse(text).bind(n=torch.tensor([[0, 100, 300], [0, 7, 300]]))
    offset = torch.tensor([102, 9])
    start = offset - 7
    whole = mask.dense(300, batch=2)
    wanted = [whole[b, 0, offset[b], start[b] : start[b] + 8].tolist() for b in range(2)]
    if not is_read:
        monkeypatch.setattr(_sync, "needs_sync", lambda tensor: True)
    step = mask_over_cache(mask, CallTokens(2, 1, offset, 103, start, torch.device("cpu")))
    assert step.dense(1, 8, batch=2, q_offset=offset)[:, 0, 0].tolist() == wanted
    rows = step.rows(1, 8, batch=2, q_offset=offset)
    assert (rows.upper.holds(torch.arange(8))[:, 0, 0] >= torch.tensor(wanted)).all()
    if rows.exact:
        assert rows.lower.holds(torch.arange(8))[:, 0, 0].tolist() == wanted


@pytest.mark.parametrize("source", ["lengths=n", "cu_seqlens=n"])
def test_documents_of_the_whole_sequence_must_reach_the_queries(source: str) -> None:
    module, cache = MultiheadFlexAttention(6, 8, 2), KVCache(16)
    data = torch.tensor([4, 3] if source == "lengths=n" else [0, 4, 7])
    mask = fm.parse(f"causal & document({source})").bind(n=data)
    x = torch.randn(1, 9, 6)
    with torch.no_grad():
        whole = module(x[:, :7], mask)
        steps = [module(x[:, place : place + 1], mask, cache=cache) for place in range(7)]
        torch.testing.assert_close(torch.cat(steps, 1), whole)
        with pytest.raises(LoweringError, match="cover 7 of"):
            module(x[:, 7:8], mask, cache=cache)


@pytest.mark.parametrize(
    ("text", "data"),
    [
        ("causal & document(lengths=n)", [[3, 0], [4, 4]]),
        ("causal & document(cu_seqlens=n)", [[0, 1, 3], [0, 4, 7]]),
        ("per_document(causal, lengths=n)", [[2, 1], [3, 4]]),
    ],
)
def test_documents_end_with_the_tokens_of_each_sequence(text: str, data: list[list[int]]) -> None:
    torch.manual_seed(0)
    module, cache, x = MultiheadFlexAttention(6, 8, 2).double(), KVCache(16), torch.randn(2, 8, 6).double()
    ids = [oracle.ids_of_lengths(row, 7) if "lengths" in text else oracle.ids_of_cu_seqlens(row, 7) for row in data]
    with torch.no_grad():
        module(x[:, :6], "causal", cache=cache)
        cache.truncate([2, 6])
        found = module(torch.stack((x[0, 2:3], x[1, 6:7])), fm.parse(text).bind(n=torch.tensor(data)), cache=cache)
        for row, (length, own) in enumerate(zip((3, 7), ids, strict=True)):
            shown = torch.tensor(oracle.table_of(oracle.both(oracle.causal(), oracle.document(own)), length, length))[0, 0]
            torch.testing.assert_close(found[row, 0], module(x[row : row + 1, :length], fm.from_dense(shown))[0, -1])


def test_data_that_changes_in_place_between_steps() -> None:
    positions = torch.arange(8)
    mask = fm.parse("causal & document(position_ids=p)").bind(p=positions)
    for changed, wanted in ((torch.arange(8), [True] * 6), (torch.arange(8) % 3, [False] * 3 + [True] * 3)):
        positions.copy_(changed)
        step = mask_over_cache(mask, CallTokens(1, 1, 5, 6, 0, torch.device("cpu")))
        assert step.dense(1, 6, q_offset=5)[0, 0, 0].tolist() == wanted


@pytest.mark.parametrize("text", ["causal", "causal & query_padding(start=[0, 0])", "prefix_lm(2)"])
def test_sequences_shorter_than_the_window_see_their_own_tokens_alone(text: str) -> None:
    """The room before the first token of a short sequence holds no key, also for a mask that says nothing of it."""
    torch.manual_seed(0)
    module, cache, x = MultiheadFlexAttention(6, 8, 2).double(), KVCache(window=8), torch.randn(2, 8, 6).double()
    with torch.no_grad():
        module(x[:, :6], "causal & sliding_window(size=8)", cache=cache)
        cache.truncate([2, 6])
        found = module(torch.stack((x[0, 2:3], x[1, 6:7])), f"sliding_window(size=8) & {text}", cache=cache)
        wanted = [module(x[:1, :3], "causal")[:, -1], module(x[1:, :7], "causal")[:, -1]]
    torch.testing.assert_close(found.squeeze(1), torch.cat(wanted))
