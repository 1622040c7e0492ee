"""Settings that hold for every test of the backends."""

import pytest

from flexmask.backends import tiling_cache


@pytest.fixture(autouse=True)
def own_tilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test makes its own tilings, as some change how they are made."""
    monkeypatch.setattr(tiling_cache, "_KEPT", ())
