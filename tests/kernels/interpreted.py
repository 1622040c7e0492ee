"""The virtual GPU for modules of tests, which are skipped where it cannot run kernels."""

from __future__ import annotations

import os

import pytest
import torch

if torch.version.cuda is None:
    pytest.skip("the kernels for CUDA are written by a CUDA build of torch only", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("the kernels are tested by themselves: pytest -m kernels tests/kernels", allow_module_level=True)

from tests.kernels import virtual_gpu

__all__ = ["virtual_gpu"]
