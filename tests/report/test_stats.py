"""Statistics of masks that follow from their blocks. That they match the cells is tested with the lowerings."""

from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import flexmask as fm
from flexmask.lowering.block_lists import SHARED_STRIDES

ONE_PITCH = pytest.mark.xfail(SHARED_STRIDES, reason="torch 2.11: the rows of all lists have one distance", strict=True)


def test_operations_of_partial_and_full_blocks() -> None:
    stats = fm.causal().stats(256, block_size=128)
    assert (stats.partial_blocks, stats.full_blocks, stats.empty_blocks) == (2, 1, 1)
    assert stats.flops(d_head=64) == 3 * 2 * (2 * 128 * 128 * 64)


def allocated(block_mask: BlockMask) -> int:
    """The bytes behind all tensors of a BlockMask, with those that several share counted once."""
    sizes: dict[int, int] = {}
    for value in vars(block_mask).values():
        if isinstance(value, torch.Tensor):
            sizes[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
    return sum(sizes.values())


@pytest.mark.parametrize(
    ("text", "lengths", "options"),
    [
        ("causal", (512, 512), {}),
        ("causal & document(lengths=[700, 324])", (1024, 1024), {}),
        ("key_padding(lengths=[100, 512])", (256, 512), {"heads": 2}),
        ("causal | (kv % 3 == h)", (300, 260), {"heads": 3}),
        pytest.param("causal", (2**18, 2**18), {}, marks=ONE_PITCH),
        ("sliding_window(size=4096)", (2**18, 2**18), {}),
    ],
)
def test_memory_is_what_is_allocated(text: str, lengths: tuple[int, int], options: dict[str, Any]) -> None:
    """Lists of long masks are packed; torch's have room for all blocks."""
    mask = fm.parse(text)
    stats = mask.stats(*lengths, **options)
    assert stats.block_mask_bytes == allocated(mask.block_mask(*lengths, **options))
    assert str(fm.explain(mask, *lengths, **options)).count("BlockMask ") == 1
    if max(lengths) < 2000:
        batch, heads = mask.dense(*lengths, **options).shape[:2]
        made = create_block_mask(mask.mask_mod(*lengths, **options), batch, heads, lengths[0], lengths[1], device="cpu")
        assert stats.torch_block_mask_bytes == allocated(made)
    else:
        assert stats.torch_block_mask_bytes > 10 * stats.block_mask_bytes
