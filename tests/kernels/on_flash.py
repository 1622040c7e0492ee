"""Compiles the kernels of the backend ``flash`` without a GPU: ``python -m tests.kernels.on_flash H100 documents``.

Inductor writes a function in CuTe DSL that calls FlashAttention 4. With fake tensors this compiles its kernels to machine code
and launches nothing. (Which GPU it compiles for it reads from the environment, once in a process.)
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import PyCodeCache
from torch._inductor.utils import fresh_cache
from torch._subclasses.fake_tensor import FakeTensorMode

import flexmask as fm
from flexmask.backends import flash
from tests.kernels import virtual_gpu
from tests.kernels.cases import DOCUMENTS


@dataclass(frozen=True)
class FlashCase:
    """A call of attention on the backend ``flash``, of two sequences of 256 tokens.

    Args:
        mask: the mask, or None.
        heads: heads of the query, and of the key.
        dims: channels of a head of query and key, and of the value.
        call: further arguments of `flexmask.attention`.
        training: whether there are gradients.
        in_graph: whether the call is in compiled code.
    """

    mask: Any
    heads: tuple[int, int] = (2, 2)
    dims: tuple[int, int] = (64, 64)
    call: dict[str, Any] = field(default_factory=dict)
    training: bool = True
    in_graph: bool = False


CASES = {
    "documents": FlashCase(DOCUMENTS),
    "documents, compiled": FlashCase(DOCUMENTS, in_graph=True),
    "causal, compiled": FlashCase("causal", in_graph=True),
    "chunks": FlashCase(fm.causal() & fm.masks.chunked(100)),
    "sinks and a window, compiled": FlashCase(fm.masks.sink_window(4, size=50), in_graph=True),
    "no mask": FlashCase(None),
    "not separable": FlashCase(DOCUMENTS & (fm.q * fm.kv // 7 < 200)),
    "not separable, compiled": FlashCase(DOCUMENTS & ((fm.q - fm.kv) % 3 == 0), in_graph=True),
    "grouped heads that differ": FlashCase(fm.per_head([fm.causal(), fm.sliding_window(size=9), fm.full(), fm.empty()]), (4, 2)),
    "logsumexp": FlashCase(DOCUMENTS, call={"return_lse": True}),
    "scores": FlashCase(DOCUMENTS, call={"score_mod": "alibi() >> softcap(5.0)"}),
    "heads of 128": FlashCase(DOCUMENTS, dims=(128, 128)),
    "heads of 192": FlashCase(DOCUMENTS, dims=(192, 128)),
    "heads of 256": FlashCase(DOCUMENTS, dims=(256, 256), training=False),
    "heads of 256, no mask": FlashCase(None, dims=(256, 256)),
}


def attend(case: FlashCase, backend: Callable[..., Any]) -> None:
    """Calls attention, and its backward pass."""

    def step(query: Tensor, key: Tensor, value: Tensor) -> Any:
        return fm.attention(query, key, value, case.mask, backend="flash", enable_gqa=True, **case.call)

    call: Any = torch.compile(step, backend=backend, fullgraph=True) if case.in_graph else step
    shapes = (case.heads[0], case.dims[0]), (case.heads[1], case.dims[0]), (case.heads[1], case.dims[1])
    tensors = [torch.randn(2, heads, 256, dim, dtype=torch.bfloat16, requires_grad=case.training) for heads, dim in shapes]
    found = call(*tensors)
    if case.training:
        torch.autograd.grad(sum(out.float().sum() for out in (found if isinstance(found, tuple) else [found])), tensors)


def launched(gpu: SimpleNamespace) -> Callable[..., Any]:
    """What stands in for the launcher of a function in CuTe DSL: calls it with fake tensors on a GPU."""

    def on_gpu(value: Any) -> Any:
        if isinstance(value, Tensor):
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda:0")
        return value

    def launcher(self: AsyncCompile, name: str, source: str, *args: Any, **options: Any) -> Any:
        module = PyCodeCache.load(source)

        def run(*args: Any, stream: Any = None, **options: Any) -> None:
            with virtual_gpu.driver(gpu), FakeTensorMode() as mode, torch._guards.tracing(torch._guards.TracingContext(mode)):
                getattr(module, f"{name}_main")(*map(on_gpu, args), stream=0, **options)

        return SimpleNamespace(run=run)

    return launcher


def hardware(gpu: SimpleNamespace) -> Callable[..., Any]:
    """What CuTe DSL asks the driver."""
    answers = SimpleNamespace(
        get_device_multiprocessor_count=lambda: gpu.multi_processor_count,
        get_max_active_clusters=lambda size: gpu.multi_processor_count // size,
        get_l2_cache_size_in_bytes=lambda: gpu.L2_cache_size,
    )
    return lambda *args, **options: answers


def main(name_of_gpu: str, *names: str) -> None:
    gpu = getattr(virtual_gpu, name_of_gpu)
    target = f"sm_{gpu.major}{gpu.minor}"
    os.environ["FLASH_ATTENTION_ARCH"], os.environ["CUTE_DSL_ARCH"] = target, f"{target}a"
    os.environ["FLASH_ATTENTION_NUM_SMS"] = str(gpu.multi_processor_count)
    import cutlass.utils  # type: ignore[import-not-found, unused-ignore]
    from flash_attn.cute import interface  # type: ignore[import-not-found, unused-ignore]

    found = {}
    with pytest.MonkeyPatch.context() as patch, fresh_cache():
        backend = virtual_gpu.install(patch, gpu)
        patch.setattr(cutlass.utils, "HardwareInfo", hardware(gpu))
        patch.setattr(AsyncCompile, "cutedsl", launched(gpu))
        patch.setattr(flash, "DEVICES", {"cpu"})
        patch.setattr(flash, "_generation", lambda device: gpu.major)
        for name in names:
            torch.compiler.reset()
            caches = [function.compile_cache for function in (interface._flash_attn_fwd, interface._flash_attn_bwd)]
            for cache in caches:
                cache.clear()
            attend(CASES[name], backend)
            found[name] = [len(cache.cache) for cache in caches]
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
