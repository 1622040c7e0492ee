"""torch's methods of a BlockMask: their results for BlockMasks of this library equal those for torch's."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import flexmask as fm
from tests.support.block_lists import check_lists
from tests.support.exhaustive import exhaustive
from tests.support.paths import WAYS, path

SIZES = 2, 2, 96, 128
BLOCK = 16
#: Corners to crop to: whole blocks, ragged ones, one axis alone, a single block.
CORNERS = [(48, 64), (96, 64), (32, 128), (16, 16), (41, 70), (96, 128)]


def causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q >= kv


def ahead(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q + 16 <= kv


def window(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (q - kv).abs() <= (8 << h)


def columns(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return (kv // 16 % 3 == b + 1) | (kv // 16 == 7) | (q + kv == 100)


def nothing(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return kv < 0


def everything(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return kv >= 0


MODS = [causal, ahead, window, columns, nothing, everything]
each_way = pytest.mark.parametrize("way", WAYS)
each_mod = pytest.mark.parametrize("mask_mod", MODS, ids=lambda mod: mod.__name__)


def ours(mask_mod: Any, way: str, **options: Any) -> Any:
    with path(way):
        return fm.create_block_mask(mask_mod, *SIZES, device="cpu", BLOCK_SIZE=BLOCK, **options)


@cache
def theirs(mask_mod: Any, q_len: int = SIZES[2], kv_len: int = SIZES[3]) -> Any:
    return create_block_mask(mask_mod, *SIZES[:2], q_len, kv_len, "cpu", BLOCK)


def check_corner(found: BlockMask, whole: BlockMask, corner: tuple[int, int]) -> None:
    """The blocks of the upper left corner are partial or full as in the whole mask."""
    rows, columns = (-(-length // BLOCK) for length in corner)
    assert found.shape == (*whole.shape[:2], *corner)
    assert found.mask_mod is whole.mask_mod
    for kind, (height, width) in (("kv", (rows, columns)), ("q", (columns, rows))):
        for name in (kind, f"full_{kind}"):
            number, indices = getattr(found, f"{name}_num_blocks"), getattr(found, f"{name}_indices")
            assert number.dtype == indices.dtype == torch.int32
            assert indices.shape[2:] == (height, width)
            assert dense(number, indices) == [group[:height] for group in dense_part(whole, name, height, width)], name


def dense(number: Tensor, indices: Tensor) -> list[list[list[int]]]:
    """For each batch and head the blocks of each row in order."""
    rows = zip(indices.flatten(0, 1).tolist(), number.flatten(0, 1).tolist(), strict=True)
    return [[sorted(row[:count]) for row, count in zip(*group, strict=True)] for group in rows]


def dense_part(whole: BlockMask, name: str, height: int, width: int) -> list[list[list[int]]]:
    groups = dense(getattr(whole, f"{name}_num_blocks"), getattr(whole, f"{name}_indices"))
    return [[[column for column in row if column < width] for row in group[:height]] for group in groups]


@each_way
@each_mod
def test_adjust(mask_mod: Any, way: str) -> None:
    whole = theirs(mask_mod)
    found = ours(mask_mod, way)
    for corner in CORNERS:
        check_corner(found._adjust(*corner), whole, corner)


@each_way
@each_mod
def test_adjust_equals_torch_at_the_smaller_lengths(mask_mod: Any, way: str) -> None:
    for corner in CORNERS[:4]:
        check_lists(ours(mask_mod, way)._adjust(*corner), theirs(mask_mod, *corner))


@each_way
@each_mod
def test_adjust_after_other_methods(mask_mod: Any, way: str) -> None:
    """BlockMasks that other methods return are cropped by defined indices as well."""
    whole, found = theirs(mask_mod), ours(mask_mod, way)
    leaves, spec = pytree.tree_flatten(found)
    for made in (found.to("cpu"), pytree.tree_unflatten(leaves, spec), found._adjust(80, 112)):
        check_corner(made._adjust(48, 64), whole, (48, 64))
    rows = torch.tensor([2, 0])
    part, wanted = found[:, 1:, rows]._adjust(32, 64), whole[:, 1:, rows]
    assert dense(part.kv_num_blocks, part.kv_indices) == dense_part(wanted, "kv", 2, 4)


@each_way
def test_adjust_where_full_blocks_are_among_the_others(way: str) -> None:
    for mask_mod in MODS:
        found = ours(mask_mod, way, separate_full_blocks=False)._adjust(48, 64)
        assert found.full_kv_num_blocks is None
        assert torch.equal(found.to_dense(), theirs(mask_mod).to_dense()[:, :, :3, :4])
        back = BlockMask.from_kv_blocks(found.q_num_blocks, found.q_indices)
        assert torch.equal(back.to_dense(), found.to_dense().mT)


@each_way
def test_adjust_keeps_an_assigned_mask_mod(way: str) -> None:
    found = ours(causal, way)
    found.mask_mod = everything
    assert found._adjust(48, 64).mask_mod is everything


@each_way
@each_mod
def test_values_of_a_block_mask(mask_mod: Any, way: str) -> None:
    found, wanted = ours(mask_mod, way), theirs(mask_mod)
    assert torch.equal(found.to_dense(), wanted.to_dense())
    assert found.sparsity() == wanted.sparsity()
    assert found.numel() == wanted.numel()
    assert found.shape == wanted.shape
    assert str(found) == str(wanted)
    assert repr(found) == repr(wanted)
    assert found.to_string(grid_size=(3, 5), limit=2) == wanted.to_string(grid_size=(3, 5), limit=2)
    assert len(found.as_tuple()) == len(wanted.as_tuple())


@each_way
@each_mod
def test_parts_and_copies(mask_mod: Any, way: str) -> None:
    found, wanted = ours(mask_mod, way), theirs(mask_mod)
    indices: list[Any] = [0, -1, (1, 0), (slice(None), slice(0, 1)), (0, 1, torch.tensor([3])), (slice(0, 2), 1, slice(1, 4))]
    for index in indices:
        assert torch.equal(found[index].to_dense(), wanted[index].to_dense())
        assert torch.equal(found[index].kv_num_blocks, wanted[index].kv_num_blocks)
        assert torch.equal(found[index].q_num_blocks, wanted[index].q_num_blocks)
    check_lists(found.to("cpu"), wanted)
    assert found.to("meta").kv_indices.device.type == found.to("meta").full_q_num_blocks.device.type == "meta"
    lists = {name: getattr(found, name) for name in BlockMask._TENSOR_ATTRS[:4]}
    check_lists(BlockMask.from_kv_blocks(**lists, BLOCK_SIZE=BLOCK, seq_lengths=found.seq_lengths), wanted)


@each_way
def test_a_block_mask_is_a_tree_of_tensors(way: str) -> None:
    """For tracing and export, where a user registers torch's class with pytree."""
    found = ours(causal, way)
    leaves, spec = pytree.tree_flatten(found)
    if type(found) is not BlockMask:
        assert len(leaves) == 8
        moved = pytree.tree_map_only(Tensor, lambda tensor: tensor + 0, found)
        assert type(moved) is type(found)
        check_lists(moved, theirs(causal))
    assert isinstance(pytree.tree_unflatten(leaves, spec), BlockMask)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", *exhaustive(["inductor"])])
@pytest.mark.parametrize("inside", [False, True], ids=["before", "inside"])
def test_adjust_for_a_kernel(inside: bool, backend: str) -> None:
    """Before compiled code and inside it."""
    torch.compiler.reset()
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 2, length, 16, generator=generator) for length in (48, 64, 64))

    def attend(query: Tensor, key: Tensor, value: Tensor, block_mask: BlockMask) -> Tensor:
        adjusted = block_mask._adjust(query.shape[2], key.shape[2]) if inside else block_mask
        return flex_attention(query, key, value, block_mask=adjusted)

    given = ours(columns, "packed sets")
    with torch.no_grad():
        attend_compiled = torch.compile(attend, fullgraph=True, backend=backend)
        found = attend_compiled(query, key, value, given if inside else given._adjust(48, 64))
    cells = columns(*(torch.arange(n).view([-1 if i == axis else 1 for i in range(4)]) for axis, n in enumerate((2, 2, 48, 64))))
    wanted = torch.nn.functional.scaled_dot_product_attention(query, key, value, cells.expand(2, 2, 48, 64))
    torch.testing.assert_close(found, wanted.nan_to_num(0.0), atol=1e-5, rtol=1e-5)
