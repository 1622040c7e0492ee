"""attention-gym's masks for drafts of several tokens at once, and for block diffusion."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flexmask.errors import ExpressionError
from flexmask.expr import Index
from flexmask.registry import named
from flexmask_attention_gym.generators import MaskMod, generated, positive, tensor, truths

if TYPE_CHECKING:
    from flexmask.expr import Data

__all__ = ["gym_block_diffusion", "gym_jetspec_training", "gym_jetspec_tree"]


@named
@generated
def gym_jetspec_tree(ancestors: Data | None = None, *, parents: Data | None = None, prefix: Index | int = 0) -> MaskMod:
    """The nodes of a tree of drafts see the prefix, their ancestors and themselves.

    Predicate: ``(kv < prefix) | ((kv < prefix + N) & ancestors[q, kv - prefix])``

    ``gym_jetspec_tree(parents=[-1, 0, 0, 1], prefix=2)`` at 4 x 6::

        ■ ■ ■ ⬚ ⬚ ⬚
        ■ ■ ■ ■ ⬚ ⬚
        ■ ■ ■ ⬚ ■ ⬚
        ■ ■ ■ ■ ⬚ ■

    Args:
        ancestors: ``bool[N, N]``, True where node ``j`` is an ancestor of node ``i`` or ``i`` itself; or 0 and 1. The queries are
            the ``N`` nodes; the keys are the prefix and then the nodes.
        parents: instead of ancestors, the parent of each node, ``[N]``; a parent stands before its children, and the first
            node is the root. attention-gym's ``parent_indices``.
        prefix: tokens before the tree. attention-gym's ``prefix_length``.

    Raises:
        ExpressionError: not exactly one of ``ancestors`` and ``parents``, or a parent after its child.

    Source: ``generate_jetspec_tree_causal_mask_mod`` of attention-gym, after JetSpec, https://arxiv.org/abs/2606.18394
    """
    from attn_gym.masks import build_tree_ancestor_matrix, generate_jetspec_tree_causal_mask_mod

    if (ancestors is None) == (parents is None):
        raise ExpressionError("gym_jetspec_tree: give exactly one of ancestors and parents")
    if parents is None:
        matrix = truths(ancestors, "gym_jetspec_tree: ancestors", "[N, N]")
    else:
        values = tensor(parents, "gym_jetspec_tree: parents", "[N]")
        nodes: list[int] = values.tolist()
        late = [node for node, parent in enumerate(nodes[1:], start=1) if not 0 <= parent < node]
        if late:
            raise ExpressionError(f"gym_jetspec_tree: the parent of node {late[0]} must stand before it, got {nodes[late[0]]}")
        matrix = build_tree_ancestor_matrix(nodes, device=values.device)
    return generate_jetspec_tree_causal_mask_mod(positive(prefix, "gym_jetspec_tree: prefix", 0), matrix)


@named
@generated
def gym_jetspec_training(prefix: Index | int, size: Index | int) -> MaskMod:
    """Training of drafts: each block of tokens sees the prefix, and itself causally.

    Predicate: ``(kv < prefix) | ((q // size == (kv - prefix) // size) & ((kv - prefix) % size <= q % size))``

    ``gym_jetspec_training(prefix=2, size=2)`` at 4 x 6::

        ■ ■ ■ ⬚ ⬚ ⬚
        ■ ■ ■ ■ ⬚ ⬚
        ■ ■ ⬚ ⬚ ■ ⬚
        ■ ■ ⬚ ⬚ ■ ■

    Args:
        prefix: tokens before the blocks. attention-gym's ``prefix_length``.
        size: tokens in a block with its anchor. The queries are the blocks, the keys the prefix and then the blocks.

    Source: ``generate_jetspec_training_mask_mod`` of attention-gym, after JetSpec, https://arxiv.org/abs/2606.18394
    """
    from attn_gym.masks import generate_jetspec_training_mask_mod

    block = positive(size, "gym_jetspec_training: size")
    return generate_jetspec_training_mask_mod(positive(prefix, "gym_jetspec_training: prefix", 0), block)


@named
@generated
def gym_block_diffusion(length: Index | int, size: Index | int) -> MaskMod:
    """Training of block diffusion: noised tokens, then as many clean ones.

    Predicate: with ``block = (position % length) // size``, noised queries (``q < length``) see noised keys of their own block
    and clean keys of earlier blocks, clean queries see clean keys of their own block and earlier ones

    ``gym_block_diffusion(length=4, size=2)`` at 8 x 8::

        ■ ■ ⬚ ⬚ ⬚ ⬚ ⬚ ⬚
        ■ ■ ⬚ ⬚ ⬚ ⬚ ⬚ ⬚
        ⬚ ⬚ ■ ■ ■ ■ ⬚ ⬚
        ⬚ ⬚ ■ ■ ■ ■ ⬚ ⬚
        ⬚ ⬚ ⬚ ⬚ ■ ■ ⬚ ⬚
        ⬚ ⬚ ⬚ ⬚ ■ ■ ⬚ ⬚
        ⬚ ⬚ ⬚ ⬚ ■ ■ ■ ■
        ⬚ ⬚ ⬚ ⬚ ■ ■ ■ ■

    Args:
        length: clean tokens; the sequence is twice as long. attention-gym's ``seq_len``.
        size: tokens in a block. attention-gym's ``block_size``.

    Source: ``generate_block_diffusion_mask`` of attention-gym, after BD3-LM, https://arxiv.org/abs/2503.09573
    """
    from attn_gym.masks import generate_block_diffusion_mask

    clean = positive(length, "gym_block_diffusion: length")
    return generate_block_diffusion_mask(clean, positive(size, "gym_block_diffusion: size"))
