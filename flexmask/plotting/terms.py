"""The terms of a composition: masks that hide a cell each on its own, and together show what the composition shows.

Of ``a & b`` these are the terms of each operand. Of ``(a & b) | c`` they are ``a | c`` and ``b | c``, since a cell of a union is
hidden by what all alternatives lack; of ``where(c, a, b)`` they are ``~c | a`` and ``c | b``. What is none of these is a term as
a whole, under its name where it has one.
"""

from __future__ import annotations

import operator
from functools import reduce
from itertools import product
from math import prod

from flexmask.expr.mask import And, Mask, Named, Not, Or, PerHead

__all__ = ["terms"]

#: Terms of a union at most; one of more alternatives is a term as a whole.
MAX_OF_UNION = 4
#: Characters of a term that replaces a single name.
SHORT = 40


def terms(mask: Mask, head: int | None) -> list[Mask]:
    """The terms of a mask in reading order, each once; their conjunction is the mask.

    Args:
        mask: the mask. Of a single name the terms of its definition are given, where there are several and they are short.
        head: the head whose mask replaces ``per_head``; None to keep that as one term.
    """
    whole = reduce(operator.and_, _clauses(mask, head))  # each once, without those that others make superfluous
    found = list(whole.operands) if isinstance(whole, And) else [whole]
    if len(found) == 1 and isinstance(found[0], Named):
        within = terms(found[0].body, head)
        if len(within) > 1 and max(len(str(term)) for term in within) <= SHORT:
            return within
    return found


def _clauses(mask: Mask, head: int | None) -> list[Mask]:
    match mask:
        case And(operands):
            return [clause for operand in operands for clause in _clauses(operand, head)]
        case Or(operands):
            return _of_choice(operands, head) or _of_union(mask, operands, head)
        case PerHead(masks) | Named(body=PerHead(masks)) if head is not None:
            return _clauses(masks[head], head)
    return [mask]


def _of_union(mask: Mask, operands: tuple[Mask, ...], head: int | None) -> list[Mask]:
    of_each = [_clauses(operand, head) for operand in operands]
    if prod(map(len, of_each)) > MAX_OF_UNION:
        return [mask]
    return [reduce(operator.or_, chosen) for chosen in product(*of_each)]


def _of_choice(operands: tuple[Mask, ...], head: int | None) -> list[Mask]:
    """The terms of ``(c & a) | (~c & b)``; none of other unions."""
    match operands:
        case (And(first), And(second)):
            for condition in first:
                if Not.make(condition) in second:
                    a, b = (
                        reduce(operator.and_, (part for part in parts if part != own))
                        for parts, own in ((first, condition), (second, Not.make(condition)))
                    )
                    return [
                        *(~condition | clause for clause in _clauses(a, head)),
                        *(condition | clause for clause in _clauses(b, head)),
                    ]
    return []
