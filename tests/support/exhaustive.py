"""What each run takes of many parameters and examples, and what ``pytest -m "" --hypothesis-profile=all`` takes alone."""

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings

#: Half of the examples that other drawn tests take, for those that compile or draw pictures.
half = settings(max_examples=settings().max_examples // 2)


def exhaustive(values: Iterable[Any]) -> list[Any]:
    """Parameters marked as exhaustive, to be listed after those that each run takes."""
    return [pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.exhaustive) for value in values]


def each_run(values: Iterable[Any], *often: Any) -> list[Any]:
    """All values, of which all but some are marked as exhaustive."""
    return [*often, *exhaustive(value for value in values if value not in often)]
