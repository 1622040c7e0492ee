"""Masks as pytrees of their tensors: copies, moves, export, and what is refused."""

import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import flexmask as fm
from flexmask import b, kv, q
from flexmask.errors import LoweringError
from tests.support.gpu import needs_gpu

IDS = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]])
LENGTHS = torch.tensor([3, 4])
MASKS = {
    "&": fm.causal() & fm.document(IDS) & fm.key_padding(lengths=LENGTHS),
    "|": fm.document(IDS) | fm.key_padding(lengths=LENGTHS),
    "^": fm.document(IDS) ^ fm.causal(),
    "~": ~(fm.document(IDS) & fm.causal()),
    "named mask": fm.document(IDS),
    "named part": fm.document(IDS).named("one text"),
    "comparison": fm.table(IDS)[b, q] >= fm.table(IDS)[b, kv],
    "per_head": fm.per_head([fm.document(IDS), fm.causal()]),
    "one tensor twice": fm.document(IDS) & (fm.table(IDS)[b, kv] > 0),
    "cells": fm.from_dense(IDS[0, :, None] == IDS[0]),
    "traced function": fm.from_mask_mod(lambda b, h, q, kv: (IDS[b, q] - kv).abs().float().sqrt() > 1),
}


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_is_the_pytree_of_its_tensors(name: str) -> None:
    mask = MASKS[name]
    leaves, spec = pytree.tree_flatten(mask)
    assert all(isinstance(leaf, torch.Tensor) for leaf in leaves)
    assert [id(leaf) for leaf in leaves] == [id(tensor) for tensor in mask.tensors]
    assert pytree.tree_unflatten(leaves, spec) == mask
    copy = pytree.tree_map(torch.clone, mask)
    assert type(copy) is type(mask)
    assert torch.equal(copy.dense(4), mask.dense(4))
    assert [path for path, _ in pytree.tree_flatten_with_path(mask)[0]] == [(pytree.SequenceKey(n),) for n in range(len(leaves))]


def test_masks_of_one_form_have_one_tree() -> None:
    mask, other = fm.causal() & fm.document(IDS), fm.causal() & fm.document(IDS.flip(0))
    assert pytree.tree_structure(mask) == pytree.tree_structure(other)
    assert pytree.tree_structure(mask) != pytree.tree_structure(fm.document(IDS))
    moved = pytree.tree_unflatten(pytree.tree_leaves(other), pytree.tree_structure(mask))
    assert moved == other


def test_other_data_may_have_another_shape_and_is_seen_in_texts() -> None:
    mask = pytree.tree_map(lambda tensor: tensor[:, :3], fm.causal() & fm.document(IDS))
    assert str(mask) == "causal & document(ids=<int64[2, 3]>)"
    assert torch.equal(mask.dense(3), (fm.causal() & fm.document(IDS[:, :3])).dense(3))


@pytest.mark.slow
@pytest.mark.parametrize("statement", ["import torch, flexmask", "import flexmask; flexmask.attention; import torch"])
def test_masks_are_pytrees_before_one_has_data(statement: str) -> None:
    code = f"{statement}; from torch.utils import _pytree; print(_pytree.tree_leaves(flexmask.causal()))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


def test_a_mask_without_tensors_has_no_leaves() -> None:
    assert pytree.tree_leaves([fm.causal() & fm.document(lengths=[3, 5]), IDS]) == [IDS]


LEAVES = {
    "None": None,
    "text": "text",
    "number": 3,
    "fewer axes": IDS[0],
    "more axes": IDS[None],
    "float": IDS.float(),
    "bool": IDS > 0,
}


@pytest.mark.parametrize("leaf", LEAVES.values(), ids=LEAVES)
def test_leaves_that_are_no_data_are_refused_where_the_mask_is_used(leaf: object) -> None:
    mask = pytree.tree_map(lambda tensor: leaf, fm.causal() & fm.document(IDS))
    uses: list[Callable[[], object]] = [
        lambda: mask.dense(4),
        lambda: mask.to("cpu"),
        lambda: mask.block_mask(4),
        lambda: mask.plan(4)(),
    ]
    for use in uses:
        with pytest.raises(
            LoweringError, match=r"in the place of a tensor of other axes or dtype, by torch\.vmap or by another function"
        ):
            use()


def test_vmap_over_the_data_of_a_mask_is_refused() -> None:
    x = torch.randn(2, 1, 1, 4, 8)
    with pytest.raises(LoweringError, match="A mask has its batch as the first axis of its data"):
        torch.vmap(lambda x, mask: fm.attention(x, x, x, mask))(x, fm.causal() & fm.document(IDS))


def test_a_mask_is_an_input_of_an_exported_model() -> None:
    class Attention(torch.nn.Module):
        def forward(self, x: torch.Tensor, mask: fm.Mask) -> torch.Tensor:
            return fm.attention(x, x, x, mask)

    x = torch.randn(2, 1, 4, 8)
    exported = torch.export.export(Attention(), (x, fm.causal() & fm.document(IDS)), strict=False).module()
    other = fm.causal() & fm.document(IDS.flip(0))
    torch.testing.assert_close(exported(x, other), Attention()(x, other))


def test_a_copy_is_pickled() -> None:
    mask = pytree.tree_map(torch.clone, fm.causal() & fm.document(IDS))
    assert torch.equal(pickle.loads(pickle.dumps(mask)).dense(4), mask.dense(4))


@needs_gpu
@pytest.mark.parametrize("lowered", [False, True], ids=["Mask", "LoweredMask"])
def test_a_data_loader_pins_masks(lowered: bool) -> None:
    mask = fm.causal() & fm.document(IDS)
    masks: Any = [mask.plan(4)() if lowered else mask]
    loader: Any = torch.utils.data.DataLoader(masks, batch_size=None, pin_memory=True)
    (pinned,) = loader
    assert all(tensor.is_pinned() for tensor in pytree.tree_leaves(pinned) if isinstance(tensor, torch.Tensor))


def test_masks_move_as_tensors_do() -> None:
    mask = fm.causal() & fm.key_padding(torch.tensor([3, 4]))
    moved = mask.to("cpu", non_blocking=True)
    assert torch.equal(moved.dense(5), mask.dense(5))
    with pytest.raises(fm.errors.OperandError, match="non_blocking must be True or False"):
        mask.to("cpu", non_blocking=1)  # type: ignore[arg-type]
