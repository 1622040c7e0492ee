"""Layers that combine tokens without flexmask's attention: packed rows are refused, unless their owner allows them."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import transformers
from flexmask_transformers import allow_mixing, check_packing
from hf_models import ENCODER, TEXT, VISION, make_pair, pair, tokens
from test_hf_masks import positions
from test_hf_models import CLOSE
from torch.testing import assert_close

from flexmask.errors import LoweringError, OperandError

PACKED = positions(5, 7)
MESSAGE = "rows are packed, and other layers than attention combine their tokens: "
PACKINGS = [
    {"position_ids": PACKED},
    {"cu_seq_lens_q": torch.tensor([0, 5, 12], dtype=torch.int32)},
    {"seq_idx": torch.tensor([[0] * 5 + [1] * 7], dtype=torch.int32)},
]


@cache
def hybrid() -> tuple[Any, ...]:
    """LFM2: a convolution, then attention."""
    options = {**TEXT, "layer_types": ["conv", "full_attention"], "conv_L_cache": 3}
    del options["head_dim"]
    return make_pair(transformers.Lfm2ForCausalLM, lambda: transformers.Lfm2Config(**options))


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("packing", PACKINGS, ids=lambda given: next(iter(given)))
def test_packed_rows_are_refused(packing: dict[str, torch.Tensor], use_cache: bool) -> None:
    _, ours = hybrid()
    with pytest.raises(
        (LoweringError, ValueError), match=rf"{MESSAGE}Lfm2ShortConv \(.*layers\.0\.conv\)|without `causal_conv1d`"
    ):
        ours(tokens(1), **packing, use_cache=use_cache)


def test_rows_of_one_document_are_not() -> None:
    eager, ours = hybrid()
    wanted = eager(tokens(1)).logits
    for given in ({}, {"position_ids": positions(12)}, {"cu_seq_lens_q": torch.tensor([0, 12])}):
        assert_close(ours(tokens(1), **given).logits, wanted, **CLOSE)
    options = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert ours.generate(tokens(1), **options).tolist() == eager.generate(tokens(1), **options).tolist()


def test_in_a_graph() -> None:
    eager, ours = hybrid()
    compiled: Any = torch.compile(ours, backend="eager", fullgraph=True)
    given = {"use_cache": False}
    assert_close(compiled(tokens(1), position_ids=positions(12), **given).logits, eager(tokens(1)).logits, **CLOSE)
    with pytest.raises(RuntimeError, match=MESSAGE):
        compiled(tokens(1), position_ids=PACKED, **given)
    torch.compiler.reset()


def test_allowed_layers_are_measured() -> None:
    """The convolution reaches over two tokens."""
    model = transformers.Lfm2ForCausalLM(hybrid()[1].config)
    (refused, *_) = check_packing(model, attention=["flexmask"], lengths=(5, 7)).results
    assert MESSAGE.strip() in refused.error
    allow_mixing(model)
    (found, *_) = check_packing(model, attention=["flexmask"], lengths=(5, 7)).results
    assert found.positions[:2] == (5, 6)


def test_embeddings_that_read_their_neighbors() -> None:
    options = {**ENCODER, "intra_bottleneck_size": 32, "true_hidden_size": 32, "embedding_size": 32}
    model = transformers.MobileBertModel._from_config(transformers.MobileBertConfig(**options), attn_implementation="flexmask")
    with pytest.raises(LoweringError, match=rf"{MESSAGE}MobileBertEmbeddings \(embeddings\)"):
        model(tokens(1), position_ids=PACKED)


class Mixer(torch.nn.Module):
    """A layer of a family that no version of flexmask has seen: a running mean."""

    def forward(self, hidden_states: torch.Tensor, past_key_values: Any = None, **_: Any) -> torch.Tensor:
        return hidden_states.cumsum(1) / torch.arange(1, hidden_states.shape[1] + 1)[:, None]


class Llama(transformers.LlamaForCausalLM):  # type: ignore[misc] # transformers has no types
    """A model whose class and layers are not those of transformers."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.layers[1].mlp = Mixer()
        self.post_init()


def test_a_head_that_reads_the_token_of_a_question() -> None:
    """Splinter's answers for all tokens of a row depend on one of them."""
    config = transformers.SplinterConfig(**{**ENCODER, "num_hidden_layers": 1, "question_token_id": 5})
    eager, ours = make_pair(transformers.SplinterForQuestionAnswering, lambda: config)
    assert_close(ours(tokens(1)).start_logits, eager(tokens(1)).start_logits, **CLOSE)
    with pytest.raises(LoweringError, match=rf"{MESSAGE}QuestionAwareSpanSelectionHead \(splinter_qass\)"):
        ours(tokens(1), position_ids=PACKED)


def test_layers_of_a_new_family_are_found() -> None:
    model = Llama._from_config(transformers.LlamaConfig(**TEXT), attn_implementation="flexmask")
    with pytest.raises(LoweringError, match=rf"{MESSAGE}Mixer \(model\.layers\.1\.mlp\)"):
        model(tokens(1), position_ids=PACKED)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss", "deepseek_v3", "bert", "roberta"])
def test_models_of_attention_alone_have_none(name: str) -> None:
    _, ours = pair(name)
    assert all(part._flexmask_layers.mixing == "" for part in (ours, ours.base_model))


def test_embeddings_of_positions_that_count_padding_are_none() -> None:
    options = {**ENCODER, "ffn_dim": 48, "word_embed_proj_dim": 32, "num_hidden_layers": 1}
    eager, ours = make_pair(transformers.OPTModel, lambda: transformers.OPTConfig(**options))
    found = ours(tokens(1), position_ids=PACKED, use_cache=False).last_hidden_state
    assert_close(found[:, 5:], eager(tokens(1)[:, 5:]).last_hidden_state, **CLOSE)


def test_a_model_that_calls_no_attention_of_transformers() -> None:
    """Transformers records the implementation, and computes attention in another way."""
    config = transformers.SamVisionConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4, output_channels=8, window_size=0
    )
    model = transformers.SamVisionModel(config)
    model.set_attn_implementation("flexmask")
    with pytest.raises(OperandError, match="no layer of SamVisionModel calls transformers' AttentionInterface"):
        model(torch.randn(1, 3, 8, 8))


@pytest.mark.parametrize("name", ["flexmask", {"": "flexmask"}], ids=["name", "dict"])
def test_setting_it_where_transformers_would_ignore_it_is_refused(name: Any) -> None:
    config = transformers.FalconConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    model = transformers.FalconForCausalLM(config)
    with pytest.raises(ValueError, match="FalconForCausalLM does not support attn_implementation='flexmask'"):
        model.set_attn_implementation(name)
    model.set_attn_implementation("eager")


def with_parts(text: Any, vision: Any) -> Any:
    return transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_index=63)
    )


XGLM = {"vocab_size": 64, "d_model": 32, "ffn_dim": 48, "num_layers": 1, "attention_heads": 4, "max_position_embeddings": 64}


@pytest.mark.parametrize("name", ["flexmask", {"text_config": "flexmask"}], ids=["name", "dict"])
def test_a_part_for_text_that_transformers_would_leave_out_is_refused(name: Any) -> None:
    model = with_parts(transformers.XGLMConfig(**XGLM), transformers.CLIPVisionConfig(**VISION))
    with pytest.raises(ValueError, match="XGLMModel does not support attn_implementation='flexmask'"):
        model.set_attn_implementation(name)
    assert model.config._attn_implementation != "flexmask"
    model.set_attn_implementation({"vision_config": "flexmask"})


def test_a_part_for_images_may_have_another_attention() -> None:
    vision = transformers.Swinv2Config(image_size=16, patch_size=4, embed_dim=16, depths=[1], num_heads=[2], window_size=4)
    model = with_parts(transformers.LlamaConfig(**TEXT), vision)
    model.set_attn_implementation("flexmask")
    assert model.config.text_config._attn_implementation == "flexmask"
    eager = with_parts(transformers.LlamaConfig(**TEXT), vision)
    eager.load_state_dict(model.state_dict())
    found = model(tokens(1), position_ids=PACKED, use_cache=False).logits
    assert_close(found[:, 5:], eager(tokens(1)[:, 5:]).logits, **CLOSE)
    with pytest.raises(ValueError, match="Swinv2Model does not support attn_implementation='flexmask'"):
        model.set_attn_implementation({"vision_config": "flexmask"})


def test_errors() -> None:
    with pytest.raises(OperandError, match="allow_mixing takes a model of transformers"):
        allow_mixing(torch.nn.Linear(2, 2))
