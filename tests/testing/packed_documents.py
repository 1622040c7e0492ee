"""A mask of packed documents with padding, and checks that fail with a message."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import flexmask as fm

LENGTHS = [10, 7]
DOCUMENTS = [[0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 2], [0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1]]
PACKED = fm.causal() & fm.document(DOCUMENTS) & fm.key_padding(LENGTHS)


def check_fails(check: Callable[[], None], *parts: str) -> str:
    """That a check fails, with a message that holds some texts."""
    with pytest.raises(AssertionError) as caught:
        check()
    message = str(caught.value)
    for part in parts:
        assert part in message, message
    return message
