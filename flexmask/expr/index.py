"""Index expressions: integers that depend on batch, head, query and key index.

The symbols are ``b``, ``h``, ``q`` and ``kv`` (batch, head, query and key index) and ``q_len`` and ``kv_len`` (the two
lengths, known when a mask is lowered). Arithmetic on them is integer arithmetic as Python does it: ``//`` rounds down and
``%`` takes the sign of the divisor. Comparing two of them gives a mask.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn, cast

from flexmask.errors import ExpressionError, OperandError
from flexmask.expr.deferral import deferrable
from flexmask.expr.form import Key, made
from flexmask.expr.node import Node, key_of, within_depth

if TYPE_CHECKING:
    from flexmask.expr.mask import Mask

#: How tightly an operator binds in text, as in Python; what binds less tightly than its surroundings gets parentheses.
PRECEDENCE = {"compare": 0, "|": 1, "^": 2, "&": 3, "+": 4, "-": 4, "*": 5, "//": 5, "%": 5, "~": 6, "atom": 7}

FOLD: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
    "minimum": min,
    "maximum": max,
}
FOLD_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}
COMMUTATIVE = {"+", "*", "minimum", "maximum"}


def wrap(node: Node, level: int, bare: bool) -> str:
    """The text of ``node``, in parentheses where it binds less tightly than ``level``."""
    text, own = node.write(bare)
    return text if own >= level else f"({text})"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Index(Node):
    """An integer expression over the index symbols. Comparisons of it (``==`` included) are masks."""

    def __add__(self, other: Index | int) -> Index:
        return arithmetic("+", self, other)

    def __radd__(self, other: int) -> Index:
        return arithmetic("+", other, self)

    def __sub__(self, other: Index | int) -> Index:
        return arithmetic("-", self, other)

    def __rsub__(self, other: int) -> Index:
        return arithmetic("-", other, self)

    def __mul__(self, other: Index | int) -> Index:
        return arithmetic("*", self, other)

    def __rmul__(self, other: int) -> Index:
        return arithmetic("*", other, self)

    def __floordiv__(self, other: Index | int) -> Index:
        return arithmetic("//", self, other)

    def __rfloordiv__(self, other: int) -> Index:
        return arithmetic("//", other, self)

    def __mod__(self, other: Index | int) -> Index:
        return arithmetic("%", self, other)

    def __rmod__(self, other: int) -> Index:
        return arithmetic("%", other, self)

    def __neg__(self) -> Index:
        return arithmetic("-", 0, self)

    def __pos__(self) -> Index:
        return self

    def __abs__(self) -> Index:
        return absolute(self)

    def __lt__(self, other: Index | int) -> Mask:
        return compare("<", self, other)

    def __le__(self, other: Index | int) -> Mask:
        return compare("<=", self, other)

    def __gt__(self, other: Index | int) -> Mask:
        return compare(">", self, other)

    def __ge__(self, other: Index | int) -> Mask:
        return compare(">=", self, other)

    def __eq__(self, other: object) -> Mask:
        return compare("==", self, other)

    def __ne__(self, other: object) -> Mask:
        return compare("!=", self, other)

    __hash__ = Node.__hash__

    def comparison(self) -> str:
        """A mask of this expression, for messages."""
        return f"({self.brief()} == 0)"

    def __bool__(self) -> NoReturn:
        raise OperandError(
            f"{self} is an index expression, not a truth value. Compare it to get a mask, e.g. {self.comparison()}, "
            "and write abs(), flexmask.minimum(), flexmask.maximum() or flexmask.where() for a choice between values."
        )

    def __and__(self, other: object) -> NoReturn:
        _refuse_boolean("&", self, other)

    def __or__(self, other: object) -> NoReturn:
        _refuse_boolean("|", self, other)

    def __xor__(self, other: object) -> NoReturn:
        _refuse_boolean("^", self, other)

    __rand__, __ror__, __rxor__ = __and__, __or__, __xor__

    def __invert__(self) -> NoReturn:
        raise OperandError(f"~ takes a mask; {self} is an index expression. Compare it first: ~{self.comparison()}.")

    def __truediv__(self, other: object) -> NoReturn:
        raise OperandError(f"/ does not give an integer. Write {self} // {other} to round down.")


def parentheses_hint(sign: str) -> str:
    """For messages: comparisons next to ``&``, ``|`` or ``^`` need parentheses."""
    return f"comparisons bind less tightly than {sign}: put each in parentheses, e.g. (kv <= q) {sign} (q - kv < 8)"


def _refuse_boolean(sign: str, left: Index, right: object) -> NoReturn:
    raise OperandError(
        f"{parentheses_hint(sign)}. Here {sign} combines masks, but {left!s} or {right!s} is an index expression. Compare it, "
        f"e.g. {left.comparison()}."
    )


def as_index(value: object) -> Index:
    """An index expression as it is, or an integer as a constant.

    Raises:
        OperandError: ``value`` is neither.
    """
    if isinstance(value, Index):
        return value
    if isinstance(value, bool):
        raise OperandError(f"an index is an integer, not the truth value {value}: write {int(value)}")
    try:
        return made(Constant, operator.index(cast(Any, value)))
    except (TypeError, RuntimeError):  # of a tensor without values
        if isinstance(value, Node) and not hasattr(value, "shape"):
            hint = "flexmask.where(mask, 1, 0) makes a number of it"
            raise OperandError(f"wanted an index expression or an integer, got the mask {value}; {hint}") from None
        given = f"the table {value}" if isinstance(value, Node) else f"{type(value).__name__} {value!r}"
        axes = len(getattr(value, "shape", ())) if isinstance(value, Node) else getattr(value, "ndim", None)
        place = "b" if axes == 1 else "b, q"
        raise OperandError(
            f"wanted an index expression or an integer, got {given}. Data is looked up by index: flexmask.table(data)[{place}]."
        ) from None


@deferrable
def arithmetic(sign: str, left: Index | int, right: Index | int) -> Index:
    """``left sign right`` for a key of :data:`FOLD`."""
    return within_depth(made(Arithmetic.make, sign, as_index(left), as_index(right)))


@deferrable
def absolute(operand: Index) -> Index:
    """``abs(operand)``."""
    return within_depth(made(Absolute.make, operand))


@deferrable
def compare(sign: str, left: object, right: object) -> Mask:
    """``left sign right`` for a key of :data:`FOLD_COMPARE`."""
    from flexmask.expr.mask import Compare, Mask  # masks are built on index expressions; this is the one way back

    if isinstance(right, Mask):
        raise OperandError(
            f"{left!s} {sign} {right!s} compares an index with a mask. Write comparisons in parentheses and join them with &."
        )
    if isinstance(right, bool):
        raise OperandError(f"an index expression is compared with an integer: write {left!s} {sign} {int(right)}, not {right}")
    return within_depth(made(Compare.make, sign, as_index(left), as_index(right)))


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Symbol(Index):
    """One of the six index symbols."""

    name: Literal["b", "h", "q", "kv", "q_len", "kv_len"]

    def _make_symbols(self) -> frozenset[str]:
        return frozenset([self.name])

    def write(self, bare: bool) -> tuple[str, int]:
        return self.name, PRECEDENCE["atom"]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Constant(Index):
    """An integer."""

    value: int

    def __post_init__(self) -> None:
        if not -(2**63) <= self.value < 2**63:
            raise ExpressionError(f"an index is a 64-bit integer, got {self.value}")
        Index.__post_init__(self)

    def write(self, bare: bool) -> tuple[str, int]:
        return str(self.value), PRECEDENCE["atom"] if self.value >= 0 else PRECEDENCE["~"]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Arithmetic(Index):
    """``left sign right`` for one of ``+ - * // %``, or ``minimum(left, right)``, ``maximum(left, right)``."""

    sign: str
    left: Index
    right: Index

    def _make_key(self) -> Key:
        pair = (self.left.key, self.right.key)
        return Key("Arithmetic", self.sign, frozenset(pair) if self.sign in COMMUTATIVE else pair)

    @classmethod
    def make(cls, sign: str, left: Index, right: Index) -> Index:
        if sign in {"//", "%"} and isinstance(right, Constant) and right.value == 0:
            raise ExpressionError(f"{wrap(left, PRECEDENCE[sign], False)} {sign} 0 divides by zero")
        match sign, left, right:
            case _, Constant(x), Constant(y):
                return Constant(FOLD[sign](x, y))
            case "+", Constant(0), x:  # 0 + x -> x
                return x
            case ("+" | "-", x, Constant(0)) | ("*" | "//", x, Constant(1)):  # x + 0, x - 0, x * 1, x // 1 -> x
                return x
            case "*", Constant(1), x:  # 1 * x -> x
                return x
            case ("*", Constant(0), _) | ("*", _, Constant(0)):  # x * 0 -> 0
                return Constant(0)
            case "+", x, Constant(value) if -(2**63) < value < 0:  # x + -n -> x - n
                return cls("-", x, Constant(-value))
            case "-", x, Constant(value) if -(2**63) < value < 0:  # x - -n -> x + n
                return cls("+", x, Constant(-value))
        return cls(sign, left, right)

    def write(self, bare: bool) -> tuple[str, int]:
        if self.sign not in PRECEDENCE:
            return f"{self.sign}({self.left.write(bare)[0]}, {self.right.write(bare)[0]})", PRECEDENCE["atom"]
        level = PRECEDENCE[self.sign]
        if self.sign == "-" and isinstance(self.left, Constant) and self.left.value == 0:
            return f"-{wrap(self.right, PRECEDENCE['~'], bare)}", PRECEDENCE["~"]
        return f"{wrap(self.left, level, bare)} {self.sign} {wrap(self.right, level + 1, bare)}", level


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Absolute(Index):
    """``abs(operand)``."""

    operand: Index

    @classmethod
    def make(cls, operand: Index) -> Index:
        return Constant(abs(operand.value)) if isinstance(operand, Constant) else cls(operand)

    def write(self, bare: bool) -> tuple[str, int]:
        return f"abs({self.operand.write(bare)[0]})", PRECEDENCE["atom"]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Choice(Index):
    """``then`` where the mask ``condition`` holds, else ``otherwise``."""

    condition: Mask
    then: Index
    otherwise: Index

    @classmethod
    def make(cls, condition: Mask, then: Index, otherwise: Index) -> Index:
        from flexmask.expr.mask import Truth  # as in compare

        if isinstance(condition, Truth):
            return then if condition.value else otherwise
        return cls(condition, then, otherwise)

    def write(self, bare: bool) -> tuple[str, int]:
        parts = (part.write(bare)[0] for part in (self.condition, self.then, self.otherwise))
        return f"where({', '.join(parts)})", PRECEDENCE["atom"]


def minimum(left: Index | int, right: Index | int) -> Index:
    """The smaller of two index expressions, element by element (``torch.minimum``)."""
    return arithmetic("minimum", left, right)


def maximum(left: Index | int, right: Index | int) -> Index:
    """The larger of two index expressions, element by element (``torch.maximum``)."""
    return arithmetic("maximum", left, right)


b: Symbol = made(Symbol, "b")
h: Symbol = made(Symbol, "h")
q: Symbol = made(Symbol, "q")
kv: Symbol = made(Symbol, "kv")
q_len: Symbol = made(Symbol, "q_len")
kv_len: Symbol = made(Symbol, "kv_len")


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Opaque(Index):
    """An operation of a traced function that no expression has, ``function(*arguments)``: exact, and lowered cell by cell.

    Its value may be a truth value, or a number that is no integer where another call takes it. Its text cannot be parsed.

    Args:
        function: takes and gives tensors without axes, as a ``mask_mod`` does under ``torch.vmap``.
        arguments: index expressions, masks, captured tensors and plain values.
        keywords: the names of the last arguments where they are given by name.
        shape: of the value, which has axes only where another call takes it.
    """

    KEPT: ClassVar[bool] = False  # a function may hold tensors
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    keywords: tuple[str, ...] = ()
    shape: tuple[int, ...] = ()

    def _make_key(self) -> Key:
        # 1, 1.0 and True are equal, but not to a function
        arguments = tuple((type(value), key_of(value)) for value in self.arguments)
        return Key("Opaque", self.function, arguments, self.keywords)

    def write(self, bare: bool) -> tuple[str, int]:
        return f"<{self._call_text(bare)}>", PRECEDENCE["atom"]

    def _call_text(self, bare: bool) -> str:
        """The call without the angle brackets that mark the outermost of nested calls."""

        def text_of(value: Any) -> str:
            if isinstance(value, Opaque):
                return value._call_text(bare)
            return value.write(bare)[0] if isinstance(value, Node) else repr(value)

        texts = [text_of(value) for value in self.arguments]
        first = len(texts) - len(self.keywords)
        texts[first:] = [f"{name}={text}" for name, text in zip(self.keywords, texts[first:], strict=True)]
        name = getattr(self.function, "__name__", repr(self.function)).strip("<>_")
        return f"{name}({', '.join(texts)})"
