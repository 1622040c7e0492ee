"""Forms: expressions with a :class:`~flexmask.expr.tables.Slot` in the place of each tensor, and what is kept of them.

An expression is a form and its data. :func:`made` finds the form of an operation that was made before: it serves all data, and
what was worked out from it alone is known.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import count
from operator import attrgetter
from threading import Lock
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast
from weakref import WeakKeyDictionary, WeakValueDictionary

from flexmask._checks import is_tensor
from flexmask.errors import FlexmaskError

if TYPE_CHECKING:
    from torch import Tensor

    from flexmask.expr.node import Node
    from flexmask.expr.tables import Slot

#: Plain values that may be a part of a form that is kept.
PLAIN = {bool, float, int, str, type(None)}

N = TypeVar("N", bound="Node")
R = TypeVar("R")


class NeedsDataError(BaseException):
    """A form was asked for what its data has. It is no Exception, so that no function that makes a mask goes on without."""


class Sizes(tuple[Any, ...]):
    """The shape of a tensor that a form does not have: the number of its axes is known."""

    def _refuse(self, *_: object) -> NoReturn:
        raise NeedsDataError("the sizes of data")

    __iter__ = __contains__ = __hash__ = _refuse

    def __getitem__(self, place: Any) -> Any:
        return Sizes(tuple.__getitem__(self, place)) if isinstance(place, slice) else self._refuse()

    def __add__(self, other: Any) -> Any:
        return Sizes((None,) * (len(self) + len(other)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, tuple) or len(other) != len(self):
            return False
        return len(self) == 0 or self._refuse()

    def __ne__(self, other: object) -> bool:
        return not self == other


class Held:
    """A tensor of an expression, with its shape and dtype when a node took it.

    Args:
        tensor: the tensor; as the leaf of a pytree it may be anything.
        slot: the slot of a leaf, which says how many axes and which dtype it must have. What has not is refused where the
            expression is used.

    Attributes:
        memo: what was worked out from its values.
    """

    __slots__ = ("dtype", "memo", "shape", "tensor")

    def __init__(self, tensor: Tensor, slot: Slot | None = None) -> None:
        fits = slot is None or (is_tensor(tensor) and (tensor.dim(), tensor.dtype) == (slot.axes, slot.dtype))
        self.tensor, self.shape, self.dtype = tensor, tensor.shape if fits else None, tensor.dtype if fits else None
        self.memo: dict[Any, Any] = {}


class Key:
    """What identifies an expression: plain values and the keys of the nodes below. Hashing it does not visit these again."""

    __slots__ = ("_hash", "_parts")

    def __init__(self, *parts: Any) -> None:
        self._parts, self._hash = parts, hash(parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Key) or self._hash != other._hash:
            return False
        if self._parts is not other._parts:
            if self._parts != other._parts:
                return False
            other._parts = self._parts  # so that a shared key is compared once
        return True


class Kept:
    """What was kept lately, by keys: between ``size`` and twice as many. What is asked for again stays."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._new: dict[Any, Any] = {}
        self._old: dict[Any, Any] = {}
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._new.keys() | self._old.keys())

    def get(self, key: Any) -> Any:
        """What is kept for a key, or None."""
        found = self._new.get(key)
        if found is None and (found := self._old.get(key)) is not None:
            return self.add(key, found)
        return found

    def add(self, key: Any, value: Any) -> Any:
        """Keeps a value, and gives that of another thread, if it was faster."""
        with self._lock:
            value = self._new.setdefault(key, self._old.get(key, value))
            if len(self._new) > self.size:
                self._old, self._new = self._new, {}
            return value


class Derived:
    """The attributes of a node that follow from its fields; :class:`Node` describes them.

    They are no fields, so that FSDP, which searches the fields of a module's arguments for tensors, meets no node twice.
    """

    __slots__ = (
        "__weakref__", "_form", "below", "depth", "digest", "held", "is_kept", "key", "lifted",
        "memo", "params", "slots", "symbols",
    )  # fmt: skip

    _form: Node | None
    below: tuple[Node, ...]
    depth: int
    digest: str
    held: tuple[Held, ...]
    is_kept: bool
    key: Key
    lifted: Any
    memo: dict[str, Any]
    params: tuple[str, ...]
    slots: tuple[int, ...]
    symbols: frozenset[str]


#: For :func:`made`: by an operation and its operands, their form, the numbers of the tensors that it uses where it does not use
#: all, and the operands, whose ids are in the key.
MADE = Kept(2048)
#: The forms that exist, by name.
FORMS: WeakValueDictionary[str, Node] = WeakValueDictionary()


def made(make: Callable[..., R], *values: Any) -> R:
    """``make(*values)``, whose form is found if it was made before.

    Args:
        make: a kind of node, or another function that makes one. It is called with forms, and with data where it reads some.
        values: nodes, plain values and tuples of these.
    """
    form, held = joined(make, values)
    return cast(R, of_form(form, held) if held else form)


def joined(make: Callable[..., Any], values: tuple[Any, ...]) -> tuple[Any, tuple[Held, ...]]:
    """The form of an operation, and its data. Data that several operands have is one slot."""
    data: list[Held] = []
    key: list[Any] = [make]
    operands = tuple([_operand(value, data, key) for value in values])
    whole: Any = tuple(key)
    try:
        found = MADE.get(whole)
    except TypeError:  # a plain value that has no hash
        found = whole = None
    if found is None:
        found = _form(make, operands, len(data))
        if whole is not None and (found[0] is None or (not found[0].held and found[0].is_kept)):
            found = MADE.add(whole, found)
    form, used, _ = found
    if form is None:
        node = make(*values)
        return node.form, node.held
    if form.held:  # it was made with data that is no operand
        return form.form, form.held
    return form, tuple(data) if used is None else tuple([data[number] for number in used])


def _operand(value: Any, data: list[Held], key: list[Any]) -> Any:
    """The form of an operand, with the numbers that its slots have among all data, which its own data is added to."""
    if isinstance(value, Derived):
        form = cast("Node", value).form
        if own := value.held:
            form = form.placed(tuple([_number(held, data) for held in own]))
        key.append(id(form))
        return form
    key.append(type(value))
    if type(value) is tuple:
        key.append(len(value))
        return tuple([_operand(item, data, key) for item in value])
    key.append(value)
    return value


def _number(held: Held, data: list[Held]) -> int:
    """The place of a tensor among all data."""
    for number, other in enumerate(data):
        if other.tensor is held.tensor:
            return number
    data.append(held)
    return len(data) - 1


def _form(make: Callable[..., Any], operands: tuple[Any, ...], tensors: int) -> tuple[Any, Any, Any]:
    """What :data:`MADE` keeps of an operation with so many tensors; no form where it reads data, or messages need some."""
    used = None
    try:
        form = make(*operands)
    except (FlexmaskError, NeedsDataError):
        if not tensors:
            raise
        return None, None, operands
    if form.held:
        return (None if tensors else form), None, operands
    if tensors and len(form.slots) < tensors:
        used, form = form.slots, form.placed(tuple(range(len(form.slots))))
    digest = form.digest  # before torch.compile asks for it, which does not follow how it is made
    return FORMS.get(digest, form) if form.is_kept else form, used, operands


def filled(form: N, held: tuple[Held, ...]) -> N:
    """A form, whose slots are numbers of tensors, with its data."""
    if form.held or not form.slots:
        return form
    return cast(N, of_form(form.placed(tuple(range(len(form.slots)))), tuple([held[number] for number in form.slots])))


def of_digest(digest: str, tensors: Sequence[Tensor]) -> Node:
    """The expression with some tensors whose form has a digest and is in use."""
    return filled(FORMS[digest], tuple(map(Held, tensors)))


def of_form(form: Node, held: tuple[Held, ...]) -> Node:
    """An expression as its form and its data."""
    value = object.__new__(form.filled_kind)
    value.take(form, held)
    return value


#: Numbers of values without a name of their own, such as functions in functions, in this process.
NUMBERS: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
COUNT = count()


def name_of_value(value: Any) -> str:
    """A text of a plain value or a function, the same in each process where it has a name."""
    if type(value).__module__ in ("builtins", "torch") and not callable(value):
        return f"{type(value).__name__} {value!r}"
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    try:
        if attrgetter(name)(sys.modules[cast(str, module)]) is value:
            return f"{module}.{name}"
    except (AttributeError, KeyError, TypeError):  # it is not found by its name
        pass
    try:
        return f"{type(value).__name__} number {NUMBERS.setdefault(value, next(COUNT))}"
    except TypeError:  # of Python itself, so that its text is its name
        return repr(value)
