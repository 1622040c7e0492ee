"""Separation: a comparison of query and key, solved for the key.

``separate`` rewrites a mask into the same mask over leaves whose rows can be read off:

* :class:`Span`: ``start <= kv < stop`` with bounds that do not depend on the key;
* :class:`Matches` and :class:`Reaches`: ``key(b, h, kv) == value(b, h, q)`` and ``key(b, h, kv) <= value(b, h, q)``;
* a ``Compare`` that depends on the query alone, or on the key alone;
* what is left, a ``Compare`` of both, does not separate.

It knows nothing of lengths or tensors, so its result is kept with the mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from flexmask.algebra import Compare, Mask, Named
from flexmask.index import Absolute, Arithmetic, Choice, Constant, Index, Symbol, as_index

__all__ = ["Linear", "Matches", "Reaches", "Span", "linear", "separate"]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Span(Mask):
    """``start <= kv < stop``; None for no bound."""

    start: Index | None
    stop: Index | None

    def write(self, bare: bool) -> tuple[str, int]:
        parts = [f"kv >= {self.start}"] * (self.start is not None) + [f"kv < {self.stop}"] * (self.stop is not None)
        return f"({' & '.join(parts)})", 7


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Matches(Mask):
    """``key == value``, where ``key`` depends on the key index alone and ``value`` on the query index alone."""

    column: Index
    value: Index

    def write(self, bare: bool) -> tuple[str, int]:
        return f"({self.column} == {self.value})", 7


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Reaches(Mask):
    """``key <= value``, where ``key`` depends on the key index alone and ``value`` on the query index alone."""

    column: Index
    value: Index

    def write(self, bare: bool) -> tuple[str, int]:
        return f"({self.column} <= {self.value})", 7


@dataclass(frozen=True, slots=True)
class Linear:
    """``constant`` plus terms, each an index expression times a factor."""

    terms: dict[Any, tuple[Index, int]]
    constant: int

    @classmethod
    def of(cls, index: Index) -> Linear:
        """The linear form of an expression; what is not linear is a term of its own."""
        match index:
            case Constant(value):
                return cls({}, value)
            case Arithmetic("+", left, right):
                return cls.of(left).plus(cls.of(right))
            case Arithmetic("-", left, right):
                return cls.of(left).plus(cls.of(right).times(-1))
            case Arithmetic("*", left, Constant(value)) | Arithmetic("*", Constant(value), left):
                return cls.of(left).times(value)
        return cls({index.key: (index, 1)}, 0)

    def plus(self, other: Linear) -> Linear:
        terms = dict(self.terms)
        for key, (index, factor) in other.terms.items():
            total = factor + (terms[key][1] if key in terms else 0)
            if total:
                terms[key] = (index, total)
            else:
                del terms[key]
        return Linear(terms, self.constant + other.constant)

    def times(self, number: int) -> Linear:
        terms = {key: (index, factor * number) for key, (index, factor) in self.terms.items() if number}
        return Linear(terms, self.constant * number)

    def only(self, *, kv: bool) -> Linear:
        """The terms that depend on the key index, or the terms that do not with the constant."""
        terms = {key: term for key, term in self.terms.items() if ("kv" in term[0].symbols) == kv}
        return Linear(terms, 0 if kv else self.constant)

    def index(self) -> Index:
        """The expression again, positive terms first."""
        total: Index | int = 0
        for index, factor in sorted(self.terms.values(), key=lambda term: term[1] < 0):
            size = index if abs(factor) == 1 else index * abs(factor)
            total = total + size if factor > 0 else total - size
        return as_index(total + self.constant)

    def holds(self, symbols: Iterable[str]) -> bool:
        """Whether some single term depends on all of these symbols."""
        return any(set(symbols) <= index.symbols for index, _ in self.terms.values())


#: What becomes of ``form <= 0`` or ``form == 0``.
Finish: TypeAlias = Callable[[Linear, str], Mask]


def separate(mask: Mask) -> Mask:
    """The same mask over leaves that separate, as far as they do."""
    if "separated" not in mask.memo:
        mask.memo["separated"] = mask.replace(_leaf)
    return cast(Mask, mask.memo["separated"])


def _leaf(node: Any) -> Mask | None:
    match node:
        case Named(body=body):
            return separate(body)
        case Compare() if "kv" in node.symbols:
            return linear(node, _solved)
        case Compare():
            return cast(Mask, node)
    return None


def linear(node: Compare, finish: Finish) -> Mask:
    """A comparison as conditions that linear forms are at most 0, or 0, where nothing in the key index is piecewise.

    Args:
        node: the comparison.
        finish: the mask of ``form <= 0`` or ``form == 0``, given the form and its sign.
    """
    difference = Linear.of(node.left).plus(Linear.of(node.right).times(-1))
    one = Linear({}, 1)
    match node.sign:
        case "<=":
            return _at_most_zero(difference, finish)
        case "<":
            return _at_most_zero(difference.plus(one), finish)
        case ">=":
            return _at_most_zero(difference.times(-1), finish)
        case ">":
            return _at_most_zero(difference.times(-1).plus(one), finish)
        case "==":
            return _zero(difference, finish)
    return ~_zero(difference, finish)


def _pieces(form: Linear) -> tuple[Any, Linear] | None:
    """A term that is piecewise in the key index, as (kind, pieces, condition), and the rest of the form."""
    for key, (index, factor) in form.terms.items():
        if "kv" not in index.symbols:
            continue
        rest = Linear({k: term for k, term in form.terms.items() if k != key}, form.constant)
        match index:
            case Absolute(operand):
                pair = Linear.of(operand), Linear.of(operand).times(-1)
                kind = "maximum"
            case Arithmetic("minimum" | "maximum" as kind, left, right):
                pair = Linear.of(left), Linear.of(right)
            case Choice(condition, then, otherwise):
                return (condition, *(Linear.of(side).times(factor) for side in (then, otherwise))), rest
            case _:
                continue
        if factor < 0:  # -maximum(x, y) is minimum(-x, -y)
            kind = "minimum" if kind == "maximum" else "maximum"
        return (kind, *(side.times(factor) for side in pair)), rest
    return None


def _at_most_zero(form: Linear, finish: Finish) -> Mask:
    """``form <= 0``."""
    pieces = _pieces(form)
    if not pieces:
        return finish(form, "<=")
    (kind, first, second), rest = pieces
    a, b = _at_most_zero(first.plus(rest), finish), _at_most_zero(second.plus(rest), finish)
    if kind == "maximum":  # max(x, y) <= 0  <=>  x <= 0 and y <= 0
        return a & b
    if kind == "minimum":  # min(x, y) <= 0  <=>  x <= 0 or y <= 0
        return a | b
    return _chosen(kind, a, b)


def _zero(form: Linear, finish: Finish) -> Mask:
    """``form == 0``."""
    pieces = _pieces(form)
    if not pieces:
        return finish(form, "==")
    (kind, first, second), rest = pieces
    if isinstance(kind, Mask):
        return _chosen(kind, _zero(first.plus(rest), finish), _zero(second.plus(rest), finish))
    return _at_most_zero(form, finish) & _at_most_zero(form.times(-1), finish)


def _solved(form: Linear, sign: str) -> Mask:
    """The separated form of ``form <= 0`` or ``form == 0``, in which nothing is piecewise."""
    solved = _single(form)
    if solved is None:
        return _unsolved(form, sign)
    term, factor, rest = solved
    if sign == "<=" and factor > 0:  # n * t + r <= 0  <=>  t <= -r // n
        return _term_at_most(term, _divided(rest.times(-1), factor))
    if sign == "<=":  # -n * t + r <= 0  <=>  t >= -(-r // n)
        return _term_at_least(term, -_divided(rest.times(-1), -factor))
    if factor > 0:
        rest, factor = rest.times(-1), -factor  # -n * t + r == 0, so t == r / n
    value = _divided(rest, -factor)
    found = _term_at_least(term, value) & _term_at_most(term, value)
    if isinstance(term, Symbol):
        found = Span(value, value + 1)
    return found if factor == -1 else found & (rest.index() % -factor == 0)


def _chosen(condition: Mask, a: Mask, b: Mask) -> Mask:
    chosen = separate(condition)
    return (chosen & a) | (~chosen & b)


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


def _divided(form: Linear, number: int) -> Index:
    return form.index() // number


def _term_at_most(term: Index, limit: Index) -> Mask:
    match term:
        case Symbol("kv"):
            return Span(None, _tidy(limit + 1))
        case Arithmetic("//", operand, Constant(n)):  # x // n <= y  <=>  x <= y * n + n - 1
            return _at_most_zero(Linear.of(operand).plus(Linear.of(limit * n + (n - 1)).times(-1)), _solved)
    raise AssertionError(f"not solvable: {term}")


def _term_at_least(term: Index, limit: Index) -> Mask:
    match term:
        case Symbol("kv"):
            return Span(_tidy(limit), None)
        case Arithmetic("//", operand, Constant(n)):  # x // n >= y  <=>  x >= y * n
            return _at_most_zero(Linear.of(limit * n).plus(Linear.of(operand).times(-1)), _solved)
    raise AssertionError(f"not solvable: {term}")


def _tidy(index: Index) -> Index:
    return Linear.of(index).index()


def _unsolved(form: Linear, sign: str) -> Mask:
    if form.holds({"q", "kv"}):  # some term mixes query and key
        return Compare.make(sign, form.index(), Constant(0))
    if sign == "==" and all(factor < 0 for _, factor in form.only(kv=True).terms.values()):
        form = form.times(-1)
    column, value = form.only(kv=True).index(), form.only(kv=False).times(-1).index()
    if "q" not in value.symbols or "kv" not in column.symbols:
        return Compare.make(sign, column, value)
    return Matches(column, value) if sign == "==" else Reaches(column, value)
