"""Base class of expressions: immutable nodes that are equal where they are the same expression.

An expression may use one node many times. Its keys, its text and its pickle take time in the number of distinct nodes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self, TypeVar, cast

from flexmask._checks import is_traced, kind_of
from flexmask.errors import ExpressionError, LoweringError, OperandError
from flexmask.expr.form import FORMS, Derived, Held, Key, filled, joined, made, name_of_value
from flexmask.expr.torch_functions import torch_function_message

if TYPE_CHECKING:
    from torch import Tensor

#: Operations inside each other at most in what a user builds. Everything that is done with an expression may use Python's stack
#: for each of them, next to what the caller needs of it.
MAX_DEPTH = 100
#: Nodes in a text at most; of a larger expression the outermost operation is written, and operands of more than
#: :data:`MAX_OPERAND` nodes are abbreviated.
MAX_WRITTEN = 10_000
MAX_OPERAND = 50

N = TypeVar("N", bound="Node")
R = TypeVar("R")


#: What :func:`_reader` gives for each kind of node. (Where ``torch.compile`` meets ``functools.cache``, it warns.)
READERS: dict[type, tuple[list[str], Callable[[Any], tuple[Any, ...]]]] = {}


def _reader(kind: Any) -> tuple[list[str], Callable[[Any], tuple[Any, ...]]]:
    """The fields of a node of this kind, and what reads them."""
    if kind not in READERS:
        names = [f.name for f in fields(kind) if f.init]
        read: Any = attrgetter(*names) if len(names) != 1 else lambda node: (getattr(node, names[0]),)
        READERS[kind] = names, read
    return READERS[kind]


def key_of(value: Any) -> Any:
    """``value`` with the key of each node in its place."""
    return _map(value, attrgetter("key"))


def within_depth(node: N) -> N:
    """The node itself.

    Raises:
        ExpressionError: it has more operations inside each other than can be worked with.
    """
    if node.depth > MAX_DEPTH:
        raise ExpressionError(
            f"the expression has {node.depth} operations inside each other; at most {MAX_DEPTH} are possible. Join masks by one "
            "operator (a | b | c counts once, however many there are), add numbers up in groups, or look them up in a table"
        )
    return node


def nodes_in(values: tuple[Any, ...]) -> list[Node]:
    """The nodes among values and tuples of values, in order."""
    found: list[Node] = []
    for value in values:
        if isinstance(value, Node):
            found.append(value)
        elif isinstance(value, tuple):
            found += nodes_in(value)
    return found


def _map(value: Any, function: Callable[[Node], Any]) -> Any:
    """A value, or a tuple of values, with what ``function`` gives for each node in its place."""
    if isinstance(value, Node):
        return function(value)
    if isinstance(value, tuple):
        return tuple([_map(item, function) for item in value])
    return value


def _joined_names(parts: Iterable[tuple[Any, ...]]) -> tuple[Any, ...]:
    """What is in some of several sorted tuples, sorted; the tuple itself where only one has something."""
    found: tuple[Any, ...] = ()
    for own in parts:
        if own and own != found:
            found = tuple(sorted({*found, *own})) if found else own
    return found


def _has(node: Node, name: str) -> bool:
    """Whether an attribute is derived already."""
    try:
        object.__getattribute__(node, name)
    except AttributeError:
        return False
    return True


def _content(value: Any) -> Any:
    """What a value is in :attr:`Node.digest`."""
    if isinstance(value, Node):
        return value.digest
    return [*map(_content, value)] if isinstance(value, tuple) else name_of_value(value)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Node(Derived):
    """A frozen value: its fields are ints, strings, other nodes and tuples of these.

    Attributes:
        key: equal exactly where two nodes are the same expression.
        symbols: the index symbols (``b``, ``h``, ``q``, ``kv``, ``q_len``, ``kv_len``) that occur below.
        depth: how many operations are inside each other, 1 for a node with none below.
        below: the nodes directly below, in the order of the fields.
        held: the tensors below, each once, in the order of the fields, with their shapes and dtypes when this was made.
        params: the names of the parameters that are not bound yet, in alphabetical order.
        memo: what later layers worked out about this node; no part of its identity.
        slots: the numbers of the tensors of a form.
        is_kept: whether a form may be kept for later expressions, as it holds neither data nor a function that may hold some.
        digest: a name of a form by all that it consists of, the same in each process.
    """

    #: Whether nodes of this kind may be kept: see ``is_kept``.
    KEPT: ClassVar[bool] = True

    def __post_init__(self) -> None:
        values = self._values()
        below = tuple(nodes_in(values))
        self._put("below", below)
        self._put("_form", None)
        self._put("held", ())
        self._put("symbols", self._make_symbols())
        self._put("params", self._make_params())
        self._put("depth", 1 + max([child.depth for child in below], default=0))
        if any(child.held for child in below):
            form, held = joined(type(self), values)
            self._put("_form", form)
            self._put("held", held)
        else:
            self._put("slots", self._make_slots())
            self._put("is_kept", self.KEPT and all(child.is_kept for child in below))

    def _put(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def take(self, form: Node, held: tuple[Held, ...]) -> None:
        """Makes a new node a form with data. Its fields are read when they are asked for."""
        put = object.__setattr__
        put(self, "_form", form)
        put(self, "held", held)
        put(self, "depth", form.depth)
        put(self, "symbols", form.symbols)
        put(self, "params", form.params)

    def _values(self) -> tuple[Any, ...]:
        return _reader(type(self))[1](self)

    def _make_key(self) -> Key:
        return Key(type(self).__name__, *map(key_of, self._values()))

    def _make_symbols(self) -> frozenset[str]:
        symbols: frozenset[str] = frozenset()
        for child in self.below:
            symbols = child.symbols if symbols <= child.symbols else symbols | child.symbols
        return symbols

    def _make_params(self) -> tuple[str, ...]:
        return _joined_names([child.params for child in self.below])

    def _make_slots(self) -> tuple[int, ...]:
        return _joined_names([child.slots for child in self.below])

    if not TYPE_CHECKING:  # where an attribute that does not exist stays an error

        def __getattr__(self, name: str) -> Any:
            """Derives an attribute when it is first asked for."""
            if name in ("key", "digest"):
                for node in self.walk() if any(not _has(child, name) for child in self.below) else (self,):
                    if not _has(node, name):  # those below first, as Python's stack is short
                        node._put(name, getattr(node, f"_make_{name}")())
            elif name == "memo":
                self._put("memo", {})
            elif (name == "below" or name in _reader(type(self))[0]) and _has(self, "_form"):
                self._fill()
            else:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
            return object.__getattribute__(self, name)

    def kept(self, name: str, make: Callable[[], R]) -> R:
        """What ``make`` gives, worked out once and kept in :attr:`memo` under a name."""
        memo: dict[str, R] = self.memo
        if name not in memo:
            memo[name] = make()
        return memo[name]

    @property
    def form(self) -> Self:
        """The expression with a slot in the place of each tensor."""
        return self if self._form is None else cast(Self, self._form)

    @property
    def filled_kind(self) -> type[Node]:
        """The kind of a form with data."""
        return type(self)

    def _fill(self) -> None:
        """Makes the nodes below of an expression that was made by its form."""
        made: dict[int, Node] = {}
        for node in self.form.walk():
            made[id(node)] = node
            if node.slots:
                made[id(node)] = value = self if node is self._form else object.__new__(node.filled_kind)
                values = node._filled_values(made, self.held)
                for name, own in zip(_reader(type(value))[0], values, strict=True):
                    value._put(name, own)
                value._put("below", tuple(nodes_in(values)))
                if value is not self:
                    own = filled(node, self.held)
                    value.take(own.form, own.held)

    def _filled_values(self, made: dict[int, Node], held: tuple[Held, ...]) -> tuple[Any, ...]:
        """The fields of a form with data, with each node below replaced."""
        return cast("tuple[Any, ...]", _map(self._values(), lambda child: made[id(child)]))

    def placed(self, numbers: tuple[int, ...]) -> Self:
        """The form with other numbers of its slots."""
        if numbers == self.slots:
            return self
        placed = self.memo.setdefault("placed", {})
        if numbers not in placed:
            of = dict(zip(self.slots, numbers, strict=True))
            placed[numbers] = self.replace(lambda node: node._with_numbers(of))
        return cast(Self, placed[numbers])

    def _with_numbers(self, numbers: dict[int, int]) -> Node | None:
        """A form without operands with other numbers; None to visit those of this one."""
        return None if self.slots else self

    def with_tensors(self, tensors: Sequence[Tensor]) -> Self:
        """The same expression with other tensors in the places of :attr:`tensors`."""
        return filled(self.form, tuple(map(Held, tensors)))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors below, each once, in the order of the fields.

        Raises:
            LoweringError: as :meth:`check_held`.
        """
        self.check_held()
        return tuple([held.tensor for held in self.held])

    def check_held(self) -> None:
        """Raises where a tensor has another shape or dtype than when the expression was made, which has these in it."""
        for held in self.held:
            tensor = held.tensor
            if held.shape is None:
                raise LoweringError(
                    f"the mask {self.form} was given {kind_of(tensor)} in the place of a tensor of other axes or dtype, by "
                    "torch.vmap or by another function of pytrees. A mask has its batch as the first axis of its data, "
                    "[batch, ...]: call it without vmap, or make it inside from the data"
                )
            # In compiled code a size is no number: a graph serves all that the axes have.
            has_shape = tensor.dim() == len(held.shape) if is_traced() else tensor.shape == held.shape
            if not has_shape or tensor.dtype != held.dtype:
                what = "the mask" if is_traced() else self.brief()
                raise LoweringError(
                    f"a tensor of {what} was {held.dtype}{list(held.shape)} when that was made, and is {tensor.dtype}"
                    f"{list(tensor.shape)} now. Its values may change, its shape and dtype may not: make the mask again, or give "
                    "it a parameter and bind the data of each step"
                )

    def _make_digest(self) -> str:
        content = [type(self).__name__, *map(_content, self._values())]
        digest = hashlib.blake2b(repr(content).encode(), digest_size=16).hexdigest()
        if (first := FORMS.setdefault(digest, self)) is not self:
            self.memo["first"] = first  # which is found by the digest as long as this one is
        return digest

    #: NumPy leaves operators with a node to the node, instead of taking an array apart.
    __array_ufunc__: ClassVar[None] = None
    #: Looking up by index is no iteration, which would never end.
    __iter__: ClassVar[None] = None

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> NoReturn:
        """Torch calls this in place of a function that is given a node. Operators with a tensor go on to those of the node."""
        raise OperandError(torch_function_message(function, args))

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Node) and (self._has_parts_of(other) or self.key == other.key))

    def _has_parts_of(self, other: Node) -> bool:
        """Whether two expressions have one form and the same tensors."""
        pairs = zip(self.held, other.held, strict=False)
        return self.form is other.form and all(own.tensor is held.tensor for own, held in pairs)

    def __hash__(self) -> int:
        return hash(self.key)

    def __reduce__(self) -> tuple[Any, ...]:
        return made, (type(self), *self._values())

    def __repr__(self) -> str:
        return self._abbreviated().write(bare=False)[0]

    def __str__(self) -> str:
        return self._abbreviated().write(bare=True)[0]

    def written(self) -> Sequence[Node]:
        """The nodes directly below that are part of the text."""
        return self.below

    @property
    def text_size(self) -> int:
        """The number of nodes in the text, with a shared node counted at each place."""
        form = self.form
        return form.kept("text_size", lambda: 1 + sum([node.text_size for node in form.written()]))

    def _abbreviated(self) -> Node:
        if self.text_size <= MAX_WRITTEN:
            return self
        return self.replace(lambda node: _Omitted(node) if node is not self and node.text_size > MAX_OPERAND else None)

    def brief(self) -> str:
        """The text for a message: the middle is left out where it is long."""
        text = str(self)
        return text if len(text) <= 200 else f"{text[:120]} ... {text[-60:]}"

    def write(self, bare: bool) -> tuple[str, int]:
        """The expression as text, and how tightly its outermost operator binds.

        Args:
            bare: as text for :func:`flexmask.parse`; otherwise as Python code. They differ in named masks without arguments
                (``causal``, ``causal()``) and in parameters (``ids``, ``param('ids')``).
        """
        raise NotImplementedError

    @classmethod
    def make(cls, *values: Any) -> Any:
        """Builds a node of this kind in canonical form, which may be a node of another kind."""
        return cls(*values)

    def walk(self) -> list[Node]:
        """Every node below this one and itself, each object once, inner ones before those around them."""
        found: dict[int, Node] = {}
        pending: list[tuple[Node, Iterator[Node]]] = [(self, iter(self.below))]
        while pending:
            node, below = pending[-1]
            for child in below:
                if id(child) in found:
                    continue
                if child.below:
                    pending.append((child, iter(child.below)))
                    break
                found[id(child)] = child
            else:
                found[id(node)] = node
                pending.pop()
        return list(found.values())

    def replace(self, function: Callable[[Node], Node | None]) -> Node:
        """Rebuilds the expression with each node replaced by ``function(node)``, where that is not None."""
        done: dict[int, Node] = {}
        pending: list[tuple[Node, Iterator[Node]]] = [(self, iter((self,)))]  # an outermost place, with the expression below
        while pending:
            node, below = pending[-1]
            for child in below:
                if id(child) in done:
                    continue
                replaced = function(child)
                if replaced is None and child.below:
                    pending.append((child, iter(child.below)))
                    break
                done[id(child)] = child if replaced is None else replaced
            else:
                pending.pop()
                if pending:
                    done[id(node)] = node._with_children(done)
        return done[id(self)]

    def _with_children(self, done: dict[int, Node]) -> Node:
        """This node with each node below replaced."""
        if all(done[id(child)] is child for child in self.below):
            return self
        return cast(Node, made(type(self).make, *_map(self._values(), lambda child: done[id(child)])))

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class _Omitted(Node):
    """An expression that is too large for a text, in which it has a text that cannot be read back."""

    node: Node

    def write(self, bare: bool) -> tuple[str, int]:
        return f"<{self.node.text_size} operations>", 7  # as tightly as a name
