"""Plugins: installed packages that register masks under the entry-point group ``flexmask.masks``.

An entry point names a module. Importing the module registers its functions under :func:`named`. flexmask registers its own
families in the same way. Plugins are imported when a name is looked up that is not known yet.

- A plugin whose import fails causes a warning. The masks that it registered before are removed; everything else works.
- Two packages with one name are an error at each lookup of an unknown name, until one of them is uninstalled. All masks that
  either of them registered are removed, so the order of loading does not matter.
- One thread loads, the others wait. A plugin that parses text during its import knows the masks that are registered by then.
"""

from __future__ import annotations

import inspect
import numbers
import threading
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache, wraps
from itertools import takewhile
from typing import TYPE_CHECKING, Any, ParamSpec, cast

from flexmask._checks import kind_of, misfit, nearest
from flexmask.errors import DuplicateNameError, ExpressionError, OperandError, PluginWarning
from flexmask.expr.data import Data, along, as_table
from flexmask.expr.deferral import deferrable
from flexmask.expr.form import made
from flexmask.expr.index import Index
from flexmask.expr.mask import Mask, Named, Truth
from flexmask.expr.names import NAMES
from flexmask.expr.node import within_depth
from flexmask.expr.packing import sequence_table
from flexmask.expr.tables import RESERVED, Table

if TYPE_CHECKING:
    from importlib.metadata import Distribution, EntryPoint

__all__ = ["GROUP", "Origin", "find", "load", "named", "names", "origin", "per_token"]

P = ParamSpec("P")

#: The entry-point group of modules that define named masks.
GROUP = "flexmask.masks"
#: The distribution that this module belongs to.
OWN = "flexmask"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a named mask comes from.

    Attributes:
        package: the installed package; without an entry point the top package of the module, ``__main__`` for a script.
        version: the package's version, or None if unknown.
        family: the entry point that names the module, else the module's own name.
    """

    package: str
    version: str | None
    family: str


@dataclass(slots=True)
class _Loader:
    """The state of loading.

    Attributes:
        lock: held while plugins are loaded.
        has_begun: whether they are loaded, or that goes on.
        package: the one whose plugin is being imported; None at other times.
        during: for each name that was registered during loading, the package that was loaded then.
        clash: the first name that two packages have, and these packages.
    """

    lock: threading.RLock = field(default_factory=threading.RLock)
    has_begun: bool = False
    package: str | None = None
    during: dict[str, str] = field(default_factory=dict)
    clash: tuple[str, str, str] | None = None


_loader = _Loader()


def named(define: Callable[P, Mask]) -> Callable[P, Mask]:
    """Registers a function that returns a mask as a named mask.

    The mask prints as the function's name with the arguments that differ from their defaults, can be called in text, and
    calls the function again when a parameter is bound. Data arrives as tables, lists of masks as tuples. The mask must follow
    from the arguments alone: of a function that does not read its data, calls that differ in the data have one form.

    Raises:
        DuplicateNameError: a mask of that name exists.
        ExpressionError: the name has another meaning in text, or is not an identifier.
    """
    if not inspect.isroutine(define):
        raise OperandError(f"@named is for a function that returns a mask, got {kind_of(define)}")
    signature = inspect.signature(define)
    name = define.__name__
    if name in NAMES:
        raise DuplicateNameError(name, origin(name).package, package_of(define.__module__))
    if name in RESERVED:
        raise ExpressionError(f"{name} is the name of a symbol or function; a named mask needs another name")
    if not name.isidentifier() or name.startswith("_"):
        raise ExpressionError(f"a named mask's name must be an identifier without a leading underscore, got {name!r}")

    @deferrable
    @wraps(define)
    def build(*args: P.args, **kwargs: P.kwargs) -> Mask:
        try:
            given = signature.bind(*args, **kwargs)
        except TypeError:
            raise OperandError(misfit(define, args, kwargs)) from None
        arguments = [(key, _argument(value, f"{name}: {key}")) for key, value in given.arguments.items()]
        return within_depth(made(defined, *arguments))

    def defined(*arguments: tuple[str, Any]) -> Mask:
        body = cast(Callable[..., Mask], define)(**dict(arguments))
        if isinstance(body, Truth):
            return body
        changed = [(key, value) for key, value in arguments if not _is_default(value, signature.parameters[key].default)]
        return made(Named, name, tuple(changed), body, build)

    NAMES[name] = build
    RESERVED.add(name)
    if _loader.package is not None:
        _loader.during[name] = _loader.package
    return build


def per_token(data: Data, position: Index, what: str) -> Index:
    """Data with a value for each token, at a position: ``data[position]``, or ``data[b, position]`` where it has a batch axis.

    For named masks that take ids ``[S]`` or ``[B, S]``, as :func:`flexmask.document` does::

        ids = lambda at: per_token(speakers, at, "dialog: speakers")
        return ids(q) == ids(kv)

    Args:
        data: integers; a parameter has a batch axis.
        position: an index expression, such as ``q`` or ``kv``.
        what: the mask and the argument, for messages.

    Raises:
        OperandError: other data than integers.
        ExpressionError: another number of axes than 1 and 2.
    """
    return along(sequence_table(data, what), position)


def withdraw(names: Iterable[str]) -> None:
    """Removes named masks."""
    for name in list(names):
        NAMES.pop(name, None)
        RESERVED.discard(name)


def find(name: str) -> Callable[..., Mask] | None:
    """The named mask of that name, or None. An unknown name loads the plugins.

    Raises:
        DuplicateNameError: the name is unknown, and two packages have one name.
        OperandError: the name is no string.
    """
    if not isinstance(name, str):
        raise OperandError(f"the name of a mask must be a string, got {kind_of(name)}")
    if name not in NAMES:
        try:
            load()
        except DuplicateNameError:
            if name not in NAMES:
                raise
    return NAMES.get(name)


def names() -> list[str]:
    """The names of all masks, including those of plugins, sorted.

    Raises:
        DuplicateNameError: two packages have one name.
    """
    load()
    return sorted(NAMES)


def load() -> None:
    """Imports every plugin, once per process.

    Raises:
        DuplicateNameError: two packages have one name.

    Warns:
        PluginWarning: a plugin cannot be imported, or registers nothing.
    """
    problems: list[str] = []
    with _loader.lock:
        if not _loader.has_begun:  # not again where a plugin looks up a name during its import, when no clash is known yet
            _loader.has_begun = True
            try:
                problems = _load_all()
            except BaseException:  # interrupted; the next lookup starts again
                _loader.has_begun = False
                raise
    for problem in problems:
        warnings.warn(problem, PluginWarning, stacklevel=3)
    if _loader.clash is not None:
        raise DuplicateNameError(*_loader.clash)


def origin(name: str) -> Origin:
    """Where a registered mask comes from, from the metadata of installed packages; imports nothing.

    Raises:
        ExpressionError: there is no mask of that name.
    """
    if not isinstance(name, str) or name not in NAMES:
        raise ExpressionError(f"there is no named mask {name!r}.{nearest(str(name), NAMES)} registry.names() lists them")
    module = NAMES[name].__module__
    entry = _entry_of(module)
    if entry is None:
        return Origin(_loader.during.get(name, module.split(".")[0]), None, module.rpartition(".")[2])
    family = entry.name if _module(entry) == module else module.rpartition(".")[2]
    return Origin(_package(entry), _name_and_version(entry.dist)[1], family)


def package_of(module: str) -> str:
    """The installed package whose entry points name a module, or a module next to it; else the one whose plugin is
    being imported, or the module's top package.
    """
    entry = _entry_of(module)
    return (_loader.package or module.split(".")[0]) if entry is None else _package(entry)


def _entry_of(module: str) -> EntryPoint | None:
    near = [entry for entry in _entries() if _shared(_module(entry), module)]
    return max(near, key=lambda entry: _shared(_module(entry), module), default=None)


def _load_all() -> list[str]:
    """Imports every plugin; returns the messages of those that fail."""
    problems = []
    clashes: list[tuple[str, str, str]] = []
    failed: set[str] = set()
    for entry in _entries():
        package, before = _package(entry), set(NAMES)
        error: BaseException | None = None
        _loader.package = package
        try:
            entry.load()
        except BaseException as raised:  # a plugin may raise anything; the others load anyway
            error = raised
        _loader.package = None
        if error is None:
            continue
        failed.add(package)
        if isinstance(error, DuplicateNameError) and (other := error.packages[0]) != package:
            clashes.append((error.name, other, package))
            continue
        withdraw(name for name in set(NAMES) - before if origin(name).package == package)
        if isinstance(error, KeyboardInterrupt):
            raise error
        problems.append(_broken(entry, error))
    clashing = {package for _, *packages in clashes for package in packages} - {OWN}
    withdraw(name for name in _loader.during if name in NAMES and origin(name).package in clashing)
    registered = {origin(name).package for name in NAMES} | set(_loader.during.values())
    _loader.clash = next(iter(clashes), None)
    silent = {_package(entry): entry for entry in _entries() if _package(entry) not in registered | failed}
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
    from importlib.metadata import entry_points  # slow to import

    return tuple(sorted(entry_points(group=GROUP), key=lambda entry: (_package(entry) != OWN, _package(entry), entry.name)))


def _package(entry: EntryPoint) -> str:
    return _name_and_version(entry.dist)[0] or _module(entry).split(".")[0]


@cache
def _name_and_version(package: Distribution | None) -> tuple[str | None, str | None]:
    """The name and version of an installed package; cached, since reading either parses its whole metadata."""
    return getattr(package, "name", None), getattr(package, "version", None)


def _module(entry: EntryPoint) -> str:
    return entry.value.partition(":")[0].strip()


def _shared(one: str, other: str) -> int:
    """The number of leading parts that two module names share."""
    same = takewhile(lambda pair: pair[0] == pair[1], zip(one.split("."), other.split("."), strict=False))
    return len(list(same))


def _argument(value: Any, what: str) -> Any:
    if value is None or isinstance(value, Mask | Index | Table | str | int):
        return value
    if isinstance(value, numbers.Integral):  # NumPy's integers are arrays as well
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, list | tuple) and any(isinstance(item, Mask) or callable(item) for item in value):
        return tuple(value)
    if isinstance(value, list | tuple | range) or hasattr(value, "__array__"):  # of tensors, too
        return as_table(value, what)
    return value


def _is_default(value: Any, default: Any) -> bool:
    return type(value) is type(default) and not isinstance(value, Index) and bool(value == default)
