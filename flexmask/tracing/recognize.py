"""Finds named masks, such as ``causal``, in expressions that are written without their names.

Patterns and expressions are brought into one form, in which comparisons are linear forms that are at most 0, or equal 0. A
pattern is a named mask with parameters. Its form is matched against the parts of a conjunction or disjunction.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias, cast

from flexmask.errors import FlexmaskError
from flexmask.expr.index import Arithmetic, Constant, Index, b
from flexmask.expr.linear import Linear
from flexmask.expr.mask import And, Compare, Mask, Named, Not, Or, Truth, Xor
from flexmask.expr.node import Node, key_of
from flexmask.expr.tables import Lookup, Param, Table
from flexmask.intervals.solve import linear
from flexmask.parser import parse

#: Named masks with parameters, in the order in which patterns of equal length are tried. ``n``, ``m`` and ``k`` match integers,
#: or data ``[B]``; ``data`` and ``more`` match tables.
PATTERNS = (
    "causal",
    "causal(offset=n)",
    "sliding_window(left=n, right=m)",
    "sliding_window(left=n, right=None)",
    "dilated_window(left=n, right=m, dilation=k)",
    "sink_window(n, left=m)",
    "global_window(data, left=n, right=m)",
    "prefix_lm(n)",
    "document(data)",
    "document(data, more)",
    "bidirectional_spans(data)",
    "chunked(n)",
    "block_causal(n)",
    "chunk_window(n, left=m)",
    "prefix_tree(data)",
    "prefix_tree(data, order=more)",
    "key_padding(lengths=data)",
    "key_padding(start=data)",
    "key_padding(keep=data)",
    "query_padding(lengths=data)",
    "query_padding(start=data)",
    "query_padding(keep=data)",
)

Binding: TypeAlias = "dict[str, int | Table]"


@dataclass(frozen=True)
class Pattern:
    """A named mask with parameters, and the operands of its form under ``&`` or ``|``; one part where it has neither."""

    mask: Mask
    kind: type[And | Or] | None
    parts: tuple[Mask, ...]


def recognize(mask: Mask) -> Mask:
    """The mask with a name on each part that equals a named mask. The expressions under the names do not change."""
    match mask:
        case And(operands) | Or(operands):
            return _joined(type(mask), operands)
        case Not(operand):
            return Not.make(recognize(operand))
        case Xor(operands):
            return Xor.make(tuple(map(recognize, operands)))
        case Compare():
            return _named(mask)
    return mask


def _joined(kind: type[And | Or], operands: tuple[Mask, ...]) -> Mask:
    """A conjunction or disjunction; patterns with the most parts are tried first."""
    left = dict(enumerate(map(_form, operands)))
    found: dict[int, Mask] = {}
    for pattern in (pattern for pattern in _patterns() if pattern.kind is kind):
        while taken := _taken(pattern, operands, left):
            chosen, named = taken
            found[chosen[0]] = named
            left = {number: form for number, form in left.items() if number not in chosen}
    found |= {number: recognize(operands[number]) for number in left}
    return kind.make(tuple(found[number] for number in sorted(found)))


def _named(mask: Mask) -> Mask:
    """A comparison, under its name if it has one."""
    alone = {0: _form(mask)}
    found = (_taken(pattern, (mask,), alone) for pattern in _patterns())
    return next((named for _, named in filter(None, found)), mask)


def _taken(pattern: Pattern, operands: tuple[Mask, ...], forms: dict[int, Mask]) -> tuple[list[int], Mask] | None:
    """The numbers of the first operands that match a pattern together, of those with a form, and the named mask."""
    owners: list[int] = []
    parts: list[Mask] = []
    for number, form in forms.items():
        own = form.operands if pattern.kind and isinstance(form, pattern.kind) else (form,)
        owners += [number] * len(own)
        parts += own
    for places, binding in _assigned(pattern.parts, parts, {}):
        chosen = sorted({owners[place] for place in places})
        if sum(map(owners.count, chosen)) == len(places):
            matched = tuple(operands[number] for number in chosen)
            named = _filled(pattern, binding, pattern.kind.make(matched) if pattern.kind else matched[0])
            if named is not None:
                return chosen, named
    return None


def _filled(pattern: Pattern, binding: Binding, body: Mask) -> Mask | None:
    """The named mask with its parameters bound, over the expression that it matched."""
    tables = [value for value in binding.values() if isinstance(value, Table)]
    if len({table.key for table in tables}) < len(tables):
        return None  # a shorter pattern matches one table
    try:
        named = pattern.mask.bind(**binding)
    except FlexmaskError:  # values that the named mask refuses, such as a window that ends before it starts
        return None
    return Named(named.name, named.arguments, body, named.define) if isinstance(named, Named) else None


@cache
def _patterns() -> tuple[Pattern, ...]:
    made = []
    for text in PATTERNS:
        mask = parse(text)
        form = _form(mask)
        made.append(Pattern(mask, type(form), form.operands) if isinstance(form, And | Or) else Pattern(mask, None, (form,)))
    return tuple(sorted(made, key=lambda pattern: -len(pattern.parts)))


def _form(mask: Mask) -> Mask:
    """A mask over comparisons of linear forms with 0."""

    def leaf(node: Node) -> Mask | None:
        return (
            linear(node, lambda form, sign: Compare.make(sign, form.index(), Constant(0))) if isinstance(node, Compare) else None
        )

    return cast(Mask, mask.expand().replace(leaf))


# ---------------------------------------------------------------- matching


def _assigned(parts: Sequence[Mask], candidates: Sequence[Mask], known: Binding) -> Iterator[tuple[list[int], Binding]]:
    """The ways to match each part with a candidate of its own: numbers of the candidates, and values of the parameters."""
    if not parts:
        yield [], known
        return
    for place, candidate in enumerate(candidates):
        for binding in _same(parts[0], candidate, known):
            others = [other if i != place else Truth(False) for i, other in enumerate(candidates)]
            for places, whole in _assigned(parts[1:], others, binding):
                yield [place, *places], whole


def _same(pattern: Mask, mask: Mask, known: Binding) -> Iterator[Binding]:
    match pattern, mask:
        case Compare(sign, left, Constant(0)), Compare(other_sign, other, Constant(0)) if sign == other_sign:
            form = Linear.of(other)
            yield from _same_form(Linear.of(left), form, known)
            if sign in {"==", "!="}:
                yield from _same_form(Linear.of(left), -form, known)
        case (And(parts), And(others)) | (Or(parts), Or(others)) if len(parts) == len(others):
            yield from (binding for _, binding in _assigned(parts, others, known))


def _same_form(pattern: Linear, form: Linear, known: Binding) -> Iterator[Binding]:
    """The bindings that match two linear forms term by term. A parameter that is a term of its own matches the remainder."""
    if not pattern.terms:
        if not form.terms and pattern.constant == form.constant:
            yield known
        return
    key, (index, factor) = min(pattern.terms.items(), key=lambda item: _number_name(item[1][0]) != "")
    rest = pattern.without(key)
    for other_key, (other, other_factor) in form.terms.items():
        if factor == other_factor:
            for binding in _same_index(index, other, known):
                yield from _same_form(rest, form.without(other_key), binding)
    name = _number_name(index)
    if name and abs(factor) == 1:
        value = known.get(name)
        if value is None and not rest.terms and not form.terms:
            yield {**known, name: (form.constant - rest.constant) * factor}
        elif isinstance(value, int):
            yield from _same_form(rest + value * factor, form, known)


def _number_name(index: Index) -> str:
    """The name of an expression that is a parameter that matches an integer; nothing for another."""
    match index:
        case Param(name) | Lookup(Param(name)) if len(name) == 1:
            return name
    return ""


def _same_index(pattern: Index, index: Index, known: Binding) -> Iterator[Binding]:
    match pattern, index:
        case Lookup(Param(name), wanted), Lookup(Table() as table, indices) if known.get(name, table) == table:
            keys = key_of(wanted)
            if key_of(indices) in (keys, tuple(key for key in keys if key != b.key)):
                yield {**known, name: table}
        case Arithmetic(sign, left, right), Arithmetic(other_sign, other_left, other_right) if sign == other_sign:
            for binding in _same_form(Linear.of(left), Linear.of(other_left), known):
                yield from _same_form(Linear.of(right), Linear.of(other_right), binding)
        case _ if pattern.key == index.key:
            yield known
