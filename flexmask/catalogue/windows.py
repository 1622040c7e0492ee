"""Masks from the distance between query and key."""

from __future__ import annotations

from enum import Enum
from typing import Literal

from flexmask.algebra import Mask, Truth
from flexmask.errors import ExpressionError, OperandError
from flexmask.index import Index, kv, kv_len, q, q_len
from flexmask.naming import named, nearest

__all__ = ["causal", "empty", "full", "sliding_window"]


class _Unset(Enum):
    """Marks a distance that was not given; None is a value of its own there: no limit."""

    UNSET = "unset"

    def __repr__(self) -> str:
        return "..."


_UNSET = _Unset.UNSET


@named
def full() -> Mask:
    """Every query sees every key.

    Predicate: ``True``

    ``full`` at 4 x 4 and 3 x 5::

        ■ ■ ■ ■     ■ ■ ■ ■ ■
        ■ ■ ■ ■     ■ ■ ■ ■ ■
        ■ ■ ■ ■     ■ ■ ■ ■ ■
        ■ ■ ■ ■
    """
    return Truth(True)


@named
def empty() -> Mask:
    """No query sees any key. Attention then gives 0.

    Predicate: ``False``

    ``empty`` at 4 x 4 and 3 x 5::

        ⬚ ⬚ ⬚ ⬚     ⬚ ⬚ ⬚ ⬚ ⬚
        ⬚ ⬚ ⬚ ⬚     ⬚ ⬚ ⬚ ⬚ ⬚
        ⬚ ⬚ ⬚ ⬚     ⬚ ⬚ ⬚ ⬚ ⬚
        ⬚ ⬚ ⬚ ⬚
    """
    return Truth(False)


@named
def causal(align: Literal["upper_left", "lower_right"] = "upper_left", *, offset: Index | int = 0) -> Mask:
    """Each query sees the keys up to its own position.

    Predicate: ``kv <= q + offset``, and ``kv <= q + kv_len - q_len + offset`` for ``align="lower_right"``

    ``causal`` at 4 x 4 and 3 x 5::

        ■ ⬚ ⬚ ⬚     ■ ⬚ ⬚ ⬚ ⬚
        ■ ■ ⬚ ⬚     ■ ■ ⬚ ⬚ ⬚
        ■ ■ ■ ⬚     ■ ■ ■ ⬚ ⬚
        ■ ■ ■ ■

    ``causal(align='lower_right')`` at 4 x 4 and 3 x 5::

        ■ ⬚ ⬚ ⬚     ■ ■ ■ ⬚ ⬚
        ■ ■ ⬚ ⬚     ■ ■ ■ ■ ⬚
        ■ ■ ■ ⬚     ■ ■ ■ ■ ■
        ■ ■ ■ ■

    Args:
        align: which corner of a rectangle the diagonal starts from. ``"upper_left"``: query 0 stands at key 0, as SDPA's
            ``is_causal``. ``"lower_right"``: the last query stands at the last key, as in decoding with a cache. On a
            square both are the same.
        offset: tokens by which every query sees further; negative for fewer.

    Raises:
        ExpressionError: another ``align``.

    Source: ``torch.nn.attention.bias.causal_upper_left`` and ``causal_lower_right``.
    """
    if align not in ("upper_left", "lower_right"):
        hint = nearest(str(align), ("upper_left", "lower_right"))
        raise ExpressionError(f"causal: align must be 'upper_left' or 'lower_right', got {align!r}.{hint}")
    position = q + kv_len - q_len if align == "lower_right" else q
    return kv <= position + offset


@named
def sliding_window(
    left: Index | int | _Unset | None = _UNSET, right: Index | int | _Unset | None = _UNSET, *, size: Index | int | None = None
) -> Mask:
    """Each query sees the keys within a distance to its left and right.

    Predicate: ``(kv >= q - left) & (kv <= q + right)``

    ``sliding_window(left=1, right=1)`` at 4 x 4 and 3 x 5::

        ■ ■ ⬚ ⬚     ■ ■ ⬚ ⬚ ⬚
        ■ ■ ■ ⬚     ■ ■ ■ ⬚ ⬚
        ⬚ ■ ■ ■     ⬚ ■ ■ ■ ⬚
        ⬚ ⬚ ■ ■

    ``sliding_window(size=2)`` at 4 x 4 and 3 x 5::

        ■ ⬚ ⬚ ⬚     ■ ⬚ ⬚ ⬚ ⬚
        ■ ■ ⬚ ⬚     ■ ■ ⬚ ⬚ ⬚
        ⬚ ■ ■ ⬚     ⬚ ■ ■ ⬚ ⬚
        ⬚ ⬚ ■ ■

    Args:
        left: tokens to the left that a query sees besides its own position; None for no limit.
        right: tokens to the right, likewise.
        size: the other convention, keys in the window with the query's own: ``size=w`` is ``left=w - 1, right=0``.

    Raises:
        ExpressionError: not exactly one of the two conventions, or a negative distance.

    Source: Longformer, https://arxiv.org/abs/2004.05150; ``window_size=(left, right)`` of variable-length kernels.
    """
    if size is not None:
        if left is not _UNSET or right is not _UNSET:
            raise ExpressionError(f"sliding_window: give either size or left and right, got size={size} with the others")
        if not isinstance(size, Index) and (not isinstance(size, int) or size < 1):
            raise ExpressionError(f"sliding_window: size counts the query's own key, so it is at least 1; got {size!r}")
        left, right = size - 1, 0
    if isinstance(left, _Unset) or isinstance(right, _Unset):
        raise ExpressionError(
            "sliding_window: a bare number could mean two windows. Give left= and right= (tokens besides the query's own, "
            "None for no limit), or size= (keys with the query's own)"
        )
    for side, distance in (("left", left), ("right", right)):
        if isinstance(distance, bool) or not isinstance(distance, int | Index | None):
            raise OperandError(f"sliding_window: {side} must be a number of tokens or None, got {distance!r}")
        if isinstance(distance, int) and distance < 0:
            raise ExpressionError(f"sliding_window: {side} must be at least 0, got {distance}; use flexmask.shift to move it")
    mask: Mask = Truth(True)
    if left is not None:
        mask &= kv >= q - left
    if right is not None:
        mask &= kv <= q + right
    return mask
