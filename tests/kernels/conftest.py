"""When the kernels run: where they are asked for, in a process of their own."""

import os
from collections.abc import Iterator
from typing import Any

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Triton decides where it is imported whether it interprets kernels, which no other test would like."""
    if config.option.markexpr.startswith("kernels"):
        os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def backend() -> Iterator[Any]:
    """A virtual GPU on which FlexAttention runs, as a backend of torch.compile."""
    import torch
    from torch._inductor.utils import fresh_cache

    from tests.kernels import virtual_gpu

    with pytest.MonkeyPatch.context() as patch, fresh_cache():
        yield virtual_gpu.install(patch)
    torch.compiler.reset()


@pytest.fixture(autouse=True)
def _nothing_compiled(backend: Any) -> None:
    import torch

    from tests.kernels import virtual_gpu

    torch.compiler.reset()
    virtual_gpu.launched.clear()
