"""Trains a small decoder on text that is packed into sequences, and shows that no document sees another.

A document is a passage of a text file: what stands between two blank lines. Documents are packed as bytes into sequences of
one length, and the mask `causal & document(ids)` keeps them apart. Without files, the repository's own texts are read.

    python examples/packed_text.py --steps 300 -o mask.png notes.txt

With --context-parallel several processes train on the same batches to the same losses: each computes a part of the tokens of each
sequence. A run that was stopped goes on from its checkpoint, also with another number of processes.

    torchrun --nproc-per-node 4 examples/packed_text.py --context-parallel --checkpoint packed_text.pt
"""

from __future__ import annotations

import io
import os
import random
import re
from collections.abc import Iterator
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from rich.progress import Progress
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from flexmask import Mask, MultiheadFlexAttention, causal, document
from flexmask.distributed import ContextParallel
from flexmask.errors import FlexmaskError

ROOT = Path(__file__).parent.parent
WIDTH, HEADS, LAYERS = 64, 4, 2
PADDING = -1
SAVE_EVERY = 10  # steps


@dataclass(frozen=True)
class Packed:
    """Sequences of packed documents, all ``int64[sequences, seq_len]``.

    Attributes:
        tokens: bytes.
        ids: number of the document in its sequence; -1 where the sequence is padded.
        positions: place in the document, so that what a document means does not depend on where it stands.
        targets: the next byte of the same document; -1 where there is none.
    """

    tokens: Tensor
    ids: Tensor
    positions: Tensor
    targets: Tensor

    def __getitem__(self, rows: Tensor) -> Packed:
        return Packed(self.tokens[rows], self.ids[rows], self.positions[rows], self.targets[rows])

    def shard(self, cp: ContextParallel) -> Packed:
        """The tokens of this process."""
        return Packed(*(cp.shard(part) for part in (self.tokens, self.ids, self.positions, self.targets)))

    @property
    def mask(self) -> Mask:
        """Each byte sees the bytes before it in its own document."""
        return causal() & document(self.ids)


def read(paths: tuple[Path, ...]) -> list[bytes]:
    """The passages of all files; by default of the repository's documents and sources."""
    own = [path for pattern in ("*.md", "LICENSE", "flexmask/**/*.py") for path in sorted(ROOT.glob(pattern))]
    documents = []
    for path in paths or own:
        passages = [passage for passage in re.split(rb"\n\s*\n", path.read_bytes()) if passage.strip()]
        if paths and not passages:
            raise click.BadParameter(f"{path} has no text", param_hint="FILES")
        documents += passages
    return documents


def pack(documents: list[bytes], seq_len: int) -> Packed:
    """Fills sequences with whole documents, in order; only a document longer than a sequence is cut."""
    sequences: list[list[bytes]] = [[]]
    for text in documents:
        for start in range(0, len(text), seq_len):
            piece = text[start : start + seq_len]
            if sum(map(len, sequences[-1])) + len(piece) > seq_len:
                sequences.append([])
            sequences[-1].append(piece)
    tokens, positions = (torch.zeros(len(sequences), seq_len, dtype=torch.int64) for _ in range(2))
    ids, targets = (torch.full_like(tokens, PADDING) for _ in range(2))
    for row, pieces in enumerate(sequences):
        at = 0
        for number, piece in enumerate(pieces):
            end = at + len(piece)
            tokens[row, at:end] = torch.tensor(list(piece))
            ids[row, at:end] = number
            positions[row, at:end] = torch.arange(len(piece))
            targets[row, at : end - 1] = tokens[row, at + 1 : end]
            at = end
    return Packed(tokens, ids, positions, targets)


class Block(nn.Module):
    """Attention, then a feed-forward layer, each added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = MultiheadFlexAttention(WIDTH, WIDTH, HEADS)
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))

    def forward(self, x: Tensor, mask: Mask) -> Tensor:
        x = x + self.attention(self.norms[0](x), mask)
        x = x + self.feed_forward(self.norms[1](x))
        return x


class Decoder(nn.Module):
    """Predicts the next byte from those that the mask shows."""

    def __init__(self, seq_len: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, WIDTH)
        self.positions = nn.Embedding(seq_len, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))

    def forward(self, packed: Packed, mask: Mask) -> Tensor:
        x = self.bytes(packed.tokens) + self.positions(packed.positions)
        for block in self.blocks:
            x = block(x, mask)
        out: Tensor = self.head(x)
        return out


def train(
    model: Decoder, packed: Packed, steps: int, batch: int, lr: float, checkpoint: Path | None = None
) -> Iterator[tuple[int, float]]:
    """Trains on random batches, each with its own mask; yields each step and its loss.

    In a process group all processes draw the same batches, and each computes its tokens of every sequence.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    done = 0 if checkpoint is None or not checkpoint.exists() else load(checkpoint, model, optimizer)
    for step in range(done + 1, steps + 1):
        some = packed[torch.randint(len(packed.ids), (batch,))]
        mask, count = some.mask, (some.targets != PADDING).sum()
        optimizer.zero_grad()
        with ContextParallel(None, mask, some.tokens.shape[1]) if dist.is_initialized() else nullcontext() as cp:
            own = some if cp is None else some.shard(cp)
            out = model(own, mask).transpose(1, 2)
            loss = cross_entropy(out, own.targets, ignore_index=PADDING, reduction="sum") / count
            loss.backward()
        if dist.is_initialized():
            for part in (loss.detach(), *(weight.grad for weight in model.parameters())):
                dist.all_reduce(part)
        optimizer.step()
        if checkpoint is not None and (step % SAVE_EVERY == 0 or step == steps):
            save(checkpoint, step, model, optimizer)
        yield step, loss.item()


def save(path: Path, step: int, model: Decoder, optimizer: torch.optim.Optimizer) -> None:
    """Writes what :func:`train` goes on from, once for all processes, and never a part of it."""
    state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict(), "random": torch.get_rng_state()}
    if not dist.is_initialized() or dist.get_rank() == 0:
        written = path.with_name(f"{path.name}.new")
        torch.save(state, written)
        written.replace(path)


def load(path: Path, model: Decoder, optimizer: torch.optim.Optimizer) -> int:
    """Reads what :func:`save` wrote; the step after which it was written."""
    state = torch.load(path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["random"])
    return int(state["step"])


@torch.no_grad()
def leak(model: Decoder, packed: Packed, mask: Mask) -> float:
    """How far the outputs of all other documents move when every byte of the first document changes."""
    first = packed.ids == 0
    changed = Packed(packed.tokens.where(~first, 255 - packed.tokens), packed.ids, packed.positions, packed.targets)
    moved: Tensor = (model(changed, mask) - model(packed, mask)).abs()
    return float(moved[~first].max())


def draw(mask: Mask, seq_len: int, output: Path | None) -> None:
    """The mask of the first sequence, in a file or in the terminal."""
    if output is None:
        mask.show(seq_len)
        return
    try:
        mask.save_picture(output, seq_len, block_size=seq_len // 8)
    except (FlexmaskError, OSError) as error:
        raise click.BadParameter(str(error), param_hint="--output") from error
    click.echo(f"wrote {output}\n")


@click.command(context_settings={"show_default": True})
@click.argument("files", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--steps", type=click.IntRange(1), default=300, help="Batches to train on.")
@click.option("--seq-len", type=click.IntRange(8), default=256, help="Bytes in a sequence.")
@click.option("--batch", type=click.IntRange(1), default=8, help="Sequences in a batch.")
@click.option("--lr", type=click.FloatRange(0, min_open=True), default=3e-3, help="Learning rate.")
@click.option("--seed", type=int, default=0, help="Of the weights, the order of documents, and the batches.")
@click.option("--context-parallel", is_flag=True, help="Distribute the tokens over the processes of torchrun.")
@click.option("--checkpoint", type=click.Path(dir_okay=False, path_type=Path), help="File to save to, and to go on from.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Draw in a .png or .svg file, not in the terminal.")
def main(context_parallel: bool, output: Path | None, **options: Any) -> None:
    """Train a small decoder on packed text, and show that no document sees another.

    FILES are text files; by default the repository's own. Their passages, which blank lines separate, are the documents.
    """
    if context_parallel and "RANK" not in os.environ:
        raise click.UsageError("--context-parallel needs several processes; run the script with torchrun --nproc-per-node 4")
    if not context_parallel:
        run(output=output, **options)
        return
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        run(output=output, **options)
    else:
        with redirect_stdout(io.StringIO()):
            run(output=None, **options)
    dist.destroy_process_group()


def run(
    files: tuple[Path, ...],
    steps: int,
    seq_len: int,
    batch: int,
    lr: float,
    seed: int,
    checkpoint: Path | None,
    output: Path | None,
) -> None:
    """What :func:`main` does, alone or in each process of a group."""
    torch.manual_seed(seed)
    documents = read(files)
    random.Random(seed).shuffle(documents)
    packed = pack(documents, seq_len)
    padding = (packed.ids == PADDING).double().mean().item()
    click.echo(f"{len(documents):,} documents in {len(packed.ids):,} sequences of {seq_len} bytes, {padding:.0%} padding\n")

    fullest = packed[packed.ids.amax(1).topk(min(batch, len(packed.ids))).indices]
    if fullest.ids.max() < 1:
        raise click.UsageError("no sequence holds two documents; give text with blank lines in it, or a longer --seq-len")
    draw(fullest.mask, seq_len, output)

    model = Decoder(seq_len)
    with Progress(transient=True) as progress:
        losses = progress.track(train(model, packed, steps, batch, lr, checkpoint), total=steps, description="training")
        for step, loss in losses:
            if step in (1, steps) or step % max(1, steps // 6) == 0:
                progress.console.print(f"step {step:>5}   loss {loss:.3f}", highlight=False)

    click.echo("Every byte of one document changes. The outputs of all other documents move by")
    click.echo(f"  {leak(model, fullest, fullest.mask)} with causal & document(ids)")
    click.echo(f"  {leak(model, fullest, causal())} with causal alone")


if __name__ == "__main__":
    main()
