"""Plans for torch's own context parallelism, ``torch.distributed.tensor.experimental._context_parallel``.

There each rank gathers the keys and values of all ranks, so that keys are in the order of the ranks' shards. Its names are
private, and the same in torch 2.11 to 2.15.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexmask.blocks.classify import classify, decide_open
from flexmask.blocks.grid import BlockGrid
from flexmask.distributed.sharding import Sharding, positions_of
from flexmask.errors import LoweringError
from flexmask.intervals.bounds import analyze
from flexmask.intervals.context import Context
from flexmask.lowering.block_lists import grid_lists
from flexmask.lowering.block_mask import block_sizes, from_lists
from flexmask.lowering.mask_mod import mask_mod

MODULE = "torch.distributed.tensor.experimental._context_parallel._load_balancer"


def load_balancer(sharding: Sharding, device: torch.device) -> Any:
    """The shards of a plan as a ``_LoadBalancer`` of torch, for ``_context_parallel_shard``, ``context_parallel_unshard``, ...

    All masks of the plan count, where torch's own ``_PTRRLoadBalancer`` counts the blocks of one.

    Args:
        sharding: the plan, in which all ranks have as many tokens.
        device: of the tensors that are sharded.

    Raises:
        LoweringError: ranks have different numbers of tokens, or this version of torch has no such class.
    """
    _check_equal(sharding)
    try:
        base: Any = import_module(MODULE)._LoadBalancer
    except (ImportError, AttributeError):
        raise LoweringError(
            f"torch {torch.__version__} has no {MODULE}._LoadBalancer, which torch 2.11 to 2.15 have; use "
            "flexmask.distributed.ContextParallel, which needs none"
        ) from None
    order = positions_of(sharding._held.intervals).to(device).unsqueeze(0)

    class ShardingLoadBalancer(base):  # type: ignore[misc]  # found when it is called
        def _generate_indices(self, restore: bool = False) -> Tensor:
            """The order of the tokens in all shards, ``int64[1, seq_len]``, or what undoes it."""
            return order.argsort() if restore else order

    return ShardingLoadBalancer()


def gathered_block_mask(sharding: Sharding, context: Context, rank: int, block_size: int | tuple[int, int]) -> BlockMask:
    """The BlockMask of a rank: its queries, by the keys of all ranks in the order of their shards.

    What torch's ``_create_cp_block_mask`` makes, for any block size and without the cells of the mask.

    Args:
        sharding: the plan, in which all ranks have as many tokens, in runs of whole blocks.
        context: the lowering context of the mask of a layer, for the whole sequence.
        rank: the rank, from 0 up.
        block_size: tokens in a block, or the pair (queries, keys).

    Raises:
        LoweringError: ranks have different numbers of tokens, or blocks that are divided between ranks.
    """
    _check_equal(sharding)
    sizes, runs, held = block_sizes(block_size), sharding.runs(rank), sharding._held.intervals
    edge = next((edge for edge in held.flatten().tolist() if edge % sizes[0] or edge % sizes[1]), None)
    if edge is not None:
        raise LoweringError(
            f"blocks of {sizes[0]} queries and {sizes[1]} keys are divided between ranks at position {edge}: plan with this "
            f"block_size and with a seq_len that is a multiple of {sharding.ranks} ranks times the block size, at least 4 "
            "blocks for each rank"
        )
    found = []
    for start, stop in runs.tolist():
        part = context.of_queries(start, stop)
        grid = BlockGrid(part, *sizes)
        blocks = decide_open(classify(analyze(part), grid), grid)
        shape = part.batch, part.heads, grid.q_blocks, grid.kv_blocks
        found.append([kind.expand(shape) for kind in (blocks.partial, blocks.full)])
    order = positions_of(held).to(context.device)
    column = order[:: sizes[1]].div(sizes[1], rounding_mode="floor")
    grids = [torch.cat(parts, 2)[..., column] for parts in zip(*found, strict=True)]
    everywhere, tokens = mask_mod(context), len(order) // sharding.ranks
    own = order[rank * tokens : (rank + 1) * tokens]

    def of_shards(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return everywhere(b, h, own[q_idx], order[kv_idx])

    return from_lists(grid_lists(grids, context.full_batch, None), of_shards, (tokens, len(order)), sizes)


def _check_equal(sharding: Sharding) -> None:
    least, most = int(sharding.tokens.min()), int(sharding.tokens.max())
    if least < most:
        raise LoweringError(
            f"torch's context parallelism needs as many tokens on each rank, and this plan has {least} to {most}: make seq_len a "
            f"multiple of {sharding.ranks} ranks times the block size, or use flexmask.distributed.ContextParallel"
        )
