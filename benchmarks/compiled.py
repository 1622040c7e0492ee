"""A compiled training step of a decoder on packed documents, whose ends are data of the step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Literal, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

from benchmarks.measuring import Measurement, measure
from benchmarks.rows import Row, Section
from flexmask import MultiheadFlexAttention, plan
from flexmask.plans import LoweredMask

__all__ = ["compiled_training"]

LAYERS, HEADS, BYTES = 4, 8, 256
MASK = "causal & document(cu_seqlens=cu)"
#: What attention is, and how each is called.
Kind: TypeAlias = Literal["flexmask", "dense", "none"]
NAMES: dict[str, Kind] = {
    "compiled flexmask": "flexmask",
    "flexmask": "flexmask",
    "compiled dense SDPA": "dense",
    "compiled, without attention": "none",
}


class Layer(nn.Module):
    """Attention and a feed-forward layer, each behind a norm.

    Attention is flexmask's, or SDPA with a table of all cells. Without a mask there is none: the values are its output.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = MultiheadFlexAttention(width, width, HEADS)
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, mask: LoweredMask | Tensor | None) -> Tensor:
        normed = self.norms[0](x)
        x = x + (self.attention(normed, mask) if isinstance(mask, LoweredMask) else self._plain(normed, mask))
        return cast(Tensor, x + self.feed_forward(self.norms[1](x)))

    def _plain(self, x: Tensor, cells: Tensor | None) -> Tensor:
        projected = self.attention.in_proj(x).chunk(3, -1)
        if cells is None:
            return cast(Tensor, self.attention.out_proj(projected[2]))
        query, key, value = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in projected)
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=cells)
        return cast(Tensor, self.attention.out_proj(out.transpose(1, 2).flatten(2)))


class Decoder(nn.Module):
    """A decoder, whose mask is lowered once for all layers, to key intervals, to all cells, or not at all."""

    def __init__(self, width: int, length: int, kind: Kind) -> None:
        super().__init__()
        self.plan, self.kind = plan(MASK, length), kind
        self.embedding, self.head = nn.Embedding(BYTES, width), nn.Linear(width, BYTES)
        self.layers = nn.ModuleList(Layer(width) for _ in range(LAYERS))

    def forward(self, tokens: Tensor, cu: Tensor) -> Tensor:
        lowered = None if self.kind == "none" else self.plan(cu=cu)
        mask = lowered.dense() if lowered is not None and self.kind == "dense" else lowered
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, mask)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def compiled_training(length: int = 2048) -> Section:
    """Loss and gradients under ``torch.compile``, in eager mode, and with dense attention."""
    rows = []
    for width, documents in ((128, 4), (128, 8), (128, 16), (512, 4)):
        candidates: dict[str, Callable[[], Measurement]] = {
            name: partial(_measured, width, length, documents, kind, is_compiled=name.startswith("compiled"))
            for name, kind in NAMES.items()
        }
        rows.append(Row(f"{LAYERS} layers, {width} channels, {documents} documents", length, candidates))
    text = (
        f"Loss and gradients of a decoder of bytes with `MultiheadFlexAttention`, {HEADS} heads, for the mask `{MASK}`, with "
        "ends of documents that change with each run. The mask is lowered once in each step, for dense SDPA to the table of all "
        "cells. Without attention its values are its output: the least that a step can take. The graphs are those of all runs; "
        "the first call is the one that compiles."
    )
    return Section("A compiled training step", text, "compiled flexmask", rows)


def _measured(width: int, length: int, documents: int, kind: Kind, *, is_compiled: bool) -> Measurement:
    torch.manual_seed(0)
    torch.compiler.reset()
    counters.clear()
    model = Decoder(width, length, kind)
    tokens = torch.randint(BYTES, (1, length))
    call = torch.compile(model, dynamic=False) if is_compiled else model

    def ends() -> Tensor:
        inner = (torch.randperm(length - 1)[: documents - 1] + 1).sort().values
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
