"""The BlockMask lowering: which blocks FlexAttention's kernels compute with ``mask_mod``, and which without it.

For the deterministic backward pass also the order in which key blocks add to the gradient of a query block.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Self, cast

import torch
from torch import Tensor
from torch.nn.attention import flex_attention
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._pytree import register_pytree_node

from flexmask import _sync
from flexmask._checks import check_flag, checked_int
from flexmask.blocks.classify import S, Strategy, classify, decide_open
from flexmask.blocks.grid import BlockGrid
from flexmask.blocks.layout import rank_in_row
from flexmask.blocks.sparse import BlockSets
from flexmask.errors import LoweringError, OperandError
from flexmask.intervals.bounds import RowBounds, analyze
from flexmask.intervals.context import MAX_LENGTH, Context
from flexmask.lowering.block_lists import BlockList, grid_lists, interval_lists, most_above, no_lists, pack, run_lists
from flexmask.lowering.mask_mod import Form, MaskMod, mask_mod

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


#: Blocks of a mask up to which each list of its BlockMask has room for all of them, on the CPU and elsewhere. Then the lists'
#: strides follow from the lengths, so that a compiled kernel serves every mask. Beyond, lists are packed.
MAX_ROOM = _sync.PerDevice(cpu=2**20, elsewhere=2**22)
#: Blocks up to which a grid is better than intervals: on the CPU while it is faster; elsewhere wherever there is room, since
#: the sizes of a grid depend on no data, so that there is no host sync.
MAX_GRID = _sync.PerDevice(cpu=2**16, elsewhere=2**22)
#: The fields of a BlockMask that hold its lists, in the order of :func:`block_lists`.
FIELDS = [(f"{kind}_num_blocks", f"{kind}_indices") for kind in ("kv", "q", "full_kv", "full_q")]


def block_mask(
    context: Context,
    block_size: int | tuple[int, int] = 128,
    form: Form | MaskMod = "auto",
    *,
    separate_full_blocks: bool = True,
    heads: int | None = None,
) -> BlockMask:
    """The mask of a lowering context as a BlockMask: see :meth:`flexmask.Mask.block_mask`.

    Args:
        context: the lowering context.
        block_size: tokens in a block, or the pair (queries, keys).
        form: the form of its ``mask_mod``, or a ``mask_mod`` that computes the same mask.
        separate_full_blocks: whether full blocks have lists of their own.
        heads: H of the BlockMask where the mask is the same for all heads; None for 1.

    Raises:
        OperandError: ``block_size`` or ``separate_full_blocks`` has another type.
        LoweringError: ``block_size`` is less than 1 or too large, or the mask does not have the ``form``.
    """
    sizes = block_sizes(block_size)
    check_flag(separate_full_blocks, "separate_full_blocks")
    bounds = analyze(context)
    lists = block_lists(bounds, context, sizes, heads, separate=separate_full_blocks)
    if heads is not None:
        lists = [(number.expand(-1, heads, -1), indices.expand(-1, heads, -1, -1)) for number, indices in lists]
    mod = form if callable(form) else mask_mod(context, form, bounds)
    return from_lists(lists, mod, (context.q_len, context.kv_len), sizes)


def from_lists(lists: Sequence[BlockList], mod: MaskMod, lengths: tuple[int, int], sizes: tuple[int, int]) -> BlockMask:
    """The BlockMask with the lists of :func:`block_lists` and a ``mask_mod``."""
    fields: dict[str, Any] = {"BLOCK_SIZE": sizes, "mask_mod": mod}
    for names, block_list in zip(FIELDS, [*lists, (None, None), (None, None)], strict=False):
        fields.update(zip(names, block_list, strict=True))
    return BLOCK_MASK_TYPE(lengths, **fields)


def block_count(context: Context, sizes: tuple[int, int]) -> int:
    """The number of blocks over all sequences and all heads that differ."""
    return context.full_batch * context.heads * -(-context.q_len // sizes[0]) * -(-context.kv_len // sizes[1])


def block_lists(
    bounds: RowBounds, context: Context, sizes: tuple[int, int], heads: int | None = None, *, separate: bool = True
) -> list[BlockList]:
    """The lists ``kv`` and ``q``, and if full blocks are separate ``full_kv`` and ``full_q``, with B of the whole batch."""
    # CUDA kernels read the stride of heads alone and multiply it by the number of heads for the stride of sequences. So equal
    # heads share memory only where there is one sequence.
    batch = context.full_batch
    repeated = heads if batch > 1 else None
    grid, rows = BlockGrid(context, *sizes), bounds.upper
    count = block_count(context, sizes)
    # A block row that reaches beyond the last query has no full block. The blocks of one key interval of all queries are one run.
    if not grid.may_have_full_blocks and bounds.exact and rows.slots == rows.lo.shape[2] == 1 and count <= MAX_ROOM.on(rows.lo):
        lists = run_lists(*grid.touched_ends(rows), batch, repeated, grid.kv_blocks)
        return lists + no_lists(lists) if separate else lists
    if count > MAX_GRID.on(rows.lo):
        packed = count > MAX_ROOM.on(rows.lo)
        return interval_lists(_listed_sets(bounds, BlockSets(context, *sizes), separate), batch, repeated, packed=packed)
    if grid.may_have_full_blocks:
        return grid_lists(_listed_sets(bounds, grid, separate), batch, repeated)
    lists = grid_lists(_listed_sets(bounds, grid, separate)[:1], batch, repeated)
    return lists + no_lists(lists) if separate else lists


def _listed_sets(bounds: RowBounds, strategy: Strategy[S], separate: bool) -> list[S]:
    """The sets of blocks that have lists of their own."""
    blocks = decide_open(classify(bounds, strategy), strategy)
    return [blocks.partial, blocks.full] if separate else [blocks.partial | blocks.full]


def block_sizes(block_size: int | tuple[int, int]) -> tuple[int, int]:
    """The block size as the pair (queries, keys).

    Raises:
        OperandError: it is not an int or a pair of ints.
        LoweringError: it is less than 1, or more than a length can be.
    """
    wanted = "an int or a pair (queries, keys)"
    pair = block_size if isinstance(block_size, tuple | list) else (block_size, block_size)
    if len(pair) != 2:
        raise OperandError(f"block_size must be {wanted}, got {block_size!r}")
    q_size, kv_size = (checked_int(size, "block_size", 1, MAX_LENGTH, LoweringError, wanted) for size in pair)
    return q_size, kv_size


# ---------------------------------------------------------------- the deterministic backward pass


def check_write_order(is_asked: bool, dq_kv_order: object) -> None:
    """Checks the arguments of :func:`flexmask.create_block_mask` for an order.

    Raises:
        OperandError: one of them is no truth value.
        LoweringError: an order is asked for, and the BlockMask of this torch does not hold one.
    """
    check_flag(is_asked, "compute_dq_write_order")
    check_flag(dq_kv_order, "dq_kv_order")
    if is_asked and "compute_dq_write_order" not in inspect.signature(flex_attention.create_block_mask).parameters:
        raise LoweringError(
            f"compute_dq_write_order=True needs a BlockMask that holds the order; that of torch {torch.__version__} does not: "
            "install torch 2.13 or newer, or leave it out"
        )


def add_write_order(made: BlockMask, *, descending: bool) -> None:
    """Sets ``dq_write_order`` of a BlockMask, and ``dq_write_order_full`` where full blocks have lists of their own.

    For each query block in a list of a key block it is the rank of the key block among those of the query block, ``int32`` in
    the shape of ``q_indices``; 0 beyond ``num_blocks``. Takes time that follows the number of listed blocks, and a host sync on
    a GPU to count them.

    Args:
        made: the BlockMask, with ``q_num_blocks`` and ``q_indices``.
        descending: whether the last key block comes first.
    """
    lists: Any = [(made.q_num_blocks, made.q_indices), (made.full_q_num_blocks, made.full_q_indices)]
    lists = [(number, indices) for number, indices in lists if number is not None]
    heads = lists[0][0].shape[1]
    if all(number.stride(1) == 0 for number, _ in lists):  # heads that share their lists share the order
        lists = [(number[:, :1], indices[:, :1]) for number, indices in lists]
    orders = [order.expand(-1, heads, -1, -1) for order in _write_orders(lists, descending)]
    made.__dict__.update(
        dq_write_order=orders[0], dq_write_order_full=orders[1] if len(orders) > 1 else None, dq_kv_order_spt=descending
    )


def _write_orders(lists: list[BlockList], descending: bool) -> list[Tensor]:
    """The ranks in each list."""
    kv_blocks, q_blocks = lists[0][1].shape[-2:]
    members = [_members(*block_list) for block_list in lists]
    kv_row, _, q_column = (torch.cat(parts) for parts in zip(*members, strict=True))
    q_row = kv_row // kv_blocks * q_blocks + q_column
    order = (q_row * kv_blocks + kv_row % kv_blocks).argsort()
    count = torch.bincount(q_row, minlength=lists[0][0].shape[:-1].numel() * q_blocks)
    rank = torch.empty_like(q_row)
    rank[order] = rank_in_row(q_row[order], count)
    if descending:
        rank = count[q_row] - 1 - rank
    sizes = [row.numel() for row, _, _ in members]
    parts = zip(lists, members, rank.to(torch.int32).split(sizes), strict=True)
    return [
        pack(values, row, place, indices.shape, _pitch(number, indices)) for (number, indices), (row, place, _), values in parts
    ]


def _members(number: Tensor, indices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The members of a list in order: the row, the rank in the row, and the member."""
    count = number.flatten().long()
    row = torch.repeat_interleave(count, output_size=int(count.sum()))
    rank = rank_in_row(row, count)
    return row, rank, indices[(*torch.unravel_index(row, number.shape), rank)].long()


def _pitch(number: Tensor, indices: Tensor) -> int:
    """The distance of rows in storage for values of a list: packed where the list is."""
    return indices.shape[-1] if indices.is_contiguous() else most_above(number)
