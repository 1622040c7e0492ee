"""A drop-in replacement for ``torch.nn.attention.flex_attention.create_block_mask``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexmask import devices
from flexmask.algebra import Mask
from flexmask.errors import LoweringError, OperandError
from flexmask.lowering.block_mask import block_mask
from flexmask.preparation import frame_of
from flexmask.tracing.trace import MaskMod, follow

__all__ = ["create_block_mask"]

#: The lists of a BlockMask, as torch names them.
LISTS = [f"{kind}_{part}" for kind in ("kv", "full_kv", "q", "full_q") for part in ("num_blocks", "indices")]


def create_block_mask(
    mask_mod: MaskMod | Mask,
    B: int | None,  # noqa: N803 - the names are torch's
    H: int | None,  # noqa: N803
    Q_LEN: int,  # noqa: N803
    KV_LEN: int,  # noqa: N803
    device: torch.device | str | None = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,  # noqa: N803
    _compile: bool = False,
    separate_full_blocks: bool = True,
    compute_dq_write_order: bool = False,
    dq_kv_order: bool = True,
) -> BlockMask:
    """The BlockMask that torch's function of this name makes, in time that follows the mask's intervals.

    Args:
        mask_mod: a function of ``(b, h, q_idx, kv_idx)``, which is traced (see :func:`flexmask.trace`) and stands in the result
            as it is; or a mask, whose own ``mask_mod`` does.
        B: sequences, None for 1; of a mask, None for as many as its data says.
        H: heads, likewise.
        Q_LEN: queries.
        KV_LEN: keys.
        device: by default, as in torch, the current accelerator, else the CPU; of a mask, where its tensors are.
        BLOCK_SIZE: tokens in a block, or the pair (queries, keys).
        _compile: taken and ignored, as nothing has to be compiled.
        separate_full_blocks: only True.
        compute_dq_write_order: only False.
        dq_kv_order: only means something with ``compute_dq_write_order``.

    Raises:
        LoweringError: an argument that is not supported, or a captured tensor that is too short or on another device.
        OperandError: ``mask_mod`` is neither a mask nor a function of four indices.
        TraceError: the function gives no truth value for each cell.

    Source: ``torch.nn.attention.flex_attention.create_block_mask``.
    """
    if not separate_full_blocks:
        raise LoweringError("separate_full_blocks=False is not supported; use torch's create_block_mask for it")
    if compute_dq_write_order:
        raise LoweringError("compute_dq_write_order=True is not supported; use torch's create_block_mask for it")
    if not isinstance(dq_kv_order, bool):
        raise OperandError(f"dq_kv_order must be True or False, got {dq_kv_order!r}")
    if isinstance(mask_mod, Mask):
        made = block_mask(frame_of(mask_mod, Q_LEN, KV_LEN, B, H, 0, device), BLOCK_SIZE)
    else:
        where = devices.found(device or torch.accelerator.current_accelerator() or "cpu")
        mask = follow(mask_mod, device=where)
        made = block_mask(frame_of(mask, Q_LEN, KV_LEN, B or 1, H or 1, 0, where), BLOCK_SIZE, mod=mask_mod)
    return _with_heads(made, H or 1)


def _with_heads(made: BlockMask, heads: int) -> BlockMask:
    """The same BlockMask with a list for each head, as torch's has; heads that are the same share their memory."""
    if made.kv_num_blocks.shape[1] >= heads:
        return made
    lists: dict[str, Any] = {name: _for_heads(getattr(made, name), heads) for name in LISTS}
    return BlockMask(seq_lengths=made.seq_lengths, **lists, BLOCK_SIZE=made.BLOCK_SIZE, mask_mod=made.mask_mod)


def _for_heads(listed: Tensor, heads: int) -> Tensor:
    return listed.expand(-1, heads, *[-1] * (listed.dim() - 2))
