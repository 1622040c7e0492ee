"""The BlockMask class of the lowerings: torch's own, or before torch 2.14 a subclass that crops by defined indices alone."""

from __future__ import annotations

from typing import Any, Self, cast

import torch
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._pytree import register_pytree_node

from flexmask.lowering.block_lists import BlockList
from flexmask.lowering.write_order import add_write_order

#: Before 2.14 ``BlockMask._adjust``, which torch's own error message recommends, also reads the indices beyond ``num_blocks``,
#: which torch's documentation calls undefined.
READS_UNDEFINED = torch.__version__ < "2.14"


class CroppableBlockMask(BlockMask):
    """A BlockMask that is cropped as torch 2.14 crops: by the first ``num_blocks`` entries of each row alone."""

    def _adjust(self, new_q_len: int, new_kv_len: int) -> Self:
        if getattr(self, "dq_kv_order", None) is not None:
            return super()._adjust(new_q_len, new_kv_len)  # which raises: the order of a tensor cannot be adjusted
        height, width = (-(-length // size) for length, size in zip((new_q_len, new_kv_len), self.BLOCK_SIZE, strict=True))
        lists: dict[str, Any] = {}
        for kind in ("kv", "full_kv"):
            number, indices = getattr(self, f"{kind}_num_blocks"), getattr(self, f"{kind}_indices")
            if number is not None:
                lists[f"{kind}_num_blocks"], lists[f"{kind}_indices"] = _crop((number, indices), height, width)
        options: dict[str, Any] = {
            "BLOCK_SIZE": self.BLOCK_SIZE,
            "mask_mod": self.mask_mod,
            "seq_lengths": (new_q_len, new_kv_len),
            "compute_q_blocks": self.q_indices is not None,
        }
        cropped = self.from_kv_blocks(**lists, **options)
        if getattr(self, "dq_write_order", None) is not None:
            add_write_order(cropped, descending=bool(self.dq_kv_order_spt))
        return cropped

    def __getitem__(self, index: Any) -> Any:
        return _as_croppable(super().__getitem__(index))

    def to(self, device: torch.device | str) -> BlockMask:
        """The BlockMask on another device."""
        return _as_croppable(super().to(device))


if READS_UNDEFINED:  # so that code that registers torch's class for tracing and export works with this class
    register_pytree_node(
        CroppableBlockMask,
        cast(Any, CroppableBlockMask._flatten),
        cast(Any, CroppableBlockMask._unflatten),
        flatten_with_keys_fn=cast(Any, CroppableBlockMask._flatten_with_keys),
        serialized_type_name="flexmask.CroppableBlockMask",
    )


#: The class of the BlockMasks that lowerings make.
BLOCK_MASK_TYPE: type[BlockMask] = CroppableBlockMask if READS_UNDEFINED else BlockMask


def _as_croppable(block_mask: BlockMask) -> CroppableBlockMask:
    croppable = CroppableBlockMask.__new__(CroppableBlockMask)
    croppable.__dict__.update(block_mask.__dict__)
    return croppable


def _crop(block_list: BlockList, height: int, width: int) -> BlockList:
    """The list of the upper left corner, given a list whose rows are in ascending order."""
    number, indices = block_list[0][..., :height], block_list[1][..., :height, :width]
    defined = torch.arange(indices.shape[-1], device=indices.device) < number.unsqueeze(-1)
    return (defined & (indices < width)).sum(-1).to(torch.int32), indices
