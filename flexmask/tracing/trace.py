"""From a ``mask_mod``, any Python function of four index tensors, to the mask: the function is called once, with proxies.

:func:`as_mask` accepts a mask in any form: a Mask, its text, or a ``mask_mod``.
"""

from __future__ import annotations

import inspect
from functools import cache, partial
from types import CellType
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from flexmask import _sync
from flexmask._checks import check_flag, is_traced
from flexmask.errors import OperandError, TraceError
from flexmask.expr.deferral import refuse_traced
from flexmask.expr.deferred import DeferredMask
from flexmask.expr.index import Opaque, b, h, kv, q
from flexmask.expr.mask import Mask
from flexmask.expr.names import call_hint, describe_non_mask
from flexmask.lowering.mask_mod import MaskMod
from flexmask.parser import cached_mask
from flexmask.tracing import elementwise, layout  # noqa: F401 - these register the rules
from flexmask.tracing.proxies import (
    METADATA,
    RANDOM,
    READS,
    RULES,
    NoExpression,
    Proxy,
    Rule,
    TraceState,
    Untraceable,
    as_truth,
    has_proxy,
)
from flexmask.tracing.recognize import recognize

#: Arguments of torch functions that rules take by position, in this order; a caller may give them by name.
POSITIONS = ("condition", "self", "input", "elements", "mask", "test_elements", "other", "exponent", "value")


def from_mask_mod(mask_mod: MaskMod | Mask, *, strict: bool = False, device: torch.device | str = "cpu") -> Mask:
    """The mask that a FlexAttention ``mask_mod`` computes. Parts that equal a named mask, such as ``causal``, get its name.

    The function is called once, with a proxy for each index. These become expressions: integer arithmetic, comparisons, boolean
    and bitwise operators, ``torch.where``, ``abs``, ``minimum``, ``maximum``, ``clamp``, floor division and remainder, casts,
    small constants, reshapes and reductions of up to 64 values, and any indexing of captured tensors. Any other operation is
    kept as an opaque call: exact, but slower, since it is not separable in q and kv. Captured tensors are not copied: they
    compare by identity and may be longer than the mask. Their values are read by lowerings, if at all.

    Args:
        mask_mod: takes ``(b, h, q_idx, kv_idx)`` and returns a truth value: a function, a closure, a ``functools.partial``,
            the result of torch's ``and_masks`` or ``or_masks``, or an object with ``__call__``; or a mask, whose parts get names
            too.
        strict: whether to raise where an operation has no expression, instead of keeping it as an opaque call.
        device: the device of the indices, for functions that create tensors on it.

    Raises:
        OperandError: ``mask_mod`` is not a function of four indices.
        TraceError: the result is not one truth value per cell. With ``strict`` also: an operation has no expression, or the
            function raises.

    Source: ``torch.nn.attention.flex_attention.create_block_mask`` takes such functions.
    """
    return recognize(trace_function(mask_mod, strict=strict, device=device))


def trace_function(mask_mod: MaskMod | Mask, *, strict: bool = False, device: torch.device | str = "cpu") -> Mask:
    """As :func:`from_mask_mod`, without the recognition of named masks."""
    check_flag(strict, "strict")
    if isinstance(mask_mod, Mask):
        return mask_mod
    _check_function(mask_mod)
    state = TraceState(_sync.resolve_device(device), _captured_names(mask_mod))
    try:
        with _Tracing(state, strict):
            found = mask_mod(*(state.scalar(index, torch.int64) for index in (b, h, q, kv)))
    except TraceError:
        raise
    except (Untraceable, RuntimeError, NotImplementedError, TypeError, ValueError) as error:  # with values the function may work
        if strict:
            raise TraceError(f"{_name(mask_mod)} cannot be traced: {type(error).__name__}: {error}") from error
        return Opaque(mask_mod, (b, h, q, kv)) != 0
    return _result(found, mask_mod, state)


def _captured_names(function: Any) -> dict[int, str]:
    """The variables that hold the tensors which a function captures, with the functions in it, by the ids of the tensors."""
    names: dict[int, str] = {}
    pending, seen = [function], set()
    while pending:
        inner = pending.pop()
        if id(inner) in seen:
            continue
        seen.add(id(inner))
        if isinstance(inner, partial):
            variables: dict[str, Any] = inner.keywords
            pending.append(inner.func)
        elif inspect.isfunction(inner):
            cells = zip(inner.__code__.co_freevars, inner.__closure__ or (), strict=True)
            variables = {name: cell.cell_contents for name, cell in cells if cell != CellType()}  # not those without a value yet
        else:
            continue
        for value in variables.values():
            pending.extend(value if isinstance(value, list | tuple) else [value])
        if inspect.isfunction(inner):
            variables |= {name: inner.__globals__.get(name) for name in inner.__code__.co_names}
        for name, value in variables.items():
            if isinstance(value, Tensor):
                names.setdefault(id(value), name)
    return names


def _check_function(mask_mod: object) -> None:
    wanted = "wanted a function of (b, h, q_idx, kv_idx)"
    if isinstance(mask_mod, type) or not callable(mask_mod) or call_hint(mask_mod):
        raise OperandError(f"{wanted}, got {describe_non_mask(mask_mod)}")
    try:
        signature = inspect.signature(mask_mod.forward if isinstance(mask_mod, torch.nn.Module) else mask_mod)
    except ValueError:
        return  # functions written in C have no signature
    try:
        signature.bind(b, h, q, kv)
    except TypeError as error:
        hint = "; a score_mod is given as score_mod=" if len(signature.parameters) == 5 else ""
        raise OperandError(f"{wanted}; {_name(mask_mod)}: {error}{hint}") from None


def _result(found: Any, mask_mod: MaskMod, state: TraceState) -> Mask:
    if isinstance(found, bool) or (isinstance(found, Tensor) and found.dim() == 0 and found.dtype == torch.bool):
        found = state.lift(found)
    if isinstance(found, Mask):
        raise TraceError(f"{_name(mask_mod)} gives a mask, {found.brief()}, where a truth value is wanted; give that mask itself")
    if not isinstance(found, Proxy) or found.dim() != 0 or found.dtype != torch.bool:
        kind = "a tensor" if isinstance(found, Tensor) else type(found).__name__
        shape = f" of shape {list(found.shape)} and {found.dtype}" if isinstance(found, Tensor) else ""
        raise TraceError(f"{_name(mask_mod)} must give one truth value for a cell, got {kind}{shape}; compare numbers first")
    return as_truth(found.elements[0])


def _name(function: object) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _is_in_place(name: str) -> bool:
    name = name.partition(".")[0]  # of an overload such as add_.Tensor
    return name.startswith("__i") and name != "__invert__" if name.endswith("__") else name.endswith("_")


@cache
def _signature(rule: Rule) -> inspect.Signature:
    return inspect.signature(rule)


class _Tracing(TorchFunctionMode):
    """Handles every torch operation on proxies."""

    def __init__(self, state: TraceState, strict: bool) -> None:
        super().__init__()
        self.state, self.strict = state, strict

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if name in RANDOM:
            raise TraceError(
                f"{name} draws random numbers, so that the mask would not stay the same; use flexmask.masks.random_cells"
            )
        if not has_proxy((args, kwargs)) or name in METADATA:
            return func(*args, **kwargs)
        if name in READS:
            raise Untraceable(f"{name} asks for the number in a cell, as `if` and int() do; choose with torch.where")
        if name not in RULES and _is_in_place(name):
            return self.in_place(name, args, kwargs)
        reason = ""
        if name in RULES:
            try:
                return self.by_rule(RULES[name], func, args, kwargs)
            except NoExpression as beyond:
                reason = f" ({beyond})" if beyond.args else ""
        if self.strict:
            raise TraceError(f"{name} has no expression{reason}; without strict it is kept as an opaque call")
        return self.call(func, args, kwargs)

    def by_rule(self, rule: Rule, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        named = dict(kwargs)
        placed = (*args, *(named.pop(name) for name in POSITIONS if name in named))
        try:
            _signature(rule).bind(self.state, func, *placed, **named)
        except TypeError:  # an option that the rule does not take
            raise NoExpression from None
        return rule(self.state, func, *placed, **named)

    def in_place(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Proxy:
        """An in-place operation, such as ``x &= y``: its result replaces the elements of its first argument."""
        target, function = args[0], getattr(torch.Tensor, f"__{name[3:]}" if name.startswith("__i") else name[:-1], None)
        if not isinstance(target, Proxy) or target.shared or target.is_large or function is None:
            raise Untraceable(f"{name} changes a tensor in place that has other names, or that the function made")
        found = self.__torch_function__(function, (), args, kwargs)
        if found.shape != target.shape or found.dtype != target.dtype or found.is_large:
            raise Untraceable(f"{name} changes the shape or type of what it gives")
        target.elements, target.source = found.elements, None
        return target

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Proxy:
        """The operation as an opaque call."""

        def empty(value: Tensor) -> Tensor:
            return torch.empty(value.shape, dtype=value.dtype, device="meta")

        if "out" in kwargs or kwargs.get("inplace"):
            raise Untraceable(f"{func.__name__} changes a tensor in place")
        given = tree_map_only(Tensor, empty, (args, kwargs))
        example = func(*given[0], **given[1])
        if not isinstance(example, Tensor) or any(has_proxy(v) and not isinstance(v, Proxy) for v in (*args, *kwargs.values())):
            raise Untraceable(f"{func.__name__} has no expression")
        return self.state.opaque_call(func, (*args, *kwargs.values()), tuple(kwargs), example)


# ---------------------------------------------------------------- masks, texts and functions


#: An argument that stands for a mask. A function is traced: see :func:`flexmask.from_mask_mod`.
MaskLike: TypeAlias = Mask | str | MaskMod


def as_mask(mask: object, what: str = "mask", *, also: str = "", device: torch.device | str | None = None) -> Mask:
    """The mask that an argument stands for.

    A text is parsed once and cached. A function is traced at each call: where that costs too much, call
    :func:`flexmask.from_mask_mod` once and pass its result.

    Args:
        mask: a mask, its text, or a ``mask_mod``.
        what: the name of the argument, for messages.
        also: what else the caller takes, for messages.
        device: where the mask is lowered, where that is known.

    Raises:
        TextError: the text is not a mask.
        TraceError: the function does not return one truth value per cell.
        OperandError: the argument is none of these.
    """
    if isinstance(mask, Mask):
        return mask.made() if isinstance(mask, DeferredMask) and not is_traced() else mask  # after a graph break
    if isinstance(mask, str):
        return cached_mask(mask, None if device is None else torch.device(device))
    if callable(mask) and not isinstance(mask, type):
        refuse_traced("the mask of a mask_mod")
        if not call_hint(mask):
            return from_mask_mod(mask, device="cpu" if device is None else device)
    kinds = ", ".join(["a Mask, its text", *([also] if also else [])])
    raise OperandError(f"{what} must be {kinds} or a mask_mod function, got {describe_non_mask(mask)}")
