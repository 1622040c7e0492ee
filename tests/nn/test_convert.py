"""Weights from and to torch.nn.MultiheadAttention: both modules give the same outputs under the same masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm

import flexmask as fm
from flexmask import MultiheadFlexAttention
from flexmask.errors import LoweringError, OperandError

D, HEADS, BATCH, Q, KV = 12, 3, 2, 7, 5
#: True for padding.
HIDDEN = torch.tensor([[False, False, True, False, True], [False] * 4 + [True]])
HIDDEN_SELF = torch.tensor([[False] * 4 + [True] * 3, [True] + [False] * 6])


def torch_module(**options: Any) -> nn.MultiheadAttention:
    torch.manual_seed(2)
    made = nn.MultiheadAttention(D, HEADS, dtype=torch.float64, **options)
    for weight in made.parameters():  # torch's biases begin at 0
        nn.init.normal_(weight, std=0.5)
    return made.eval()


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def check_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-11)


def torch_forward(module: nn.MultiheadAttention, x: Tensor, context: Tensor, **masks: Any) -> Tensor:
    inputs = [part if module.batch_first else part.transpose(0, 1) for part in (x, context, context)]
    out: Tensor = module(*inputs, need_weights=False, **masks)[0]
    return out if module.batch_first else out.transpose(0, 1)


@pytest.mark.parametrize("context", [False, True])
def test_frozen_weights_stay_frozen(context: bool) -> None:
    theirs = torch_module(batch_first=True, **({"kdim": 5, "vdim": 5} if context else {}))
    frozen = ("q_proj_weight", "k_proj_weight", "v_proj_weight") if context else ("in_proj_weight",)
    for name in (*frozen, "out_proj.bias"):
        theirs.get_parameter(name).requires_grad_(False)
    with torch.no_grad():
        ours = MultiheadFlexAttention.from_torch(theirs)
        back = ours.to_torch()
    trainable = {name for name, weight in ours.named_parameters() if weight.requires_grad}
    assert trainable == ({"q_proj.bias", "kv_proj.bias"} if context else {"in_proj.bias"}) | {"out_proj.weight"}
    assert {n: w.requires_grad for n, w in back.named_parameters()} == {n: w.requires_grad for n, w in theirs.named_parameters()}
    if context:
        theirs.get_parameter("v_proj_weight").requires_grad_(True)
        assert MultiheadFlexAttention.from_torch(theirs).get_parameter("kv_proj.weight").requires_grad  # one weight of the two


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_self_attention(bias: bool, batch_first: bool) -> None:
    theirs, x = torch_module(bias=bias, batch_first=batch_first), random(BATCH, Q, D)
    ours = MultiheadFlexAttention.from_torch(theirs, batch_first=True)
    assert set(ours.state_dict()) == {
        f"{p}_proj.{w}" for p in ("in", "out") for w in (("weight", "bias") if bias else ("weight",))
    }
    check_close(ours(x), torch_forward(theirs, x, x))
    padded = torch_forward(theirs, x, x, key_padding_mask=HIDDEN_SELF)
    check_close(ours(x, fm.key_padding(hide=HIDDEN_SELF)), padded)
    check_close(ours(x, "key_padding(hide=hidden)", hidden=HIDDEN_SELF), padded)
    future = torch.ones(Q, Q, dtype=torch.bool).triu(1)
    both = torch_forward(theirs, x, x, attn_mask=future, key_padding_mask=HIDDEN_SELF)
    real = ~HIDDEN_SELF[:, :1].expand(-1, Q)  # a first token that is padding leaves a query nothing to see: NaN there, 0 here
    check_close(ours(x, fm.causal() & fm.key_padding(hide=HIDDEN_SELF))[real], both[real])
    check_close(ours(x, ~fm.from_dense(future) & fm.key_padding(hide=HIDDEN_SELF))[real], both[real])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("d_context", [D, 8])
def test_cross_attention(d_context: int, bias: bool) -> None:
    theirs = torch_module(bias=bias, batch_first=True, kdim=d_context, vdim=d_context)
    ours, x, context = MultiheadFlexAttention.from_torch(theirs), random(BATCH, Q, D), random(BATCH, KV, d_context)
    assert ours.d_context == d_context
    check_close(ours(x, context=context), torch_forward(theirs, x, context))
    expected = torch_forward(theirs, x, context, key_padding_mask=HIDDEN)
    check_close(ours(x, fm.key_padding(hide=HIDDEN), context=context), expected)
    per_head = torch.rand(BATCH * HEADS, Q, KV, generator=torch.Generator().manual_seed(0)) < 0.4
    per_head[..., 0] = False
    expected = torch_forward(theirs, x, context, attn_mask=per_head)
    check_close(ours(x, ~fm.from_dense(per_head.view(BATCH, HEADS, Q, KV)), context=context), expected)


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"kdim": 8, "vdim": 8}, {"kdim": 8, "vdim": 8, "bias": False}])
@pytest.mark.parametrize("training", [True, False])
def test_there_and_back(options: dict[str, Any], training: bool) -> None:
    theirs = torch_module(**options, dropout=0.25, batch_first=True).train(training)
    ours = MultiheadFlexAttention.from_torch(theirs)
    back = ours.to_torch()
    assert back.training == ours.training == training
    assert back.dropout == ours.dropout == 0.25
    assert back.batch_first
    assert not ours.to_torch(batch_first=False).batch_first
    state, same = theirs.state_dict(), back.state_dict()
    assert list(state) == list(same)
    for name, weight in state.items():
        assert torch.equal(weight, same[name])
        assert weight.data_ptr() != same[name].data_ptr()
    again = MultiheadFlexAttention.from_torch(back)
    again.load_state_dict(ours.state_dict())
    assert all(weight.requires_grad for weight in again.parameters())


@pytest.mark.parametrize(("bias", "out_bias"), [(False, True), (True, False)])
@pytest.mark.parametrize("d_context", [None, 8])
def test_a_bias_of_one_side_becomes_zero_of_the_other(bias: bool, out_bias: bool, d_context: int | None) -> None:
    ours = MultiheadFlexAttention(D, D, HEADS, bias, out_bias=out_bias, d_context=d_context, dtype=torch.float64).eval()
    x, context = random(BATCH, Q, D), random(BATCH, KV, d_context or D)
    check_close(torch_forward(ours.to_torch(), x, context), ours(x, context=context))


def test_the_mask_is_the_modules_own() -> None:
    theirs, x = torch_module(batch_first=True), random(BATCH, Q, D)
    ours = MultiheadFlexAttention.from_torch(theirs, mask="key_padding(hide=hidden)", backend="sdpa")
    check_close(ours(x, hidden=HIDDEN_SELF), torch_forward(theirs, x, x, key_padding_mask=HIDDEN_SELF))


class Doubled(nn.Linear):
    """Computes something else from its weight, as some libraries of adapters write it."""

    def __init__(self, sizes: nn.Linear) -> None:
        super().__init__(sizes.in_features, sizes.out_features)

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize("change", [weight_norm, lambda linear: prune.l1_unstructured(linear, "weight", 0.5)])
def test_computed_weights_of_torchs_module(change: Callable[[nn.Module], nn.Module]) -> None:
    theirs, x = torch_module(batch_first=True), random(BATCH, Q, D)
    change(theirs.out_proj)
    check_close(MultiheadFlexAttention.from_torch(theirs)(x), torch_forward(theirs, x, x))


def test_other_parts_of_a_module_stay_behind() -> None:
    module, x = MultiheadFlexAttention(D, D, HEADS, dtype=torch.float64), random(BATCH, Q, D)
    module.dropped = nn.Dropout(0.5)
    module.add_module("out_proj", NonDynamicallyQuantizableLinear(D, D, dtype=torch.float64))
    check_close(torch_forward(module.to_torch(), x, x), module(x))


class Codes(Tensor):
    """A weight as libraries of quantization have it: its class says what the numbers mean."""


def with_codes(linear: nn.Linear) -> nn.Linear:
    linear.weight = nn.Parameter(linear.weight.detach().as_subclass(Codes))
    return linear


def with_adapter(name: str, change: Callable[[nn.Linear], nn.Module]) -> MultiheadFlexAttention:
    module = MultiheadFlexAttention(D, D, 3)
    module.add_module(name, change(getattr(module, name)))
    return module


REFUSED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "not torch's": (
        lambda: MultiheadFlexAttention.from_torch(nn.Linear(2, 2)),  # type: ignore[arg-type]
        OperandError,
        r"got Linear of torch\.nn\.modules\.linear$",
    ),
    "two widths": (
        lambda: MultiheadFlexAttention.from_torch(torch_module(kdim=8, vdim=6, batch_first=True)),
        LoweringError,
        "kdim=8.*vdim=6",
    ),
    "length first": (
        lambda: MultiheadFlexAttention.from_torch(torch_module()),
        LoweringError,
        r"batch_first=False, so its calls give \[length, B, 12\].*from_torch\(module, batch_first=True\)",
    ),
    "bias of keys": (
        lambda: MultiheadFlexAttention.from_torch(torch_module(add_bias_kv=True, batch_first=True)),
        LoweringError,
        "add_bias_kv",
    ),
    "zero key": (
        lambda: MultiheadFlexAttention.from_torch(torch_module(add_zero_attn=True, batch_first=True)),
        LoweringError,
        "add_zero_attn",
    ),
    "widths": (lambda: MultiheadFlexAttention(8, D, HEADS).to_torch(), LoweringError, "differs in d_in$"),
    "heads": (
        lambda: MultiheadFlexAttention(D, D, 3, n_kv_heads=1).to_torch(),
        LoweringError,
        "differs in n_kv_heads$",
    ),
    "head width": (lambda: MultiheadFlexAttention(D, D, 3, d_head=6).to_torch(), LoweringError, "differs in d_head$"),
    "wrapped": (
        lambda: with_adapter("in_proj", nn.Sequential).to_torch(),
        LoweringError,
        r"in_proj is of the class Sequential of torch\.nn\.modules\.container and has 0\.weight Parameter float32\[36, 12\]:",
    ),
    "wrapped output": (
        lambda: with_adapter("out_proj", nn.Sequential).to_torch(),
        LoweringError,
        r"out_proj is of the class Sequential of .* and has 0\.weight .*, 0\.bias .*: merge",
    ),
    "adapter": (
        lambda: with_adapter("in_proj", Doubled).to_torch(),
        LoweringError,
        "in_proj is of the class Doubled of .* and has weight .*, bias .*: merge",
    ),
    "pruned": (
        lambda: with_adapter("out_proj", lambda linear: prune.l1_unstructured(linear, "weight", 0.5)).to_torch(),
        LoweringError,
        "out_proj is of the class Linear of .* and has bias .*, weight_orig .*, weight_mask .*: .* remove parametrizations and",
    ),
    "codes": (
        lambda: with_adapter("out_proj", lambda linear: linear.to(torch.float8_e4m3fn)).to_torch(),
        LoweringError,
        r"out_proj is of the class Linear of .* and has weight Parameter float8_e4m3fn\[12, 12\], .*: .* dequantize",
    ),
    "codes of a class": (
        lambda: with_adapter("in_proj", with_codes).to_torch(),
        LoweringError,
        "in_proj is of the class Linear of .* and has weight Codes float32.*: .* dequantize",
    ),
    "no tensors": (
        lambda: with_adapter("in_proj", lambda linear: nn.Identity()).to_torch(),
        LoweringError,
        "in_proj is of the class Identity of .* and has no tensors: merge",
    ),
    "scale": (lambda: MultiheadFlexAttention(D, D, 3, scale=2.0).to_torch(), LoweringError, "differs in scale$"),
    "rope": (
        lambda: MultiheadFlexAttention(D, D, 3, rope=lambda x, p: x).to_torch(),
        LoweringError,
        "differs in rope$",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_errors(name: str) -> None:
    attempt, kind, message = REFUSED[name]
    with pytest.raises(kind, match=message):
        attempt()
