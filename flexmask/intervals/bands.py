"""Ends of key intervals that follow from the query's position alone: kernels compute them, and read the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

from flexmask._transforms import are_ints
from flexmask.expr.index import Index, q
from flexmask.expr.linear import Linear
from flexmask.expr.mask import And, Compare, Mask, Or, Truth
from flexmask.intervals.context import MAX_LENGTH, Context
from flexmask.intervals.solve import Span, has_same_sides, separate

#: ``"whole"`` for all keys, ``"causal"`` for ``is_causal``; None for another mask.
Fused: TypeAlias = Literal["whole", "causal"] | None

#: One end of the keys of a row: at a distance from the query, None where no key is left out on that side, else ``"read"``.
End: TypeAlias = int | Literal["read"] | None
#: Where the keys of a row begin, and where they end.
Band: TypeAlias = tuple[End, End]
#: The band of a mask of which nothing is known.
READ: Band = ("read", "read")
#: The comparisons that hold for equal values.
REFLEXIVE = {"==", "<=", ">="}
#: The kinds by their bands.
KINDS: dict[Band, Fused] = {(None, None): "whole", (None, 1): "causal"}


def fused_kind(context: Context) -> Fused:
    """The kind of the mask of a lowering context."""
    return KINDS.get(band_of(context))


def band_of(context: Context) -> Band:
    """The band of a mask whose rows are key intervals, one each.

    Of a row without keys at least one end is read, unless its ends contradict each other. Distances are those of offset 0 alone:
    others vary in a graph, of which the results have one layout.

    In ``causal() & document(ids)`` the end is that of ``causal()``: a row of documents holds the key at the query, or none.
    """
    form, own = separate(context.mask), queries_have_keys(context)
    low, high = form.kept("band at own keys" if own else "band", lambda: band(form, own_keys=own))
    if not isinstance(context.q_offset, int) or context.q_offset:
        return "read" if isinstance(low, int) else low, "read" if isinstance(high, int) else high
    return low, high


def queries_have_keys(context: Context) -> bool:
    """Whether each query is at the position of a key."""
    end, kv_len = context.q_end, context.kv_len
    if end is None:
        return False
    if are_ints(end, kv_len):
        return end <= kv_len
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # <= would be a guard of the graph

    return statically_known_true(end <= kv_len)


def band(mask: Mask, *, own_keys: bool) -> Band:
    """As :func:`band_of`, for offset 0 and a mask over separable leaves.

    A part of which each row holds the key at the query, or no key, does not change an end that is right behind the query, nor a
    beginning that is at it. The other end is read, which also says where there is no key. Other ends are read too, as such a part
    may have gaps.
    """
    match mask:
        case Truth(True):
            return None, None
        case Span(start, stop):
            return _end(start, -1), _end(stop, 1)
        case Or(parts):
            lows, highs = zip(*(band(part, own_keys=own_keys) for part in parts), strict=True)
            return (None if set(lows) == {None} else "read"), (None if set(highs) == {None} else "read")
        case And(parts):
            bands = [band(part, own_keys=own_keys) for part in parts if not (own_keys and _is_around_query(part))]
            lows, highs = zip((None, None), *bands, strict=True)
            low, high = _inner_end(lows, max), _inner_end(highs, min)
            if len(bands) == len(parts):
                return low, high
            if high == 1:
                return "read", 1
            return (0 if low == 0 else "read"), "read"
    return READ


def share_a_key(masks: Sequence[Mask], context: Context) -> bool:
    """Whether the intervals of several masks over separable leaves have a key in common, of those that have any."""
    lows, highs = zip(*(band(mask, own_keys=False) for mask in masks), strict=True)
    return set(lows) == {None} or set(highs) == {None} or (all(map(_holds_query, masks)) and queries_have_keys(context))


def _end(end: Index | None, side: Literal[-1, 1]) -> End:
    """The beginning of a span, at side -1, or its end: None where it is so far on that side that no key is left out."""
    if end is None:
        return None
    distance = distance_from_query(end)
    if distance is None or side * distance <= -MAX_LENGTH:  # so far on the other side that all keys are left out
        return "read"
    return None if side * distance >= MAX_LENGTH else distance


def distance_from_query(index: Index | None) -> int | None:
    """``n`` of ``q + n``; None for any other expression."""
    form = None if index is None else Linear.of(index)
    is_query = form is not None and [(key, factor) for key, (_, factor) in form.terms.items()] == [(q.key, 1)]
    return form.constant if form is not None and is_query else None


def _inner_end(ends: tuple[End, ...], of_two: Callable[..., int]) -> End:
    """The end of an intersection of intervals."""
    return "read" if "read" in ends else of_two((end for end in ends if end is not None), default=None)


def _is_around_query(mask: Mask) -> bool:
    """Whether each row of a leaf holds the key at the query, or no key at all."""
    return isinstance(mask, Compare) and ("kv" not in mask.symbols or (mask.sign in REFLEXIVE and has_same_sides(mask)))


def _holds_query(mask: Mask) -> bool:
    """As :func:`_is_around_query`, for a mask."""
    match mask:
        case And(parts) | Or(parts):
            return all(map(_holds_query, parts))
        case Span():
            low, high = band(mask, own_keys=False)
            return low != "read" != high and (low is None or low <= 0) and (high is None or high >= 1)
    return mask == Truth(True) or _is_around_query(mask)
