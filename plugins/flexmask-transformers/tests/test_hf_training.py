"""Training on the CPU: dropout, gradient checkpointing and torch.compile. The Trainer is in ``test_hf_trainer``."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch
import transformers
from hf_models import TEXT, gradients, initialise, make_pair, one_layer, padding, pair, tokens
from test_hf_masks import positions
from test_hf_models import CLOSE, documents_alone
from torch._dynamo.utils import counters
from torch.testing import assert_close

pytestmark = pytest.mark.filterwarnings("ignore:.*removed in v6:FutureWarning")  # names of transformers 5 for checkpointing


def model(**options: Any) -> Any:
    config = transformers.LlamaConfig(**{**TEXT, **options})
    made = transformers.LlamaForCausalLM._from_config(config, attn_implementation="flexmask")
    initialise(made)
    return made.train()


class TestDropout:
    def loss(self, own: Any, seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        loss = own(tokens(1), labels=tokens(1), position_ids=positions(5, 7)).loss
        assert isinstance(loss, torch.Tensor)
        return loss

    def test_it_follows_the_generator_and_stops_in_evaluation(self) -> None:
        own = model(attention_dropout=0.5)
        assert torch.equal(self.loss(own, 1), self.loss(own, 1))
        assert not torch.equal(self.loss(own, 1), self.loss(own, 2))
        own.eval()
        assert torch.equal(self.loss(own, 1), self.loss(own, 2))

    def test_its_mean_is_attention_without_dropout(self) -> None:
        config = transformers.LlamaConfig(**TEXT, attention_dropout=0.5)
        layer = transformers.models.llama.modeling_llama.LlamaAttention(config, 0).train()
        draw = torch.Generator().manual_seed(0)
        query, key, value = (torch.randn(1, heads, 6, 8, generator=draw).expand(16000, -1, -1, -1) for heads in (4, 2, 2))
        attend = transformers.AttentionInterface()["flexmask"]
        exact = attend(layer, query, key, value, None)[0]
        torch.manual_seed(0)
        found = attend(layer, query, key, value, None, dropout=0.5)[0]
        assert_close(found.mean(0), exact[0], rtol=0, atol=0.15)  # five standard deviations

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_gradient_checkpointing_repeats_it(self, reentrant: bool) -> None:
        own = model(attention_dropout=0.5)
        wanted = gradients(own, self.loss(own, 1))
        own.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        if reentrant:
            own.enable_input_require_grads()
        found = gradients(own, self.loss(own, 1))
        for name in wanted:
            assert_close(found[name], wanted[name], rtol=1e-5, atol=1e-6)


class TestCompile:
    def test_several_rows_without_a_mask(self) -> None:
        """Transformers then makes positions for one row."""
        _, ours = one_layer("llama")
        compiled: Any = torch.compile(ours, backend="eager", fullgraph=True)
        ids = tokens(2)
        assert_close(compiled(ids).logits, ours(ids).logits, **CLOSE)
        torch.compiler.reset()

    @pytest.mark.parametrize("name", ["gemma3", "t5", pytest.param("bert", marks=pytest.mark.exhaustive)])
    def test_one_graph_for_all_padding(self, name: str) -> None:
        eager, ours = one_layer(name)
        counters.clear()
        compiled: Any = torch.compile(ours, backend="eager", fullgraph=True)
        others = {"decoder_input_ids": tokens(2, 7, seed=1)} if name == "t5" else {}
        for keep in (padding("right"), padding("left"), torch.ones(2, 12, dtype=torch.int64)):
            found = compiled(tokens(), attention_mask=keep, **others).logits
            wanted = eager(tokens(), attention_mask=keep, **others).logits
            real = slice(None) if others else keep.bool()
            assert_close(found[real], wanted[real], **CLOSE)
        assert counters["stats"]["unique_graphs"] == 1
        torch.compiler.reset()

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "name", ["gpt_oss", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("llama4", "gemma2"))]
    )
    def test_one_graph_for_documents_and_padding(self, name: str) -> None:
        """With sinks, soft-capping and chunks, where attention is dense."""
        eager, ours = pair(name) if name == "gpt_oss" else one_layer(name)
        counters.clear()
        compiled: Any = torch.compile(ours, backend="eager", fullgraph=True)
        for keep, places, parts in (
            (torch.ones(1, 12, dtype=torch.int64), positions(3, 2, 7), ((0, 3), (3, 5), (5, 12))),
            (
                torch.tensor([[1, 1, 1, 1, 0, 0, 1, 1, 1, 0, 1, 1]]),
                torch.tensor([[0, 1, 2, 3, 1, 1, 0, 1, 2, 7, 0, 1]]),
                ((0, 4), (6, 9), (10, 12)),
            ),
            (padding("left")[1:], (padding("left")[1:].cumsum(-1) - 1).clamp(min=0), ((3, 12),)),
        ):
            found = compiled(tokens(1), attention_mask=keep, position_ids=places).logits
            for start, stop in parts:
                assert_close(found[:, start:stop], eager(tokens(1)[:, start:stop]).logits, **CLOSE)
        assert counters["stats"]["unique_graphs"] == 1
        torch.compiler.reset()

    @pytest.mark.slow
    def test_gradients(self) -> None:
        eager, ours = one_layer("llama")
        compiled: Any = torch.compile(ours, backend="aot_eager", fullgraph=True)
        wanted = gradients(eager, documents_alone(eager, tokens(1), (5, 7)).square().sum())
        found = gradients(ours, compiled(tokens(1), position_ids=positions(5, 7)).logits.square().sum())
        for name in wanted:
            assert_close(found[name], wanted[name], rtol=1e-3, atol=1e-3)
        torch.compiler.reset()

    def test_mixed_precision(self) -> None:
        eager, ours = one_layer("llama")
        compiled: Any = torch.compile(ours, backend="eager", fullgraph=True)
        wanted = eager(tokens()).logits
        with torch.autocast("cpu", torch.bfloat16):
            found = compiled(tokens()).logits
        assert found.dtype == torch.bfloat16
        assert (found - wanted).norm() < 0.02 * wanted.norm()
        torch.compiler.reset()

    @pytest.mark.slow
    def test_the_first_forwards_of_a_thread(self) -> None:
        eager, ours = one_layer("llama")

        def run() -> torch.Tensor:
            torch.compiler.reset()
            compiled: Any = torch.compile(ours, backend="eager", fullgraph=True)
            return cast("torch.Tensor", compiled(tokens()).logits)

        with ThreadPoolExecutor(1) as pool:
            for found in (pool.submit(run).result(), pool.submit(run).result()):
                assert_close(found, eager(tokens()).logits, **CLOSE)
        torch.compiler.reset()

    def test_layers_that_are_compiled_one_by_one(self) -> None:
        eager, ours = make_pair(transformers.LlamaForCausalLM, lambda: transformers.LlamaConfig(**TEXT))
        for layer in ours.model.layers:
            layer.compile(backend="eager")
        keep = padding("left")
        found, wanted = (own(tokens(), attention_mask=keep).logits for own in (ours, eager))
        assert_close(found[keep.bool()], wanted[keep.bool()], **CLOSE)
        torch.compiler.reset()

    @pytest.mark.slow
    def test_generation_with_a_static_cache_has_one_graph(self) -> None:
        eager, ours = pair("gemma3")
        counters.clear()
        compile_config = transformers.CompileConfig(backend="eager", mode=None, fullgraph=True)
        compile_config._compile_all_devices = True
        options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        for keep in (padding("left", 8), torch.ones(2, 8, dtype=torch.int64)):
            wanted = eager.generate(tokens(2, 8), attention_mask=keep, **options)
            static = {"cache_implementation": "static", "compile_config": compile_config}
            assert ours.generate(tokens(2, 8), attention_mask=keep, **options, **static).tolist() == wanted.tolist()
        assert 1 <= counters["stats"]["unique_graphs"] <= 2  # the second where lengths became dynamic
        torch.compiler.reset()
