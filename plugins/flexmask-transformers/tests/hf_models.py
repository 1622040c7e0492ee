"""Tiny random models of many families, each as a pair: ``eager``, and ``flexmask`` with the same weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import flexmask_transformers  # noqa: F401 - registers the attention
import pytest
import torch
import transformers

VERSION = tuple(map(int, transformers.__version__.split(".")[:2]))
#: The versions between which the plugin is supported; all families are in the newest.
OLDEST, NEWEST = (5, 4), (5, 23)
TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
BOTH_TYPES = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
ENCODER = {name: TEXT[name] for name in TEXT if name not in ("num_key_value_heads", "head_dim")}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 12,
    "patch_size": 4,
}


@dataclass(frozen=True)
class Family:
    """A model class, its config class, and what is not in `TEXT`."""

    model: str
    config: str
    options: dict[str, Any]
    base: dict[str, Any]


CAUSAL = {
    "llama": Family("LlamaForCausalLM", "LlamaConfig", {}, TEXT),
    "qwen3": Family("Qwen3ForCausalLM", "Qwen3Config", {}, TEXT),
    "mistral": Family("MistralForCausalLM", "MistralConfig", {"sliding_window": 4}, TEXT),
    "gemma2": Family(
        "Gemma2ForCausalLM", "Gemma2Config", {**BOTH_TYPES, "attn_logit_softcapping": 2.0, "final_logit_softcapping": None}, TEXT
    ),
    "gemma3": Family("Gemma3ForCausalLM", "Gemma3TextConfig", BOTH_TYPES, TEXT),
    "gpt2": Family("GPT2LMHeadModel", "GPT2Config", {"n_positions": 64}, ENCODER),
    "gpt_oss": Family(
        "GptOssForCausalLM", "GptOssConfig", {**BOTH_TYPES, "num_local_experts": 2, "num_experts_per_tok": 2}, TEXT
    ),
    "llama4": Family(
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {
            "attention_chunk_size": 4,
            "layer_types": ["chunked_attention", "full_attention"],
            "num_local_experts": 2,
            "intermediate_size_mlp": 48,
        },
        TEXT,
    ),
    "mixtral": Family("MixtralForCausalLM", "MixtralConfig", {"num_local_experts": 2, "num_experts_per_tok": 2}, TEXT),
    "phi3": Family("Phi3ForCausalLM", "Phi3Config", {}, TEXT),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "kv_lora_rank": 8,
            "q_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4,
            "v_head_dim": 6,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
        },
        {name: value for name, value in TEXT.items() if name != "head_dim"},
    ),
}
ENCODERS = {
    "bert": Family("BertForMaskedLM", "BertConfig", {}, ENCODER),
    "roberta": Family("RobertaForMaskedLM", "RobertaConfig", {}, ENCODER),
    "modernbert": Family(
        "ModernBertForMaskedLM", "ModernBertConfig", {"local_attention": 8, "global_attn_every_n_layers": 2}, ENCODER
    ),
}
SEQ2SEQ = {
    "t5": Family(
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": 64,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 4,
            "dropout_rate": 0.0,
            "pad_token_id": 0,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
        },
        {},
    ),
    "bart": Family(
        "BartForConditionalGeneration",
        "BartConfig",
        {
            "vocab_size": 64,
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "max_position_embeddings": 64,
            "dropout": 0.0,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
            "forced_eos_token_id": None,
        },
        {},
    ),
}


def initialise(model: torch.nn.Module) -> None:
    """Weights that are large enough for every position to matter."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.2)


def make_pair(model: Any, config: Callable[[], Any], others: tuple[str, ...] = ()) -> tuple[Any, ...]:
    """A model with ``eager``, one with ``flexmask``, and others with the same weights."""
    eager = model._from_config(config(), attn_implementation="eager").eval()
    initialise(eager)
    made = [eager]
    for name in ("flexmask", *others):
        other = model._from_config(config(), attn_implementation=name).eval()
        other.load_state_dict(eager.state_dict())
        made.append(other)
    return tuple(made)


@cache
def pair(name: str, **options: Any) -> tuple[Any, Any]:
    """The two models of a family."""
    family = {**CAUSAL, **ENCODERS, **SEQ2SEQ}[name]
    config = getattr(transformers, family.config)
    arguments = {**family.base, **family.options, **options}
    if "layer_types" in options:
        arguments["layer_types"] = list(options["layer_types"])
    try:
        eager, ours = make_pair(getattr(transformers, family.model), lambda: config(**arguments))
    except ValueError as error:
        if VERSION >= NEWEST or "does not support attn_implementation" not in str(error):
            raise
        pytest.skip(str(error))  # T5 and ModernBERT got transformers' interface of attention later than others
    return eager, ours


def of_transformers(call: Callable[[], Any]) -> Any:
    """What a function of transformers gives; the versions between the ends fail in that of Llama 4's masks themselves."""
    try:
        return call()
    except TypeError as error:
        if not OLDEST < VERSION < NEWEST or "create_chunked_causal_mask" not in str(error):
            raise
        pytest.skip(f"transformers {transformers.__version__} fails: {error}")


def one_layer(name: str) -> tuple[Any, Any]:
    """The two models of a family with one layer, for tests that compile them."""
    if name in SEQ2SEQ:
        return pair(name, num_layers=1, num_decoder_layers=1)
    types = {**CAUSAL, **ENCODERS}[name].options.get("layer_types")
    return pair(name, num_hidden_layers=1, **({"layer_types": tuple(types[:1])} if types else {}))


def tokens(batch: int = 2, length: int = 12, seed: int = 0) -> torch.Tensor:
    """Token ids ``int64[batch, length]`` without those of padding, start and end."""
    return torch.randint(3, 64, (batch, length), generator=torch.Generator().manual_seed(seed))


def padding(side: str, length: int = 12) -> torch.Tensor:
    """A 2-D mask of two rows, the second of which has three tokens of padding on a side."""
    keep = torch.ones(2, length, dtype=torch.int64)
    keep[1, length - 3 :] = 0
    return keep if side == "right" else keep.flip(1)


def gradients(model: torch.nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """The gradient of each parameter that has one."""
    model.zero_grad(set_to_none=True)
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found
