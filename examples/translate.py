"""Trains an encoder-decoder that translates numbers from figures to words, and shows that no padding is attended.

"40017" becomes "forty thousand seventeen". Both sides of a batch are padded, each to its own length, so the model has three
masks: padding in the encoder, causal with padding in the decoder, and the source's padding in cross-attention. Words are then
decoded one at a time with a cache of keys.

    python examples/translate.py 40017 999 -o pictures
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click
import torch
from rich.progress import Progress
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from flexmask import KVCache, Mask, MaskCache, MultiheadFlexAttention, causal, cross_length, key_padding
from flexmask.plotting.mpl import plot_scores
from flexmask.testing import assert_no_leak

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH, HEADS, LAYERS = 64, 4, 2
GREATEST = 10**6
UNITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen"]
UNITS += ["fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"]
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
BEGIN, END = "<begin>", "<end>"
WORDS = [BEGIN, END, *UNITS, *TENS, "hundred", "thousand"]
#: Words of the longest number, with the end.
LONGEST = 10


def words_of(number: int) -> list[str]:
    """A number below a million in words."""
    if number >= 1000:
        return [*words_of(number // 1000), "thousand", *(words_of(number % 1000) if number % 1000 else [])]
    if number >= 100:
        return [UNITS[number // 100], "hundred", *(words_of(number % 100) if number % 100 else [])]
    if number >= 20:
        return [TENS[number // 10 - 2], *([UNITS[number % 10]] if number % 10 else [])]
    return [UNITS[number]]


@dataclass(frozen=True)
class Pairs:
    """Sentences and their translations, both padded with 0 at the end.

    Attributes:
        source: digits, ``int64[B, source length]``.
        source_lengths: ``int64[B]``.
        target: words with a begin before them and an end behind, ``int64[B, target length]``.
        target_lengths: ``int64[B]``.
    """

    source: Tensor
    source_lengths: Tensor
    target: Tensor
    target_lengths: Tensor

    @classmethod
    def of(cls, numbers: Sequence[int]) -> Pairs:
        digits = [[int(digit) for digit in str(number)] for number in numbers]
        words = [[WORDS.index(word) for word in (BEGIN, *words_of(number), END)] for number in numbers]
        return cls(*_padded(digits), *_padded(words))

    @property
    def masks(self) -> dict[str, Mask]:
        """The masks of the encoder, of the decoder, which predicts each word from those before it, and between both."""
        return {
            "encoder": key_padding(self.source_lengths),
            "decoder": causal() & key_padding(self.target_lengths - 1),
            "cross-attention": cross_length(self.source_lengths),
        }


def _padded(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    lengths = torch.tensor([len(row) for row in rows])
    padded = torch.zeros(len(rows), int(lengths.max()), dtype=torch.int64)
    for line, row in zip(padded, rows, strict=True):
        line[: len(row)] = torch.tensor(row)
    return padded, lengths


class Layer(nn.Module):
    """Attention to itself, in a decoder also to the source, then a feed-forward layer, each added to its input."""

    def __init__(self, *, crosses: bool) -> None:
        super().__init__()
        self.own = MultiheadFlexAttention(WIDTH, WIDTH, HEADS)
        self.cross = MultiheadFlexAttention(WIDTH, WIDTH, HEADS) if crosses else None
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))

    def forward(
        self,
        x: Tensor,
        mask: Mask,
        source: Tensor | None = None,
        source_mask: Mask | None = None,
        caches: tuple[KVCache, KVCache] | None = None,
    ) -> Tensor:
        own, cross = caches or (None, None)
        x = x + self.own(self.norms[0](x), mask, cache=own)
        if self.cross is not None:
            x = x + self.cross(self.norms[1](x), source_mask, context=source, cache=cross)
        x = x + self.feed_forward(self.norms[2](x))
        return x


class Translator(nn.Module):
    """An encoder of digits and a decoder of words."""

    def __init__(self) -> None:
        super().__init__()
        self.digits, self.words = nn.Embedding(10, WIDTH), nn.Embedding(len(WORDS), WIDTH)
        self.places, self.positions = nn.Embedding(16, WIDTH), nn.Embedding(LONGEST + 2, WIDTH)
        self.encoder = nn.ModuleList(Layer(crosses=False) for _ in range(LAYERS))
        self.decoder = nn.ModuleList(Layer(crosses=True) for _ in range(LAYERS))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, len(WORDS))

    def embed_source(self, pairs: Pairs) -> Tensor:
        """Digits with their places, counted from the last one."""
        places = pairs.source_lengths[:, None] - 1 - torch.arange(pairs.source.shape[1])
        out: Tensor = self.digits(pairs.source) + self.places(places.clamp(min=0))
        return out

    def embed_words(self, words: Tensor, start: int = 0) -> Tensor:
        """Words with their positions, which begin at ``start``."""
        out: Tensor = self.words(words) + self.positions(torch.arange(start, start + words.shape[1]))
        return out

    def encode(self, x: Tensor, mask: Mask) -> Tensor:
        for layer in self.encoder:
            x = layer(x, mask)
        out: Tensor = self.norms[0](x)
        return out

    def decode(
        self, x: Tensor, source: Tensor, masks: dict[str, Mask], caches: Sequence[tuple[KVCache, KVCache]] | None = None
    ) -> Tensor:
        for number, layer in enumerate(self.decoder):
            x = layer(x, masks["decoder"], source, masks["cross-attention"], caches[number] if caches else None)
        out: Tensor = self.head(self.norms[1](x))
        return out

    def forward(self, pairs: Pairs) -> Tensor:
        """Scores of the next word at each word of the target but the last, ``[B, target length - 1, words]``."""
        masks = pairs.masks
        with MaskCache():  # each of the masks is lowered once for all layers
            source = self.encode(self.embed_source(pairs), masks["encoder"])
            return self.decode(self.embed_words(pairs.target[:, :-1]), source, masks)

    @torch.no_grad()
    def translate(self, pairs: Pairs) -> list[list[str]]:
        """The likeliest word after each other until the end, with the keys of the words before kept."""
        masks = pairs.masks | {"decoder": causal()}
        source = self.encode(self.embed_source(pairs), masks["encoder"])
        caches = [(KVCache(LONGEST + 1), KVCache()) for _ in self.decoder]
        word = torch.full((len(pairs.source), 1), WORDS.index(BEGIN))
        found = []
        for step in range(LONGEST + 1):
            word = self.decode(self.embed_words(word, step), source, masks, caches).argmax(-1)
            found.append(word)
        rows = [[WORDS[number] for number in row] for row in torch.cat(found, 1).tolist()]
        return [row[: row.index(END)] if END in row else row for row in rows]


def train(model: Translator, numbers: Sequence[int], steps: int, batch: int, lr: float) -> Iterator[float]:
    """Trains on random batches; yields the loss of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps + 1)
    for _ in range(steps):
        pairs = Pairs.of(random.choices(numbers, k=batch))
        words = pairs.target[:, 1:].masked_fill(torch.arange(1, pairs.target.shape[1]) >= pairs.target_lengths[:, None], -1)
        loss = cross_entropy(model(pairs).transpose(1, 2), words, ignore_index=-1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        yield loss.item()


def check(model: Translator, pairs: Pairs) -> None:
    """Raises an AssertionError where an output depends on padding of either side, or on a later word."""
    masks = pairs.masks

    def run(words: Tensor, *, context: Tensor) -> Tensor:
        return model.decode(words, model.encode(context, masks["encoder"]), masks)

    words, digits = model.embed_words(pairs.target[:, :-1]), model.embed_source(pairs)
    assert_no_leak(
        run,
        masks["cross-attention"],
        words.detach(),
        context=digits.detach(),
        self_mask=causal(),
        layers=LAYERS,
    )


@torch.no_grad()
def weights_between(model: Translator, pairs: Pairs) -> Tensor:
    """The weights of cross-attention in the last layer, ``[B, heads, target length - 1, source length]``."""
    masks = pairs.masks
    source = model.encode(model.embed_source(pairs), masks["encoder"])
    x = model.embed_words(pairs.target[:, :-1])
    *before, last = cast("list[Layer]", list(model.decoder))
    assert last.cross is not None
    for layer in before:
        x = layer(x, masks["decoder"], source, masks["cross-attention"])
    x = x + last.own(last.norms[0](x), masks["decoder"])
    return last.cross.attention_weights(last.norms[1](x), masks["cross-attention"], context=source)


def draw(model: Translator, pairs: Pairs, folder: Path | None) -> None:
    """The three masks of a batch, and where the words of its first sentence look, as files or in the terminal."""
    lengths = {
        "encoder": (pairs.source.shape[1], pairs.source.shape[1]),
        "decoder": (pairs.target.shape[1] - 1, pairs.target.shape[1] - 1),
        "cross-attention": (pairs.target.shape[1] - 1, pairs.source.shape[1]),
    }
    for name, mask in pairs.masks.items():
        if folder is None:
            click.echo(f"{name}:")
            mask.show(*lengths[name])
        else:
            mask.save_picture(folder / f"{name}.png", *lengths[name], why=True)
    if folder is None:
        return
    words = [WORDS[number] for number in pairs.target[0, 1 : pairs.target_lengths[0]].tolist()]
    digits = [str(digit) for digit in pairs.source[0, : pairs.source_lengths[0]].tolist()]
    weights = weights_between(model, pairs)[:1, :, : len(words), : len(digits)]
    axes = plot_scores(weights, tokens=words, kv_tokens=digits, title="each next word attends to")
    cast("Figure", axes.figure).savefig(folder / "attention.png", metadata={"Software": None})
    click.echo(f"wrote {', '.join([*lengths, 'attention'])} as .png to {folder}\n")


@click.command(context_settings={"show_default": True})
@click.argument("numbers", nargs=-1, type=click.IntRange(0, GREATEST - 1))
@click.option("--steps", type=click.IntRange(1), default=1200, help="Batches to train on.")
@click.option("--batch", type=click.IntRange(1), default=64, help="Pairs in a batch.")
@click.option("--lr", type=click.FloatRange(0, min_open=True), default=4e-3, help="Greatest learning rate.")
@click.option("--seed", type=int, default=0, help="Of the weights and the batches.")
@click.option("-o", "--output", type=click.Path(path_type=Path, file_okay=False), help="Folder for pictures, not the terminal.")
def main(numbers: tuple[int, ...], steps: int, batch: int, lr: float, seed: int, output: Path | None) -> None:
    """Train a small encoder-decoder to write NUMBERS in words, and show that no padding is attended."""
    torch.manual_seed(seed)
    random.seed(seed)
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
    # As many short numbers as long ones, so that both sides of a batch are padded.
    drawn = sorted({random.randrange(10 ** random.randint(1, 6)) for _ in range(20_000)})
    random.shuffle(drawn)
    held, learned = drawn[:500], drawn[500:]
    click.echo(f"{len(learned):,} numbers to learn from, {len(held):,} held back\n")

    model = Translator()
    start = time.perf_counter()
    with Progress(transient=True) as progress:
        losses = progress.track(train(model, learned, steps, batch, lr), total=steps, description="training")
        for step, loss in enumerate(losses, start=1):
            if step in (1, steps) or step % max(1, steps // 6) == 0:
                progress.console.print(f"step {step:>5}   loss {loss:.4f}", highlight=False)
    click.echo(f"\ntrained in {time.perf_counter() - start:.0f} s")

    model.eval()
    right = sum(found == words_of(number) for found, number in zip(model.translate(Pairs.of(held)), held, strict=True))
    click.echo(f"{right / len(held):.1%} of the numbers held back are right")
    asked = numbers or (40_017, 999, 8)
    for number, found in zip(asked, model.translate(Pairs.of(asked)), strict=True):
        click.echo(f"{number:>7} -> {' '.join(found)}")
    click.echo()
    few = Pairs.of(asked[:4])
    draw(model, few, output)
    check(model, few)
    click.echo("No output depends on padding or on a later word.")


if __name__ == "__main__":
    main()
