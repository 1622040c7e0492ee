"""Logits, gradients and generated tokens of many families, against ``eager``, and where that leaks, each document alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import transformers
from hf_models import CAUSAL, ENCODERS, SEQ2SEQ, gradients, of_transformers, padding, pair, tokens
from torch.testing import assert_close

LENGTHS = (5, 7)
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 2e-5}


def compare(models: tuple[Any, ...], inputs: dict[str, Any], keep: torch.Tensor | None = None, output: str = "logits") -> None:
    """Asserts equal outputs at real tokens, and equal gradients of a loss of them."""
    eager, ours = models
    expected, found = getattr(eager(**inputs), output), getattr(ours(**inputs), output)
    real = torch.ones(expected.shape[:2], dtype=torch.bool) if keep is None else keep.bool()
    assert_close(found[real], expected[real], **CLOSE)
    factor = torch.randn(expected[real].shape, generator=torch.Generator().manual_seed(1))
    wanted = gradients(eager, (expected[real] * factor).sum())
    got = gradients(ours, (found[real] * factor).sum())
    assert wanted.keys() == got.keys()
    for name in wanted:
        assert_close(got[name], wanted[name], rtol=1e-3, atol=1e-3, msg=partial("{}: {}".format, name))


def packed_positions(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.cat([torch.arange(length) for length in lengths])[None]


def documents_alone(model: Any, ids: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.cat([model(part, use_cache=False).logits for part in ids.split(lengths, 1)], 1)


@pytest.mark.parametrize("name", CAUSAL)
class TestCausal:
    def test_plain(self, name: str) -> None:
        compare(pair(name), {"input_ids": tokens()})

    @pytest.mark.parametrize("side", ["right", "left"])
    def test_padded(self, name: str, side: str) -> None:
        keep = padding(side)
        positions = (keep.cumsum(-1) - 1).clamp(min=0)
        compare(pair(name), {"input_ids": tokens(), "attention_mask": keep, "position_ids": positions}, keep)

    @pytest.mark.parametrize("use_cache", [False, True])
    @pytest.mark.parametrize("with_mask", [False, True])
    def test_packed(self, name: str, use_cache: bool, with_mask: bool) -> None:
        eager, ours = pair(name)
        ids = tokens(1)
        options = {"attention_mask": torch.ones_like(ids)} if with_mask else {}
        found = ours(ids, position_ids=packed_positions(LENGTHS), use_cache=use_cache, **options).logits
        assert_close(found, documents_alone(eager, ids, LENGTHS), **CLOSE)

    def test_packed_gradients(self, name: str) -> None:
        eager, ours = pair(name)
        ids = tokens(1)
        expected = documents_alone(eager, ids, LENGTHS)
        factor = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
        wanted = gradients(eager, (expected * factor).sum())
        got = gradients(ours, (ours(ids, position_ids=packed_positions(LENGTHS)).logits * factor).sum())
        for parameter in wanted:
            assert_close(got[parameter], wanted[parameter], rtol=1e-3, atol=1e-3)

    @pytest.mark.parametrize("is_static", [False, True])
    def test_cached(self, name: str, is_static: bool) -> None:
        """A prompt in two parts, then single tokens, against the whole sequence at once."""
        eager, ours = pair(name)
        ids, keep = tokens(), padding("left")
        positions = (keep.cumsum(-1) - 1).clamp(min=0)
        expected = eager(ids, attention_mask=keep, position_ids=positions).logits
        cache = transformers.StaticCache(config=ours.config, max_cache_len=16) if is_static else None
        parts = []
        for start, stop in ((0, 6), (6, 10), (10, 11), (11, 12)):
            part = ours(
                ids[:, start:stop],
                attention_mask=keep[:, :stop],
                position_ids=positions[:, start:stop],
                past_key_values=cache,
                use_cache=True,
            )
            cache = part.past_key_values
            parts.append(part.logits)
        assert_close(torch.cat(parts, 1)[keep.bool()], expected[keep.bool()], **CLOSE)

    @pytest.mark.parametrize("how", [{}, {"cache_implementation": "static"}, {"num_beams": 2}], ids=["greedy", "static", "beam"])
    def test_generated(self, name: str, how: dict[str, Any]) -> None:
        keep = padding("left", 8)
        options = {
            "attention_mask": keep,
            "max_new_tokens": 5,
            "do_sample": False,
            "eos_token_id": None,
            "pad_token_id": 0,
            **how,
        }
        eager, ours = pair(name)
        wanted = of_transformers(lambda: eager.generate(tokens(2, 8), **options))
        assert ours.generate(tokens(2, 8), **options).tolist() == wanted.tolist()


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("side", [None, "right", "left"])
def test_encoders(name: str, side: str | None) -> None:
    keep = None if side is None else padding(side)
    inputs = {} if keep is None else {"attention_mask": keep}
    compare(pair(name), {"input_ids": tokens(), **inputs}, keep)


@pytest.mark.parametrize("name", SEQ2SEQ)
class TestSeq2Seq:
    def test_padded(self, name: str) -> None:
        keep = padding("right")
        compare(pair(name), {"input_ids": tokens(), "attention_mask": keep, "decoder_input_ids": tokens(2, 7, seed=1)})

    @pytest.mark.parametrize("how", [{}, {"num_beams": 2}, {"cache_implementation": "static"}], ids=["greedy", "beam", "static"])
    def test_generated(self, name: str, how: dict[str, Any]) -> None:
        options = {"attention_mask": padding("right"), "max_new_tokens": 5, "do_sample": False, "eos_token_id": None, **how}
        eager, ours = pair(name)
        assert ours.generate(tokens(), **options).tolist() == eager.generate(tokens(), **options).tolist()


@pytest.mark.parametrize("name", [*CAUSAL, *ENCODERS, *SEQ2SEQ])
def test_mixed_precision(name: str) -> None:
    """Logits and gradients under autocast are as close to those in float32 as rounding lets them be."""
    keep, inputs = padding("right"), {"input_ids": tokens(), "attention_mask": padding("right")}
    if name in SEQ2SEQ:
        inputs["decoder_input_ids"], keep = tokens(2, 7, seed=1), torch.ones(2, 7)
    found = []
    for own, is_on in zip(pair(name), (False, True), strict=True):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_on):
            logits = own(**inputs).logits.float()[keep.bool()]
        found.append((logits, torch.cat([one.flatten() for one in gradients(own, logits.square().sum()).values()])))
    for wanted, got in zip(*found, strict=True):
        assert (got - wanted).norm() < 0.03 * wanted.norm()


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "bert", "t5"])
def test_attention_weights(name: str) -> None:
    keep = padding("left")
    inputs = {"input_ids": tokens(), "attention_mask": keep, "output_attentions": True}
    if name == "t5":
        inputs["decoder_input_ids"] = tokens(2, 7, seed=1)
    names = ["encoder_attentions", "decoder_attentions", "cross_attentions"] if name == "t5" else ["attentions"]
    eager, ours = (own(**inputs) for own in pair(name))
    for kind in names:
        found, wanted = getattr(ours, kind), getattr(eager, kind)
        assert len(found) == len(wanted) == 2
        for own, other in zip(found, wanted, strict=True):
            rows = keep.bool() if own.shape[2] == 12 else torch.ones(2, 7, dtype=torch.bool)
            assert_close(own.transpose(1, 2)[rows], other.transpose(1, 2)[rows], **CLOSE)
