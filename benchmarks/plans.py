"""BlockMasks by plan: captured lowerings, as they are and compiled, next to the eager lowering and torch's compiled function."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask

import flexmask
from benchmarks.measuring import Measurement, measure
from benchmarks.rows import Row, Section
from benchmarks.workloads import Workload, causal_work, prefix_work, window_work
from flexmask import causal, document

__all__ = ["decoding_by_plan", "lowering_by_plan"]

#: Keys of a decoding step.
CAPACITY = 2**17


def documents_work(length: int, device: str) -> Workload:
    """Causal attention within documents of 128 tokens each, given by ``cu_seqlens``."""
    cu = torch.arange(0, length + 1, 128, device=device)
    ids = torch.arange(length, device=device) // 128
    return Workload(
        "causal & document(cu_seqlens=)",
        length,
        lambda: causal() & document(cu_seqlens=cu),
        lambda b, h, q, kv: (q >= kv) & (ids[q] == ids[kv]),
    )


def lowering_by_plan(device: str, *, quick: bool) -> Section:
    """A finished BlockMask of each kind of mask at each length."""
    lengths = [256, 2048] if quick else [256, 2048, 8192, 32768]
    rows = []
    for length in lengths:
        for work in (documents_work(length, device), causal_work(length), window_work(length), prefix_work(length, device)):
            rows.append(Row(work.name, length, _makers(work, device)))
    text = (
        "The finished `BlockMask`, after the first call. `plan` runs the captured graph of the lowering, `compiled plan` runs it "
        "through Inductor, and `compiled plan of all lengths` was made without lengths."
    )
    return Section("BlockMask by plan", text, "compiled plan", rows)


def decoding_by_plan(device: str) -> Section:
    """The BlockMask of one query behind 131,072 keys, at a position in a tensor."""
    rows = []
    for work in (documents_work(CAPACITY, device), causal_work(CAPACITY), window_work(CAPACITY)):
        offset = torch.tensor([CAPACITY - 1], device=device)
        rows.append(Row(work.name, CAPACITY, _lowerings(work, device, 1, q_offset=offset)))
    text = "The `BlockMask` of one query behind 131,072 keys, with `q_offset` in a tensor."
    return Section("Decoding by plan", text, "compiled plan", rows)


def _makers(work: Workload, device: str) -> dict[str, Callable[[], Measurement]]:
    def peer() -> Measurement:
        torch.compiler.reset()
        create = torch.compile(create_block_mask, dynamic=False)
        sizes = work.batch, work.heads, work.length, work.length
        return measure(lambda _: create(work.mask_mod, *sizes, device=device), device=device)

    return {**_lowerings(work, device, work.length), "compiled create_block_mask": peer}


def _lowerings(work: Workload, device: str, q_len: int, **place: Any) -> dict[str, Callable[[], Measurement]]:
    mask = work.mask()

    def eager() -> Measurement:
        return measure(lambda _: mask.block_mask(q_len, work.length, device=device, **place), device=device)

    def planned(lengths: tuple[int, ...], *, compile: bool) -> Measurement:
        plan = flexmask.plan(mask, *lengths, device=device, compile=compile)
        given = () if lengths else (q_len, work.length)
        return measure(lambda _: plan(*given, **place).block_mask, device=device)

    lengths = q_len, work.length
    return {
        "flexmask": eager,
        "plan": partial(planned, lengths, compile=False),
        "compiled plan": partial(planned, lengths, compile=True),
        "compiled plan of all lengths": partial(planned, (), compile=True),
    }
