"""Base class of expressions: immutable nodes that are equal where they are the same expression.

An expression may use one node many times. Its keys, its text and its pickle take time in the number of distinct nodes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self, TypeAlias, TypeVar, cast

from flexmask._checks import is_traced
from flexmask.errors import ExpressionError, LoweringError, OperandError
from flexmask.expr.torch_functions import torch_function_message

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["Held", "Key", "MAX_DEPTH", "Node", "Structure", "key_of", "nodes_in", "within_depth"]

#: Operations inside each other at most in what a user builds. Everything that is done with an expression may use Python's stack
#: for each of them, next to what the caller needs of it.
MAX_DEPTH = 100
#: Nodes in a text at most; of a larger expression the outermost operation is written, and operands of more than
#: :data:`MAX_OPERAND` nodes are abbreviated.
MAX_WRITTEN = 10_000
MAX_OPERAND = 50
#: Kinds of nodes that hold a tensor, which is identified by its id in their keys.
HOLDS_TENSOR = {"TensorTable", "CapturedTensor"}

N = TypeVar("N", bound="Node")
#: A tensor, and its shape and dtype when a node took it.
Held: TypeAlias = "tuple[Tensor, torch.Size, torch.dtype]"


class Key:
    """What identifies an expression: plain values and the keys of the nodes below. Hashing it does not visit these again.

    Args:
        parts: the values and keys.
        checks: what counts for a :class:`Structure` alone: what the values of data are checked for, and definitions.
    """

    __slots__ = ("_checks", "_compared", "_hash", "_parts")

    def __init__(self, parts: tuple[Any, ...], checks: tuple[Any, ...] = ()) -> None:
        self._parts = self._compared = parts
        self._hash, self._checks = hash(parts), checks

    def __hash__(self) -> int:
        return self._hash

    def renumbered(self, numbers: dict[int, int], known: dict[int, Key]) -> Key:
        """The same key with each id of a tensor replaced by a number, and with the checks.

        Args:
            numbers: by the ids of the tensors.
            known: the results so far by the ids of the keys, as many expressions may share one.
        """
        if id(self) not in known:
            kind, parts = self._parts[0], (*self._parts, *self._checks)
            known[id(self)] = Key(tuple([_renumbered(part, kind, numbers, known) for part in parts]))
        return known[id(self)]

    def with_checks(self, *checks: Any) -> Key:
        """An equal key of data that is checked."""
        return Key(self._parts, (*self._checks, *checks))

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Key) or self._hash != other._hash:
            return False
        if self._compared is not other._compared:
            if self._compared != other._compared:
                return False
            other._compared = self._compared  # so that a shared key is compared once
        return True


def _renumbered(part: Any, kind: str, numbers: dict[int, int], known: dict[int, Key]) -> Any:
    if kind in HOLDS_TENSOR:
        return numbers.get(part, part)
    if isinstance(part, Key):
        return part.renumbered(numbers, known)
    if isinstance(part, tuple | frozenset):
        # A list first: Python 3.12 allows few generators inside each other that are read by its own code.
        return type(part)([_renumbered(item, "", numbers, known) for item in part])
    return part


class Structure:
    """An expression apart from the tensors that it looks up: equal where two expressions differ in these alone, and check their
    values for the same.

    ``torch.compile`` takes it for a constant of a graph, while the tensors are inputs.
    """

    __slots__ = ("_key", "_node", "_tensors")

    def __init__(self, node: Node) -> None:
        self._node, self._key = weakref.ref(node), node.key
        self._tensors: tuple[int, ...] | None = tuple([id(tensor) for tensor, _, _ in node.held])

    @property
    def node(self) -> Node | None:
        """An expression of this structure, as long as one that was compared with it is in use."""
        return self._node()

    @property
    def key(self) -> Key:
        """The key of the expression, with tensors numbered in the order of :attr:`Node.held`."""
        if self._tensors is not None:
            self._key = self._key.renumbered({tensor: number for number, tensor in enumerate(self._tensors)}, {})
            self._tensors = None
        return self._key

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Structure) or self.key != other.key:
            return False
        for one, living in (self, other), (other, self):  # a graph holds the structure of the first of several masks
            if one.node is None:
                one._node = living._node
        return True


#: What :func:`_reader` gives for each kind of node. (Where ``torch.compile`` meets ``functools.cache``, it warns.)
READERS: dict[type, Callable[[Any], tuple[Any, ...]]] = {}


def _reader(kind: Any) -> Callable[[Node], tuple[Any, ...]]:
    """Reads the fields of a node of this kind."""
    names = [f.name for f in fields(kind) if f.init]
    if len(names) == 1:
        return lambda node: (getattr(node, names[0]),)
    return attrgetter(*names)


def key_of(value: Any) -> Any:
    """``value`` with the key of each node in its place."""
    if isinstance(value, Node):
        return value.key
    if isinstance(value, tuple):
        return tuple(map(key_of, value))
    return value


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


def _map(value: Any, function: Callable[[Node], Node]) -> Any:
    if isinstance(value, Node):
        return function(value)
    if isinstance(value, tuple):
        return tuple(_map(item, function) for item in value)
    return value


class Derived:
    """The attributes of a node that follow from its fields; :class:`Node` describes them.

    They are no fields, so that FSDP, which searches the fields of a module's arguments for tensors, meets no node twice.
    """

    __slots__ = ("__weakref__", "below", "depth", "held", "key", "memo", "params", "symbols")

    key: Key
    symbols: frozenset[str]
    depth: int
    below: tuple[Node, ...]
    held: tuple[Held, ...]
    params: tuple[str, ...]
    memo: dict[str, Any]


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
    """

    def __post_init__(self) -> None:
        object.__setattr__(self, "below", tuple(nodes_in(self._values())))
        object.__setattr__(self, "key", self._make_key())
        object.__setattr__(self, "symbols", self._make_symbols())
        object.__setattr__(self, "held", self._make_held())
        object.__setattr__(self, "params", self._make_params())
        object.__setattr__(self, "depth", 1 + max([child.depth for child in self.below], default=0))
        object.__setattr__(self, "memo", {})

    def _values(self) -> tuple[Any, ...]:
        kind = type(self)
        if kind not in READERS:
            READERS[kind] = _reader(kind)
        return READERS[kind](self)

    def _make_key(self) -> Key:
        return Key((type(self).__name__, *map(key_of, self._values())))

    def _make_symbols(self) -> frozenset[str]:
        symbols: frozenset[str] = frozenset()
        for child in self.below:
            symbols = child.symbols if symbols <= child.symbols else symbols | child.symbols
        return symbols

    def _make_held(self) -> tuple[Held, ...]:
        found: tuple[Held, ...] = ()
        for child in self.below:
            own = child.held
            if own and own is not found:
                found = tuple({id(held[0]): held for held in (*found, *own)}.values()) if found else own
        return found

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors below, each once, in the order of the fields.

        Raises:
            LoweringError: as :meth:`check_held`.
        """
        self.check_held()
        return tuple([tensor for tensor, _, _ in self.held])

    def check_held(self) -> None:
        """Raises where a tensor has another shape or dtype than when the expression was made, which has these in it."""
        for tensor, shape, dtype in self.held:
            if tensor.shape != shape or tensor.dtype != dtype:
                what = "the mask" if is_traced() else self.brief()
                raise LoweringError(
                    f"a tensor of {what} was {dtype}{list(shape)} when that was made, and is {tensor.dtype}"
                    f"{list(tensor.shape)} now. Its values may change, its shape and dtype may not: make the mask again, or give "
                    "it a parameter and bind the data of each step"
                )

    def _make_params(self) -> tuple[str, ...]:
        found: tuple[str, ...] = ()
        for child in self.below:
            own = child.params
            if own and own != found:
                found = tuple(sorted({*found, *own})) if found else own
        return found

    #: NumPy leaves operators with a node to the node, instead of taking an array apart.
    __array_ufunc__: ClassVar[None] = None
    #: Looking up by index is no iteration, which would never end.
    __iter__: ClassVar[None] = None

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> NoReturn:
        """Torch calls this in place of a function that is given a node. Operators with a tensor go on to those of the node."""
        raise OperandError(torch_function_message(function, args))

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Node) and self.key == other.key)

    def __hash__(self) -> int:
        return hash(self.key)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._values()

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
        if "text_size" not in self.memo:
            self.memo["text_size"] = 1 + sum(node.text_size for node in self.written())
        return cast(int, self.memo["text_size"])

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
        made: dict[int, Node] = {}
        pending: list[tuple[Node, Iterator[Node]]] = [(self, iter((self,)))]  # an outermost place, with the expression below
        while pending:
            node, below = pending[-1]
            for child in below:
                if id(child) in made:
                    continue
                replaced = function(child)
                if replaced is None and child.below:
                    pending.append((child, iter(child.below)))
                    break
                made[id(child)] = child if replaced is None else replaced
            else:
                pending.pop()
                if pending:
                    made[id(node)] = node._with_children(made)
        return made[id(self)]

    def _with_children(self, made: dict[int, Node]) -> Node:
        """This node with each node below replaced."""
        if all(made[id(child)] is child for child in self.below):
            return self
        return cast(Node, type(self).make(*_map(self._values(), lambda child: made[id(child)])))

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
