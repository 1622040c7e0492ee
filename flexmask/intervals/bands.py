"""Ends of key intervals that follow from the query's position alone: kernels compute them, and read the others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain, product
from math import inf
from typing import Literal, TypeAlias

from flexmask._transforms import are_ints
from flexmask.expr.index import Arithmetic, Constant, Index, Symbol
from flexmask.expr.linear import Linear
from flexmask.expr.mask import And, Compare, Mask, Or, Truth, operands_of
from flexmask.intervals.context import MAX_LENGTH, Context
from flexmask.intervals.solve import Span, at_key, has_same_sides, is_separable, separate

#: ``"whole"`` for all keys, ``"causal"`` for ``is_causal``; None for another mask.
Fused: TypeAlias = Literal["whole", "causal"] | None

#: A position that follows from that of the query: ``(size, n)`` is ``q // size * size + n``, so ``(1, n)`` is ``q + n``, and
#: ``(0, n)`` is ``n``.
Place: TypeAlias = tuple[int, int]
#: One end of a key interval: the innermost of some places, none where no key is left out on that side, else ``"read"``, or
#: ``"shared"`` where it is read and the same for all queries.
End: TypeAlias = tuple[Place, ...] | Literal["read", "shared"]
#: The key intervals of a row, each by where it begins and where it ends: one, several of which no end is read, those before
#: and behind a gap (:func:`has_gap`), or the first keys and another interval.
Band: TypeAlias = tuple[tuple[End, End], ...]
#: The band of all keys, and that of a mask of which nothing is known.
WHOLE: Band = (((), ()),)
READ: Band = (("read", "read"),)
#: The place of the query, and the one behind it.
HERE, NEXT = (1, 0), (1, 1)
#: The comparisons that hold for equal values.
REFLEXIVE = {"==", "<=", ">="}
#: The kinds by their bands.
KINDS: dict[Band, Fused] = {WHOLE: "whole", (((), (NEXT,)),): "causal"}
#: The most intervals of a row that are computed.
MOST = 2


def fused_kind(context: Context) -> Fused:
    """The kind of the mask of a lowering context."""
    return KINDS.get(band_of(replace(context, mask=context.with_lengths(context.mask))))


def band_of(context: Context) -> Band:
    """The band of a mask. Where its rows have several intervals, it is that of all of them, or ``READ``.

    In a row without keys an end is read, or the computed ends have no key between them. Places are those of offset 0
    alone: others vary in a graph, of which the results have one layout. Of a single interval an end with several places is read.

    In ``causal() & document(ids)`` the end is that of ``causal()``: a row of documents holds the key at the query, or none.
    """
    form, own = separate(context.mask), queries_have_keys(context)
    found = form.kept("band at own keys" if own else "band", lambda: band(form, own_keys=own))
    most = 1 if context.begins_at_0 else 0  # places of an end that are computed
    if len(found) > 1:
        return found if most else READ
    ends: list[End] = [end if end != "read" and len(end) <= most else "read" for end in found[0]]
    return ((ends[0], ends[1]),)


def queries_have_keys(context: Context) -> bool:
    """Whether each query is at the position of a key."""
    end, kv_len = context.q_end, context.kv_len
    if end is None:
        return False
    if are_ints(end, kv_len):
        return end <= kv_len
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # <= would be a guard of the graph

    return statically_known_true(end <= kv_len)


def compares_classes(context: Context) -> bool:
    """Whether a mask is any ``f(q) == g(kv)`` and conditions on queries alone or keys alone, and depends on the query.

    So two queries attend to the same keys, those of their class, or have none in common. Not for decoding steps, in which the
    classes of all keys cost more than they save.
    """
    if not context.begins_at_0:
        return False
    form = separate(context.mask)
    return form.kept("classes", lambda: _compares_classes(form))


def _compares_classes(mask: Mask) -> bool:
    mixed = [part for part in operands_of(mask) if {"q", "kv"} <= part.symbols]
    return (bool(mixed) or has_whole_rows(mask)) and all(is_separable(part) and part.sign == "==" for part in mixed)


def has_whole_rows(mask: Mask) -> bool:
    """Whether a query attends to all keys or to none, by a condition on it alone."""
    symbols = separate(mask).symbols
    return "q" in symbols and "kv" not in symbols


def band(mask: Mask, *, own_keys: bool) -> Band:
    """As :func:`band_of`, for offset 0 and a mask over separable leaves.

    A part of which each row holds the key at the query, or no key, does not change an end that is right behind the query, nor a
    beginning that is at it. The other end is read, which also says where there is no key. Other ends are read too, as such a part
    may have gaps. A condition of the query alone is an end that is read: behind all keys where it holds, 0 elsewhere. All keys
    before one that is the same for all queries, and all keys from one on, leave a gap: :func:`has_gap`. Of the first keys of each
    row and another interval, where they end is read if the other one is computed. If it is not, both its ends are, and where the
    first keys end if that is no number, but the same for all queries.
    """
    match mask:
        case Truth(True):
            return WHOLE
        case Span(start, stop):
            return ((_end(start, -1), _end(stop, 1)),)
        case Or(parts):
            return _band_of_union(parts, own_keys=own_keys)
        case And(parts):
            has_own_key = own_keys and any(map(_has_own_key, parts))
            bands = [band(part, own_keys=own_keys) for part in parts if not (has_own_key and _is_around_query(part, parts))]
            found = [
                (_inner_end((low for low, _ in chosen), 1), _inner_end((high for _, high in chosen), -1))
                for chosen in product(*bands)
            ]
            if not has_own_key:
                return tuple(found) if len(found) == 1 or has_gap(found) else _joined(found)
            if [high for _, high in found] == [(NEXT,)]:
                return (("read", (NEXT,)),)
            return (((HERE,) if [low for low, _ in found] == [(HERE,)] else "read", "read"),)
        case Compare() if "kv" not in mask.symbols:
            return (((), "read"),)
    return READ


def _band_of_union(parts: Sequence[Mask], *, own_keys: bool) -> Band:
    """The band of a disjunction."""
    found = [interval for part in parts for interval in band(part, own_keys=own_keys)]
    lows, highs = ends_of(found)
    if lows == {()} or highs == {()}:
        return ((() if lows == {()} else "read", () if highs == {()} else "read"),)
    joined = _joined(found)
    if joined != READ:
        return joined
    firsts = [part for part in parts if _is_prefix(part)]
    stops = [high for _, high in chain.from_iterable(band(part, own_keys=own_keys) for part in firsts)]
    before: End = "shared" if "read" in stops else max(stops, default=())
    rest = [part for part in parts if part not in firsts]
    if all(_is_suffix(part) or "kv" not in part.symbols for part in rest):
        return (((), before), ("read", ())) if firsts else (("read", ()),)
    known = _joined([((), "read"), *(interval for interval in found if interval[0] != ())])
    return (((), before), READ[0]) if known == READ and firsts and len(rest) == 1 and _is_interval(rest[0]) else known


def ends_of(band: Iterable[tuple[End, End]]) -> tuple[set[End], set[End]]:
    """Where the intervals of bands begin, and where they end."""
    lows, highs = zip(*band, strict=True)
    return set(lows), set(highs)


def are_computed(band: Iterable[tuple[End, End]]) -> bool:
    """Whether no end of some intervals is read."""
    return not any(isinstance(end, str) for end in chain.from_iterable(band))


def has_gap(band: Sequence[tuple[End, End]]) -> bool:
    """Whether each row has all keys up to an end that is computed, without those of one gap, of which the end is read.

    It begins at the same key for all queries, which is a number or read.
    """
    match band:
        case [((), stop), ("read", high)]:
            return stop != "read" and not isinstance(high, str)
    return False


def share_a_key(masks: Sequence[Mask], context: Context) -> bool:
    """Whether the intervals of several masks over separable leaves have a key in common, of those that have any."""
    lows, highs = ends_of(chain.from_iterable(band(mask, own_keys=False) for mask in masks))
    return lows == {()} or highs == {()} or (all(map(_holds_query, masks)) and queries_have_keys(context))


def place_of(index: Index) -> Place | None:
    """The place that an expression is; None for any other expression."""
    form = Linear.of(index)
    match [*form.terms.values()]:
        case []:
            return 0, form.constant
        case [(Symbol("q"), 1)]:
            return 1, form.constant
        case [(Arithmetic("//", Symbol("q"), Constant(size)), factor)] if size == factor > 0:
            return (size if size < MAX_LENGTH else 0), form.constant
    return None


def distance_from_query(index: Index | None) -> int | None:
    """``n`` of ``q + n``; None for any other expression."""
    place = None if index is None else place_of(index)
    return place[1] if place and place[0] == 1 else None


def reach(place: Place) -> tuple[float, float]:
    """The least and the greatest distance of a place from the query, infinite for a place that does not move with it."""
    size, n = place
    return (n - size + 1, n) if size else (-inf, inf)


def _joined(intervals: list[tuple[End, End]]) -> Band:
    """A band of several intervals: computed ones, or the first keys of each row and one that is computed."""
    are_known = are_computed(intervals) or (intervals[0] == ((), "read") and are_computed(intervals[1:]))
    return tuple(intervals) if len(intervals) <= MOST and are_known else READ


def _end(end: Index | None, side: Literal[-1, 1]) -> End:
    """The beginning of a span, at side -1, or its end: none where it is so far on that side that no key is left out."""
    if end is None:
        return ()
    place = place_of(end)
    if place is None or side * place[1] <= -MAX_LENGTH:  # so far on the other side that all keys are left out
        return "read"
    outermost = 0 if place[0] == 0 and side == -1 else MAX_LENGTH
    return () if side * place[1] >= outermost else (place,)


def _inner_end(ends: Iterable[End], side: Literal[-1, 1]) -> End:
    """Where an intersection of intervals begins, at side 1, or ends: the places that no other makes needless."""
    greatest: dict[int, int] = {}
    for end in ends:
        if isinstance(end, str):
            return end
        for size, n in end:
            greatest[size] = max(greatest.get(size, -MAX_LENGTH), side * n)
    places = [(size, side * n) for size, n in sorted(greatest.items())]
    spread = {place: sorted(side * distance for distance in reach(place)) for place in places}
    return tuple(place for place in places if not any(spread[other][0] >= spread[place][1] for other in places if other != place))


def _is_prefix(mask: Mask) -> bool:
    """Whether a leaf is all keys up to the same one in each row."""
    match mask:
        case Span(None, Index() as stop):
            return "q" not in stop.symbols
    return False


def _is_suffix(mask: Mask) -> bool:
    """Whether a leaf is all keys from one on."""
    return isinstance(mask, Span) and mask.stop is None


def _is_interval(mask: Mask) -> bool:
    """Whether each row is one interval, or has no keys."""
    return all(isinstance(part, Span) or "kv" not in part.symbols for part in operands_of(mask))


def _has_own_key(mask: Mask) -> bool:
    """Whether each row of a leaf, or of one of several that are joined, holds the key at the query."""
    match mask:
        case Or(parts):
            return any(map(_has_own_key, parts))
        case Compare(sign):
            return "kv" in mask.symbols and sign in REFLEXIVE and has_same_sides(mask)
    return False


def _is_around_query(mask: Mask, others: Sequence[Mask] = ()) -> bool:
    """Whether each row of a part of a conjunction holds the key at the query, or the conjunction has no key there.

    A condition on the key alone does if the same one on the query is another part.
    """
    if not isinstance(mask, Compare) or "kv" not in mask.symbols:
        return isinstance(mask, Compare) or _has_own_key(mask)
    return _has_own_key(mask) or any("kv" not in other.symbols and at_key(other).key == mask.key for other in others)


def _holds_query(mask: Mask) -> bool:
    """As :func:`_is_around_query`, for a mask."""
    match mask:
        case And(parts) | Or(parts):
            return all(map(_holds_query, parts))
        case Span():
            ((low, high),) = band(mask, own_keys=False)
            if isinstance(low, str) or isinstance(high, str):
                return False
            return all(reach(place)[1] <= 0 for place in low) and all(reach(place)[0] >= 1 for place in high)
    return mask == Truth(True) or _is_around_query(mask)
