"""Attention with scores by name, against dense attention with the bias written out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import flexmask as fm
from flexmask import scores
from flexmask.backends import problem, tile_blocks
from tests.scores.cases import BUCKETS, HEADS, Case, alibi_bias, capped
from tests.support import oracle
from tests.support.exhaustive import one_in

SLOPES = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8], dtype=torch.float64)
MASKS: dict[str, Any] = {
    "none": None,
    "causal": fm.causal(),
    "window": fm.causal() & fm.sliding_window(size=9),
    "documents": fm.causal() & fm.document(lengths=[[20, 1, 69], [33, 33, 24]]),
    "sink": fm.causal() & fm.masks.sink_window(2, size=7),
    "cells": (fm.q * fm.kv) % 7 < 3,
    "empty rows": fm.causal() & (fm.kv > 4),
    "heads": fm.per_head([fm.causal(), fm.full(), fm.sliding_window(size=5), fm.causal()]),
}
NAMES = ["alibi", "relative", "decoder", "bias", "softcap", "alibi bias", "relative softcap", "bias softcap", "softcap alibi"]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles and bands, and biases of one head at a time."""
    monkeypatch.setattr(tile_blocks, "BLOCK_ROWS", 32)
    monkeypatch.setattr(problem, "BIAS_SCORES", 2**10)


def inputs(
    length: int = 90, kv_len: int | None = None, dtype: torch.dtype = torch.float64, batch: int = 2
) -> tuple[Tensor, Tensor, Tensor]:
    kv_len = length if kv_len is None else kv_len
    shapes = (batch, HEADS, length, 8), (batch, 2, kv_len, 8), (batch, 2, kv_len, 8)
    query, key, value = (torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes)
    return query, key, value


def wanted(case: Case, tensors: Sequence[Tensor], mask: Any, first: int = 0) -> Tensor:
    """Dense attention of the queries from a position on."""
    query, key, value = tensors
    q, kv = torch.arange(first, first + query.shape[2]), torch.arange(key.shape[2])
    whole = fm.full() if mask is None else mask
    cells = whole.dense(len(q), len(kv), batch=query.shape[0], heads=HEADS, q_offset=first)
    return oracle.attention(query, key, value, cells, score_mod=lambda s, *_: case.change(s, q, kv))


def check(found: Tensor, expected: Tensor, tensors: Sequence[Tensor], tolerance: float = 1e-8) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
    grad = torch.randn_like(found)
    actual = torch.autograd.grad(found, tensors, grad)
    for own, other in zip(actual, torch.autograd.grad(expected, tensors, grad.double()), strict=True):
        torch.testing.assert_close(own, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("name", "mask"), one_in(2, NAMES, MASKS))
def test_output_and_gradients(name: str, mask: str) -> None:
    case, tensors = Case(name), inputs(batch=1 if mask == "window" else 2)
    found = fm.attention(*tensors, MASKS[mask], score_mod=case.score, enable_gqa=True)
    check(found, wanted(case, tensors, MASKS[mask]), [*tensors, *case.tensors])


@pytest.mark.parametrize("name", ["relative", "bias softcap"])
@pytest.mark.parametrize("setting", ["dropout", "logsumexp", "single query", "scale"])
def test_other_arguments(name: str, setting: str) -> None:
    case, tensors, mask = Case(name), inputs(1 if setting == "single query" else 40, 40), fm.causal()
    first = 39 if setting == "single query" else 0
    options: dict[str, Any] = {"score_mod": case.score, "enable_gqa": True, "q_offset": first}
    if setting == "dropout":
        found = fm.attention(*tensors, mask, dropout_p=0.3, dropout_seed=3, **options)
        kept = fm.backends.dropout.dropout_cells(3, 0.3, 2, HEADS, 40, 40).double() / 0.7
        q = torch.arange(40)
        expected = oracle.attention(*tensors, mask.dense(40), score_mod=lambda s, *_: case.change(s, q, q), factors=kept)
    elif setting == "logsumexp":
        _, found = fm.attention(*tensors, mask, return_lse=True, **options)
        q = torch.arange(40)
        all_scores = case.change(oracle.attention_scores(*tensors[:2]), q, q)
        expected = all_scores.masked_fill(~mask.dense(40), -torch.inf).logsumexp(-1)
    elif setting == "scale":
        found = fm.attention(*tensors, mask, scale=0.5, **options)
        q = torch.arange(40)
        expected = oracle.attention(*tensors, mask.dense(40), scale=0.5, score_mod=lambda s, *_: case.change(s, q, q))
    else:
        found, expected = fm.attention(*tensors, mask, **options), wanted(case, tensors, mask, 39)
    check(found, expected, [*(tensors[:2] if setting == "logsumexp" else tensors), *case.tensors])


@pytest.mark.parametrize("offset", [50, torch.tensor([50, 31])], ids=["int", "tensor"])
@pytest.mark.parametrize("name", ["alibi", "bias", "softcap relative"])
def test_positions_are_those_of_the_mask(name: str, offset: Any) -> None:
    case, tensors = Case(name), inputs(7, 60)
    found = fm.attention(*tensors, fm.causal(), score_mod=case.score, q_offset=offset, enable_gqa=True)
    each = [
        wanted(case, [tensor[i : i + 1] for tensor in tensors], fm.causal(), int(torch.as_tensor(offset).expand(2)[i]))
        for i in range(2)
    ]
    check(found, torch.cat(each), [*tensors, *case.tensors])


def test_a_text_with_the_slopes_of_the_paper() -> None:
    tensors, q = inputs(), torch.arange(90)
    found = fm.attention(*tensors, "causal", score_mod="alibi() >> softcap(2)", enable_gqa=True)
    expected = oracle.attention(
        *tensors, fm.causal().dense(90), score_mod=lambda s, *_: capped(s + alibi_bias(SLOPES, q, q), 2.0)
    )
    check(found, expected, tensors)


@pytest.mark.parametrize("heads", [1, 6, 8, 12])
def test_slopes_of_any_number_of_heads(heads: int) -> None:
    """As the code of the paper has them."""

    def slopes(n: int) -> list[float]:
        if n & (n - 1) == 0:
            return [2 ** (-8 * (i + 1) / n) for i in range(n)]
        fewer = 2 ** (n.bit_length() - 1)
        return slopes(fewer) + slopes(2 * fewer)[0::2][: n - fewer]

    found = scores.alibi().dense(1, 2, heads=heads)[0, :, 0, 1]
    torch.testing.assert_close(found, -torch.tensor(slopes(heads)))


def test_biases_of_minus_infinity_hide_keys() -> None:
    tensors, table = inputs(40, dtype=torch.float32), torch.zeros(40, 40).masked_fill(torch.rand(40, 40) < 0.5, -torch.inf)
    table[5] = -torch.inf
    table.requires_grad_()
    found = fm.attention(*tensors, fm.causal(), score_mod=scores.bias(table), enable_gqa=True)
    expected = oracle.attention(*tensors, fm.causal().dense(40) & table.isfinite())
    assert torch.all(found[:, :, 5] == 0)
    check(found, expected, tensors, 1e-5)
    found = fm.attention(*tensors, fm.causal(), score_mod=scores.bias(table), enable_gqa=True)
    grad = torch.autograd.grad(found.square().sum(), table)[0]
    assert grad.isfinite().all()
    assert torch.all(grad[~table.isfinite()] == 0)
    assert grad.any()


def test_second_derivatives_and_transforms() -> None:
    case = Case("relative softcap")
    tensors = [tensor[..., :4].detach().requires_grad_() for tensor in inputs(6, batch=1)]

    def attend(query: Tensor, key: Tensor, value: Tensor, table: Tensor) -> Tensor:
        score = scores.relative_bias(table, max_distance=20) >> scores.softcap(3.0)
        return fm.attention(query, key, value, fm.causal(), score_mod=score, enable_gqa=True)

    arguments = *tensors, *case.tensors
    assert torch.autograd.gradgradcheck(attend, arguments, fast_mode=True)
    found = torch.func.grad(lambda *given: attend(*given).square().sum(), argnums=(0, 3))(*arguments)
    torch.testing.assert_close(found, torch.autograd.grad(attend(*arguments).square().sum(), (tensors[0], case.tensors[0])))


@pytest.mark.parametrize("cap", [0.0, 3.0])
def test_gradients_of_gradients(cap: float) -> None:
    """Also the first ones, of which a graph is kept."""
    slopes, position = torch.tensor([0.5, 0.25, 0.125, 1.0], dtype=torch.float64), torch.arange(7)
    inputs = [torch.randn(2, heads, 7, 4, dtype=torch.float64).requires_grad_() for heads in (HEADS, 2, 2)]
    score = scores.alibi(slopes) >> scores.softcap(cap) if cap else scores.alibi(slopes)

    def dense(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = (part.repeat_interleave(2, 1) for part in (key, value))
        found = query @ key.mT / 2 + alibi_bias(slopes, position, position)
        found = capped(found, cap) if cap else found
        return found.masked_fill(position > position[:, None], -torch.inf).softmax(-1) @ value

    def derivatives(attend: Any) -> list[Tensor]:
        first = torch.autograd.grad(attend(*inputs).square().sum(), inputs, create_graph=True)
        total = sum((part.square().sum() for part in first), torch.zeros(()))
        return [*first, *torch.autograd.grad(total, inputs)]

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return fm.attention(query, key, value, "causal", score_mod=score, enable_gqa=True)

    found = derivatives(attend)
    for own, wanted in zip(found, derivatives(dense), strict=True):
        torch.testing.assert_close(own, wanted)


@pytest.mark.slow
def test_one_graph_without_dense_scores() -> None:
    """Lengths are symbols, tables are inputs, and no tensor of a graph has the queries and keys as its axes."""
    sizes: list[Any] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        sizes.append([node.meta["example_value"].shape for node in graph.graph.nodes if _is_tensor(node)])
        return graph.forward

    def _is_tensor(node: torch.fx.Node) -> bool:
        return isinstance(node.meta.get("example_value"), Tensor)

    def attend(query: Tensor, key: Tensor, value: Tensor, table: Tensor) -> Tensor:
        score = scores.alibi() + scores.relative_bias(table, max_distance=20) >> scores.softcap(3.0)
        return fm.attention(query, key, value, "causal", score_mod=score, enable_gqa=True)

    compiled = torch.compile(attend, fullgraph=True, backend=keep)
    for length in (40, 57, 70):
        case, tensors, q = Case("relative softcap"), inputs(length), torch.arange(length)
        first = case.steps[0]
        case.steps[0] = lambda s, q, kv, first=first: first(s + alibi_bias(SLOPES, q, kv), q, kv)  # type: ignore[misc]
        found = compiled(*tensors, case.tensors[0])
        check(found, wanted(case, tensors, fm.causal()), [*tensors, *case.tensors])
        assert len(q) == length
    assert len(sizes) == 2
    assert not any(40 in shape and list(shape).count(40) > 1 for shape in sizes[0])


@pytest.mark.slow
def test_compiled_code_takes_the_text_of_a_score() -> None:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return fm.attention(query, key, value, "causal", score_mod="alibi() >> softcap(3.0)", enable_gqa=True)

    tensors = inputs(40)
    torch.testing.assert_close(torch.compile(attend, fullgraph=True, backend="aot_eager")(*tensors), attend(*tensors))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_keeps_biases_in_float32(dtype: torch.dtype) -> None:
    """Biases of far keys are many times the scores: they must not be rounded to 8 bits."""
    table = torch.nn.Parameter(torch.full((BUCKETS, HEADS), 100.25))
    tensors = inputs(40, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        found = fm.attention(*tensors, "causal", score_mod=scores.relative_bias(table), enable_gqa=True)
        plain = fm.attention(*tensors, "causal", enable_gqa=True)
    assert found.dtype == dtype
    torch.testing.assert_close(found, plain, rtol=0.02, atol=0.02)
    found.float().square().sum().backward()
    assert table.grad is not None
    assert table.grad.dtype == torch.float32
    assert table.grad.sum(0).abs().max() < 0.2 < table.grad.abs().max()  # a shift of all scores changes nothing


def test_flex_attention_takes_the_function() -> None:
    """In eager code, where it has no kernel to compile."""
    from torch.nn.attention.flex_attention import flex_attention

    query, key, value = (tensor.detach() for tensor in inputs(20, 20, torch.float32))
    score = scores.alibi() >> scores.softcap(20.0)
    for named in (score, scores.relative_bias([[0.1, 0.2, 0.3, 0.4]] * 8, max_distance=9) + scores.bias(torch.randn(20, 20))):
        found = flex_attention(query, key, value, score_mod=named.score_mod(HEADS), enable_gqa=True)
        wanted = fm.attention(query, key, value, score_mod=named, enable_gqa=True)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


class TestModule:
    def test_text_of_a_config(self) -> None:
        text = "alibi() >> softcap(50.0)"
        layer = fm.MultiheadFlexAttention(32, 32, HEADS, n_kv_heads=2, mask="causal", score_mod=text)
        assert repr(text) in repr(layer)
        x = torch.randn(2, 20, 32)
        weights = layer.attention_weights(x)
        query, key = layer(x, return_qk=True)[1:]
        q = torch.arange(20)
        every = capped(oracle.attention_scores(query, key) + alibi_bias(SLOPES, q, q), 50.0)
        torch.testing.assert_close(weights.double(), oracle.softmax(every, fm.causal().dense(20)), rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("name", ["alibi", "relative", "bias", "softcap bias"])
    @pytest.mark.parametrize("window", [None, 12])
    def test_decoding_is_the_whole_sequence(self, name: str, window: int | None) -> None:
        mask = fm.causal() if window is None else fm.causal() & fm.sliding_window(size=window)
        layer = fm.MultiheadFlexAttention(32, 32, HEADS, mask=mask, score_mod=Case(name, torch.float32).score).eval()
        x = torch.randn(2, 40, 32)
        cache = fm.KVCache(60) if window is None else fm.KVCache(window=window)
        with torch.no_grad():
            steps = [layer(part, cache=cache) for part in x.split([21, 1, 1, 17], 1)]
            torch.testing.assert_close(torch.cat(steps, 1), layer(x), rtol=1e-4, atol=1e-5)

    def test_sequences_of_different_lengths(self) -> None:
        layer = fm.MultiheadFlexAttention(32, 32, HEADS, mask="causal", score_mod=Case("relative", torch.float32).score).eval()
        x, new, lengths = torch.randn(2, 20, 32), torch.randn(2, 1, 32), [20, 13]
        cache = fm.KVCache(30)
        with torch.no_grad():
            layer(x, fm.causal() & fm.key_padding(lengths), cache=cache)
            cache.truncate(lengths)
            found = layer(new, cache=cache)
            alone = [layer(torch.cat((x[i : i + 1, :n], new[i : i + 1]), 1))[:, -1:] for i, n in enumerate(lengths)]
        torch.testing.assert_close(found, torch.cat(alone), rtol=1e-4, atol=1e-5)

    def test_a_table_of_a_model_trains_moves_and_is_copied(self) -> None:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.table = nn.Parameter(torch.zeros(BUCKETS, HEADS))
                self.attention = fm.MultiheadFlexAttention(32, 32, HEADS, score_mod=scores.relative_bias(self.table))

            def forward(self, x: Tensor) -> Tensor:
                found: Tensor = self.attention(x, "causal")
                return found

        import copy

        for model in (Model(), copy.deepcopy(Model()), Model().to(torch.float64)):
            model(torch.randn(2, 20, 32, dtype=model.table.dtype)).square().sum().backward()
            assert model.table.grad is not None
            assert model.table.grad.abs().sum() > 0
            assert model.attention.score_mod.tensors[0] is model.table  # type: ignore[union-attr]

    def test_tables_are_parameters_of_the_layer_which_others_replace(self) -> None:
        def layer() -> fm.MultiheadFlexAttention:
            table = nn.Parameter(torch.randn(BUCKETS, HEADS))
            return fm.MultiheadFlexAttention(
                32, 32, HEADS, score_mod=scores.relative_bias(table) + scores.alibi(torch.ones(HEADS))
            )

        x, one, other = torch.randn(2, 20, 32), layer(), layer()
        wanted = one(x)
        assert "score_table" in dict(one.named_parameters())
        assert next(iter(one.to(torch.float64).to(torch.float32).state_dict())) == "score_table"  # at the same place
        called = torch.func.functional_call(other, dict(one.named_parameters()), x)
        torch.testing.assert_close(called, wanted)
        other.load_state_dict(one.state_dict(), assign=True)
        torch.testing.assert_close(other(x), wanted)
        other(x).sum().backward()
        assert other.score_table.grad is not None
        table = one.get_parameter("score_table")
        gradient = torch.func.grad(lambda own: torch.func.functional_call(one, {"score_table": own}, x).square().sum())
        wanted_gradient = torch.autograd.grad(one(x).square().sum(), table)[0]
        torch.testing.assert_close(gradient(table.detach()), wanted_gradient)

    def test_a_parametrization_of_a_table_counts(self) -> None:
        class Doubled(nn.Module):
            def forward(self, table: Tensor) -> Tensor:
                return 2 * table

        table, x = torch.randn(BUCKETS, HEADS), torch.randn(2, 20, 32)
        layer = fm.MultiheadFlexAttention(32, 32, HEADS, score_mod=scores.relative_bias(nn.Parameter(table)))
        wanted = fm.MultiheadFlexAttention(32, 32, HEADS, score_mod=scores.relative_bias(nn.Parameter(2 * table)))
        wanted.load_state_dict({**layer.state_dict(), "score_table": 2 * table})
        parametrize.register_parametrization(layer, "score_table", Doubled())
        torch.testing.assert_close(layer(x), wanted(x))

    def test_another_score_has_other_parameters(self) -> None:
        tables = [nn.Parameter(torch.randn(BUCKETS, HEADS)) for _ in range(2)]
        layer = fm.MultiheadFlexAttention(32, 32, HEADS, score_mod=scores.relative_bias(tables[0]))
        layer.score_mod = scores.relative_bias(tables[0]) + scores.relative_bias(tables[1])
        assert [name for name, _ in layer.named_parameters() if "table" in name] == ["score_table", "score_table1"]
        layer.score_mod = None
        assert not any("table" in name for name, _ in layer.named_parameters())

    def test_tensors_that_are_no_parameters_move_with_the_module(self) -> None:
        layer = fm.MultiheadFlexAttention(32, 32, HEADS, score_mod=scores.alibi(torch.ones(HEADS)) >> scores.softcap(3.0))
        layer.to("meta")
        assert [tensor.device.type for tensor in layer.score_mod.tensors] == ["meta"]  # type: ignore[union-attr]
