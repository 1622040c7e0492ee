"""Masks made of other masks, and of whole tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from flexmask.algebra import Mask, PerHead
from flexmask.errors import ExpressionError, OperandError
from flexmask.index import Index, Symbol, as_index, b, h, kv, kv_len, q, q_len
from flexmask.naming import named
from flexmask.tables import Param, as_table

if TYPE_CHECKING:
    from flexmask.tables import Data

__all__ = ["dense", "per_head", "shift", "transpose"]


@named
def dense(table: Data) -> Mask:
    """A mask given cell by cell.

    Predicate: ``table[b, h, q, kv]``

    ``dense(table=[[True, False], [True, True]])`` at 2 x 2::

        ■ ⬚
        ■ ■

    ``dense(table=[[True, False], [True, True], [False, True]])`` at 3 x 2::

        ■ ⬚
        ■ ■
        ⬚ ■

    Args:
        table: ``bool[q_len, kv_len]``, ``bool[B, q_len, kv_len]`` or ``bool[B, H, q_len, kv_len]``, True for visible; B or H
            of 1 stands for all.

    Raises:
        OperandError: the table is not boolean.
        ExpressionError: another number of axes.
    """
    if isinstance(table, Param):
        return table[q, kv] != 0
    cells = as_table(table, "dense: table")
    if not cells.boolean:
        raise OperandError("dense: table must be boolean, True for visible; compare it first, e.g. table == 0")
    axes = {2: (q, kv), 3: (b, q, kv), 4: (b, h, q, kv)}.get(len(cells.shape))
    if axes is None:
        raise ExpressionError(f"dense: table must have the axes [Q, KV], [B, Q, KV] or [B, H, Q, KV], got {list(cells.shape)}")
    shared = [size == 1 and isinstance(axis, Symbol) and axis.name in "bh" for axis, size in zip(axes, cells.shape, strict=True)]
    return cells[tuple(0 if same else axis for axis, same in zip(axes, shared, strict=True))] != 0


@named
def per_head(masks: Sequence[Mask]) -> Mask:
    """Another mask for each head; as many heads as masks.

    Predicate: ``masks[h](b, h, q, kv)``

    ``per_head([full, causal])`` at 3 x 3 (head 0) and 3 x 3 (head 1)::

        ■ ■ ■     ■ ⬚ ⬚
        ■ ■ ■     ■ ■ ⬚
        ■ ■ ■     ■ ■ ■

    ``per_head([full, causal])`` at 3 x 4 (head 0) and 3 x 4 (head 1)::

        ■ ■ ■ ■     ■ ⬚ ⬚ ⬚
        ■ ■ ■ ■     ■ ■ ⬚ ⬚
        ■ ■ ■ ■     ■ ■ ■ ⬚

    Args:
        masks: the mask of each head, in order.
    """
    if not isinstance(masks, list | tuple) or not masks or not all(isinstance(mask, Mask) for mask in masks):
        raise OperandError(f"per_head: wanted a list of masks, one for each head, got {masks!r}")
    return PerHead(tuple(masks))


@named
def shift(mask: Mask, *, q: Index | int = 0, kv: Index | int = 0) -> Mask:
    """A mask moved down by ``q`` rows and right by ``kv`` columns.

    Predicate: ``mask(b, h, q - rows, kv - columns)`` for ``shift(mask, q=rows, kv=columns)``

    ``shift(causal, kv=1)`` at 4 x 4 and 3 x 5::

        ■ ■ ⬚ ⬚     ■ ■ ⬚ ⬚ ⬚
        ■ ■ ■ ⬚     ■ ■ ■ ⬚ ⬚
        ■ ■ ■ ■     ■ ■ ■ ■ ⬚
        ■ ■ ■ ■

    Args:
        mask: the mask to move. Where it looks up a table, the moved indices must stay inside.
        q: rows, an integer or an index expression.
        kv: columns, likewise.
    """
    return _checked(mask, "shift").substitute(q=_q - as_index(q), kv=_kv - as_index(kv))


@named
def transpose(mask: Mask) -> Mask:
    """A mask with queries and keys exchanged.

    Predicate: ``mask(b, h, kv, q)``

    ``transpose(causal)`` at 4 x 4 and 3 x 5::

        ■ ■ ■ ■     ■ ■ ■ ■ ■
        ⬚ ■ ■ ■     ⬚ ■ ■ ■ ■
        ⬚ ⬚ ■ ■     ⬚ ⬚ ■ ■ ■
        ⬚ ⬚ ⬚ ■

    Args:
        mask: the mask to mirror at its diagonal.
    """
    return _checked(mask, "transpose").substitute(q=kv, kv=q, q_len=kv_len, kv_len=q_len)


def _checked(mask: object, name: str) -> Mask:
    if not isinstance(mask, Mask):
        raise OperandError(f"{name}: wanted a mask first, got {type(mask).__name__} {mask!r}")
    return mask


_q, _kv = q, kv
