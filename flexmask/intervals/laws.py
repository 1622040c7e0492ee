"""The arithmetic that solves a comparison for one term, each law a function whose docstring states it.

They take Python integers, linear forms and, where named so, tensors. ``tests/intervals/test_laws.py`` calls the same functions
with symbolic integers and proves the docstrings for all of them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

__all__ = [
    "AT_MOST_ZERO",
    "JOINED",
    "LIMB",
    "REFLECTED",
    "WRAPS",
    "at_least",
    "at_most",
    "chosen",
    "floor_at_least",
    "floor_at_most",
    "joined_limbs",
    "limits",
    "limits_of_floor",
    "reduced",
    "scaled",
]

#: ``left sign right  <=>  AT_MOST_ZERO[sign](left - right) <= 0``.
AT_MOST_ZERO: dict[str, Callable[[Any], Any]] = {
    "<=": lambda difference: difference,
    "<": lambda difference: difference + 1,
    ">=": lambda difference: -difference,
    ">": lambda difference: -difference + 1,
}

#: ``maximum(x, y) <= 0  <=>  x <= 0 and y <= 0``, ``minimum(x, y) <= 0  <=>  x <= 0 or y <= 0``.
JOINED: dict[str, Callable[[Any, Any], Any]] = {"maximum": operator.and_, "minimum": operator.or_}
#: ``-maximum(x, y) == minimum(-x, -y)``, and the other way round.
REFLECTED = {"maximum": "minimum", "minimum": "maximum"}


def scaled(kind: str, factor: int) -> str:
    """``factor * kind(x, y) == scaled(kind, factor)(factor * x, factor * y)``."""
    return REFLECTED[kind] if factor < 0 else kind


def chosen(condition: Any, then: Any, otherwise: Any) -> Any:
    """``where(c, x, y) <= 0  <=>  chosen(c, x <= 0, y <= 0)``, and for ``== 0``."""
    return (condition & then) | (~condition & otherwise)


def reduced(constant: Any, divisor: Any) -> Any:
    """``d * s + c <= 0  <=>  s + reduced(c, d) <= 0`` for ``d > 0``; for ``== 0`` where ``c % d == 0``, else never."""
    return -(-constant // divisor)


def at_most(rest: Any, factor: Any) -> Any:
    """``n * t + r <= 0  <=>  t <= at_most(r, n)`` for ``n > 0``.

    With :func:`at_least`: ``n * t + r == 0  <=>  at_least(-r, n) <= t <= at_most(r, n)``.
    """
    return -rest // factor


def at_least(rest: Any, factor: Any) -> Any:
    """``-n * t + r <= 0  <=>  t >= at_least(r, n)`` for ``n > 0``."""
    return (rest + (factor - 1)) // factor


def floor_at_most(limit: Any, divisor: Any) -> Any:
    """``x // n <= y  <=>  x <= floor_at_most(y, n)`` for ``n > 0``."""
    return limit * divisor + (divisor - 1)


def floor_at_least(limit: Any, divisor: Any) -> Any:
    """``x // n >= y  <=>  x >= floor_at_least(y, n)`` for ``n > 0``."""
    return limit * divisor


# ---------------------------------------------------------------- sums that do not fit 64 bits, evaluated between two numbers


def limits(low: Any, high: Any, least: Any, most: Any, factor: Any) -> tuple[Any, Any]:
    """Limits of ``x`` that do not change where ``f * x + r`` lies, below, between or above two numbers.

    With ``least <= r <= most``, ``f > 0``, ``a, b = limits(low, high, least, most, f)`` and ``y = min(max(x, a), b)``: where
    ``f * x + r`` is in ``low .. high``, ``y == x``; where it is below ``low`` or above ``high``, so is ``f * y + r``.
    """
    return (low - 1 - most) // factor, -(-(high + 1 - least) // factor)


def limits_of_floor(low: Any, high: Any, divisor: Any) -> tuple[Any, Any]:
    """``low <= x // n <= high  <=>  a <= x <= b`` for these ``a, b`` and ``n > 0``."""
    return floor_at_least(low, divisor), floor_at_most(high, divisor)


#: Bits of the lower of two limbs: ``x == (x >> LIMB) * 2**LIMB + (x & (2**LIMB - 1))``.
LIMB = 32


def joined_limbs(upper: Any, lower: Any, clamp: Callable[[Any, int, int], Any]) -> Any:
    """``upper * 2**LIMB + lower``, as it is within ``-2**61 .. 2**61``, and beyond them a number beyond the same one.

    Takes tensors; ``abs(upper) < 2**62``, ``abs(lower) < 2**63``.
    """
    upper = upper + (lower >> LIMB)
    return clamp(upper, -(2**30), 2**30) * 2**LIMB + (lower & (2**LIMB - 1))


#: Where ``left sign right``, computed as ``found`` by integers of tensors, which wrap around, is not ``found``.
WRAPS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "+": lambda left, right, found: ((left ^ found) & (right ^ found)) < 0,
    "-": lambda left, right, found: ((left ^ right) & (left ^ found)) < 0,
}
