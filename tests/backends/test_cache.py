"""The MaskCache: how often masks are lowered, and that no result outlives its data."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import flexmask as fm
from flexmask import KVCache, MaskCache, MultiheadFlexAttention
from flexmask.backends import api as functional
from flexmask.backends.cache import _ACTIVE
from flexmask.errors import ExpressionError, LoweringError, OperandError
from flexmask.intervals.bounds import analyze

LAYERS, S = 4, 12


class Model(nn.Module):
    def __init__(self, mask: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MultiheadFlexAttention(8, 8, 2, mask=mask) for _ in range(LAYERS))

    def forward(self, x: Tensor, **data: Any) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, **data)
        return x


@pytest.fixture
def lowered(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The context of each lowering."""
    contexts: list[Any] = []

    def counted(context: Any) -> Any:
        contexts.append(context)
        return analyze(context)

    monkeypatch.setattr("flexmask.backends.tiled_sdpa.analyze", counted)
    return contexts


X = torch.randn(2, S, 8)
IDS = torch.arange(S).repeat(2, 1) // 5


def test_layers_share_one_lowering(lowered: list[Any]) -> None:
    model = Model("causal & document(ids)")
    expected = model(X, ids=IDS)
    assert len(lowered) == LAYERS
    lowered.clear()
    with MaskCache() as cache:
        assert torch.equal(model(X, ids=IDS), expected)
        assert len(lowered) == cache.builds == 1
        assert cache.hits == LAYERS - 1
        model(X, ids=IDS).sum().backward()
        assert len(lowered) == 1
    model(X, ids=IDS)
    assert len(lowered) == 1 + LAYERS


@pytest.mark.parametrize("window", [None, 4])
def test_layers_that_decode_share_each_step(lowered: list[Any], window: int | None) -> None:
    mask = fm.sliding_window(size=4) & fm.document(IDS)
    layers = [MultiheadFlexAttention(8, 8, 2, mask=mask) for _ in range(LAYERS)]
    caches = [KVCache(S, window=window) for _ in layers]
    with torch.no_grad(), MaskCache():
        for step, part in enumerate(X.split([6, 3, 1, 1, 1], 1)):
            for layer, cache in zip(layers, caches, strict=True):
                layer(part, cache=cache)
            assert len(lowered) == step + 1


def test_equal_masks_are_one_and_others_are_not(lowered: list[Any]) -> None:
    query = torch.randn(2, 2, S, 4)
    with MaskCache() as cache:
        for mask in ("causal & document(ids=[0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3])", "document(lengths=[3, 3, 3, 3]) & causal"):
            for _ in range(2):
                functional.attention(query, query, query, mask)
        assert cache.builds == 2
        functional.attention(query[:, :, :9], query, query, "document(lengths=[3, 3, 3, 3]) & causal")
        functional.attention(query[:, :1], query[:, :1], query[:, :1], "document(lengths=[3, 3, 3, 3]) & causal")
        assert cache.builds == 4
        assert len(cache) == 4


def test_heads_of_other_sizes_share_a_lowering(lowered: list[Any]) -> None:
    with MaskCache():
        for size in (4, 8):
            query = torch.randn(2, 2, S, size)
            functional.attention(query, query, query, fm.sliding_window(size=3))
    assert len(lowered) == 1


def test_block_masks_of_other_key_lengths_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[tuple[int, int]] = []

    def call(query: Tensor, key: Tensor, value: Tensor, *, block_mask: Any, **options: Any) -> Tensor:
        lengths.append(block_mask.seq_lengths)
        return query

    monkeypatch.setattr("flexmask.backends.flex._call", call)
    query = torch.randn(1, 1, S, 16)
    with MaskCache():
        for kv_len in (S, 2 * S):
            key = torch.randn(1, 1, kv_len, 16)
            functional.attention(query, key, key, fm.causal(), backend="flex")
    assert lengths == [(S, S), (S, 2 * S)]


CHANGES: dict[str, Callable[[Tensor], object]] = {
    "in place": lambda ids: ids.zero_(),
    "an entry": lambda ids: ids.__setitem__((0, 3), 7),
    "a view": lambda ids: ids[1:].fill_(2),
    "through NumPy": lambda ids: ids.numpy().fill(1),
    "through data": lambda ids: ids.data.copy_(torch.arange(S).expand(2, S) // 3),
    "another memory": lambda ids: ids.set_(torch.zeros(2, S, dtype=torch.int64)),  # type: ignore[call-overload]
    "inference": lambda ids: _in_inference(ids),
}


def _in_inference(ids: Tensor) -> None:
    with torch.inference_mode():
        ids[0] = 4


@pytest.mark.parametrize("change", CHANGES)
def test_changed_data_is_seen(change: str) -> None:
    model, ids = Model("causal & document(ids)"), IDS.clone()
    with MaskCache() as cache:
        model(X, ids=ids)
        CHANGES[change](ids)
        found = model(X, ids=ids)
        assert cache.builds == 2
    assert torch.equal(found, model(X, ids=ids.clone()))


def test_data_that_shares_memory_with_numpy_and_goes_by_name() -> None:
    array = np.zeros(S, dtype=np.int64)
    mask, query = fm.document(torch.from_numpy(array)), torch.randn(1, 1, S, 4)
    with MaskCache() as cache:
        before = functional.attention(query, query, query, mask)
        array[6:] = 1
        after = functional.attention(query, query, query, mask)
        assert cache.builds == 2
    assert not torch.equal(before, after)


def test_tensors_that_come_and_go_are_not_mixed_up() -> None:
    """A new tensor often has the id of a deleted one."""
    query = torch.randn(1, 1, S, 4)
    with MaskCache(size=2) as cache:
        for cut in range(1, 10):
            ids = (torch.arange(S) >= cut).long()
            found = functional.attention(query, query, query, fm.document(ids))
            assert torch.equal(found, functional.attention(query, query, query, fm.document(ids.tolist())))
        assert len(cache) == 2


def test_offsets_count_by_their_values() -> None:
    query, key, at = torch.randn(2, 1, 1, 4), torch.randn(2, 1, S, 4), torch.tensor([3, 7])
    with MaskCache() as cache:
        for _ in range(2):
            first = functional.attention(query, key, key, "causal", q_offset=at)
        assert (cache.builds, cache.hits) == (1, 1)
        at += 1
        second = functional.attention(query, key, key, "causal", q_offset=at)
        functional.attention(query, key, key, "causal", q_offset=at.clone())
        assert cache.builds == 2
    assert not torch.equal(first, second)
    assert torch.equal(second, functional.attention(query, key, key, "causal", q_offset=torch.tensor([4, 8])))


def test_what_inference_mode_made_does_not_reach_training() -> None:
    model = Model("causal & document(ids)")
    with MaskCache() as cache:
        with torch.inference_mode():
            model(X, ids=IDS)
        model(X, ids=IDS).sum().backward()
        assert cache.builds == 2


def test_the_last_used_stay() -> None:
    query = torch.randn(1, 1, S, 4)
    with MaskCache(size=2) as cache:
        for size in (2, 3, 2, 4, 2, 3):
            functional.attention(query, query, query, fm.sliding_window(size=size))
        assert (cache.builds, cache.hits, len(cache)) == (4, 2, 2)
        cache.clear()
        assert len(cache) == 0


def test_the_innermost_cache_serves() -> None:
    query = torch.randn(1, 1, S, 4)
    with MaskCache() as outer:
        with MaskCache() as inner, outer, inner:
            functional.attention(query, query, query, fm.sliding_window(size=2))
        assert (outer.builds, inner.builds) == (0, 1)
        with pytest.raises(LoweringError), inner:
            functional.attention(query, query, query, "key_padding(lengths=99)")
        functional.attention(query, query, query, fm.sliding_window(size=2))
        assert outer.builds == 1
    assert _ACTIVE.get() == ()


def test_threads_share_what_they_enter_and_nothing_else(lowered: list[Any]) -> None:
    model, cache, found = Model("causal & document(ids)"), MaskCache(), []
    expected = model(X, ids=IDS)
    lowered.clear()

    def work(enter: bool) -> None:
        if enter:
            with cache:
                found.append(model(X, ids=IDS))
        else:
            found.append(model(X, ids=IDS))

    for enter, times in ((True, 1), (False, 8 * LAYERS)):
        lowered.clear()
        with cache:
            threads = [threading.Thread(target=work, args=(enter,)) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert len(lowered) == times
    assert all(torch.equal(out, expected) for out in found)
    assert len(found) == 16


def test_checkpoints_lower_once() -> None:
    model, x = Model("causal & document(ids)"), X.clone().requires_grad_()
    with MaskCache() as cache:
        torch.utils.checkpoint.checkpoint(model, x, ids=IDS, use_reentrant=False).sum().backward()
        assert cache.builds == 1
    (expected,) = torch.autograd.grad(model(x, ids=IDS).sum(), x)
    assert x.grad is not None
    torch.testing.assert_close(x.grad, expected)


@pytest.mark.slow
@pytest.mark.usefixtures("flex_compiler")
def test_block_masks_are_shared_as_well() -> None:
    query, mask = torch.randn(1, 1, 150, 16), fm.causal() & fm.document(torch.arange(150) // 40)
    with torch.no_grad(), MaskCache() as cache:
        for _ in range(3):
            found = functional.attention(query, query, query, mask, backend="flex")
        assert (cache.builds, cache.hits) == (1, 2)
    torch.testing.assert_close(found, functional.attention(query, query, query, mask, backend="sdpa"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("change", ["in place", "an entry", "a view", "another memory"])
def test_changed_data_is_seen_on_cuda(change: str) -> None:
    query, ids = torch.randn(2, 1, S, 16, device="cuda"), IDS.cuda()
    ids = ids.clone()
    with MaskCache() as cache:
        for _ in range(2):
            functional.attention(query, query, query, fm.document(ids), backend="sdpa")
        assert (cache.builds, cache.hits) == (1, 1)
        if change == "another memory":
            ids.set_(torch.zeros_like(ids))  # type: ignore[call-overload]
        else:
            CHANGES[change](ids)
        found = functional.attention(query, query, query, fm.document(ids), backend="sdpa")
        assert cache.builds == 2
    assert torch.equal(found, functional.attention(query, query, query, fm.document(ids.tolist()), backend="sdpa"))


@pytest.mark.parametrize(("size", "kind"), [(0, ExpressionError), (1.5, OperandError), (True, OperandError)])
def test_wrong_sizes_are_errors(size: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="size"):
        MaskCache(size)


def test_offsets_of_other_strides_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where values are not read."""
    monkeypatch.setattr("flexmask.backends.cache._sync.needs_sync", lambda tensor: True)
    offsets, cache = torch.tensor([[0, 3], [7, 9]]), fm.MaskCache()
    for offset in (offsets[0], offsets[:, 0]):
        cache.get(fm.causal(), (), offset, object)
    assert cache.builds == 2


def test_caches_that_end_in_another_order() -> None:
    first, second = fm.MaskCache(), fm.MaskCache()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    query = torch.randn(1, 1, 4, 8)
    fm.attention(query, query, query, fm.sliding_window(size=2))
    assert (first.builds, second.builds) == (0, 1)
    second.__exit__(None, None, None)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_model_that_holds_a_cache_is_copied_without_its_results(duplicate: Callable[[Any], Any]) -> None:
    model, cache = Model("causal & document(ids)"), MaskCache(7)
    vars(model)["cache"] = cache
    with cache:
        model(X, ids=IDS)
    assert len(cache) == 1
    copied = duplicate(model).cache
    assert isinstance(copied, MaskCache)
    assert (copied.size, len(copied), copied.builds) == (7, 0, 0)
