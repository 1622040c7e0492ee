"""Small models with random weights from the configs of large ones, for questions about masks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedConfig

from flexmask.errors import OperandError

__all__ = ["VOCABULARY", "randomize", "small_model"]

#: The most tokens, hidden units of a feed-forward layer, and layers, unless a model has more types of layers.
VOCABULARY, INTERMEDIATE, LAYERS = 256, 16, 2


def small_model(config: Any) -> Any:
    """The text model of a config with two layers, or more for all types of layers, few tokens and random weights.

    Attention is as the config has it: its heads, windows, chunks, soft-capping and sinks.

    Args:
        config: a config of transformers, or the path of a ``config.json`` or of the folder that has one.

    Raises:
        FileNotFoundError: there is no such file. Nothing is downloaded.
        OperandError: neither a config nor a path.
        ValueError: the file is no config of transformers, or it is for an encoder and a decoder, or for no text.
    """
    if isinstance(config, str | Path):
        config = _read(Path(config))
    if not isinstance(config, PreTrainedConfig):
        what = config.__name__ if isinstance(config, type) else type(config).__name__
        raise OperandError(f"a model of transformers, its config or the path of its config.json is needed, got {what}")
    text = type(config).from_dict(config.to_dict()).get_text_config()
    if text.is_encoder_decoder:
        raise ValueError(f"{type(text).__name__} is for an encoder and a decoder; only models of one sequence can be packed")
    if not hasattr(text, "vocab_size"):
        raise ValueError(f"{type(text).__name__} has no vocabulary; only models of text can be packed")
    _shrink(text)
    with torch.random.fork_rng(devices=[]):  # the caller draws on as before
        torch.manual_seed(0)
        for kind in (AutoModelForCausalLM, AutoModelForMaskedLM, AutoModel):
            if type(text) in kind._model_mapping:
                model = kind.from_config(text).eval()
                break
        else:
            raise ValueError(f"transformers has no text model for {type(text).__name__}")
        randomize(model)
    return model


def randomize(model: torch.nn.Module) -> None:
    """Draws weights that are so large that every position matters."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=max(0.02, parameter.shape[-1] ** -0.5))


def _read(path: Path) -> Any:
    if not path.exists():
        raise FileNotFoundError(f"there is no file or folder {str(path)!r}; give the path of a config.json")
    try:
        return AutoConfig.from_pretrained(str(path), local_files_only=True)
    except OSError:
        raise
    except Exception as error:  # a config is code of transformers, whose checks raise errors of many kinds
        raise ValueError(f"{str(path)!r} is no config of transformers: {error}") from error


def _shrink(config: Any) -> None:
    layers = config.num_hidden_layers
    types = getattr(config, "layer_types", None)
    kept = max([LAYERS, *(types.index(kind) + 1 for kind in types)]) if types else LAYERS
    config.num_hidden_layers = min(layers, kept)
    if types and "layer_types" in vars(config):  # others derive it from the number of layers
        config.layer_types = types[: config.num_hidden_layers]
    config.vocab_size = min(config.vocab_size, VOCABULARY)
    for name in ("intermediate_size", "moe_intermediate_size", "intermediate_size_mlp"):
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, min(getattr(config, name), INTERMEDIATE))
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "cls_token_id", "sep_token_id", "mask_token_id"):
        if getattr(config, name, None) is not None:
            setattr(config, name, 0)
