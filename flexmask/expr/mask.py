"""Masks: a boolean algebra over comparisons of index expressions. True means that the query may attend to the key."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, cast

from flexmask._checks import check_flag
from flexmask.errors import ExpressionError, LoweringError, OperandError
from flexmask.expr.data import as_number, as_table, named_data
from flexmask.expr.deferral import deferrable
from flexmask.expr.form import PLAIN, Key, filled, made
from flexmask.expr.index import FOLD_COMPARE, PRECEDENCE, Constant, Index, Symbol, as_index, h, parentheses_hint, wrap
from flexmask.expr.methods import MaskMethods
from flexmask.expr.names import describe_non_mask, write_arguments
from flexmask.expr.node import Node, key_of, nodes_in, within_depth
from flexmask.expr.packing import DocumentTable, document_ids, document_starts, subtree_ends
from flexmask.expr.tables import Lookup, Param, named_table

if TYPE_CHECKING:
    import torch

#: A comparison, its negation, and the same with the sides swapped.
NEGATED = {"<": ">=", "<=": ">", ">": "<=", ">=": "<", "==": "!=", "!=": "=="}
SWAPPED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "==": "==", "!=": "!="}
#: What torch's flex_attention reads of its block_mask.
BLOCK_MASK_ATTRIBUTES = ("BLOCK_SIZE", "as_tuple", "kv_indices", "kv_num_blocks", "seq_lengths")


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Mask(MaskMethods):
    """A predicate over batch, head, query and key index: ``True`` where the query may attend to the key.

    Masks are values: immutable, hashable, equal where they are the same expression. ``a & b``, ``a | b``, ``a ^ b``,
    ``a - b`` (a and not b) and ``~a`` compose them. Lengths come in when a mask is lowered.
    """

    def __getitem__(self, index: object) -> NoReturn:
        raise OperandError("a Mask is not indexed: its cells are mask.dense(q_len, kv_len)[b, h, q, kv]")

    if not TYPE_CHECKING:  # where an attribute that does not exist stays an error

        def __getattr__(self, name: str) -> Any:
            if name in BLOCK_MASK_ATTRIBUTES:
                message = (
                    f"{type(self).__name__!r} object has no attribute {name!r}; a BlockMask is mask.block_mask(q_len, kv_len)"
                )
                raise AttributeError(message, name=name, obj=self)
            if name == "lifted":
                from flexmask.expr.deferred import lifted

                self._put("lifted", lifted(self))
                return self.lifted
            return MaskMethods.__getattr__(self, name)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Index):
            raise OperandError(
                f"== binds less tightly than & and |: put each comparison in parentheses, e.g. {self.brief()} & (x == "
                f"{other.brief()}). Here the mask {self.brief()} is compared with an index expression"
            )
        return MaskMethods.__eq__(self, other)

    __hash__ = MaskMethods.__hash__

    def __and__(self, other: Mask) -> Mask:
        return _combine("&", self, other)

    def __or__(self, other: Mask) -> Mask:
        return _combine("|", self, other)

    def __xor__(self, other: Mask) -> Mask:
        return _combine("^", self, other)

    def __sub__(self, other: Mask) -> Mask:
        return _combine("-", self, other)

    def __rand__(self, other: object) -> NoReturn:
        _refuse("&", other)

    def __ror__(self, other: object) -> NoReturn:
        _refuse("|", other)

    def __rxor__(self, other: object) -> NoReturn:
        _refuse("^", other)

    @deferrable
    def __invert__(self) -> Mask:
        return within_depth(made(Not.make, self))

    def __bool__(self) -> NoReturn:
        raise OperandError(
            f"the mask {self.brief()} has no single truth value. Write `a & b` for `a and b`, `a | b` for `a or b`, `~a` for "
            "`not a`, and `(0 <= q - kv) & (q - kv < 3)` for the chained `0 <= q - kv < 3`. To test whether a mask is given, "
            "write `mask is None`."
        )

    @deferrable
    def bind(self, /, **values: object) -> Mask:
        """The same mask with parameters given their values: integers, or data where they are looked up.

        Raises:
            ExpressionError: a name that the mask does not have, or data that does not fit.
        """
        unknown = sorted(set(values) - set(self.params))
        if unknown:
            raise ExpressionError(
                f"the mask {self.brief()} has no parameter {', '.join(unknown)}; it has {', '.join(self.params) or 'none'}"
            )
        return within_depth(cast(Mask, self.replace(lambda node: _bound(node, values))))

    def expand(self) -> Mask:
        """The same mask with every named mask replaced by its definition."""
        return self.kept("expanded", self._expanded)

    def _expanded(self) -> Mask:
        if self.held:
            return filled(self.form.expand(), self.held)
        return cast(Mask, self.replace(lambda node: node.body.expand() if isinstance(node, Named) else None))

    def spoken(self) -> str:
        """The text for people: parts with words, by :meth:`named`, are written so, and data with a name by that alone."""
        return re.sub(r"<([^<>:]+): [^<>]*>", r"\1", str(self.replace(_by_label)))

    def brief(self) -> str:
        """The text for a message: as :meth:`spoken`, and the middle is left out where it is long."""
        return MaskMethods.brief(self.replace(_by_label))

    def is_traced_with_other_lists(self) -> bool:
        """Whether code that ``torch.compile`` traces got this mask before with other numbers in its lists.

        Then :attr:`lifted` makes them inputs of the graph. Else they are constants of it, as those of a mask that stays the same.
        The first call for a form remembers its numbers.
        """
        from flexmask.expr.deferred import have_changed

        return not self.form.is_kept and have_changed(self)

    # As torch.compiler.assume_constant_result does: it runs as it is where a graph is made.
    is_traced_with_other_lists._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def substitute(self, **symbols: Index | int) -> Mask:
        """The same predicate at other indices: ``mask.substitute(q=q + 1)``. All symbols change at once; names are lost."""
        to = {name: as_index(value) for name, value in symbols.items()}
        return within_depth(
            cast(Mask, self.expand().replace(lambda node: to.get(node.name) if isinstance(node, Symbol) else None))
        )

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Mask:
        """The same mask with its tensors moved to a device. Literal data needs no move.

        Args:
            device: where to.
            non_blocking: as of ``Tensor.to``, for tensors in pinned memory.

        Raises:
            LoweringError: a tensor is on ``meta``, where it has no values to move; or there is no such device.
        """
        from flexmask._sync import move_remedy, resolve_device  # what needs torch is imported when it is used

        device = resolve_device(device)
        check_flag(non_blocking, "non_blocking")
        for tensor in self.tensors:
            if tensor.is_meta and device.type != "meta":
                found = f"a tensor {list(tensor.shape)} of the mask {self.brief()} is on meta"
                raise LoweringError(f"{found}, and cannot move to {device}; {move_remedy(tensor.device, device)}")
        return self.with_tensors([tensor.to(device, non_blocking=non_blocking) for tensor in self.tensors])

    def pin_memory(self) -> Mask:
        """The same mask with its tensors in pinned memory, as a ``DataLoader(pin_memory=True)`` asks for."""
        return self.with_tensors([tensor.pin_memory() for tensor in self.tensors])


@deferrable
def _combine(sign: str, left: Mask, right: object) -> Mask:
    if not isinstance(right, Mask):
        _refuse(sign, right)
    if sign == "-":
        return within_depth(made(And.make, (left, made(Not.make, right))))
    kinds: dict[str, type[And | Or | Xor]] = {"&": And, "|": Or, "^": Xor}
    return within_depth(made(kinds[sign].make, (left, right)))


def _refuse(sign: str, other: object) -> NoReturn:
    hint = f"{parentheses_hint(sign)}. Here " if isinstance(other, Index | int) else ""
    raise OperandError(f"{hint}{sign} combines two masks, got {describe_non_mask(other)}")


def _by_label(node: Node) -> Node | None:
    """A part that has words for it as a named mask of that name; None to visit its children."""
    label = node.label if isinstance(node, Named) else None
    return Named(label, (), node.body, node.define) if isinstance(node, Named) and label else None


def _plain(mask: Mask) -> Mask:
    """A mask without the words for it, and for the operands of its boolean operators; itself where there are none."""
    match mask:
        case Named(body=body) if mask.label:
            return _unlabeled(body)
        case Not(operand):
            bare = _unlabeled(operand)
            return mask if bare is operand else Not.make(bare)
        case _Nary(operands):
            parts = tuple(map(_unlabeled, operands))
            same = all(one is other for one, other in zip(parts, operands, strict=True))
            return mask if same else cast(Mask, type(mask).make(parts))
    return mask


def _unlabeled(mask: Mask) -> Mask:
    """As :func:`_plain`, worked out once."""
    if "plain" not in mask.memo:
        plain = _plain(mask)
        mask.memo["plain"] = () if plain is mask else (plain,)  # itself would be a cycle
    return cast(Mask, next(iter(mask.memo["plain"]), mask))


def _bound(node: Node, values: dict[str, object]) -> Node | None:
    """The node with parameters replaced by their values; None to visit its children."""

    def argument(value: Any) -> Any:
        if isinstance(value, Param):
            return named_data(values[value.name], value.name) if value.name in values else value
        if isinstance(value, tuple):
            return tuple(map(argument, value))
        return value.replace(lambda below: _bound(below, values)) if isinstance(value, Node) else value

    match node:
        case Named() if any(isinstance(below, Param) and below.name in values for below in node.walk()):
            return node.define(**{name: argument(value) for name, value in node.arguments})
        case DocumentTable(rule, Param(name), padding) if name in values:
            data = cast(Any, values[name])
            function = {"starts": document_starts, "subtrees": subtree_ends}.get(rule)
            return function(data) if function else cast(Node, document_ids(**{rule: data}, padding=padding))
        case Lookup(Param(name), indices) if name in values:
            return named_table(as_table(values[name], name), name)[cast("tuple[Index, ...]", argument(indices))]
        case Param(name) if name in values:
            return as_number(values[name], name)
    return None


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Truth(Mask):
    """Everything (``full``) or nothing (``empty``)."""

    value: bool

    def write(self, bare: bool) -> tuple[str, int]:
        return ("full" if self.value else "empty") + ("" if bare else "()"), PRECEDENCE["atom"]


#: No mask, and no cells; made here, since torch.compile cannot trace how they are made.
ALL_CELLS: Mask = made(Truth, True)
NO_CELLS: Mask = made(Truth, False)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Compare(Mask):
    """``left sign right`` for one of ``< <= > >= == !=``."""

    sign: str
    left: Index
    right: Index

    def _make_key(self) -> Key:
        sides = (self.left.key, self.right.key)
        if self.sign in {"==", "!="}:
            return Key("Compare", self.sign, frozenset(sides))
        if self.sign in {">", ">="}:
            return Key("Compare", SWAPPED[self.sign], *reversed(sides))
        return Key("Compare", self.sign, *sides)

    @classmethod
    def make(cls, sign: str, left: Index, right: Index) -> Mask:
        if isinstance(left, Constant) and isinstance(right, Constant):
            return Truth(FOLD_COMPARE[sign](left.value, right.value))
        return cls(sign, left, right)

    def write(self, bare: bool) -> tuple[str, int]:
        return f"{wrap(self.left, 1, bare)} {self.sign} {wrap(self.right, 1, bare)}", PRECEDENCE["compare"]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class _Nary(Mask):
    """Operands in the order in which they were written; the order does not count for equality."""

    symbol: ClassVar[str]
    operands: tuple[Mask, ...]

    def _make_key(self) -> Key:
        if (plain := _plain(self)) is not self:
            return plain.key
        return Key(type(self).__name__, frozenset([operand.key for operand in self.operands]))

    def write(self, bare: bool) -> tuple[str, int]:
        level = PRECEDENCE[self.symbol]
        return f" {self.symbol} ".join(wrap(operand, level + 1, bare) for operand in self.operands), level


def _flat(kind: type[_Nary], operands: tuple[Mask, ...]) -> list[Mask]:
    """Operands of nested nodes of one kind in a row, each once: ``a & (b & a) -> a, b``."""
    found: dict[Any, Mask] = {}
    for operand in operands:
        for part in operand.operands if isinstance(operand, kind) else (operand,):
            found.setdefault(part.key, part)
    return list(found.values())


def _is_among(mask: Mask, kind: type[_Nary], keys: set[Any]) -> bool:
    """Whether a mask, or each operand of it where it is of the kind, is among the parts with these keys."""
    return mask.key in keys or (isinstance(mask, kind) and all(operand.key in keys for operand in mask.operands))


def _absorbed(part: _Nary, others: list[Mask], kind: type[_Nary], inner: type[_Nary]) -> bool:
    """Whether other parts make one superfluous: ``a & (a | b) -> a`` and ``(a | b) & (a | b | c) -> a | b``."""
    keys = {other.key for other in others}
    own = {operand.key for operand in part.operands}
    if any(_is_among(operand, kind, keys) for operand in part.operands):
        return True
    return any({operand.key for operand in other.operands} < own for other in others if isinstance(other, inner))


def _junction(kind: type[And | Or], inner: type[And | Or], neutral: bool, operands: tuple[Mask, ...]) -> Mask:
    """The canonical form of a conjunction (``neutral`` True) or disjunction (False)."""
    decides, neutral_key = (NO_CELLS.key, ALL_CELLS.key) if neutral else (ALL_CELLS.key, NO_CELLS.key)
    parts = [part for part in _flat(kind, operands) if part.key != neutral_key]  # a & full -> a
    keys = {part.key for part in parts}
    # The parts of an operand are no opposites of each other: those of the longest are compared with the others alone.
    longest = max((operand.operands for operand in operands if isinstance(operand, kind)), key=len, default=())
    compared = keys.difference(part.key for part in longest)
    opposed = (part for part in parts if isinstance(part, Not) or part.key in compared)
    if decides in keys or any(_is_among(Not.make(part), kind, keys) for part in opposed):
        return Truth(not neutral)  # a & empty, a & ~a -> empty
    for part in [part for part in parts if isinstance(part, inner)]:
        others = [other for other in parts if other is not part]
        # One with a name in it may have the key of an operand: it does not absorb itself.
        parts = others if _absorbed(part, others, kind, inner) else parts
    if len(parts) < 2:
        return parts[0] if parts else Truth(neutral)
    return kind(tuple(parts))


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class And(_Nary):
    """Visible where every operand is."""

    symbol: ClassVar[str] = "&"

    @classmethod
    def make(cls, operands: tuple[Mask, ...]) -> Mask:
        return _junction(And, Or, True, operands)


def operands_of(mask: Mask) -> tuple[Mask, ...]:
    """The operands of a conjunction; of any other mask, the mask."""
    return mask.operands if isinstance(mask, And) else (mask,)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Or(_Nary):
    """Visible where any operand is."""

    symbol: ClassVar[str] = "|"

    @classmethod
    def make(cls, operands: tuple[Mask, ...]) -> Mask:
        return _junction(Or, And, False, operands)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Xor(_Nary):
    """Visible where an odd number of operands is."""

    symbol: ClassVar[str] = "^"

    @classmethod
    def make(cls, operands: tuple[Mask, ...]) -> Mask:
        flipped = False
        odd: dict[Any, Mask] = {}
        pending = list(reversed(operands))
        while pending:
            part = pending.pop()
            match part:
                case Xor(inner):
                    pending.extend(reversed(inner))
                case Truth(value):  # a ^ full -> ~a
                    flipped ^= value
                case Not(operand):  # a ^ ~b -> ~(a ^ b)
                    flipped = not flipped
                    pending.append(operand)
                case _ if part.key in odd:  # a ^ a -> empty
                    del odd[part.key]
                case _ if Not.make(part).key in odd:  # (x < y) ^ (x >= y) -> full
                    del odd[Not.make(part).key]
                    flipped = not flipped
                case _:
                    odd[part.key] = part
        parts = tuple(odd.values())
        mask: Mask = Truth(False) if not parts else parts[0] if len(parts) == 1 else cls(parts)
        return Not.make(mask) if flipped else mask


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Not(Mask):
    """Visible where the operand is not."""

    operand: Mask

    @classmethod
    def make(cls, operand: Mask) -> Mask:
        match operand:
            case Not(inner):  # ~~a -> a
                return inner
            case Truth(value):
                return Truth(not value)
            case Compare(sign, left, right):  # ~(x < y) -> x >= y
                return Compare(NEGATED[sign], left, right)
        return cls(operand)

    def _make_key(self) -> Key:
        plain = _plain(self)
        return Key("Not", self.operand.key) if plain is self else plain.key

    def write(self, bare: bool) -> tuple[str, int]:
        return f"~{wrap(self.operand, PRECEDENCE['~'], bare)}", PRECEDENCE["~"]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class PerHead(Mask):
    """Head ``h`` uses mask ``h``; as many heads as masks."""

    masks: tuple[Mask, ...]

    def _make_symbols(self) -> frozenset[str]:
        return frozenset({"h"}).union(*(mask.symbols for mask in self.masks))

    def by_head(self) -> Mask:
        """The same mask as ``(h == 0) & masks[0] | (h == 1) & masks[1] | ...``."""
        return Or.make(tuple(And.make((h == head, mask)) for head, mask in enumerate(self.masks)))

    def write(self, bare: bool) -> tuple[str, int]:
        return f"per_head([{', '.join(mask.write(bare)[0] for mask in self.masks)}])", PRECEDENCE["atom"]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Named(Mask):
    """A mask with a name, which it keeps when it is printed.

    Args:
        name: the name, also in text.
        arguments: the arguments that differ from their defaults, in order.
        body: the mask that the name stands for.
        define: the function that made it; called again when a parameter is bound.
    """

    name: str
    arguments: tuple[tuple[str, Any], ...]
    body: Mask
    define: Callable[..., Mask]

    def __post_init__(self) -> None:
        Mask.__post_init__(self)
        if not self.held and not all(type(value) in PLAIN or isinstance(value, Node | tuple) for _, value in self.arguments):
            self._put("is_kept", False)  # a function or an object may hold tensors

    @property
    def label(self) -> str | None:
        """The words of ``mask.named(words)``; None for all other named masks."""
        return dict(self.arguments)["name"] if self.name == "named" else None

    def _make_key(self) -> Key:
        return self.body.key if self.label else Key("Named", self.name, key_of(self.arguments))

    def _make_symbols(self) -> frozenset[str]:
        return self.body.symbols

    def written(self) -> list[Node]:
        return nodes_in(self.arguments)

    def write(self, bare: bool) -> tuple[str, int]:
        text = write_arguments(self.define, self.arguments, bare)
        return (self.name if bare and not text else f"{self.name}({text})"), PRECEDENCE["atom"]


if "torch" in sys.modules:
    import flexmask.expr.pytree  # noqa: F401 - so that masks are pytrees
