"""What each run takes of many parameters and examples, and what ``pytest -m "" --hypothesis-profile=all`` takes alone."""

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest
from hypothesis import settings

#: Parts of the examples that other drawn tests take, for those that compile or draw pictures.
half = settings(max_examples=settings().max_examples // 2)
quarter = settings(max_examples=settings().max_examples // 4)


def exhaustive(values: Iterable[Any]) -> list[Any]:
    """Parameters marked as exhaustive, to be listed after those that each run takes."""
    return _marked(values, pytest.mark.exhaustive)


def slow(values: Iterable[Any]) -> list[Any]:
    """Parameters marked as slow, which ``.ci/run`` takes and ``pytest`` alone does not."""
    return _marked(values, pytest.mark.slow)


def _marked(values: Iterable[Any], mark: pytest.MarkDecorator) -> list[Any]:
    return [pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=mark) for value in values]


def each_run(values: Iterable[Any], *often: Any) -> list[Any]:
    """All values, of which all but some are marked as exhaustive."""
    return [*often, *exhaustive(value for value in values if value not in often)]


def one_in(every: int, *axes: Iterable[Any]) -> list[Any]:
    """All combinations of some axes, of which each run takes one in ``every``.

    Where each axis has at least ``every`` values, those of two axes have each value, and those of three each pair of values.
    """
    values = [list(axis) for axis in axes]
    places = list(product(*(range(len(axis)) for axis in values)))
    combinations = [tuple(axis[i] for axis, i in zip(values, place, strict=True)) for place in places]
    taken = [sum(place) % every == 0 for place in places]
    marked = exhaustive(one if len(one) > 1 else one[0] for one, in_each in zip(combinations, taken, strict=True) if not in_each)
    return [*(pytest.param(*one) for one, in_each in zip(combinations, taken, strict=True) if in_each), *marked]
