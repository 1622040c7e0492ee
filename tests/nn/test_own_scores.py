"""The score_mod of a module after it was made: its tables are the module's parameters, and it can be replaced."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

import flexmask as fm
from flexmask import MultiheadFlexAttention, scores
from flexmask.errors import OperandError, TextError

HEADS, D, LENGTH = 4, 16, 10


def layer_with(score_mod: Any, **options: Any) -> MultiheadFlexAttention:
    torch.manual_seed(0)
    return MultiheadFlexAttention(D, D, HEADS, mask="causal", score_mod=score_mod, **options)


def learned(scale: float = 1.0) -> scores.Score:
    return scores.relative_bias(nn.Parameter(scale * torch.randn(8, HEADS)))


def check_computes(layer: MultiheadFlexAttention, table: Tensor) -> None:
    """The output is that of a function which adds the entry of the table, as one of a module without parameters of its own."""
    x = torch.randn(2, LENGTH, D)
    plain = MultiheadFlexAttention(D, D, HEADS, mask="causal", score_mod=scores.relative_bias(table.detach()))
    plain.load_state_dict({name: held for name, held in layer.state_dict().items() if "proj" in name})
    torch.testing.assert_close(layer(x), plain(x))


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


@pytest.mark.parametrize("change", ["parametrized", "pruned"])
def test_a_computed_table_stays_computed_when_the_module_moves(change: str) -> None:
    layer = layer_with(learned())
    if change == "parametrized":
        parametrize.register_parametrization(layer, "score_table", Doubled())
    else:
        prune.l1_unstructured(layer, "score_table", 0.5)
    layer.to("cpu")
    for _ in range(2):  # each step has a graph of its own
        layer(torch.randn(2, LENGTH, D)).sum().backward()
    layer.load_state_dict(
        {name: torch.randn_like(held) if "mask" not in name else held for name, held in layer.state_dict().items()}
    )
    if change == "pruned":
        layer(torch.randn(2, LENGTH, D))  # its hook computes the table
    table = layer.score_table
    assert isinstance(table, Tensor)
    check_computes(layer, table)
    with pytest.raises(OperandError, match="score_table of the module is not a plain table"):
        layer.score_mod = None


def test_the_score_that_is_read_has_the_tables_of_the_module() -> None:
    layer = layer_with(learned(0.0))
    layer.load_state_dict({name: torch.ones_like(held) for name, held in layer.state_dict().items()}, assign=True)
    assert isinstance(layer.score_mod, scores.Score)
    assert layer.score_mod.dense(4, heads=HEADS).eq(1).all()
    layer.score_mod = layer.score_mod >> scores.softcap(50.0)
    assert layer.get_parameter("score_table").eq(1).all()
    layer.get_parameter("score_table").data.zero_()
    assert layer.score_mod.dense(4, heads=HEADS).eq(0).all()


def test_a_text_is_a_score() -> None:
    layer, x = layer_with(None), torch.randn(2, LENGTH, D)
    layer.score_mod = "alibi()"
    assert layer.score_mod == scores.alibi()
    torch.testing.assert_close(layer(x, cache=fm.KVCache(LENGTH)), layer_with("alibi()")(x))
    with pytest.raises(TextError):
        layer.score_mod = "alibu()"
    assert layer.score_mod == scores.alibi()


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return score * self.scale


def test_a_module_can_be_replaced() -> None:
    layer, x = layer_with(Scaled()), torch.randn(2, LENGTH, D)
    assert "score_mod.scale" in layer.state_dict()
    halved = layer(x)
    torch.testing.assert_close(copy.deepcopy(layer)(x), halved)
    halved.sum().backward()
    assert layer.get_parameter("score_mod.scale").grad is not None
    layer.score_mod = lambda score, b, h, q, kv: score * 0.5
    torch.testing.assert_close(layer(x), halved)
    assert "score_mod.scale" not in layer.state_dict()
    layer.score_mod = learned()
    check_computes(layer, layer.get_parameter("score_table"))
    layer.score_mod = Scaled()
    torch.testing.assert_close(layer(x), halved)
    assert "score_table" not in layer.state_dict()
    layer.score_mod = None
    assert layer.score_mod is None
    assert [*layer.state_dict()] == [*layer_with(None).state_dict()]


def test_names_of_tables_that_are_taken() -> None:
    layer = layer_with(None)
    layer.score_table = nn.Embedding(8, 4)
    with pytest.raises(OperandError, match="score_table of the module is not a plain table of its score_mod"):
        layer.score_mod = learned()
    assert layer.score_mod is None


@pytest.mark.parametrize("score", ["learned", "alibi", "capped"])
@pytest.mark.parametrize("shape", [(0, LENGTH, D), (2, 0, D)])
def test_tables_have_gradients_of_an_empty_batch(score: str, shape: tuple[int, ...]) -> None:
    """As all weights, without which DDP waits for them."""
    made = scores.alibi(nn.Parameter(torch.ones(HEADS))) if score == "alibi" else learned()
    layer = layer_with(made >> scores.softcap(9.0) if score == "capped" else made)
    layer(torch.randn(shape)).sum().backward()
    assert [name for name, weight in layer.named_parameters() if weight.grad is None or weight.grad.any()] == []


@pytest.mark.slow
def test_a_score_is_assigned_in_compiled_code() -> None:
    torch._dynamo.reset()
    layer, x, score = layer_with(None), torch.randn(2, LENGTH, D), scores.alibi()

    @torch.compile(backend="eager", fullgraph=True)
    def run(x: Tensor) -> Any:
        layer.score_mod = score
        return layer(x)

    torch.testing.assert_close(run(x), layer_with("alibi()")(x))
