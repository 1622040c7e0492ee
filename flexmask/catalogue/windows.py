"""Masks from the distance between query and key."""

from __future__ import annotations

from enum import Enum
from typing import Literal

from flexmask._checks import checked_int, nearest
from flexmask.catalogue.arguments import int_or_index, lookup, number
from flexmask.errors import ExpressionError, OperandError
from flexmask.expr.data import Data
from flexmask.expr.index import Index, b, kv, kv_len, q, q_len
from flexmask.expr.mask import Mask, Truth
from flexmask.registry import named

__all__ = ["causal", "dilated_window", "empty", "full", "global_window", "sink_window", "sliding_window"]


class _Unset(Enum):
    """Marks a distance that was not given; None means no limit."""

    UNSET = "unset"

    def __repr__(self) -> str:
        return "..."


_UNSET = _Unset.UNSET


@named
def full() -> Mask:
    """Every query attends to every key.

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
    """No query attends to any key. The output of attention is 0.

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
    """Each query attends to the keys up to its own position.

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
        align: how queries and keys are aligned if their lengths differ. ``"upper_left"``: query 0 has the position of key 0, as
            in SDPA's ``is_causal``. ``"lower_right"``: the last query has the position of the last key, as in decoding with a
            cache. On a square both are the same.
        offset: shifts the diagonal by this many keys to the right; negative to the left.

    Raises:
        ExpressionError: another ``align``.

    Source: ``torch.nn.attention.bias.causal_upper_left`` and ``causal_lower_right``.
    """
    if align not in ("upper_left", "lower_right"):
        hint = nearest(str(align), ("upper_left", "lower_right"))
        raise ExpressionError(f"causal: align must be 'upper_left' or 'lower_right', got {align!r}.{hint}")
    position = q + kv_len - q_len if align == "lower_right" else q
    return _up_to(position, offset)


@named
def sliding_window(
    *, left: Index | int | _Unset | None = _UNSET, right: Index | int | _Unset | None = _UNSET, size: Index | int | None = None
) -> Mask:
    """Each query attends to the keys within a distance to its left and right. All arguments are keyword-only.

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
        left: tokens to the left of the query's own position; None for no limit.
        right: tokens to the right of it; None for no limit.
        size: the other convention, keys in the window including the query's own: ``size=w`` is ``left=w - 1, right=0``.

    Raises:
        ExpressionError: not exactly one of the two conventions, or a negative distance.

    Source: Longformer, https://arxiv.org/abs/2004.05150; ``window_size=(left, right)`` of variable-length kernels.
    """
    return _window("sliding_window", left, right, size)


@named
def dilated_window(*, left: Index | int | None, right: Index | int | None, dilation: Index | int) -> Mask:
    """Each query attends to every ``dilation``-th key of a window, counted from its own position.

    Predicate: ``(kv >= q - left) & (kv <= q + right) & ((q - kv) % dilation == 0)``

    ``dilated_window(left=4, right=2, dilation=2)`` at 6 x 6 and 4 x 8::

        ■ ⬚ ■ ⬚ ⬚ ⬚     ■ ⬚ ■ ⬚ ⬚ ⬚ ⬚ ⬚
        ⬚ ■ ⬚ ■ ⬚ ⬚     ⬚ ■ ⬚ ■ ⬚ ⬚ ⬚ ⬚
        ■ ⬚ ■ ⬚ ■ ⬚     ■ ⬚ ■ ⬚ ■ ⬚ ⬚ ⬚
        ⬚ ■ ⬚ ■ ⬚ ■     ⬚ ■ ⬚ ■ ⬚ ■ ⬚ ⬚
        ■ ⬚ ■ ⬚ ■ ⬚
        ⬚ ■ ⬚ ■ ⬚ ■

    Args:
        left: tokens to the left of the query's own position; None for no limit.
        right: tokens to the right of it; None for no limit.
        dilation: the distance from one visible key to the next, at least 1.

    Raises:
        ExpressionError: a negative distance, or a dilation below 1.

    Source: Longformer, https://arxiv.org/abs/2004.05150; ``generate_dilated_sliding_window`` of attention-gym.
    """
    step = int_or_index(dilation, "dilated_window: dilation", 1)
    return _window("dilated_window", left, right, None) & ((q - kv) % step == 0)


@named
def sink_window(sinks: Index | int, *, left: Index | int | _Unset | None = _UNSET, size: Index | int | None = None) -> Mask:
    """A causal window and the first tokens of the sequence: attention sinks.

    Predicate: ``(kv <= q) & ((kv >= q - left) | (kv < sinks))``

    ``sink_window(sinks=1, size=2)`` at 5 x 5 and 4 x 6::

        ■ ⬚ ⬚ ⬚ ⬚     ■ ⬚ ⬚ ⬚ ⬚ ⬚
        ■ ■ ⬚ ⬚ ⬚     ■ ■ ⬚ ⬚ ⬚ ⬚
        ■ ■ ■ ⬚ ⬚     ■ ■ ■ ⬚ ⬚ ⬚
        ■ ⬚ ■ ■ ⬚     ■ ⬚ ■ ■ ⬚ ⬚
        ■ ⬚ ⬚ ■ ■

    Args:
        sinks: tokens at the start of the sequence that every later query attends to.
        left: tokens to the left of the query's own position.
        size: the other convention, keys in the window including the query's own: ``size=w`` is ``left=w - 1``.

    Raises:
        ExpressionError: not exactly one of ``left`` and ``size``, or a negative number of tokens.

    Source: StreamingLLM, https://arxiv.org/abs/2309.17453
    """
    first = kv < int_or_index(sinks, "sink_window: sinks")
    return (kv <= q) & (_window("sink_window", left, _UNSET if size is not None else None, size, sides=("left",)) | first)


@named
def global_window(is_global: Data, *, left: Index | int | None, right: Index | int | None) -> Mask:
    """A window, and global tokens: they attend to all tokens, and all tokens attend to them.

    Predicate: ``is_global[b, q] | is_global[b, kv] | ((kv >= q - left) & (kv <= q + right))``

    ``global_window(is_global=[True, False, False, False, False], left=1, right=1)`` at 5 x 5 and 4 x 5::

        ■ ■ ■ ■ ■     ■ ■ ■ ■ ■
        ■ ■ ■ ⬚ ⬚     ■ ■ ■ ⬚ ⬚
        ■ ■ ■ ■ ⬚     ■ ■ ■ ■ ⬚
        ■ ⬚ ■ ■ ■     ■ ⬚ ■ ■ ■
        ■ ⬚ ⬚ ■ ■

    Args:
        is_global: ``bool[S]`` or ``bool[B, S]``, True for a global token; or 0 and 1.
        left: tokens to the left of the query's own position; None for no limit.
        right: tokens to the right of it; None for no limit.

    Raises:
        ExpressionError: a negative distance.
        OperandError: ``is_global`` has values other than truth values, 0 and 1.

    Source: Longformer, https://arxiv.org/abs/2004.05150; ``generate_global_sliding_window`` of attention-gym.
    """
    queries, keys = (
        lookup(is_global, "global_window: is_global", "[S] or [B, S]", (at,), (b, at), truth="a global token") for at in (q, kv)
    )
    return (queries != 0) | (keys != 0) | _window("global_window", left, right, None)


def _window(
    name: str,
    left: Index | int | _Unset | None,
    right: Index | int | _Unset | None,
    size: Index | int | None,
    sides: tuple[str, ...] = ("left", "right"),
) -> Mask:
    """The window with these distances or this size, after checking them. ``sides``: the distances that the mask takes."""
    size = number(size, f"{name}: size", 1)
    left, right = (number(distance, f"{name}: {side}") for side, distance in (("left", left), ("right", right)))
    if size is not None:
        if left is not _UNSET or right is not _UNSET:
            raise ExpressionError(f"{name}: give either size or {' and '.join(sides)}, got size={size} with the others")
        if not isinstance(size, Index):
            checked_int(size, f"{name}: size, which counts the query's own key,")
        left, right = size - 1, 0
    if isinstance(left, _Unset) or isinstance(right, _Unset):
        distances = (
            "left= (tokens to the left of the query's own; None for no limit)"
            if sides == ("left",)
            else "both left= and right= (tokens next to the query's own; right=0 for causal, None for no limit)"
        )
        raise ExpressionError(f"{name}: give {distances}, or size= (keys including the query's own, up to it)")
    for side, distance in (("left", left), ("right", right)):
        if isinstance(distance, bool) or not isinstance(distance, int | Index | None):
            raise OperandError(f"{name}: {side} must be a number of tokens or None, got {distance!r}")
        if isinstance(distance, int) and distance < 0:
            raise ExpressionError(
                f"{name}: {side} must be at least 0, got {distance}; None is no limit, and flexmask.masks.shift moves it"
            )
    mask: Mask = Truth(True)
    if left is not None:
        mask &= kv >= q - left
    if right is not None:
        mask &= _up_to(q, right)
    return mask


def _up_to(position: Index, distance: Index | int) -> Mask:
    """``kv <= position + distance``, written so that the largest integer (no limit) does not overflow."""
    if isinstance(distance, int) and distance < 2**60:
        return kv <= position + distance
    return kv - distance <= position
