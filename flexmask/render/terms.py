"""The terms of a composition, and the cells that each of them hides.

Of ``a & b`` each operand that does not show a cell hides it; of ``a | b`` both do, as either would have shown it. What is
neither is a term as a whole, under its name where it has one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from flexmask.algebra import And, Mask, Named, Or, PerHead

__all__ = ["Term", "terms"]


class Term(NamedTuple):
    """One term of a mask, and the cells of which it is a reason that they are hidden."""

    mask: Mask
    hides: Mask


def terms(mask: Mask, head: int = 0) -> list[Term]:
    """The terms of a mask for one head in reading order, each once. Of a single name the terms of its definition are given."""
    found: dict[Mask, Mask] = {}
    for term, hides in _reasons(mask, head):
        found[term] = found[term] | hides if term in found else hides
    alone = next(iter(found))
    if len(found) == 1 and isinstance(alone, Named):
        return terms(alone.body, head)
    return [Term(*pair) for pair in found.items()]


def _reasons(mask: Mask, head: int) -> Iterator[tuple[Mask, Mask]]:
    match mask:
        case And(operands):
            for operand in operands:
                yield from _reasons(operand, head)
        case Or(operands):
            for operand in operands:
                for term, hides in _reasons(operand, head):
                    yield term, hides - mask
        case PerHead(masks) | Named(body=PerHead(masks)):
            yield from _reasons(masks[head], head)
        case _:
            yield mask, ~mask
