"""flexmask's masks in graphs of torch.compile: attention in tiles, masks of your own, and one graph for all data."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from flexmask_transformers import use_mask
from hf_models import gradients, make_pair, one_layer, padding, pair, tokens
from test_hf_masks import positions
from test_hf_models import CLOSE, documents_alone
from torch._dynamo.utils import counters
from torch.testing import assert_close
from transformers import DynamicCache, StaticCache

import flexmask
from flexmask import causal, document

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*removed in v6:FutureWarning"),  # names of transformers 5 for checkpointing
]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def compiled(model: Any, **options: Any) -> tuple[Any, list[str]]:
    """A compiled model, and the names of the functions in its graphs."""
    names: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        names.extend(getattr(node.target, "__name__", str(node.target)) for node in graph.graph.nodes)
        return graph

    return torch.compile(model, backend=backend, fullgraph=True, **options), names


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("gemma3", "cu_seq_lens_q"),
        *(pytest.param(name, "position_ids", marks=pytest.mark.exhaustive) for name in ("llama", "gemma3")),
    ],
)
def test_packed_rows_attend_in_tiles(name: str, given: str) -> None:
    eager, ours = one_layer(name) if name == "llama" else pair(name)
    model, names = compiled(ours)
    for lengths in ((5, 7), (3, 9), (4, 8)) if given == "cu_seq_lens_q" else ((5, 7), (3, 2, 7), (12,)):
        ids = tokens(1, seed=lengths[0])
        packing = positions(*lengths)
        if given == "cu_seq_lens_q":
            packing = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
        found = model(ids, position_ids=positions(*lengths), **({} if given == "position_ids" else {given: packing})).logits
        assert_close(found, documents_alone(eager, ids, lengths), **CLOSE)
    assert counters["stats"]["unique_graphs"] == 1
    assert "scaled_dot_product_attention" not in names


@pytest.mark.parametrize(
    "argument", ["position_ids", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("cu_seq_lens_q", "seq_idx"))]
)
def test_lengths_that_change_have_one_more_graph(argument: str) -> None:
    """Also with what collators give next to the positions."""
    eager, ours = one_layer("llama")
    model, _ = compiled(ours)
    for lengths in ((5, 7), (5, 8), (3, 2), (6, 4), (1, 8)):
        ids, places = tokens(1, sum(lengths), seed=lengths[0]), positions(*lengths)
        of = {"cu_seq_lens_q": torch.tensor([0, lengths[0], sum(lengths)]), "seq_idx": (places == 0).cumsum(-1)}
        found = model(ids, **{"position_ids": places, argument: of.get(argument, places)}, use_cache=False).logits
        assert_close(found, documents_alone(eager, ids, lengths), **CLOSE)
    assert counters["stats"]["unique_graphs"] == 2


IDS = [torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 2]]), torch.tensor([[0] * 6 + [1] * 6])]


def test_use_mask_with_other_data() -> None:
    _, ours = one_layer("llama")
    model, _ = compiled(ours)
    for ids in IDS:
        with use_mask(ours, "document(ids)", ids=ids):
            found, wanted, again = (own(tokens(1)).logits for own in (model, ours, model))
        assert_close(found, wanted, **CLOSE)
        assert torch.equal(found, again)
    assert counters["stats"]["unique_graphs"] == 1
    plain = model(tokens(1)).logits
    assert_close(plain, ours(tokens(1)).logits, **CLOSE)
    assert not torch.allclose(plain, found)


def test_use_mask_at_lengths_that_change_has_one_more_graph() -> None:
    _, ours = one_layer("llama")
    model, _ = compiled(ours)
    for length in (12, 10, 9, 7):
        ids = torch.arange(length)[None] // 5
        with use_mask(ours, causal() & document(ids)):
            found, wanted = (own(tokens(1, length), use_cache=False).logits for own in (model, ours))
        assert_close(found, wanted, **CLOSE)
    assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.parametrize("name", ["gemma3", "gpt_oss"])
def test_use_mask_in_place_of_the_models_own(name: str) -> None:
    _, ours = one_layer(name) if name == "gpt_oss" else pair(name)
    model, _ = compiled(ours)
    masks: dict[str, Any] = {"full_attention": "document(ids)", "sliding_attention": causal() & document(flexmask.param("ids"))}
    with use_mask(ours, masks, combine="replace", ids=IDS[0]):
        found, wanted = (own(tokens(1)).logits for own in (model, ours))
    assert_close(found, wanted, **CLOSE)


def test_a_mask_as_attention_mask() -> None:
    """Also in place of chunks."""
    _, ours = one_layer("llama4")
    mask = "causal & sliding_window(size=3)"
    model, _ = compiled(ours)
    assert_close(model(tokens(1), attention_mask=mask).logits, ours(tokens(1), attention_mask=mask).logits, **CLOSE)


def test_gradient_checkpointing() -> None:
    eager, ours = one_layer("llama")
    ours.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model: Any = torch.compile(ours, backend="aot_eager", fullgraph=True)
    wanted = gradients(eager, documents_alone(eager, tokens(1), (5, 7)).square().sum())
    found = gradients(ours, model(tokens(1), position_ids=positions(5, 7), use_cache=False).logits.square().sum())
    ours.gradient_checkpointing_disable()
    for name in wanted:
        assert_close(found[name], wanted[name], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("name", "combine"), [("llama", "and"), ("mistral", "replace")])
def test_a_mask_of_your_own_behind_other_tokens(name: str, combine: Any) -> None:
    _, ours = one_layer(name)
    cache = ours(tokens(1), use_cache=True).past_key_values
    model, _ = compiled(ours)
    refused = pytest.raises(torch._dynamo.exc.Unsupported, match="as many queries as keys")
    with refused, use_mask(ours, "sliding_window(size=6)", combine=combine):
        model(tokens(1, 2), past_key_values=cache)


@pytest.mark.parametrize(
    ("name", "is_static"),
    [
        ("llama", False),
        ("gemma3", True),
        *(pytest.param("mistral", is_static, marks=pytest.mark.exhaustive) for is_static in (False, True)),
    ],
)
def test_tokens_one_by_one_behind_a_cache(name: str, is_static: bool) -> None:
    """The number of tokens in a cache is an int that varies, also in the layers of a static cache that have a window."""
    eager, ours = one_layer(name)
    model, _ = compiled(ours)
    cache = StaticCache(config=ours.config, max_cache_len=16) if is_static else DynamicCache(config=ours.config)
    keep = padding("left")
    places = (keep.cumsum(-1) - 1).clamp(min=0)
    wanted = eager(tokens(), attention_mask=keep, position_ids=places).logits
    with torch.no_grad():
        for start, stop in ((0, 7), *((start, start + 1) for start in range(7, 11))):
            given = {"attention_mask": keep[:, :stop], "position_ids": places[:, start:stop], "past_key_values": cache}
            found = model(tokens()[:, start:stop], **given).logits
            real = keep[:, start:stop].bool()
            assert_close(found[real], wanted[:, start:stop][real], **CLOSE)
    assert counters["stats"]["unique_graphs"] <= 3  # of the prompt, of one token, and of one behind a number that varies


@pytest.mark.parametrize("name", ["gemma3", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("llama", "bart"))])
def test_generate_with_masks_made_outside_of_the_graph(name: str) -> None:
    """With a static cache transformers makes the masks of a prompt before it calls the model."""
    eager, ours = make_pair(type(pair(name)[0]), lambda: copy.deepcopy(pair(name)[0].config))
    given: dict[str, Any] = {"attention_mask": padding("left"), "cache_implementation": "static", "disable_compile": True}
    given |= {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    ours.forward = compiled(ours.forward)[0]
    assert ours.generate(tokens(), **given).tolist() == eager.generate(tokens(), **given).tolist()
    assert counters["stats"]["unique_graphs"] == 2  # of the prompt and of one token
