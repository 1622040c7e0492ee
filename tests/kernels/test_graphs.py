"""Masks made in code that torch.compile traces, in FlexAttention's CUDA kernels, and models that generate text with them.

What a mask is computed from is then a part of the graph, which Inductor may write into the code of the kernels. Several masks
share a graph, since each graph takes seconds to compile.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.runtime.triton_heuristics import CachingAutotuner

import flexmask as fm
from flexmask.backends.backend import Backend, Call, backend_names, get_backend
from flexmask.expr.names import NAMES
from tests.kernels.interpreted import virtual_gpu
from tests.support import oracle
from tests.support.examples import EXAMPLES
from tests.support.exhaustive import each_run
from tests.support.pages import blocks_of, run_page

pytestmark = [
    pytest.mark.kernels,
    # What a kernel computes of scores at -inf and does not take, NumPy warns of in the interpreter, and no GPU does.
    pytest.mark.filterwarnings("ignore:(invalid value|divide by zero|overflow) encountered:RuntimeWarning"),
]

ROOT = Path(__file__).parents[2]
#: Pages that compile no FlexAttention: the code of one ends in errors before, and that of the other takes varlen's kernels.
OTHER_PAGES = {"errors.md", "varlen.md"}
#: The pages that compile code with it.
PAGES = [
    str(page.relative_to(ROOT))
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if page.name not in OTHER_PAGES
    and any("torch.compile(" in block.code for block in blocks_of(page) if block.language == "python")
]
#: The arguments of a layer up to its heads, and its channels.
LAYER = re.compile(r"(MultiheadFlexAttention\(\d+, (\d+), )\d+")
BATCH = 2


def attentions() -> int:
    """How many kernels of attention were launched: those of Inductor's templates, named for all that is fused into them."""
    return sum(name.startswith("triton_tem_") for name in virtual_gpu.launched)


def attend(query: Tensor, key: Tensor, value: Tensor, masks: Sequence[fm.Mask | str]) -> list[Tensor]:
    return [fm.attention(query, key, value, mask, backend="flex") for mask in masks]


def inputs(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = torch.randn(3, BATCH, 1, tokens, 16)
    return query, key, value


ENDS, WINDOW = torch.tensor([130, 7]), fm.sliding_window(size=50)
#: Masks that a graph makes, and what they mean. All but the first three have data.
MADE: dict[str, tuple[Callable[[Tensor], fm.Mask], Callable[..., Tensor]]] = {
    "causal": (lambda ends: fm.causal(), lambda b, q, kv: kv <= q),
    "window": (lambda ends: fm.causal() & WINDOW, lambda b, q, kv: (kv <= q) & (q - kv < 50)),
    "sink": (lambda ends: fm.masks.sink_window(4, size=50), lambda b, q, kv: (kv <= q) & ((q - kv < 50) | (kv < 4))),
    "padding": (lambda ends: fm.causal() & fm.key_padding(ends), lambda b, q, kv: (kv <= q) & (kv < ENDS[b])),
    "documents": (
        lambda ends: fm.document(lengths=torch.stack((ends, 130 - ends), 1)) & fm.key_padding(ends + 100),
        lambda b, q, kv: ((q < ENDS[b]) == (kv < ENDS[b])) & (kv < ENDS[b] + 100),
    ),
    "prefix and window": (
        lambda ends: fm.key_padding(ends // 2) | WINDOW | (fm.q >= fm.table(ends)[fm.b]),
        lambda b, q, kv: (kv < ENDS[b] // 2) | ((kv <= q) & (q - kv < 50)) | (q >= ENDS[b]),
    ),
    "drafts": (
        lambda ends: fm.masks.draft_blocks(ends // 3, 20),
        lambda b, q, kv: (kv < ENDS[b] // 3) | (((kv - ENDS[b] // 3) // 20 == q // 20) & (kv - ENDS[b] // 3 <= q)),
    ),
    "gap": (  # that is the same for all sequences
        lambda ends: fm.causal() & fm.masks.qk_sparse(ends[1:] * 4, ends[1:] * 5),
        lambda b, q, kv: (kv <= q) & ((kv < 28) | (kv >= 63) | (q >= 63)),
    ),
}
#: Those with data, in two graphs.
WITH_DATA = "padding, documents", "prefix and window, drafts, gap"


@pytest.mark.parametrize("names", each_run(["causal, window, sink", *WITH_DATA], WITH_DATA[0]))
def test_gradients(backend: Any, names: str) -> None:
    made = {name: MADE[name] for name in names.split(", ")}
    masks, meanings = zip(*made.values(), strict=True)
    query, key, value = inputs(130)  # from 128 on torch takes the kernel for prompts
    tensors = query.requires_grad_(), key.requires_grad_(), value.requires_grad_()

    def step(query: Tensor, key: Tensor, value: Tensor, ends: Tensor) -> list[Tensor]:
        return attend(query, key, value, [mask(ends) for mask in masks])

    found = torch.compile(step, backend=backend, fullgraph=True)(*tensors, ENDS)
    b, q, kv = torch.meshgrid(torch.arange(BATCH), torch.arange(130), torch.arange(130), indexing="ij")
    for name, out, meaning in zip(made, found, meanings, strict=True):
        wanted = oracle.attention(*tensors, meaning(b, q, kv)[:, None])
        losses = out.square().sum(), wanted.square().sum()
        pairs = [(out, wanted), *zip(*(torch.autograd.grad(loss, tensors, retain_graph=True) for loss in losses), strict=True)]
        for one, other in pairs:
            torch.testing.assert_close(one.double(), other.double(), rtol=1e-4, atol=1e-5, msg=partial("{}: {}".format, name))
    assert attentions() >= 3 * len(made)  # backward takes two for each


@pytest.mark.exhaustive
@pytest.mark.parametrize("more", [0, 64])
def test_documents_of_several_lengths(backend: Any, more: int) -> None:
    """They are compared by class, without an order of positions, also at lengths that are symbols, and with more keys."""
    code: list[str] = []

    def compiler(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        code.append(graph.print_readable(print_output=False))
        return backend(graph, inputs)

    def step(query: Tensor, keys: Tensor, ends: Tensor, key_ends: Tensor) -> Tensor:
        mask = fm.masks.cross_document(q_cu_seqlens=ends, kv_cu_seqlens=key_ends) if more else fm.document(cu_seqlens=ends)
        key, value = keys.chunk(2, -1)
        return attend(query, key, value, [mask])[0]

    compiled = torch.compile(step, backend=compiler, fullgraph=True)
    for tokens in (130, 257, 384):
        query, keys = torch.randn(1, 1, tokens, 16, requires_grad=True), torch.randn(1, 1, tokens + more, 32, requires_grad=True)
        ends = torch.tensor([0, 50, tokens]), torch.tensor([0, 50 + more // 2, tokens + more])
        is_first = torch.arange(tokens) < 50, torch.arange(tokens + more) < 50 + more // 2
        found = compiled(query, keys, *ends)
        key, value = keys.chunk(2, -1)
        wanted = oracle.attention(query, key, value, is_first[0][:, None] == is_first[1])
        grads = [torch.autograd.grad(out.square().sum(), (query, keys)) for out in (found, wanted)]
        for one, other in ((found, wanted), *zip(*grads, strict=True)):
            torch.testing.assert_close(one.double(), other.double(), rtol=1e-4, atol=1e-5)
    assert len(code) == 2 + bool(more)  # of the symbols, those of blocks of queries and of keys are the same at 257 alone
    assert all("same_class" in graph for graph in code)


def test_documents_of_few_queries(backend: Any) -> None:
    """Which torch's kernel for decoding takes."""
    query, key, value = inputs(6)

    def step(query: Tensor, key: Tensor, value: Tensor, ends: Tensor) -> list[Tensor]:
        masks = [fm.document([0, 0, 1, 1, 1, 1]), fm.document(cu_seqlens=ends), fm.query_padding(ends[1])]
        return attend(query, key, value, masks)

    found = torch.compile(step, backend=backend, fullgraph=True)(query, key, value, torch.tensor([0, 2, 6]))
    is_first = torch.arange(6) < 2
    same = is_first[:, None] == is_first
    for out, cells in zip(found, (same, same, is_first[:, None].expand(6, 6)), strict=True):
        wanted = oracle.attention(query, key, value, cells)
        torch.testing.assert_close(out.double(), wanted.double(), rtol=1e-4, atol=1e-5)
    assert attentions() == 3


def test_contiguous_blocks(backend: Any) -> None:
    """A causal mask alone, with several blocks of each kind in its lists, of which the kernels read the first alone.

    Nor do they test for rows that attend to nothing.
    """
    query, key, value = (tensor.requires_grad_() for tensor in torch.randn(3, 1, 1, 384, 16))
    code: list[str] = []

    def compiler(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        code.append(graph.code)
        return backend(graph, inputs)

    found = torch.compile(lambda query, key, value: attend(query, key, value, ["causal"])[0], backend=compiler, fullgraph=True)(
        query, key, value
    )
    assert "'BLOCKS_ARE_CONTIGUOUS': True, 'ROWS_GUARANTEED_SAFE': True" in code[0]
    wanted = oracle.attention(query, key, value, torch.ones(384, 384, dtype=torch.bool).tril())
    losses = found.square().sum(), wanted.square().sum()
    for one, other in [(found, wanted), *zip(*(torch.autograd.grad(loss, (query, key, value)) for loss in losses), strict=True)]:
        torch.testing.assert_close(one.double(), other.double(), rtol=1e-4, atol=1e-5)


def test_changing_lengths(backend: Any) -> None:
    """The first graph is for its lengths alone, as of any model; one graph serves all others."""

    def step(query: Tensor, key: Tensor, value: Tensor, ends: Tensor, cu: Tensor) -> list[Tensor]:
        masks = [fm.causal() & fm.document(cu_seqlens=cu) & fm.key_padding(ends), fm.sliding_window(size=50)]
        return attend(query, key, value, masks)

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(step, backend=backend, fullgraph=True)
    for tokens, batch, stops in zip((130, 257, 384), (2, 3, 2), ([60], [50, 200], [1, 128, 300]), strict=True):
        query, key, value = (tensor.requires_grad_() for tensor in torch.randn(3, batch, 1, tokens, 16))
        ends, cu = torch.randint(1, tokens, (batch,)), torch.tensor([0, *stops, tokens]).expand(batch, -1).contiguous()
        b, q, kv = torch.meshgrid(torch.arange(batch), torch.arange(tokens), torch.arange(tokens), indexing="ij")
        number = torch.bucketize(torch.arange(tokens), torch.tensor(stops), right=True)
        causal = kv <= q
        meanings = [causal & (number[q] == number[kv]) & (kv < ends[b]), causal & (q - kv < 50)]
        found = compiled(query, key, value, ends, cu)
        wanted = [oracle.attention(query, key, value, meaning[:, None]) for meaning in meanings]
        sides = [
            (*outs, *torch.autograd.grad(torch.stack([out.square().sum() for out in outs]).sum(), (query, key, value)))
            for outs in (found, wanted)
        ]
        for one, other in zip(*sides, strict=True):
            torch.testing.assert_close(one.double(), other.double(), rtol=1e-4, atol=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


#: How many masks share a graph.
SHARE = 4


@pytest.mark.parametrize("first", each_run(range(0, len(EXAMPLES), SHARE), 16))
def test_named_masks(first: int, backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has code for the GPU. It is not run: on the CPU other tests compare each mask, and here kernels of each kind."""
    compiled: list[str] = []
    monkeypatch.setattr(CachingAutotuner, "run", lambda kernel, *args, **options: compiled.append(kernel.fn.__name__))
    examples = {name: EXAMPLES[name][0] for name in list(EXAMPLES)[first : first + SHARE]}

    def made(query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        masks = [NAMES[name](**arguments) for name, (arguments, _) in examples.items()]
        return attend(query, key, value, masks)

    with torch.no_grad():
        out = torch.compile(made, backend=backend, fullgraph=True)(*inputs(4))
    assert len(out) == len(examples)
    assert sum(name.startswith("triton_tem_") for name in compiled) == len(examples)


def test_steps_of_a_cache(backend: Any) -> None:
    layer = fm.MultiheadFlexAttention(64, 64, n_heads=4, n_kv_heads=2, backend="flex")
    plain = fm.MultiheadFlexAttention(64, 64, n_heads=4, n_kv_heads=2, backend="sdpa")
    plain.load_state_dict(layer.state_dict())
    mask, x = fm.causal() & fm.sliding_window(size=50), torch.randn(2, 132, 64)
    cache = fm.KVCache(256)
    step = torch.compile(lambda tokens: layer(tokens, mask, cache=cache), backend=backend, fullgraph=True)
    with torch.no_grad():
        found = torch.cat([step(tokens) for tokens in x.split([130, 1, 1], 1)], 1)
        torch.testing.assert_close(found, plain(x, mask), rtol=0, atol=1e-5)
    assert attentions() >= 3


def prefer_flex(monkeypatch: pytest.MonkeyPatch, when: Callable[[], bool]) -> None:
    """Has "auto" try flex first, as on CUDA."""

    def ordered(call: Call) -> list[Backend]:
        return sorted(map(get_backend, backend_names()), key=lambda backend: (backend.name == "flex") != when())

    monkeypatch.setattr("flexmask.backends.backend.ordered_backends", ordered)


@pytest.mark.parametrize("page", each_run(PAGES, "README.md"))
def test_pages(page: str, backend: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a page compiles runs on the GPU, in heads of the fewest channels that FlexAttention takes there."""
    plain = torch.compile

    def compiled(model: Any = None, **options: Any) -> Any:
        if model is None:
            return partial(compiled, **options)
        own = options.get("backend")

        def both(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
            if callable(own):  # the page's own, which counts graphs
                own(graph, inputs)
            return backend(graph, inputs)

        return plain(model, **{**options, "backend": both})

    def widened(code: str) -> str:
        return LAYER.sub(lambda found: f"{found[1]}{int(found[2]) // 16}", code)

    # Outside of compiled code each kernel takes seconds, and other tests have it.
    prefer_flex(monkeypatch, torch.compiler.is_compiling)
    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.chdir(tmp_path)
    run_page(ROOT / page, widened)
    assert attentions()


#: Settings of transformers' config classes: each prompt of 40 tokens is longer than a tile of the decoding kernel for 4 heads.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "grouped queries": ("LlamaConfig", {"num_key_value_heads": 1}),
    "sliding window": ("MistralConfig", {"num_key_value_heads": 2, "sliding_window": 7}),
    "heads of their own": ("LlamaConfig", {"num_key_value_heads": 4}),
}
SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
NEW_TOKENS = 3


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("kind", each_run(MODELS, "grouped queries"))
def test_generated_tokens(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    importlib.import_module("flexmask_transformers")
    name, options = MODELS[kind]
    config = getattr(transformers, name)(**SIZES, **options)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    prompt = torch.randint(1, 64, (2, 40))
    keep = torch.ones_like(prompt)
    keep[1, :5] = 0

    def generated() -> Any:
        call = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
        return model.generate(prompt, attention_mask=keep, eos_token_id=None, pad_token_id=0, **call)

    wanted = generated()
    assert not attentions()
    prefer_flex(monkeypatch, lambda: True)
    model.set_attn_implementation("flexmask")
    found = generated()
    assert found.sequences.tolist() == wanted.sequences.tolist()
    torch.testing.assert_close(found.logits, wanted.logits, rtol=0, atol=1e-5)
    assert attentions(), "the prompt, at least, takes FlexAttention"
