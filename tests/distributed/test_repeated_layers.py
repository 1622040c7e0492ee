"""Checkpointed layers and ContextParallel: backward repeats what a layer enters, and needs no ``with`` where none is repeated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

import flexmask as fm
from flexmask.distributed import ContextParallel

LENGTH = 9
Layer: TypeAlias = Callable[[Tensor], Tensor]


@pytest.fixture(scope="module")
def cp() -> Iterator[ContextParallel]:
    dist.init_process_group("gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    yield ContextParallel(None, "causal", LENGTH)
    dist.destroy_process_group()


@pytest.fixture(params=[True, False], ids=["reentrant", "not reentrant"])
def repeated(request: pytest.FixtureRequest) -> Callable[[Layer], Layer]:
    """A layer that backward repeats."""
    reentrant = bool(request.param)
    return lambda layer: partial(checkpoint, layer, use_reentrant=reentrant)


def layer(x: Tensor) -> Tensor:
    return fm.attention(x, x, x, "causal").tanh()


def check_repeats(run: Layer, plain: Layer) -> None:
    """The gradient is that of the same function without checkpoints."""
    x, y = (torch.randn(1, 2, LENGTH, 4, requires_grad=True, generator=torch.Generator().manual_seed(1)) for _ in range(2))
    run(x).sum().backward()
    plain(y).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


def test_without_checkpoints_backward_is_anywhere(cp: ContextParallel) -> None:
    x = torch.randn(1, 2, LENGTH, 4, requires_grad=True)
    with cp:
        inside = layer(x).sum()
    inside.backward()
    outside = layer(x).sum()
    with cp:
        outside.backward()


def test_entered_by_what_is_repeated(cp: ContextParallel, repeated: Any) -> None:
    other = ContextParallel(None, "causal", LENGTH)

    def run(x: Tensor) -> Tensor:
        x = layer(x)
        with cp:
            x = layer(x)
        x = layer(x)
        with other:
            x = layer(x)
            with cp:
                x = layer(x)
            return layer(x)

    check_repeats(repeated(run), run)
    check_repeats(repeated(lambda x: repeated(run)(layer(x))), lambda x: run(layer(x)))


def test_hooks_of_saved_tensors(cp: ContextParallel) -> None:
    def run(x: Tensor) -> Tensor:
        with save_on_cpu():
            x = layer(x)
        with cp:
            return layer(x)

    check_repeats(partial(checkpoint, run, use_reentrant=False), run)
