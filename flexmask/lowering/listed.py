"""The BlockMask class that lowerings make: torch's own, or before torch 2.14 a subclass that crops right."""

from __future__ import annotations

from typing import Any, Self, cast

import torch
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._pytree import register_pytree_node

from flexmask.blocks.entries import Listed
from flexmask.lowering.write_order import write_orders

__all__ = ["ListedBlockMask", "block_mask_type"]

#: Before 2.14 ``BlockMask._adjust``, to which torch's own error message sends, also reads the entries beyond ``num_blocks``,
#: which torch's documentation calls undefined.
READS_UNDEFINED = torch.__version__ < "2.14"


class ListedBlockMask(BlockMask):
    """A BlockMask that is cropped as torch 2.14 crops: by the first ``num_blocks`` entries of each row alone."""

    def _adjust(self, new_q_len: int, new_kv_len: int) -> Self:
        if getattr(self, "dq_kv_order", None) is not None:
            return super()._adjust(new_q_len, new_kv_len)  # which says that a tensor of an order cannot be adjusted
        height, width = (-(-length // size) for length, size in zip((new_q_len, new_kv_len), self.BLOCK_SIZE, strict=True))
        lists: dict[str, Any] = {}
        for kind in ("kv", "full_kv"):
            number, indices = getattr(self, f"{kind}_num_blocks"), getattr(self, f"{kind}_indices")
            if number is not None:
                lists[f"{kind}_num_blocks"], lists[f"{kind}_indices"] = _cropped((number, indices), height, width)
        options: dict[str, Any] = {
            "BLOCK_SIZE": self.BLOCK_SIZE,
            "mask_mod": self.mask_mod,
            "seq_lengths": (new_q_len, new_kv_len),
            "compute_q_blocks": self.q_indices is not None,
        }
        found = self.from_kv_blocks(**lists, **options)
        if getattr(self, "dq_write_order", None) is not None:
            partial: Any = found.q_num_blocks, found.q_indices
            full: Any = found.full_q_num_blocks, found.full_q_indices
            orders = write_orders(partial, None if full[0] is None else full, descending=bool(self.dq_kv_order_spt))
            found.__dict__.update(orders)
        return found

    def __getitem__(self, index: Any) -> Any:
        return _as_listed(super().__getitem__(index))

    def to(self, device: torch.device | str) -> BlockMask:
        """The same on another device."""
        return _as_listed(super().to(device))


if READS_UNDEFINED:  # so that it can be traced and exported by those who register torch's class in the same way
    register_pytree_node(
        ListedBlockMask,
        cast(Any, ListedBlockMask._flatten),
        cast(Any, ListedBlockMask._unflatten),
        flatten_with_keys_fn=cast(Any, ListedBlockMask._flatten_with_keys),
        serialized_type_name="flexmask.ListedBlockMask",
    )


def block_mask_type() -> type[BlockMask]:
    """The class of the BlockMasks that lowerings make."""
    return ListedBlockMask if READS_UNDEFINED else BlockMask


def _as_listed(made: BlockMask) -> ListedBlockMask:
    found = ListedBlockMask.__new__(ListedBlockMask)
    found.__dict__.update(made.__dict__)
    return found


def _cropped(listed: Listed, height: int, width: int) -> Listed:
    """The upper left corner of lists whose rows are in ascending order."""
    number, indices = listed[0][..., :height], listed[1][..., :height, :width]
    defined = torch.arange(indices.shape[-1], device=indices.device) < number.unsqueeze(-1)
    return (defined & (indices < width)).sum(-1).to(torch.int32), indices
