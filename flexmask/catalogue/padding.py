"""Masks that mask out padding: keys, queries, or both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from flexmask._checks import nearest
from flexmask.errors import ExpressionError
from flexmask.expr.data import Data, along, per_batch, truths
from flexmask.expr.index import Index, Symbol, kv, kv_len, q, q_len
from flexmask.expr.mask import Mask
from flexmask.expr.tables import Param
from flexmask.registry import named

__all__ = ["cross_length", "key_padding", "query_padding"]


@named
def key_padding(
    lengths: Data | None = None,
    *,
    keep: Data | None = None,
    hide: Data | None = None,
    start: Data | None = None,
    side: Literal["right", "left"] = "right",
) -> Mask:
    """Masks out the keys that are padding. Queries that are padding still attend to real keys: see :func:`query_padding`.

    Predicate: ``kv < lengths[b]``; ``kv >= start[b]``; ``kv >= kv_len - lengths[b]`` for ``side="left"``; ``keep[b, kv]`` for a
    keep-mask, ``~hide[b, kv]`` for its opposite

    ``key_padding(lengths=3)`` at 4 x 4 and 3 x 5::

        ■ ■ ■ ⬚     ■ ■ ■ ⬚ ⬚
        ■ ■ ■ ⬚     ■ ■ ■ ⬚ ⬚
        ■ ■ ■ ⬚     ■ ■ ■ ⬚ ⬚
        ■ ■ ■ ⬚

    ``key_padding(start=1)`` at 4 x 4 and 3 x 5::

        ⬚ ■ ■ ■     ⬚ ■ ■ ■ ■
        ⬚ ■ ■ ■     ⬚ ■ ■ ■ ■
        ⬚ ■ ■ ■     ⬚ ■ ■ ■ ■
        ⬚ ■ ■ ■

    ``key_padding(lengths=3, side='left')`` at 4 x 4 and 3 x 5::

        ⬚ ■ ■ ■     ⬚ ⬚ ■ ■ ■
        ⬚ ■ ■ ■     ⬚ ⬚ ■ ■ ■
        ⬚ ■ ■ ■     ⬚ ⬚ ■ ■ ■
        ⬚ ■ ■ ■

    ``key_padding(hide=[False, False, True, False])`` at 4 x 4 and 3 x 4::

        ■ ■ ⬚ ■     ■ ■ ⬚ ■
        ■ ■ ⬚ ■     ■ ■ ⬚ ■
        ■ ■ ⬚ ■     ■ ■ ⬚ ■
        ■ ■ ⬚ ■

    Args:
        lengths: real tokens of each sequence, an int or ``int[B]``, between 0 and ``kv_len``.
        keep: instead of lengths, ``bool[kv_len]`` or ``bool[B, kv_len]`` with True for a real token; or 0 and 1, as the
            ``attention_mask`` of a tokenizer.
        hide: the same with True for padding, as the ``key_padding_mask`` of ``torch.nn.MultiheadAttention``.
        start: instead of lengths, the position of the first real token, an int or ``int[B]``: the number of padding tokens on
            the left. It does not depend on ``kv_len``, so a :class:`flexmask.KVCache` supports it.
        side: the side of the padding, with ``lengths``. ``"left"`` counts from ``kv_len``, so it moves if ``kv_len`` changes.

    Raises:
        ExpressionError: not exactly one of ``lengths``, ``start``, ``keep`` and ``hide``, or values out of range.
        OperandError: ``keep`` or ``hide`` has values other than truth values, 0 and 1.
    """
    return _padding("key_padding", {"lengths": lengths, "start": start, "keep": keep, "hide": hide}, side, kv, kv_len)


@named
def query_padding(
    lengths: Data | None = None,
    *,
    keep: Data | None = None,
    hide: Data | None = None,
    start: Data | None = None,
    side: Literal["right", "left"] = "right",
) -> Mask:
    """Fully masks the rows of queries that are padding. Their output of attention is 0.

    Predicate: ``q < lengths[b]``; ``q >= start[b]``; ``q >= q_len - lengths[b]`` for ``side="left"``; ``keep[b, q]`` for a
    keep-mask, ``~hide[b, q]`` for its opposite

    ``query_padding(lengths=3)`` at 4 x 4 and 4 x 6::

        ■ ■ ■ ■     ■ ■ ■ ■ ■ ■
        ■ ■ ■ ■     ■ ■ ■ ■ ■ ■
        ■ ■ ■ ■     ■ ■ ■ ■ ■ ■
        ⬚ ⬚ ⬚ ⬚     ⬚ ⬚ ⬚ ⬚ ⬚ ⬚

    ``query_padding(start=1)`` at 4 x 4 and 4 x 6::

        ⬚ ⬚ ⬚ ⬚     ⬚ ⬚ ⬚ ⬚ ⬚ ⬚
        ■ ■ ■ ■     ■ ■ ■ ■ ■ ■
        ■ ■ ■ ■     ■ ■ ■ ■ ■ ■
        ■ ■ ■ ■     ■ ■ ■ ■ ■ ■

    ``query_padding(hide=[False, False, True, False])`` at 4 x 4 and 4 x 6::

        ■ ■ ■ ■     ■ ■ ■ ■ ■ ■
        ■ ■ ■ ■     ■ ■ ■ ■ ■ ■
        ⬚ ⬚ ⬚ ⬚     ⬚ ⬚ ⬚ ⬚ ⬚ ⬚
        ■ ■ ■ ■     ■ ■ ■ ■ ■ ■

    Args:
        lengths: real tokens of each sequence, an int or ``int[B]``, between 0 and ``q_len``.
        keep: instead of lengths, ``bool[q_len]`` or ``bool[B, q_len]`` with True for a real token; or 0 and 1.
        hide: the same with True for padding.
        start: instead of lengths, the position of the first real token, an int or ``int[B]``; see :func:`key_padding`.
        side: the side of the padding, with ``lengths``. ``"left"`` counts from ``q_len``.

    Raises:
        ExpressionError: not exactly one of ``lengths``, ``start``, ``keep`` and ``hide``, or values out of range.
        OperandError: ``keep`` or ``hide`` has values other than truth values, 0 and 1.
    """
    return _padding("query_padding", {"lengths": lengths, "start": start, "keep": keep, "hide": hide}, side, q, q_len)


@named
def cross_length(kv_lengths: Data, *, q_lengths: Data | None = None) -> Mask:
    """Attention between two padded sequences of different lengths, e.g. from a translation to its source.

    Predicate: ``kv < kv_lengths[b]``, and ``(kv < kv_lengths[b]) & (q < q_lengths[b])`` with both

    ``cross_length(kv_lengths=3)`` at 4 x 4 and 3 x 5::

        ■ ■ ■ ⬚     ■ ■ ■ ⬚ ⬚
        ■ ■ ■ ⬚     ■ ■ ■ ⬚ ⬚
        ■ ■ ■ ⬚     ■ ■ ■ ⬚ ⬚
        ■ ■ ■ ⬚

    ``cross_length(kv_lengths=3, q_lengths=2)`` at 4 x 4 and 3 x 5::

        ■ ■ ■ ⬚     ■ ■ ■ ⬚ ⬚
        ■ ■ ■ ⬚     ■ ■ ■ ⬚ ⬚
        ⬚ ⬚ ⬚ ⬚     ⬚ ⬚ ⬚ ⬚ ⬚
        ⬚ ⬚ ⬚ ⬚

    Args:
        kv_lengths: real keys of each sequence, an int or ``int[B]``, between 0 and ``kv_len``. Alone it is the mask of
            ``key_padding(kv_lengths)``.
        q_lengths: real queries of each sequence; None if padded queries attend to real keys too.
    """
    mask = kv < per_batch(kv_lengths, "cross_length: kv_lengths", kv_len, role="length")
    if q_lengths is None:
        return mask
    return mask & (q < per_batch(q_lengths, "cross_length: q_lengths", q_len, role="length"))


def _padding(name: str, sources: dict[str, Data | None], side: str, position: Index, length: Symbol) -> Mask:
    given = {what: data for what, data in sources.items() if data is not None}
    if len(given) != 1:
        raise ExpressionError(f"{name}: give exactly one of lengths, start, keep and hide; got {' and '.join(given) or 'none'}")
    if side not in ("right", "left"):
        raise ExpressionError(f"{name}: side must be 'right' or 'left', got {side!r}.{nearest(str(side), ('right', 'left'))}")
    ((what, data),) = given.items()
    if what != "lengths" and side != "right":
        raise ExpressionError(f"{name}: {what}= says itself where the padding is; leave side= out")
    if what == "start":
        return position >= per_batch(data, f"{name}: start", length)
    if what == "lengths":
        real = per_batch(data, f"{name}: lengths", length, role="length")
        return position >= length - real if side == "left" else position < real
    meaning = "a real token" if what == "keep" else "padding"
    values = data if isinstance(data, Param) else truths(data, f"{name}: {what}", f"{meaning} (token counts are lengths=)")
    if not isinstance(values, Param) and len(values.shape) not in (1, 2):
        raise ExpressionError(
            f"{name}: {what} must have the axes [S] or [B, S], got shape {list(values.shape)}{_squeeze_hint(values.shape)}"
        )
    looked_up = along(values, position)
    return looked_up != 0 if what == "keep" else looked_up == 0


def _squeeze_hint(shape: Sequence[int | None]) -> str:
    """What to write for a mask that broadcasts over heads and queries, as ``bool[B, 1, 1, S]``, or has cells."""
    if len(shape) < 3:
        return ""
    if all(size == 1 for size in shape[1:-1]):
        return f": take tensor[:{', 0' * (len(shape) - 2)}]"
    return ": where it has a value for each query and key, give from_dense(tensor)"
