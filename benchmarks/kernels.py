"""The time of attention's kernels on a GPU, forward and backward, for masks that training has."""

from __future__ import annotations

import copy
import os
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from benchmarks.kernel_workloads import further_kernel_workloads, kernel_workloads
from benchmarks.measuring import Measurement, measure_kernels
from benchmarks.rows import Candidate, Row, Section
from benchmarks.workloads import Workload
from flexmask import MaskCache, attention, plan
from flexmask.backends import choose_backend
from flexmask.backends.varlen import OLDEST
from flexmask.errors import LoweringError

__all__ = ["attention_kernels"]

HEADS, WIDTHS = 16, (64, 128)
LENGTHS = (2048, 8192, 65536)
#: The length at which further masks are compared, with the same by hand alone.
FURTHER_LENGTH = 8192
#: The most tokens for which a table of all cells is measured.
MOST_DENSE = 8192
OURS, HAND = "flexmask flex", "hand-written flex"

#: A call with query, key and value.
Run: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
#: What is measured: the name of a mask, a width, and the name of a candidate.
Kernel: TypeAlias = tuple[str, int, str]


def attention_kernels(device: str) -> Section:
    """The kernels that are written for a mask, next to the same mask by hand and to dense SDPA."""
    works, further = _works(device)
    candidates = {key: list(_makers(work, device)) for key, work in works.items()} | {key: [OURS, HAND] for key in further}
    kernels = dict.fromkeys((name, width, c) for (name, _), found in candidates.items() for width in WIDTHS for c in found)
    compiled, rows = _Compiled(device, list(kernels)), []
    for (name, length), found in candidates.items():
        for width in WIDTHS:
            for direction in ("forward", "forward and backward"):
                backward = direction != "forward"
                measured: dict[str, Candidate] = {
                    c: partial(compiled.measure, (name, width, c), length, backward=backward) for c in found
                }
                rows.append(Row(f"{name}, {width} channels, {direction}", length, measured))
    text = (
        f"{HEADS} heads, bfloat16, batch 1: the time in which the GPU is busy, without that of the host and without what a mask "
        "is lowered to. By hand: the same blocks with a `mask_mod` by hand. `flash` is FlashAttention 4, where it is installed. "
        "Several processes compile a kernel for each length, and then measure in turn."
    )
    return Section("Attention kernels", text, OURS, rows)


def _works(device: str) -> list[dict[tuple[str, int], Workload]]:
    """The masks by name and length: those that are measured with every backend, and those next to the same by hand alone."""
    works = [work for length in LENGTHS for work in kernel_workloads(length, device)]
    further = further_kernel_workloads(FURTHER_LENGTH, device)
    return [{(work.name, work.length): work for work in found} for found in (works, further)]


class _Compiled:
    """Processes that compile kernels side by side, since that takes minutes, and measure them one after the other."""

    def __init__(self, device: str, kernels: list[Kernel]) -> None:
        kernels.sort(key=lambda kernel: kernel[2] != "flexmask flash")  # they take the longest
        count = max(1, (os.cpu_count() or 2) - 2)
        self._owners = {kernel: index % count for index, kernel in enumerate(kernels)}
        context, self._ends = get_context("spawn"), []
        for index in range(min(count, len(kernels))):
            ours, theirs = context.Pipe()
            context.Process(target=_serve, args=(theirs, device, kernels[index::count]), daemon=True).start()
            self._ends.append(ours)
        self._are_ready = False

    def measure(self, kernel: Kernel, length: int, *, backward: bool) -> Measurement | None:
        """Measures one when all are compiled; None where it fails, with a warning that says why."""
        if not self._are_ready:
            for end in self._ends:
                end.recv()
            self._are_ready = True
        end = self._ends[self._owners[kernel]]
        end.send((kernel, length, backward))
        found = end.recv()
        if isinstance(found, Measurement):
            return found
        warnings.warn(f"{kernel} at {length:,} tokens failed: {found}", stacklevel=2)
        return None


def _serve(end: Connection, device: str, kernels: list[Kernel]) -> None:
    """Compiles kernels, says so, and measures those that are asked for."""
    torch._dynamo.config.automatic_dynamic_shapes = False  # a kernel for each length
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 10_000
    main, further = _works(device)
    works = main | further
    runs: dict[tuple[Kernel, int], Run] = {}
    failed: dict[tuple[Kernel, int], str] = {}
    for kernel in kernels:
        for length in LENGTHS:
            name, width, candidate = kernel
            work = works.get((name, length))
            make = None if work is None else _makers(work, device).get(candidate)
            if make is None:
                continue
            try:
                runs[kernel, length] = make()
                _step(runs[kernel, length], (1, HEADS, length, width), device, backward=True)()
            except Exception:
                failed[kernel, length] = traceback.format_exc()
            torch.cuda.empty_cache()
    end.send("compiled")
    while True:
        kernel, length, backward = end.recv()
        found: Measurement | str | None = failed.get((kernel, length))
        if found is None:
            try:
                step = _step(runs[kernel, length], (1, HEADS, length, kernel[1]), device, backward=backward)
                found = measure_kernels(step)
            except Exception:
                found = traceback.format_exc()
        end.send(found)
        torch.cuda.empty_cache()


def _step(run: Run, shape: tuple[int, ...], device: str, *, backward: bool) -> Callable[[], object]:
    query, key, value = (torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    upstream = torch.randn(shape, device=device, dtype=torch.bfloat16)

    def step() -> object:
        out = run(query, key, value)
        return torch.autograd.grad(out, (query, key, value), upstream) if backward else out

    return step


def _makers(work: Workload, device: str) -> dict[str, Callable[[], Run]]:
    """What makes each call, of the backends that compute the mask."""
    makers: dict[str, Callable[[], Run]] = {
        OURS: partial(_by_plan, work, device),
        HAND: partial(_by_hand, work, device),
    }
    sample = torch.empty(1, HEADS, work.length, WIDTHS[0], device=device, dtype=torch.bfloat16, requires_grad=True)
    if choose_backend(sample, sample, sample, work.mask()) == "flash":
        makers["flexmask flash"] = partial(_by_backend, "flash", work)
    if torch.__version__ >= OLDEST and _is_varlen(work):
        makers["flexmask varlen"] = partial(_by_backend, "varlen", work)
    if work.length <= MOST_DENSE:
        makers["dense SDPA"] = partial(_dense, work, device)
    if work.name == "causal":
        makers["fused is_causal"] = lambda: partial(F.scaled_dot_product_attention, is_causal=True)
    return makers


def _by_plan(work: Workload, device: str) -> Run:
    lowered = plan(work.mask(), work.length, batch=1, device=device)()
    return lambda query, key, value: attention(query, key, value, lowered, backend="flex")


def _by_hand(work: Workload, device: str) -> Run:
    block_mask = copy.copy(work.mask().block_mask(work.length, batch=work.batch, device=device))
    block_mask.mask_mod = work.mask_mod
    compiled = torch.compile(flex_attention)
    return lambda query, key, value: compiled(query, key, value, block_mask=block_mask)


def _by_backend(backend: Literal["flash", "varlen"], work: Workload) -> Run:
    mask, shared = work.mask(), MaskCache()

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with shared:
            return attention(query, key, value, mask, backend=backend)

    return run


def _is_varlen(work: Workload) -> bool:
    try:
        work.mask().varlen(work.length, batch=1, heads=HEADS)
    except LoweringError:
        return False
    return True


def _dense(work: Workload, device: str) -> Run:
    return partial(F.scaled_dot_product_attention, attn_mask=work.mask().dense(work.length, device=device))
