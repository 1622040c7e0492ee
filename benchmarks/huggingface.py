"""Masks and training steps of a decoder of Transformers on packed documents, for several attention implementations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["IMPLEMENTATIONS", "make_lowered", "training_step"]

#: flexmask and the attention implementations of transformers.
IMPLEMENTATIONS = ("flexmask", "flex_attention", "sdpa")
#: Tokens of each packed document.
DOCUMENT = 512
LAYERS, HEADS, VOCABULARY = 4, 8, 4096


def make_lowered(implementation: str, length: int) -> Callable[[Any], object]:
    """A function that makes what attention reads of a forward's causal mask for packed documents.

    It is a BlockMask, and the table ``bool[1, 1, length, length]`` of ``sdpa``.
    """
    import flexmask_transformers
    import transformers
    from transformers.masking_utils import create_causal_mask

    config = transformers.LlamaConfig(attn_implementation=implementation)
    embeds = torch.empty(1, length, 1)

    def run(_: Any) -> object:
        mask = create_causal_mask(
            config=config, inputs_embeds=embeds, attention_mask=None, past_key_values=None, position_ids=_positions(length)
        )
        return flexmask_transformers.to_mask(mask).block_mask(length) if implementation == "flexmask" else mask

    return run


def training_step(implementation: str, length: int, hidden: int) -> Callable[[Any], object]:
    """A function that computes the loss of packed documents and its gradients, for a model of ``hidden`` channels."""
    import flexmask_transformers  # noqa: F401 - registers the attention
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
    )
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation=implementation).train()
    tokens = torch.randint(0, VOCABULARY, (1, length))

    def run(_: Any) -> object:
        model.zero_grad()
        loss = model(tokens, labels=tokens, position_ids=_positions(length), use_cache=False).loss
        loss.backward()
        return loss

    return run


def _positions(length: int) -> Tensor:
    return (torch.arange(length) % DOCUMENT)[None]
