"""The terms of a mask: masks whose conjunction is the mask, so each hidden cell is masked out by at least one.

The terms of ``a & b`` are those of ``a`` and of ``b``. Those of ``(a & b) | c`` are ``a | c`` and ``b | c``; those of
``where(c, a, b)`` are ``~c | a`` and ``c | b``. Any other mask is one term; a named mask is one by its name.
"""

from __future__ import annotations

import operator
from functools import reduce
from itertools import product
from math import prod

from flexmask.expr.mask import And, Mask, Named, Not, Or, PerHead

__all__ = ["terms"]

#: The most terms of a union; a union with more is one term.
MAX_OF_UNION = 4


def terms(mask: Mask, head: int | None) -> list[Mask]:
    """The terms of a mask in reading order, each once; their conjunction is the mask.

    Args:
        mask: the mask.
        head: the head whose mask replaces ``per_head``; None to keep that as one term.
    """
    whole = reduce(operator.and_, _clauses(mask, head))  # without duplicates and implied terms
    return list(whole.operands) if isinstance(whole, And) else [whole]


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
