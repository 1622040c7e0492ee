"""The terms of a mask: masks whose conjunction is the mask, so each hidden cell is masked out by at least one.

They follow the brackets as written: the terms of ``a & b`` are those of ``a`` and of ``b``. Any other mask is one, by its name
where it has one. A term ``a | b`` hides a cell where none of ``a`` and ``b`` shows it.
"""

from __future__ import annotations

import operator
from functools import reduce

from flexmask.expr.mask import And, Mask, Named, Or, PerHead

#: What the reason of a union begins with.
NONE_OF = "none of: "


def terms(mask: Mask, head: int | None) -> list[Mask]:
    """The terms of a mask in reading order, each once; their conjunction is the mask.

    Args:
        mask: the mask; words for it as a whole, of :meth:`flexmask.Mask.named`, do not count.
        head: the head whose mask replaces ``per_head``; None to keep that as one term.
    """
    while isinstance(mask, Named) and mask.label:
        mask = mask.body
    whole = reduce(operator.and_, _operands(mask, head))  # without duplicates and implied terms
    return list(whole.operands) if isinstance(whole, And) else [whole]


def _operands(mask: Mask, head: int | None) -> list[Mask]:
    match mask:
        case And(operands):
            return [term for operand in operands for term in _operands(operand, head)]
        case PerHead(masks) | Named(body=PerHead(masks)) if head is not None:
            return _operands(masks[head], head)
    return [mask]


def alternatives(term: Mask) -> tuple[Mask, ...]:
    """What a term shows cells by: each operand of ``a | b``, else itself."""
    return term.operands if isinstance(term, Or) else (term,)


def reason(term: Mask) -> str:
    """What hides a cell that a term does not show: the term in words, or that it is none of several."""
    words = [part.spoken() for part in alternatives(term)]
    return words[0] if len(words) == 1 else f"{NONE_OF}{', '.join(words)}"


def hidden_text(text: str) -> str:
    """A reason as a phrase on a cell."""
    return text if text.startswith(NONE_OF) else f"hidden by {text}"
