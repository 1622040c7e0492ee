"""Tiny models with random weights of any model class of transformers, and inputs that they take."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from flexmask_transformers.models import VOCABULARY, randomize

__all__ = ["inputs_of", "tiny_model", "tokens"]

#: Names of sizes in configs: the width of a layer, its heads, those of keys, its hidden units, and the layers.
WIDTHS = ("hidden_size", "d_model", "n_embd", "embed_dim", "dim", "hidden_dim", "emb_dim")
HEADS = ("num_attention_heads", "encoder_attention_heads", "decoder_attention_heads", "num_heads", "n_head", "n_heads")
KEY_HEADS = ("num_key_value_heads", "decoder_num_key_value_heads")
HIDDEN = ("intermediate_size", "ffn_dim", "d_ff", "mlp_dim", "n_inner", "mamba_n_heads", "mamba_num_heads", "mamba_d_ssm")
LAYERS = (
    *("num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth", "encoder_layers", "decoder_layers"),
    *("num_encoder_layers", "num_decoder_layers", "num_decoder_blocks", "num_blocks"),
)
TYPES = ("layer_types", "layers_block_type")
#: Two layers of model types whose config's defaults have one of the two kinds alone.
MIXED: dict[str, dict[str, Any]] = {"bamba": {"attn_layer_indices": [1]}, "lfm2": {"layer_types": ["conv", "full_attention"]}}
#: The most of what other sizes do not depend on: experts, and tokens in a window.
MOST = {"num_local_experts": 4, "n_routed_experts": 4, "num_experts": 4, "moe_num_experts": 4, "n_group": 1, "topk_group": 1}
MOST |= {"num_experts_per_tok": 2, "moe_k": 2, "moe_topk": 2, "sliding_window": 4, "attention_chunk_size": 4}
#: Numbers of tokens with a meaning are below this one, or among the last of the vocabulary; others are drawn from those between.
SPECIAL, DRAWN = 5, 160


def tiny_model(kind: Any, *, heads: int | None) -> Any:
    """A model of a class with two layers or one for each type of layers, few tokens, random weights and ``eager``.

    Args:
        kind: the class.
        heads: the number of heads, of the size that the config's defaults have; None for all of them, for configs whose sizes
            depend on each other in other ways.
    """
    torch.manual_seed(0)
    model = kind._from_config(_tiny_config(kind.config_class(), heads=heads), attn_implementation="eager").eval()
    randomize(model)
    text = model.config.get_text_config()
    if getattr(text, "pad_token_id", 0) is None:  # classes of a whole row look for it
        text.pad_token_id = 0
    return model


def inputs_of(model: Any, length: int) -> Iterator[dict[str, Any]]:
    """Inputs that a model may take, the simplest first.

    Args:
        model: a model of `tiny_model`.
        length: the number of tokens.
    """
    names = inspect.signature(model.forward).parameters
    ids = tokens(model, length, seed=1)
    config = model.config
    image, channels = _size(config, "image_size", 224), _size(config, "num_channels", 3)
    size = image if isinstance(image, list | tuple) else (image, image)
    others = {
        "pixel_values": torch.randn(1, channels, *size, device="cpu", generator=torch.Generator().manual_seed(0)),
        "input_values": torch.randn(1, 4000, device="cpu", generator=torch.Generator().manual_seed(0)),
        "input_features": torch.randn(
            1, _size(config, "num_mel_bins", 80), 3000, device="cpu", generator=torch.Generator().manual_seed(0)
        ),
    }
    if "input_ids" in names:
        text = {"input_ids": ids}
        if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in names:
            text["decoder_input_ids"] = ids
        yield text
        if "bbox" in names:
            yield {**text, "bbox": torch.arange(4, device="cpu").expand(1, length, 4)}
        for name, value in others.items():
            if name in names:
                yield {**text, name: value}
    else:
        for name, value in others.items():
            if name in names:
                yield {name: value, **({"decoder_input_ids": ids} if "decoder_input_ids" in names else {})}


def tokens(model: Any, length: int, seed: int) -> Tensor:
    """Token ids ``int64[1, length]`` without a meaning of their own."""
    text = model.config.get_text_config()
    size = min(_size(text, "vocab_size", VOCABULARY), DRAWN)
    return torch.randint(min(SPECIAL, size - 1), size, (1, length), device="cpu", generator=torch.Generator().manual_seed(seed))


def _size(config: Any, name: str, default: Any) -> Any:
    """A size in a config or in one of those in it."""
    parts = [config, *(getattr(config, part, None) for part in getattr(config, "sub_configs", {}))]
    return next((value for part in parts if (value := getattr(part, name, None))), default)


def _tiny_config(config: Any, *, heads: int | None) -> Any:
    """A config of the same class, made anew with smaller sizes, so that it derives the others from them."""
    given = inspect.signature(type(config).__init__).parameters
    fields = {name: value for name, value in vars(config).items() if name in given}
    sizes: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, PreTrainedConfig):
            sizes[name] = _tiny_config(value, heads=heads)
        elif _is_int(value) and name.endswith(("token_id", "token_index")) and value >= SPECIAL:
            sizes[name] = VOCABULARY - 1 - len(sizes)
        elif name == "eos_token_id" and isinstance(value, list):
            sizes[name] = VOCABULARY - 1
        elif _is_int(value) and name.endswith("vocab_size"):
            sizes[name] = min(value, VOCABULARY)
        elif _is_int(value) and name in MOST:
            sizes[name] = min(value, MOST[name])
    sizes |= _layers(config, fields) | MIXED.get(config.model_type, {})
    return type(config)(**sizes, **(_widths(fields, heads) if heads else {}))


def _layers(config: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """Two layers, or so many that all types of layers are among them, and lists of as many entries."""
    found: dict[str, Any] = {}
    lists = {name: value for name, value in fields.items() if isinstance(value, list)}
    derived = {name: getattr(config, name, None) for name in TYPES}
    for name in LAYERS:
        layers: Any = fields.get(name)
        if _is_int(layers):
            types = [one for other, one in {**lists, **derived}.items() if "type" in other and one and len(one) == layers]
            kept = min(layers, max([2, *(one.index(each) + 1 for one in types for each in one)]))
            found |= {name: kept, **{other: one[:kept] for other, one in lists.items() if len(one) == layers}}
    return found


def _widths(fields: dict[str, Any], kept: int) -> dict[str, Any]:
    """A number of heads of the same size each, and all sizes that are multiples of the width."""
    heads = [fields[name] for name in HEADS if _is_int(fields.get(name))]
    widths = [fields[name] for name in WIDTHS if _is_int(fields.get(name))]
    factor = Fraction(max([kept, *heads]), kept)
    if not widths or any((size / factor).denominator > 1 for size in (*heads, *widths)):
        return {}
    found = {}
    for name, value in fields.items():
        if not _is_int(value):
            continue
        if name in HEADS or name in WIDTHS or name in HIDDEN:
            found[name] = max(1, int(value / factor))
        elif name in KEY_HEADS:
            found[name] = kept if value in heads else 1
        elif value >= max(widths) and value % max(widths) == 0 and name.endswith(("_size", "_dim")) and "vocab" not in name:
            found[name] = int(value / factor)
    return found


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
