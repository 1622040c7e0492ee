"""The kernels of the backend ``flash`` are compiled for Hopper and Blackwell by CuTe DSL, without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import product

import pytest

from flexmask.backends import flash
from tests.kernels.interpreted import virtual_gpu
from tests.kernels.on_flash import CASES

if not flash._is_installed():
    pytest.skip("FlashAttention 4 is not installed: pip install --pre flash-attn-4", allow_module_level=True)
pytestmark = pytest.mark.kernels

GPUS = {"H100": virtual_gpu.H100, "B200": virtual_gpu.B200}


@pytest.mark.exhaustive
@pytest.mark.parametrize(("gpu", "name"), list(product(GPUS, CASES)))
def test_kernels_are_compiled(gpu: str, name: str) -> None:
    """One for the forward pass, and in training one for the backward pass."""
    command = [sys.executable, "-m", "tests.kernels.on_flash", gpu, name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {name: [1, int(CASES[name].training)]}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_sizes_of_blocks_are_those_of_flash_attention() -> None:
    """Those of the passes, as FlashAttention chooses them."""
    from flash_attn.cute import interface  # type: ignore[import-not-found, unused-ignore]

    from flexmask.lowering.flash import flash_block_size

    for width, value_width in (
        (32, 32),
        (64, 64),
        (96, 96),
        (128, 64),
        (128, 128),
        (160, 160),
        (192, 128),
        (192, 192),
        (256, 256),
    ):
        q_size, kv_size = flash_block_size(9, 1000, 1, width, value_width)
        backward = interface._tile_size_bwd_sm90(width, value_width, False, False, q_size)
        forward = interface._fit_sm90_fwd_tile_to_block_sparsity(
            interface._tile_size_fwd_sm90(width, value_width, False, False, q_size), q_size, kv_size
        )
        assert kv_size == backward.n_block_size == forward.n_block_size
        assert q_size % backward.m_block_size == q_size % forward.m_block_size == 0
