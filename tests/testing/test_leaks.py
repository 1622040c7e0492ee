"""`assert_no_leak`: what keeps to its mask passes, what does not fails, and the message says where."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import flexmask as fm
from flexmask import Mask, MultiheadFlexAttention
from flexmask.errors import ExpressionError, LoweringError, OperandError
from flexmask.testing import assert_no_leak
from flexmask.testing.influence import dependence
from tests.support.exhaustive import half
from tests.support.gpu import needs_gpu
from tests.support.strategies import Case, Shape, shaped_masks
from tests.testing.packed_documents import DOCUMENTS, LENGTHS, PACKED, check_fails

# ---------------------------------------------------------------- assert_no_leak: what is right

X = torch.randn(2, 12, 8, generator=torch.Generator().manual_seed(3))
LAYER = MultiheadFlexAttention(8, 8, 2)
CASES: dict[str, Mask] = {
    "packed": PACKED,
    "window": fm.sliding_window(left=2, right=1),
    "diagonals": (fm.q - fm.kv) % 3 == 0,
    "heads": fm.per_head([fm.sliding_window(left=1, right=0), fm.key_padding(3)]),
    "nothing": fm.empty(),
    "everything": fm.full(),
}


@pytest.mark.parametrize("name", CASES)
def test_attention_keeps_to_its_mask(name: str) -> None:
    assert_no_leak(lambda x: LAYER(x, CASES[name]), CASES[name], X)
    assert_no_leak(MultiheadFlexAttention(8, 8, 2, mask=CASES[name]), CASES[name], X)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_every_dtype_is_checked(dtype: torch.dtype) -> None:
    layer = MultiheadFlexAttention(8, 8, 2).to(dtype)
    assert_no_leak(lambda x: layer(x, PACKED), PACKED, X.to(dtype))
    check_fails(lambda: assert_no_leak(lambda x: layer(x, fm.causal(offset=1)), fm.causal(), X.to(dtype)), "22 by gradient")


@half
@given(shaped_masks(longest=10, offsets=False, depth=2), st.integers(0, 10**6))
def test_drawn_masks_do_not_leak_and_one_cell_too_many_does(drawn: tuple[Case, Shape], place: int) -> None:
    case, shape = drawn
    heads = shape.heads
    layer = MultiheadFlexAttention(4, 4 * heads, heads)
    x, context = torch.randn(shape.batch, shape.q_len, 4), torch.randn(shape.batch, shape.kv_len, 4)

    def attend(x: Tensor, context: Tensor) -> Tensor:
        out: Tensor = layer(x, case.mask, context=context)
        return out

    assert_no_leak(attend, case.mask, x, context=context, heads=heads)
    visible = case.expected(shape).any(1).nonzero()
    if len(visible):
        b, q, kv = visible[place % len(visible)].tolist()
        less = case.mask - ((fm.q == q) & (fm.kv == kv) & (fm.b == b))
        check_fails(
            lambda: assert_no_leak(attend, less, x, context=context, heads=heads),
            f"1 of {shape.batch * shape.q_len * shape.kv_len:,} pairs leak (1 by ",
            f"in batch {b} the output of query {q} depends on key {kv} of context",
        )


def test_cross_attention_keeps_to_its_mask() -> None:
    mask = fm.cross_length([3, 9], q_lengths=[12, 6])
    context = torch.randn(2, 9, 8)
    assert_no_leak(lambda x, context: LAYER(x, mask, context=context), mask, X, context=context)
    check_fails(
        lambda: assert_no_leak(lambda x, context: LAYER(x, fm.key_padding([4, 9]), context=context), mask, X, context=context),
        "in batch 0 the output of query 0 depends on key 3 of context, which is hidden by",
    )


class Decoder(nn.Module):
    """A small transformer over tokens, with padding and documents; several faults can be asked for."""

    def __init__(self, layers: int = 2, fault: str = "") -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(MultiheadFlexAttention(8, 8, 2) for _ in range(layers))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11)
        self.fault = fault

    def body(self, x: Tensor, mask: Mask) -> Tensor:
        for layer in self.layers:
            if self.fault == "norm over the sequence":
                x = (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True)
            x = x + torch.tanh(layer(self.norm(x), mask))
        out: Tensor = self.head(x)
        if self.fault == "norm over the batch":
            out = out - out.mean(0, keepdim=True)
        return out

    def forward(self, tokens: Tensor, mask: Mask) -> Tensor:
        return self.body(self.embed(tokens), mask)


TOKENS = torch.randint(0, 11, (2, 12), generator=torch.Generator().manual_seed(4))


def test_a_model_keeps_to_what_its_layers_reach() -> None:
    model = Decoder()
    assert_no_leak(lambda tokens: model(tokens, PACKED), PACKED, TOKENS, layers=2)
    assert_no_leak(lambda x: model.body(x, PACKED), PACKED, TOKENS, layers=2, embed=model.embed)
    assert_no_leak(lambda x: model.body(x, PACKED), PACKED, X, layers=2)
    assert_no_leak(lambda x: model.body(x, PACKED).argmax(-1), PACKED, X, layers=2)
    window = fm.sliding_window(left=2, right=0)
    assert_no_leak(lambda x: model.body(x, window), window, X, layers=2)
    check_fails(
        lambda: assert_no_leak(lambda x: model.body(x, window), window, X),
        "the output of query 3 depends on key 0 of x, which is hidden by sliding_window(left=2, right=0).\n"
        "All these pairs are within what 2 layers can pass on: if the model has 2, write layers=2; otherwise they are leaks\n",
        "by gradient",
        "by change",
        "\n   3 ! # # # .",
    )


def test_layers_of_several_masks() -> None:
    masks = [fm.sliding_window(left=2, right=0), fm.masks.chunked(4) & fm.causal()]
    first, second = Decoder(1), Decoder(1)
    second.head = nn.Linear(8, 8)
    first.head = nn.Linear(8, 8)

    def both(x: Tensor) -> Tensor:
        out: Tensor = second.body(first.body(x, masks[0]), masks[1])
        return out

    assert_no_leak(both, masks, X)
    check_fails(lambda: assert_no_leak(both, masks[::-1], X), "pairs leak")
    check_fails(lambda: assert_no_leak(both, [masks[1], masks[1]], X), "pairs leak")


def test_a_decoder_with_context() -> None:
    own, other = fm.causal() & fm.document(DOCUMENTS), fm.key_padding([4, 6])
    model, context = Decoder(1), torch.randn(2, 6, 8)
    cross = MultiheadFlexAttention(8, 8, 2)
    model.head = nn.Linear(8, 8)

    def decoder(x: Tensor, context: Tensor) -> Tensor:
        hidden = model.body(x, own)
        out: Tensor = hidden + cross(hidden, other, context=context)
        return out

    assert_no_leak(decoder, other, X, context=context, self_mask=own)
    check_fails(
        lambda: assert_no_leak(decoder, other, X, context=context, self_mask=fm.causal(offset=-2)),
        "query 1 depends on key 0 of x",
    )
    check_fails(lambda: assert_no_leak(decoder, fm.key_padding([3, 6]), X, context=context, self_mask=own), "key 3 of context")


def test_dependence_is_what_can_be_reached() -> None:
    step = fm.causal(offset=-1).dense(6)[0] & fm.sliding_window(left=2, right=0).dense(6)[0]
    found = [cells.tolist() for cells in dependence([step])]
    assert len(found) == 4  # the last shows that nothing more can be reached
    for layers, cells in enumerate(found, 1):
        assert cells == [[[0 <= q - kv <= 2 * layers for kv in range(6)] for q in range(6)]]


def behind(distance: int) -> Callable[[Tensor], Tensor]:
    """A function whose outputs depend on the keys ``q - distance .. q``."""
    return lambda x: LAYER(x, fm.sliding_window(left=distance, right=0))


@pytest.mark.parametrize(
    ("distance", "mask", "layers", "proposed"),
    [
        (3, fm.sliding_window(left=2, right=0), 1, "what 2 layers can pass on: if the model has 2, write layers=2;"),
        (7, fm.sliding_window(left=2, right=0), 3, "what 4 layers can pass on: if the model has 4, write layers=4;"),
        (
            6,
            [fm.sliding_window(left=1, right=0), fm.sliding_window(left=2, right=0)],
            1,
            "what these 2 layers can pass on 2 times: if the model applies them 2 times, write layers=2;",
        ),
        (3, fm.causal() & fm.document(DOCUMENTS), 1, ""),
    ],
)
def test_layers_are_proposed_where_they_are_enough(distance: int, mask: Any, layers: int, proposed: str) -> None:
    message = check_fails(lambda: assert_no_leak(behind(distance), mask, X, layers=layers), "pairs leak", proposed)
    assert ("layers=" in message) == bool(proposed)


def test_layers_are_proposed_for_a_decoder_with_context() -> None:
    own, cross = fm.sliding_window(left=1, right=0), fm.key_padding([4, 6])

    def decode(x: Tensor, context: Tensor) -> Tensor:
        out: Tensor = LAYER(LAYER(x, own), own) + LAYER(x, cross, context=context)
        return out

    check_fails(lambda: assert_no_leak(decode, cross, X, context=X[:, :6], self_mask=own), "of x, which", "write layers=2;")
    assert_no_leak(decode, cross, X, context=X[:, :6], self_mask=own, layers=2)
    unknown = fm.key_padding([3, 6])
    message = check_fails(lambda: assert_no_leak(decode, unknown, X, context=X[:, :6], self_mask=own), "key 3 of context")
    assert "layers=" not in message


# ---------------------------------------------------------------- assert_no_leak: functions of another form

CAUSAL_CELLS = fm.causal().dense(X.shape[1])[0, 0]


class OfTorch(nn.Module):
    """Takes torch's mask, where True is for hidden."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        out: Tensor = self.attention(x, x, x, attn_mask=attn_mask, need_weights=False)[0]
        return out


def test_a_module_that_takes_another_mask_is_wrapped() -> None:
    module = OfTorch()
    assert_no_leak(lambda x: module(x, attn_mask=~CAUSAL_CELLS), fm.causal(), X)
    check_fails(lambda: assert_no_leak(lambda x: module(x, attn_mask=CAUSAL_CELLS), fm.causal(), X), "pairs leak")
    check_fails(
        lambda: assert_no_leak(module, fm.causal(), X),
        "pairs leak",
        "The check calls function(x), without attn_mask",
        "assert_no_leak(lambda x: function(x, attn_mask=attn_mask), ...)\n",
        "in torch.nn.MultiheadAttention and TransformerEncoderLayer, ~mask.dense(length)[0, 0]",
    )


class Optional(nn.Module):
    """Hands a mask on that calls may leave out, to a layer that may have its own."""

    def __init__(self, own: str | None = None) -> None:
        super().__init__()
        self.attention = MultiheadFlexAttention(8, 8, 2, mask=own)

    def forward(self, x: Tensor, mask: Mask | str | None = None, context: Tensor | None = None) -> Tensor:
        out: Tensor = self.attention(x, mask, context=context)
        return out


@pytest.mark.parametrize("own", [None, "full", "sliding_window(left=20, right=1)"])
def test_a_mask_that_calls_may_leave_out_is_not_given(own: str | None) -> None:
    module = Optional(own)
    check_fails(
        lambda: assert_no_leak(module, fm.causal(), X),
        "The check calls function(x), without mask: it gives the function no mask and no other argument.\n"
        "Write the call of your code: assert_no_leak(lambda x: function(x, mask=mask), ...)\n"
        "with mask as your code gives it: a flexmask mask, the tensor of a tokenizer",
    )
    check_fails(
        lambda: assert_no_leak(module, fm.causal(), X, context=X),
        "(lambda x, context: function(x, context=context, mask=mask), ...)",
    )
    assert_no_leak(lambda x: module(x, "causal"), fm.causal(), X)
    assert_no_leak(Optional("causal"), fm.causal(), X)


def test_a_function_that_cannot_be_called_so_is_refused() -> None:
    def needs_it(x: Tensor, attn_mask: Tensor) -> Tensor:
        return x

    def needs_lengths(tokens: Tensor, lengths: Tensor) -> Tensor:
        return tokens

    def wants_context(x: Tensor) -> Tensor:
        return x

    with pytest.raises(
        OperandError, match=r"(?s)fails where it is called as function\(x\): TypeError.*\nThe check .* without attn_mask"
    ) as caught:
        assert_no_leak(needs_it, fm.causal(), X)
    assert isinstance(caught.value.__cause__, TypeError)
    with pytest.raises(OperandError, match=r"assert_no_leak\(lambda x: function\(x, lengths=lengths\), \.\.\.\)$"):
        assert_no_leak(needs_lengths, fm.causal(), TOKENS)
    with pytest.raises(OperandError, match=r"called as function\(x, context=context\): TypeError.*\n.*as a lambda$"):
        assert_no_leak(wants_context, fm.causal(), X, context=X)
    with pytest.raises(OperandError, match=r"called as function.*mat1 and mat2"):
        assert_no_leak(nn.Linear(3, 3), fm.causal(), X)
    with pytest.raises(OperandError, match=r"function\(x, key=key, value=value, attn_mask=attn_mask\)"):
        assert_no_leak(nn.MultiheadAttention(8, 2), fm.causal(), X)


def test_a_model_that_takes_the_mask_of_a_tokenizer() -> None:
    def model(x: Tensor, mask: Tensor) -> Tensor:
        out: Tensor = LAYER(x, fm.causal() & fm.key_padding(keep=mask))
        return out

    with pytest.raises(OperandError, match=r"(?s)without mask: .*function\(x, mask=mask\).*the tensor of a tokenizer"):
        assert_no_leak(model, fm.causal(), X)
    with pytest.raises(
        OperandError, match=r"fails where it is called as function\(x\): OperandError: key_padding: keep must hold"
    ):
        assert_no_leak(lambda x: model(x, fm.causal()), fm.causal(), X)  # type: ignore[arg-type]
    keep = torch.tensor([[1] * 12, [1] * 7 + [0] * 5])
    assert_no_leak(lambda x: model(x, keep), fm.causal() & fm.key_padding([12, 7]), X)


# ---------------------------------------------------------------- assert_no_leak: what is wrong


def off_by_one(x: Tensor) -> Tensor:
    out: Tensor = LAYER(x, fm.causal(offset=1) & fm.document(DOCUMENTS) & fm.key_padding(LENGTHS))
    return out


def attends_padding(x: Tensor) -> Tensor:
    out: Tensor = LAYER(x, fm.causal() & fm.document(DOCUMENTS))
    return out


def ignores_documents(x: Tensor) -> Tensor:
    out: Tensor = LAYER(x, fm.causal() & fm.key_padding(LENGTHS))
    return out


def masks_softly(x: Tensor) -> Tensor:
    """Adds a number to the scores that is not small enough."""
    bias = torch.where(PACKED.dense(12).any(1), 0.0, -30.0)
    return torch.softmax(x @ x.transpose(1, 2) + bias, -1) @ x


def changes_only(x: Tensor) -> Tensor:
    """What leaks has no gradient."""
    out: Tensor = LAYER(x, PACKED) + x.detach().sum(1, keepdim=True)
    return out


LEAKS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "off by one": (off_by_one, "query 0 depends on key 1 of x, which is hidden by causal\n"),
    "padding": (
        attends_padding,
        "in batch 0 the output of query 11 depends on key 10 of x, which is hidden by key_padding(lengths=[10, 7])\n",
    ),
    "documents": (ignores_documents, "query 4 depends on key 0 of x, which is hidden by document(ids=[["),
    "a soft mask": (masks_softly, "pairs leak"),
    "without a gradient": (changes_only, "query 0 depends on key 1 of x"),
}


@pytest.mark.parametrize("name", LEAKS)
def test_a_leak_is_named(name: str) -> None:
    function, message = LEAKS[name]
    check_fails(lambda: assert_no_leak(function, PACKED, X), message, "! leaks")


def test_a_leak_is_told_in_the_words_of_the_mask() -> None:
    mask = PACKED.named("packed") & (fm.kv > 0).named("not the first")
    message = "query 1 depends on key 0 of x, which is hidden by not the first\n"
    check_fails(lambda: assert_no_leak(lambda x: LAYER(x, PACKED), mask, X), message)
    union = (fm.causal() & (fm.q > 6).named("late")) | (fm.kv == fm.q).named("itself")
    message = "query 1 depends on key 0 of x, which is hidden by causal & late | itself\n"
    check_fails(lambda: assert_no_leak(lambda x: LAYER(x, PACKED), union, X), message)


@pytest.mark.parametrize("x", [TOKENS, X], ids=["tokens", "floats"])
def test_a_norm_over_the_sequence_leaks(x: Tensor) -> None:
    model = Decoder(2, "norm over the sequence")
    message = check_fails(
        lambda: assert_no_leak(lambda x: (model if x.dim() == 2 else model.body)(x, PACKED), PACKED, x, layers=2),
        "in batch 0 the output of query 0 depends on",
    )
    assert ("by gradient" in message) == (x is X)
    assert "by change" in message


def test_one_layer_that_leaks_among_several() -> None:
    model = Decoder(2)

    def leaky(x: Tensor) -> Tensor:
        out: Tensor = model.body(x, PACKED) + LAYER(x, fm.document(DOCUMENTS))[..., :1]
        return out

    check_fails(
        lambda: assert_no_leak(leaky, PACKED, X, layers=2), "query 0 depends on position 1 of x, which is hidden by causal\n"
    )


def test_sequences_that_meet() -> None:
    model = Decoder(1, "norm over the batch")
    check_fails(
        lambda: assert_no_leak(lambda tokens: model(tokens, fm.full()), fm.full(), TOKENS),
        "sequence 0 of the batch changes the output of sequence 1",
    )


def test_sequences_that_meet_are_named_before_what_follows_from_it() -> None:
    """Padding of one sequence reaches the other one, in which the position is no padding."""
    model, mask = Decoder(1, "norm over the batch"), fm.causal() & fm.key_padding([len(TOKENS[0]), 2])
    check_fails(
        lambda: assert_no_leak(lambda tokens: model(tokens, mask), mask, TOKENS),
        "sequence 0 of the batch changes the output of sequence 1",
    )


def test_picture_of_leaks() -> None:
    message = check_fails(lambda: assert_no_leak(lambda x: LAYER(x, fm.causal(offset=1)), fm.causal(), X[:1, :4]))
    assert message.startswith(
        "3 of 16 pairs leak (3 by gradient, 3 by change): in batch 0 the output of query 0 depends on key 1"
    )
    assert re.search(r"\nWhere it leaks, a change of key 1 changes the output by at most \d\.\de[+-]\d+\.\n\n", message)
    assert message.split("\n\n")[1:] == [
        "q\\kv 0 1 2 3\n   0 # ! . .\n   1 # # ! .\n   2 # # # !\n   3 # # # #",
        "batch 0: # may be seen   . hidden   ! leaks",
    ]


@pytest.mark.parametrize("kind", [MemoryError, torch.OutOfMemoryError])
def test_a_function_that_runs_out_of_memory(kind: type[Exception]) -> None:
    """It is no wrong call of the check, and a test may skip it."""

    def fails(x: Tensor) -> Tensor:
        raise kind("no memory")

    with pytest.raises(kind, match="no memory"):
        assert_no_leak(fails, fm.causal(), torch.randn(1, 4, 2))


def test_a_model_whose_outputs_depend_on_no_other_position_is_not_checked() -> None:
    layer = MultiheadFlexAttention(8, 8, 2)
    nn.init.zeros_(layer.out_proj.weight)
    for function in (lambda x: x + layer(x), lambda x: x + layer(x, fm.causal()), lambda x: x):
        with pytest.raises(ExpressionError, match="no output depends on another position of x that the mask shows"):
            assert_no_leak(function, fm.causal(), X)
    with pytest.raises(ExpressionError, match="no output depends on another position of context"):
        assert_no_leak(lambda x, context: x + layer(x, context=context), fm.key_padding(9), X, context=X)
    assert_no_leak(lambda x: x + layer(x), fm.q == fm.kv, X)  # shows no other position


def test_leaks_refused() -> None:
    with pytest.raises(ExpressionError, match=r"two outputs for one input.*eval\(\)"):
        assert_no_leak(nn.Sequential(LAYER, nn.Dropout(0.5)), fm.full(), X)
    with pytest.raises(ExpressionError, match=r"at least 1 layer.*layers=0"):
        assert_no_leak(LAYER, fm.causal(), X, layers=0)
    with pytest.raises(ExpressionError, match="one mask for it, got 2"):
        assert_no_leak(LAYER, [fm.causal(), fm.full()], X, context=X)
    with pytest.raises(ExpressionError, match="holds only the token 3"):
        assert_no_leak(nn.Embedding(11, 8), fm.causal(), torch.full((1, 4), 3))
    with pytest.raises(OperandError, match=r"x must be \[B, length, ...\].*\[3\]"):
        assert_no_leak(LAYER, fm.causal(), torch.ones(3))
    with pytest.raises(OperandError, match=r"must give a tensor.*got int"):
        assert_no_leak(lambda x: 3, fm.causal(), X)
    with pytest.raises(LoweringError, match=r"output must be \[B, length, ...\] = \[2, 12\]"):
        assert_no_leak(lambda x: x[:, :3], fm.causal(), X)
    with pytest.raises(LoweringError, match=r"at most 4,194,304 .*shorter sequences"):
        assert_no_leak(lambda x: x, fm.causal(), torch.ones(1, 4096, 1))
    with pytest.raises(LoweringError, match="one batch, got 2 and 3"):
        assert_no_leak(lambda x, context: x, fm.causal(), X, context=torch.ones(3, 5, 8))
    with pytest.raises(AssertionError, match="not finite in batch 0 at query 0"):
        assert_no_leak(lambda x: x / 0, fm.causal(), X)


# ---------------------------------------------------------------- another device


@needs_gpu
def test_leaks_on_cuda() -> None:
    assert_no_leak(MultiheadFlexAttention(8, 8, 2, mask=PACKED, backend="sdpa"), PACKED, X, device="cuda")


def test_a_modules_own_mask_is_what_is_checked() -> None:
    wrong = fm.MultiheadFlexAttention(8, 8, 2, mask=fm.sliding_window(left=20, right=1)).eval()
    with pytest.raises(AssertionError, match="leak"):
        assert_no_leak(wrong, fm.causal(), torch.randn(2, 12, 8))
    assert_no_leak(fm.MultiheadFlexAttention(8, 8, 2, mask="causal"), fm.causal(), torch.randn(2, 12, 8))


def test_a_mask_that_would_not_be_looked_at_is_refused() -> None:
    with pytest.raises(ExpressionError, match="self_mask is for a model with context="):
        assert_no_leak(lambda x: x, fm.full(), torch.randn(1, 3, 2), self_mask=fm.causal())
    with pytest.raises(OperandError, match="wanted a function, a mask and a tensor, got function, Named and list"):
        assert_no_leak(lambda x: x, fm.causal(), [[1.0]])
