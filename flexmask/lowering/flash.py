"""What FlashAttention 4 takes, which computes FlexAttention's backend ``FLASH``: the sizes of blocks, and which masks."""

from __future__ import annotations

from flexmask.expr.index import Arithmetic, Opaque
from flexmask.expr.mask import Mask

#: Rows in a tile of queries. On Blackwell a program has two tiles, but for few queries and for heads of `WIDEST` channels.
TILE = 128
#: The channels of the widest heads.
WIDEST = 256


def flash_block_size(generation: int, q_len: int, group: int = 1, width: int = 128, value_width: int = 128) -> tuple[int, int]:
    """The block of queries and keys that the kernels take, forward and backward.

    Args:
        generation: that of the GPU, 9 for Hopper, 10 and 11 for Blackwell.
        q_len: number of queries.
        group: query heads that share a key head.
        width: channels of a head.
        value_width: channels of a head of the values.

    Source: ``_get_fwd_config``, ``_tile_size_bwd_sm90`` and ``block_sparse_bwd_supports_2cta`` of ``flash_attn.cute``.
    """
    if generation == 9:
        return TILE, TILE if width <= 128 else 96 if width <= 192 else 64
    tiles = 1 if value_width == WIDEST or q_len * group <= TILE else 2
    return tiles * TILE, 2 * TILE if 128 < width < WIDEST else TILE


def flash_refusal(mask: Mask) -> str | None:
    """The reason why FlashAttention 4 might not compute an expression as PyTorch does; None where it does."""
    for node in mask.form.expand().walk():
        if isinstance(node, Opaque):
            return f"operations of a traced function, {node}, may be others in FlashAttention 4"
        if isinstance(node, Arithmetic) and node.sign == "%":
            return f"{node} is negative for negative numbers in FlashAttention 4"
    return None
