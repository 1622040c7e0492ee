"""The masks of layers, masks of the user, and tensors of transformers as masks."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import flexmask_transformers
import pytest
import torch
import transformers
from flexmask_transformers import user_masks
from hf_models import of_transformers, padding, pair, tokens
from torch.testing import assert_close
from transformers import masking_utils

import flexmask
from flexmask import causal, document, sliding_window
from flexmask.errors import ExpressionError, LoweringError, OperandError

LAST = "model.layers.1.self_attn"


def positions(*lengths: int) -> torch.Tensor:
    return torch.cat([torch.arange(length) for length in lengths])[None]


class TestMasksOf:
    @pytest.mark.parametrize(
        ("name", "layer", "inputs", "text"),
        [
            ("llama", LAST, {}, "causal"),
            ("llama", LAST, {"attention_mask": torch.ones(2, 12, dtype=torch.int64)}, "causal"),
            ("llama", LAST, {"attention_mask": padding("left")}, "causal & key_padding(keep=<bool[2, 12]>)"),
            ("llama", LAST, {"position_ids": positions(5, 7)}, "causal & document(ids=<int64[2, 12]>)"),
            ("gpt_oss", LAST, {"position_ids": positions(5, 7)}, "causal & document(ids=<int64[2, 12]>)"),
            ("gemma3", LAST, {}, "causal"),
            ("gemma3", "model.layers.0.self_attn", {}, "sliding_window(left=3, right=0)"),
            (
                "mistral",
                LAST,
                {"attention_mask": padding("right")},
                "sliding_window(left=3, right=0) & key_padding(keep=<bool[2, 12]>)",
            ),
            ("bert", "bert.encoder.layer.0.attention.self", {}, "full"),
            (
                "bert",
                "bert.encoder.layer.0.attention.self",
                {"attention_mask": padding("right")},
                "key_padding(keep=<bool[2, 12]>)",
            ),
        ],
    )
    def test_masks_have_names(self, name: str, layer: str, inputs: dict[str, Any], text: str) -> None:
        assert str(flexmask_transformers.masks_of(pair(name)[0], input_ids=tokens(), **inputs)[layer]) == text

    @pytest.mark.parametrize("attention", ["sdpa", "eager"])
    @pytest.mark.parametrize(
        ("name", "inputs", "texts"),
        [
            ("llama", {}, ["causal"]),
            ("llama", {"attention_mask": padding("left")}, ["causal & key_padding(start=[0, 3])"]),
            ("llama", {"position_ids": positions(5, 7), "use_cache": False}, ["causal & document(lengths=[5, 7])"]),
            ("llama", {"position_ids": positions(5, 7)}, ["causal"]),
            ("gemma3", {}, ["sliding_window(left=3, right=0)", "causal"]),
            ("llama4", {}, ["causal & chunked(size=4)", "causal"]),
            ("bert", {"attention_mask": padding("right")}, ["key_padding(lengths=[12, 9])"]),
            ("t5", {"decoder_input_ids": tokens()}, ["full", "causal"]),
        ],
    )
    def test_implementations_of_transformers(
        self, name: str, inputs: dict[str, Any], texts: list[str], attention: Literal["sdpa", "eager"]
    ) -> None:
        """Their own tensors, which leak between the documents of a row that comes with a cache."""
        given = {"input_ids": tokens(), **inputs}
        found = flexmask_transformers.masks_of(pair(name)[0], attention=attention, **given)
        assert list(dict.fromkeys(map(str, found.values()))) == texts

    def test_a_static_cache_of_sdpa(self) -> None:
        _, ours = pair("llama")
        cache = transformers.StaticCache(config=ours.config, max_cache_len=16)
        ours(tokens(1, 5), past_key_values=cache, use_cache=True)
        mask = flexmask_transformers.masks_of(ours, attention="sdpa", input_ids=tokens(1, 3), past_key_values=cache)[LAST]
        assert str(mask) == "causal(offset=5)"
        assert ours.config._attn_implementation == "flexmask"

    @pytest.mark.parametrize("side", ["right", "left"])
    @pytest.mark.parametrize("name", ["llama", "gemma3", "llama4", "mistral"])
    def test_cells_are_those_of_transformers(self, name: str, side: str) -> None:
        """Against the tensors that ``sdpa`` makes."""
        eager, _ = pair(name)
        found = flexmask_transformers.masks_of(eager, input_ids=tokens(), attention_mask=padding(side))
        config = eager.config
        embeds = torch.empty(2, 12, 1)
        eager.set_attn_implementation("sdpa")
        try:
            options = {"allow_is_causal_skip": False}
            make = masking_utils.create_masks_for_generate
            wanted = of_transformers(lambda: make(config, embeds, padding(side), None, **options))
        finally:
            eager.set_attn_implementation("eager")
        for i in range(2):
            of_layer = wanted[config.layer_types[i]] if isinstance(wanted, dict) else wanted
            cells = found[f"model.layers.{i}.self_attn"].dense(12, batch=2)
            assert torch.equal(cells.expand(2, 1, 12, 12), of_layer)

    def test_the_model_is_as_before(self) -> None:
        eager, _ = pair("llama")
        eager.train()
        flexmask_transformers.masks_of(eager, input_ids=tokens())
        assert eager.config._attn_implementation == "eager"
        assert eager.training
        eager.eval()

    def test_queries_after_a_cache(self) -> None:
        _, ours = pair("llama")
        cache = ours(tokens(1, 5), use_cache=True).past_key_values
        mask = flexmask_transformers.masks_of(ours, input_ids=tokens(1, 3), past_key_values=cache)[LAST]
        assert mask.dense(3, 8)[0, 0].sum(-1).tolist() == [6, 7, 8]

    def test_models_without_the_interface_are_refused(self) -> None:
        config = transformers.FalconConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
        with pytest.raises(ValueError, match="FalconForCausalLM does not support"):
            flexmask_transformers.masks_of(transformers.FalconForCausalLM(config), input_ids=tokens())
        with pytest.raises(OperandError, match="no layer of FalconForCausalLM calls the attention of transformers"):
            flexmask_transformers.masks_of(transformers.FalconForCausalLM(config), attention="eager", input_ids=tokens())
        with pytest.raises(ExpressionError, match="must be 'flexmask', 'sdpa' or 'eager', got 'flash'"):
            flexmask_transformers.masks_of(pair("llama")[0], attention="flash", input_ids=tokens())  # type: ignore[arg-type]


def with_dense_mask(eager: Any, cells: torch.Tensor) -> Any:
    """The logits of ``eager`` with an additive mask of these cells."""
    bias = torch.where(cells, 0.0, torch.finfo(torch.float32).min)
    return eager(tokens(), attention_mask=bias.expand(2, 1, 12, 12)).logits


class TestUseMask:
    IDS = torch.tensor([[0] * 4 + [1] * 8, [0] * 7 + [1] * 5])

    def test_without_with_it_warns_and_arguments_are_checked_at_once(self) -> None:
        _, ours = pair("llama")
        with pytest.warns(UserWarning, match="use_mask.* did nothing: write `with use_mask"):
            flexmask_transformers.use_mask(ours, "document(ids)", ids=self.IDS)
        with pytest.raises(ExpressionError, match="no parameter ids; it has idz"):
            flexmask_transformers.use_mask(ours, "document(idz)", ids=self.IDS)
        mask = flexmask_transformers.use_mask(ours, "causal")
        for _ in range(2):  # also again, and as a decorator
            with mask:
                ours(tokens(2, 12))
        called = mask(lambda: ours(tokens(2, 12)))
        with ThreadPoolExecutor(2) as threads:
            for run in [threads.submit(called) for _ in range(4)]:
                run.result()
        assert not user_masks._OF_ALL_THREADS
        with pytest.raises(TypeError):  # and no warning
            flexmask_transformers.use_mask(ours)  # type: ignore[call-arg]

    @pytest.mark.parametrize(
        "mask",
        ["document(ids)", flexmask.parse("document(ids)"), lambda b, h, q, kv: TestUseMask.IDS[b, q] == TestUseMask.IDS[b, kv]],
        ids=["text", "mask", "mask_mod"],
    )
    def test_and(self, mask: Any) -> None:
        eager, ours = pair("llama")
        data: dict[str, Any] = {} if callable(mask) else {"ids": self.IDS}
        with flexmask_transformers.use_mask(ours, mask, **data):
            found = ours(tokens()).logits
        assert_close(found, with_dense_mask(eager, (causal() & document(self.IDS)).dense(12)), rtol=1e-4, atol=2e-5)

    def test_replace(self) -> None:
        eager, ours = pair("llama")
        with flexmask_transformers.use_mask(ours, "sliding_window(left=2, right=2)", combine="replace"):
            found = ours(tokens()).logits
        wanted = with_dense_mask(eager, sliding_window(left=2, right=2).dense(12))
        assert_close(found, wanted, rtol=1e-4, atol=2e-5)

    def test_layer_types(self) -> None:
        _, ours = pair("gemma3")
        own = {"full_attention": "document(ids)"}
        recorded = {}
        with flexmask_transformers.use_mask(ours, own, ids=self.IDS):
            recorded = flexmask_transformers.masks_of(ours, input_ids=tokens())
        assert str(recorded["model.layers.0.self_attn"]) == "sliding_window(left=3, right=0)"
        assert str(recorded[LAST]) == "causal & document(ids=<ids: int64[2, 12]>)"

    def test_while_generating(self) -> None:
        """Sinks and a window, which is what an eager model generates with a mask for each step."""
        eager, ours = pair("llama")
        with flexmask_transformers.use_mask(ours, "sink_window(1, left=3)"):
            found = ours.generate(tokens(1, 6), max_new_tokens=4, do_sample=False, eos_token_id=None)
        text = tokens(1, 6)
        for _ in range(4):
            cells = flexmask.parse("causal & sink_window(1, left=3)").dense(text.shape[1])
            logits = eager(text, attention_mask=torch.where(cells, 0.0, -torch.inf)).logits
            text = torch.cat([text, logits[:, -1:].argmax(-1)], 1)
        assert found.tolist() == text.tolist()

    def test_another_model_is_not_affected(self) -> None:
        _, ours = pair("llama")
        _, other = pair("qwen3")
        alone = other(tokens()).logits
        with flexmask_transformers.use_mask(ours, "sliding_window(size=2)"):
            assert torch.equal(other(tokens()).logits, alone)
            ours(tokens())

    def test_errors(self) -> None:
        eager, ours = pair("llama")
        with (
            pytest.raises(
                OperandError, match="transformers with attn_implementation='flexmask', got LlamaForCausalLM with 'eager'"
            ),
            flexmask_transformers.use_mask(eager, "causal"),
        ):
            pass
        with (
            pytest.raises(ExpressionError, match="combine must be"),
            flexmask_transformers.use_mask(ours, "causal", combine="or"),  # type: ignore[arg-type]
        ):
            pass
        for model in (eager, ours):
            with pytest.raises(OperandError, match=r"attention_mask is a LoweredMask.*give the Mask of its plan"):
                model(tokens(), attention_mask=flexmask.plan("causal", 5)())
        with pytest.raises(ExpressionError, match="no attention layer"), flexmask_transformers.use_mask(ours, "causal"):
            pass
        with pytest.raises(ExpressionError, match="no parameter idz"), flexmask_transformers.use_mask(ours, "causal", idz=1):
            pass
        for mask in ("document(ids)", {"full_attention": "document(ids)"}):
            with (
                pytest.raises(
                    ExpressionError, match=r"document\(ids=ids\) .* not given: write use_mask\(model, mask, ids=\.\.\.\)"
                ),
                flexmask_transformers.use_mask(ours, mask),
            ):
                ours(tokens())
        with (
            pytest.raises(ExpressionError, match="has a parameter idz"),
            flexmask_transformers.use_mask(ours, {"full_attention": "causal"}, idz=1),
        ):
            pass
        with (
            pytest.raises(ExpressionError, match=r"one of full_attention, .*; got 'sliding'"),
            flexmask_transformers.use_mask(ours, {"sliding": "causal"}),
        ):
            ours(tokens())
        with (
            pytest.raises(ExpressionError, match="no attention layer"),
            flexmask_transformers.use_mask(ours, {"sliding_attention": "causal"}),
        ):
            ours(tokens())


def cells_of(predicate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], length: int = 12) -> torch.Tensor:
    """``bool[length, length]`` of a predicate of query and key."""
    places = torch.arange(length)
    return predicate(places[:, None], places[None])


SHORT, LONG = torch.tensor([0] * 5 + [1] * 3 + [2] * 4), torch.tensor([0] * 5 + [1] * 7)
#: Masks, their meaning, and how many tokens ``mistral`` with its window of 4 takes in parts of 7, 3, 1 and 1 before it may
#: show a dropped key.
OVER_CACHES: dict[str, tuple[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor], int]] = {
    "sinks": ("sink_window(2, left=3)", lambda q, kv: (kv <= q) & ((q - kv <= 3) | (kv < 2)), 7),
    "causal": ("causal", lambda q, kv: kv <= q, 7),
    "wide": ("sliding_window(size=5)", lambda q, kv: (kv <= q) & (q - kv < 5), 7),
    "window": ("sliding_window(size=4)", lambda q, kv: (kv <= q) & (q - kv < 4), 12),
    "narrow": ("sliding_window(size=2)", lambda q, kv: (kv <= q) & (q - kv < 2), 12),
    "short documents": ("causal & document(lengths=[5, 3, 4])", lambda q, kv: (kv <= q) & (SHORT[q] == SHORT[kv]), 7),
    "long documents": ("causal & document(lengths=[5, 7])", lambda q, kv: (kv <= q) & (LONG[q] == LONG[kv]), 7),
}


class TestUseMaskWithCaches:
    """A mask that replaces the model's own is that of the whole sequence, or an error where it may show dropped keys."""

    @pytest.mark.parametrize("kind", ["default", "dynamic", "static", "all keys"])
    @pytest.mark.parametrize("name", OVER_CACHES)
    def test_sliding_layers(self, name: str, kind: str) -> None:
        eager, ours = pair("mistral")
        text, predicate, end = OVER_CACHES[name]
        end = 12 if kind == "all keys" else end
        caches: dict[str, Callable[[], Any]] = {
            "default": lambda: None,
            "dynamic": lambda: transformers.DynamicCache(config=ours.config),
            "static": lambda: transformers.StaticCache(config=ours.config, max_cache_len=16),
            "all keys": transformers.DynamicCache,
        }
        cache = caches[kind]()
        found: list[torch.Tensor] = []
        with torch.no_grad(), flexmask_transformers.use_mask(ours, text, combine="replace"):
            for part in tokens().split([7, 3, 1, 1], 1):
                if sum(logits.shape[1] for logits in found) == end:
                    with pytest.raises(LoweringError, match=r"keys before position .*dropped: give use_cache=False, past_key"):
                        ours(part, past_key_values=cache, use_cache=True)
                    break
                out = ours(part, past_key_values=cache, use_cache=True)
                cache, found = out.past_key_values, [*found, out.logits]
        wanted = with_dense_mask(eager, cells_of(predicate))[:, :end]
        assert_close(torch.cat(found, 1), wanted, rtol=1e-4, atol=2e-5)

    def test_dropped_keys(self) -> None:
        """Also of a text as ``attention_mask``, and of one head."""
        _, ours = pair("mistral")
        cache = ours(tokens(1, 7), use_cache=True).past_key_values
        narrow = ", ".join(["sliding_window(size=2)"] * 3)
        for mask in ("sink_window(2, left=3)", "sliding_window(size=6)", f"per_head([{narrow}, causal])"):
            with pytest.raises(LoweringError, match=r"keys before position 4, .*mask & sliding_window\(size=4\)"):
                ours(tokens(1, 2), attention_mask=mask, past_key_values=cache)

    def test_free_places_are_no_keys(self) -> None:
        eager, ours = pair("llama")
        cache = transformers.StaticCache(config=ours.config, max_cache_len=20)
        with flexmask_transformers.use_mask(ours, "sliding_window(left=2, right=2)", combine="replace"):
            found = ours(tokens(), past_key_values=cache, use_cache=True).logits
        wanted = with_dense_mask(eager, cells_of(lambda q, kv: (q - kv).abs() <= 2))
        assert_close(found, wanted, rtol=1e-4, atol=2e-5)

    @pytest.mark.parametrize("options", [{}, {"use_cache": False}, {"cache_implementation": "static"}], ids=str)
    def test_data_for_the_prompt_and_the_new_tokens(self, options: dict[str, Any]) -> None:
        eager, ours = pair("llama")
        arguments: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, **options}
        with torch.no_grad(), flexmask_transformers.use_mask(ours, "document(ids)", ids=self.IDS):
            found = ours.generate(tokens(2, 6), **arguments)
        text = tokens(2, 6)
        for _ in range(4):
            ids = self.IDS[:, : text.shape[1]]
            cells = (ids[:, None] == ids[:, :, None]) & cells_of(lambda q, kv: kv <= q, text.shape[1])
            logits = eager(text, attention_mask=torch.where(cells, 0.0, torch.finfo(torch.float32).min)[:, None]).logits
            text = torch.cat([text, logits[:, -1:].argmax(-1)], 1)
        assert found.tolist() == text.tolist()
        refused = pytest.raises(LoweringError, match=r"6 values along .*: give values for all tokens, those of the prompt")
        with refused, flexmask_transformers.use_mask(ours, "document(ids)", ids=self.IDS[:, :6]):
            ours.generate(tokens(2, 6), **arguments)

    IDS = torch.tensor([[0] * 4 + [1] * 6, [0] * 8 + [1] * 2])


class TestAttentionMaskArgument:
    """A mask of flexmask as ``attention_mask`` is the whole mask, as a 4-D tensor is."""

    @pytest.mark.parametrize(
        "mask", ["sliding_window(size=3)", sliding_window(size=3), lambda b, h, q, kv: (kv <= q) & (kv > q - 3)]
    )
    def test_replaces_the_own_mask(self, mask: Any) -> None:
        eager, ours = pair("llama")
        found = ours(tokens(), attention_mask=mask).logits
        assert_close(found, with_dense_mask(eager, sliding_window(size=3).dense(12)), rtol=1e-4, atol=2e-5)

    def test_a_dict_for_layer_types(self) -> None:
        eager, ours = pair("gemma3")
        masks = {"full_attention": causal() & sliding_window(size=5), "sliding_attention": "sliding_window(size=2)"}
        cells = {"full_attention": sliding_window(size=5).dense(12), "sliding_attention": sliding_window(size=2).dense(12)}
        bias = {name: torch.where(of_type, 0.0, torch.finfo(torch.float32).min) for name, of_type in cells.items()}
        found, wanted = ours(tokens(), attention_mask=masks), eager(tokens(), attention_mask=bias)
        assert_close(found.logits, wanted.logits, rtol=1e-4, atol=2e-5)

    @pytest.mark.parametrize("kind", ["bool", "float"])
    def test_tensors_of_four_axes(self, kind: str) -> None:
        eager, ours = pair("llama")
        cells = sliding_window(size=3).dense(12).expand(2, 1, 12, 12)
        given = cells if kind == "bool" else torch.where(cells, 0.0, -1e9)
        found = ours(tokens(), attention_mask=given).logits
        assert_close(found, with_dense_mask(eager, cells), rtol=1e-4, atol=2e-5)

    def test_a_dict_with_a_cache_is_refused(self) -> None:
        _, ours = pair("gemma3")
        cache = ours(tokens(1, 5), use_cache=True).past_key_values
        masks = {"full_attention": causal(), "sliding_attention": causal()}
        with pytest.raises(LoweringError, match="the position of 2 queries among"):
            ours(tokens(1, 2), attention_mask=masks, past_key_values=cache)


class TestToMask:
    def test_results_of_transformers(self) -> None:
        for implementation in ("eager", "sdpa", "flexmask"):
            config = transformers.LlamaConfig(attn_implementation=implementation)
            made = masking_utils.create_causal_mask(
                config=config,
                inputs_embeds=torch.empty(2, 12, 1),
                attention_mask=padding("left"),
                past_key_values=None,
            )
            mask = flexmask_transformers.to_mask(made)
            assert mask.equals(causal() & flexmask.key_padding(keep=padding("left")), 12, batch=2), implementation
            start = "keep=<bool[2, 12]>" if implementation == "flexmask" else "start=[0, 3]"
            assert str(mask) == f"causal & key_padding({start})"

    def test_a_dense_mask_in_place_of_the_own(self) -> None:
        eager, ours = pair("llama")
        cells = (causal() & document(lengths=[[5, 7], [12, 0]])).dense(12)
        mask = flexmask_transformers.to_mask(torch.where(cells, 0.0, torch.finfo(torch.float32).min))
        assert str(mask) == "causal & document(lengths=[[5, 7], [12, 0]])"
        with flexmask_transformers.use_mask(ours, mask, combine="replace"):
            found = ours(tokens()).logits
        assert_close(found, with_dense_mask(eager, cells), rtol=1e-4, atol=2e-5)

    def test_of_a_tokenizer(self) -> None:
        assert str(flexmask_transformers.to_mask(padding("left"))) == "key_padding(keep=<int64[2, 12]>)"

    def test_errors(self) -> None:
        with pytest.raises(OperandError, match="this one has other values"):
            flexmask_transformers.to_mask(torch.randn(1, 1, 4, 4))
        with pytest.raises(OperandError, match=r"got \[4, 4, 4\]"):
            flexmask_transformers.to_mask(torch.ones(4, 4, 4))
