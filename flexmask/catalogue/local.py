"""Local positions: a mask within parts of a sequence, where its positions count from the start of each part."""

from __future__ import annotations

from typing import cast

from flexmask.errors import OperandError
from flexmask.expr.index import Arithmetic, Index, kv, q
from flexmask.expr.mask import Compare, Mask
from flexmask.expr.node import Node
from flexmask.expr.tables import Lookup

__all__ = ["with_local_positions"]


def with_local_positions(name: str, mask: Mask, queries: Index, near: Index, keys: Index) -> Mask:
    """``mask`` at positions that count from the start of a part; it holds where query and key are in one part.

    Args:
        name: the mask that asks, for messages.
        mask: the mask to apply; it may not look at the lengths.
        queries: where the queries' positions count from, by the query.
        near: where the keys' positions count from, by the query.
        keys: the same by the key.
    """
    if mask.symbols & {"q_len", "kv_len"}:
        raise OperandError(f"{name}: {mask} looks at q_len or kv_len, which are not those of a part of the sequence")

    def moved(node: Node) -> Node | None:
        if not isinstance(node, Compare):
            return None
        # Both starts of the keys are the same within a part. The query's lets differences of positions cancel; the key's
        # keeps the indices of tables inside them, and what depends on the key alone so.
        start = keys if any(_is_of_key(below) for below in node.walk()) else near
        return node.substitute(q=q - queries, kv=kv - start)

    return cast(Mask, mask.expand().replace(moved))


def _is_of_key(node: Node) -> bool:
    steps = isinstance(node, Lookup) or (isinstance(node, Arithmetic) and node.sign == "%")
    return steps and "kv" in node.symbols
