"""Wrong arguments: errors of flexmask, which say what to give, and never other numbers."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from flexmask_transformers import check_packing, masks_of, to_mask, use_mask
from flexmask_transformers.arguments import GivenMask, as_cells
from hf_models import TEXT, one_layer, pair, tokens
from test_hf_masks import positions
from test_hf_models import CLOSE
from torch.testing import assert_close

import flexmask
from flexmask.errors import ExpressionError, FlexmaskError, LoweringError, OperandError

SHORT = {name: TEXT[name] for name in ("vocab_size", "hidden_size", "num_attention_heads")} | {"num_hidden_layers": 1}


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, dtype=torch.int64)


MASKS: list[tuple[Any, type[FlexmaskError], str]] = [
    (ones(1, 11), LoweringError, "attention_mask has 11 tokens for 12 tokens; it must have 12"),
    (ones(1, 13), LoweringError, "attention_mask has 13 tokens for 12 tokens; it must have 12"),
    (ones(2, 12), LoweringError, "attention_mask has 2 rows, and the model got 1"),
    (ones(12), OperandError, "[B, tokens] or [B, H, q_len, kv_len], a Mask, its text or a mask_mod, got a tensor [12]"),
    (ones(1, 12, 12), OperandError, "got a tensor [1, 12, 12]"),
    ([[1] * 12], OperandError, "got list"),
    (ones(1, 12).numpy(), OperandError, "got ndarray"),
    ({}, OperandError, "got dict"),
    (torch.tensor([[0.0] * 10 + [-torch.inf] * 2]), OperandError, "has other values. Of an additive mask give (mask == 0)"),
    (torch.ones(1, 12, device="meta"), OperandError, "attention_mask is on meta, without values, and the model on cpu"),
    (ones(1, 1, 12, 11), LoweringError, "must be [1, 4, 12, 12] or have 1 in their place, got [1, 1, 12, 11]"),
    (torch.zeros(1, 1, 12, 13), LoweringError, "got [1, 1, 12, 13]"),
    (torch.zeros(2, 1, 12, 12), LoweringError, "got [2, 1, 12, 12]"),
    (ones(1, 1, 12, 12) * 2, OperandError, "an integer attention_mask of four axes has 1 for visible and 0 for hidden"),
    (torch.ones(1, 1, 12, 12, dtype=torch.complex64), OperandError, "must be bool, integers or float, got complex64"),
]


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize(("mask", "kind", "message"), MASKS)
def test_masks_that_do_not_fit(mask: Any, kind: type[FlexmaskError], message: str, use_cache: bool) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        pair("llama")[1](tokens(1), attention_mask=mask, use_cache=use_cache)


@pytest.mark.parametrize("name", ["bert", "roberta", "modernbert", "t5"])
@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2, 11), "attention_mask has 11 tokens for 12 keys; it must have 12"),
        ((2, 13), "attention_mask has 13 tokens for 12 keys; it must have 12"),
        ((3, 12), "attention_mask has 3 rows, and the model got 2"),
        ((1, 12), "attention_mask has 1 rows, and the model got 2"),
    ],
)
def test_masks_that_do_not_fit_an_encoder(name: str, shape: tuple[int, int], message: str) -> None:
    decoder = {"decoder_input_ids": tokens()} if name == "t5" else {}
    with pytest.raises(LoweringError, match=re.escape(message)):
        pair(name)[1](tokens(), attention_mask=ones(*shape), **decoder)


def test_masks_of_other_rows_than_those_of_the_encoder() -> None:
    ours = pair("t5")[1]
    encoded = transformers.modeling_outputs.BaseModelOutput(ours.encoder(tokens()).last_hidden_state)
    with pytest.raises(LoweringError, match="attention_mask has 3 rows, and the model got 2"):
        ours(encoder_outputs=encoded, attention_mask=ones(3, 12), decoder_input_ids=tokens())


def model_that_reads_its_mask(name: str) -> Any:
    if name == "GPT2Model":
        return pair("gpt2")[1]
    config: Any = transformers.OPTConfig(**SHORT, ffn_dim=48, word_embed_proj_dim=32)
    if name == "BambaModel":
        sizes = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8}
        config = transformers.BambaConfig(**SHORT, num_key_value_heads=2, attn_layer_indices=[0], **sizes)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="flexmask").eval()


@pytest.mark.parametrize("name", ["GPT2Model", "OPTDecoder", "BambaModel"])
@pytest.mark.parametrize("mask", ["causal & sliding_window(size=3)", flexmask.causal(), lambda b, h, q, kv: q >= kv])
def test_models_that_read_their_mask(name: str, mask: Any) -> None:
    model = model_that_reads_its_mask(name)
    message = (
        f"{name} itself reads its attention_mask, which must then be a tensor. Give your mask with flexmask_transformers.use"
    )
    with pytest.raises(OperandError, match=message):
        model(tokens(), attention_mask=mask)
    with pytest.raises(OperandError, match=message):
        model(tokens(), mask) if name == "OPTDecoder" else model(input_ids=tokens(), attention_mask=mask)
    with use_mask(model, mask, combine="replace"):  # the remedy
        assert model(tokens()).logits.shape == (2, 12, 64)


def test_what_models_do_with_a_mask() -> None:
    given: Any = GivenMask("causal", "SomeModel")
    uses: list[Callable[[], object]] = [
        lambda: given.shape,
        lambda: given[:, None],
        lambda: len(given),
        lambda: bool(given),
        lambda: 0 in given,
        lambda: given == 0,
        lambda: given < 1,
        lambda: 1 - given,
        lambda: given & True,
        lambda: ~given,
        lambda: torch.cumsum(given, 1),
        lambda: torch.cat([ones(1, 2), given], 1),
        lambda: ones(1, 2) * given,
    ]
    for use in uses:
        with pytest.raises(OperandError, match="SomeModel itself reads its attention_mask"):
            use()
    assert copy.copy(given).mask == "causal"


@pytest.mark.parametrize("q_len", [1, 5])
@pytest.mark.parametrize("is_static", [False, True])
def test_masks_behind_a_cache(q_len: int, is_static: bool) -> None:
    """A mask of the new tokens alone would count them as padding."""
    eager, ours = pair("llama")
    cache = transformers.StaticCache(config=ours.config, max_cache_len=16) if is_static else transformers.DynamicCache()
    ours(tokens(1, 4), past_key_values=cache)
    for length in (q_len, 3 + q_len, *(() if is_static else (5 + q_len,))):
        message = (
            f"attention_mask has {length} tokens for 4 tokens in the cache and {q_len} of this call; it must have {4 + q_len}"
        )
        with pytest.raises(LoweringError, match=message):
            ours(tokens(1, q_len), attention_mask=ones(1, length), past_key_values=cache)
    found = ours(tokens(1, q_len, seed=3), attention_mask=ones(1, 4 + q_len), past_key_values=cache).logits
    whole = torch.cat([tokens(1, 4), tokens(1, q_len, seed=3)], 1)
    assert_close(found, eager(whole).logits[:, 4:], **CLOSE)


@pytest.mark.slow
def test_masks_that_do_not_fit_in_a_graph() -> None:
    compiled: Any = torch.compile(one_layer("llama")[1], backend="eager", fullgraph=True)
    with pytest.raises(RuntimeError, match="a 2-D attention_mask has 1 for real tokens"):
        compiled(tokens(1), attention_mask=torch.tensor([[0.0] * 10 + [-torch.inf] * 2]))
    with pytest.raises(RuntimeError, match="attention_mask numbers documents"):
        compiled(tokens(1), attention_mask=torch.tensor([[1] * 7 + [2] * 5]))
    torch.compiler.reset()


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float32, torch.bfloat16])
def test_dtypes_of_masks_of_tokens(dtype: torch.dtype) -> None:
    eager, ours = pair("llama")
    keep = torch.tensor([[0] * 3 + [1] * 9])
    found = ours(tokens(1), attention_mask=keep.to(dtype)).logits
    assert_close(found[:, 3:], eager(tokens(1), attention_mask=keep).logits[:, 3:], **CLOSE)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32, torch.bfloat16, torch.float64])
def test_dtypes_of_masks_of_cells(dtype: torch.dtype) -> None:
    eager, ours = pair("llama")
    cells = ones(12, 12).tril()[None, None]
    given = cells.to(dtype) if dtype in (torch.bool, torch.int64) else torch.where(cells > 0, 0.0, -torch.inf).to(dtype)
    assert_close(ours(tokens(1), attention_mask=given).logits, eager(tokens(1)).logits, **CLOSE)


@pytest.mark.parametrize("name", ["llama", "bert"])
@pytest.mark.parametrize("shape", [(1, 0), (0, 5)])
def test_no_tokens(name: str, shape: tuple[int, int]) -> None:
    with pytest.raises(LoweringError, match=rf"the model got tokens \[{shape[0]}, {shape[1]}\]; give at least one"):
        pair(name)[1](torch.ones(shape, dtype=torch.int64))


def test_shapes_without_values() -> None:
    """The meta device computes shapes alone."""
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM._from_config(transformers.LlamaConfig(**TEXT), attn_implementation="flexmask")
        places, offsets, keep = positions(5, 7).to("meta"), torch.tensor([0, 5, 12]), ones(1, 12)
        for given in ({}, {"position_ids": places}, {"cu_seq_lens_q": offsets}, {"attention_mask": keep}):
            for use_cache in (False, True):
                assert model(tokens(1).to("meta"), **given, use_cache=use_cache).logits.shape == (1, 12, 64)
    with pytest.raises(ValueError, match="LlamaForCausalLM is on meta, where its weights have no values"):
        check_packing(model)


@pytest.mark.parametrize("model", [torch.nn.Linear(2, 2), None, "model", transformers.LlamaForCausalLM])
def test_other_models(model: Any) -> None:
    with pytest.raises(OperandError, match="masks_of takes a model of transformers"):
        masks_of(model, input_ids=tokens())
    with pytest.raises(OperandError, match=r"use_mask (takes|needs) a model of transformers"), use_mask(model, "causal"):
        pass
    if model != "model":  # the path of a config
        with pytest.raises(OperandError, match="a model of transformers"):
            check_packing(model)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"attention": "sdpa"}, OperandError, "attention must be a list of names, such as ['sdpa', 'flexmask'], got 'sdpa'"),
        ({"attention": [3]}, OperandError, "attention must be a list of names"),
        ({"attention": []}, ExpressionError, "nothing would be checked"),
        ({"lengths": 3}, OperandError, "lengths must be a list of integers, got 3"),
        ({"lengths": (2.5, 3)}, OperandError, "lengths must be a list of integers"),
        ({"lengths": (0, 3)}, ExpressionError, "at least two documents of at least one token, got lengths=[0, 3]"),
        ({"tolerance": "x"}, OperandError, "tolerance must be a number, got str"),
        ({"tolerance": float("nan")}, ExpressionError, "tolerance must be at least 0, got nan"),
    ],
)
def test_other_checks(options: dict[str, Any], kind: type[FlexmaskError], message: str) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        check_packing(pair("llama")[0], **options)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("causal", "to_mask takes a tensor"),
        (torch.full((1, 1, 2, 2), torch.nan), "this one has other values"),
        (ones(1, 1, 2, 2) * 2, "has 1 for visible and 0 for hidden"),
        (torch.ones(1, 1, 2, 2, dtype=torch.complex64), "got complex64"),
        (torch.ones(1, 1, 2, 2).to_sparse(), "convert it with .to_dense()"),
        (torch.zeros(1, 1, 2, 2, device="meta"), "on meta, where it has none"),
        (torch.zeros(1, 2), "keep must hold integers or truth values"),
    ],
)
def test_other_tensors(given: Any, message: str) -> None:
    with pytest.raises(OperandError, match=re.escape(message)):
        to_mask(given)


def test_a_mask_of_fixed_sizes_fits_lengths_that_vary() -> None:
    query, keep = torch.zeros(2, 4, 12, 8), torch.ones(2, 1, 12, 12, dtype=torch.bool)
    torch._dynamo.maybe_mark_dynamic(query, 2)
    compiled = torch.compile(lambda query: as_cells(keep, query, query.shape[2]), backend="eager", fullgraph=True)
    assert torch.equal(compiled(query), keep)
