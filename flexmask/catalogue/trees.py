"""Masks of trees: shared prefixes packed once, trees of drafts, and the training of draft models."""

from __future__ import annotations

from itertools import accumulate
from typing import Any, cast

from flexmask.catalogue.arguments import fixed_int, int_or_index, lookup, of_rows, per_sequence
from flexmask.errors import ExpressionError, OperandError
from flexmask.expr.data import Data, along, as_table
from flexmask.expr.index import Index, b, kv, maximum, minimum, q
from flexmask.expr.mask import Mask, Or
from flexmask.expr.packing import document_ids, subtree_ends
from flexmask.expr.tables import Literal, Param, Table
from flexmask.registry import named

__all__ = ["draft_anchors", "draft_blocks", "prefix_tree", "training_time_test", "tree"]

#: Each training step adds a condition.
MAX_STEPS = 1024


@named
def prefix_tree(
    end: Data | None = None,
    *,
    order: Data | None = None,
    position_ids: Data | None = None,
    lengths: Data | None = None,
    parents: Data | None = None,
) -> Mask:
    """The tokens of trees of prefixes, each packed once, attend to their ancestors and themselves.

    Predicate: ``(kv <= q) & (q < end[b, kv])`` with the first position behind the subtree of each token, or with ``order``
    ``(order[b, kv] <= order[b, q]) & (order[b, q] < end[b, kv])``

    ``prefix_tree(lengths=[2, 1, 2], parents=[-1, 0, 0])`` at 5 x 5::

        ■ ⬚ ⬚ ⬚ ⬚
        ■ ■ ⬚ ⬚ ⬚
        ■ ■ ■ ⬚ ⬚
        ■ ■ ⬚ ■ ⬚
        ■ ■ ⬚ ■ ■

    A row holds one tree or several in depth-first order: a token, then all that continue it, one after another. So the samples
    ``ABC``, ``ABDE`` and ``F`` are ``A B C D E F``. Each token is at the position that it has in its samples, its depth:
    :func:`flexmask.packing.pack_prefixes` gives the tokens and positions of samples.

    Args:
        end: for each token the first position behind its subtree, ``[S]`` or ``[B, S]``; for padding at most its own position,
            e.g. 0: it is masked out.
        order: for tokens in another order, e.g. level by level, the place of each in depth-first order, ``[S]`` or ``[B, S]``,
            with ``end``, which counts these places too. Padding has ends up to its own places, and these are behind all trees.
        position_ids: instead of ends, the depth of each token in its tree, from 0, ``[S]`` or ``[B, S]``. A token continues the
            last one before it that is one depth above.
        lengths: instead of ends, the tokens of each segment between two branchings as a list ``[n]`` or ``[B, n]``, with
            ``parents``. Tokens behind the last segment are padding.
        parents: the segment that each segment continues, a list like ``lengths``; below 0 for the root of a tree.

    A window counts by depth: ``& (table(depth)[kv] > table(depth)[q] - size)``. In ``sliding_window`` other branches count.

    Raises:
        ExpressionError: not exactly one of ``end``, ``position_ids`` and ``lengths``, lengths without parents, an order without
            ends, or segments that are not in depth-first order.
        LoweringError: depths that do not begin with 0, or rise by more than 1.
        OperandError: ``lengths`` or ``parents`` is no list.

    Source: prefix trees of verl, https://github.com/volcengine/verl, and of TRL; tree training, https://arxiv.org/abs/2511.00413
    """
    sources = {"end": end, "position_ids": position_ids, "lengths": lengths}
    given = [name for name, data in sources.items() if data is not None]
    if order is not None and given != ["end"]:
        raise ExpressionError(f"prefix_tree: order= goes with end=, got {' and '.join(given) or 'no end'}")
    if len(given) != 1 or (lengths is None) != (parents is None):
        got = ", ".join(given + ["parents"] * (parents is not None)) or "none"
        raise ExpressionError(f"prefix_tree: give exactly one of end, position_ids, and lengths with parents; got {got}")
    if lengths is not None:
        ends = _segment_ends(lengths, parents)
        segment = along(document_ids(lengths=lengths, padding=True), kv)
        return (kv <= q) & (segment >= 0) & (q < along(ends, maximum(segment, 0)))
    if position_ids is not None:
        return (kv <= q) & (q < along(subtree_ends(position_ids), kv))
    behind = lookup(cast("Data", end), "prefix_tree: end", "[S] or [B, S]", (b, kv), (kv,))
    if order is None:
        return (kv <= q) & (q < behind)
    key, query = (lookup(order, "prefix_tree: order", "[S] or [B, S]", (b, at), (at,)) for at in (kv, q))
    return (key <= query) & (query < behind)


def _segment_ends(lengths: Any, parents: Any) -> Table:
    """The first position behind the subtree of each segment, a table like ``lengths``."""
    for name, data in (("lengths", lengths), ("parents", parents)):
        if not isinstance(data, Literal) or data.truth or len(data.size) not in (1, 2):
            raise OperandError(
                f"prefix_tree: {name} must be a list of integers [n] or [B, n]: write tensor.tolist(), or give position_ids=, "
                "which may be a parameter of a plan"
            )
    if lengths.size != parents.size:
        raise ExpressionError(
            f"prefix_tree: lengths and parents are of the same segments, but have the shapes {list(lengths.size)} and "
            f"{list(parents.size)}"
        )
    return of_rows([*map(_ends_of_row, lengths.rows(), parents.rows())], lengths, "prefix_tree: lengths")


def _ends_of_row(lengths: list[int], parents: list[int]) -> list[int]:
    ends = list(accumulate(lengths))
    path: list[int] = []  # the segments from the root down to the last one
    for segment, parent in enumerate(parents):
        while path and path[-1] != parent:
            path.pop()
        if not path and parent >= 0:
            raise ExpressionError(
                f"prefix_tree: segments must be in depth-first order, each after its parent and what continues that, but segment "
                f"{segment} has the parent {parent}"
            )
        for above in path:
            ends[above] = ends[segment]
        path.append(segment)
    return ends


@named
def tree(ancestors: Data | None = None, *, parents: Data | None = None, prefix: Data = 0) -> Mask:
    """The nodes of a tree of drafts attend to the prefix, their ancestors and themselves.

    Predicate: ``(kv < prefix[b]) | ancestors[b, q, kv - prefix[b]]``

    ``tree(parents=[-1, 0, 0, 1], prefix=2)`` at 4 x 6::

        ■ ■ ■ ⬚ ⬚ ⬚
        ■ ■ ■ ■ ⬚ ⬚
        ■ ■ ■ ⬚ ■ ⬚
        ■ ■ ■ ■ ⬚ ■

    ``tree(ancestors=[[True, False], [True, True]])`` at 2 x 2::

        ■ ⬚
        ■ ■

    Args:
        ancestors: ``bool[N, N]`` or ``bool[B, N, N]``, True where node ``j`` is an ancestor of node ``i`` or ``i`` itself; or
            0 and 1. The queries are the ``N`` nodes; the keys are the prefix and then the nodes.
        parents: instead of ancestors, the parent of each node as a list ``[N]`` or ``[B, N]``, below 0 for a root. A parent
            comes before its children.
        prefix: tokens before the tree, an int or ``int[B]``. Any number is a mask, so that a wrong one is no error. Keys after
            the nodes are masked out.

    A window counts by depth, where node ``q`` is at position ``prefix + depth[q]``:
    ``tree(parents=parents, prefix=prefix) & (kv > prefix + table(depth)[q] - size)`` if no node is deeper than ``size - 1``.
    In ``sliding_window`` siblings count as distance.

    Raises:
        ExpressionError: not exactly one of ``ancestors`` and ``parents``, or a parent after its child.
        OperandError: ``parents`` is no list, or ``ancestors`` has values other than truth values, 0 and 1.

    Source: SpecInfer, https://arxiv.org/abs/2305.09781; ``generate_jetspec_tree_causal_mask_mod`` of attention-gym.
    """
    if (ancestors is None) == (parents is None):
        got = "neither" if parents is None else "both"
        raise ExpressionError(f"tree: give exactly one of ancestors and parents; got {got}")
    start = per_sequence(prefix, "tree: prefix")
    node: Index = kv - start
    if isinstance(data := ancestors if parents is None else parents, Param):
        return (kv < start) | (data[q, maximum(node, 0)] != 0)
    spans = None if parents is None else _spans(parents)
    table = as_table(ancestors, "tree: ancestors") if spans is None else spans[0]
    count = (table.shape and table.shape[-1]) or 1
    at = maximum(minimum(node, count - 1), 0)
    if spans is None:
        seen = lookup(table, "tree: ancestors", "[N, N] or [B, N, N]", (q, at), (b, q, at), truth="an ancestor") != 0
    else:
        first, behind = spans
        seen = (along(first, at) <= along(first, q)) & (along(first, q) < along(behind, at))
    return (kv < start) | (seen & (node >= 0) & (node < count))


def _spans(parents: Any) -> tuple[Table, Table]:
    """The place of each node when the tree is walked depth first, and the place behind the last node below it.

    One node is an ancestor of another where its span holds the place of the other, so that no table of all pairs is needed.
    """
    if not isinstance(parents, Literal) or parents.truth or len(parents.size) not in (1, 2):
        raise OperandError(
            "tree: parents must be a list of integers [N] or [B, N]; write tensor.tolist(), or give ancestors=, which may be a "
            "parameter of a plan"
        )
    first, behind = zip(*map(_walked, parents.rows()), strict=True)
    return of_rows(first, parents, "tree: parents"), of_rows(behind, parents, "tree: parents")


def _walked(parents: list[int]) -> tuple[list[int], list[int]]:
    wrong = next((node for node, parent in enumerate(parents) if parent >= node), None)
    if wrong is not None:
        raise ExpressionError(f"tree: a parent stands before its children, but node {wrong} has the parent {parents[wrong]}")
    sizes = [1] * len(parents)
    for node in reversed(range(len(parents))):
        if parents[node] >= 0:
            sizes[parents[node]] += sizes[node]
    first: list[int] = []
    free = {-1: 0}  # the place of the next child of each node, and of the next root
    for node, (parent, size) in enumerate(zip(parents, sizes, strict=True)):
        above = max(parent, -1)
        first.append(free[above])
        free[above], free[node] = free[above] + size, free[above] + 1
    return first, [place + size for place, size in zip(first, sizes, strict=True)]


@named
def draft_blocks(prefix: Data, size: Index | int) -> Mask:
    """Training of a draft head: the tokens of each block see the prefix, and their own block causally.

    Predicate: ``(kv < prefix[b]) | (((kv - prefix[b]) // size == q // size) & (kv - prefix[b] <= q))``

    ``draft_blocks(prefix=2, size=2)`` at 4 x 6 and 2 x 4::

        ■ ■ ■ ⬚ ⬚ ⬚     ■ ■ ■ ⬚
        ■ ■ ■ ■ ⬚ ⬚     ■ ■ ■ ■
        ■ ■ ⬚ ⬚ ■ ⬚
        ■ ■ ⬚ ⬚ ■ ■

    Args:
        prefix: tokens before the blocks among the keys, an int or ``int[B]``. The queries are the blocks alone.
        size: tokens in a block.

    Raises:
        ExpressionError: a size below 1, or a negative prefix.

    Source: JetSpec, https://arxiv.org/abs/2606.18394; ``generate_jetspec_training_mask_mod`` of attention-gym.
    """
    start, n = per_sequence(prefix, "draft_blocks: prefix"), int_or_index(size, "draft_blocks: size", 1)
    own: Index = kv - start
    return (kv < start) | ((own // n == q // n) & (own <= q))


@named
def draft_anchors(anchors: Data, size: Index | int, *, context: Index | int) -> Mask:
    """Training of block drafts: each block attends to the context before its anchor, and to all of itself.

    Predicate: ``(anchor >= 0) & (((kv < context) & (kv < anchor)) | ((kv - context) // size == q // size))`` with
    ``anchor = anchors[b, q // size]``

    ``draft_anchors(anchors=[1, 3], size=2, context=4)`` at 4 x 8 and 2 x 8::

        ■ ⬚ ⬚ ⬚ ■ ■ ⬚ ⬚     ■ ⬚ ⬚ ⬚ ■ ■ ⬚ ⬚
        ■ ⬚ ⬚ ⬚ ■ ■ ⬚ ⬚     ■ ⬚ ⬚ ⬚ ■ ■ ⬚ ⬚
        ■ ■ ■ ⬚ ⬚ ⬚ ■ ■
        ■ ■ ■ ⬚ ⬚ ⬚ ■ ■

    Args:
        anchors: the position in the context that each block continues, ``[n]`` or ``[B, n]``; below 0 for a block that is not
            used, which is fully masked.
        size: tokens in a block.
        context: tokens of the context among the keys, before the blocks. The queries are the blocks alone.

    Raises:
        ExpressionError: a size below 1, or a negative context.

    Source: DFlash, https://arxiv.org/abs/2602.06036
    """
    n, total = int_or_index(size, "draft_anchors: size", 1), int_or_index(context, "draft_anchors: context")
    anchor = lookup(anchors, "draft_anchors: anchors", "[n] or [B, n]", (q // n,), (b, q // n))
    return (anchor >= 0) & (((kv < total) & (kv < anchor)) | ((kv - total) // n == q // n))


@named
def training_time_test(length: Index | int, steps: int) -> Mask:
    """Training on a draft model's own predictions: causal over the sequence, and a query's own token in each later step.

    Predicate: ``((kv < length) & (kv <= q)) | (kv == q + length) | ... | (kv == q + steps * length)``

    ``training_time_test(length=3, steps=1)`` at 3 x 6 and 3 x 3::

        ■ ⬚ ⬚ ■ ⬚ ⬚     ■ ⬚ ⬚
        ■ ■ ⬚ ⬚ ■ ⬚     ■ ■ ⬚
        ■ ■ ■ ⬚ ⬚ ■     ■ ■ ■

    Args:
        length: tokens of the sequence.
        steps: steps after the first, each of which appends ``length`` keys.

    Raises:
        ExpressionError: a length below 1, a negative number of steps, or more than 1,024 of them.

    Source: EAGLE-3, https://arxiv.org/abs/2503.01840
    """
    n = int_or_index(length, "training_time_test: length", 1)
    later = [kv == q + n * step for step in range(1, fixed_int(steps, "training_time_test: steps", most=MAX_STEPS) + 1)]
    return Or.make((((kv < n) & (kv <= q)), *later))
