"""Solves comparisons for the key index.

``separate`` rewrites a mask into the same mask over leaves whose key intervals follow from values along one axis:

* :class:`Span`: ``start <= kv < stop`` with bounds that do not depend on the key;
* a ``Compare`` whose left side depends on the key and not on the query, its right side not on the key
  (:func:`is_separable`), or one that depends on the query alone;
* any other ``Compare`` is not separable in q and kv.

The result does not depend on lengths or tensors, so it is cached on the mask. Factors and constants are Python integers
(:class:`flexmask.expr.linear.Sum`); the arithmetic on them is :mod:`flexmask.intervals.laws`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeGuard, cast

from flexmask.expr.index import FOLD_COMPARE, Absolute, Arithmetic, Choice, Constant, Index, Symbol, kv, q
from flexmask.expr.linear import Linear
from flexmask.expr.mask import SWAPPED, Compare, Mask, Named, Truth
from flexmask.intervals import laws


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Span(Mask):
    """``start <= kv < stop``; None for no bound."""

    start: Index | None
    stop: Index | None

    def _make_symbols(self) -> frozenset[str]:
        return super(Span, self)._make_symbols() | {"kv"}  # which is in no field

    def write(self, bare: bool) -> tuple[str, int]:
        parts = [f"kv >= {self.start}"] * (self.start is not None) + [f"kv < {self.stop}"] * (self.stop is not None)
        return f"({' & '.join(parts)})", 7


def is_separable(mask: Mask) -> TypeGuard[Compare]:
    """Whether a mask compares what depends on the key and not on the query with what depends on the query and not on the key."""
    if not isinstance(mask, Compare):
        return False
    left, right = mask.left.symbols, mask.right.symbols
    return "kv" in left and "q" not in left and "q" in right and "kv" not in right


def has_same_sides(mask: Compare) -> bool:
    """Whether both sides are the same expression, of ``q`` and of ``kv``."""

    return mask.kept("same_sides", lambda: bool(at_key(mask.right).key == mask.left.key))


def at_key(node: Any) -> Any:
    """The same mask or index of the key's position in place of the query's."""
    return node.replace(lambda part: kv if part.key == q.key else None)


#: Of more piecewise values than these a comparison is not solved: each may double the number of conditions.
MAX_BRANCHES = 8
EXTREMES = {"minimum", "maximum"}

#: What becomes of ``form <= 0`` or ``form == 0``.
Finish: TypeAlias = Callable[[Linear, str], Mask]


def separate(mask: Mask) -> Mask:
    """The same mask over separable leaves, as far as it has them."""
    return cast(Mask, mask.kept("separated", lambda: mask.replace(_leaf)))


def _leaf(node: Any) -> Mask | None:
    match node:
        case Named(body=body):
            return separate(body)
        case Compare() if "kv" in node.symbols:
            return _separated(node)
    return None


def _separated(node: Compare) -> Mask:
    """A comparison solved for the key where it can be, else as it is where its sides are one of the key and one of the query."""
    if _branches(node) > MAX_BRANCHES:
        return node
    form = Linear.of(node.left) + -Linear.of(node.right)
    if _pieces(form) is None and _single(form) is None:
        for sign, left, right in ((node.sign, node.left, node.right), (SWAPPED[node.sign], node.right, node.left)):
            if "q" not in left.symbols and "kv" not in right.symbols:
                return Compare.make(sign, left, right)
    return _linear(form, node.sign, _solved)


def linear(node: Compare, finish: Finish) -> Mask:
    """A comparison as conditions that linear forms are at most 0, or 0, where nothing in the key index is piecewise.

    Args:
        node: the comparison.
        finish: the mask of ``form <= 0`` or ``form == 0``, given the form and its sign.
    """
    if _branches(node) > MAX_BRANCHES:
        return node
    return _linear(Linear.of(node.left) + -Linear.of(node.right), node.sign, finish)


def _branches(mask: Compare) -> int:
    """How many of the values that are piecewise in the key index are inside each other or added up."""
    counts: dict[int, int] = {}
    for node in mask.walk():
        own = "kv" in node.symbols and (isinstance(node, Absolute | Choice) or getattr(node, "sign", "") in EXTREMES)
        counts[id(node)] = own + sum(counts[id(child)] for child in node.below)
    return counts[id(mask)]


def _linear(difference: Linear, sign: str, finish: Finish) -> Mask:
    if sign in laws.AT_MOST_ZERO:
        return _compared(laws.AT_MOST_ZERO[sign](difference), "<=", finish)
    equal = _compared(difference, "==", finish)
    return equal if sign == "==" else ~equal


def _pieces(form: Linear) -> tuple[Any, Linear] | None:
    """A term that is piecewise in the key index, as (kind, pieces, condition), and the rest of the form."""
    for key, (index, factor) in form.terms.items():
        if "kv" not in index.symbols:
            continue
        match index:
            case Absolute(operand):  # abs(x) == maximum(x, -x)
                kind, pair = "maximum", (Linear.of(operand), -Linear.of(operand))
            case Arithmetic("minimum" | "maximum" as kind, left, right):
                pair = Linear.of(left), Linear.of(right)
            case Choice(condition, then, otherwise):
                return (condition, *(Linear.of(side) * factor for side in (then, otherwise))), form.without(key)
            case _:
                continue
        return (laws.scaled(kind, factor), *(side * factor for side in pair)), form.without(key)
    return None


def _compared(form: Linear, sign: str, finish: Finish) -> Mask:
    """``form <= 0`` or ``form == 0``."""
    if not form.terms:
        return Truth(FOLD_COMPARE[sign](form.constant, 0))
    if sign == "==" and form.constant % form.divisor:
        return Truth(False)
    form = form.divided(laws.reduced(form.constant, form.divisor))
    pieces = _pieces(form)
    if not pieces:
        return finish(form, sign)
    (kind, first, second), rest = pieces
    if sign == "==" and not isinstance(kind, Mask):  # x == 0  <=>  x <= 0 and -x <= 0
        return _compared(form, "<=", finish) & _compared(-form, "<=", finish)
    a, b = _compared(first + rest, sign, finish), _compared(second + rest, sign, finish)
    if isinstance(kind, Mask):
        return cast(Mask, laws.chosen(separate(kind), a, b))
    return cast(Mask, laws.JOINED[kind](a, b))


def _solved(form: Linear, sign: str) -> Mask:
    """The separated form of ``form <= 0`` or ``form == 0``, in which nothing is piecewise."""
    solved = _single(form)
    if solved is None:
        return _unsolved(form, sign)
    term, factor, rest = solved
    if sign == "<=" and factor > 0:
        return _within(term, None, laws.at_most(rest, factor))
    if sign == "<=":
        return _within(term, laws.at_least(rest, -factor), None)
    if factor < 0:
        factor, rest = -factor, -rest
    return _within(term, laws.at_least(-rest, factor), laws.at_most(rest, factor))


def _single(form: Linear) -> tuple[Index, int, Linear] | None:
    """The only term that depends on the key index where it can be solved for it, its factor, and the rest."""
    keys = form.only(kv=True)
    if len(keys.terms) != 1:
        return None
    ((term, factor),) = keys.terms.values()
    solvable = isinstance(term, Symbol) or (
        isinstance(term, Arithmetic) and term.sign == "//" and isinstance(term.right, Constant) and term.right.value > 0
    )
    return (term, factor, form.only(kv=False)) if solvable else None


def _within(term: Index, low: Linear | None, high: Linear | None) -> Mask:
    """``low <= term <= high``; None for no bound."""
    match term:
        case Symbol("kv"):
            return Span(None if low is None else low.index(), None if high is None else (high + 1).index())
        case Arithmetic("//", dividend, Constant(n)):
            form, found = Linear.of(dividend), cast(Mask, Truth(True))
            if low is not None:
                found &= _compared(laws.floor_at_least(low, n) + -form, "<=", _solved)
            if high is not None:
                found &= _compared(form + -laws.floor_at_most(high, n), "<=", _solved)
            return found
    raise AssertionError(f"not solvable: {term}")


def _unsolved(form: Linear, sign: str) -> Mask:
    """A condition on a form that cannot be solved for the key, its sides parted where no single term mixes query and key."""
    keys = form.only(kv=True)
    if not keys.terms or form.holds({"q", "kv"}):
        return Compare.make(sign, form.index(), Constant(0))
    if all(factor < 0 for _, factor in keys.terms.values()):
        sign, form, keys = SWAPPED[sign], -form, -keys
    return Compare.make(sign, keys.index(), (-form.only(kv=False)).index())
