"""A fixture of the tests of lowerings."""

import pytest

from flexmask import _sync


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done on a GPU, where no value is read on the host."""
    monkeypatch.setattr(_sync, "needs_sync", lambda tensor: True)
