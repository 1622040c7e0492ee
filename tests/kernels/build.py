"""Builds the kernels of some cases for a GPU, and prints what they take: ``python -m tests.kernels.build H100 documents``."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import pytest
import torch
from torch._inductor.utils import fresh_cache

from tests.kernels import virtual_gpu
from tests.kernels.cases import CASES, attended, block_mask, inputs


def main(gpu: str, *names: str) -> None:
    found = {}
    with pytest.MonkeyPatch.context() as patch, fresh_cache():
        virtual_gpu.install(patch, getattr(virtual_gpu, gpu))
        for name in names:
            torch.compiler.reset()
            virtual_gpu.resources.clear()
            tensors = inputs(CASES[name], torch.bfloat16)
            out = attended(CASES[name], tensors, block_mask(CASES[name]))
            if CASES[name].training:
                torch.autograd.grad(out.sum(), tensors)
            found[name] = [asdict(kernel) for kernel in virtual_gpu.resources]
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
