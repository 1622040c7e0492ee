"""The mutants of a module: one small change of its syntax tree each."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

__all__ = ["Mutant", "mutants"]

#: For each comparison its boundary and its opposite.
COMPARISONS: dict[type[ast.cmpop], list[type[ast.cmpop]]] = {
    ast.Lt: [ast.LtE, ast.GtE],
    ast.LtE: [ast.Lt, ast.Gt],
    ast.Gt: [ast.GtE, ast.LtE],
    ast.GtE: [ast.Gt, ast.Lt],
    ast.Eq: [ast.NotEq],
    ast.NotEq: [ast.Eq],
    ast.Is: [ast.IsNot],
    ast.IsNot: [ast.Is],
    ast.In: [ast.NotIn],
    ast.NotIn: [ast.In],
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitAnd,
}
_PAIRS = [
    ("min", "max"),
    ("minimum", "maximum"),
    ("amin", "amax"),
    ("argmin", "argmax"),
    ("any", "all"),
    ("floor", "ceil"),
    ("cummin", "cummax"),
    ("logical_and", "logical_or"),
    ("zeros_like", "ones_like"),
    ("zeros", "ones"),
    ("append", "extend"),
]
NAMES = {name: other for pair in _PAIRS for name, other in (pair, pair[::-1])}
#: Methods whose call is replaced by what they are called on.
DROPPED = {"abs", "clamp", "clamp_", "clip", "flip", "cummax", "cummin", "cumsum", "neg", "masked_fill", "roll", "long", "bool"}


@dataclass(frozen=True)
class Mutant:
    """One change.

    Attributes:
        place: the number of the changed node in :func:`_sites`.
        change: the number of its change in :func:`_changes`.
        first: the first line of the statement that holds the node.
        last: its last line, or that of the head of a compound statement.
        text: what is changed into what.
    """

    place: int
    change: int
    first: int
    last: int
    text: str

    def apply(self, tree: ast.Module) -> ast.Module:
        """The mutated tree; ``tree`` is changed."""
        for place, (parent, field, index, node, _) in enumerate(_sites(tree)):
            if place == self.place:
                new = ast.copy_location(list(_changes(node))[self.change], node)
                if index is None:
                    setattr(parent, field, new)
                else:
                    getattr(parent, field)[index] = new
                return ast.fix_missing_locations(tree)
        raise LookupError(f"the tree has no node {self.place}")


def mutants(source: str) -> list[Mutant]:
    """All mutants of a module, in the order of its lines."""
    found = []
    for place, (_, _, _, node, statement) in enumerate(_sites(ast.parse(source))):
        if statement is None:
            continue
        last = statement.body[0].lineno - 1 if isinstance(getattr(statement, "body", None), list) else statement.end_lineno
        for change, new in enumerate(_changes(node)):
            text = f"{_short(node)}  ->  {_short(new)}"
            found.append(Mutant(place, change, statement.lineno, max(statement.lineno, last or 0), text))
    return found


def _short(node: ast.AST) -> str:
    return ast.unparse(node).split("\n")[0]


Site = tuple[ast.AST, str, int | None, ast.AST, Any]


def _sites(tree: ast.AST, statement: ast.stmt | None = None, scope: str = "module") -> Iterator[Site]:
    """Every node that may be changed: its parent, field and index, itself, and its statement where a mutant can be put there."""
    for field, value in ast.iter_fields(tree):
        if _is_fixed(tree, field):
            continue
        for index, node in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if (
                not isinstance(node, ast.AST)
                or isinstance(node, ast.expr_context | ast.JoinedStr)
                or _is_type(tree, field, index)
            ):
                continue
            own = node if isinstance(node, ast.stmt) else statement
            inner = {ast.FunctionDef: "function", ast.Lambda: "function", ast.ClassDef: "class"}.get(type(tree), scope)
            if isinstance(node, ast.stmt | ast.expr | ast.comprehension | ast.Slice):
                mutable = inner == "function" or (inner == "module" and isinstance(own, ast.Assign))
                yield tree, field, index, node, own if mutable else None
            yield from _sites(node, own, inner)


def _is_fixed(tree: ast.AST, field: str) -> bool:
    """Types, decorators, defaults and messages."""
    match tree:
        case ast.Raise() | ast.Assert() | ast.Import() | ast.ImportFrom():
            return True
        case ast.FunctionDef() | ast.Lambda() | ast.ClassDef():
            return field != "body"
        case ast.AnnAssign():
            return field != "value"
    return False


def _is_type(tree: ast.AST, field: str, index: int | None) -> bool:
    if not (isinstance(tree, ast.Call) and field == "args" and isinstance(tree.func, ast.Name)):
        return False
    return (tree.func.id, index) in (("cast", 0), ("isinstance", 1), ("issubclass", 1))


def _changes(node: ast.AST) -> Iterator[ast.AST]:
    """What a node is replaced by, once for each mutant."""
    match node:
        case ast.Compare(ops=ops):
            for at, op in enumerate(ops):
                for other in COMPARISONS[type(op)]:
                    yield _with(node, ops=[*ops[:at], other(), *ops[at + 1 :]])
        case ast.BinOp(op=op) if type(op) in OPERATORS:
            yield _with(node, op=OPERATORS[type(op)]())
        case ast.AugAssign(op=op) if type(op) in OPERATORS:
            yield _with(node, op=OPERATORS[type(op)]())
            yield ast.Pass()
        case ast.BoolOp(op=op, values=values):
            yield _with(node, op=ast.Or() if isinstance(op, ast.And) else ast.And())
            for at in range(len(values)):
                rest = [*values[:at], *values[at + 1 :]]
                yield _with(node, values=rest) if len(rest) > 1 else rest[0]
        case ast.UnaryOp(op=ast.Not() | ast.USub() | ast.Invert(), operand=operand) if not isinstance(operand, ast.Constant):
            yield operand
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield ast.Constant(value + 1)
            yield ast.Constant(value - 1)
        case ast.Name(id=name, ctx=ast.Load()) if name in NAMES:
            yield _with(node, id=NAMES[name])
        case ast.Attribute(attr=name, ctx=ast.Load()) if name in NAMES:
            yield _with(node, attr=NAMES[name])
        case ast.Call(func=ast.Attribute(attr=name, value=value)) if name in DROPPED:
            yield value
        case ast.IfExp(body=body, orelse=orelse):
            yield body
            yield orelse
        case ast.If():
            yield _with(node, test=ast.Constant(True))
            yield _with(node, test=ast.Constant(False))
        case ast.While():
            yield _with(node, test=ast.Constant(False))
        case ast.comprehension(ifs=[_, *_]):
            yield _with(node, ifs=[])
        case ast.Slice(lower=lower, upper=upper):
            if lower is not None and not isinstance(lower, ast.Constant):
                yield _with(node, lower=None)
            if upper is not None and not isinstance(upper, ast.Constant):
                yield _with(node, upper=None)
        case ast.Return(value=ast.expr() as value) if not (isinstance(value, ast.Constant) and value.value is None):
            yield ast.Return(ast.Constant(None))
        case ast.Raise() | ast.Expr(value=ast.Call() | ast.Yield() | ast.YieldFrom()):
            yield ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield ast.Pass()
        case ast.Continue():
            yield ast.Break()
        case ast.Break():
            yield ast.Continue()


def _with(node: ast.AST, **fields: Any) -> ast.AST:
    new = copy.copy(node)
    for name, value in fields.items():
        setattr(new, name, value)
    return new
