"""When the kernels run: where they are asked for, in a process of their own."""

import os

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Triton decides where it is imported whether it interprets kernels, which no other test would like."""
    if config.option.markexpr == "kernels":
        os.environ["TRITON_INTERPRET"] = "1"
