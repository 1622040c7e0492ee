"""Packed rows: documents never see each other, however they are given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from flexmask_transformers import masks_of, use_mask
from flexmask_transformers.attention import attention_forward
from hf_models import one_layer, padding, pair, tokens
from test_hf_masks import positions
from test_hf_models import CLOSE, documents_alone
from torch.testing import assert_close
from transformers import DataCollatorWithFlattening, DynamicCache, StaticCache

from flexmask.errors import LoweringError, OperandError

LENGTHS = (5, 4, 3)


def collate(**options: bool) -> dict[str, Any]:
    ids = tokens(1)[0].split(LENGTHS)
    batch = DataCollatorWithFlattening(**options)([{"input_ids": document.tolist()} for document in ids])
    del batch["labels"]
    return dict(batch)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss", "llama4", "gpt2"])
@pytest.mark.parametrize("options", [{}, {"return_flash_attn_kwargs": True}, {"return_seq_idx": True}], ids=lambda o: "".join(o))
def test_the_collator_of_transformers(name: str, options: dict[str, bool]) -> None:
    eager, ours = pair(name)
    assert_close(ours(**collate(**options)).logits, documents_alone(eager, tokens(1), LENGTHS), **CLOSE)


@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral", "gpt_oss"])
@pytest.mark.parametrize("option", ["return_flash_attn_kwargs", "return_seq_idx"])
@pytest.mark.parametrize("use_cache", [False, True])
def test_without_positions(name: str, option: str, use_cache: bool) -> None:
    """The models that have rotary positions alone need none that restart."""
    eager, ours = pair(name)
    batch = collate(return_position_ids=False, **{option: True})
    assert "position_ids" not in batch
    assert_close(ours(**batch, use_cache=use_cache).logits, documents_alone(eager, tokens(1), LENGTHS), **CLOSE)


NUMBERS = torch.tensor([[1] * 5 + [2] * 4 + [3] * 2 + [0]])


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize(
    "given", [{}, {"position_ids": positions(12)}, {"position_ids": positions(5, 7)}], ids=["none", "one", "two"]
)
def test_document_numbers_alone_are_refused(given: dict[str, Any], use_cache: bool) -> None:
    """A 2-D mask with the number of each document, of which transformers reads only whether it is 0."""
    token = 9 if "position_ids" in given and not given["position_ids"][0, 5] else 5
    with pytest.raises(LoweringError, match=f"attention_mask numbers documents.*position_ids.*at token {token} of row 0"):
        pair("llama")[1](tokens(1), attention_mask=NUMBERS, use_cache=use_cache, **given)


def test_document_numbers_are_those_of_the_positions_or_one() -> None:
    eager, ours = pair("llama")
    found = ours(tokens(1), attention_mask=NUMBERS, position_ids=positions(*LENGTHS)).logits
    assert_close(found[:, :9], documents_alone(eager, tokens(1), LENGTHS)[:, :9], **CLOSE)
    assert_close(ours(tokens(1), attention_mask=2 * torch.ones_like(NUMBERS)).logits, eager(tokens(1)).logits, **CLOSE)


OTHERS: dict[str, torch.Tensor] = {
    "cu_seq_lens_q": torch.tensor([0, 5, 9, 12], dtype=torch.int32),
    "cu_seq_lens_k": torch.tensor([0, 5, 9, 12], dtype=torch.int32),
    "seq_idx": torch.tensor([[0] * 5 + [1] * 4 + [2] * 3], dtype=torch.int32),
}


def cu(*lengths: int) -> dict[str, torch.Tensor]:
    return {"cu_seq_lens_q": torch.tensor([0, *lengths]).cumsum(0)}


class TestSeveralDescriptions:
    """``position_ids``, ``cu_seq_lens`` and ``seq_idx`` are one packing, or an error."""

    def test_agreeing_ones_are_one_mask(self) -> None:
        eager, ours = pair("llama")
        wanted = documents_alone(eager, tokens(1), LENGTHS)
        for use_cache in (False, True):
            given: dict[str, Any] = {**OTHERS, "position_ids": positions(*LENGTHS), "use_cache": use_cache}
            assert_close(ours(tokens(1), **given).logits, wanted, **CLOSE)
            masks = masks_of(ours, input_ids=tokens(1), **given)
            assert {str(mask) for mask in masks.values()} == {"causal & document(ids=<int64[1, 12]>)"}

    @pytest.mark.parametrize("use_cache", [False, True])
    def test_positions_may_skip_some_at_a_document(self, use_cache: bool) -> None:
        """As those of the second half of a document do behind another one."""
        _, ours = pair("llama")
        places = torch.cat([torch.arange(5), torch.arange(8, 12), torch.arange(3)])[None]
        (mask, _) = masks_of(
            ours, input_ids=tokens(1), position_ids=places, cu_seq_lens_q=OTHERS["cu_seq_lens_q"], use_cache=use_cache
        ).values()
        ids = OTHERS["seq_idx"]
        assert torch.equal(mask.dense(12)[0, 0], torch.ones(12, 12, dtype=torch.bool).tril() & (ids[0, :, None] == ids))

    def test_positions_of_padding_have_no_meaning(self) -> None:
        eager, ours = pair("llama")
        keep = torch.tensor([[0, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1, 0]])
        places = torch.tensor([[1, 1, 0, 1, 2, 1, 1, 0, 1, 2, 3, 1]])
        offsets = torch.tensor([0, 6, 11, 12])
        found = ours(tokens(1), attention_mask=keep, position_ids=places, cu_seq_lens_q=offsets).logits
        for start, stop in ((2, 5), (7, 11)):
            assert_close(found[:, start:stop], eager(tokens(1)[:, start:stop]).logits, **CLOSE)
        with pytest.raises(LoweringError, match="row 0 a document starts at token 7 by position_ids alone"):
            ours(tokens(1), attention_mask=keep, position_ids=places, cu_seq_lens_q=torch.tensor([0, 8, 11, 12]))

    @pytest.mark.parametrize(
        ("first", "second", "given", "token", "alone"),
        [
            ("position_ids", "cu_seq_lens_q", {"position_ids": positions(7, 5), **cu(7, 2, 3)}, 9, "cu_seq_lens_q"),
            ("position_ids", "cu_seq_lens_q", {"position_ids": positions(7, 2, 3), **cu(7, 5)}, 9, "position_ids"),
            ("position_ids", "seq_idx", {"position_ids": positions(9, 3), "seq_idx": OTHERS["seq_idx"]}, 5, "seq_idx"),
            ("cu_seq_lens_q", "seq_idx", {"seq_idx": OTHERS["seq_idx"], **cu(5, 7)}, 9, "seq_idx"),
            (
                "cu_seq_lens_q",
                "cu_seq_lens_k",
                {**OTHERS, **cu(5, 4, 3), "cu_seq_lens_k": torch.tensor([0, 9, 12])},
                5,
                "cu_seq_lens_q",
            ),
        ],
    )
    @pytest.mark.parametrize("use_cache", [False, True])
    def test_contradicting_ones_are_refused(
        self, first: str, second: str, given: dict[str, Any], token: int, alone: str, use_cache: bool
    ) -> None:
        _, ours = pair("llama")
        message = (
            f"{first} and {second} describe different documents: in row 0 a document starts at token {token} by {alone} alone"
        )
        with pytest.raises(LoweringError, match=message):
            ours(tokens(1), **given, use_cache=use_cache)

    def test_in_a_graph(self) -> None:
        """With chunks, which start with each document."""
        eager, ours = one_layer("llama4")
        compiled: Any = torch.compile(ours, backend="eager", fullgraph=True)
        given = {"cu_seq_lens_q": OTHERS["cu_seq_lens_q"], "use_cache": False}
        found = compiled(tokens(1), position_ids=positions(*LENGTHS), **given).logits
        assert_close(found, documents_alone(eager, tokens(1), LENGTHS), **CLOSE)
        for places in (positions(7, 2, 3), positions(9, 3)):
            with pytest.raises(RuntimeError, match="position_ids and cu_seq_lens_q describe different documents"):
                compiled(tokens(1), position_ids=places, **given)
        for offsets in OFFSETS:
            with pytest.raises(RuntimeError, match="cu_seq_lens_q must start with 0"):
                compiled(
                    tokens(1), position_ids=positions(12), **{**given, "cu_seq_lens_q": torch.tensor(offsets, dtype=torch.int32)}
                )
        torch.compiler.reset()


@pytest.mark.parametrize("value", [torch.zeros(3), torch.zeros(1, 12, dtype=torch.bool), "0, 12"])
@pytest.mark.parametrize("name", OTHERS)
def test_other_dtypes_are_refused(name: str, value: Any) -> None:
    _, ours = pair("llama")
    with pytest.raises(OperandError, match=f"{name} must be (int32 or int64|a tensor of integers), got"):
        ours(tokens(1), **{name: value})


def test_chunks_need_positions() -> None:
    _, ours = pair("llama4")
    with pytest.raises(LoweringError, match="also give position_ids"):
        ours(**collate(return_position_ids=False, return_seq_idx=True))


def test_two_rows_with_padding() -> None:
    eager, ours = pair("llama")
    ids, keep = tokens(2), torch.ones(2, 12, dtype=torch.int64)
    keep[1, 9:] = 0
    places = torch.cat([positions(5, 4, 3), positions(2, 7, 3)])
    found = ours(ids, position_ids=places, attention_mask=keep).logits
    assert_close(found[:1], documents_alone(eager, ids[:1], (5, 4, 3)), **CLOSE)
    assert_close(found[1:, :9], documents_alone(eager, ids[1:, :9], (2, 7)), **CLOSE)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("filler", [0, 1])
def test_positions_of_padding_do_not_start_documents(side: str, filler: int) -> None:
    """Tokenizers number padding with 0 or 1, also where that is after or before larger numbers."""
    eager, ours = pair("llama")
    keep = torch.ones(1, 12, dtype=torch.int64)
    keep[:, 9:] = 0
    keep = keep.flip(1) if side == "left" else keep
    places = (keep.cumsum(-1) - 1).masked_fill(keep == 0, filler)
    found = ours(tokens(1), attention_mask=keep, position_ids=places).logits
    wanted = eager(tokens(1), attention_mask=keep, position_ids=places).logits
    assert_close(found[keep.bool()], wanted[keep.bool()], **CLOSE)


def test_a_gap_in_the_padding_does_not_start_a_document() -> None:
    eager, ours = pair("llama")
    keep = torch.ones(1, 12, dtype=torch.int64)
    keep[:, [1, 5, 6]] = 0
    places = keep.cumsum(-1) - 1
    found = ours(tokens(1), attention_mask=keep, position_ids=places).logits
    wanted = eager(tokens(1), attention_mask=keep, position_ids=places).logits
    assert_close(found[keep.bool()], wanted[keep.bool()], **CLOSE)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss", "llama4"])
def test_padding_between_documents(name: str) -> None:
    eager, ours = pair(name)
    keep = torch.tensor([[1, 1, 1, 1, 0, 0, 1, 1, 1, 0, 1, 1]])
    places = torch.tensor([[0, 1, 2, 3, 1, 1, 0, 1, 2, 7, 0, 1]])
    found = ours(tokens(1), attention_mask=keep, position_ids=places).logits
    for start, stop in ((0, 4), (6, 9), (10, 12)):
        assert_close(found[:, start:stop], eager(tokens(1)[:, start:stop]).logits, **CLOSE)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss"])
class TestCaches:
    def test_a_static_cache(self, name: str) -> None:
        eager, ours = pair(name)
        cache = StaticCache(config=ours.config, max_cache_len=16)
        found = ours(tokens(1), position_ids=positions(*LENGTHS), past_key_values=cache).logits
        assert_close(found, documents_alone(eager, tokens(1), LENGTHS), **CLOSE)

    @pytest.mark.parametrize("length", [1, 3])
    def test_tokens_after_packed_rows_are_refused(self, name: str, length: int) -> None:
        _, ours = pair(name)
        cache = ours(tokens(1), position_ids=positions(*LENGTHS), use_cache=True).past_key_values
        with pytest.raises(LoweringError, match="the cache holds the keys of several packed documents"):
            ours(tokens(1, length), past_key_values=cache)

    @pytest.mark.parametrize("given", OTHERS)
    def test_tokens_after_documents_of_other_arguments_are_refused(self, name: str, given: str) -> None:
        _, ours = pair(name)
        cache = ours(tokens(1), **{given: OTHERS[given]}, use_cache=True).past_key_values
        with pytest.raises(LoweringError, match="the cache holds the keys of several packed documents"):
            ours(tokens(1, 1), past_key_values=cache)

    def test_packed_rows_after_other_tokens_are_refused(self, name: str) -> None:
        _, ours = pair(name)
        cache = DynamicCache(config=ours.config)
        ours(tokens(1, 4), past_key_values=cache)
        with pytest.raises(LoweringError, match="the cache holds 4 tokens already"):
            ours(tokens(1), position_ids=positions(*LENGTHS), past_key_values=cache)

    def test_a_cache_is_usable_again_after_a_reset(self, name: str) -> None:
        eager, ours = pair(name)
        cache = StaticCache(config=ours.config, max_cache_len=16)
        ours(tokens(1), position_ids=positions(*LENGTHS), past_key_values=cache)
        cache.reset()
        ours(tokens(1), past_key_values=cache)
        found = ours(tokens(1, 1, seed=5), past_key_values=cache).logits
        whole = torch.cat([tokens(1), tokens(1, 1, seed=5)], 1)
        assert_close(found, eager(whole).logits[:, -1:], **CLOSE)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_prompt_in_two_parts_with_padding(side: str) -> None:
    """The positions of padding tokens, which start again, begin no document in the second part either."""
    eager, ours = one_layer("llama")
    keep, cache = padding(side), DynamicCache(config=ours.config)
    places = (keep.cumsum(-1) - 1).clamp(min=0).masked_fill(keep == 0, 1)
    parts = [
        ours(tokens()[:, part], attention_mask=keep[:, : part.stop], position_ids=places[:, part], past_key_values=cache).logits
        for part in (slice(0, 6), slice(6, 12))
    ]
    wanted = eager(tokens(), attention_mask=keep, position_ids=places).logits
    assert_close(torch.cat(parts, 1)[keep.bool()], wanted[keep.bool()], **CLOSE)


def test_tokens_after_one_document() -> None:
    eager, ours = pair("llama")
    cache = ours(tokens(1), cu_seq_lens_q=torch.tensor([0, 12]), use_cache=True).past_key_values
    found = ours(tokens(1, 1, seed=5), past_key_values=cache).logits
    assert_close(found, eager(torch.cat([tokens(1), tokens(1, 1, seed=5)], 1)).logits[:, -1:], **CLOSE)


@pytest.mark.slow
def test_tokens_after_packed_rows_of_a_graph_are_refused() -> None:
    _, ours = one_layer("llama")
    compiled: Any = torch.compile(ours, backend="eager", fullgraph=True)
    for given in ({"position_ids": positions(*LENGTHS)}, {"cu_seq_lens_q": OTHERS["cu_seq_lens_q"]}):
        with torch.no_grad():
            cache = compiled(tokens(1), **given, use_cache=True).past_key_values
            with pytest.raises(LoweringError, match="the cache holds the keys of several packed documents"):
                ours(tokens(1, 1), past_key_values=cache)
    with torch.no_grad():
        cache = compiled(tokens(1), **given, use_cache=True).past_key_values
        with pytest.raises(RuntimeError, match="the cache holds the keys of several packed documents"):
            compiled(tokens(1, 1), past_key_values=cache)
    torch.compiler.reset()


def test_documents_with_another_number_of_keys_are_refused() -> None:
    _, ours = pair("llama")
    cache = ours(tokens(1, 4), use_cache=True).past_key_values
    with pytest.raises(LoweringError, match="describe 12 tokens, but there are 16 keys"):
        ours(tokens(1), seq_idx=torch.zeros(1, 12, dtype=torch.int32), past_key_values=cache)


def test_wrong_shapes_are_refused() -> None:
    _, ours = pair("llama")
    with pytest.raises(LoweringError, match=r"seq_idx must be \[1, 12\], .* got \[1, 5\]"):
        ours(tokens(1), seq_idx=torch.zeros(1, 5, dtype=torch.int32))


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_documents_next_to_a_tensor_of_four_axes(kind: str) -> None:
    eager, ours = pair("llama")
    cells = torch.ones(12, 12, dtype=torch.bool).tril()[None, None]
    mask = cells if kind == "bool" else torch.where(cells, 0.0, torch.finfo(torch.float32).min)
    found = ours(tokens(1), attention_mask=mask, cu_seq_lens_q=torch.tensor([0, 5, 9, 12])).logits
    assert_close(found, documents_alone(eager, tokens(1), LENGTHS), **CLOSE)


class LoneLayer(torch.nn.Module):
    """The attention of a model that makes no mask of its own, and gives positions to its layers."""

    is_causal = True

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return attention_forward(self, x, x, x, None, position_ids=position_ids)[0]


@pytest.mark.parametrize("is_graph", [False, True])
def test_a_layer_without_a_mask_refuses_packed_rows(is_graph: bool) -> None:
    layer: Any = torch.compile(LoneLayer(), backend="eager", fullgraph=True) if is_graph else LoneLayer()
    x = torch.randn(1, 2, 12, 8)
    assert_close(
        layer(x, positions(12)), torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True).transpose(1, 2)
    )
    with pytest.raises(
        (LoweringError, RuntimeError), match="restart inside a row, and LoneLayer attends with a mask that was made"
    ):
        layer(x, positions(*LENGTHS))


def test_masks_next_to_a_tensor_have_the_documents() -> None:
    _, ours = pair("llama")
    visible = torch.ones(1, 1, 12, 12, dtype=torch.bool).tril()
    packed: dict[str, Any] = {"attention_mask": visible, "cu_seq_lens_q": torch.tensor([0, 5, 9, 12], dtype=torch.int32)}
    ids = torch.arange(3).repeat_interleave(torch.tensor(LENGTHS))
    for mask in masks_of(ours, input_ids=tokens(1), **packed).values():
        assert torch.equal(mask.dense(12), visible & (ids[:, None] == ids))


@pytest.mark.parametrize("is_static", [False, True])
def test_packed_rows_behind_other_tokens_in_a_graph(is_static: bool) -> None:
    _, ours = one_layer("llama")
    compiled: Any = torch.compile(ours, backend="eager", fullgraph=True)
    for places in (positions(12) + 12, positions(5, 7)):
        cache = StaticCache(config=ours.config, max_cache_len=32) if is_static else DynamicCache()
        with torch.no_grad():
            ours(tokens(1), past_key_values=cache)
            if places[0, 0]:
                compiled(tokens(1), past_key_values=cache, position_ids=places)
                continue
            with pytest.raises(RuntimeError, match="position_ids restart inside a row, where the cache is not empty"):
                compiled(tokens(1), past_key_values=cache, position_ids=places)
    torch.compiler.reset()


OFFSETS = [[1, 5, 9, 12], [0, 7, 5, 12], [0, 5, 9, 11], [0, 5, 9, 13]]


@pytest.mark.parametrize("offsets", [*OFFSETS, [0], [[0, 12]]])
def test_offsets_that_do_not_fit_the_row(offsets: list[int]) -> None:
    _, ours = pair("llama")
    with pytest.raises(
        LoweringError, match=r"cu_seq_lens_q must (start with 0, not decrease, and end with .* 12; got|be \[n \+ 1\])"
    ):
        ours(tokens(1), cu_seq_lens_q=torch.tensor(offsets, dtype=torch.int32))


def test_a_mask_in_place_of_all_others_has_no_documents() -> None:
    _, ours = one_layer("llama")
    compiled: Any = torch.compile(ours, backend="eager", fullgraph=True)
    wanted = ours(tokens(1), attention_mask="causal & sliding_window(size=8)").logits
    packing = {name: OTHERS[name] for name in ("cu_seq_lens_q", "seq_idx")}
    for model in (ours, compiled):
        with use_mask(ours, "causal & sliding_window(size=8)", combine="replace"):
            assert_close(model(tokens(1), **packing).logits, wanted, **CLOSE)
    torch.compiler.reset()
