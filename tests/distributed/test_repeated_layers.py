"""Backward repeats a checkpointed layer where it ran at first: inside the same ContextParallel, or outside all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

import flexmask as fm
from flexmask.distributed import ContextParallel
from flexmask.errors import LoweringError

LENGTH = 9
Layer: TypeAlias = Callable[[Tensor], Tensor]
Entry: TypeAlias = Callable[[], ContextParallel]


@pytest.fixture(scope="module")
def cp() -> Iterator[ContextParallel]:
    dist.init_process_group("gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    yield ContextParallel(None, "causal", LENGTH)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def other(cp: ContextParallel) -> ContextParallel:
    return ContextParallel(None, "causal", LENGTH)


@pytest.fixture(params=[True, False], ids=["reentrant", "not reentrant"])
def repeated(request: pytest.FixtureRequest) -> Callable[[Layer], Layer]:
    """A layer that backward repeats."""
    reentrant = bool(request.param)
    return lambda layer: partial(checkpoint, layer, use_reentrant=reentrant)


def layer(x: Tensor) -> Tensor:
    return fm.attention(x, x, x, "causal").tanh()


def plain(layer: Layer) -> Layer:
    """A layer that backward does not repeat."""
    return layer


def tokens() -> Tensor:
    return torch.randn(1, 2, LENGTH, 4, requires_grad=True, generator=torch.Generator().manual_seed(1))


@cache
def compiled() -> Layer:
    """A layer that is compiled before it is repeated, with and without gradients."""
    run: Layer = torch.compile(layer, backend="aot_eager", fullgraph=True)
    run(tokens())
    with torch.no_grad():
        run(tokens())
    return run


def check_refused(loss: Tensor) -> None:
    # Of a graph that is compiled as a whole torch reports the error.
    with pytest.raises(Exception, match="backward repeats attention of a checkpointed layer") as caught:
        loss.backward()
    assert isinstance(caught.value, LoweringError) or "LoweringError" in str(caught.value)


def check_repeats(run: Layer, plain: Layer) -> None:
    """The gradient is that of the same function without checkpoints."""
    x, y = tokens(), tokens()
    run(x).sum().backward()
    plain(y).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


@pytest.mark.parametrize("make", [lambda: layer, pytest.param(compiled, marks=pytest.mark.slow)])
def test_outside(cp: ContextParallel, other: ContextParallel, repeated: Any, make: Callable[[], Layer]) -> None:
    run = repeated(make())
    with cp:
        losses = [run(tokens()).sum() for _ in range(3)]
    check_refused(losses[0])
    with other:
        check_refused(losses[1])
    with other, cp:
        losses[2].backward()
    run(tokens()).sum().backward()  # its own use


@pytest.mark.parametrize("make", [lambda: layer, pytest.param(compiled, marks=pytest.mark.slow)])
def test_inside_of_what_was_outside(cp: ContextParallel, repeated: Any, make: Callable[[], Layer]) -> None:
    loss = repeated(make())(tokens()).sum()
    with cp:
        check_refused(loss)


def test_without_checkpoints_backward_is_anywhere(cp: ContextParallel) -> None:
    with cp:
        inside = layer(tokens()).sum()
    inside.backward()
    outside = layer(tokens()).sum()
    with cp:
        outside.backward()


def test_entered_by_what_is_repeated(cp: ContextParallel, other: ContextParallel, repeated: Any) -> None:
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
    with cp:
        x = tokens()
        loss = repeated(run)(x).sum()
    check_refused(loss)
    loss = repeated(run)(tokens()).sum()
    with cp:
        check_refused(loss)


def test_repeated_inside_of_what_is_repeated(cp: ContextParallel, repeated: Any) -> None:
    """The outer function enters where it is repeated; the inner layer is repeated after that."""

    def run(x: Tensor) -> Tensor:
        x = layer(x)
        with cp:
            out: Tensor = repeated(layer)(x)
        return out

    check_refused(repeated(run)(tokens()).sum())


def test_entered_in_code_that_is_compiled(cp: ContextParallel, repeated: Any) -> None:
    @torch.compile(backend="eager")
    def run(x: Tensor) -> Tensor:
        with cp:
            out: Tensor = repeated(layer)(x)
        return out

    check_refused(run(tokens()).sum())


def test_other_threads(cp: ContextParallel, repeated: Any) -> None:
    """Nodes that several threads make have the same numbers."""

    def outside() -> list[Tensor]:
        return [repeated(layer)(tokens()).sum() for _ in range(4)]

    def inside() -> list[Tensor]:
        with cp:
            return outside()

    def in_thread(call: Callable[[], Any]) -> Any:
        return ThreadPoolExecutor(1).submit(call).result()

    made_inside, made_outside = in_thread(inside), in_thread(outside)
    made_outside[0].backward()
    in_thread(made_outside[1].backward)
    check_refused(made_inside[0])
    with cp:
        made_inside[1].backward()
        in_thread(made_inside[2].backward)
        check_refused(made_outside[2])


def test_hooks_of_saved_tensors(cp: ContextParallel) -> None:
    def run(x: Tensor) -> Tensor:
        with save_on_cpu():
            x = layer(x)
        with cp:
            return layer(x)

    check_repeats(partial(checkpoint, run, use_reentrant=False), run)
