"""Checks of single arguments, whose messages say what was given and what is wanted."""

from __future__ import annotations

import difflib
import inspect
import math
import numbers
import operator
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

from flexmask.errors import ExpressionError, FlexmaskError, OperandError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "check_function",
    "checked_int",
    "checked_number",
    "closest",
    "is_tensor",
    "kind_of",
    "names_explained",
    "nearest",
    "not_plain_reason",
]

P = ParamSpec("P")
R = TypeVar("R")

#: Characters of a value that a message shows.
MAX_TEXT = 60


def kind_of(value: Any) -> str:
    """What was given, for a message: its kind, and as much of it as helps."""
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if hasattr(value, "dtype") and hasattr(value, "layout"):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"nested Tensor of {dtype}" if value.is_nested else f"{type(value).__name__} {dtype}{list(value.shape)}"
    if callable(value) and hasattr(value, "__name__"):
        return f"the function {value.__name__}"
    text = str(value)
    if "\n" in text:
        return type(value).__name__
    return f"{type(value).__name__} {text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + '...'}"


def checked_int(
    value: object,
    what: str,
    least: int | None = 1,
    most: int | None = None,
    kind: type[FlexmaskError] = ExpressionError,
    wanted: str = "an integer",
) -> int:
    """An integer of any library as a Python int.

    Args:
        value: what was given.
        what: the name of the argument, for messages.
        least: the smallest value allowed; None for no limit.
        most: the greatest value allowed; None for no limit.
        kind: the error that is raised for an integer outside these limits.
        wanted: what is accepted, for messages.

    Raises:
        OperandError: ``value`` is not an integer. Booleans are not.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(cast(Any, value))
    except (TypeError, ValueError, RuntimeError):
        raise OperandError(f"{what} must be {wanted}, got {value!r}") from None
    if least is not None and number < least:
        raise kind(f"{what} must be at least {least}, got {value!r}")
    if most is not None and number > most:
        raise kind(f"{what} must be at most {most}, got {number}")
    return number


def checked_number(value: object, what: str) -> float:
    """A real number as Python's own.

    Raises:
        OperandError: it is none.
        ExpressionError: it is not finite.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        hint = "; take tensor.item()" if hasattr(value, "item") else ""
        raise OperandError(f"{what} must be a number, got {kind_of(value)}{hint}")
    try:
        found = float(value)
    except OverflowError:
        found = math.inf
    if not math.isfinite(found):
        raise ExpressionError(f"{what} must be a finite number, got {str(value)[:MAX_TEXT]}")
    return found


def check_function(value: Any, what: str, form: str) -> None:
    """Raises an OperandError unless ``value`` can be called with as many arguments as ``form`` has, e.g. ``(x, y) -> z``."""
    wanted = f"{what} must be a function {form}, got {kind_of(value)}"
    if not callable(value) or isinstance(value, type):
        raise OperandError(wanted)
    arguments = [part for part in form[1 : form.index(")")].split(",") if part]
    try:
        inspect.signature(getattr(value, "forward", value)).bind(*arguments)
    except TypeError as error:
        raise OperandError(f"{wanted}: {error}") from None
    except ValueError:
        pass  # functions written in C tell no signature


def names_explained(equivalents: Mapping[str, str]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a function: an argument by a name that other libraries have raises an OperandError with the one to write.

    Args:
        equivalents: for names that the function does not have, what to write.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in kwargs:
                if name in equivalents:
                    raise OperandError(f"{function.__name__.strip('_')} has no argument {name}: {equivalents[name]}")
            return function(*args, **kwargs)

        return checked

    return decorate


def is_tensor(data: object) -> bool:
    """Whether ``data`` is a torch tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(data, torch.Tensor)


def not_plain_reason(tensor: Tensor) -> str:
    """What a tensor is that is no plain one, and what to do about it; nothing for a plain tensor."""
    import torch

    if tensor.is_nested:
        return (
            "a nested tensor: pad it, torch.nested.to_padded_tensor(tensor, 0), or pack its values and describe the documents "
            "by cu_seqlens=tensor.offsets()"
        )
    if tensor.layout != torch.strided:
        return f"one of layout {tensor.layout}: make it dense, tensor.to_dense()"
    return f"one of {tensor.dtype}: take tensor.int_repr() or tensor.dequantize()" if tensor.is_quantized else ""


def closest(word: str, known: Iterable[str]) -> str | None:
    """The known word closest to ``word``, or None where none is close."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1)), None)


def nearest(word: str, known: Iterable[str]) -> str:
    """The known word closest to ``word`` as a hint for a message, or nothing where none is close."""
    close = closest(word, known)
    return f" Did you mean {close}?" if close else ""
