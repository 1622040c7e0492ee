"""Tracing: from any ``mask_mod`` to the mask that it computes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from flexmask import _sync
from flexmask.errors import OperandError, TraceError
from flexmask.expr.index import b, h, kv, q
from flexmask.expr.mask import Mask
from flexmask.expr.names import describe_non_mask, uncalled
from flexmask.expr.opaque import Opaque
from flexmask.tracing import elementwise, layout  # noqa: F401 - these register the rules
from flexmask.tracing.proxies import Beyond, Cells, Traced, Untraceable, truth
from flexmask.tracing.recognize import recognise
from flexmask.tracing.rules import METADATA, RANDOM, READS, RULES, Rule, holds_traced, mapped

__all__ = ["follow", "from_mask_mod"]

#: What rules take by position, in this order, though it may be given by name.
POSITIONS = ("condition", "self", "input", "elements", "mask", "test_elements", "other", "exponent", "value")

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def from_mask_mod(mask_mod: MaskMod | Mask, *, strict: bool = False, device: torch.device | str = "cpu") -> Mask:
    """The mask that a FlexAttention ``mask_mod`` computes, under the names of masks that it is written like.

    The function is called once with stand-ins for its indices. Integer arithmetic, comparisons, boolean and bitwise
    operators, ``torch.where``, ``abs``, ``minimum``, ``maximum``, ``clamp``, floor division and remainder, casts, small
    constants, reshapes and reductions of up to 64 values, and any indexing of the tensors that it captured become the
    expression that they are. Anything else becomes a call in its place: the mask is right everywhere, but what depends on
    that call does not separate. Captured tensors stay the function's own: they compare by identity, may be longer than the
    mask is, and their values are read once for their range.

    Args:
        mask_mod: takes ``(b, h, q_idx, kv_idx)`` and gives a truth value; closures, ``functools.partial``, torch's
            ``and_masks`` and ``or_masks`` and objects with ``__call__`` will do. A mask is returned as it is.
        strict: raise where an operation has no expression, instead of keeping it as a call.
        device: where the function finds its indices to be, for the tensors that it makes itself.

    Raises:
        OperandError: ``mask_mod`` is not a function of four indices.
        TraceError: the result is no truth value for each cell; with ``strict``, an operation without an expression, or an
            error of the function's own.

    Source: ``torch.nn.attention.flex_attention.create_block_mask`` takes such functions.
    """
    return recognise(follow(mask_mod, strict=strict, device=device))


def follow(mask_mod: MaskMod | Mask, *, strict: bool = False, device: torch.device | str = "cpu") -> Mask:
    """As :func:`trace`, without looking for named masks."""
    if isinstance(mask_mod, Mask):
        return mask_mod
    _check_function(mask_mod)
    cells = Cells(_sync.resolve_device(device))
    try:
        with _Tracing(cells, strict):
            found = mask_mod(*(cells.symbol(name) for name in ("b", "h", "q", "kv")))
    except TraceError:
        raise
    except (Untraceable, RuntimeError, NotImplementedError, TypeError, ValueError) as error:  # the function may work on numbers
        if strict:
            raise TraceError(f"{_name(mask_mod)} cannot be traced: {type(error).__name__}: {error}") from error
        return Opaque(mask_mod, (b, h, q, kv)) != 0
    return _result(found, mask_mod, cells)


def _check_function(mask_mod: object) -> None:
    wanted = "wanted a function of (b, h, q_idx, kv_idx)"
    if isinstance(mask_mod, type) or not callable(mask_mod) or uncalled(mask_mod):
        raise OperandError(f"{wanted}, got {describe_non_mask(mask_mod)}")
    try:
        signature = inspect.signature(mask_mod.forward if isinstance(mask_mod, torch.nn.Module) else mask_mod)
    except ValueError:
        return  # functions written in C tell no signature
    try:
        signature.bind(b, h, q, kv)
    except TypeError as error:
        hint = "; a score_mod is given as score_mod=" if len(signature.parameters) == 5 else ""
        raise OperandError(f"{wanted}; {_name(mask_mod)}: {error}{hint}") from None


def _result(found: Any, mask_mod: MaskMod, cells: Cells) -> Mask:
    if isinstance(found, Tensor) and not isinstance(found, Traced) and found.dim() == 0 and found.dtype == torch.bool:
        found = cells.lift(found)
    if isinstance(found, bool):
        found = cells.lift(found)
    if isinstance(found, Mask):
        raise TraceError(f"{_name(mask_mod)} gives a mask, {found.brief()}, where a truth value is wanted; give that mask itself")
    if not isinstance(found, Traced) or found.dim() != 0 or found.dtype != torch.bool:
        kind = "a tensor" if isinstance(found, Tensor) else type(found).__name__
        shape = f" of shape {list(found.shape)} and {found.dtype}" if isinstance(found, Tensor) else ""
        raise TraceError(f"{_name(mask_mod)} must give one truth value for a cell, got {kind}{shape}; compare numbers first")
    return truth(found.cells[0])


def _name(function: object) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _is_in_place(name: str) -> bool:
    name = name.partition(".")[0]  # of an overload such as add_.Tensor
    return name.startswith("__i") and name != "__invert__" if name.endswith("__") else name.endswith("_")


@cache
def _signature(rule: Rule) -> inspect.Signature:
    return inspect.signature(rule)


class _Tracing(TorchFunctionMode):
    """Answers every operation of torch on stand-ins."""

    def __init__(self, cells: Cells, strict: bool) -> None:
        super().__init__()
        self.cells, self.strict = cells, strict

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if name in RANDOM:
            raise TraceError(
                f"{name} draws random numbers, so that the mask would not stay the same; use flexmask.masks.random_cells"
            )
        if not holds_traced((args, kwargs)):
            return func(*args, **kwargs)
        if name in METADATA:
            return func(*args, **kwargs)
        if name in READS:
            raise Untraceable(f"{name} asks for the number in a cell, as `if` and int() do; choose with torch.where")
        if name not in RULES and _is_in_place(name):
            return self.changed(name, args, kwargs)
        try:
            if name in RULES:
                return self.ruled(RULES[name], func, args, kwargs)
        except Beyond as beyond:
            reason = f" ({beyond})" if beyond.args else ""
        else:
            reason = ""
        if self.strict:
            raise TraceError(f"{name} has no expression{reason}; without strict it is kept as a call")
        return self.call(func, args, kwargs)

    def ruled(self, rule: Rule, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        named = dict(kwargs)
        placed = (*args, *(named.pop(name) for name in POSITIONS if name in named))
        try:
            _signature(rule).bind(self.cells, func, *placed, **named)
        except TypeError:  # an option that the rule does not know
            raise Beyond from None
        return rule(self.cells, func, *placed, **named)

    def changed(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
        """An operation in place, such as ``x &= y``: what it gives stands in the cells of its tensor."""
        target, function = args[0], getattr(torch.Tensor, f"__{name[3:]}" if name.startswith("__i") else name[:-1], None)
        if not isinstance(target, Traced) or target.shared or target.is_large or function is None:
            raise Untraceable(f"{name} changes a tensor in place that has other names, or that the function made")
        found = self.__torch_function__(function, (), args, kwargs)
        if found.shape != target.shape or found.dtype != target.dtype or found.is_large:
            raise Untraceable(f"{name} changes the shape or type of what it gives")
        target.cells, target.source = found.cells, None
        return target

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
        """The operation itself, on what stands in its arguments' cells."""

        def empty(value: Any) -> Any:
            return torch.empty(value.shape, dtype=value.dtype, device="meta") if isinstance(value, Tensor) else value

        if "out" in kwargs or kwargs.get("inplace"):
            raise Untraceable(f"{func.__name__} changes a tensor in place")
        example = func(*mapped(empty, args), **mapped(empty, kwargs))
        if not isinstance(example, Tensor) or any(
            holds_traced(v) and not isinstance(v, Traced) for v in (*args, *kwargs.values())
        ):
            raise Untraceable(f"{func.__name__} has no expression")
        return self.cells.called(func, (*args, *kwargs.values()), tuple(kwargs), example)
