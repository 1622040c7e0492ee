"""Plans called step after step: what depends on the data alone is computed once, and every step has the blocks of the oracle."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask
from torch.profiler import ProfilerActivity, profile

import flexmask as fm
from flexmask import Mask, _sync
from flexmask.errors import LoweringError
from flexmask.plans import Plan
from tests.support.block_lists import check_lists
from tests.support.exhaustive import one_in

KV_LEN = 300
LENGTHS = torch.tensor([250, 0])
CU = torch.tensor([[0, 33, 80, 300], [0, 200, 201, 300]])
IDS = torch.arange(KV_LEN).div(70, rounding_mode="floor").expand(2, -1).contiguous()
KEEP = torch.arange(KV_LEN).expand(2, -1) % 7 != 3
MASKS: dict[str, tuple[Any, Tensor]] = {
    "causal & key_padding(lengths)": (lambda x: lambda b, h, q, kv: (kv <= q) & (kv < x[b]), LENGTHS),
    "key_padding(lengths)": (lambda x: lambda b, h, q, kv: kv < x[b], LENGTHS),
    "causal & document(cu_seqlens=cu)": (lambda x: lambda b, h, q, kv: (kv <= q) & (_ids(x)[b, q] == _ids(x)[b, kv]), CU),
    "causal & document(ids)": (lambda x: lambda b, h, q, kv: (kv <= q) & (x[b, q] == x[b, kv]), IDS),
    "causal & key_padding(keep=keep)": (lambda x: lambda b, h, q, kv: (kv <= q) & x[b, kv], KEEP),
    "sliding_window(size=100)": (lambda _: lambda b, h, q, kv: (kv <= q) & (q - kv < 100), LENGTHS),
}


def _ids(cu: Tensor) -> Tensor:
    return (torch.arange(KV_LEN) >= cu[:, 1:, None]).sum(1)


def other(data: Tensor) -> Tensor:
    """Other data of the same shape that is valid too."""
    return ~data if data.dtype == torch.bool else data.flip(0)


@pytest.mark.parametrize(("text", "q_len"), one_in(3, MASKS, [1, 5, 130]))
def test_steps(text: str, q_len: int) -> None:
    predicate, data = MASKS[text]
    plan, data = fm.plan(text, q_len, KV_LEN, batch=2), data.clone()
    names, first = plan.mask.params, data.clone()

    def check(now: Tensor, *offsets: int) -> None:
        of_each = torch.tensor(offsets)
        given = dict.fromkeys(names, now)
        mod = predicate(now)
        wanted = create_block_mask(lambda b, h, q, kv: mod(b, h, q + of_each[b], kv), 2, None, q_len, KV_LEN, "cpu")
        lowered = plan(**given, q_offset=of_each)
        check_lists(lowered.block_mask, wanted)
        cells = mod(
            torch.arange(2)[:, None, None], 0, torch.arange(q_len)[:, None] + of_each[:, None, None], torch.arange(KV_LEN)
        )
        assert torch.equal(lowered.dense()[:, 0], cells.expand(2, q_len, KV_LEN))

    check(data, 0, 0)
    check(data, 99, 41)
    check(other(first), 99, 41)
    check(data, 100, 170)
    data.copy_(other(first))  # in place
    check(data, 100, 170)
    with torch.inference_mode():
        check(first.clone(), 0, 127)
    kept = first.clone()
    check(kept, 0, 127)
    kept.copy_(other(first))
    check(first.clone(), 0, 127)  # in other memory than the data that it was computed from


def count(plan: Plan, **data: Any) -> Counter[str]:
    with profile(activities=[ProfilerActivity.CPU]) as found:
        plan(**data)
    return Counter(event.name for event in found.events() or ())


def test_edges_of_documents_are_computed_once() -> None:
    plan, cu = fm.plan("causal & document(cu_seqlens=cu)", 1, KV_LEN), CU[0].clone()
    first = count(plan, cu=cu, q_offset=torch.tensor([7]))
    again = count(plan, cu=cu, q_offset=torch.tensor([8]))
    assert first["aten::searchsorted"] == again["aten::searchsorted"] > 0
    assert first["aten::cummax"] > 0
    assert again["aten::cummax"] == 0
    assert count(plan, cu=cu.clone(), q_offset=torch.tensor([8]))["aten::cummax"] == 0
    cu[1] += 1
    assert count(plan, cu=cu, q_offset=torch.tensor([8]))["aten::cummax"] > 0


@pytest.mark.parametrize("text", MASKS)
def test_steps_share_no_memory(text: str) -> None:
    _, data = MASKS[text]
    plan = fm.plan(text, 1, KV_LEN, batch=2)
    given = dict.fromkeys(plan.mask.params, data)
    offset = torch.tensor([7, 8])
    first, second = (plan(**given, q_offset=offset).flatten()[0][-1] for _ in range(2))
    wanted = [tensor.clone() for tensor in second]
    for tensor in first:
        tensor.fill_(-1)
    third = plan(**given, q_offset=offset).flatten()[0][-1]
    assert all(map(torch.equal, second, wanted))
    assert all(map(torch.equal, third, wanted))


def test_data_that_becomes_wrong() -> None:
    plan, cu, offset = fm.plan("causal & document(cu_seqlens=cu)", 1, KV_LEN), CU[0].clone(), torch.tensor([7])
    right = plan(cu=cu, q_offset=offset).dense()
    cu[0] = 5
    for _ in range(2):
        with pytest.raises(LoweringError, match="must start with 0"):
            plan(cu=cu, q_offset=offset)
    cu[0] = 0
    assert torch.equal(plan(cu=cu, q_offset=offset).dense(), right)
    with pytest.raises(LoweringError, match="q_offset must be at least 0"):
        plan(cu=cu, q_offset=-offset)


def test_memory_of_data_that_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """On other devices data is known by its memory, which must not be that of the next data."""
    monkeypatch.setattr(_sync, "needs_sync", lambda tensor: True)
    plan, offset = fm.plan("causal & document(lengths=lengths)", 1, KV_LEN), torch.tensor([299])
    for last in (100, 120, 140, 160):
        lengths = torch.tensor([KV_LEN - last, last])
        assert plan(lengths=lengths, q_offset=offset).dense().sum() == last
        del lengths


@pytest.mark.parametrize("kv_len", [256, 300])
@pytest.mark.parametrize("length", [0, 1, 200])
def test_runs_of_blocks(length: int, kv_len: int) -> None:
    for q_len in (1, 5):
        found = fm.key_padding([length]).block_mask(q_len, kv_len, batch=1)
        wanted = create_block_mask(lambda b, h, q, kv: kv < length, 1, None, q_len, kv_len, "cpu")
        check_lists(found, wanted)


def test_steps_in_a_graph_of_torch_compile() -> None:
    plan, offset = fm.plan("causal & key_padding(lengths)", 1, KV_LEN, batch=2), torch.tensor([99, 3])
    wanted = plan(lengths=LENGTHS, q_offset=offset).dense()
    plan(lengths=LENGTHS, q_offset=offset)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def lowered(lengths: Tensor, offset: Tensor) -> Tensor:
        return plan(lengths=lengths, q_offset=offset).dense()

    assert torch.equal(lowered(LENGTHS, offset), wanted)
    assert torch.equal(lowered(LENGTHS // 3, offset), plan(lengths=LENGTHS // 3, q_offset=offset).dense())


def test_a_mask_without_data() -> None:
    mask: Mask = fm.sliding_window(left=60, right=0)
    plan = mask.plan(1, KV_LEN)
    for position in (0, 59, 60, 299):
        assert plan(q_offset=torch.tensor([position])).dense().sum() == min(position, 60) + 1


def test_numbers_in_an_opaque_call() -> None:
    ids = torch.arange(KV_LEN)
    plan = fm.plan(fm.from_mask_mod(lambda b, h, q, kv: torch.sin(ids[q] * 1.5) > 0), KV_LEN)
    assert torch.equal(plan().dense()[0, 0, :, 0], torch.sin(ids * 1.5) > 0)
