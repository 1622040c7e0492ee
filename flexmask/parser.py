"""The text form of masks: a subset of Python's expressions, parsed with ``ast`` and never evaluated."""

from __future__ import annotations

import ast
import inspect
import operator
import re
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn, cast

from flexmask import registry
from flexmask._checks import is_traced, misfit, nearest, signature_of
from flexmask.errors import DuplicateNameError, ExpressionError, FlexmaskError, OperandError, TextError
from flexmask.expr.choice import where
from flexmask.expr.data import named_data, table
from flexmask.expr.deferral import FUNCTIONS as DEFERRABLE
from flexmask.expr.deferred import deferred
from flexmask.expr.index import Index, Symbol, maximum, minimum
from flexmask.expr.mask import Mask
from flexmask.expr.node import MAX_DEPTH
from flexmask.expr.packing import document_ids, document_starts, subtree_ends
from flexmask.expr.tables import Literal, Param, Table, param

if TYPE_CHECKING:
    import torch

__all__ = ["cached_mask", "parse"]

#: The longest text in characters, that without the numbers of long lists, and the deepest nesting: that of an expression, and
#: of lists of data in it.
MAX_TEXT, MAX_LENGTH = 100_000_000, 1_000_000
MAX_NESTING = MAX_DEPTH + 10

#: A string, or a list of a thousand characters and more that has numbers alone. Python's parser takes too long for these.
NUMBER = "-?(?:0|[1-9][0-9]{0,17})"
STRING_OR_NUMBERS = re.compile(
    rf"""'(?:[^'\\]|\\.)*+'|"(?:[^"\\]|\\.)*+"|\[(?=[-0-9, ]{{1000}})((?: ?{NUMBER} ?,)*+ ?{NUMBER}) ?,? ?\]"""
)

SYMBOLS = {name: Symbol(name) for name in ("b", "h", "q", "kv", "q_len", "kv_len")}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    define.__name__: define
    for define in (abs, document_ids, document_starts, subtree_ends, maximum, minimum, param, table, where)
}
PARAMETERS = " Another name is a parameter, which stands for a number or for data: ids[b, q] == ids[b, kv]."
#: The signs of binary and unary operators and of comparisons.
OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Invert: operator.invert,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
#: Python syntax that is not part of a mask's text, and what to write instead.
INSTEAD: dict[type[ast.AST], str] = {
    ast.And: "write a & b for `a and b`",
    ast.Or: "write a | b for `a or b`",
    ast.Not: "write ~a for `not a`",
    ast.Div: "write // to divide and round down",
    ast.IfExp: "write where(condition, a, b) for a choice",
    ast.Attribute: "attributes are not part of a mask's text",
    ast.Lambda: "functions are not part of a mask's text",
    ast.Is: "write == to compare",
    ast.In: "compare with == and join with |",
}


def parse(text: str, /, **values: object) -> Mask:
    """Parses a mask, e.g. ``"causal & key_padding(lengths=[3, 5, 4])"``.

    The text has Python's operators and precedence: ``& | ^ - ~`` on masks, ``+ - * // %`` and comparisons on index
    expressions, the symbols ``b h q kv q_len kv_len``, the named masks (without parentheses where they have no arguments),
    ``abs minimum maximum where table document_ids document_starts subtree_ends``, numbers, lists, strings, ``None``, ``True`` and
    ``False``. Any other name is a parameter to bind with ``mask.bind(name=value)``. ``parse(str(mask)) == mask``. A name that
    flexmask does not define loads the plugins.

    Args:
        text: the mask.
        values: values of parameters by name: numbers or data. Sizes that shape a mask, such as a canvas, must be given here.

    Raises:
        ExpressionError: a value for a parameter that the text does not have.
        DuplicateNameError: two packages define a mask of one name.
        TextError: the text is not a mask; the message shows the column and the closest known name.
        OperandError: ``text`` is not a string.
    """
    if is_traced():
        names = _names(text)
        if isinstance(names, str):
            raise ExpressionError(names)
        return cast(Mask, deferred("parse", (text,), values, names))
    if not isinstance(text, str):
        raise OperandError(f"parse() reads a string, got {type(text).__name__} {text!r}")
    if len(text) > MAX_TEXT:
        raise _too_long(len(text), MAX_TEXT)
    if not text.strip():
        raise TextError("the text is empty; write a mask, e.g. causal & key_padding(lengths=[3, 5, 4])")
    line = " ".join(text.split())  # a mask may stand on several lines
    blanked, lists = _without_lists(line)
    if (rest := len(blanked) - sum(map(len, lists.values()))) > MAX_LENGTH:
        raise _too_long(rest, MAX_LENGTH)
    _check_nesting(blanked)
    try:
        tree = ast.parse(blanked, mode="eval")
    except (MemoryError, RecursionError):
        raise TextError("the expression is too long or too deeply nested to be read", line[:100]) from None
    except (SyntaxError, ValueError) as error:
        column = getattr(error, "offset", None) or 1
        raise TextError(f"this is not an expression: {getattr(error, 'msg', error)}", line, column - 1) from None
    reader = _Reader(line, values, lists)
    mask = reader.mask(tree.body)
    unknown = sorted(set(values) - reader.used)
    if unknown:
        known = ", ".join(sorted({*reader.used, *mask.params})) or "none"
        raise ExpressionError(f"the mask {mask.brief()} has no parameter {', '.join(unknown)}; it has {known}")
    return mask


DEFERRABLE["parse"] = parse


def cached_mask(text: str, device: torch.device | None = None) -> Mask:
    """The mask of a text; each text is parsed once.

    Args:
        text: the mask.
        device: where the mask is lowered. On the CPU the tensors made from lists in the text are cached with it. On other
            devices, and without a device, they live as long as the returned mask.

    Raises:
        TextError: the text is not a mask.
    """
    if is_traced():
        return parse(text)
    kept = _cached(text)
    return kept if device is not None and device.type == "cpu" else _copy_data(kept)


@lru_cache(maxsize=256)
def _cached(text: str) -> Mask:
    return parse(text)


def _names(text: str) -> tuple[str, ...] | str:
    """The parameters of a text, or what is wrong with it."""
    try:
        return _cached(text).params
    except FlexmaskError as error:
        return str(error)


_names._dynamo_marked_constant = True  # type: ignore[attr-defined] # torch.compiler.assume_constant_result, without torch


def _copy_data(mask: Mask) -> Mask:
    """A copy with its own literal data, so that tensors made from it do not outlive the caller's mask."""
    if not mask.kept("literal", lambda: any(isinstance(node, Literal) for node in mask.walk())):
        return mask
    return cast(Mask, mask.replace(lambda node: Literal(node.size, node.data, node.truth) if isinstance(node, Literal) else None))


def _too_long(length: int, most: int) -> TextError:
    return TextError(f"the text has {length:,} characters; at most {most:,} are read. Bind long data: mask.bind(ids=...)")


def _without_lists(line: str) -> tuple[str, dict[int, str]]:
    """The text with blanks in place of the numbers of long lists, and these numbers by the place of their bracket in bytes."""
    lists: dict[int, str] = {}
    parts, end, size = [], 0, 0
    for found in STRING_OR_NUMBERS.finditer(line):
        if (numbers := found[1]) is not None:
            before = line[end : found.start()]
            size += len(before.encode())
            lists[size] = numbers
            parts += [before, "[", " " * (len(found[0]) - 2), "]"]
            end, size = found.end(), size + len(found[0])
    return "".join([*parts, line[end:]]), lists


def _check_nesting(line: str) -> None:
    depth = 0
    for found in re.finditer(r"[()\[\]]", line):
        depth += 1 if found[0] in "([" else -1
        if depth > MAX_NESTING:
            raise TextError(f"brackets are nested more than {MAX_NESTING} deep", line[: found.end()], found.start())


class _Reader:
    """Reads the syntax tree of one text."""

    def __init__(self, line: str, values: dict[str, object], lists: dict[int, str]) -> None:
        self.line = line
        self.lists = lists
        self.values = values
        self.used: set[str] = set()
        self.depth = 0

    def fail(self, node: ast.AST, reason: str) -> NoReturn:
        raise TextError(reason, *self.place_of(node))

    def place_of(self, node: ast.AST) -> tuple[str, int]:
        column = getattr(node, "col_offset", 0)
        return self.line, len(self.line.encode()[:column].decode(errors="ignore"))

    def mask(self, node: ast.expr) -> Mask:
        value = self.value(node)
        if isinstance(value, Param):
            self.fail(node, f"{value} is not a named mask.{nearest(value.name, registry.names()) or PARAMETERS}")
        if isinstance(value, bool | int | float) or value is None:
            self.fail(node, f"{value} is not a mask; everything is `full`, nothing is `empty`")
        if not isinstance(value, Mask):
            compared = value.comparison() if isinstance(value, Index) else f"({ast.unparse(node)[:40]}) == 0"
            self.fail(node, f"this is {_kind(value)}, not a mask; compare it, e.g. {compared}")
        return value

    def value(self, node: ast.expr) -> Any:
        self.depth += 1
        if self.depth > MAX_NESTING:
            self.fail(node, f"the expression is nested more than {MAX_NESTING} deep")
        try:
            return self.read(node)
        except (TextError, DuplicateNameError):
            raise
        except (FlexmaskError, TypeError, ValueError) as error:
            self.fail(node, str(error))
        finally:
            self.depth -= 1

    def read(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value) if value is None or isinstance(value, int | float | str):
                return value
            case ast.Name(name):
                return self.name(node, name)
            case ast.List([]) if node.col_offset in self.lists:
                return [int(number) for number in self.lists[node.col_offset].split(",")]
            case ast.List(items) | ast.Tuple(items):
                return self.items(items)
            case ast.UnaryOp(sign, operand) if type(sign) in OPERATORS:
                return OPERATORS[type(sign)](self.operand(operand))
            case ast.BinOp(op=sign) if type(sign) in OPERATORS:
                return self.chain(node)
            case ast.Compare(left, [sign], [right]) if type(sign) in OPERATORS:
                return OPERATORS[type(sign)](self.operand(left), self.operand(right))
            case ast.Compare(ops=[_, _, *_]):
                self.fail(node, "a chain of comparisons: write each in parentheses and join them with &, (a <= b) & (b < c)")
            case ast.Subscript(source, index):
                return self.subscript(node, source, index)
            case ast.Call(function, arguments, keywords):
                return self.call(node, function, arguments, keywords)
        signs = [getattr(node, "op", None), *getattr(node, "ops", [])]
        known = (INSTEAD[type(part)] for part in (node, *signs) if type(part) in INSTEAD)
        instead = next(known, f"{type(node).__name__} is not part of a mask's text")
        self.fail(node, f"`{ast.unparse(node)[:60]}`: {instead}")

    def items(self, items: list[ast.expr]) -> list[Any]:
        if all(isinstance(item, ast.Constant) for item in items):  # the usual case of long data, without a call for each
            return [item.value for item in items]  # type: ignore[attr-defined]
        return [self.value(item) for item in items]

    def operand(self, node: ast.expr) -> Any:
        value = self.value(node)
        if isinstance(value, Index | Mask) or type(value) is int:
            return value
        if isinstance(value, bool):
            self.fail(node, f"{value} cannot be an operand; write {int(value)}, e.g. flag[b, kv] == {int(value)}")
        self.fail(node, f"{_kind(value)} cannot be an operand; data is looked up by index: table([...])[b, q]")

    def chain(self, node: ast.BinOp) -> Any:
        """Reads ``a & b & c``, in the tree ``(a & b) & c``, from the left in a loop, so that long chains need no deep stack."""
        links = [node]
        while isinstance(links[-1].left, ast.BinOp) and type(links[-1].left.op) in OPERATORS:
            links.append(links[-1].left)
        value = self.operand_of(links[-1].left, links[-1].op)
        for link in reversed(links):
            value = OPERATORS[type(link.op)](value, self.operand_of(link.right, link.op))
        return value

    def operand_of(self, node: ast.expr, sign: ast.operator) -> Any:
        value = self.operand(node)
        if isinstance(value, Param) and isinstance(sign, ast.BitAnd | ast.BitOr | ast.BitXor):
            self.fail(node, f"{value} is not a named mask.{nearest(value.name, registry.names()) or PARAMETERS}")
        return value

    def name(self, node: ast.AST, name: str) -> Any:
        if name in SYMBOLS:
            return SYMBOLS[name]
        if name in FUNCTIONS:
            self.fail(node, f"{name} is a function; write {name}(...)")
        if name.startswith("_"):
            self.fail(node, f"a name cannot start with an underscore: {name}")
        define = registry.find(name)
        if define is None and name in self.values:
            self.used.add(name)
            return named_data(self.values[name], name)
        if define is None:
            return Param(name)
        try:
            inspect.signature(define).bind()
        except TypeError as error:
            self.fail(node, f"{name} needs arguments: {error}; write {name}{signature_of(define)}")
        return define()

    def subscript(self, node: ast.expr, source: ast.expr, index: ast.expr) -> Any:
        data = self.value(source)
        if not isinstance(data, Param | Table | Mask | Index):
            data = table(data)
        if not isinstance(data, Param | Table):
            self.fail(node, f"{_kind(data)} is not data that can be looked up")
        indices = self.value(index)
        return data[tuple(indices) if isinstance(indices, list) else indices]

    def call(self, node: ast.expr, function: ast.expr, arguments: list[ast.expr], keywords: list[ast.keyword]) -> Any:
        if not isinstance(function, ast.Name):
            name = "; write named(mask, 'words')" if isinstance(function, ast.Attribute) and function.attr == "named" else ""
            self.fail(function, f"`{ast.unparse(function)[:60]}` cannot be called; only named masks and functions can{name}")
        target = FUNCTIONS.get(function.id) or registry.find(function.id)
        if target is None:
            hint = nearest(function.id, [*registry.names(), *FUNCTIONS])
            self.fail(function, f"there is no mask or function {function.id}.{hint}")
        values = [self.value(argument) for argument in arguments]
        named = {}
        for keyword in keywords:
            if keyword.arg is None:
                self.fail(keyword.value, "** is not part of a mask's text")
            named[keyword.arg] = self.value(keyword.value)
        if reason := misfit(target, values, named):
            self.fail(node, reason)
        self.check_places(function.id, target, arguments)
        try:
            return target(*values, **named)
        except FlexmaskError:
            raise
        except Exception as error:  # the function of a plugin may raise anything
            reason = f"the function {function.id} fails: {type(error).__name__}: {error}"
            raise TextError(reason, *self.place_of(node)) from error

    def check_places(self, name: str, target: Callable[..., Any], arguments: list[ast.expr]) -> None:
        """Refuses ``key_padding(start)``, which would bind the data called ``start`` as ``lengths``, the first argument."""
        parameters = inspect.signature(target).parameters
        for place, argument in zip(parameters, arguments, strict=False):
            if isinstance(argument, ast.Name) and argument.id in parameters and argument.id not in {place, *SYMBOLS}:
                given = argument.id
                self.fail(argument, f"{name}({given}) would give {given} as {place}; write {name}({given}={given})")


def _kind(value: object) -> str:
    match value:
        case Mask():
            return f"the mask {value.brief()}"
        case Index():
            return f"the index expression {value.brief()}"
        case Table():
            return "a table"
        case list():
            return "a list"
    return repr(value)[:60]
