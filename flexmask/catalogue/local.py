"""Local positions: applies a mask within parts of a sequence, with positions that start at 0 in each part."""

from __future__ import annotations

from typing import cast

from flexmask.errors import OperandError
from flexmask.expr.index import Arithmetic, Index, kv, q
from flexmask.expr.mask import Compare, Mask
from flexmask.expr.node import Node
from flexmask.expr.tables import Lookup

__all__ = ["with_local_positions"]


def with_local_positions(name: str, mask: Mask, queries: Index, near: Index, keys: Index) -> Mask:
    """``mask`` at positions relative to the start of a part, valid where query and key are in the same part.

    Args:
        name: the named mask, for messages.
        mask: the mask to apply; it must not use ``q_len`` and ``kv_len``.
        queries: the start of the queries' positions, as an expression of ``q``.
        near: the start of the keys' positions, as an expression of ``q``.
        keys: the start of the keys' positions, as an expression of ``kv``.
    """
    if mask.symbols & {"q_len", "kv_len"}:
        raise OperandError(f"{name}: {mask} uses q_len or kv_len, which are not those of a part of the sequence")

    def moved(node: Node) -> Node | None:
        if not isinstance(node, Compare):
            return None
        # Within a part both starts of the keys are equal. With ``near`` differences of positions cancel. With ``keys`` indices
        # stay inside their tables, and conditions on the key alone stay so.
        start = keys if any(_is_of_key(below) for below in node.walk()) else near
        return node.substitute(q=q - queries, kv=kv - start)

    return cast(Mask, mask.expand().replace(moved))


def _is_of_key(node: Node) -> bool:
    steps = isinstance(node, Lookup) or (isinstance(node, Arithmetic) and node.sign == "%")
    return steps and "kv" in node.symbols
