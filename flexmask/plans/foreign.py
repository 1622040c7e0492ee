"""Converts any BlockMask to key intervals and cells, for backends that take no BlockMask."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_mask

from flexmask import _sync
from flexmask._transforms import is_captured, vectorized
from flexmask.errors import LoweringError
from flexmask.intervals.rows import Rows
from flexmask.intervals.runs import runs
from flexmask.lowering.mask_mod import MaskMod
from flexmask.plans.capture import MAX_CELLS


def from_block_mask(block_mask: BlockMask) -> tuple[Tensor, Tensor | MaskMod]:
    """The bounds ``int32[B', H', Q', K, 2]`` and the cells of a BlockMask; see :class:`LoweredMask`.

    The cells are a ``mask_mod``. In a graph, where values cannot be read, they are ``bool[B, H, q_len, kv_len]``, and the bounds
    hold all keys.

    A key is visible in a full block, and in a partial block where the ``mask_mod`` shows it. The layers of a model read the lists
    of a BlockMask once.

    Raises:
        LoweringError: the number of cells is too great for a graph.
    """
    lists = [getattr(block_mask, f"{kind}kv_{part}") for kind in ("", "full_") for part in ("num_blocks", "indices")]
    lists = [tensor for tensor in lists if tensor is not None]
    if is_captured() or not all(map(_sync.has_stamp, lists)):
        return _read(block_mask)
    setting = block_mask.seq_lengths, block_mask.BLOCK_SIZE, block_mask.mask_mod, torch.is_inference_mode_enabled()
    known = _KNOWN.get(block_mask)
    if known is None or not known.stamp.holds(lists, setting):
        _KNOWN[block_mask] = known = _sync.Stamped(_sync.Stamp(lists, setting), _read(block_mask))
    return known.result


#: What was read from the lists of the BlockMasks in use.
_KNOWN: WeakKeyDictionary[BlockMask, _sync.Stamped[tuple[Tensor, Tensor | MaskMod]]] = WeakKeyDictionary()


def _read(block_mask: BlockMask) -> tuple[Tensor, Tensor | MaskMod]:
    """See :func:`from_block_mask`."""
    q_len, kv_len = block_mask.seq_lengths
    q_size, kv_size = block_mask.BLOCK_SIZE
    partial = _grid(block_mask.kv_num_blocks, block_mask.kv_indices, -(-kv_len // kv_size))
    full = torch.zeros_like(partial)
    if block_mask.full_kv_num_blocks is not None and block_mask.full_kv_indices is not None:
        full = _grid(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, full.shape[3])
    batch, heads, device = *partial.shape[:2], partial.device
    mod = block_mask.mask_mod

    def cells(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        own = b * int(batch > 1), h * int(heads > 1), q_idx // q_size, kv_idx // kv_size
        visible: Tensor = full[own] | vectorized(mod, b, h, q_idx, kv_idx)
        return visible

    if is_captured():
        count = batch * heads * q_len * kv_len
        if count > MAX_CELLS:
            raise LoweringError(
                f"a graph evaluates all {count} cells of a BlockMask on this backend; at most {MAX_CELLS} are possible. Give "
                "it a LoweredMask of flexmask.plan()"
            )
        b, h, q, kv = (torch.arange(size, device=device) for size in (batch, heads, q_len, kv_len))
        own = b.view(-1, 1, 1, 1), h.view(-1, 1, 1), (q // q_size).unsqueeze(-1), kv // kv_size
        visible = full[own] | (partial[own] & create_mask(mod, batch, heads, q_len, kv_len, device))
        return Rows.everything(kv_len, device).bounds, visible
    listed = runs((partial | full).flatten(0, 2)[:, None], full.shape[3])
    rows = torch.arange(q_len, device=device) // q_size
    ends = [(end.view(*partial.shape[:3], -1)[:, :, rows] * kv_size).clamp(max=kv_len) for end in (listed.lo, listed.hi)]
    return torch.stack(ends, -1), cells


def _grid(number: Tensor, indices: Tensor, width: int) -> Tensor:
    """The listed blocks as ``bool[B, H, q_blocks, kv_blocks]``."""
    listed = torch.arange(indices.shape[-1], device=indices.device) < number.unsqueeze(-1)
    at = torch.where(listed, indices.long(), width)  # unused entries go to a column that is cut off
    grid = torch.zeros((*number.shape, width + 1), dtype=torch.bool, device=indices.device)
    return grid.scatter_(-1, at, True)[..., :width]
