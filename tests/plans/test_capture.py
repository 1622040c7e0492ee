"""What graphs are captured for, and that what is read once is not read again."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Event
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import flexmask as fm
from flexmask import Mask, attention, kv
from flexmask._transforms import captured
from flexmask.errors import LoweringError
from flexmask.plans import capture, lowered
from flexmask.plans.capture import GraphCache
from tests.support import oracle


def test_masks_that_check_other_values_share_no_graph() -> None:
    lengths = torch.tensor([9])
    checked, unchecked = fm.key_padding(lengths).expand(), kv < fm.table(lengths)[fm.b]
    assert checked == unchecked
    assert unchecked.plan(4)().dense().all()
    with pytest.raises(LoweringError, match="lengths must be at most kv_len = 4"):
        checked.plan(4)()


def test_a_capture_keeps_no_other_thread_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, other_is_done, real = Event(), Event(), capture._capture

    def slow(mask: Mask, *rest: Any, **options: Any) -> Any:
        if mask == first:
            begun.set()
            assert other_is_done.wait(60)
        return real(mask, *rest, **options)

    monkeypatch.setattr(capture, "_capture", slow)
    cache, first, second = GraphCache(), fm.sliding_window(left=3, right=0), fm.sliding_window(left=4, right=0)
    setting = fm.plan(first, 8).setting
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(cache.get, first, setting, ())
        assert begun.wait(60)
        cache.get(second, setting, ())
        other_is_done.set()
        assert waiting.result(60) is cache.get(first, setting, ())
    assert cache.captures == len(cache) == 2


@pytest.mark.slow
def test_threads_capture_at_the_same_time() -> None:
    lengths, cache = range(8, 14), GraphCache()
    start = Barrier(len(lengths))

    def captured(length: int) -> list[list[bool]]:
        mask, ids = fm.document(fm.param("ids")), torch.arange(length) // 3
        start.wait(60)
        setting = fm.plan(mask, length).setting
        graph = cache.get(mask, setting, (ids,))
        found: list[list[bool]] = graph.run(setting, [ids]).dense()[0, 0].tolist()
        return found

    with ThreadPoolExecutor(len(lengths)) as threads:
        for length, found in zip(lengths, threads.map(captured, lengths), strict=True):
            assert found == [[kv // 3 == q // 3 for kv in range(length)] for q in range(length)]


def test_the_lists_of_a_block_mask_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reads, real = [], lowered._read

    def read(block_mask: BlockMask) -> Any:
        reads.append(1)
        return real(block_mask)

    monkeypatch.setattr(lowered, "_read", read)
    block_mask = create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, 24, 24, "cpu", BLOCK_SIZE=8)
    x = torch.randn(1, 1, 24, 8)
    first, second = (attention(x, x, x, block_mask, backend="sdpa") for _ in range(2))
    assert torch.equal(first, second)
    assert len(reads) == 1
    assert block_mask.full_kv_num_blocks is not None
    block_mask.full_kv_num_blocks.zero_()
    visible = torch.eye(3, dtype=torch.bool).repeat_interleave(8, 0).repeat_interleave(8, 1).tril()
    wanted = oracle.attention(x, x, x, visible)
    torch.testing.assert_close(attention(x, x, x, block_mask, backend="sdpa"), wanted.float())
    assert len(reads) == 2


def test_the_last_used_graphs_are_kept() -> None:
    cache = GraphCache(size=2)
    masks = [fm.sliding_window(left=left, right=0) for left in range(3)]
    for mask in (*masks, masks[2], masks[0]):
        plan = fm.plan(mask, 8)
        cache.get(mask, plan.setting, mask.tensors)
    assert (len(cache), cache.captures) == (2, 4)
    cache.clear()
    assert len(cache) == 0


def test_graphs_have_no_view_of_a_whole_tensor() -> None:
    """Each operator of a decoding step costs a microsecond."""
    plan = fm.plan("causal & document(cu_seqlens=cu)", 1, 1000)
    tensors = [torch.tensor([0, 300, 1000]), torch.tensor([500])]
    graph = GraphCache().get(plan.mask, plan.setting._replace(q_offset=-1), tensors)
    aten = torch.ops.aten
    kinds = aten.expand.default, aten.view.default, aten.slice.Tensor
    views = [node for node in graph.module.graph.nodes if node.target in kinds]
    assert views
    assert all(node.meta["val"].shape != node.args[0].meta["val"].shape for node in views)


def test_cells_of_a_block_mask_in_a_graph() -> None:
    """Of batch and heads of their own, with full blocks; tensors of a graph are not kept."""
    mask = fm.causal() & (fm.h <= kv) & (fm.b != kv)
    block_mask = mask.block_mask(40, batch=2, heads=3, block_size=8)
    with captured():
        bounds, cells = lowered.from_block_mask(block_mask)
    assert block_mask not in lowered._KNOWN
    assert bounds.flatten().tolist() == [0, 40]
    assert isinstance(cells, Tensor)
    assert torch.equal(cells, mask.dense(40, batch=2, heads=3))
