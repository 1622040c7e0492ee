"""`return_lse` and `merge_attention`, against dense attention and its logsumexp in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import flexmask as fm
from flexmask import Mask, attention, kv, merge_attention, q
from flexmask.backends import Backend, backend, choose_backend, register_backend, tile_passes
from flexmask.backends.dropout import dropout_cells
from flexmask.errors import LoweringError, OperandError
from tests.support import oracle
from tests.support.exhaustive import exhaustive, one_in

Outputs: TypeAlias = tuple[Tensor, Tensor]
Tensors: TypeAlias = tuple[Tensor, Tensor, Tensor]

BATCH, HEADS, LENGTH = 2, 4, 50
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 5e-2}
MASKS = {
    "none": None,
    "causal": fm.causal(),
    "window": fm.sliding_window(left=3, right=2),
    "documents": fm.causal() & fm.document(lengths=[[7, 20, 23], [30, 10, 10]]),
    "fully masked rows": fm.causal() & fm.key_padding([0, 20]) & (kv > 5),
    "nothing": fm.empty(),
    "per head": fm.per_head([fm.causal(), fm.empty(), fm.full(), fm.sliding_window(size=4)]),
    "cells": ((q - kv) % 3 == 0) & (q > 2),
    "one key": kv == 7,
}
SLOPES = torch.linspace(-1, 1, HEADS)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "score_mod": {"score_mod": lambda score, b, h, q, kv: score * 1.5 + SLOPES.to(score)[h] * (q - kv) / 9},
    "dropout": {"dropout_p": 0.4, "dropout_seed": 5},
    "scale": {"scale": 0.7},
}


def inputs(dtype: torch.dtype = torch.float64, *, key_heads: int = HEADS, length: int = LENGTH, value_dim: int = 8) -> Tensors:
    shapes = (HEADS, length, 8), (key_heads, length, 8), (key_heads, length, value_dim)
    query, key, value = (torch.randn(BATCH, *shape, dtype=dtype).requires_grad_() for shape in shapes)
    return query, key, value


def cells_of(mask: Mask | None, length: int = LENGTH) -> Tensor:
    return (fm.full() if mask is None else mask).dense(length, batch=BATCH, heads=HEADS).expand(BATCH, HEADS, length, length)


def wanted_of(tensors: Tensors, cells: Tensor, **options: Any) -> Outputs:
    """Dense attention and its logsumexp in float64."""
    query, key, value = tensors
    p, seed, scale = options.pop("dropout_p", 0), options.pop("dropout_seed", 0), options.get("scale")
    factors = dropout_cells(seed, p, *cells.shape).double() / (1 - p)
    scores = oracle.attention_scores(query, key, scale, options.get("score_mod"))
    is_hidden = ~cells.any(-1, keepdim=True)
    lse = torch.logsumexp(scores.masked_fill(~(cells | is_hidden), -math.inf), -1).masked_fill(is_hidden[..., 0], -math.inf)
    return oracle.attention(query, key, value, cells, factors=factors, **options), lse


def loss_of(outputs: Outputs, weights: Outputs) -> Tensor:
    """A number whose gradient has parts by the output and by the logsumexp, where that is finite."""
    out, lse = (tensor.double() for tensor in outputs)
    return (out * weights[0]).sum() + (lse.masked_fill(lse == -math.inf, 0) * weights[1]).sum()


def check(found: Outputs, wanted: Outputs, tensors: Tensors, *, out_only: bool = False, lse_only: bool = False) -> None:
    """Asserts equal outputs and gradients, exactly 0 and -inf in fully masked rows."""
    dtype = tensors[0].dtype
    assert found[0].dtype == dtype
    assert found[1].dtype == torch.promote_types(dtype, torch.float32)
    near = TOLERANCE[dtype]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=near, atol=near)
    is_masked = wanted[1] == -math.inf
    assert not found[0][is_masked].any()
    weights = torch.randn_like(wanted[0]) * (not lse_only), torch.randn_like(wanted[1]) * (not out_only)
    if tensors[0].requires_grad:
        losses = loss_of(found, weights), loss_of(wanted, weights)
        grads = [torch.autograd.grad(loss, tensors, materialize_grads=True) for loss in losses]
        for one, other in zip(*grads, strict=True):
            torch.testing.assert_close(one.double(), other.double(), rtol=10 * near, atol=10 * near)


@pytest.mark.parametrize(("name", "options", "dtype"), one_in(2, MASKS, OPTIONS, [torch.float64, torch.float32]), ids=str)
def test_against_dense_attention(name: str, options: str, dtype: torch.dtype) -> None:
    tensors = inputs(dtype)
    found = attention(*tensors, MASKS[name], backend="sdpa", return_lse=True, **OPTIONS[options])
    check(found, wanted_of(tensors, cells_of(MASKS[name]), **OPTIONS[options]), tensors)


@pytest.mark.usefixtures("small_bands")
@pytest.mark.parametrize("name", ["window", "documents", "fully masked rows", "cells"])
@pytest.mark.parametrize("key_heads", [1, HEADS])
def test_in_many_tiles(name: str, key_heads: int) -> None:
    tensors = inputs(torch.float32, key_heads=key_heads)
    found = attention(*tensors, MASKS[name], enable_gqa=True, return_lse=True)
    check(found, wanted_of(tensors, cells_of(MASKS[name])), tensors)


@pytest.mark.parametrize("name", ["causal", "fully masked rows", "cells"])
@pytest.mark.parametrize("options", [{"key_heads": 2}, {"value_dim": 5}], ids=str)
def test_shared_keys_and_wide_values(name: str, options: dict[str, int]) -> None:
    tensors = inputs(torch.float32, **options)
    found = attention(*tensors, MASKS[name], enable_gqa=True, return_lse=True)
    check(found, wanted_of(tensors, cells_of(MASKS[name])), tensors)


@pytest.mark.parametrize("name", ["causal", "fully masked rows"])
@pytest.mark.parametrize("only", ["out_only", "lse_only"])
def test_gradient_of_one_of_them(name: str, only: str) -> None:
    tensors = inputs(torch.float32)
    found = attention(*tensors, MASKS[name], return_lse=True)
    check(found, wanted_of(tensors, cells_of(MASKS[name])), tensors, **{only: True})
    out, lse = attention(*tensors, MASKS[name], return_lse=True)
    used = out.sum() if only == "out_only" else lse.masked_fill(lse == -math.inf, 0).sum()  # the other has no gradient at all
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(used, tensors))


@pytest.mark.parametrize("name", ["fully masked rows", "cells"])
def test_fully_masked_rows_are_not_computed_twice(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As rows with NaN are: the kernel gets no -inf of theirs."""
    monkeypatch.setattr(tile_passes, "_isolating_gradients", None)
    tensors = inputs(torch.float32)
    for out in (attention(*tensors, MASKS[name]), attention(*tensors, MASKS[name], return_lse=True)[0]):
        assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.sum(), tensors))


def test_bfloat16_and_autocast() -> None:
    tensors = inputs(torch.bfloat16)
    cells = cells_of(MASKS["documents"])
    check(attention(*tensors, MASKS["documents"], return_lse=True), wanted_of(tensors, cells), tensors)
    precise = inputs(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, lse = attention(*precise, MASKS["documents"], return_lse=True)
    assert out.dtype == torch.bfloat16
    assert lse.dtype == torch.float32
    torch.testing.assert_close(lse.double(), wanted_of(precise, cells)[1], rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("options", ["plain", "score_mod", "dropout"])
def test_flex(options: str) -> None:
    query, key, value = (tensor.detach() for tensor in inputs(torch.float32))
    for name in ("documents", "fully masked rows"):
        found = attention(query, key, value, MASKS[name], backend="flex", return_lse=True, **OPTIONS[options])
        check(found, wanted_of((query, key, value), cells_of(MASKS[name]), **OPTIONS[options]), (query, key, value))


def test_lowered_masks() -> None:
    tensors, mask = inputs(), fm.causal() & fm.key_padding([13, 50])
    lowered = fm.plan("causal & key_padding(n)", LENGTH, batch=BATCH)(n=torch.tensor([13, 50]))
    for given in (lowered, mask.block_mask(LENGTH, batch=BATCH)):
        check(attention(*tensors, given, return_lse=True), wanted_of(tensors, cells_of(mask)), tensors)


def test_offset_of_the_queries() -> None:
    query, key, value = inputs()
    out, lse = attention(query[:, :, 20:23], key, value, "causal", q_offset=20, return_lse=True)
    wanted = attention(query, key, value, "causal", return_lse=True)
    torch.testing.assert_close(out, wanted[0][:, :, 20:23])
    torch.testing.assert_close(lse, wanted[1][:, :, 20:23])


@pytest.mark.parametrize("name", ["causal", *exhaustive(["cells"])])
def test_derivatives_of_any_kind(name: str, small_tiles: None) -> None:
    shape, mask = (1, 2, 18, 1), {"causal": fm.causal(), "cells": (q - kv) % 3 == 0}[name]
    tensors = tuple(torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(3))

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Outputs:
        return attention(query, key, value, mask, scale=0.7, return_lse=True)

    torch.autograd.gradcheck(attend, tensors, check_forward_ad=True)
    torch.autograd.gradgradcheck(attend, tensors, check_fwd_over_rev=True, fast_mode=True)
    several = tuple(tensor.detach().expand(3, *shape) * torch.arange(1, 4).view(-1, 1, 1, 1, 1) for tensor in tensors)
    for mapped, each in zip(torch.vmap(attend)(*several), zip(*map(attend, *several), strict=True), strict=True):
        torch.testing.assert_close(mapped, torch.stack(each))
    loss = torch.vmap(torch.func.grad(lambda *given: attend(*given)[1].sin().sum()))(*several)
    torch.testing.assert_close(loss[0], torch.func.grad(lambda *given: attend(*given)[1].sin().sum())(*[x[0] for x in several]))


@pytest.mark.parametrize("score_mod", [None, OPTIONS["score_mod"]["score_mod"]], ids=["plain", "score_mod"])
def test_values_that_are_not_finite(score_mod: Any) -> None:
    query, key, value = inputs(torch.float32)
    with torch.no_grad():
        key[:, :, 30], value[:, :, 31] = math.nan, math.inf
    found = attention(query, key, value, fm.causal(), return_lse=True, score_mod=score_mod)
    wanted = attention(query[:, :, :30], key[:, :, :30], value[:, :, :30], fm.causal(), return_lse=True, score_mod=score_mod)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one[:, :, :30], other)
    assert found[1][:, :, 30:].isnan().all()
    grads = (torch.autograd.grad([one[:, :, :30].sum() for one in each], query)[0] for each in (found, wanted))
    torch.testing.assert_close(next(grads)[:, :, :30], next(grads)[:, :, :30])


def test_sizes_of_0() -> None:
    query, none = torch.ones(2, 2, 5, 4, requires_grad=True), torch.ones(2, 2, 0, 4)
    out, lse = attention(query, none, none, return_lse=True)
    assert torch.equal(out, torch.zeros(2, 2, 5, 4))
    assert torch.equal(lse, torch.full((2, 2, 5), -math.inf))
    assert attention(none, query, query, return_lse=True)[1].shape == (2, 2, 0)
    with pytest.raises(LoweringError, match=r"return_lse=True needs heads with channels, got .* value \[2, 2, 5, 0\]"):
        attention(query, query, query[..., :0], return_lse=True)


def test_backends_of_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_BACKENDS", dict(backend._BACKENDS))
    register_backend(Backend("alone", supports=lambda call: None, run=lambda call: call.query))
    query = torch.ones(1, 1, 3, 4)
    assert attention(query, query, query, backend="alone") is query
    with pytest.raises(OperandError, match="run of the backend 'alone' must return the output and the logsumexp"):
        attention(query, query, query, backend="alone", return_lse=True)
    without = Backend("without", supports=lambda call: "no logsumexp" if call.return_lse else None, run=lambda call: call.query)
    register_backend(without)
    assert choose_backend(query, query, query, return_lse=True).reasons["without"] == "no logsumexp"


@pytest.mark.slow
@pytest.mark.parametrize("options", ["plain", *exhaustive(["score_mod", "dropout"])])
def test_compiled(options: str) -> None:
    torch.compiler.reset()
    tensors = inputs(torch.float32)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Outputs:
        return attention(query, key, value, MASKS["documents"], return_lse=True, **OPTIONS[options])

    compiled = torch.compile(attend, fullgraph=True)
    check(compiled(*tensors), wanted_of(tensors, cells_of(MASKS["documents"]), **OPTIONS[options]), tensors)


# ---------------------------------------------------------------- parts


def merged(tensors: Tensors, mask: Mask | None, edges: Sequence[int], **options: Any) -> Outputs:
    """Attention to the keys between each two edges, merged."""
    mask = fm.full() if mask is None else mask
    parts = [(lo <= kv) & (kv < hi) & mask for lo, hi in pairwise(edges)]
    found = [attention(*tensors, part, return_lse=True, **options) for part in parts]
    outputs, lses = zip(*found, strict=True)
    return merge_attention(outputs, lses)


@pytest.mark.parametrize(("name", "edges"), one_in(2, MASKS, [(0, 50), (0, 25, 50), (0, 3, 30, 50), (0, 1, 2, 40, 50)]), ids=str)
def test_parts_of_the_keys_are_the_whole(name: str, edges: Sequence[int]) -> None:
    for dtype in (torch.float64, torch.float32):
        tensors = inputs(dtype)
        check(merged(tensors, MASKS[name], edges), wanted_of(tensors, cells_of(MASKS[name])), tensors)


@pytest.mark.parametrize("options", OPTIONS)
def test_parts_with_options(options: str) -> None:
    tensors, mask = inputs(), MASKS["documents"]
    check(merged(tensors, mask, (0, 20, 50), **OPTIONS[options]), wanted_of(tensors, cells_of(mask), **OPTIONS[options]), tensors)


def test_parts_in_bfloat16() -> None:
    tensors = inputs(torch.bfloat16)
    check(merged(tensors, fm.causal(), (0, 9, 30, 50)), wanted_of(tensors, cells_of(fm.causal())), tensors)


def test_parts_that_no_row_attends_to() -> None:
    """Neither NaN in their output nor the gradient of -inf reach the result."""
    out, lse = torch.randn(1, 1, 3, 2, requires_grad=True), torch.zeros(1, 1, 3, requires_grad=True)
    none, hidden = torch.full((1, 1, 3, 2), math.nan), torch.full((1, 1, 3), -math.inf, requires_grad=True)
    found = merge_attention([none, out, none], [hidden, lse, hidden])
    assert torch.equal(found[0], out)
    assert torch.equal(found[1], lse)
    by_lse, by_hidden = torch.autograd.grad(found[0].sum() + found[1].sum(), (lse, hidden))
    torch.testing.assert_close(by_lse, torch.ones_like(lse))
    assert torch.equal(by_hidden, torch.zeros_like(lse))
    out, lse = merge_attention([none, none], [hidden, hidden])
    assert torch.equal(out, torch.zeros_like(out))
    assert (lse == -math.inf).all()
    assert torch.equal(torch.autograd.grad(out.sum(), hidden)[0], torch.zeros_like(hidden))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_logsumexp_that_is_no_number_stays_one(value: float) -> None:
    """So merging merged parts again does not hide it."""
    outputs, bad, good = torch.ones(1, 1, 1), torch.tensor([[value]]), torch.zeros(1, 1)
    merged_out, lse = merge_attention([outputs * value, outputs], [bad, good])
    for out in (merged_out, lse, *merge_attention([merged_out, outputs], [lse, good])):
        assert out.isnan().all()


def test_scores_far_apart() -> None:
    out = torch.tensor([[[[1.0]]], [[[3.0]]]])
    merged_out, lse = merge_attention([*out], [torch.full((1, 1), 1e4), torch.full((1, 1), 1e4 + 1)])
    share = 1 / (1 + math.e)
    torch.testing.assert_close(merged_out, torch.tensor([[[share + 3 * (1 - share)]]]), rtol=1e-4, atol=0)
    torch.testing.assert_close(lse, torch.tensor([[1e4 + math.log1p(math.e)]]))


@pytest.mark.slow
def test_compiled_parts_at_changing_lengths() -> None:
    """One graph after that of the first sizes, of a part with the logsumexp, of the merging and of their gradients."""
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def attend(query: Tensor, key: Tensor, value: Tensor, n: Tensor) -> Outputs:
        parts = "causal & key_padding(n) & (kv < 20)", "causal & key_padding(n) & (kv >= 20)"
        found = [attention(query, key, value, part, n=n, return_lse=True) for part in parts]
        return merge_attention([out for out, _ in found], [lse for _, lse in found])

    compiled = torch.compile(attend, fullgraph=True, backend=counter)
    for length in (40, 64, 130):
        tensors, n = inputs(torch.float32, length=length), torch.tensor([0, length // 2])
        check(compiled(*tensors, n=n), wanted_of(tensors, cells_of(fm.causal() & fm.key_padding(n), length)), tensors)
    assert counter.frame_count <= 2


@pytest.mark.parametrize(
    ("outputs", "lses", "error", "message"),
    [
        ([], [], LoweringError, "an output and a logsumexp of each part, got 0 outputs and 0 logsumexps"),
        ([torch.zeros(2, 3)], [torch.zeros(2)] * 2, LoweringError, "got 1 outputs and 2 logsumexps"),
        ([torch.zeros(2, 3), torch.zeros(2, 4)], [torch.zeros(2)] * 2, LoweringError, r"one shape, .* got \[2, 4\] and \[2\]"),
        ([torch.zeros(2, 3)], [torch.zeros(3)], LoweringError, r"got \[2, 3\] and \[3\]"),
        (
            [torch.zeros(2, 3), torch.zeros(2, 3).half()],
            [torch.zeros(2)] * 2,
            OperandError,
            "one dtype, got torch.float32",
        ),
        (
            [torch.zeros(2, 3), torch.zeros(2, 3, device="meta")],
            [torch.zeros(2)] * 2,
            OperandError,
            "on one device, got cpu, meta; move them",
        ),
        (torch.zeros(1, 2, 3), [torch.zeros(2)], OperandError, "outputs must be a list of tensors, got Tensor"),
        ([1.0], [torch.zeros(2)], OperandError, "outputs must be floating point tensors, got float 1.0"),
        ([torch.zeros(2, 3)], [torch.zeros(2).long()], OperandError, "lses must be floating point tensors, got Tensor"),
    ],
)
def test_parts_that_do_not_fit(outputs: Any, lses: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        merge_attention(outputs, lses)
