"""Marks of tests that need a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch

Test = TypeVar("Test", bound=Callable[..., Any])


def needs_gpu(test: Test) -> Test:
    skip = pytest.mark.skipif(not torch.cuda.is_available(), reason="FlexAttention has gradients on CUDA only")
    return pytest.mark.gpu(skip(test))  # type: ignore[no-any-return]
