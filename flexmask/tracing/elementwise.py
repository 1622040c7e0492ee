"""Rules of elementwise operations: arithmetic, comparisons, truth values, casts and constants."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial, reduce
from typing import Any, cast

import torch
from torch import Tensor

from flexmask.expr.choice import where
from flexmask.expr.index import Constant, Index, as_index, maximum, minimum
from flexmask.expr.mask import Mask, Truth
from flexmask.tracing.proxies import (
    INTEGERS,
    MAX_ELEMENTS,
    RULES,
    Element,
    NoExpression,
    Proxy,
    Rule,
    TraceState,
    as_integer,
    as_truth,
    has_proxy,
    map_elements,
    rule,
)

__all__: list[str] = []

# ---------------------------------------------------------------- arithmetic and truth


def _map_truths(state: TraceState, operation: Callable[..., Mask], *values: Any) -> Proxy:
    """An operation on the elements of values that broadcast, as truth values."""
    return map_elements(state, torch.bool, lambda *row: operation(*map(as_truth, row)), *values)


def _map_integers(
    state: TraceState, dtype: torch.dtype, operation: Callable[..., Element], *values: Any, gives: torch.dtype | None = None
) -> Proxy:
    """An operation on the elements of values that broadcast, as integers of the dtype that torch promotes all of them to.

    No value wraps around, in the operands and in the result, which is of the same dtype by default.
    """
    if dtype.is_floating_point or dtype.is_complex:
        raise NoExpression(INTEGERS)

    def checked(*row: Element) -> Element:
        return state.in_range(operation(*(state.in_range(as_integer(element), dtype) for element in row)), dtype)

    return map_elements(state, gives or dtype, checked, *values)


def _operator(on_integers: Callable[[Any, Any], Index] | None, on_truth: Callable[[Any, Any], Mask] | None = None) -> Rule:
    """A rule on integers, on truth values, or on both; ``logical_...`` takes integers as truth values."""

    def apply(state: TraceState, func: Any, left: Any, right: Any, *, alpha: int = 1) -> Proxy:
        if alpha != 1:
            right = RULES["mul"](state, func, state.lift(right), alpha)
        dtype = torch.bool if func.__name__.startswith("logical") else torch.result_type(left, right)
        if dtype == torch.bool and on_truth is not None:
            return _map_truths(state, on_truth, left, right)
        if dtype == torch.bool or on_integers is None:
            raise NoExpression
        return _map_integers(state, dtype, on_integers, left, right)

    return apply


def _reflected(name: str) -> Rule:
    return lambda state, func, left, right, **options: RULES[name](state, func, right, left, **options)


def _quotient(operation: Callable[[Any, Any], Index]) -> Rule:
    def apply(state: TraceState, func: Any, left: Any, right: Any) -> Proxy:
        def divided(x: Index, y: Index) -> Index:
            low, high = state.extent(y)
            if low <= 0 <= high:
                raise NoExpression  # torch defines what division by 0 gives
            return operation(x, y)

        return cast(Proxy, _operator(divided)(state, func, left, right))

    return apply


def _low_bits(left: Index, right: Index) -> Index:
    """``x & (2**n - 1)``, which is ``x % 2**n``."""
    for bits, value in ((left, right), (right, left)):
        if isinstance(bits, Constant) and bits.value >= 0 and (bits.value + 1) & bits.value == 0:
            return value % (bits.value + 1)
    raise NoExpression


def _shift(operation: Callable[[Index, int], Index]) -> Rule:
    def shifted(x: Index, by: Index) -> Index:
        if not isinstance(by, Constant) or not 0 <= by.value < 63:
            raise NoExpression
        return operation(x, 2**by.value)

    return _operator(shifted)


rule("add")(_operator(operator.add, operator.or_))
rule("sub", "subtract")(_operator(operator.sub))
rule("mul", "multiply")(_operator(operator.mul, operator.and_))
rule("minimum")(_operator(minimum, operator.and_))
rule("maximum")(_operator(maximum, operator.or_))
rule("floor_divide", "__floordiv__")(_quotient(operator.floordiv))
rule("remainder", "__mod__")(_quotient(operator.mod))
rule("rsub", "__rsub__")(_reflected("sub"))
rule("__rfloordiv__")(_reflected("floor_divide"))
rule("__rmod__")(_reflected("remainder"))
rule("__lshift__", "bitwise_left_shift")(_shift(operator.mul))
rule("__rshift__", "bitwise_right_shift")(_shift(operator.floordiv))
rule("__and__", "bitwise_and", "logical_and")(_operator(_low_bits, operator.and_))
rule("__or__", "bitwise_or", "logical_or")(_operator(None, operator.or_))
rule("__xor__", "bitwise_xor", "logical_xor")(_operator(None, operator.xor))


@rule("div", "divide", "true_divide")
def _div(state: TraceState, func: Any, left: Any, right: Any, *, rounding_mode: str | None = None) -> Proxy:
    if rounding_mode == "floor" or (rounding_mode == "trunc" and state.is_non_negative(left, right)):
        return cast(Proxy, RULES["floor_divide"](state, func, left, right))
    raise NoExpression


@rule("fmod")
def _fmod(state: TraceState, func: Any, left: Any, right: Any) -> Proxy:
    if state.is_non_negative(left, right):
        return cast(Proxy, RULES["remainder"](state, func, left, right))
    raise NoExpression


@rule("neg", "negative")
def _neg(state: TraceState, func: Any, value: Proxy) -> Proxy:
    return cast(Proxy, RULES["sub"](state, func, 0, value))


@rule("abs", "absolute", "__abs__")
def _abs(state: TraceState, func: Any, value: Proxy) -> Proxy:
    return _map_integers(state, value.dtype, abs, value)


@rule("__invert__", "bitwise_not", "logical_not")
def _not(state: TraceState, func: Any, value: Proxy) -> Proxy:
    if value.dtype == torch.bool or func.__name__ == "logical_not":
        return _map_truths(state, operator.invert, value)
    return _map_integers(state, value.dtype, lambda x: -1 - x, value)


@rule("square", "pow")
def _pow(state: TraceState, func: Any, value: Any, exponent: Any = 2) -> Proxy:
    if isinstance(exponent, bool) or not isinstance(exponent, int) or not 1 <= exponent <= 4 or value.dtype == torch.bool:
        raise NoExpression
    return cast(Proxy, reduce(partial(RULES["mul"], state, func), [value] * exponent, 1))


@rule("clamp", "clip")
def _clamp(state: TraceState, func: Any, value: Any, min: Any = None, max: Any = None) -> Proxy:
    if min is not None:
        is_less = isinstance(min, int) and min <= 0 and state.is_non_negative(value)
        value = _copied(state, func, value) if is_less else RULES["maximum"](state, func, value, min)
    return cast(Proxy, value if max is None else RULES["minimum"](state, func, value, max))


rule("clamp_min")(lambda state, func, value, min: _clamp(state, func, value, min=min))
rule("clamp_max")(lambda state, func, value, max: _clamp(state, func, value, max=max))


# ---------------------------------------------------------------- comparisons and choices


def _comparison(operation: Callable[[Any, Any], Mask], on_truth: Callable[[Any, Any], Mask] | None = None) -> Rule:
    def apply(state: TraceState, func: Any, left: Any, right: Any) -> Proxy:
        left, right = (_rounded(value, other) for value, other in ((left, right), (right, left)))
        dtype = torch.result_type(left, right)
        if dtype == torch.bool and on_truth is not None:
            return _map_truths(state, on_truth, left, right)
        return _map_integers(state, dtype, operation, left, right, gives=torch.bool)

    return apply


def _rounded(value: Any, other: Any) -> Any:
    """A float scalar with an integral value as an int."""
    if isinstance(value, float) and not (isinstance(other, Tensor) and other.dtype.is_floating_point):
        if value.is_integer() and abs(value) < 2**24:
            return int(value)
        raise NoExpression
    return value


rule("lt", "less")(_comparison(operator.lt))
rule("le", "less_equal")(_comparison(operator.le))
rule("gt", "greater")(_comparison(operator.gt))
rule("ge", "greater_equal")(_comparison(operator.ge))
rule("eq", "__eq__")(_comparison(operator.eq, lambda x, y: ~(x ^ y)))
rule("ne", "__ne__", "not_equal")(_comparison(operator.ne, operator.xor))


@rule("where")
def _where(state: TraceState, func: Any, first: Any, second: Any, third: Any) -> Proxy:
    condition, then, otherwise = (second, first, third) if func is torch.Tensor.where else (first, second, third)
    return _choice(state, condition, then, otherwise, torch.result_type(then, otherwise))


@rule("masked_fill")
def _masked_fill(state: TraceState, func: Any, value: Any, mask: Any, fill: Any) -> Proxy:
    return _choice(state, mask, fill, value, value.dtype)


def _choice(state: TraceState, condition: Any, then: Any, otherwise: Any, dtype: torch.dtype) -> Proxy:
    if dtype == torch.bool:
        return _map_truths(state, where, condition, then, otherwise)
    # The condition comes as 0 or 1, which `as_truth` takes back.
    return _map_integers(state, dtype, lambda c, x, y: where(as_truth(c), x, y), condition, then, otherwise)


@rule("isin")
def _isin(state: TraceState, func: Any, elements: Any, among: Any, *, assume_unique: bool = False, invert: bool = False) -> Proxy:
    values, dtype = state.lift(among), torch.result_type(elements, among)
    each = [state.scalar(value, values.dtype) for value in values.elements]

    def is_among(own: Index, *others: Index) -> Mask:
        found = reduce(operator.or_, (own == other for other in others), cast(Mask, Truth(False)))
        return ~found if invert else found

    return _map_integers(state, dtype, is_among, state.lift(elements), *each, gives=torch.bool)


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
    return _map_integers(state, dtype, lambda x: x, value)


@rule("new_ones", "new_zeros", "new_full", "ones_like", "zeros_like", "full_like", "new_tensor")
def _constant(state: TraceState, func: Any, like: Proxy, *args: Any, **named: Any) -> Any:
    if has_proxy((args, named)):
        raise NoExpression
    named.pop("device", None)
    made = func(torch.zeros(like.shape, dtype=like.dtype, device="cpu"), *args, **named)
    if made.numel() > MAX_ELEMENTS:
        return made.to(state.device)
    if made.dtype.is_floating_point or made.dtype.is_complex:
        raise NoExpression
    kind: Callable[[Any], Element] = Truth if made.dtype == torch.bool else as_index
    return state.proxy(map(kind, made.flatten().tolist()), made.shape, made.dtype)


@rule("contiguous", "detach", "positive", "__pos__", "alias", "requires_grad_")
def _unchanged(state: TraceState, func: Any, value: Proxy, *args: Any, **named: Any) -> Proxy:
    return value


@rule("clone", "__deepcopy__")
def _copied(state: TraceState, func: Any, value: Proxy, *args: Any, **named: Any) -> Proxy:
    return map_elements(state, value.dtype, lambda x: x, value)
