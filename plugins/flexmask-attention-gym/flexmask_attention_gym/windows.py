"""attention-gym's masks from the distance between query and key."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flexmask.errors import ExpressionError
from flexmask.expr import Index
from flexmask.registry import named
from flexmask_attention_gym.generators import MaskMod, generated, positive, truths

if TYPE_CHECKING:
    from flexmask.expr import Data

__all__ = ["gym_causal", "gym_dilated_window", "gym_global_window", "gym_sliding_window"]


@named
@generated
def gym_causal() -> MaskMod:
    """Each query sees the keys up to its own position.

    Predicate: ``kv <= q``

    ``gym_causal`` at 4 x 4 and 3 x 5::

        ■ ⬚ ⬚ ⬚     ■ ⬚ ⬚ ⬚ ⬚
        ■ ■ ⬚ ⬚     ■ ■ ⬚ ⬚ ⬚
        ■ ■ ■ ⬚     ■ ■ ■ ⬚ ⬚
        ■ ■ ■ ■

    Source: ``causal_mask`` of attention-gym; flexmask's own mask is :func:`flexmask.causal`.
    """
    from attn_gym.masks import causal_mask

    return causal_mask


@named
@generated
def gym_sliding_window(*, left: Index | int | None = None, size: Index | int | None = None) -> MaskMod:
    """A causal window.

    Predicate: ``(kv >= q - left) & (kv <= q)``

    ``gym_sliding_window(left=1)`` at 4 x 4 and 3 x 5::

        ■ ⬚ ⬚ ⬚     ■ ⬚ ⬚ ⬚ ⬚
        ■ ■ ⬚ ⬚     ■ ■ ⬚ ⬚ ⬚
        ⬚ ■ ■ ⬚     ⬚ ■ ■ ⬚ ⬚
        ⬚ ⬚ ■ ■

    Args:
        left: tokens to the left of the query's own position. This is attention-gym's ``window_size``, which
            does not count the query's own key.
        size: instead of left, keys in the window with the query's own: ``size=w`` is ``left=w - 1``.

    Raises:
        ExpressionError: not exactly one of ``left`` and ``size``.

    Source: ``generate_sliding_window`` of attention-gym; flexmask's own mask is :func:`flexmask.sliding_window`.
    """
    from attn_gym.masks import generate_sliding_window

    if (left is None) == (size is None):
        raise ExpressionError(f"gym_sliding_window: give either left or size, got left={left} and size={size}")
    if left is None:
        return generate_sliding_window(positive(size, "gym_sliding_window: size") - 1)
    return generate_sliding_window(positive(left, "gym_sliding_window: left", 0))


@named
@generated
def gym_dilated_window(*, left: Index | int, right: Index | int, dilation: Index | int) -> MaskMod:
    """Each query sees every ``dilation``-th key of a window to both sides.

    Predicate: ``(kv >= q - left) & (kv <= q + right) & (abs(q - kv) % dilation == 0)``

    ``gym_dilated_window(left=2, right=2, dilation=2)`` at 4 x 4 and 3 x 5::

        ■ ⬚ ■ ⬚     ■ ⬚ ■ ⬚ ⬚
        ⬚ ■ ⬚ ■     ⬚ ■ ⬚ ■ ⬚
        ■ ⬚ ■ ⬚     ■ ⬚ ■ ⬚ ■
        ⬚ ■ ⬚ ■

    Args:
        left: tokens to the left of the query's own position, also where ``dilation`` leaves them out. This is attention-gym's
            ``window_size``.
        right: tokens to the right; as many, since attention-gym has one number for both.
        dilation: tokens from one visible key to the next.

    Raises:
        ExpressionError: ``left`` and ``right`` are not the same.

    Source: ``generate_dilated_sliding_window`` of attention-gym, after Longformer, https://arxiv.org/abs/2004.05150; flexmask's
    own mask is ``dilated_window``.
    """
    from attn_gym.masks import generate_dilated_sliding_window

    step = positive(dilation, "gym_dilated_window: dilation")
    return generate_dilated_sliding_window(_both("gym_dilated_window", left, right), step)


@named
@generated
def gym_global_window(is_global: Data, *, left: Index | int, right: Index | int) -> MaskMod:
    """A window to both sides, and global tokens that see everything and are seen by everything.

    Predicate: ``is_global[q] | is_global[kv] | ((kv >= q - left) & (kv <= q + right))``

    ``gym_global_window(is_global=[True, False, False, False, False], left=0, right=0)`` at 5 x 5::

        ■ ■ ■ ■ ■
        ■ ■ ⬚ ⬚ ⬚
        ■ ⬚ ■ ⬚ ⬚
        ■ ⬚ ⬚ ■ ⬚
        ■ ⬚ ⬚ ⬚ ■

    Args:
        is_global: ``bool[S]``, True for a global token, or 0 and 1; the same for all sequences.
        left: tokens to the left of the query's own position. This is attention-gym's ``window_size``.
        right: tokens to the right; as many, since attention-gym has one number for both.

    Raises:
        ExpressionError: ``left`` and ``right`` are not the same.

    Source: ``generate_global_sliding_window`` of attention-gym, after Longformer, https://arxiv.org/abs/2004.05150; flexmask's
    own mask is ``global_window``.
    """
    from attn_gym.masks import generate_global_sliding_window

    marks = truths(is_global, "gym_global_window: is_global", "[S]")
    return generate_global_sliding_window(_both("gym_global_window", left, right), marks)


def _both(name: str, left: object, right: object) -> int:
    """The one distance that attention-gym has for both sides."""
    if positive(left, f"{name}: left", 0) != positive(right, f"{name}: right", 0):
        own = name.removeprefix("gym_")
        raise ExpressionError(
            f"{name}: attention-gym's window reaches as far to both sides, got left={left} and right={right}; flexmask's {own} "
            "takes any"
        )
    return positive(left, f"{name}: left", 0)
