"""Settings that hold for every test of the backends."""

from collections.abc import Iterator

import pytest
import torch

from flexmask.backends import tile_blocks
from flexmask.backends import tiling as tile_plan
from tests.support.exhaustive import exhaustive
from tests.support.flex import without_kernels


@pytest.fixture(autouse=True)
def own_tilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test makes its own tilings, as some change how they are made."""
    monkeypatch.setattr(tile_plan, "_KEPT", ())


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small are slower with several threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=["eager", *exhaustive(["inductor"])])
def flex_compiler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What compiles FlexAttention where its kernels are not the point."""
    torch.compiler.reset()
    if request.param == "eager":
        without_kernels(monkeypatch)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks so small that few tokens make many, with several runs of keys."""
    monkeypatch.setattr(tile_blocks, "BLOCK_ROWS", 16)
    monkeypatch.setattr(tile_blocks, "GAP", 3)
    monkeypatch.setattr(tile_blocks, "ALIGNMENT", 2)
    monkeypatch.setattr(tile_plan, "CALL_WORK", 0)
    monkeypatch.setattr(tile_plan, "CALL_SCORES", 0)
    monkeypatch.setattr(tile_plan, "FUSED_CALL_SCORES", 0)
    monkeypatch.setattr(tile_plan, "READ_SCORES", 0)


@pytest.fixture
def small_bands(small_tiles: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bands of small tiles wherever tiles lie along the diagonal."""
    monkeypatch.setattr(tile_blocks, "MIN_BLOCK_ROWS", 4)
    monkeypatch.setattr(tile_plan, "CALL_SCORES", 2**16)
    monkeypatch.setattr(tile_plan, "FUSED_CALL_SCORES", 2**16)
    monkeypatch.setattr(tile_plan, "MAX_DENSE_SCORES", 0)
