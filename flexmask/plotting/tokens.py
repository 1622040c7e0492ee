"""Tokens as labels along the axes of a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from flexmask.errors import OperandError, RenderError

__all__ = ["Tokens", "labels_of", "query_labels", "split"]

#: Labels: a list of them, or a text whose words they are.
Tokens: TypeAlias = str | Sequence[str]


def split(tokens: Tokens, what: str = "tokens") -> tuple[str, ...]:
    """Tokens as a tuple; a text is split at blanks.

    Raises:
        OperandError: they are neither a text nor a list of texts, or there are none.
    """
    found = tokens.split() if isinstance(tokens, str) else tokens
    if not isinstance(found, Sequence) or not found or not all(isinstance(token, str) for token in found):
        raise OperandError(f"{what} must be a text or a list of texts, at least one, got {tokens!r}")
    return tuple(found)


def labels_of(tokens: Tokens, length: int, what: str) -> tuple[str, ...]:
    """The labels of positions, one for each.

    Raises:
        OperandError: as :func:`split`.
        RenderError: there are not as many tokens as positions.
    """
    found = split(tokens, what)
    if len(found) != length:
        raise RenderError(f"{what} must label each of the {length} positions, got {len(found)}")
    return found


def query_labels(tokens: Tokens, q_len: int, kv_len: int, offset: int) -> tuple[str, ...]:
    """The labels of the queries from position ``offset`` on: of tokens that label each key theirs, else one for each.

    Raises:
        OperandError, RenderError: as :func:`labels_of`.
    """
    found = split(tokens)
    if len(found) == kv_len and offset + q_len <= kv_len:
        return found[offset : offset + q_len]
    return labels_of(found, q_len, "tokens")
