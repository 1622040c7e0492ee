"""The objects for torch's own context parallelism, compared with what torch makes of the same shards."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor.experimental._context_parallel import _load_balancer as torch_balancers
from torch.nn.attention.flex_attention import create_block_mask

import flexmask as fm
from flexmask.distributed import Sharding, shard_sequence
from flexmask.distributed.torch_context_parallel import gathered_block_mask, load_balancer
from flexmask.errors import LoweringError
from flexmask.intervals.bind import bind
from tests.support.block_lists import check_lists
from tests.support.exhaustive import one_in

CPU = torch.device("cpu")
LENGTHS = [130, 20, 300, 62]
IDS = torch.repeat_interleave(torch.tensor(LENGTHS))


def packed(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q >= kv) & (IDS[q] == IDS[kv])


def dilated(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return ((q - kv).abs() < 40) & ((q - kv) % 3 == h)


def padded(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q >= kv) & (kv < torch.tensor([500, 77])[b])


CASES: dict[str, tuple[fm.Mask, Any, int, int]] = {
    "documents": (fm.causal() & fm.document(lengths=LENGTHS), packed, 1, 1),
    "not separable, by head": ((abs(fm.q - fm.kv) < 40) & ((fm.q - fm.kv) % 3 == fm.h), dilated, 1, 3),
    "sequences": (fm.causal() & fm.key_padding(lengths=[500, 77]), padded, 2, 1),
}


@pytest.mark.parametrize(("name", "balance", "block_size"), one_in(2, CASES, ["work", "head_tail", "contiguous"], [16, (8, 32)]))
def test_block_masks_are_those_that_torch_makes(name: str, balance: Any, block_size: Any) -> None:
    mask, mod, batch, heads = CASES[name]
    sharding = shard_sequence(mask, 512, 4, balance=balance, heads=heads, block_size=32)
    order = load_balancer(sharding, CPU)._generate_indices()[0]
    for rank in range(4):
        found = gathered_block_mask(sharding, bind(mask, 512, batch=batch, heads=heads), rank, block_size)
        own = order[128 * rank : 128 * (rank + 1)]
        assert own.tolist() == sharding.positions(rank).tolist()

        def moved(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, own: Tensor = own) -> Any:
            return mod(b, h, own[q], order[kv])

        expected = create_block_mask(moved, batch, heads, 128, 512, device="cpu", BLOCK_SIZE=block_size)
        check_lists(found, expected)
        sizes = enumerate((batch, heads, 128, 512))
        cell = [torch.arange(size).view([-1 if place == axis else 1 for place in range(4)]) for axis, size in sizes]
        assert torch.equal(*torch.broadcast_tensors(found.mask_mod(*cell), moved(*cell)))


def test_the_order_is_undone() -> None:
    balancer: Any = load_balancer(shard_sequence(["causal", "sliding_window(size=9)"], 96, 3, block_size=4), CPU)
    assert torch_balancers._LoadBalancer in type(balancer).__mro__
    order, back = balancer._generate_indices(), balancer._generate_indices(restore=True)
    assert order.shape == back.shape == (1, 96)
    assert order[0][back[0]].tolist() == list(range(96))


def unequal() -> Sharding:
    return shard_sequence("causal", 101, 4)


def test_shards_of_different_lengths() -> None:
    for make in (lambda: load_balancer(unequal(), CPU), lambda: gathered_block_mask(unequal(), bind(fm.causal(), 101), 0, 128)):
        with pytest.raises(LoweringError, match="needs as many tokens on each rank, and this plan has 25 to 26: make seq_len a"):
            make()


def test_divided_blocks() -> None:
    sharding, context = shard_sequence("causal", 64, 4, balance="contiguous"), bind(fm.causal(), 64)
    with pytest.raises(LoweringError, match="blocks of 128 queries and 128 keys are divided between ranks at position 16: plan"):
        gathered_block_mask(sharding, context, 0, 128)
    assert gathered_block_mask(sharding, context, 0, 16).seq_lengths == (16, 64)


def test_versions_of_torch_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, torch_balancers.__name__, None)
    with pytest.raises(
        LoweringError, match=r"torch .* has no torch\.distributed\..*_LoadBalancer, which torch 2\.11 to 2\.15 have"
    ):
        load_balancer(shard_sequence("causal", 64, 2), CPU)
