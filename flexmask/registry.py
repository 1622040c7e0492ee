"""Plugins: installed packages that register masks under the entry-point group ``flexmask.masks``.

An entry point names a module; importing it runs its functions under :func:`named`, which register themselves. The
families of flexmask are registered in the same way. Nothing is imported before a name is asked for that is not known.

- A plugin whose import fails is reported with a warning and contributes no mask, also none that it had registered before it
  failed. Everything else goes on.
- Two packages with one name are an error, raised whenever a name is asked for that is not known, until one of them is gone.
  What either of them registered while plugins were loaded is withdrawn, so that no order of loading decides.
- Threads wait for the one that loads. A plugin that reads text while it is imported knows the masks that are there by then.
"""

from __future__ import annotations

import inspect
import numbers
import reprlib
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, wraps
from typing import TYPE_CHECKING, Any, ParamSpec, cast

from flexmask._checks import kind_of, nearest
from flexmask.errors import DuplicateNameError, ExpressionError, OperandError, PluginWarning
from flexmask.expr.index import Index
from flexmask.expr.mask import Mask, Named, Truth
from flexmask.expr.names import NAMES, signature_of
from flexmask.expr.node import within_depth
from flexmask.expr.tables import RESERVED, Table, as_table, is_tensor

if TYPE_CHECKING:
    from importlib.metadata import Distribution, EntryPoint

__all__ = ["GROUP", "Origin", "call_error", "find", "load", "named", "names", "origin", "package_of", "withdraw"]

P = ParamSpec("P")

#: The entry-point group of modules that define named masks.
GROUP = "flexmask.masks"
#: The distribution that this module belongs to.
OWN = "flexmask"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a named mask comes from.

    Attributes:
        package: the installed package, or the top package of the module where no plugin says more; ``__main__`` for a script.
        version: the package's version, or None where it is not known.
        family: the entry point that names the module, else the module's own name.
    """

    package: str
    version: str | None
    family: str


@dataclass(slots=True)
class _Loader:
    """What is known about loading.

    Attributes:
        lock: held while plugins are loaded.
        state: ``"waiting"``, ``"loading"`` or ``"loaded"``.
        during: the package that was being loaded when a name was registered.
        clash: the name and the two packages of the first name that two packages have.
    """

    lock: threading.RLock = field(default_factory=threading.RLock)
    state: str = "waiting"
    during: dict[str, str] = field(default_factory=dict)
    clash: tuple[str, str, str] | None = None


_loader = _Loader()


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
            raise OperandError(call_error(define, error, args, kwargs)) from None
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


def call_error(function: Callable[..., Any], error: TypeError, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
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


def find(name: str) -> Callable[..., Mask] | None:
    """The named mask of that name, for which plugins are loaded where it is not known; None where there is none.

    Raises:
        DuplicateNameError: the name is not known, and two packages have one name.
    """
    if name not in NAMES:
        try:
            load()
        except DuplicateNameError:
            if name not in NAMES:
                raise
    return NAMES.get(name)


def names() -> list[str]:
    """The names of all masks, those of plugins with them, in alphabetical order.

    Raises:
        DuplicateNameError: two packages have one name.
    """
    load()
    return sorted(NAMES)


def load() -> None:
    """Imports every plugin, once in a process.

    Raises:
        DuplicateNameError: two packages have one name.

    Warns:
        PluginWarning: a plugin cannot be imported, or registers nothing.
    """
    problems: list[str] = []
    with _loader.lock:
        if _loader.state == "loading":  # a plugin that asks for a name while it is imported
            return
        if _loader.state == "waiting":
            _loader.state = "loading"
            try:
                problems = _load_all()
                _loader.state = "loaded"
            finally:
                if _loader.state == "loading":  # interrupted; the next use begins anew
                    _loader.state = "waiting"
    for problem in problems:
        warnings.warn(problem, PluginWarning, stacklevel=3)
    if _loader.clash is not None:
        raise DuplicateNameError(*_loader.clash)


def origin(name: str) -> Origin:
    """Where a known mask comes from. Asks the installed packages, and imports none."""
    module = NAMES[name].__module__
    entry = _entry_of(module)
    if entry is None:
        return Origin(_loader.during.get(name, package_of(module)), None, module.rpartition(".")[2])
    family = entry.name if _module(entry) == module else module.rpartition(".")[2]
    return Origin(_package(entry), _described(entry.dist)[1], family)


def package_of(module: str) -> str:
    """The installed package whose entry points name a module, or one beside it; else the module's top package."""
    entry = _entry_of(module)
    return module.split(".")[0] if entry is None else _package(entry)


def _entry_of(module: str) -> EntryPoint | None:
    near = [entry for entry in _entries() if _shared(_module(entry), module)]
    return max(near, key=lambda entry: _shared(_module(entry), module), default=None)


def _load_all() -> list[str]:
    """Imports every plugin and says what went wrong."""
    problems = []
    clashing: set[str] = set()
    failed: set[str] = set()
    for entry in _entries():
        package, before = _package(entry), set(NAMES)
        error: BaseException | None = None
        try:
            entry.load()
        except BaseException as raised:  # a plugin may do anything; nothing of it may stop the others
            error = raised
        new = set(NAMES) - before
        _loader.during |= dict.fromkeys(new, package)
        if error is None:
            continue
        failed.add(package)
        if isinstance(error, DuplicateNameError) and (other := error.packages[0]) != package:
            clashing |= {package, other}
            _loader.clash = _loader.clash or (error.name, other, package)
            continue
        withdraw(name for name in new if origin(name).package == package)
        if isinstance(error, KeyboardInterrupt):
            raise error
        problems.append(_broken(entry, error))
    withdraw(name for name in list(_loader.during) if name in NAMES and origin(name).package in clashing - {OWN})
    speaking = {origin(name).package for name in NAMES} | set(_loader.during.values())
    silent = {_package(entry): entry for entry in _entries() if _package(entry) not in speaking | failed}
    return problems + [_silent(entry) for entry in silent.values()]


def _broken(entry: EntryPoint, error: BaseException) -> str:
    package = _package(entry)
    remedy = f"`pip install -U {package}` may fix it; `pip uninstall {package}` removes it"
    return (
        f"the plugin {package} cannot be loaded, so its masks are missing: its entry point {entry.name} = {entry.value} raised "
        f"{type(error).__name__}: {error}. {remedy}"
    )


def _silent(entry: EntryPoint) -> str:
    return (
        f"the plugin {_package(entry)} registers no mask: importing its entry point {entry.name} = {entry.value} has to define "
        f"a function under @flexmask.registry.named. `pip uninstall {_package(entry)}` removes it"
    )


@cache
def _entries() -> tuple[EntryPoint, ...]:
    """The entry points of all installed packages: flexmask's own, then the others by name."""
    from importlib.metadata import entry_points  # takes longer to import than all of the expressions

    return tuple(sorted(entry_points(group=GROUP), key=lambda entry: (_package(entry) != OWN, _package(entry), entry.name)))


def _package(entry: EntryPoint) -> str:
    return _described(entry.dist)[0] or _module(entry).split(".")[0]


@cache
def _described(package: Distribution | None) -> tuple[str | None, str | None]:
    """The name and version of an installed package, for each of which its whole description is parsed."""
    return getattr(package, "name", None), getattr(package, "version", None)


def _module(entry: EntryPoint) -> str:
    return entry.value.partition(":")[0].strip()


def _shared(one: str, other: str) -> int:
    """How many leading parts two module names share."""
    count = 0
    for left, right in zip(one.split("."), other.split("."), strict=False):
        if left != right:
            break
        count += 1
    return count


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
