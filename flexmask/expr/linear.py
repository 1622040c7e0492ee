"""Linear forms: sums of index expressions with factors, exact whatever the size of the numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import gcd
from typing import Any

from flexmask.expr.form import Key
from flexmask.expr.index import PRECEDENCE, Arithmetic, Constant, Index, wrap


@dataclass(frozen=True, slots=True)
class Linear:
    """``constant`` plus terms, each an index expression times a factor. All of them are Python integers."""

    terms: dict[Any, tuple[Index, int]]
    constant: int

    @classmethod
    def of(cls, index: Index) -> Linear:
        """The linear form of an expression; what is not linear is a term of its own."""
        return index.kept("linear", lambda: cls._of(index))

    @classmethod
    def _of(cls, index: Index) -> Linear:
        match index:
            case Constant(value):
                return cls({}, value)
            case Sum(terms, constant):
                return cls({term.key: (term, factor) for term, factor in terms}, constant)
            case Arithmetic("+", left, right):
                return cls.of(left) + cls.of(right)
            case Arithmetic("-", left, right):
                return cls.of(left) + -cls.of(right)
            case Arithmetic("*", left, Constant(value)) | Arithmetic("*", Constant(value), left):
                return cls.of(left) * value
        return cls({index.key: (index, 1)}, 0)

    def __add__(self, other: Linear | int) -> Linear:
        if isinstance(other, int):
            return Linear(self.terms, self.constant + other)
        terms = dict(self.terms)
        for key, (index, factor) in other.terms.items():
            total = factor + (terms[key][1] if key in terms else 0)
            if total:
                terms[key] = (index, total)
            else:
                del terms[key]
        return Linear(terms, self.constant + other.constant)

    def __neg__(self) -> Linear:
        return self * -1

    def __mul__(self, number: int) -> Linear:
        terms = {key: (index, factor * number) for key, (index, factor) in self.terms.items() if number}
        return Linear(terms, self.constant * number)

    def __floordiv__(self, number: int) -> Linear:
        return Linear.of(Quotient.make(self.index(), number))

    @property
    def divisor(self) -> int:
        """The greatest common divisor of the factors."""
        return gcd(*(factor for _, factor in self.terms.values()))

    def divided(self, constant: int) -> Linear:
        """The terms divided by the greatest common divisor of their factors, with another constant."""
        divisor = self.divisor
        return Linear({key: (index, factor // divisor) for key, (index, factor) in self.terms.items()}, constant)

    def without(self, key: Any) -> Linear:
        """The form without one of its terms."""
        return Linear({other: term for other, term in self.terms.items() if other != key}, self.constant)

    def only(self, *, kv: bool) -> Linear:
        """The terms that depend on the key index, or the terms that do not with the constant."""
        terms = {key: term for key, term in self.terms.items() if ("kv" in term[0].symbols) == kv}
        return Linear(terms, 0 if kv else self.constant)

    def index(self) -> Index:
        """The form as an expression: a term alone as it is, else a :class:`Sum`."""
        if not self.terms and -(2**63) <= self.constant < 2**63:
            return Constant(self.constant)
        terms = tuple(self.terms.values())
        return terms[0][0] if len(terms) == 1 and terms[0][1] == 1 and not self.constant else Sum(terms, self.constant)

    def holds(self, symbols: Iterable[str]) -> bool:
        """Whether some single term depends on all of these symbols."""
        return any(set(symbols) <= index.symbols for index, _ in self.terms.values())


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Sum(Index):
    """A linear form as an expression. Only its value has a meaning, not the order in which it is added up."""

    terms: tuple[tuple[Index, int], ...]
    constant: int

    def _make_key(self) -> Key:
        return Key("Sum", frozenset([(index.key, factor) for index, factor in self.terms]), self.constant)

    @classmethod
    def make(cls, terms: tuple[tuple[Index, int], ...], constant: int) -> Index:
        form = Linear({}, constant)
        for index, factor in terms:
            form = form + Linear.of(index) * factor
        return form.index()

    def write(self, bare: bool) -> tuple[str, int]:
        text = ""
        for index, factor in sorted(self.terms, key=lambda term: term[1] < 0):
            size, sign = abs(factor), " - " if factor < 0 else " + "
            if not text:
                sign = "-" if factor < 0 else ""
            part = wrap(index, PRECEDENCE["~" if sign == "-" else "*" if size > 1 or sign == " - " else "+"], bare)
            text += sign + (f"{part} * {size}" if size > 1 else part)
        if not text:
            return str(self.constant), PRECEDENCE["atom" if self.constant >= 0 else "~"]
        if self.constant:
            text += f" {'-' if self.constant < 0 else '+'} {abs(self.constant)}"
        return text, PRECEDENCE["+"]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Quotient(Index):
    """``dividend // divisor``, exact whatever the size of the dividend; the divisor is greater than 1."""

    dividend: Index
    divisor: int

    @classmethod
    def make(cls, dividend: Index, divisor: int) -> Index:
        form = Linear.of(dividend)
        if divisor == 1:
            return form.index()
        return cls(form.index(), divisor) if form.terms else Linear({}, form.constant // divisor).index()

    def write(self, bare: bool) -> tuple[str, int]:
        return f"{wrap(self.dividend, PRECEDENCE['//'], bare)} // {self.divisor}", PRECEDENCE["//"]
