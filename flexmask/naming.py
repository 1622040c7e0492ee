"""Named masks: functions that return an expression, and the names under which text knows them."""

from __future__ import annotations

import difflib
import inspect
import numbers
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, wraps
from typing import Any, ParamSpec, cast

from flexmask.algebra import Mask, Named, Truth
from flexmask.checks import kind_of
from flexmask.errors import DuplicateNameError, ExpressionError, FlexmaskError, OperandError
from flexmask.index import Index
from flexmask.nodes import within_depth
from flexmask.tables import RESERVED, Param, Table, as_table, is_tensor, write_data

__all__ = ["NAMES", "misfit", "named", "nearest", "signature_of", "uncalled", "withdraw", "write_arguments"]

P = ParamSpec("P")

#: Every named mask by its name, as far as its module is imported. :mod:`flexmask.registry` adds those of plugins.
NAMES: dict[str, Callable[..., Mask]] = {}


def named(define: Callable[P, Mask]) -> Callable[P, Mask]:
    """Makes a function that returns a mask a named mask.

    The result prints as the function's name with the arguments that differ from their defaults, can be called in text, and
    is defined anew when one of its parameters is bound. Arguments that hold data arrive as tables, lists of masks as tuples.

    Raises:
        DuplicateNameError: there is a mask of that name.
        ExpressionError: the name means something else in text, or cannot stand there.
    """
    if not inspect.isroutine(define):
        raise OperandError(f"@named is for a function that returns a mask, got {kind_of(define)}")
    signature = inspect.signature(define)
    name = define.__name__
    if name in NAMES:
        from flexmask.registry import package_of  # only the registry knows which package a module belongs to

        raise DuplicateNameError(name, package_of(NAMES[name].__module__), package_of(define.__module__))
    if name in RESERVED:
        raise ExpressionError(f"{name} is the name of a symbol or function; a named mask needs another name")
    if not name.isidentifier() or name.startswith("_"):
        raise ExpressionError(f"a named mask's name must be an identifier without a leading underscore, got {name!r}")

    @wraps(define)
    def build(*args: P.args, **kwargs: P.kwargs) -> Mask:
        try:
            given = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise OperandError(misfit(define, error, args, kwargs)) from None
        arguments = {key: _argument(value, f"{name}: {key}") for key, value in given.arguments.items()}
        body = cast(Callable[..., Mask], define)(**arguments)
        if isinstance(body, Truth):
            return body
        changed = tuple((k, v) for k, v in arguments.items() if not _is_default(v, signature.parameters[k].default))
        return within_depth(Named(name, changed, body, build))

    NAMES[name] = build
    RESERVED.add(name)
    return build


def withdraw(names: Iterable[str]) -> None:
    """Takes names back, so that text no longer knows them."""
    for name in list(names):
        NAMES.pop(name, None)
        RESERVED.discard(name)


def signature_of(function: Callable[..., Any]) -> str:
    """The parameters of a function with their defaults, in parentheses, without annotations."""
    parameters = [p.replace(annotation=inspect.Parameter.empty) for p in inspect.signature(function).parameters.values()]
    return str(inspect.Signature(parameters))


def uncalled(value: object) -> str:
    """How a function that makes a named mask is called, for a message; nothing for anything else."""
    name = getattr(value, "__name__", "")
    define = NAMES.get(name) if isinstance(name, str) else None
    if define is None or define is not value:
        return ""
    try:
        define()
    except FlexmaskError:
        return f"call it with its arguments, {name}{signature_of(define)}"
    return f"call it, {name}()"


def misfit(function: Callable[..., Any], error: TypeError, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Why arguments do not fit a function, and how they are written.

    Args:
        function: what is called.
        error: what binding the arguments raised.
        args: the arguments that are given by position.
        kwargs: those that are given by name.
    """
    name, parameters = function.__name__, inspect.signature(function).parameters
    by_name = [key for key, p in parameters.items() if p.kind is p.KEYWORD_ONLY and key not in kwargs]
    unnamed = args[sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters.values()) :]
    if 0 < len(unnamed) <= len(by_name):
        given = [f"{key}={reprlib.repr(value)}" for key, value in zip(by_name, unnamed, strict=False)]
        if len(given) == 1:
            written = " or ".join(f"{key}={reprlib.repr(unnamed[0])}" for key in by_name)
        else:
            written = f"{name}({', '.join([*given, *(f'{key}={reprlib.repr(value)}' for key, value in kwargs.items())])})"
        verb = "is" if len(by_name) == 1 else "are"
        return f"{name}: {', '.join(by_name)} {verb} given by name only: write {written}"
    wrong = next((word for word in kwargs if word not in parameters), "")
    hint = nearest(wrong, parameters) if wrong else ""
    return f"{name}: {error}.{hint} Its signature is {name}{signature_of(function)}"


def _argument(value: Any, what: str) -> Any:
    if value is None or isinstance(value, Mask | Index | Table | str | int):
        return value
    if isinstance(value, numbers.Integral):  # NumPy's integers are arrays as well
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, list | tuple) and any(isinstance(item, Mask) or callable(item) for item in value):
        return tuple(value)
    if isinstance(value, list | tuple | range) or is_tensor(value) or hasattr(value, "__array__"):
        return as_table(value, what)
    return value


def _is_default(value: Any, default: Any) -> bool:
    return type(value) is type(default) and not isinstance(value, Index) and bool(value == default)


@cache
def _first_parameter(define: Callable[..., Mask]) -> str:
    return next(iter(inspect.signature(define).parameters), "")


def write_arguments(define: Callable[..., Mask], arguments: Iterable[tuple[str, Any]], bare: bool) -> str:
    """The arguments of a named mask as text: a leading mask by position, everything else by name."""

    def write(value: Any) -> str:
        if isinstance(value, tuple):
            return f"[{', '.join(map(write, value))}]"
        if isinstance(value, Table | Param):
            return write_data(value, bare)
        return value.write(bare)[0] if isinstance(value, Mask | Index) else repr(value)

    return ", ".join(
        write(value) if key == _first_parameter(define) and _holds_masks(value) else f"{key}={write(value)}"
        for key, value in arguments
    )


def _holds_masks(value: Any) -> bool:
    return isinstance(value, Mask | tuple)


def nearest(word: str, known: Iterable[str]) -> str:
    """The known word nearest to ``word`` as a hint for a message, or nothing where none is near."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" Did you mean {close[0]}?" if close else ""
