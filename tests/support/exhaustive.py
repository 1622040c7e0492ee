"""Parameters that are taken with ``pytest -m ""`` alone."""

from collections.abc import Iterable
from typing import Any

import pytest


def exhaustive(values: Iterable[Any]) -> list[Any]:
    """Parameters marked as exhaustive, to be listed after those that each run takes."""
    return [pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.exhaustive) for value in values]


def each_run(values: Iterable[Any], *often: Any) -> list[Any]:
    """All values, of which all but some are marked as exhaustive."""
    return [*often, *exhaustive(value for value in values if value not in often)]
