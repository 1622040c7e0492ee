"""``where``: one of two masks, or of two index expressions, by a mask."""

from __future__ import annotations

from typing import Any, overload

from flexmask.errors import OperandError
from flexmask.expr.deferral import deferrable
from flexmask.expr.form import made
from flexmask.expr.index import Choice, Index, as_index
from flexmask.expr.mask import Mask
from flexmask.expr.names import describe_non_mask
from flexmask.expr.node import within_depth


@overload
def where(condition: Mask, a: Mask, b: Mask) -> Mask: ...
@overload
def where(condition: Mask, a: Index | int, b: Index | int) -> Index: ...
@deferrable
def where(condition: Mask, a: Any, b: Any) -> Any:
    """``a`` where the mask ``condition`` holds, else ``b``.

    Predicate: ``(condition & a) | (~condition & b)`` of two masks. Of two index expressions it is an index expression.

    ``where(kv < 2, full, causal)`` at 4 x 4 and 3 x 5::

        ■ ■ ⬚ ⬚     ■ ■ ⬚ ⬚ ⬚
        ■ ■ ⬚ ⬚     ■ ■ ⬚ ⬚ ⬚
        ■ ■ ■ ⬚     ■ ■ ■ ⬚ ⬚
        ■ ■ ■ ■

    Args:
        condition: a mask.
        a: a mask, or an index expression or integer.
        b: the same kind as ``a``.

    Raises:
        OperandError: ``condition`` is not a mask, or ``a`` and ``b`` are of two kinds.

    Source: ``torch.where``.
    """
    if not isinstance(condition, Mask):
        raise OperandError(f"where() chooses by a mask, got {describe_non_mask(condition)}; compare numbers first")
    if isinstance(a, Mask) != isinstance(b, Mask):
        raise OperandError(f"where() chooses between two masks or two index expressions, got {a!s} and {b!s}")
    if isinstance(a, Mask):
        return (condition & a) | (~condition & b)
    return within_depth(made(Choice.make, condition, as_index(a), as_index(b)))
