"""Expressions that use their parts many times: text, hash, equality, pickles and lowerings take time in the distinct parts."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

import flexmask as fm
from flexmask import Mask, kv, q
from flexmask.errors import TextError
from flexmask.expr.node import MAX_WRITTEN


def doubled(times: int) -> Mask:
    """A mask whose text has about ``2 ** times`` operations."""
    index: Any = q
    for _ in range(times):
        index = index - (index % 1000 - kv)
    mask: Mask = index <= kv
    return fm.causal() & mask


USES: dict[str, Callable[[Mask], Any]] = {
    "hash": lambda mask: hash(mask) == hash(doubled(30)),
    "equal": lambda mask: mask == doubled(30),
    "unequal": lambda mask: mask != doubled(29),
    "dict": lambda mask: {mask: 1}[doubled(30)],
    "pickle": lambda mask: pickle.loads(pickle.dumps(mask)) == mask,
    "copy": lambda mask: copy.deepcopy(mask) == copy.copy(mask),
    "compose": lambda mask: mask & doubled(30) == mask,
    "expand": lambda mask: mask.expand().depth == mask.depth,
    "str": str,
    "repr": repr,
    "brief": lambda mask: mask.brief(),
    "lengths": lambda mask: fm.explain(mask, 2),
    "rows": lambda mask: mask.rows(2),
    "block_mask": lambda mask: mask.block_mask(300),
}


@pytest.mark.parametrize("use", USES)
def test_shared_parts_cost_as_much_as_one(use: str) -> None:
    """Without sharing each of these takes longer than any test runs, or more memory than there is."""
    assert USES[use](doubled(30)) is not False


def test_a_large_text_is_abbreviated() -> None:
    mask = doubled(30)
    assert str(mask) == f"causal & <{mask.below[1].text_size} operations>"
    assert repr(mask) == f"causal() & <{mask.below[1].text_size} operations>"
    with pytest.raises(TextError):
        fm.parse(str(mask))


def test_texts_up_to_the_limit_are_whole() -> None:
    times = next(times for times in range(30) if doubled(times + 1).text_size > MAX_WRITTEN)
    mask = doubled(times)
    assert MAX_WRITTEN / 4 < mask.text_size <= MAX_WRITTEN
    assert fm.parse(str(mask)) == mask
    many = fm.masks.per_head([kv <= q + i for i in range(1000)])
    assert fm.parse(str(many)) == many


def test_a_name_counts_once_whatever_it_stands_for() -> None:
    mask = fm.masks.shift(fm.causal(), q=1)
    assert mask.text_size == 2


def test_keys_that_differ_in_one_leaf_differ() -> None:
    def mask(last: int) -> Mask:
        index: Any = q + last
        for _ in range(20):
            index = index - (index % 1000)
        found: Mask = index <= kv
        return found

    assert mask(1) == mask(1)
    assert mask(1) != mask(2)
    assert len({mask(1), mask(2), mask(1)}) == 2
