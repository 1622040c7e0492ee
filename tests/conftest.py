"""Settings that hold for every test."""

import gc
import os
import sys
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

ALWAYS: Any = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}
settings.register_profile("default", **ALWAYS, derandomize=True, max_examples=25)
settings.register_profile("all", **ALWAYS, derandomize=True, max_examples=1000)
settings.register_profile("explore", **ALWAYS, max_examples=2000)
settings.load_profile("default")

gc.disable()  # until all is imported and collected, of which nothing is garbage

if "PYTEST_XDIST_WORKER" in os.environ:  # the workers share the cores among themselves
    import torch  # not in their parent, which runs no test

    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Names of tests are the same in each process, so that each worker collects the same."""
    found = [item.nodeid for item in items if " at 0x" in item.nodeid]
    if found:
        raise pytest.UsageError(f"the names of tests hold addresses; give their parameters ids: {', '.join(found[:3])}")


def pytest_collection_finish() -> None:
    """What is imported and collected lives until the end, so that there is no garbage to look for among it.

    Graphs are many small objects, and looking for garbage among them takes an eighth of the time of the tests by default.
    """
    gc.freeze()
    gc.set_threshold(500_000, 20, 20)
    gc.enable()
    # Dynamo empties the processor's cache after each compilation, to time the guards for a log.
    if guards := sys.modules.get("torch._dynamo.guards"):
        vars(guards)["profile_guard_manager"] = lambda *_: 0.0


def pytest_sessionfinish() -> None:
    """Garbage is looked for once at the end, where pytest does so five times."""
    gc.collect()
    gc.freeze()


@cache
def has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Each test draws the same random numbers, whatever ran before it."""
    import torch

    torch.default_generator.manual_seed(0)
    if has_cuda():  # torch.manual_seed formats a stack of calls for a CUDA that is not there, for milliseconds
        torch.cuda.manual_seed_all(0)
