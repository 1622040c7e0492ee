"""The pytest plugin: fixtures with which a test suite checks its own masks in a line each.

It is loaded wherever flexmask is installed, and imports torch only when a fixture is used::

    def test_my_mask(assert_equivalent):
        assert_equivalent(my_mask(), 128, reference=my_mask_mod)

    def test_my_model(assert_no_leak, flexmask_device):
        model = Model().eval().to(flexmask_device)
        assert_no_leak(lambda tokens: model(tokens, lengths), my_mask(lengths), tokens, layers=4)

    def test_my_numbers(assert_batch_invariant, flexmask_device):
        model = Model().eval().to(flexmask_device)
        assert_batch_invariant(lambda x, mask: model(x, mask), torch.randn(700, 64), [300, 150, 250])

``assert_equivalent``, ``assert_no_leak`` and ``assert_batch_invariant`` are those of :mod:`flexmask.testing` on the device
``flexmask_device``. That is the CPU unless ``--flexmask-device`` says another; given several times, tests that use one of the
fixtures run on each device. A device that is not there is an error, not a skipped test.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds ``--flexmask-device``."""
    parser.getgroup("flexmask", "attention masks").addoption(
        "--flexmask-device",
        action="append",
        metavar="DEVICE",
        help="The device of flexmask's fixtures, e.g. cuda; cpu by default. Given several times, tests run on each.",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Runs tests on each of several devices."""
    devices = metafunc.config.getoption("flexmask_device") or []
    if len(devices) > 1 and "flexmask_device" in metafunc.fixturenames:
        metafunc.parametrize("flexmask_device", devices, indirect=True)


@pytest.fixture
def flexmask_device(request: pytest.FixtureRequest) -> str:
    """The device of the checks, as ``--flexmask-device`` names it."""
    from flexmask import _sync
    from flexmask.errors import LoweringError

    asked = request.config.getoption("flexmask_device") or ["cpu"]
    device = str(getattr(request, "param", asked[0]))
    try:
        _sync.resolve_device(device)
    except LoweringError as error:
        raise pytest.UsageError(f"--flexmask-device {device}: {error}") from None
    return device


def _on_the_device(check: str) -> Any:
    """The fixture of an assertion of :mod:`flexmask.testing` on the device of the checks."""

    def assertion(flexmask_device: str) -> Callable[..., None]:
        from flexmask import testing

        return partial(getattr(testing, check), device=flexmask_device)

    assertion.__doc__ = f":func:`flexmask.testing.{check}` on the device of the checks."
    return pytest.fixture(name=check)(assertion)


assert_equivalent = _on_the_device("assert_equivalent")
assert_subset = _on_the_device("assert_subset")
assert_no_leak = _on_the_device("assert_no_leak")
assert_batch_invariant = _on_the_device("assert_batch_invariant")
