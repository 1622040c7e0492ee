"""Comparison of a BlockMask's lists with torch's."""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import flexmask as fm
from tests.support.paths import path


def check_lists(found: BlockMask, wanted: BlockMask) -> None:
    """The lists of both are the same; what stands behind ``num_blocks`` is undefined."""
    assert found.shape == wanted.shape
    assert found.seq_lengths == wanted.seq_lengths
    assert found.BLOCK_SIZE == wanted.BLOCK_SIZE
    for kind in ("kv", "full_kv", "q", "full_q"):
        ours, theirs = (getattr(made, f"{kind}_num_blocks") for made in (found, wanted))
        assert (ours is None) == (theirs is None), kind
        if theirs is None:
            assert getattr(found, f"{kind}_indices") is None
            continue
        assert torch.equal(ours, theirs), kind
        assert ours.dtype == theirs.dtype
        check_defined(getattr(found, f"{kind}_indices"), getattr(wanted, f"{kind}_indices"), ours, kind)


def check_defined(ours: Tensor, theirs: Tensor, number: Tensor, what: str) -> None:
    """The first ``number`` entries of each row are the same."""
    assert ours.shape == theirs.shape, what
    assert ours.dtype == theirs.dtype
    known = torch.arange(ours.shape[-1]) < number.unsqueeze(-1)
    assert torch.equal(ours * known, theirs * known), what


@cache
def theirs(mask_mod: Any, sizes: tuple[Any, ...], **options: Any) -> Any:
    batch, heads, q_len, kv_len, block_size = sizes
    return create_block_mask(mask_mod, batch, heads, q_len, kv_len, "cpu", block_size, **options)


def ours(mask_mod: Any, sizes: tuple[Any, ...], way: str, **options: Any) -> Any:
    batch, heads, q_len, kv_len, block_size = sizes
    with path(way):
        return fm.create_block_mask(mask_mod, batch, heads, q_len, kv_len, "cpu", block_size, **options)
