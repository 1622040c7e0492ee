"""The laws that solve a comparison, proved for all integers: the library's own functions are called with symbolic ones."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
import z3

import flexmask as fm
from flexmask import Mask, kv, q
from flexmask.expr import mask as masks
from flexmask.expr.index import Absolute, Arithmetic, Choice, Constant, Index, Symbol
from flexmask.expr.linear import Quotient, Sum
from flexmask.expr.mask import SWAPPED, And, Compare, Named, Not, Or
from flexmask.expr.tables import Lookup
from flexmask.intervals import laws
from flexmask.intervals.columns import PiecewiseColumn, direction, threshold
from flexmask.intervals.solve import Span, separate

COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}


@dataclass(frozen=True, eq=False)
class Integer:
    """A symbolic integer with Python's operators: ``//`` and ``>>`` round down, and ``&`` takes the low bits."""

    term: Any

    def __add__(self, other: Integer | int) -> Integer:
        return Integer(self.term + term_of(other))

    def __radd__(self, other: int) -> Integer:
        return self + other

    def __neg__(self) -> Integer:
        return Integer(-self.term)

    def __sub__(self, other: Integer | int) -> Integer:
        return Integer(self.term - term_of(other))

    def __rsub__(self, other: int) -> Integer:
        return -self + other

    def __mul__(self, other: Integer | int) -> Integer:
        return Integer(self.term * term_of(other))

    __rmul__ = __mul__

    def __floordiv__(self, other: Integer | int) -> Integer:
        """By a positive number, for which the remainder of z3's division is not negative either."""
        return Integer(self.term / term_of(other))

    def __rshift__(self, bits: int) -> Integer:
        return Integer(self.term / 2**bits)

    def __and__(self, mask: int) -> Integer:
        assert mask & (mask + 1) == 0
        return Integer(self.term % (mask + 1))

    def __le__(self, other: Integer | int) -> Any:
        return self.term <= term_of(other)

    def __lt__(self, other: Integer | int) -> Any:
        return self.term < term_of(other)

    def __ge__(self, other: Integer | int) -> Any:
        return self.term >= term_of(other)

    def __gt__(self, other: Integer | int) -> Any:
        return self.term > term_of(other)

    def __eq__(self, other: object) -> Any:
        return self.term == term_of(other)

    def __ne__(self, other: object) -> Any:
        return self.term != term_of(other)


def term_of(value: Any) -> Any:
    return value.term if isinstance(value, Integer) else value


def integers(names: str) -> list[Integer]:
    return [Integer(z3.Int(name)) for name in names.split()]


@dataclass(frozen=True, eq=False)
class Truth:
    """A symbolic truth value with the operators of masks."""

    term: Any

    def __and__(self, other: Truth) -> Truth:
        return Truth(z3.And(self.term, other.term))

    def __or__(self, other: Truth) -> Truth:
        return Truth(z3.Or(self.term, other.term))

    def __invert__(self) -> Truth:
        return Truth(z3.Not(self.term))


def clamp(value: Integer, low: Any, high: Any) -> Integer:
    low, high = term_of(low), term_of(high)
    return Integer(z3.If(value.term < low, low, z3.If(value.term > high, high, value.term)))


def either(condition: Any, then: Integer, otherwise: Integer) -> Integer:
    return Integer(z3.If(condition, then.term, otherwise.term))


EXTREMES: dict[str, Callable[[Integer, Integer], Integer]] = {
    "maximum": lambda x, y: either(x >= y, x, y),
    "minimum": lambda x, y: either(x <= y, x, y),
}


def holds(theorem: Any, *assumptions: Any) -> bool:
    """Whether a theorem is true for all integers."""
    solver = z3.Solver()
    solver.set("timeout", 60_000)
    solver.add(*assumptions, z3.Not(theorem))
    found = solver.check()
    assert found != z3.unknown, solver.reason_unknown()
    return bool(found == z3.unsat)


# ---------------------------------------------------------------- the laws


def at_most_zero() -> bool:
    x, y = integers("x y")
    return all(holds(COMPARE[sign](x, y) == (law(x - y) <= 0)) for sign, law in laws.AT_MOST_ZERO.items())


def joined() -> bool:
    x, y = integers("x y")
    return all(
        holds((extreme(x, y) <= 0) == laws.JOINED[kind](Truth(x <= 0), Truth(y <= 0)).term) for kind, extreme in EXTREMES.items()
    )


def scaled() -> bool:
    x, y, factor = integers("x y factor")
    return all(
        holds(extreme(x, y) * factor == EXTREMES[laws.scaled(kind, sign)](x * factor, y * factor), factor * sign > 0)
        for kind, extreme in EXTREMES.items()
        for sign in (1, -1)
    )


def chosen() -> bool:
    condition, (x, y) = Truth(z3.Bool("condition")), integers("x y")
    return all(
        holds(compare(either(condition.term, x, y), 0) == laws.chosen(condition, Truth(compare(x, 0)), Truth(compare(y, 0))).term)
        for compare in (operator.le, operator.eq)
    )


def reduced() -> bool:
    s, c, d = integers("s c d")
    rest = c - c // d * d
    return (
        holds((d * s + c <= 0) == (s + laws.reduced(c, d) <= 0), d > 0)
        and holds((d * s + c == 0) == (s + laws.reduced(c, d) == 0), d > 0, rest == 0)
        and holds(d * s + c != 0, d > 0, rest != 0)
    )


def at_most() -> bool:
    t, r, n = integers("t r n")
    return holds((n * t + r <= 0) == (t <= laws.at_most(r, n)), n > 0)


def at_least() -> bool:
    t, r, n = integers("t r n")
    return holds((-(n * t) + r <= 0) == (t >= laws.at_least(r, n)), n > 0)


def equal() -> bool:
    t, r, n = integers("t r n")
    return holds((n * t + r == 0) == z3.And(t >= laws.at_least(-r, n), t <= laws.at_most(r, n)), n > 0)


def floor_at_most() -> bool:
    x, y, n = integers("x y n")
    return holds((x // n <= y) == (x <= laws.floor_at_most(y, n)), n > 0)


def floor_at_least() -> bool:
    x, y, n = integers("x y n")
    return holds((x // n >= y) == (x >= laws.floor_at_least(y, n)), n > 0)


def limits() -> bool:
    x, r, low, high, least, most, f = integers("x r low high least most f")
    a, b = laws.limits(low, high, least, most, f)
    exact, kept = f * x + r, f * clamp(x, a, b) + r
    where = [f > 0, least <= r, r <= most, low <= high]
    return (
        holds(kept == exact, exact >= low, exact <= high, *where)
        and holds(kept < low, exact < low, *where)
        and holds(kept > high, exact > high, *where)
    )


def limits_are_the_nearest() -> bool:
    low, high, least, most, f = integers("low high least most f")
    a, b = laws.limits(low, high, least, most, f)
    return holds(z3.And(f * (a + 1) + most >= low, f * (b - 1) + least <= high), f > 0)


def limits_of_floor() -> bool:
    x, low, high, n = integers("x low high n")
    a, b = laws.limits_of_floor(low, high, n)
    return holds(z3.And(low <= x // n, x // n <= high) == z3.And(a <= x, x <= b), n > 0)


def joined_limbs() -> bool:
    upper, lower = integers("upper lower")
    exact, found = upper * 2**laws.LIMB + lower, laws.joined_limbs(upper, lower, clamp)
    bounds = [upper > -(2**62), upper < 2**62, lower > -(2**63), lower < 2**63]
    return (
        holds(found == exact, exact >= -(2**61), exact <= 2**61)
        and holds(found < -(2**61), exact < -(2**61))
        and holds(found > 2**61, exact > 2**61)
        and holds(z3.And(found > -(2**63), found < 2**63, upper + (lower >> laws.LIMB) < 2**63), *bounds)
    )


def limbs() -> bool:
    (x,) = integers("x")
    return holds(x == (x >> laws.LIMB) * 2**laws.LIMB + (x & (2**laws.LIMB - 1)))


def wraps() -> bool:
    x, y = z3.BitVecs("x y", 64)
    wide = {sign: COMPUTE[sign](z3.SignExt(2, x), z3.SignExt(2, y)) for sign in laws.WRAPS}
    found = {sign: COMPUTE[sign](x, y) for sign in laws.WRAPS}
    return all(holds(law(x, y, found[sign]) == (z3.SignExt(2, found[sign]) != wide[sign])) for sign, law in laws.WRAPS.items())


def reversed_order() -> bool:
    x, y = z3.BitVecs("x y", 64)
    return all(holds(compare(x, y) == COMPARE[SWAPPED[sign]](~x, ~y)) for sign, compare in COMPARE.items())


COMPUTE = {"+": operator.add, "-": operator.sub}

THEOREMS = [
    at_most_zero,
    joined,
    scaled,
    chosen,
    reduced,
    at_most,
    at_least,
    equal,
    floor_at_most,
    floor_at_least,
    limits,
    limits_are_the_nearest,
    limits_of_floor,
    joined_limbs,
    limbs,
    wraps,
    reversed_order,
]


@pytest.mark.parametrize("theorem", THEOREMS, ids=lambda theorem: theorem.__name__)
def test_law(theorem: Callable[[], bool]) -> None:
    assert theorem()


def test_absolute_values_and_zeros() -> None:
    (x,) = integers("x")
    assert holds(either(x >= 0, x, -x) == EXTREMES["maximum"](x, -x))
    assert holds((x == 0) == z3.And(x <= 0, -x <= 0))


#: Laws that are wrong, each with the theorem that says so.
WRONG: list[tuple[Callable[[], bool], str, Any]] = [
    (at_most_zero, "AT_MOST_ZERO", {**laws.AT_MOST_ZERO, "<": lambda difference: difference}),
    (at_most_zero, "AT_MOST_ZERO", {**laws.AT_MOST_ZERO, ">": lambda difference: -difference - 1}),
    (joined, "JOINED", {"maximum": operator.or_, "minimum": operator.or_}),
    (scaled, "scaled", lambda kind, factor: kind),
    (scaled, "REFLECTED", {"maximum": "maximum", "minimum": "minimum"}),
    (chosen, "chosen", lambda condition, then, otherwise: (condition & then) | (condition & otherwise)),
    (reduced, "reduced", lambda constant, divisor: constant // divisor),
    (at_most, "at_most", lambda rest, factor: -(rest // factor)),
    (at_least, "at_least", lambda rest, factor: (rest + factor) // factor),
    (equal, "at_least", lambda rest, factor: rest // factor),
    (floor_at_most, "floor_at_most", lambda limit, divisor: limit * divisor + divisor),
    (floor_at_most, "floor_at_most", lambda limit, divisor: limit * divisor),
    (floor_at_least, "floor_at_least", lambda limit, divisor: limit * divisor + 1),
    (limits, "limits", lambda low, high, least, most, factor: (low - most, -(-(high - least) // factor))),
    (limits_of_floor, "limits_of_floor", lambda low, high, divisor: (low * divisor, high * divisor)),
    (
        joined_limbs,
        "joined_limbs",
        lambda upper, lower, clamp: clamp(upper, -(2**30), 2**30) * 2**laws.LIMB + (lower & (2**laws.LIMB - 1)),
    ),
    (joined_limbs, "joined_limbs", lambda upper, lower, clamp: upper * 2**laws.LIMB + lower),
    (wraps, "WRAPS", {"+": lambda left, right, found: (left ^ found) < 0}),
]


def test_every_law_has_a_theorem() -> None:
    assert {name for _, name, _ in WRONG} == set(laws.__all__) - {"LIMB"}


@pytest.mark.parametrize(("theorem", "name", "wrong"), WRONG)
def test_a_wrong_law_is_found(theorem: Callable[[], bool], name: str, wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(laws, name, wrong)
    assert not theorem()


# ---------------------------------------------------------------- whole comparisons


def formula(mask: Mask) -> Any:
    """A mask, solved or not, as a formula of integers without bounds; each lookup is one of them."""
    match mask:
        case Named(body=body):
            return formula(body)
        case masks.Truth(value):
            return z3.BoolVal(value)
        case And(operands):
            return z3.And(*map(formula, operands))
        case Or(operands):
            return z3.Or(*map(formula, operands))
        case Not(operand):
            return z3.Not(formula(operand))
        case Compare(sign, left, right):
            return COMPARE[sign](number(left), number(right))
        case Span(start, stop):
            position = z3.Int("kv")
            return z3.And(
                True if start is None else position >= number(start),
                True if stop is None else position < number(stop),
            )
    raise AssertionError(f"no formula for {mask!r}")


def number(index: Index) -> Any:
    match index:
        case Constant(value):
            return z3.IntVal(value)
        case Symbol(name):
            return z3.Int(name)
        case Lookup():
            return z3.Int(str(index))
        case Absolute(operand):
            value = number(operand)
            return z3.If(value >= 0, value, -value)
        case Choice(condition, then, otherwise):
            return z3.If(formula(condition), number(then), number(otherwise))
        case Sum(terms, constant):
            return sum((number(term) * factor for term, factor in terms), start=z3.IntVal(constant))
        case Quotient(dividend, divisor):
            return number(dividend) / divisor
        case Arithmetic("minimum" | "maximum" as kind, left, right):
            return EXTREMES[kind](Integer(number(left)), Integer(number(right))).term
        case Arithmetic(sign, left, right):
            operation: Any = {"+": operator.add, "-": operator.sub, "*": operator.mul, "//": operator.truediv, "%": operator.mod}
            return operation[sign](number(left), number(right))
    raise AssertionError(f"no number for {index!r}")


GREAT = 2**63 - 1
LIMIT, DATA = fm.table([3, 5])[q % 2], fm.table([3, 5])[kv % 2]

SOLVED = [
    kv <= GREAT,
    kv > -GREAT,
    kv <= q + GREAT,
    kv * 3 < q * 2 + 1,
    kv * -4 >= LIMIT - 7,
    kv * 6 == q * 4 + 2,
    kv * 6 != q * 4 + 3,
    kv // 16 <= LIMIT,
    kv // GREAT >= q,
    kv // 2**62 == q,
    (kv * 5 - LIMIT) // 7 > q // 3,
    (kv // 3) // 5 < q,
    ((q - kv) * 2**58 + 1) // 3 <= LIMIT,
    kv // 4 * 3 == q // 5 * 2 + LIMIT,
    abs(q - kv) <= fm.where(fm.h == 0, GREAT, 2),
    abs(q * 3 - kv * 2) == LIMIT,
    -abs(kv // 2 - q) * 3 + q < LIMIT,
    fm.minimum(kv, LIMIT) * -2 <= q,
    fm.maximum(kv // 3, q - kv) == LIMIT,
    fm.minimum(abs(kv - 5), fm.maximum(kv - q, q)) // 2 >= LIMIT,
    fm.where(kv < LIMIT, kv * 2, q - kv) <= 9,
    fm.where(kv // 2 == q, DATA, kv) != LIMIT,
    DATA - q * 3 <= LIMIT,
    DATA * 2 - q * 4 == LIMIT * 2,
    q - kv % 5 * 3 > LIMIT - DATA * 3,
    abs(DATA - LIMIT) <= q,
    2 * kv % 3 + 1 + 2 * DATA == 2 * DATA,
    kv - kv <= q - q,
    fm.masks.chunked(64) & fm.sliding_window(left=3, right=5),
    fm.masks.chunk_window(16, left=2),
    fm.masks.block_causal(8),
]


@pytest.mark.parametrize("mask", SOLVED, ids=str)
def test_solved_masks_mean_the_same(mask: Mask) -> None:
    assert holds(formula(mask) == formula(separate(mask)))


@pytest.mark.parametrize("name", ["at_most", "at_least", "floor_at_most", "floor_at_least", "reduced"])
def test_a_wrong_law_makes_masks_mean_something_else(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = getattr(laws, name)
    monkeypatch.setattr(laws, name, lambda *arguments: right(*arguments) + 1)
    afresh = [mask.replace(lambda node: None) for mask in SOLVED]
    for mask in afresh:
        mask.memo.clear()
    try:
        assert not all(holds(formula(cast(Mask, mask)) == formula(separate(cast(Mask, mask)))) for mask in afresh)
    finally:
        for mask in afresh:
            mask.memo.clear()


# ---------------------------------------------------------------- tensors

EDGES = [-(2**63), -(2**63) + 1, -(2**62), -(2**33), -3, -1, 0, 1, 2, 2**31, 2**62 - 1, 2**63 - 2, 2**63 - 1]


def test_limbs_of_tensors() -> None:
    pairs = [(x, y) for x in EDGES for y in EDGES]
    left, right = torch.tensor(pairs).unbind(1)
    upper = (left >> laws.LIMB) * 3 - (right >> laws.LIMB)
    lower = (left & (2**laws.LIMB - 1)) * 3 - (right & (2**laws.LIMB - 1))
    found = laws.joined_limbs(upper, lower, torch.clamp).tolist()
    for (x, y), value in zip(pairs, found, strict=True):
        exact = 3 * x - y
        assert value == exact if abs(exact) <= 2**61 else value > 2**61 if exact > 0 else value < -(2**61)


@pytest.mark.parametrize("sign", laws.WRAPS)
def test_sums_of_tensors_that_wrap_around(sign: str) -> None:
    pairs = [(x, y) for x in EDGES for y in EDGES]
    left, right = torch.tensor(pairs).unbind(1)
    found = laws.WRAPS[sign](left, right, COMPUTE[sign](left, right)).tolist()
    assert found == [not -(2**63) <= COMPUTE[sign](x, y) < 2**63 for x, y in pairs]


def test_ranks_of_any_integer() -> None:
    for low in (-(2**63), -2, 2**63 - 4):
        column = torch.tensor([low, low + 2, low + 3, low])
        pieces = PiecewiseColumn.of(column)
        assert pieces is not None
        for value in (*EDGES, low, low + 1, low + 3):
            inside = [low + i for i in range(4)]
            for inclusive in (False, True):
                wanted = sum(other <= value if inclusive else other < value for other in inside)
                assert int(pieces.rank(torch.tensor([value]), inclusive=inclusive)) == wanted


@pytest.mark.parametrize("column", [[-(2**63), 0, 2**63 - 1], [2**63 - 1, 5, -(2**63)]])
@pytest.mark.parametrize("sign", ["<", "<=", ">", ">="])
def test_thresholds_of_any_integer(column: list[int], sign: str) -> None:
    values = torch.tensor(column)
    way = direction(values)
    assert way == (1 if column[0] < 0 else -1)
    rows = threshold(values.view(1, 1, -1), torch.tensor(EDGES).view(1, 1, -1), 3, sign, rises=way > 0)
    wanted = [[bool(COMPARE[sign](key, edge)) for key in column] for edge in EDGES]
    assert rows.holds(torch.arange(3))[0, 0].tolist() == wanted
