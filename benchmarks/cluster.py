"""Attention over the ranks of a process group: time, memory and bytes of a layer, forward and backward, and its equality.

On a cluster with 8 GPUs in each of 4 machines, started on each of them:

    torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m benchmarks.cluster

On a machine without a GPU the ranks use gloo. Then only bytes and equality are of interest:

    torchrun --standalone --nproc-per-node 4 -m benchmarks.cluster --seq-len 2048 --check
"""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import click
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import flexmask as fm
from flexmask.distributed import ContextParallel
from flexmask.distributed.rank_mask import mask_of_queries
from flexmask.intervals.bind import bind

MIB = 2**20


@dataclass(frozen=True)
class Layer:
    """The sizes of a layer.

    Attributes:
        seq_len: tokens of the sequence.
        heads: query heads.
        kv_heads: key heads.
        width: channels of a head.
        dtype: of the tokens.
    """

    seq_len: int
    heads: int
    kv_heads: int
    width: int
    dtype: torch.dtype

    @property
    def key_bytes(self) -> int:
        """Bytes of the key and the value of a token."""
        return 2 * self.kv_heads * self.width * self.dtype.itemsize

    @property
    def query_bytes(self) -> int:
        """Bytes of the query of a token, and of its output."""
        return self.heads * self.width * self.dtype.itemsize

    def tokens(self, device: torch.device) -> list[Tensor]:
        """Query, key, value and the gradient of the output, of the whole sequence, the same on each rank."""
        generator = torch.Generator(device).manual_seed(0)
        heads = self.heads, self.kv_heads, self.kv_heads, self.heads
        options: Any = {"generator": generator, "dtype": self.dtype, "device": device}
        return [torch.randn(1, count, self.seq_len, self.width, **options) for count in heads]


def documents(seq_len: int) -> list[int]:
    """Lengths of documents by a heavy-tailed law, a log-normal one with a median of 1,000 tokens."""
    draw = random.Random(0)
    lengths: list[int] = []
    while sum(lengths) < seq_len:
        lengths.append(min(max(1, int(draw.lognormvariate(math.log(1000), 1.5))), seq_len - sum(lengths)))
    return lengths


def masks(seq_len: int) -> dict[str, fm.Mask]:
    """The masks to measure."""
    return {
        "causal": fm.causal(),
        "causal & document": fm.causal() & fm.document(lengths=documents(seq_len)),
        "window of 4,096": fm.sliding_window(size=4096),
    }


Run = Callable[[Tensor, Tensor, Tensor], Tensor]


def candidates(mesh: Any, mask: fm.Mask, layer: Layer) -> Iterator[tuple[str, ContextParallel, Run, int]]:
    """Ways to compute a mask over the ranks: a name, the shards, the function of their tokens, and the bytes that a rank gets."""
    ranks, seq_len = mesh.size(), layer.seq_len
    attend: Any = partial(fm.attention, enable_gqa=layer.heads != layer.kv_heads)
    balances: tuple[Literal["work", "head_tail", "contiguous"], ...] = ("work", "head_tail", "contiguous")
    for balance in balances:
        cp = ContextParallel(mesh, mask, seq_len, balance=balance)
        yield f"keys, {balance}", cp, entered(cp, partial(attend, mask=mask)), int(cp.sharding.received.max()) * layer.key_bytes
    whole = torch.arange(seq_len, device=cp.device)
    cp = ContextParallel(mesh, mask, seq_len)
    lowered = mask_of_queries(bind(mask, seq_len, device=cp.device), cp.sharding.runs(cp.rank), whole, (128, 128))
    most = int(cp.sharding.tokens.max())

    def all_gathered(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out: Tensor = attend(query, cp.unshard(key, 2), cp.unshard(value, 2), mask=lowered)
        return out

    yield "all-gather, work", cp, all_gathered, (ranks - 1) * most * layer.key_bytes
    if layer.kv_heads % ranks == 0:
        cp = ContextParallel(mesh, mask, seq_len, balance="contiguous", strategy="heads")
        others = seq_len - int(cp.sharding.tokens.min())
        received = (others * (layer.query_bytes + layer.key_bytes) + most * (ranks - 1) * layer.query_bytes) // ranks
        yield "heads", cp, entered(cp, partial(attend, mask=mask)), received


def entered(cp: ContextParallel, run: Run) -> Run:
    """A function that runs inside a ContextParallel."""

    def inside(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with cp:
            return run(query, key, value)

    return inside


def step(run: Run, tokens: list[Tensor], grad: Tensor) -> tuple[Tensor, ...]:
    """The output, and the gradients of query, key and value."""
    out = run(tokens[0], tokens[1], tokens[2])
    return out, *torch.autograd.grad(out, tokens, grad)


def measured(run: Run, tokens: list[Tensor], grad: Tensor, steps: int) -> tuple[float, float]:
    """Seconds of a step on the slowest rank, and the most memory of a rank in bytes, on CUDA."""
    step(run, tokens, grad)  # which compiles
    torch.cuda.reset_peak_memory_stats()
    dist.barrier()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        step(run, tokens, grad)
    torch.cuda.synchronize()
    found = torch.tensor([(time.perf_counter() - start) / steps, torch.cuda.max_memory_allocated()], dtype=torch.float64).cuda()
    dist.all_reduce(found, dist.ReduceOp.MAX)
    seconds, memory = found.tolist()
    return seconds, memory


def difference(cp: ContextParallel, found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> float:
    """The greatest difference from one process, in the output and the gradients."""
    pairs = zip(found, wanted, strict=True)
    return max(float((cp.unshard(part.detach(), 2) - whole.detach()).abs().max()) for part, whole in pairs)


@click.command(context_settings={"show_default": True})
@click.option("--seq-len", type=click.IntRange(1), default=2**20, help="Tokens of the sequence.")
@click.option("--heads", type=click.IntRange(1), default=32, help="Query heads.")
@click.option("--kv-heads", type=click.IntRange(1), default=8, help="Key heads.")
@click.option("--width", type=click.IntRange(1), default=128, help="Channels of a head.")
@click.option("--steps", type=click.IntRange(1), default=10, help="Steps that are measured.")
@click.option("--check", is_flag=True, help="Compare with one process; on the CPU in float64.")
def main(seq_len: int, heads: int, kv_heads: int, width: int, steps: int, check: bool) -> None:
    """Measure attention over the ranks of torchrun."""
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    kind = "cuda" if cuda else "cpu"
    mesh = init_device_mesh(kind, (int(os.environ["WORLD_SIZE"]),))
    layer = Layer(seq_len, heads, kv_heads, width, torch.bfloat16 if cuda else torch.float64)
    columns = ["mask", "exchange", "imbalance", "MiB received", *["ms", "MiB of memory"] * cuda, *["difference"] * check]
    table = Table(*columns, title=f"{seq_len:,} tokens over {mesh.size()} ranks, {kind}, {layer.dtype}")
    for name, mask in masks(seq_len).items():
        *whole, weight = [tensor.requires_grad_() for tensor in layer.tokens(torch.device(kind))]
        if check:
            wanted = step(partial(fm.attention, mask=mask, enable_gqa=heads != kv_heads), whole, weight)
        for exchange, cp, run, received in candidates(mesh, mask, layer):
            tokens = [cp.shard(tensor.detach(), 2).requires_grad_() for tensor in whole]
            grad = cp.shard(weight.detach(), 2)
            imbalance = cp.sharding.imbalance if cp.strategy == "keys" else 1.0
            row = [name, exchange, f"{imbalance:.3f}", f"{received / MIB:,.2f}"]
            if cuda:
                seconds, memory = measured(run, tokens, grad, steps)
                row += [f"{seconds * 1e3:,.2f}", f"{memory / MIB:,.0f}"]
            if check:
                row.append(f"{difference(cp, step(run, tokens, grad), wanted):.1e}")
            table.add_row(*row)
    if mesh.get_rank() == 0:
        Console(width=120).print(table)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
