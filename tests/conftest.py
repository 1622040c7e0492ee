"""Settings that hold for every test."""

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "ci",
    deadline=None,
    derandomize=True,
    max_examples=100,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.register_profile("explore", deadline=None, max_examples=2000)
settings.load_profile("ci")

if "PYTEST_XDIST_WORKER" in os.environ:  # the workers share the cores among themselves
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Each test draws the same random numbers, whatever ran before it."""
    torch.manual_seed(0)
