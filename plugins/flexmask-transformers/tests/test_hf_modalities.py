"""Images, sound, and images within text, against ``eager``; and models that are not supported."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from hf_models import TEXT, VISION, make_pair, padding, pair, tokens
from test_hf_models import CLOSE, compare
from torch.testing import assert_close


def pixels(batch: int, size: int) -> torch.Tensor:
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(2))


def test_vit() -> None:
    models = make_pair(transformers.ViTModel, lambda: transformers.ViTConfig(**VISION))
    compare(models, {"pixel_values": pixels(2, 12)}, output="last_hidden_state")


def test_clip_has_both_kinds_of_masks() -> None:
    text = {**TEXT, "projection_dim": 16}
    eager, ours = make_pair(
        transformers.CLIPModel,
        lambda: transformers.CLIPConfig(text_config=text, vision_config={**VISION, "projection_dim": 16}, projection_dim=16),
    )
    inputs = {"input_ids": tokens(), "attention_mask": padding("right"), "pixel_values": pixels(2, 12)}
    assert_close(ours(**inputs).logits_per_image, eager(**inputs).logits_per_image, **CLOSE)


def test_whisper() -> None:
    def config() -> transformers.WhisperConfig:
        return transformers.WhisperConfig(
            vocab_size=64,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            num_mel_bins=8,
            max_source_positions=10,
            max_target_positions=32,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
            suppress_tokens=None,
            begin_suppress_tokens=None,
        )

    eager, ours = make_pair(transformers.WhisperForConditionalGeneration, config)
    sound = torch.randn(2, 8, 20, generator=torch.Generator().manual_seed(3))
    compare((eager, ours), {"input_features": sound, "decoder_input_ids": tokens(2, 6)})
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    assert ours.generate(sound, **options).tolist() == eager.generate(sound, **options).tolist()


class TestImageBlocks:
    """Gemma 3: the tokens of an image attend to each other in both directions, within causal text."""

    IMAGE, TOKENS = 60, 9

    def models(self) -> tuple[Any, ...]:
        def config() -> transformers.Gemma3Config:
            return transformers.Gemma3Config(
                text_config={**TEXT, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
                vision_config=VISION,
                mm_tokens_per_image=self.TOKENS,
                image_token_index=self.IMAGE,
                boi_token_index=61,
                eoi_token_index=62,
            )

        return make_pair(transformers.Gemma3ForConditionalGeneration, config)

    def inputs(self) -> dict[str, torch.Tensor]:
        text = tokens(2, 16) % 50 + 3
        text[:, 3 : 3 + self.TOKENS] = self.IMAGE
        return {"input_ids": text, "token_type_ids": (text == self.IMAGE).long(), "pixel_values": pixels(2, 12)}

    def test_logits_and_gradients(self) -> None:
        compare(self.models(), self.inputs())

    def test_generated(self) -> None:
        eager, ours = self.models()
        options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
        assert ours.generate(**self.inputs(), **options).tolist() == eager.generate(**self.inputs(), **options).tolist()


class TestUnsupported:
    def test_a_model_with_its_own_attention_is_refused(self) -> None:
        config = transformers.FalconConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
        with pytest.raises(ValueError, match="FalconForCausalLM does not support attn_implementation='flexmask'"):
            transformers.FalconForCausalLM._from_config(config, attn_implementation="flexmask")

    def test_a_model_that_computes_with_its_mask_is_refused(self) -> None:
        _, ours = pair("llama")
        layer = ours.model.layers[0].self_attn
        forward = layer.forward

        def computes(*args: object, attention_mask: torch.Tensor, **kwargs: object) -> object:
            return forward(*args, attention_mask=attention_mask + 0.0, **kwargs)

        layer.forward = computes
        try:
            with pytest.raises(NotImplementedError, match="computes with its attention mask itself"):
                ours(tokens())
        finally:
            layer.forward = forward

    @pytest.mark.parametrize("argument", ["cache", "sinks", "block_indices"])
    def test_arguments_that_change_attention_are_refused(self, argument: str) -> None:
        _, ours = pair("llama")
        with pytest.raises(ValueError, match=rf"flexmask does not support .*\({argument}=\)"):
            ours(tokens(), **{argument: torch.ones(1)})
