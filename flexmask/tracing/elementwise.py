"""Rules of elementwise operations: arithmetic, comparisons, truth values, casts and constants."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial, reduce
from typing import Any, cast

import torch
from torch import Tensor

from flexmask.expr.choice import where
from flexmask.expr.index import Constant, Index, maximum, minimum
from flexmask.expr.mask import Mask, Truth
from flexmask.tracing.proxies import INTEGERS, MAX_ELEMENTS, Element, NoExpression, Proxy, TraceState, as_integer, as_truth
from flexmask.tracing.rules import RULES, Rule, has_proxy, map_elements, rule

__all__: list[str] = []

# ---------------------------------------------------------------- arithmetic


def _arithmetic(operation: Callable[[Any, Any], Index], on_truth: Callable[[Any, Any], Mask] | None = None) -> Rule:
    def apply(state: TraceState, func: Any, left: Any, right: Any, *, alpha: int = 1) -> Proxy:
        if alpha != 1:
            right = RULES["mul"](state, func, state.lift(right), alpha)
        dtype = torch.result_type(left, right)
        if dtype == torch.bool:
            if on_truth is None:
                raise NoExpression
            return map_elements(state, dtype, lambda x, y: on_truth(as_truth(x), as_truth(y)), left, right)
        if dtype.is_floating_point or dtype.is_complex:
            raise NoExpression(INTEGERS)
        return map_elements(
            state, dtype, lambda *pair: state.in_range(operation(*_converted(state, dtype, pair)), dtype), left, right
        )

    return apply


def _converted(state: TraceState, dtype: torch.dtype, values: Iterable[Element]) -> list[Index]:
    """The operands as integers of the dtype that torch promotes both to, where no value wraps around."""
    return [state.in_range(as_integer(value), dtype) for value in values]


def _reflected(name: str) -> Rule:
    return lambda state, func, left, right, **options: RULES[name](state, func, right, left, **options)


def _quotient(operation: Callable[[Any, Any], Index]) -> Rule:
    def divided(state: TraceState, left: Index, right: Index) -> Index:
        low, high = state.extent(right)
        if low <= 0 <= high:
            raise NoExpression  # torch defines what division by 0 gives
        return operation(left, right)

    def apply(state: TraceState, func: Any, left: Any, right: Any) -> Proxy:
        return cast(Proxy, _arithmetic(partial(divided, state))(state, func, left, right))

    return apply


RULES |= {
    "add": _arithmetic(lambda x, y: x + y, lambda x, y: x | y),
    "sub": _arithmetic(lambda x, y: x - y),
    "mul": _arithmetic(lambda x, y: x * y, lambda x, y: x & y),
    "minimum": _arithmetic(minimum, lambda x, y: x & y),
    "maximum": _arithmetic(maximum, lambda x, y: x | y),
    "floor_divide": _quotient(lambda x, y: x // y),
    "remainder": _quotient(lambda x, y: x % y),
}
RULES["subtract"], RULES["multiply"], RULES["__floordiv__"] = RULES["sub"], RULES["mul"], RULES["floor_divide"]
RULES["__mod__"] = RULES["remainder"]
RULES["__rsub__"] = RULES["rsub"] = _reflected("sub")
RULES["__rfloordiv__"], RULES["__rmod__"] = _reflected("floor_divide"), _reflected("remainder")


def _is_non_negative(state: TraceState, *values: Any) -> bool:
    return all(state.is_non_negative(element) for value in values for element in state.lift(value).elements)


@rule("div", "divide", "true_divide")
def _div(state: TraceState, func: Any, left: Any, right: Any, *, rounding_mode: str | None = None) -> Proxy:
    if rounding_mode == "floor" or (rounding_mode == "trunc" and _is_non_negative(state, left, right)):
        return cast(Proxy, RULES["floor_divide"](state, func, left, right))
    raise NoExpression


@rule("fmod")
def _fmod(state: TraceState, func: Any, left: Any, right: Any) -> Proxy:
    if _is_non_negative(state, left, right):
        return cast(Proxy, RULES["remainder"](state, func, left, right))
    raise NoExpression


@rule("neg", "negative")
def _neg(state: TraceState, func: Any, value: Proxy) -> Proxy:
    return cast(Proxy, RULES["sub"](state, func, 0, value))


@rule("abs", "absolute", "__abs__")
def _abs(state: TraceState, func: Any, value: Proxy) -> Proxy:
    return map_elements(state, value.dtype, lambda x: state.in_range(abs(as_integer(x)), value.dtype), value)


@rule("square", "pow")
def _pow(state: TraceState, func: Any, value: Any, exponent: Any = 2) -> Proxy:
    if isinstance(exponent, bool) or not isinstance(exponent, int) or not 1 <= exponent <= 4 or value.dtype == torch.bool:
        raise NoExpression
    return cast(Proxy, reduce(partial(RULES["mul"], state, func), [value] * exponent, 1))


@rule("clamp", "clip", "clamp_min", "clamp_max")
def _clamp(state: TraceState, func: Any, value: Any, *limits: Any, **named: Any) -> Proxy:
    low = high = None
    if func.__name__ == "clamp_max":
        (high,) = (*limits, *named.values())
    elif func.__name__ == "clamp_min":
        (low,) = (*limits, *named.values())
    else:
        low, high = [*limits, None, None][:2]
        low, high = named.get("min", low), named.get("max", high)
    if low is not None:
        is_less = isinstance(low, int) and low <= 0 and _is_non_negative(state, value)
        value = _copied(state, func, value) if is_less else RULES["maximum"](state, func, value, low)
    return cast(Proxy, value if high is None else RULES["minimum"](state, func, value, high))


# ---------------------------------------------------------------- comparison and truth


def _comparison(operation: Callable[[Any, Any], Mask]) -> Rule:
    def apply(state: TraceState, func: Any, left: Any, right: Any) -> Proxy:
        left, right = (_rounded(state, value, other) for value, other in ((left, right), (right, left)))
        dtype = torch.result_type(left, right)
        if dtype.is_floating_point or dtype.is_complex:
            raise NoExpression(INTEGERS)
        return map_elements(state, torch.bool, lambda *pair: operation(*_converted(state, dtype, pair)), left, right)

    return apply


def _rounded(state: TraceState, value: Any, other: Any) -> Any:
    """A float scalar with an integral value as an int."""
    if isinstance(value, float) and not (isinstance(other, Tensor) and other.dtype.is_floating_point):
        if value.is_integer() and abs(value) < 2**24:
            return int(value)
        raise NoExpression
    return value


def _equality(sign: str) -> Rule:
    compare = _comparison((lambda x, y: x == y) if sign == "==" else (lambda x, y: x != y))

    def apply(state: TraceState, func: Any, left: Any, right: Any) -> Proxy:
        if all(isinstance(v, bool) or (isinstance(v, Tensor) and v.dtype == torch.bool) for v in (left, right)):
            differ = map_elements(state, torch.bool, lambda x, y: x ^ y, left, right)
            return differ if sign == "!=" else map_elements(state, torch.bool, lambda x: ~x, differ)
        return cast(Proxy, compare(state, func, left, right))

    return apply


RULES["lt"] = RULES["less"] = _comparison(lambda x, y: x < y)
RULES["le"] = RULES["less_equal"] = _comparison(lambda x, y: x <= y)
RULES["gt"] = RULES["greater"] = _comparison(lambda x, y: x > y)
RULES["ge"] = RULES["greater_equal"] = _comparison(lambda x, y: x >= y)
RULES["eq"] = RULES["__eq__"] = _equality("==")
RULES["ne"] = RULES["__ne__"] = RULES["not_equal"] = _equality("!=")


def _logical(operation: Callable[[Any, Any], Mask], on_integers: Callable[[Index, Index], Index] | None = None) -> Rule:
    """A rule on truth values; integers only with ``logical_...``, or with a rule for their bits."""

    def apply(state: TraceState, func: Any, left: Any, right: Any) -> Proxy:
        dtype = torch.bool if func.__name__.startswith("logical") else torch.result_type(left, right)
        if dtype == torch.bool:
            return map_elements(state, dtype, lambda x, y: operation(as_truth(x), as_truth(y)), left, right)
        if on_integers is None:
            raise NoExpression
        return map_elements(state, dtype, lambda *pair: on_integers(*_converted(state, dtype, pair)), left, right)

    return apply


def _low_bits(left: Index, right: Index) -> Index:
    """``x & (2**n - 1)``, which is ``x % 2**n``."""
    for bits, value in ((left, right), (right, left)):
        if isinstance(bits, Constant) and bits.value >= 0 and (bits.value + 1) & bits.value == 0:
            return value % (bits.value + 1)
    raise NoExpression


for _name in ("__and__", "bitwise_and", "logical_and"):
    RULES[_name] = _logical(lambda x, y: x & y, _low_bits)
for _name in ("__or__", "bitwise_or", "logical_or"):
    RULES[_name] = _logical(lambda x, y: x | y)
for _name in ("__xor__", "bitwise_xor", "logical_xor"):
    RULES[_name] = _logical(lambda x, y: x ^ y)


@rule("__invert__", "bitwise_not", "logical_not")
def _not(state: TraceState, func: Any, value: Proxy) -> Proxy:
    if value.dtype == torch.bool or func.__name__ == "logical_not":
        return map_elements(state, torch.bool, lambda x: ~as_truth(x), value)
    return map_elements(state, value.dtype, lambda x: state.in_range(-1 - as_integer(x), value.dtype), value)


def _shift(operation: Callable[[Index, int], Index]) -> Rule:
    def apply(state: TraceState, func: Any, value: Any, by: Any) -> Proxy:
        dtype = torch.result_type(value, by)

        def shifted(x: Element, n: Element) -> Index:
            if not isinstance(n, Constant) or not 0 <= n.value < 63:
                raise NoExpression
            return state.in_range(operation(state.in_range(as_integer(x), dtype), 2**n.value), dtype)

        return map_elements(state, dtype, shifted, value, by)

    return apply


RULES["__lshift__"] = RULES["bitwise_left_shift"] = _shift(lambda x, factor: x * factor)
RULES["__rshift__"] = RULES["bitwise_right_shift"] = _shift(lambda x, factor: x // factor)


@rule("where")
def _where(state: TraceState, func: Any, first: Any, second: Any, third: Any) -> Proxy:
    condition, then, otherwise = (second, first, third) if func is torch.Tensor.where else (first, second, third)
    return _choice(state, condition, then, otherwise, torch.result_type(then, otherwise))


@rule("masked_fill")
def _masked_fill(state: TraceState, func: Any, value: Any, mask: Any, fill: Any) -> Proxy:
    return _choice(state, mask, fill, value, value.dtype)


def _choice(state: TraceState, condition: Any, then: Any, otherwise: Any, dtype: torch.dtype) -> Proxy:
    if dtype == torch.bool:
        return map_elements(
            state, dtype, lambda c, x, y: where(as_truth(c), as_truth(x), as_truth(y)), condition, then, otherwise
        )
    if dtype.is_floating_point or dtype.is_complex:
        raise NoExpression(INTEGERS)

    def choice(c: Element, x: Element, y: Element) -> Index:
        return state.in_range(where(as_truth(c), as_integer(x), as_integer(y)), dtype)

    return map_elements(state, dtype, choice, condition, then, otherwise)


@rule("isin")
def _isin(state: TraceState, func: Any, elements: Any, among: Any, *, assume_unique: bool = False, invert: bool = False) -> Proxy:
    values = state.lift(among).elements
    dtype = torch.result_type(elements, among)

    def among_them(x: Element) -> Mask:
        own, *others = _converted(state, dtype, (x, *values))
        found = reduce(lambda a, b: a | b, (own == other for other in others), cast(Mask, Truth(False)))
        return ~found if invert else found

    return map_elements(state, torch.bool, among_them, elements)


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
def _cast(state: TraceState, func: Any, value: Proxy, *args: Any, **named: Any) -> Proxy:
    given = [item.dtype if isinstance(item, Tensor) else item for item in (*args, *named.values())]
    if func.__name__ == "type" and not (given and isinstance(given[0], torch.dtype)):
        raise NoExpression  # a tensor type given by its name
    dtype = CASTS.get(func.__name__) or next((item for item in given if isinstance(item, torch.dtype)), value.dtype)
    if dtype == value.dtype:
        return value
    if dtype == torch.bool:
        return map_elements(state, dtype, as_truth, value)
    if dtype.is_floating_point or dtype.is_complex:
        raise NoExpression(INTEGERS)
    return map_elements(state, dtype, lambda x: state.in_range(as_integer(x), dtype), value)


@rule("new_ones", "new_zeros", "new_full", "ones_like", "zeros_like", "full_like", "new_tensor")
def _constant(state: TraceState, func: Any, like: Proxy, *args: Any, **named: Any) -> Any:
    if has_proxy((args, named)):
        raise NoExpression
    named.pop("device", None)
    made = func(torch.zeros(like.shape, dtype=like.dtype, device="cpu"), *args, **named)
    return state.constant(made) if made.numel() <= MAX_ELEMENTS else made.to(state.device)


@rule("contiguous", "detach", "positive", "__pos__", "alias", "requires_grad_")
def _unchanged(state: TraceState, func: Any, value: Proxy, *args: Any, **named: Any) -> Proxy:
    return value


@rule("clone", "__deepcopy__")
def _copied(state: TraceState, func: Any, value: Proxy, *args: Any, **named: Any) -> Proxy:
    return map_elements(state, value.dtype, lambda x: x, value)
