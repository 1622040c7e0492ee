"""The rules for operations on each cell: arithmetic, comparisons, truth values, casts and constants."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial, reduce
from typing import Any, cast

import torch
from torch import Tensor

from flexmask.expr.index import Constant, Index, maximum, minimum
from flexmask.expr.mask import Mask, Truth, where
from flexmask.tracing.proxies import INTEGERS, MAX_CELLS, Beyond, Cell, Cells, Traced, number, truth
from flexmask.tracing.rules import RULES, Rule, each, holds_traced, rule

__all__: list[str] = []

# ---------------------------------------------------------------- arithmetic


def _arithmetic(operation: Callable[[Any, Any], Index], of_truth: Callable[[Any, Any], Mask] | None = None) -> Rule:
    def apply(cells: Cells, func: Any, left: Any, right: Any, *, alpha: int = 1) -> Traced:
        if alpha != 1:
            right = RULES["mul"](cells, func, cells.lift(right), alpha)
        dtype = torch.result_type(left, right)
        if dtype == torch.bool:
            if of_truth is None:
                raise Beyond
            return each(cells, dtype, lambda x, y: of_truth(truth(x), truth(y)), left, right)
        if dtype.is_floating_point or dtype.is_complex:
            raise Beyond(INTEGERS)
        return each(cells, dtype, lambda *pair: cells.fits(operation(*_converted(cells, dtype, pair)), dtype), left, right)

    return apply


def _converted(cells: Cells, dtype: torch.dtype, values: Iterable[Cell]) -> list[Index]:
    """The operands as integers of the dtype that torch converts both to, where no value wraps around."""
    return [cells.fits(number(value), dtype) for value in values]


def _swapped(name: str) -> Rule:
    return lambda cells, func, left, right, **options: RULES[name](cells, func, right, left, **options)


def _quotient(operation: Callable[[Any, Any], Index]) -> Rule:
    def divided(cells: Cells, left: Index, right: Index) -> Index:
        low, high = cells.extent(right)
        if low <= 0 <= high:
            raise Beyond  # torch says what dividing by 0 gives
        return operation(left, right)

    def apply(cells: Cells, func: Any, left: Any, right: Any) -> Traced:
        return cast(Traced, _arithmetic(partial(divided, cells))(cells, func, left, right))

    return apply


for _name, _rule in {
    "add": _arithmetic(lambda x, y: x + y, lambda x, y: x | y),
    "sub": _arithmetic(lambda x, y: x - y),
    "mul": _arithmetic(lambda x, y: x * y, lambda x, y: x & y),
    "minimum": _arithmetic(minimum, lambda x, y: x & y),
    "maximum": _arithmetic(maximum, lambda x, y: x | y),
    "floor_divide": _quotient(lambda x, y: x // y),
    "remainder": _quotient(lambda x, y: x % y),
}.items():
    RULES[_name] = _rule
RULES["subtract"], RULES["multiply"], RULES["__floordiv__"] = RULES["sub"], RULES["mul"], RULES["floor_divide"]
RULES["__mod__"] = RULES["remainder"]
RULES["__rsub__"] = RULES["rsub"] = _swapped("sub")
RULES["__rfloordiv__"], RULES["__rmod__"] = _swapped("floor_divide"), _swapped("remainder")


def _is_natural(cells: Cells, *values: Any) -> bool:
    return all(cells.is_natural(cell) for value in values for cell in cells.lift(value).cells)


@rule("div", "divide", "true_divide")
def _div(cells: Cells, func: Any, left: Any, right: Any, *, rounding_mode: str | None = None) -> Traced:
    if rounding_mode == "floor" or (rounding_mode == "trunc" and _is_natural(cells, left, right)):
        return cast(Traced, RULES["floor_divide"](cells, func, left, right))
    raise Beyond


@rule("fmod")
def _fmod(cells: Cells, func: Any, left: Any, right: Any) -> Traced:
    if _is_natural(cells, left, right):
        return cast(Traced, RULES["remainder"](cells, func, left, right))
    raise Beyond


@rule("neg", "negative")
def _neg(cells: Cells, func: Any, value: Traced) -> Traced:
    return cast(Traced, RULES["sub"](cells, func, 0, value))


@rule("abs", "absolute", "__abs__")
def _abs(cells: Cells, func: Any, value: Traced) -> Traced:
    return each(cells, value.dtype, lambda x: cells.fits(abs(number(x)), value.dtype), value)


@rule("square", "pow")
def _pow(cells: Cells, func: Any, value: Any, exponent: Any = 2) -> Traced:
    if isinstance(exponent, bool) or not isinstance(exponent, int) or not 1 <= exponent <= 4 or value.dtype == torch.bool:
        raise Beyond
    return cast(Traced, reduce(partial(RULES["mul"], cells, func), [value] * exponent, 1))


@rule("clamp", "clip", "clamp_min", "clamp_max")
def _clamp(cells: Cells, func: Any, value: Any, *limits: Any, **named: Any) -> Traced:
    low = high = None
    if func.__name__ == "clamp_max":
        (high,) = (*limits, *named.values())
    elif func.__name__ == "clamp_min":
        (low,) = (*limits, *named.values())
    else:
        low, high = [*limits, None, None][:2]
        low, high = named.get("min", low), named.get("max", high)
    if low is not None:
        is_less = isinstance(low, int) and low <= 0 and _is_natural(cells, value)
        value = _copied(cells, func, value) if is_less else RULES["maximum"](cells, func, value, low)
    return cast(Traced, value if high is None else RULES["minimum"](cells, func, value, high))


# ---------------------------------------------------------------- comparison and truth


def _comparison(operation: Callable[[Any, Any], Mask]) -> Rule:
    def apply(cells: Cells, func: Any, left: Any, right: Any) -> Traced:
        left, right = (_rounded(cells, value, other) for value, other in ((left, right), (right, left)))
        dtype = torch.result_type(left, right)
        if dtype.is_floating_point or dtype.is_complex:
            raise Beyond(INTEGERS)
        return each(cells, torch.bool, lambda *pair: operation(*_converted(cells, dtype, pair)), left, right)

    return apply


def _rounded(cells: Cells, value: Any, other: Any) -> Any:
    """A whole number that is written as a float, as the integer that it is."""
    if isinstance(value, float) and not (isinstance(other, Tensor) and other.dtype.is_floating_point):
        if value.is_integer() and abs(value) < 2**24:
            return int(value)
        raise Beyond
    return value


def _same(sign: str) -> Rule:
    compare = _comparison((lambda x, y: x == y) if sign == "==" else (lambda x, y: x != y))

    def apply(cells: Cells, func: Any, left: Any, right: Any) -> Traced:
        if all(isinstance(v, bool) or (isinstance(v, Tensor) and v.dtype == torch.bool) for v in (left, right)):
            differ = each(cells, torch.bool, lambda x, y: x ^ y, left, right)
            return differ if sign == "!=" else each(cells, torch.bool, lambda x: ~x, differ)
        return cast(Traced, compare(cells, func, left, right))

    return apply


RULES["lt"] = RULES["less"] = _comparison(lambda x, y: x < y)
RULES["le"] = RULES["less_equal"] = _comparison(lambda x, y: x <= y)
RULES["gt"] = RULES["greater"] = _comparison(lambda x, y: x > y)
RULES["ge"] = RULES["greater_equal"] = _comparison(lambda x, y: x >= y)
RULES["eq"] = RULES["__eq__"] = _same("==")
RULES["ne"] = RULES["__ne__"] = RULES["not_equal"] = _same("!=")


def _logical(operation: Callable[[Any, Any], Mask], of_numbers: Callable[[Index, Index], Index] | None = None) -> Rule:
    """A rule for truth values; numbers count as such unless their bits are meant."""

    def apply(cells: Cells, func: Any, left: Any, right: Any) -> Traced:
        dtype = torch.bool if func.__name__.startswith("logical") else torch.result_type(left, right)
        if dtype == torch.bool:
            return each(cells, dtype, lambda x, y: operation(truth(x), truth(y)), left, right)
        if of_numbers is None:
            raise Beyond
        return each(cells, dtype, lambda *pair: of_numbers(*_converted(cells, dtype, pair)), left, right)

    return apply


def _low_bits(left: Index, right: Index) -> Index:
    """``x & (2**n - 1)``, which is ``x % 2**n``."""
    for bits, value in ((left, right), (right, left)):
        if isinstance(bits, Constant) and bits.value >= 0 and (bits.value + 1) & bits.value == 0:
            return value % (bits.value + 1)
    raise Beyond


for _name in ("__and__", "bitwise_and", "logical_and"):
    RULES[_name] = _logical(lambda x, y: x & y, _low_bits)
for _name in ("__or__", "bitwise_or", "logical_or"):
    RULES[_name] = _logical(lambda x, y: x | y)
for _name in ("__xor__", "bitwise_xor", "logical_xor"):
    RULES[_name] = _logical(lambda x, y: x ^ y)


@rule("__invert__", "bitwise_not", "logical_not")
def _not(cells: Cells, func: Any, value: Traced) -> Traced:
    if value.dtype == torch.bool or func.__name__ == "logical_not":
        return each(cells, torch.bool, lambda x: ~truth(x), value)
    return each(cells, value.dtype, lambda x: cells.fits(-1 - number(x), value.dtype), value)


def _shift(operation: Callable[[Index, int], Index]) -> Rule:
    def apply(cells: Cells, func: Any, value: Any, by: Any) -> Traced:
        dtype = torch.result_type(value, by)

        def shifted(x: Cell, n: Cell) -> Index:
            if not isinstance(n, Constant) or not 0 <= n.value < 63:
                raise Beyond
            return cells.fits(operation(cells.fits(number(x), dtype), 2**n.value), dtype)

        return each(cells, dtype, shifted, value, by)

    return apply


RULES["__lshift__"] = RULES["bitwise_left_shift"] = _shift(lambda x, factor: x * factor)
RULES["__rshift__"] = RULES["bitwise_right_shift"] = _shift(lambda x, factor: x // factor)


@rule("where")
def _where(cells: Cells, func: Any, first: Any, second: Any, third: Any) -> Traced:
    condition, then, otherwise = (second, first, third) if func is torch.Tensor.where else (first, second, third)
    return _chosen(cells, condition, then, otherwise, torch.result_type(then, otherwise))


@rule("masked_fill")
def _masked_fill(cells: Cells, func: Any, value: Any, mask: Any, fill: Any) -> Traced:
    return _chosen(cells, mask, fill, value, value.dtype)


def _chosen(cells: Cells, condition: Any, then: Any, otherwise: Any, dtype: torch.dtype) -> Traced:
    if dtype == torch.bool:
        return each(cells, dtype, lambda c, x, y: where(truth(c), truth(x), truth(y)), condition, then, otherwise)
    if dtype.is_floating_point or dtype.is_complex:
        raise Beyond(INTEGERS)

    def choice(c: Cell, x: Cell, y: Cell) -> Index:
        return cells.fits(where(truth(c), number(x), number(y)), dtype)

    return each(cells, dtype, choice, condition, then, otherwise)


@rule("isin")
def _isin(cells: Cells, func: Any, elements: Any, among: Any, *, assume_unique: bool = False, invert: bool = False) -> Traced:
    values = cells.lift(among).cells
    dtype = torch.result_type(elements, among)

    def among_them(x: Cell) -> Mask:
        own, *others = _converted(cells, dtype, (x, *values))
        found = reduce(lambda a, b: a | b, (own == other for other in others), cast(Mask, Truth(False)))
        return ~found if invert else found

    return each(cells, torch.bool, among_them, elements)


# ---------------------------------------------------------------- casts and constants

CASTS = {
    "bool": torch.bool,
    "byte": torch.uint8,
    "char": torch.int8,
    "short": torch.int16,
    "int": torch.int32,
    "long": torch.int64,
}


@rule("to", "type", "type_as", *CASTS)
def _cast(cells: Cells, func: Any, value: Traced, *args: Any, **named: Any) -> Traced:
    given = [item.dtype if isinstance(item, Tensor) else item for item in (*args, *named.values())]
    if func.__name__ == "type" and not (given and isinstance(given[0], torch.dtype)):
        raise Beyond  # torch's older names of types
    dtype = CASTS.get(func.__name__) or next((item for item in given if isinstance(item, torch.dtype)), value.dtype)
    if dtype == value.dtype:
        return value
    if dtype == torch.bool:
        return each(cells, dtype, truth, value)
    if dtype.is_floating_point or dtype.is_complex:
        raise Beyond(INTEGERS)
    return each(cells, dtype, lambda x: cells.fits(number(x), dtype), value)


@rule("new_ones", "new_zeros", "new_full", "ones_like", "zeros_like", "full_like", "new_tensor")
def _constant(cells: Cells, func: Any, like: Traced, *args: Any, **named: Any) -> Any:
    if holds_traced((args, named)):
        raise Beyond
    named.pop("device", None)
    made = func(torch.zeros(like.shape, dtype=like.dtype), *args, **named)
    return cells.constant(made) if made.numel() <= MAX_CELLS else made.to(cells.device)


@rule("contiguous", "detach", "positive", "__pos__", "alias", "requires_grad_")
def _unchanged(cells: Cells, func: Any, value: Traced, *args: Any, **named: Any) -> Traced:
    return value


@rule("clone", "__deepcopy__")
def _copied(cells: Cells, func: Any, value: Traced, *args: Any, **named: Any) -> Traced:
    return each(cells, value.dtype, lambda x: x, value)
