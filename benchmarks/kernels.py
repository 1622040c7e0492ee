"""The time of attention's kernels on a GPU, forward and backward, for masks that training has."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from benchmarks.measuring import Measurement, measure_kernels
from benchmarks.rows import Row, Section
from benchmarks.workloads import Workload, kernel_workloads
from flexmask import MaskCache, attention, plan
from flexmask.backends import choose_backend
from flexmask.backends.varlen import OLDEST
from flexmask.errors import LoweringError

__all__ = ["attention_kernels"]

HEADS, WIDTHS = 16, (64, 128)
LENGTHS = (2048, 8192, 65536)
#: The most tokens for which a table of all cells is measured.
MOST_DENSE = 8192

#: A call with query, key and value.
Run: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]


def attention_kernels(device: str) -> Section:
    """The kernels that are written for a mask, next to the same mask by hand and to dense SDPA."""
    rows = []
    for work in (work for length in LENGTHS for work in kernel_workloads(length, device)):
        makers = _makers(work, device)
        for width in WIDTHS:
            for direction in ("forward", "forward and backward"):
                shape, backward = (1, HEADS, work.length, width), direction != "forward"
                candidates: dict[str, Callable[[], Measurement]] = {
                    name: partial(_timed, make, shape, device, backward=backward) for name, make in makers.items()
                }
                rows.append(Row(f"{work.name}, {width} channels, {direction}", work.length, candidates))
    text = (
        f"{HEADS} heads, bfloat16, batch 1: the time in which the GPU is busy, without that of the host and without what a mask "
        "is lowered to. By hand: the same blocks with a `mask_mod` by hand. `flash` is FlashAttention 4, where it is installed."
    )
    return Section("Attention kernels", text, "flexmask flex", rows)


def _makers(work: Workload, device: str) -> dict[str, Callable[[], Run]]:
    """What makes each call, of the backends that compute the mask."""
    makers: dict[str, Callable[[], Run]] = {
        "flexmask flex": partial(_by_plan, work, device),
        "hand-written flex": partial(_by_hand, work, device),
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


def _timed(make: Callable[[], Run], shape: tuple[int, ...], device: str, *, backward: bool) -> Measurement:
    torch.compiler.reset()  # a kernel for this length alone
    query, key, value = (torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    run, upstream = make(), torch.randn(shape, device=device, dtype=torch.bfloat16)

    def step() -> object:
        out = run(query, key, value)
        return torch.autograd.grad(out, (query, key, value), upstream) if backward else out

    return measure_kernels(step)


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
