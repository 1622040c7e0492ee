"""Compiled models whose lengths, batches and numbers of documents change: few graphs, forward and backward, and right ones."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import flexmask as fm
from flexmask import attention
from tests.support import oracle
from tests.support.exhaustive import each_run, exhaustive, slow

HEADS = 2


def stops(tokens: int, documents: int) -> Tensor:
    cuts = torch.randperm(tokens - 1)[: documents - 1] + 1
    return torch.cat((torch.tensor([0]), cuts.sort().values, torch.tensor([tokens])))


def numbers(cu: Tensor) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(cu) - 1), cu.diff())


Data = dict[str, Tensor]


def for_each(batch: int, data: Tensor) -> Tensor:
    return data.expand(batch, -1).contiguous()


#: The text of a mask, its data for a batch, tokens and documents, and its cells ``[B, 1 or H, q, kv]`` by position.
MASKS: dict[str, tuple[str, Callable[[int, int, int], Data], Callable[[Data, Tensor, Tensor], Tensor]]] = {
    "padded": (
        "causal & key_padding(lengths)",
        lambda batch, tokens, documents: {"lengths": torch.randint(1, tokens + 1, (batch,))},
        lambda data, q, kv: (kv <= q) & (kv < data["lengths"].view(-1, 1, 1, 1)),
    ),
    "cu_seqlens": (
        "causal & document(cu_seqlens=cu)",
        lambda batch, tokens, documents: {"cu": for_each(batch, stops(tokens, documents))},
        lambda data, q, kv: (kv <= q) & same(numbers(data["cu"][0])),
    ),
    "document lengths": (
        "causal & document(lengths=lengths)",
        lambda batch, tokens, documents: {"lengths": for_each(batch, stops(tokens, documents).diff())},
        lambda data, q, kv: (kv <= q) & same(torch.repeat_interleave(torch.arange(data["lengths"].shape[1]), data["lengths"][0])),
    ),
    "contiguous ids": (
        "causal & document(ids, contiguous=True)",
        lambda batch, tokens, documents: {"ids": for_each(batch, numbers(stops(tokens, documents)))},
        lambda data, q, kv: (kv <= q) & same(data["ids"][0]),
    ),
    "ids, evaluated cell by cell": (
        "causal & document(ids)",
        lambda batch, tokens, documents: {"ids": torch.randint(0, documents, (batch, tokens))},
        lambda data, q, kv: (kv <= q) & (data["ids"][:, None, :, None] == data["ids"][:, None, None, :]),
    ),
    "no data, evaluated cell by cell": (
        "causal & ((q - kv) % 4 == 0)",
        lambda batch, tokens, documents: {},
        lambda data, q, kv: (kv <= q) & ((q - kv) % 4 == 0),
    ),
    "window": (
        "sliding_window(left=7, right=2)",
        lambda batch, tokens, documents: {},
        lambda data, q, kv: (q - kv <= 7) & (kv - q <= 2),
    ),
    "a window by a tensor": (
        "causal & (q - kv < w[b])",
        lambda batch, tokens, documents: {"w": torch.randint(1, tokens, (batch,))},
        lambda data, q, kv: (kv <= q) & (q - kv < data["w"].view(-1, 1, 1, 1)),
    ),
    "sink": ("sink_window(4, size=9)", lambda *sizes: {}, lambda data, q, kv: (kv <= q) & ((kv < 4) | (q - kv < 9))),
    "by kv_len": ("kv < kv_len - 3", lambda *sizes: {}, lambda data, q, kv: (kv < kv.numel() - 3).expand(q.numel(), -1)),
    "aligned right": ("causal(align='lower_right')", lambda *sizes: {}, lambda data, q, kv: kv <= q),
    "padding on the left": (
        "causal & key_padding(lengths, side='left')",
        lambda batch, tokens, documents: {"lengths": torch.randint(1, tokens + 1, (batch,))},
        lambda data, q, kv: (kv <= q) & (kv >= kv.numel() - data["lengths"].view(-1, 1, 1, 1)),
    ),
    "prefix": (
        "prefix_lm(n)",
        lambda batch, tokens, documents: {"n": torch.randint(1, tokens + 1, (batch,))},
        lambda data, q, kv: (kv <= q) | (kv < data["n"].view(-1, 1, 1, 1)),
    ),
    "heads": (
        "per_head([causal, sliding_window(left=3, right=0)])",
        lambda *sizes: {},
        lambda data, q, kv: torch.stack((kv <= q, (kv <= q) & (q - kv <= 3)))[None],
    ),
    "keys kept": (
        "causal & key_padding(keep=keep)",
        lambda batch, tokens, documents: {"keep": torch.rand(batch, tokens) < 0.8},
        lambda data, q, kv: (kv <= q) & data["keep"][:, None, None],
    ),
}


def same(ids: Tensor) -> Tensor:
    return ids[:, None] == ids


#: Batch, tokens and documents of each step.
TOGETHER = [
    (2 + rng.randrange(4), 24 + rng.randrange(300), 2 + rng.randrange(6)) for rng in [random.Random(0)] for _ in range(20)
]
ONE_BY_ONE = [(2 + (i > 9), 40 + 9 * min(i, 7), 3 + (i > 12)) for i in range(20)]


def checked_steps(
    compiled: Any, name: str, sizes: list[tuple[int, int, int]], channels: int = 8, score_mod: Callable[..., Tensor] | None = None
) -> Iterator[tuple[Tensor, Data]]:
    """Compares the output and the gradient of each step with the oracle, over which it yields."""
    torch.manual_seed(0)
    _, make, meaning = MASKS[name]
    for batch, tokens, documents in sizes:
        x, data = torch.randn(batch, HEADS, tokens, channels, requires_grad=True), make(batch, tokens, documents)
        yield x, data
        found, position = compiled(x, **data), torch.arange(tokens)
        cells = meaning(data, position[:, None], position)
        wanted = oracle.attention(x, x, x, cells.view((1,) * (4 - cells.dim()) + cells.shape), score_mod=score_mod)
        losses = (out.double().square().sum() for out in (found, wanted))
        one, other = (torch.autograd.grad(loss, x)[0] for loss in losses)
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


#: Graphs are counted with the cheapest; ``test_graphs_of_20_sizes`` has AOTAutograd in each run.
BACKENDS = pytest.mark.parametrize("backend", ["eager", *exhaustive(["aot_eager"])])


def attend(text: str) -> Callable[..., Tensor]:
    return lambda x, **data: attention(x, x, x, fm.parse(text, **data))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "order"),
    each_run(product(MASKS, ["one by one", "together"]), ("cu_seqlens", "one by one")),
)
def test_graphs_of_20_sizes(name: str, order: str) -> None:
    """At most 4 with the defaults of torch.compile: one for the first sizes, one for each size that starts to change later."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attend(MASKS[name][0]), fullgraph=True, backend=counter)
    for _ in checked_steps(compiled, name, TOGETHER[:8] if order == "together" else ONE_BY_ONE):
        pass
    assert counter.frame_count <= (3 if order == "together" else 4)


@pytest.mark.parametrize(
    ("name", "order"),
    each_run(product(["padded", "heads", "ids, evaluated cell by cell"], ["one by one", "together"]), ("padded", "together")),
)
@pytest.mark.slow
def test_graphs_of_20_sizes_with_a_score_mod(name: str, order: str) -> None:
    """As many, also where the score_mod captures a tensor that has a gradient."""
    torch._dynamo.reset()
    slopes = torch.linspace(-0.1, 0.2, HEADS, requires_grad=True)

    def tilted(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return score + slopes[h] * (q - kv)

    counter, text = CompileCounterWithBackend("aot_eager"), MASKS[name][0]
    attend = lambda x, **data: attention(x, x, x, fm.parse(text, **data), score_mod=tilted)  # noqa: E731
    compiled = torch.compile(attend, fullgraph=True, backend=counter)
    for x, data in checked_steps(compiled, name, TOGETHER[:5] if order == "together" else ONE_BY_ONE, score_mod=tilted):
        losses = (each(x, **data).square().sum() for each in (compiled, attend))
        one, other = (torch.autograd.grad(loss, slopes)[0] for loss in losses)
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
    assert counter.frame_count <= (3 if order == "together" else 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dynamic"),
    [("padded", True), *exhaustive([("cu_seqlens", True), *product(("cu_seqlens", "padded", "window"), [None])])],
)
def test_code_of_inductor_for_20_sizes(name: str, dynamic: bool | None) -> None:
    """In each run all sizes are dynamic from the first call on, so that there are fewer graphs to compile."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(attend(MASKS[name][0]), fullgraph=True, dynamic=dynamic, backend=counter)
    for _ in checked_steps(compiled, name, TOGETHER):
        pass
    assert counter.frame_count <= 3


#: Those of which each run has the traced graph: `eager` lowers a mask again at each call.
TRACED = ["ids, evaluated cell by cell", "heads"]
#: Those that each run has elsewhere: the first two in the tests of 20 sizes, windows in `sink`.
ELSEWHERE = ["cu_seqlens", "padded", "window"]
#: The one that is not slow.
QUICK = ["sink"]
UNTRACED = [name for name in MASKS if name not in TRACED + ELSEWHERE + QUICK]


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *product(QUICK, ["eager"]),
        *slow([*product(TRACED, ["aot_eager"]), *product(UNTRACED, ["eager"])]),
        *exhaustive([*product(QUICK + UNTRACED, ["aot_eager"]), *product(ELSEWHERE, ["eager", "aot_eager"])]),
    ],
)
def test_sizes_that_are_marked_as_dynamic(name: str, backend: str) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(attend(MASKS[name][0]), fullgraph=True, backend=counter)
    for x, data in checked_steps(compiled, name, [(2, 40, 3), (3, 57, 4), (5, 128, 2)]):
        for tensor, axes in ((x, (0, 2)), *((tensor, range(tensor.dim())) for tensor in data.values())):
            for axis in axes:
                torch._dynamo.mark_dynamic(tensor, axis)
    assert counter.frame_count == 1


@BACKENDS
@pytest.mark.slow
def test_a_batch_and_a_document_of_one(backend: str) -> None:
    """Torch makes a graph of its own for a size of 1."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(attend(MASKS["cu_seqlens"][0]), fullgraph=True, backend=counter)
    sizes = [(2, 40, 3), (3, 57, 4), (1, 57, 4), (1, 90, 2), (3, 66, 1), (2, 130, 1), (5, 7, 2)]
    for _ in checked_steps(compiled, "cu_seqlens", sizes):
        pass
    assert counter.frame_count == 4


class Model(nn.Module):
    """A layer whose mask has parameters, and one that is given a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.first = fm.MultiheadFlexAttention(16, 16, 2, mask="causal & document(cu_seqlens=cu)")
        self.second = fm.MultiheadFlexAttention(16, 16, 2)

    def forward(self, x: Tensor, mask: fm.Mask, cu: Tensor) -> Tensor:
        found = self.second(self.first(x, cu=cu), mask)
        assert isinstance(found, Tensor)
        return found


@BACKENDS
@pytest.mark.slow
def test_layers(backend: str) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    model = Model()
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for batch, tokens, documents in TOGETHER[:5]:
        cu, x = for_each(batch, stops(tokens, documents)), torch.randn(batch, tokens, 16)
        mask = fm.causal() & fm.key_padding(torch.randint(1, tokens + 1, (batch,)))
        found, wanted = compiled(x, mask, cu), model(x, mask, cu)
        grads = [torch.autograd.grad(out.square().sum(), list(model.parameters())) for out in (found, wanted)]
        for one, other in zip((found, *grads[0]), (wanted, *grads[1]), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert counter.frame_count <= 3


@pytest.mark.slow
@BACKENDS
def test_layers_of_sizes_that_are_marked_as_dynamic(backend: str) -> None:
    """Also where the number of blocks of a BlockMask changes, with 128 tokens."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    layer = fm.MultiheadFlexAttention(16, 16, 2)
    mask = fm.causal() & fm.sliding_window(left=9, right=0)
    compiled = torch.compile(lambda x, n: layer(x, mask & fm.key_padding(n)), fullgraph=True, backend=counter)
    for batch, tokens in ((2, 32), (3, 129), (4, 300), (3, 20)):
        x, n = torch.randn(batch, tokens, 16), torch.randint(1, tokens, (batch,))
        for tensor, axes in ((x, (0, 1)), (n, (0,))):
            for axis in axes:
                torch._dynamo.mark_dynamic(tensor, axis)
        torch.testing.assert_close(compiled(x, n), layer(x, mask & fm.key_padding(n)), rtol=1e-5, atol=1e-5)
    assert counter.frame_count == 1


def test_offsets_that_are_numbers() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    query, key = torch.randn(2, 2, 3, 8), torch.randn(2, 2, 40, 8)
    compiled = torch.compile(
        lambda at: attention(query, key, key, fm.sliding_window(left=5, right=0), q_offset=at), fullgraph=True, backend=counter
    )
    q, kv = torch.arange(3)[:, None], torch.arange(40)
    for at in (0, 9, 17, 37, 20):
        distance = q + at - kv
        wanted = oracle.attention(query, key, key, ((distance >= 0) & (distance <= 5))[None, None])
        torch.testing.assert_close(compiled(at).double(), wanted, rtol=1e-5, atol=1e-5)
    assert counter.frame_count <= 3


def test_a_mask_as_an_argument_of_a_checkpoint() -> None:
    layer, x, n = fm.MultiheadFlexAttention(16, 16, 2), torch.randn(2, 9, 16), torch.tensor([9, 4])
    saved = torch.utils.checkpoint.checkpoint
    compiled = torch.compile(
        lambda x, *mask, **data: saved(layer, x, *mask, use_reentrant=False, **data), fullgraph=True, backend="eager"
    )
    torch.testing.assert_close(compiled(x, "causal & key_padding(n)", n=n), layer(x, fm.causal() & fm.key_padding(n)))
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"checkpoint takes no mask as an argument: give the layer"):
        compiled(x, fm.causal())


@pytest.mark.slow
def test_sizes_that_contradict_each_other() -> None:
    compiled = torch.compile(attend(MASKS["contiguous ids"][0]), fullgraph=True, backend="eager")
    for tokens in (40, 50, 60):
        compiled(torch.randn(2, 2, tokens, 8), ids=torch.zeros(2, tokens, dtype=torch.int64))
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"has 61 values along q, but q_len is 60"):
        compiled(torch.randn(2, 2, 60, 8), ids=torch.zeros(2, 61, dtype=torch.int64))


@pytest.mark.parametrize("name", ["padded", *slow(["cu_seqlens"]), *exhaustive(["window", "heads"])])
def test_export_with_a_dynamic_length(name: str) -> None:
    text, make, _ = MASKS[name]

    class Attend(nn.Module):
        def forward(self, x: Tensor, data: Data) -> Tensor:
            return attend(text)(x, **data)

    length, batch = torch.export.Dim("length", min=2, max=4096), torch.export.Dim("batch", min=2, max=64)
    data = make(3, 40, 4)
    shapes = {"x": {0: batch, 2: length}, "data": {key: {0: batch} for key in data}}
    program = torch.export.export(Attend(), (torch.randn(3, 2, 40, 8), data), dynamic_shapes=shapes, strict=False)
    for number, tokens in ((3, 40), (2, 129), (5, 64)):
        x, data = torch.randn(number, 2, tokens, 8), make(number, tokens, 4)
        torch.testing.assert_close(program.module()(x, data), attend(text)(x, **data), rtol=1e-5, atol=1e-5)


def test_export_of_a_layer_with_a_dynamic_length() -> None:
    layer, length = (
        fm.MultiheadFlexAttention(16, 16, 2, mask="causal & sliding_window(size=7)"),
        torch.export.Dim("length", min=2, max=4096),
    )
    program = torch.export.export(layer, (torch.randn(2, 40, 16),), dynamic_shapes=({1: length},), strict=False)
    for tokens in (2, 129, 64):
        x = torch.randn(2, tokens, 16)
        torch.testing.assert_close(program.module()(x), layer(x), rtol=1e-5, atol=1e-5)
