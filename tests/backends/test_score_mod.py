"""A `score_mod` in code that `torch.compile` traces: the backend `sdpa` against a dense reference, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import flexmask as fm
from flexmask.backends import tile_blocks, tiling
from tests.support.exhaustive import each_run

BATCH, HEADS, LENGTH = 2, 4, 40
rows, keys = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
CAUSAL = keys <= rows
CUTS = torch.tensor([[0, 17, LENGTH], [0, 30, LENGTH]])
PACKED = torch.stack([CAUSAL & ((rows < cut) == (keys < cut)) for cut in (17, 30)])[:, None]

#: A mask as it is given, and its cells.
MASKS: dict[str, Callable[[], tuple[Any, Tensor]]] = {
    "none": lambda: (None, torch.ones(1, dtype=torch.bool)),
    "text": lambda: ("causal & sliding_window(size=7)", CAUSAL & (rows - keys < 7)),
    "documents": lambda: (fm.causal() & fm.document(cu_seqlens=CUTS), PACKED),
    "not separable": lambda: ((fm.q * fm.kv) % 7 < 3, (rows * keys) % 7 < 3),
    "empty rows": lambda: (fm.causal() & fm.key_padding(keep=keys > 4), CAUSAL & (keys > 4)),
    "no key": lambda: (fm.empty(), CAUSAL & False),
    "lowered": lambda: (fm.plan("causal & document(cu_seqlens=cu)", LENGTH)(cu=CUTS), PACKED),
    "block mask": lambda: (fm.causal().block_mask(LENGTH, block_size=16), CAUSAL),
}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tiles, the last one of fewer rows."""
    monkeypatch.setattr(tile_blocks, "BLOCK_ROWS", 24)
    torch.compiler.reset()


def dense(query: Tensor, key: Tensor, value: Tensor, cells: Tensor, bias: Tensor) -> Tensor:
    key, value = (tensor.repeat_interleave(HEADS // tensor.shape[1], 1) for tensor in (key, value))
    scores = 5 * torch.tanh(query @ key.mT / query.shape[-1] ** 0.5 / 5) - bias[:, None, None] * (rows - keys)
    empty = ~cells.expand(BATCH, HEADS, LENGTH, LENGTH).any(-1, keepdim=True)
    weights = scores.masked_fill(~cells, -torch.inf).masked_fill(empty, 0).softmax(-1)
    return weights.masked_fill(empty, 0) @ value


def inputs() -> list[Tensor]:
    """Query, key, value and a bias that the score_mod captures."""
    shapes = (BATCH, HEADS, LENGTH, 8), (BATCH, 2, LENGTH, 8), (BATCH, 2, LENGTH, 8), (HEADS,)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


@pytest.mark.slow
@pytest.mark.parametrize("name", each_run(MASKS, "documents"))
def test_one_graph_with_gradients(name: str) -> None:
    mask, cells = MASKS[name]()

    def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, mask: Any) -> Tensor:
        def modify(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return 5 * torch.tanh(score / 5) - bias[h] * (q_idx - kv_idx)

        return fm.attention(query, key, value, mask, score_mod=modify, enable_gqa=True, backend="sdpa")

    query, key, value, bias = tensors = inputs()
    found = torch.compile(attend, fullgraph=True, backend="aot_eager")(query, key, value, bias, mask)
    expected = dense(query, key, value, cells, bias)
    torch.testing.assert_close(found, expected)
    grad = torch.randn_like(found)
    torch.testing.assert_close(torch.autograd.grad(found, tensors, grad), torch.autograd.grad(expected, tensors, grad))
    torch.testing.assert_close(found, attend(query, key, value, bias, mask))


@pytest.mark.slow
def test_new_data_runs_the_same_graph() -> None:
    """No tile depends on a value of the mask that was traced."""
    plan = fm.plan("causal & document(cu_seqlens=cu)", LENGTH)
    query, key, value, bias = (tensor.detach() for tensor in inputs())

    @torch.compile(fullgraph=True, backend="eager")
    def attend(query: Tensor, key: Tensor, value: Tensor, lowered: Any) -> Tensor:
        return fm.attention(
            query, key, value, lowered, score_mod=lambda s, b, h, i, j: 5 * torch.tanh(s / 5) - bias[h] * (i - j), enable_gqa=True
        )

    for step, cut in enumerate((3, 39)):
        with torch.compiler.set_stance("fail_on_recompile" if step else "default"):
            found = attend(query, key, value, plan(cu=torch.tensor([0, cut, LENGTH])))
        torch.testing.assert_close(found, dense(query, key, value, CAUSAL & ((rows < cut) == (keys < cut)), bias))


@pytest.mark.exhaustive
def test_the_module_is_one_graph() -> None:
    module = fm.MultiheadFlexAttention(
        8, 8, HEADS, mask="causal & document(ids)", score_mod=lambda score, b, h, i, j: score - 0.1 * (h + 1) * (i - j)
    )
    x, ids = torch.randn(BATCH, LENGTH, 8), (keys >= 17).long().expand(BATCH, -1)
    with torch.no_grad():
        found = torch.compile(module, fullgraph=True, backend="eager")(x, ids=ids)
        torch.testing.assert_close(found, module(x, ids=ids))


@pytest.mark.exhaustive
def test_a_graph_has_few_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tile_blocks, "BLOCK_ROWS", 1)
    monkeypatch.setattr(tiling, "MAX_CAPTURED_TILES", 2)
    graphs = []

    def keep(graph: torch.fx.GraphModule, example: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    query = torch.randn(1, 1, LENGTH, 8)
    torch.compile(
        lambda query: fm.attention(query, query, query, fm.causal(), score_mod=lambda score, b, h, i, j: score * 2),
        fullgraph=True,
        backend=keep,
    )(query)
    (graph,) = graphs
    assert sum("checkpoint" in str(node.target) for node in graph.graph.nodes) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "score_mod",
    [
        pytest.param(None, id="plain"),
        pytest.param(lambda score, b, h, i, j: score * 2, id="score_mod", marks=pytest.mark.exhaustive),
    ],
)
def test_dynamic_lengths(score_mod: Any) -> None:
    def attend(query: Tensor) -> Tensor:
        return fm.attention(query, query, query, fm.sliding_window(size=7), score_mod=score_mod, backend="sdpa")

    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (30, 41):
        query = torch.randn(1, 2, length, 8)
        torch.testing.assert_close(compiled(query), attend(query))
