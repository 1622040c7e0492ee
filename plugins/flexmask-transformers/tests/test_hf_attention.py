"""The attention function alone, against softmax written out in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from flexmask_transformers.dense import dense_attention
from flexmask_transformers.model_mask import ModelMask
from flexmask_transformers.scores import Scores
from torch import Tensor
from torch.testing import assert_close
from transformers import AttentionInterface

from flexmask import Mask, causal, document, full, key_padding
from flexmask.errors import LoweringError, OperandError, TextError
from flexmask.scores import Score

HEADS, KV_HEADS, WIDTH = 4, 2, 8


class Layer(torch.nn.Module):
    """What attention reads of a layer."""

    def __init__(self, is_causal: bool = True) -> None:
        super().__init__()
        self.is_causal = is_causal


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Any, *, is_causal: bool = True, **options: Any) -> Tensor:
    out = AttentionInterface()["flexmask"](Layer(is_causal), query, key, value, mask, **options)[0]
    assert isinstance(out, Tensor)
    return out.transpose(1, 2)


def reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cells: Tensor,
    scaling: float = WIDTH**-0.5,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
    s_aux: Tensor | None = None,
) -> Tensor:
    """Each head and query by itself."""
    query, key, value = query.double(), key.double(), value.double()
    out = torch.zeros(*query.shape[:3], value.shape[3], dtype=torch.float64)
    for b in range(query.shape[0]):
        for h in range(query.shape[1]):
            own = h // (query.shape[1] // key.shape[1])
            for q in range(query.shape[2]):
                visible = cells[b % len(cells), 0, q].nonzero()[:, 0].tolist()
                if not visible:
                    continue
                scores = []
                for kv in visible:
                    score = query[b, h, q] @ key[b, own, kv] * scaling
                    score = score if softcap is None else softcap * torch.tanh(score / softcap)
                    scores.append(score if position_bias is None else score + position_bias[b % len(position_bias), h, q, kv])
                exponents = torch.stack(scores).exp()
                total = exponents.sum() + (0 if s_aux is None else s_aux[h].double().exp())
                out[b, h, q] = (exponents / total) @ value[b, own, visible]
    return out


def tensors(q_len: int, kv_len: int, batch: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = ((batch, HEADS, q_len, WIDTH), (batch, KV_HEADS, kv_len, WIDTH), (batch, KV_HEADS, kv_len, WIDTH - 2))
    query, key, value = (torch.randn(shape, generator=draw) for shape in shapes)
    return query, key, value


DRAW = torch.Generator().manual_seed(1)
SCORES: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaling": {"scaling": 0.3},
    "softcap": {"softcap": 1.5},
    "sinks": {"s_aux": torch.randn(HEADS, generator=DRAW)},
    "bias": {"position_bias": torch.randn(1, HEADS, 6, 6, generator=DRAW)},
    "bias of each sequence": {"position_bias": torch.randn(2, HEADS, 6, 6, generator=DRAW)},
    "softcap, sinks": {"softcap": 1.5, "s_aux": torch.randn(HEADS, generator=DRAW), "scaling": 0.3},
    "all": {
        "softcap": 1.5,
        "s_aux": torch.randn(HEADS, generator=DRAW),
        "position_bias": torch.randn(1, HEADS, 6, 6, generator=DRAW),
        "scaling": 0.3,
    },
}
MASKS = {
    "full": full(),
    "causal": causal(),
    "documents and padding": causal()
    & document([[0, 0, 1, 1, 1, 2], [0, 0, 0, 0, 0, 0]])
    & key_padding(keep=[[True] * 6, [False] * 2 + [True] * 4]),
}


def made(mask: Mask, form: str, batch: int, q_len: int, kv_len: int) -> Any:
    """A mask in one of the forms that attention takes."""
    if form == "model":
        return ModelMask.make(mask, batch, q_len, kv_len, 0, "cpu")
    cells = mask.dense(q_len, kv_len, batch=batch).expand(batch, 1, q_len, kv_len)
    return cells if form == "bool" else mask.to_bias(q_len, kv_len, batch=batch)


@pytest.mark.parametrize("form", ["model", "bool", "float"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("scores", SCORES)
def test_scores(scores: str, mask: str, form: str) -> None:
    cells = MASKS[mask].dense(6, batch=2)
    found = attend(*tensors(6, 6), made(MASKS[mask], form, 2, 6, 6), **SCORES[scores])
    expected = reference(*tensors(6, 6), cells, **SCORES[scores])
    rows = cells.any(-1)[:, 0].expand(2, 6)  # a tensor's fully masked rows are as torch has them
    assert_close(found.transpose(1, 2)[rows].double(), expected.transpose(1, 2)[rows], rtol=1e-4, atol=1e-5)
    if form == "model":
        assert found.transpose(1, 2)[~rows].eq(0).all()


@pytest.mark.parametrize("form", ["model", "bool"])
def test_gradients_of_sinks_and_biases(form: str) -> None:
    options: dict[str, Any] = {
        name: value.clone().requires_grad_() for name, value in SCORES["all"].items() if isinstance(value, Tensor)
    }
    numbers: dict[str, Any] = {"softcap": 1.5, "scaling": 0.3}
    query, key, value = (tensor.requires_grad_() for tensor in tensors(6, 6))
    leaves = [query, key, value, *options.values()]
    cells = causal().dense(6)
    found = attend(query, key, value, made(causal(), form, 2, 6, 6), **options, **numbers)
    wanted = reference(query, key, value, cells, **options, **numbers)
    factor = torch.randn(found.shape, generator=torch.Generator().manual_seed(2))
    got = torch.autograd.grad((found * factor).sum(), leaves)
    for own, other in zip(got, torch.autograd.grad((wanted * factor).sum(), leaves), strict=True):
        assert_close(own, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("given", [None, True, False])
@pytest.mark.parametrize("of_layer", [True, False])
def test_no_mask_is_causal_where_the_layer_or_the_caller_is(of_layer: bool, given: bool | None) -> None:
    out = AttentionInterface()["flexmask"](Layer(of_layer), *tensors(5, 5), None, is_causal=given)[0].transpose(1, 2)
    is_causal = of_layer if given is None else given
    cells = (causal() if is_causal else full()).dense(5)
    assert_close(out.double(), reference(*tensors(5, 5), cells), rtol=1e-4, atol=1e-5)


def test_one_query_without_a_mask_attends_to_all_keys() -> None:
    found = attend(*tensors(1, 7), None)
    assert_close(found.double(), reference(*tensors(1, 7), full().dense(1, 7)), rtol=1e-4, atol=1e-5)


def test_a_hidden_row_of_a_float_mask_under_autocast() -> None:
    """It attends to all keys alike, as in eager: the least number of float32 is -inf in bfloat16, but not in the mask."""
    query, key, value = tensors(6, 6)
    mask = torch.zeros(1, 1, 6, 6).index_fill(2, torch.tensor(2), torch.finfo(torch.float32).min)
    with torch.autocast("cpu", torch.bfloat16):
        found = attend(query, key, value.bfloat16(), mask)
    assert_close(found[:, :, 2].float(), value.mean(2).repeat_interleave(2, 1), rtol=2e-2, atol=2e-2)


def test_a_negative_scale_without_a_mask_in_a_graph() -> None:
    """Where torch's causal kernel gives NaN."""
    query, key, _ = tensors(6, 6)
    found = dense_attention(query, key, key, None, Scores(-0.3), is_causal=True)
    assert_close(found, reference(query, key, key, torch.ones(1, 1, 6, 6).tril(), -0.3).float())


def test_queries_of_one_sequence_serve_all() -> None:
    query, key, value = tensors(3, 5)
    found = attend(query[:1], key, value, None, is_causal=False)
    expected = reference(query[:1].expand(2, -1, -1, -1), key, value, full().dense(3, 5))
    assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mask", ["causal", lambda b, h, q, kv: kv <= q, causal()])
def test_masks_of_the_user(mask: Any) -> None:
    assert_close(attend(*tensors(5, 5), mask).double(), reference(*tensors(5, 5), causal().dense(5)), rtol=1e-4, atol=1e-5)


def test_errors() -> None:
    with pytest.raises(LoweringError, match="the model made a mask for 8 keys, and its attention has 7"):
        attend(*tensors(5, 7), ModelMask.make(causal(), 2, 5, 8, 0, "cpu"))
    with pytest.raises(LoweringError, match="attention_mask must be a Mask, its text, a mask_mod, a tensor or None, got list"):
        attend(*tensors(5, 5), [1])
    with pytest.raises(TextError):
        attend(*tensors(5, 5), "no_such_mask(")


class TestModelMask:
    def mask(self) -> ModelMask:
        return ModelMask.make(causal(), 2, 4, 6, 0, "cpu")

    def test_it_has_the_form_of_a_tensor(self) -> None:
        mask = self.mask()
        assert isinstance(mask, Tensor)
        assert (mask.shape, mask.dtype, mask.dim(), mask.size(-1)) == ((2, 1, 4, 6), torch.bool, 4, 6)
        assert mask.to("cpu") is mask
        assert mask.contiguous() is mask
        assert mask[:, :, :, :6] is mask
        assert mask[..., :] is mask
        assert repr(mask) == f"{mask}" == "ModelMask(causal, shape=[2, 1, 4, 6])"

    def test_it_moves_with_the_layers(self) -> None:
        keep = torch.tensor([[True, True, False]])
        mask = ModelMask.make(key_padding(keep=keep), 1, 3, 3, torch.tensor(0), "cpu")
        assert mask.to("cpu", copy=True) is mask
        assert mask.to(torch.float32) is mask
        moved = mask.to("meta")
        assert mask.to(device=torch.device("meta")) is moved
        assert isinstance(moved, ModelMask)
        assert isinstance(moved.q_offset, Tensor)
        assert {moved.device.type, moved.q_offset.device.type, moved.mask.tensors[0].device.type} == {"meta"}
        with pytest.raises(OperandError, match="a mask on meta has no data to move to cpu"):
            moved.to("cpu")

    @pytest.mark.parametrize(
        "operation",
        [
            lambda mask: mask + 1,
            lambda mask: ~mask,
            lambda mask: mask[:, :, :, :5],
            lambda mask: mask[0],
            lambda mask: torch.where(mask, 0.0, 1.0),
            lambda mask: mask.float(),
            lambda mask: torch.zeros(2, 1, 4, 6).masked_fill(mask, 1),
        ],
    )
    def test_it_has_no_values(self, operation: Any) -> None:
        with pytest.raises(NotImplementedError, match="computes with its attention mask itself"):
            operation(self.mask())


def test_caps_and_biases_are_scores_by_name() -> None:
    """Which tiles compute by themselves; a bias has rows of the call, so those of later queries take a function."""
    bias = torch.zeros(1, HEADS, 6, 6)
    assert (
        str(Scores(1.0, softcap=2.0, position_bias=bias).score_mod(1, 6)) == f"softcap(2.0) >> bias(<float32[1, {HEADS}, 6, 6]>)"
    )
    assert not isinstance(Scores(1.0, position_bias=bias).score_mod(1, 6, 3), Score)
    assert not isinstance(Scores(1.0, softcap=2.0, sink=torch.zeros(HEADS)).score_mod(1, 6), Score)
