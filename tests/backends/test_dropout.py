"""Dropout: the hash against plain Python, the output against dropout(softmax(s)) @ v, gradients, and seeds."""

from __future__ import annotations

import math
from typing import Any, Literal, TypeAlias

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import flexmask as fm
from flexmask import Mask, attention, kv, q
from flexmask.backends.dropout import dropout_cells, hashes_of, key_hashes, row_hashes
from flexmask.errors import ExpressionError, LoweringError, OperandError
from tests.backends.tiled_cases import block_sdpa
from tests.support import oracle
from tests.support.dropout import is_kept, kept_of

# ---------------------------------------------------------------- the hash, written anew


@pytest.mark.parametrize("seed", [0, 1, -1, 2**31, 2**40 + 3, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("sizes", [(2, 3, 5, 7), (1, 1, 2, 67)], ids=["small", "vectorized"])
def test_hash(seed: int, p: float, sizes: tuple[int, int, int, int]) -> None:
    assert torch.equal(dropout_cells(seed, p, *sizes), kept_of(seed, p, *sizes))


def test_indices_of_32_bits_give_the_same_hash() -> None:
    """As kernels have them, in which the products would overflow."""
    seed, indices = torch.tensor(2**40 + 3), torch.arange(5)
    narrow = indices.to(torch.int32)
    assert torch.equal(key_hashes(seed, narrow), key_hashes(seed, indices))
    for found, wanted in zip(row_hashes(seed, *[narrow] * 3), row_hashes(seed, *[indices] * 3), strict=True):
        assert torch.equal(found, wanted)


def test_hash_takes_large_indices() -> None:
    from flexmask.backends.dropout import keep_weights, key_hashes, row_hashes

    places = [2**30 - 1, 2**20, 2**30 - 1, 2**30 - 1]
    state = torch.tensor(5)
    found = []
    for i in range(64):
        b, h, row, column = (torch.tensor(n - i, dtype=torch.int32) for n in places)
        found.append(bool(keep_weights(*row_hashes(state, b, h, row), key_hashes(state, column), 0.5)))
    assert found == [is_kept(5, 0.5, *(n - i for n in places)) for i in range(64)]
    assert len(set(found)) == 2


P, SIZES = 0.3, (4, 6, 200, 220)
DRAWN = ~dropout_cells(7, P, *SIZES)


def deviations(counts: Tensor, number: int) -> Tensor:
    """The distances of shares of drops from P, in standard deviations."""
    return (counts - P) / math.sqrt(P * (1 - P) / number)


@pytest.mark.parametrize("axis", range(4))
def test_drops_are_uniform_along_each_axis(axis: int) -> None:
    others = [other for other in range(4) if other != axis]
    found = deviations(DRAWN.double().mean(others), DRAWN.numel() // SIZES[axis])
    assert found.abs().max() < 4.5


@pytest.mark.parametrize("axis", range(4))
@pytest.mark.parametrize("step", [1, 2, 3])
def test_neighbors_are_independent(axis: int, step: int) -> None:
    centered = DRAWN.double() - P
    pairs = centered.narrow(axis, 0, SIZES[axis] - step) * centered.narrow(axis, step, SIZES[axis] - step)
    assert abs(pairs.mean() / (P * (1 - P)) * math.sqrt(pairs.numel())) < 4.5


@pytest.mark.parametrize("axis", [2, 3])
def test_no_two_rows_or_columns_are_alike(axis: int) -> None:
    lines = (DRAWN.double() - P).movedim(axis, -1).reshape(-1, SIZES[axis])[:1200]
    among = lines @ lines.T / (P * (1 - P)) / math.sqrt(lines.shape[1])
    assert among.fill_diagonal_(0).abs().max() < 6.5


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_two_rows_agree_at_two_keys_as_often_as_chance(p: float) -> None:
    """The products of the four decisions of a rectangle of cells sum to 0 over all rectangles."""
    size, sums = 600, torch.zeros(20)
    for seed in range(len(sums)):
        kept = dropout_cells(seed, p, 1, 1, size, size)[0, 0].double()
        centered = (kept - 1 + p) / math.sqrt(p * (1 - p))
        both, alone = (centered @ centered.T).square(), centered.square() @ centered.square().T
        total = (both - alone).triu(1).sum() / 2
        sums[seed] = total / (size * (size - 1) / 2)
    assert abs(sums.sum() / math.sqrt(len(sums))) < 4.5


def test_many_heads_are_not_alike() -> None:
    """Of 2**17 heads some would share a state of 32 bits."""
    sizes = 512, 256, 1, 64
    rows = dropout_cells(76, 0.5, *sizes).reshape(-1, 64)
    assert len(torch.unique(rows, dim=0)) == len(rows)


def test_seeds_are_independent() -> None:
    other = ~dropout_cells(8, P, *SIZES)
    pairs = (DRAWN.double() - P) * (other.double() - P)
    assert abs(pairs.mean() / (P * (1 - P)) * math.sqrt(pairs.numel())) < 4.5


# ---------------------------------------------------------------- attention

MASKS: dict[str, Mask | None] = {
    "none": None,
    "full": fm.full(),
    "causal": fm.causal(),
    "window": fm.sliding_window(left=40, right=3),
    "diagonals": (q - kv) % 3 == 0,
    "padding, one sequence empty": fm.key_padding([0, 100]),
    "documents": fm.causal() & fm.document(lengths=[100, 60, 140]),
}
LENGTH = 300


Inputs: TypeAlias = tuple[Tensor, Tensor, Tensor]


def inputs(dtype: torch.dtype = torch.float64, kv_heads: int = 4) -> Inputs:
    draw = torch.Generator().manual_seed(0)
    sizes = (4, 8), (kv_heads, 8), (kv_heads, 6)
    parts = (torch.randn(2, heads, LENGTH, width, generator=draw, dtype=torch.float64) for heads, width in sizes)
    query, key, value = (part.to(dtype).requires_grad_() for part in parts)
    return query, key, value


def detached(tensors: Inputs, dtype: torch.dtype | None = None) -> Inputs:
    query, key, value = (tensor.detach().to(dtype or tensor.dtype) for tensor in tensors)
    return query, key, value


def dropped(query: Tensor, key: Tensor, value: Tensor, mask: Mask | None, p: float, seed: int) -> Tensor:
    """``dropout(softmax(scores)) @ value`` with the decisions of the hash."""
    visible = torch.tensor(True) if mask is None else mask.dense(LENGTH, batch=2)
    keep = dropout_cells(seed, p, 2, query.shape[1], LENGTH, LENGTH)
    return oracle.attention(query, key, value, visible, factors=keep.double() / (1 - p))


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("name", MASKS)
def test_outputs_and_gradients(name: str, kv_heads: int) -> None:
    tensors = inputs(kv_heads=kv_heads)
    found = attention(*tensors, mask=MASKS[name], enable_gqa=True, dropout_p=0.3, dropout_seed=11)
    wanted = dropped(*tensors, mask=MASKS[name], p=0.3, seed=11)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-11)
    grad = torch.randn_like(found)
    for one, other in zip(torch.autograd.grad(found, tensors, grad), torch.autograd.grad(wanted, tensors, grad), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)


def test_with_a_score_mod() -> None:
    tensors = inputs()
    found = attention(*tensors, mask=fm.causal(), dropout_p=0.3, dropout_seed=11, score_mod=lambda s, b, h, i, j: s + 0 * i)
    torch.testing.assert_close(found, dropped(*tensors, mask=fm.causal(), p=0.3, seed=11), rtol=1e-10, atol=1e-11)


BACKENDS: tuple[Literal["flex"], Literal["sdpa"]] = ("flex", "sdpa")


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["none", "causal", "padding, one sequence empty"])
def test_backends_drop_the_same(name: str) -> None:
    tensors = detached(inputs(torch.float32, kv_heads=2))
    options: Any = {"enable_gqa": True, "dropout_p": 0.3, "dropout_seed": 11}
    flex, sdpa = (attention(*tensors, mask=MASKS[name], backend=backend, **options) for backend in BACKENDS)
    torch.testing.assert_close(flex, sdpa, rtol=1e-5, atol=1e-5)


def test_expectation_is_attention_without_dropout() -> None:
    query, key, value = (tensor[:1, :1, :40].detach() for tensor in inputs())
    wanted = attention(query, key, value, fm.causal())
    draws = [attention(query, key, value, fm.causal(), dropout_p=0.25, dropout_seed=seed) for seed in range(800)]
    several = torch.stack(draws)
    error = several.std(0) / math.sqrt(len(draws))
    assert ((several.mean(0) - wanted).abs() <= 5 * error + 1e-12).all()
    assert (several.std(0)[..., 1:, :] > 0).all()


def test_a_seed_reproduces_and_none_draws_one() -> None:
    tensors = inputs()
    with torch.no_grad():
        twice = [attention(*tensors, dropout_p=0.5, dropout_seed=3) for _ in range(2)]
        as_tensor = attention(*tensors, dropout_p=0.5, dropout_seed=torch.tensor([3]))
        torch.manual_seed(0)
        drawn = [attention(*tensors, dropout_p=0.5) for _ in range(2)]
        torch.manual_seed(0)
        again = attention(*tensors, dropout_p=0.5)
    assert torch.equal(twice[0], twice[1])
    assert torch.equal(twice[0], as_tensor)
    assert not torch.equal(drawn[0], drawn[1])
    assert torch.equal(drawn[0], again)


def test_checkpoints_drop_the_same() -> None:
    tensors = inputs()

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attention(query, key, value, fm.causal(), dropout_p=0.5)

    grads = []
    for call in (run, lambda *parts: checkpoint(run, *parts, use_reentrant=False)):
        torch.manual_seed(0)
        grads.append(torch.autograd.grad(call(*tensors).sum(), tensors))
    assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True))


def test_edges() -> None:
    tensors = inputs()
    assert torch.equal(
        attention(*tensors, mask=fm.causal(), dropout_p=0.0, dropout_seed=1), attention(*tensors, mask=fm.causal())
    )
    everything = attention(*tensors, mask=fm.causal(), dropout_p=1.0)
    assert torch.equal(everything, torch.zeros_like(everything))
    assert all(torch.equal(grad, torch.zeros_like(grad)) for grad in torch.autograd.grad(everything.sum(), tensors))


def test_half_precision() -> None:
    tensors = detached(inputs(torch.bfloat16))
    found = attention(*tensors, mask=fm.causal(), dropout_p=0.3, dropout_seed=11)
    assert found.dtype == torch.bfloat16
    precise = detached(tensors, torch.float64)
    wanted = dropped(*precise, mask=fm.causal(), p=0.3, seed=11)
    torch.testing.assert_close(found.double(), wanted, rtol=2e-2, atol=2e-2)


def test_one_graph_for_all_seeds() -> None:
    from torch._dynamo.utils import counters

    tensors = detached(inputs(torch.float32))
    bounds = fm.causal().rows(LENGTH).lower.bounds
    torch.compiler.reset()
    counters.clear()
    compiled = torch.compile(block_sdpa, fullgraph=True, backend="eager")
    for seed in (1, 2, 3):
        sizes = *tensors[0].shape[:3], LENGTH
        hashes = hashes_of(torch.tensor(seed), *map(torch.arange, sizes))
        found = compiled(*tensors, bounds=bounds, dropout_p=0.3, hashes=hashes)
        assert torch.equal(found, block_sdpa(*tensors, bounds=bounds, dropout_p=0.3, hashes=hashes))
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dropout_p": 1.5}, ExpressionError, "dropout_p must be between 0 and 1, got 1.5"),
        ({"dropout_p": -0.1}, ExpressionError, "dropout_p must be between 0 and 1"),
        ({"dropout_p": float("nan")}, ExpressionError, "dropout_p must be between 0 and 1, got nan"),
        ({"dropout_p": True}, OperandError, "dropout_p must be a number from 0 to 1, got True"),
        (
            {"dropout_p": 0.5, "dropout_seed": 1.0},
            OperandError,
            "dropout_seed must be an int or one integer",
        ),
        ({"dropout_p": 0.5, "dropout_seed": 2**63}, ExpressionError, "dropout_seed must be at most"),
        ({"dropout_p": 0.5, "dropout_seed": torch.zeros(2, dtype=torch.long)}, LoweringError, r"got torch.int64\[2\]"),
    ],
    ids=str,
)
def test_bad_arguments(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        attention(*inputs(), **options)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="FlexAttention has gradients on CUDA only")
@pytest.mark.parametrize("name", MASKS)
def test_flex_gradients_on_cuda(name: str) -> None:
    query, key, value = (tensor.detach().repeat(1, 1, 1, 4).cuda().requires_grad_() for tensor in inputs(torch.float32))
    wide = detached((query.cpu(), key.cpu(), value.cpu()), torch.float64)
    precise = wide[0].requires_grad_(), wide[1].requires_grad_(), wide[2].requires_grad_()
    tensors = query, key, value
    found = attention(*tensors, mask=MASKS[name], backend="flex", dropout_p=0.3, dropout_seed=11)
    wanted = dropped(*precise, mask=MASKS[name], p=0.3, seed=11)
    torch.testing.assert_close(found.cpu().double(), wanted, rtol=1e-2, atol=1e-2)
    grads = torch.autograd.grad(found.sum(), tensors), torch.autograd.grad(wanted.sum(), precise)
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one.cpu().double(), other, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("mask", ["full", "kv < 50"])
def test_one_query_drops_too(mask: str) -> None:
    """Its keys are one interval, which takes a call of torch's kernel where nothing is dropped."""
    query, key = torch.randn(1, 1, 1, 64), torch.randn(1, 1, 64, 64)
    weights = attention(query, key, torch.eye(64)[None, None], mask, backend="sdpa", dropout_p=0.5, dropout_seed=3)
    assert 10 < int((weights == 0)[..., :50].sum()) < 40
