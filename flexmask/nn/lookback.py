"""How far from a query the keys are that it attends to, as far as the expression of a mask limits it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, cast

from flexmask.expr.index import Index, q
from flexmask.expr.linear import Linear
from flexmask.expr.mask import And, Mask, Named, Or, PerHead, Truth
from flexmask.expr.tables import Lookup
from flexmask.intervals.context import MAX_LENGTH
from flexmask.intervals.solve import Span, separate


class Lookback(NamedTuple):
    """How far from a query the keys are that it attends to.

    Attributes:
        whole: it attends to its own key and to all keys at most so far back; -1 where data decides it.
        most: it attends to no key further back.
        ahead: it attends to no key further ahead.
    """

    whole: int
    most: int
    ahead: int


#: Of a comparison that limits nothing.
UNKNOWN = Lookback(-1, MAX_LENGTH, MAX_LENGTH)


def lookback_of(mask: Mask) -> Lookback:
    """The lookback of a mask; `whole` is -1 where any part of it has data, which is to be checked."""
    if "lookback" not in mask.memo:
        lookback = _fold_lookback(mask, _leaf_lookback)
        mask.memo["lookback"] = lookback._replace(whole=-1) if _has_data(mask) else lookback
    return cast(Lookback, mask.memo["lookback"])


def _leaf_lookback(leaf: Mask) -> Lookback:
    """The lookback of a comparison, cached on it: masks that are bound in each call share their comparisons."""
    if "lookback" not in leaf.memo:
        is_unknown = _has_data(leaf)
        leaf.memo["lookback"] = UNKNOWN if is_unknown else _fold_lookback(separate(leaf), _span_lookback)
    return cast(Lookback, leaf.memo["lookback"])


def _has_data(mask: Mask) -> bool:
    return any(isinstance(node, Lookup) for node in mask.expand().walk())


def _span_lookback(leaf: Mask) -> Lookback:
    if not isinstance(leaf, Span):
        return UNKNOWN
    back = MAX_LENGTH if leaf.start is None else _constant(q - leaf.start)
    ahead = MAX_LENGTH if leaf.stop is None else _constant(leaf.stop - q - 1)
    whole = -1 if back is None or ahead is None or ahead < 0 else max(-1, back)
    return Lookback(whole, *(MAX_LENGTH if most is None else max(0, most) for most in (back, ahead)))


def _constant(index: Index) -> int | None:
    """The value of an expression that has one value for all queries, else None."""
    form = Linear.of(index)
    return None if form.terms else form.constant


def _fold_lookback(mask: Mask, leaf_lookback: Callable[[Mask], Lookback]) -> Lookback:
    """The lookback of a mask from those of its leaves."""
    found: dict[int, Lookback] = {}
    for node in (node for node in mask.walk() if isinstance(node, Mask)):
        match node:
            case Truth(value):
                found[id(node)] = Lookback(MAX_LENGTH, MAX_LENGTH, MAX_LENGTH) if value else Lookback(-1, 0, 0)
            case Named(body=body):
                found[id(node)] = found[id(body)]
            case And(parts) | Or(parts) | PerHead(parts):
                whole, most, ahead = zip(*(found[id(part)] for part in parts), strict=True)
                of_whole, of_most = max if isinstance(node, Or) else min, min if isinstance(node, And) else max
                found[id(node)] = Lookback(of_whole(whole), of_most(most), of_most(ahead))
            case _:
                found[id(node)] = leaf_lookback(node)
    return found[id(mask)]
