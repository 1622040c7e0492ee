"""A compiled training step of a decoder on packed documents, whose ends are data of the step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

from benchmarks.measuring import Measurement, measure
from benchmarks.rows import Row, Section
from flexmask import MultiheadFlexAttention, plan
from flexmask.plans import LoweredMask

__all__ = ["compiled_training"]

LAYERS, HEADS, BYTES, DOCUMENTS = 4, 8, 256, 4
MASK = "causal & document(cu_seqlens=cu)"


class Layer(nn.Module):
    """Attention and a feed-forward layer, each behind a norm; attention is flexmask's, or SDPA with a table of all cells."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = MultiheadFlexAttention(width, width, HEADS)
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, mask: LoweredMask | Tensor) -> Tensor:
        normed = self.norms[0](x)
        x = x + (self._dense(normed, mask) if isinstance(mask, Tensor) else self.attention(normed, mask))
        return cast(Tensor, x + self.feed_forward(self.norms[1](x)))

    def _dense(self, x: Tensor, cells: Tensor) -> Tensor:
        projected = self.attention.in_proj(x).chunk(3, -1)
        query, key, value = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in projected)
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=cells)
        return cast(Tensor, self.attention.out_proj(out.transpose(1, 2).flatten(2)))


class Decoder(nn.Module):
    """A decoder, whose mask is lowered once for all layers."""

    def __init__(self, width: int, length: int, *, is_dense: bool) -> None:
        super().__init__()
        self.plan, self.is_dense = plan(MASK, length), is_dense
        self.embedding, self.head = nn.Embedding(BYTES, width), nn.Linear(width, BYTES)
        self.layers = nn.ModuleList(Layer(width) for _ in range(LAYERS))

    def forward(self, tokens: Tensor, cu: Tensor) -> Tensor:
        lowered = self.plan(cu=cu)
        mask = lowered.dense() if self.is_dense else lowered
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, mask)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def compiled_training(length: int = 2048) -> Section:
    """Loss and gradients under ``torch.compile``, in eager mode, and with dense attention."""
    rows = []
    for width in (128, 512):
        candidates: dict[str, Callable[[], Measurement]] = {
            "compiled flexmask": partial(_measured, width, length, is_compiled=True, is_dense=False),
            "flexmask": partial(_measured, width, length, is_compiled=False, is_dense=False),
            "compiled dense SDPA": partial(_measured, width, length, is_compiled=True, is_dense=True),
        }
        rows.append(Row(f"{LAYERS} layers, {width} channels", length, candidates))
    text = (
        f"Loss and gradients of a decoder of bytes with `MultiheadFlexAttention`, {HEADS} heads, for the mask `{MASK}`: "
        f"{DOCUMENTS} documents, whose ends change with each run. The mask is lowered once in each step, for dense SDPA to the "
        "table of all cells. The graphs are those of all runs; the first call is the one that compiles."
    )
    return Section("A compiled training step", text, "compiled flexmask", rows)


def _measured(width: int, length: int, *, is_compiled: bool, is_dense: bool) -> Measurement:
    torch.manual_seed(0)
    torch.compiler.reset()
    counters.clear()
    model = Decoder(width, length, is_dense=is_dense)
    tokens = torch.randint(BYTES, (1, length))
    call = torch.compile(model, dynamic=False) if is_compiled else model

    def ends() -> Tensor:
        inner = (torch.randperm(length - 1)[: DOCUMENTS - 1] + 1).sort().values
        return torch.cat([torch.tensor([0]), inner, torch.tensor([length])])

    def run(cu: Tensor) -> Tensor:
        model.zero_grad()
        loss = cast(Tensor, call(tokens, cu))
        loss.backward()
        return loss

    start = time.perf_counter()
    run(ends())
    first = time.perf_counter() - start
    found = measure(run, ends, seconds=6.0)
    if not is_compiled:
        return found
    graphs, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    return replace(found, note=f"{graphs} {'graph' if graphs == 1 else 'graphs'}, {breaks} breaks, first call {first:.0f} s")
