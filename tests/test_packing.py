"""Packed samples: what a model computes for rows is, sample by sample, what it computes for each sample alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flexmask as fm
from flexmask.errors import ExpressionError, OperandError
from flexmask.packing import Packed, pack_documents, pack_prefixes

VOCABULARY = 11
SAMPLES = [[3, 1, 4, 1, 5], [3, 1, 4, 2], [2, 7], [3, 1, 4, 1, 5], [3, 1], [3, 1, 4, 1, 5, 9, 2, 6], [2, 8, 1]]


class Model(nn.Module):
    """A decoder of two layers with learned positions."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, 16), nn.Embedding(32, 16)
        self.layers = nn.ModuleList([fm.MultiheadFlexAttention(16, 16, 4) for _ in range(2)])
        self.head = nn.Linear(16, VOCABULARY)
        self.double()

    def forward(self, tokens: Tensor, position_ids: Tensor, mask: fm.Mask) -> Tensor:
        x = self.tokens(tokens) + self.positions(position_ids)
        for layer in self.layers:
            x = x + layer(x, mask)
        return self.head(x)  # type: ignore[no-any-return]


def drawn(seed: int) -> list[list[int]]:
    """Samples that often begin alike."""
    draw = random.Random(seed)
    found = [[draw.randrange(3)]]
    for _ in range(9):
        begin = draw.choice(found)
        found.append(begin[: draw.randint(1, len(begin))] + [draw.randrange(3) for _ in range(draw.randrange(4))])
    return found


def alone(model: Model, sample: Sequence[int]) -> Tensor:
    """The log-probability of each token but the first."""
    tokens = torch.tensor([sample])
    logits = model(tokens, torch.arange(len(sample))[None], fm.causal())
    return logits.log_softmax(-1)[0, :-1].gather(-1, tokens[0, 1:, None]).squeeze(-1)  # type: ignore[no-any-return]


def log_probs(packed: Packed, logits: Tensor, tokens: Tensor) -> Tensor:
    """The log-probability of each token of the rows; 0 of first tokens and of padding."""
    before = packed.previous.clamp(min=0)[..., None]
    found = logits.log_softmax(-1).gather(1, before.expand_as(logits)).gather(-1, tokens[..., None]).squeeze(-1)
    return torch.where(packed.previous < 0, 0, found)


@pytest.mark.parametrize("capacity", [None, 16, 12])
@pytest.mark.parametrize("samples", [SAMPLES, *map(drawn, range(4))])
def test_samples_that_share_prefixes(samples: list[list[int]], capacity: int | None) -> None:
    """Log-probabilities, a loss with a weight for each token of each sample, and its gradients."""
    torch.manual_seed(0)
    model, packed = Model(), pack_prefixes(samples, capacity)
    weights = [torch.rand(len(sample), dtype=torch.float64) for sample in samples]
    logits = model(packed.tokens, packed.position_ids, packed.mask)
    of_tokens = log_probs(packed, logits, packed.tokens)
    for found, sample in zip(packed.gather(of_tokens), samples, strict=True):
        assert torch.allclose(found[1:], alone(model, sample))
    loss = (of_tokens * packed.scatter(weights)).sum()
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(loss, parameters)
    wanted = sum((alone(model, sample) * weight[1:]).sum() for sample, weight in zip(samples, weights, strict=True))
    assert isinstance(wanted, Tensor)
    assert torch.allclose(loss, wanted)
    for found, expected in zip(gradients, torch.autograd.grad(wanted, parameters), strict=True):
        assert torch.allclose(found, expected)


def test_a_tree_longer_than_a_row_is_cut() -> None:
    """A tokenizer begins all samples with one token; the prompts 1 to 4, each with two answers."""
    samples = [[0, prompt, prompt, answer] for prompt in range(1, 5) for answer in (7, 8)]
    packed = pack_prefixes(samples, 8)
    assert packed.rows == [0, 0, 0, 1, 1, 1, 2, 2]
    assert [found.tolist() for found in packed.gather(packed.tokens)] == samples
    assert packed.tokens.tolist() == [[0, 1, 1, 7, 8, 2, 2, 7], [0, 2, 2, 8, 3, 3, 7, 8], [0, 4, 4, 7, 8, 0, 0, 0]]


@pytest.mark.parametrize("samples", [SAMPLES, *map(drawn, range(4))])
def test_each_prefix_is_there_once(samples: list[list[int]]) -> None:
    packed = pack_prefixes(samples)
    prefixes = {tuple(sample[:n]) for sample in samples for n in range(1, len(sample) + 1)}
    assert packed.tokens.shape == (1, len(prefixes))
    assert [found.tolist() for found in packed.gather(packed.tokens)] == samples
    assert [found.tolist() for found in packed.gather(packed.position_ids)] == [list(range(len(sample))) for sample in samples]
    counts = packed.scatter([[1] * len(sample) for sample in samples])
    assert int(counts.sum()) == sum(map(len, samples))
    assert int(counts.min()) == 1


@pytest.mark.parametrize("seed", range(10))
def test_documents_in_rows(seed: int) -> None:
    draw = random.Random(seed)
    documents = [[draw.randrange(1, VOCABULARY) for _ in range(draw.randint(1, 9))] for _ in range(draw.randint(1, 12))]
    packed = pack_documents(list(map(len, documents)), 10)
    rows = packed.scatter(documents, fill=-100)
    assert [found.tolist() for found in packed.gather(rows)] == documents
    assert int((rows == -100).sum()) == rows.numel() - sum(map(len, documents))
    torch.manual_seed(0)
    model = Model()
    logits = model(rows.clamp(min=0), packed.position_ids, packed.mask & fm.causal())
    for found, document in zip(packed.gather(log_probs(packed, logits, rows.clamp(min=0))), documents, strict=True):
        assert torch.allclose(found[1:], alone(model, document))


def test_the_best_fit() -> None:
    packed = pack_documents(torch.tensor([3, 7, 2, 5, 4, 1]), 8)
    assert packed.rows == [1, 0, 2, 1, 2, 0]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 6, 0], [0, 1, 2, 3, 4, 0, 1, 2], [0, 1, 2, 3, 0, 1, 0, 0]]
    assert packed.previous.tolist() == [[-1, 0, 1, 2, 3, 4, 5, -1], [-1, 0, 1, 2, 3, -1, 5, 6], [-1, 0, 1, 2, -1, 4, -1, -1]]


@pytest.mark.parametrize(
    "packed", [pack_prefixes([[1, 2, 3], [1, 4]]), pack_documents(torch.tensor([3, 2]), 4)], ids=["prefixes", "documents"]
)
def test_another_device(packed: Packed) -> None:
    def tensors(of: Packed) -> list[Tensor]:
        return [*of.mask.tensors, *of.places, *[value for value in vars(of).values() if isinstance(value, Tensor)]]

    moved = packed.to("meta")
    assert type(moved) is type(packed)
    assert moved.rows == packed.rows
    wanted = [("meta", own.shape, own.dtype) for own in tensors(packed)]
    assert [(found.device.type, found.shape, found.dtype) for found in tensors(moved)] == wanted
    assert len(wanted) >= 5


@pytest.mark.slow
def test_one_graph_for_other_samples() -> None:
    """Two lengths are compiled, the second one for all that follow."""
    torch.manual_seed(0)
    model, graphs = Model(), 0

    def backend(graph: Any, _: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for seed in range(5):
        packed = pack_prefixes(drawn(seed))
        inputs = packed.tokens, packed.position_ids, packed.mask
        assert torch.allclose(compiled(*inputs), model(*inputs))
    assert graphs <= 2


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: pack_prefixes([]), "at least one; got "),
        (lambda: pack_prefixes([[1], []]), r"samples\[1\] must be integers along one axis, at least one"),
        (lambda: pack_prefixes([torch.tensor([1, 2.5])]), r"samples\[0\] must be an integer, got 1.0"),
        (lambda: pack_prefixes([[1, 2], [1, 2, 3, 4]], 3), "a sample has 4 tokens, more than a row of 3"),
        (lambda: pack_prefixes([[1]], 0), "capacity must be at least 1, got 0"),
        (lambda: pack_documents([], 4), "pack_documents: lengths must be integers"),
        (lambda: pack_documents([3, 0], 4), "pack_documents: lengths must be at least 1, got 0"),
        (lambda: pack_documents([[7, 8], [9]], 4), r"not their tokens: give \[len\(tokens\) for tokens in documents\]"),  # type: ignore[list-item]
        (lambda: pack_documents([torch.ones(2), torch.ones(1)], 4), "not their tokens"),  # type: ignore[list-item]
        (lambda: pack_documents([3, 5], 4), "a document has 5 tokens, more than a row of 4"),
        (lambda: pack_documents([3], 4).gather(torch.zeros(1, 3)), r"the shape \[1, 4, ...\], got \[1, 3\]"),
        (lambda: pack_documents([3], 4).scatter([[1, 2]]), r"as many as \[3\]; got the shapes \[\[2\]\]"),
    ],
)
def test_wrong_samples(wrong: Any, message: str) -> None:
    with pytest.raises((OperandError, ExpressionError), match=message):
        wrong()
