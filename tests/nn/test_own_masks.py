"""The mask of a layer, which can be assigned, and layers with different masks that share the data of a model."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flexmask as fm
from flexmask import MultiheadFlexAttention
from flexmask.errors import ExpressionError, OperandError, TextError
from flexmask.nn import call
from tests.support.exhaustive import slow

DOUBLE = torch.float64
X = torch.randn(2, 6, 8, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))
IDS, LENGTHS = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 2]]), torch.tensor([6, 4])
CONFIG = ["sliding_window(size=2) & document(ids)", "causal & key_padding(lengths)", None, fm.causal()]


def layer_of(mask: Any) -> MultiheadFlexAttention:
    torch.manual_seed(1)
    return MultiheadFlexAttention(8, 8, 2, mask=mask, dtype=DOUBLE)


def near(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx >= kv_idx) & (q_idx - kv_idx < 2)


@pytest.mark.parametrize("mask", ["causal & (kv < 4)", fm.causal() & (fm.kv < 4), near, None])
def test_a_mask_is_assigned_as_it_is_given_to_the_module(mask: Any) -> None:
    layer, given = layer_of("full"), layer_of(mask)
    layer.mask = mask
    assert layer.mask == given.mask
    assert str(layer) == str(given)
    torch.testing.assert_close(layer(X), given(X))
    assert layer.bfloat16().mask == given.mask
    assert pickle.loads(pickle.dumps(copy.deepcopy(layer_of("causal")))).mask == fm.causal()


def test_what_is_assigned_is_checked() -> None:
    layer = layer_of("causal")
    for wrong, error, message in (
        ("casual", TextError, "Did you mean causal"),
        (3, OperandError, "mask must be a Mask, its text, None or a mask_mod function, got int 3"),
        ("document(context)", ExpressionError, "has the parameter context, which forward takes itself"),
    ):
        with pytest.raises(error, match=message):
            layer.mask = wrong  # type: ignore[assignment]
    assert layer.mask == fm.causal()


def test_an_assigned_mask_moves_to_the_module() -> None:
    layer = layer_of(None)
    layer.mask = fm.document(IDS)
    assert layer.mask is not None
    assert layer.mask.params == ()
    layer = MultiheadFlexAttention(8, 8, 2, device="meta")
    layer.mask = fm.document(IDS)
    assert layer.mask.dense(6).shape == (2, 1, 6, 6)  # its data is still there


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer_of(mask) for mask in CONFIG)

    def forward(self, x: Tensor, **data: Any) -> Tensor:
        for layer in self.layers:
            assert isinstance(layer, MultiheadFlexAttention)
            out = call(layer, x, **data)
            assert isinstance(out, Tensor)
            x = x + out
        return x


@pytest.mark.parametrize("compiled", [False, *slow([True])])
def test_each_layer_takes_what_its_mask_has(compiled: bool) -> None:
    model = Model()
    own = [layer.mask for layer in model.layers if isinstance(layer, MultiheadFlexAttention)]
    assert [mask if mask is None else mask.params for mask in own] == [("ids",), ("lengths",), None, ()]
    wanted = X
    for layer, mask in zip(
        model.layers,
        [fm.sliding_window(size=2) & fm.document(IDS), fm.causal() & fm.key_padding(LENGTHS), None, fm.causal()],
        strict=True,
    ):
        wanted = wanted + layer(wanted, mask)
    run = torch.compile(model, fullgraph=True, backend="eager") if compiled else model
    torch.testing.assert_close(run(X, ids=IDS, lengths=LENGTHS, unknown=3), wanted)


def test_arguments_of_forward_go_on() -> None:
    layer = layer_of("document(ids)")
    out = call(layer, X, return_qk=True, ids=IDS, lengths=LENGTHS)
    assert isinstance(out, tuple)
    torch.testing.assert_close(out[0], layer(X, ids=IDS))


def test_what_is_missing_or_misspelt_is_an_error() -> None:
    with pytest.raises(ExpressionError, match=r"has parameters that are not given: call the module with ids=\.\.\."):
        call(layer_of("document(ids)"), X, id=IDS)
    with pytest.raises(OperandError, match=r"call takes the layer's own mask, which is set as layer\.mask = "):
        call(layer_of("causal"), X, mask="full")
    with pytest.raises(OperandError, match=r"layer must be a flexmask\.MultiheadFlexAttention, got"):
        call(nn.Linear(8, 8), X)  # type: ignore[arg-type]
