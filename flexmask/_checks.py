"""Checks of single arguments, whose messages say what was given and what is wanted."""

from __future__ import annotations

import difflib
import inspect
import math
import numbers
import operator
import reprlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

from flexmask.errors import ExpressionError, FlexmaskError, OperandError

if TYPE_CHECKING:
    from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

#: Characters of a value that a message shows.
MAX_TEXT = 60
#: Arguments by name of a function at most for a message that asks which of them a value is for; of more it shows the signature.
MAX_NAMED = 4
#: What arguments of windows count, for messages: one number gives another mask in each of them.
COUNTS = {
    "left": " (keys before the query's own)",
    "right": " (keys after it)",
    "size": " (keys in all, with the query's own)",
}


def kind_of(value: Any) -> str:
    """What was given, for a message: its kind, and as much of it as helps."""
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if is_tensor(value):
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
        if isinstance(value, bool) or (not isinstance(value, int) and str(getattr(value, "dtype", "")) == "torch.bool"):
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


def check_flag(value: object, what: str) -> None:
    """Raises an OperandError unless ``value`` is True or False: what else is true or not is a mistake, as in ``flag="false"``."""
    if not isinstance(value, bool):
        raise OperandError(f"{what} must be True or False, got {kind_of(value)}")


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


def signature_of(function: Callable[..., Any]) -> str:
    """The parameters of a function with their defaults, in parentheses, without annotations and ``self``."""
    given = inspect.signature(function).parameters.values()
    parameters = [p.replace(annotation=inspect.Parameter.empty) for p in given if p.name != "self"]
    return str(inspect.Signature(parameters))


def misfit(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The message for arguments that do not fit a function: the reason, and how to write the call; nothing where they do.

    Args:
        function: the function.
        args: the arguments given by position.
        kwargs: the arguments given by name.
    """
    signature = inspect.signature(function)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        reason = str(error)
    else:
        return ""
    name, parameters = _name_of(function), signature.parameters
    by_name = [key for key, p in parameters.items() if p.kind is p.KEYWORD_ONLY and key not in kwargs]
    by_place = [key for key, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    if by_place[:1] == ["self"]:
        by_place, args = by_place[1:], args[1:]
    unnamed = args[len(by_place) :]
    if 0 < len(unnamed) <= len(by_name) <= MAX_NAMED:
        if len(unnamed) == 1 < len(by_name):
            written = " or ".join(f"{key}={reprlib.repr(unnamed[0])}{COUNTS.get(key, '')}" for key in by_name)
        else:  # with all names, as the first argument may be meant for one of the others
            places = zip([*by_place, *by_name], args, strict=False)
            given = [f"{key}={reprlib.repr(value)}" for key, value in (*places, *kwargs.items())]
            written = f"{name}({', '.join(given)})"
        first = f"the arguments by position are {', '.join(by_place)}; " if by_place else ""
        verb = "is" if len(by_name) == 1 else "are"
        return f"{name}: {first}{', '.join(by_name)} {verb} given by name only: write {written}"
    wrong = next((word for word in kwargs if word not in parameters), "")
    hint = nearest(wrong, parameters) if wrong else ""
    if hint and repr(wrong) not in reason:  # which names an argument that is missing alone
        hint = f"{hint[:-1]} in place of {wrong}?"
    return f"{name}: {reason}.{hint} Its signature is {name}{signature_of(function)}"


def _name_of(function: Callable[..., Any]) -> str:
    """The name by which a function is called: of ``__init__`` that of its class."""
    return function.__qualname__.removesuffix(".__init__").rpartition(".")[2]


def names_explained(equivalents: Mapping[str, str]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a function: a call with arguments that it does not have, or without those that it needs, is an OperandError.

    Args:
        equivalents: for names that other libraries have for arguments, what to write.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in kwargs:
                if name in equivalents:
                    raise OperandError(f"{_name_of(function)} has no argument {name}: {equivalents[name]}")
            if is_traced():  # a graph cannot break within a try block on every version of torch
                return function(*args, **kwargs)
            try:
                return function(*args, **kwargs)
            except TypeError as error:
                if not isinstance(error, FlexmaskError) and (reason := misfit(function, args, kwargs)):
                    raise OperandError(reason) from None
                raise

        return checked

    return decorate


def has_torch() -> bool:
    """Whether torch is imported."""
    return "torch" in sys.modules


# As torch.compiler.assume_constant_result does. Dynamo would make a variable of each module that is imported.
vars(has_torch)["_dynamo_marked_constant"] = True


def is_traced() -> bool:
    """Whether ``torch.compile`` traces the code that calls this; without importing torch."""
    if not has_torch():
        return False
    import torch

    return torch.compiler.is_dynamo_compiling()


def is_tensor(data: object) -> bool:
    """Whether ``data`` is a torch tensor, without importing torch."""
    if not has_torch():
        return False
    import torch

    return isinstance(data, torch.Tensor)


def not_plain_reason(tensor: Tensor) -> str:
    """What a tensor is that is no plain one, and what to do about it; nothing for a plain tensor."""
    import torch

    if tensor.is_nested:
        return (
            "a nested tensor: pad it, torch.nested.to_padded_tensor(tensor, 0), or pack its values and describe the documents "
            "by cu_seqlens=tensor.offsets()"
        )
    if hasattr(tensor, "to_local"):
        return "a DTensor: take tensor.to_local(), and a mask of the heads and tokens that this rank has"
    if tensor.layout != torch.strided:
        return f"one of layout {tensor.layout}: make it dense, tensor.to_dense()"
    return f"one of {tensor.dtype}: take tensor.int_repr() or tensor.dequantize()" if tensor.is_quantized else ""


def check_plain(tensor: Tensor, what: str) -> None:
    """Raises an OperandError for a tensor that is no plain one."""
    if reason := not_plain_reason(tensor):
        raise OperandError(f"{what} must be a plain tensor, got {reason}")


def closest(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The known word closest to ``word``, or None where none has at least this similarity, from 0 to 1."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)), None)


def nearest(word: str, known: Iterable[str]) -> str:
    """The known word closest to ``word`` as a hint for a message, or nothing where none is close."""
    close = closest(word, known)
    return f" Did you mean {close}?" if close else ""


def count_text(number: int, singular: str) -> str:
    """A number of things, e.g. ``2 blocks``."""
    return f"{number:,} {singular}{'' if number == 1 else 's'}"


def lengths_text(q_len: int, kv_len: int, by: str = "x") -> str:
    """The lengths of a mask, e.g. ``1 query x 4 keys``."""
    return f"{'1 query' if q_len == 1 else f'{q_len:,} queries'} {by} {count_text(kv_len, 'key')}"
