"""``python -m benchmarks.context_parallel``: plans of context parallelism next to those of torch's load balancers, simulated.

Everything but the time of planning is deterministic: plans follow from masks and sizes, no process group is needed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor.experimental._context_parallel import _load_balancer as peers

from benchmarks.measuring import measure
from flexmask import Mask, causal, document, prefix_lm, query_padding, sliding_window
from flexmask.blocks.sparse import BlockSets
from flexmask.distributed import shard_sequence
from flexmask.distributed.query_units import KeyLists, QueryUnits, units_of
from flexmask.distributed.sharding import Balance
from flexmask.intervals.bind import bind
from flexmask.intervals.rows import Rows
from flexmask.masks import sink_window

RESULTS = Path(__file__).parent / "results" / "context_parallel.md"
BLOCK = 128
LENGTH, LONG = 2**16, 2**23


@dataclass(frozen=True)
class Case:
    """Masks of a model's layers, one layer each.

    Attributes:
        name: what they are.
        masks: the masks.
        lengths: the lengths of the documents; None without documents.
    """

    name: str
    masks: Sequence[Mask]
    lengths: list[int] | None = None


@dataclass(frozen=True)
class Plan:
    """What a plan costs.

    Attributes:
        imbalance: the most work of a rank relative to the mean.
        received: keys that all ranks receive, relative to those of an all-gather.
        slowest: blocks that the kernel of the slowest rank computes, relative to an equal share of those of one process; None
            where it is not computed.
    """

    imbalance: float
    received: float
    slowest: float | None

    def __str__(self) -> str:
        slowest = "" if self.slowest is None else f", {self.slowest:.3f}"
        return f"{self.imbalance:.3f}{slowest}, {100 * self.received:.3g} %"


def document_lengths(total: int, seed: int, *, mean: float = 1500, spread: float = 1.2, most: int = 16384) -> list[int]:
    """Lengths of documents by a log-normal law with a limit, a heavy tail."""
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randn(4 * total // int(mean) + 1000, generator=generator, dtype=torch.float64) * spread
    lengths = (draws.exp() * mean * math.exp(-(spread**2) / 2)).long().clamp(1, most)
    stops = lengths.cumsum(0)
    full = int((stops < total).sum())
    return [*lengths[:full].tolist(), total - (int(stops[full - 1]) if full else 0)]


def cases(length: int) -> list[Case]:
    """The masks that are planned."""
    window = sliding_window(size=1024)
    found = [
        Case("causal", [causal()]),
        Case("window of 1,024", [window]),
        Case("a sink of 4 and a window of 1,024", [sink_window(4, size=1024)]),
        Case("causal, and a window of 1,024", [causal(), window]),
        Case("prefix of a third", [prefix_lm(length // 3)]),
        Case("causal, half of it padding", [causal() & query_padding(lengths=length // 2)]),
    ]
    for seed in range(3):
        lengths = document_lengths(length, seed)
        packed = causal() & document(lengths=lengths)
        found.append(Case(f"documents {seed + 1}", [packed], lengths))
    lengths = document_lengths(length, 0)
    packed = causal() & document(lengths=lengths)
    return [*found, Case("documents 1, and a window of 1,024 in them", [packed, packed & window], lengths)]


# ---------------------------------------------------------------- plans


def plans(case: Case, length: int, ranks: int) -> Iterator[tuple[str, Plan]]:
    """What the plans of a case cost, by name. Positions are token by token up to 2**17 tokens, else block by block."""
    size = 1 if length <= 2**17 else BLOCK
    found = [units_of(bind(mask, length), size, (BLOCK, BLOCK)) for mask in case.masks]
    rows = [mask.rows(length).upper for mask in case.masks] if size == 1 else []
    balances: dict[str, Balance] = {"flexmask": "work", "contiguous": "contiguous"}
    for name, balance in balances.items():
        sharding = shard_sequence(list(case.masks), length, ranks, balance=balance)
        owner = torch.empty(length, dtype=torch.int64)
        for rank in range(ranks):
            owner[sharding.positions(rank)] = rank
        yield name, cost(found, rows, owner[::size], size, ranks)
    for name, owner in peer_owners(case, length, ranks).items():
        yield name, cost(found, rows, owner[::size], size, ranks)


def peer_owners(case: Case, length: int, ranks: int) -> dict[str, Tensor]:
    """The rank of each token by torch's load balancers, ``int64[length]``."""
    orders = {"head-tail": peers._HeadTailLoadBalancer(length, ranks, "cpu")._generate_indices()}
    # It counts the blocks of one mask: that of the layers with the most work. Their number is all that it reads.
    blocks = units_of(bind(case.masks[0], length), BLOCK, (BLOCK, BLOCK)).work // BLOCK**2
    block_mask = SimpleNamespace(kv_num_blocks=blocks.view(1, 1, -1), full_kv_num_blocks=None, BLOCK_SIZE=(BLOCK, BLOCK))
    orders["PTRR"] = peers._PTRRLoadBalancer(cast(Any, block_mask), ranks)._generate_indices()
    owners = {name: torch.empty(length, dtype=torch.int64) for name in orders}
    for name, order in orders.items():
        owners[name][order[0].long()] = torch.arange(length) * ranks // length
    if case.lengths is not None and length <= 2**17:
        owners["head-tail of each document"] = torch.cat([_head_tail(part, ranks) for part in case.lengths])
    return owners


def _head_tail(length: int, ranks: int) -> Tensor:
    """As ``_PerDocumentHeadTailLoadBalancer`` shards a document according to its docstring, filled up as it requires."""
    chunk = torch.arange(length).div(-(-length // (2 * ranks)), rounding_mode="floor")
    return torch.minimum(chunk, 2 * ranks - 1 - chunk)


def cost(found: Sequence[QueryUnits], rows: Sequence[Rows], owner: Tensor, size: int, ranks: int) -> Plan:
    """What it costs when rank ``owner[u]`` holds unit ``u``."""
    units = torch.arange(owner.numel())
    own = KeyLists.union(ranks, owner, units * size, (units + 1) * size)
    work, received = torch.zeros(ranks, dtype=torch.int64), 0
    for one in found:
        work.index_add_(0, owner, one.work)
        received += int(((one.keys.grouped(owner, ranks) | own).sizes() - own.sizes()).sum())
    gathered = len(found) * owner.numel() * size * (ranks - 1)
    slowest = None
    if rows:
        blocks = torch.zeros(ranks, dtype=torch.int64)
        for one, ends in zip(found, rows, strict=True):
            blocks += kernel_blocks(ends, owner, one.keys.grouped(owner, ranks), ranks)
        everything = sum(int(one.work.sum()) for one in found) / BLOCK**2
        slowest = float(blocks.max()) * ranks / everything
    return Plan(float(work.max() / work.double().mean()), received / gathered, slowest)


def kernel_blocks(rows: Rows, owner: Tensor, seen: KeyLists, ranks: int) -> Tensor:
    """The blocks that the kernel of each rank computes, over its queries in order and the keys that they attend to."""
    found = torch.zeros(ranks, dtype=torch.int64)
    for rank in range(ranks):
        held, keys = (owner == rank).nonzero().squeeze(-1), seen.take(torch.tensor([rank]))
        width = int(keys.sizes()[0])
        if held.numel() and width:
            lo, hi = (
                places(keys, end.expand(-1, -1, owner.numel(), -1)[:, :, held].long().contiguous()) for end in (rows.lo, rows.hi)
            )
            empty = lo >= hi
            local = Rows(lo.masked_fill(empty, width).int(), hi.masked_fill(empty, width).int(), width)
            sets = BlockSets(cast(Any, SimpleNamespace(q_len=held.numel(), kv_len=width)), BLOCK, BLOCK)
            found[rank] = sets.touched(local).counts().sum()
    return found


def places(seen: KeyLists, keys: Tensor) -> Tensor:
    """How many of the keys that one rank attends to are less than each of some numbers ``int64[n]``."""
    lengths = seen.hi - seen.lo
    at = (torch.searchsorted(seen.lo, keys, right=True) - 1).clamp(min=0)
    inside = (keys - seen.lo[at]).clamp(min=0)
    return (lengths.cumsum(0) - lengths)[at] + torch.minimum(inside, lengths[at])


# ---------------------------------------------------------------- the report

NAMES = ("flexmask", "contiguous", "head-tail", "head-tail of each document", "PTRR")
TEXT = f"""# Context parallelism, simulated

Which rank holds which tokens, for masks of {LENGTH:,} and {LONG:,} tokens in blocks of {BLOCK}. `flexmask` is
`shard_sequence(masks, length, ranks)`. The others are one run for each rank; torch's `_HeadTailLoadBalancer`; the head and the
tail of each document, as in the docstring of `_PerDocumentHeadTailLoadBalancer` (torch 2.13 lists them document by document, so
that its shards are others); and `_PTRRLoadBalancer`, which counts the blocks of one mask.

A cell has the most work of a rank relative to the mean; for {LENGTH:,} tokens also the blocks that the kernel of the slowest rank
computes, relative to an equal share of those of one process; and the keys that all ranks receive, relative to those of an
all-gather, where each gets those that its queries attend to. Documents have log-normal lengths (mean 1,500, sigma 1.2, at most
16,384). `python -m benchmarks.context_parallel` writes this file."""


def main() -> None:
    """Writes the report."""
    torch.set_num_threads(1)
    parts = [TEXT]
    for length, ranks in ((LENGTH, 8), (LENGTH, 64), (LONG, 1024)):
        parts.append(f"## {ranks:,} ranks, {length:,} tokens\n\n{table(length, ranks)}")
    parts.append(f"## Planning\n\n{planning()}")
    RESULTS.write_text("\n\n".join(parts) + "\n")


def table(length: int, ranks: int) -> str:
    """The costs of all plans as a Markdown table."""
    lines = [_line(["", *NAMES]), _line(["---"] + ["---:"] * len(NAMES))]
    for case in cases(length):
        found: Mapping[str, Plan] = dict(plans(case, length, ranks))
        lines.append(_line([case.name, *(str(found.get(name, "-")) for name in NAMES)]))
        print(lines[-1], flush=True)
    return "\n".join(lines)


def planning() -> str:
    """How long planning takes on one rank, and how much memory, as a Markdown table."""
    lines = [_line([f"{LONG:,} tokens, 1,024 ranks", "CPU time of 1 thread", "memory"]), _line(["---", "---:", "---:"])]
    for case in cases(LONG):

        def plan(_: None, case: Case = case) -> object:
            return shard_sequence(list(case.masks), LONG, 1024)

        peak = measure(plan, seconds=0.0).peak
        start = time.process_time()
        plan(None)
        seconds = time.process_time() - start
        lines.append(_line([case.name, f"{seconds:.2f} s", "-" if peak is None else f"{peak / 2**20:,.0f} MiB"]))
        print(lines[-1], flush=True)
    return "\n".join(lines)


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
