"""The registry of backends: a new backend takes a few lines, and everything that takes a backend's name knows it."""

from __future__ import annotations

import copy
import pickle
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import flexmask as fm
from flexmask import MultiheadFlexAttention, attention
from flexmask.backends import Backend, Call, backend, backend_names, choose_backend, register_backend
from flexmask.errors import ExpressionError, LoweringError, OperandError
from flexmask.testing import assert_equivalent
from flexmask.testing.equivalence import agreement, own_backends
from flexmask.testing.settings import make_setting
from tests.support.cli import run

# ---------------------------------------------------------------- a backend in a few lines


def supports_dense(call: Call) -> str | None:
    return None if isinstance(call.mask, fm.Mask) and not call.dropout_p else "dense takes a Mask, and no dropout_p"


def run_dense(call: Call) -> Tensor:
    assert isinstance(call.mask, fm.Mask)
    batch, heads, q_len, _ = call.query.shape
    visible = call.mask.dense(q_len, call.key.shape[2], batch=batch, heads=heads, q_offset=call.q_offset)
    out = F.scaled_dot_product_attention(call.query, call.key, call.value, visible | ~visible.any(-1, keepdim=True))
    return out.masked_fill(~visible.any(-1, keepdim=True), 0)


@pytest.fixture
def dense(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """The calls of a backend ``dense``, which is registered for one test."""
    calls: list[Call] = []

    def counted(call: Call) -> Tensor:
        calls.append(call)
        return run_dense(call)

    monkeypatch.setattr(backend, "_BACKENDS", dict(backend._BACKENDS))
    register_backend(Backend("dense", supports=supports_dense, run=counted))
    return calls


# ---------------------------------------------------------------- who knows it

QUERY = torch.randn(2, 2, 9, 8)
MASK = fm.causal() & fm.query_padding([9, 4])


def test_attention_runs_it(dense: list[Call]) -> None:
    found = attention(QUERY, QUERY, QUERY, MASK, backend="dense", q_offset=0)
    torch.testing.assert_close(found, attention(QUERY, QUERY, QUERY, MASK))
    (call,) = dense
    assert call.mask == MASK
    assert call.query is QUERY
    assert call.hashes() is None


def test_a_module_runs_it(dense: list[Call]) -> None:
    x = torch.randn(2, 9, 16)
    module = MultiheadFlexAttention(16, 16, 2, mask=MASK, backend="dense")
    assert module(x).shape == x.shape
    assert len(dense) == 1
    assert copy.deepcopy(module).backend == "dense"


def test_auto_takes_it_where_it_prefers_the_device(dense: list[Call]) -> None:
    def refuse(call: Call) -> str | None:
        return "first takes nothing"

    register_backend(Backend("eager", supports=supports_dense, run=run_dense, preferred_on=("cpu",)))
    register_backend(Backend("first", supports=refuse, run=run_dense, preferred_on=("cpu",)))
    chosen = choose_backend(QUERY, QUERY, QUERY, MASK)
    assert chosen == "eager"
    assert list(chosen.reasons) == ["first", "sdpa", "flash", "flex", "dense"]
    assert chosen.reasons["first"] == "first takes nothing"
    assert chosen.reasons["sdpa"] == chosen.reasons["dense"] == "eager comes first on cpu"
    assert choose_backend(QUERY, QUERY, QUERY, MASK, dropout_p=0.5) == "sdpa"
    with pytest.raises(OperandError, match=r"no argument backend, .* n=n\.$"):
        choose_backend(QUERY, QUERY, QUERY, MASK, backend="sdpa")
    attention(QUERY, QUERY, QUERY, MASK, backend=chosen)


@pytest.mark.slow  # torch 2.15 is what failed
@pytest.mark.usefixtures("dense")
def test_a_preference_by_length_in_a_graph_for_all_lengths() -> None:
    own = Backend("own", supports=lambda call: None, run=lambda call: call.query + 1, preferred_on=("cpu",), preferred_from=8)
    register_backend(own)
    torch.compiler.reset()
    compiled = torch.compile(lambda x: attention(x, x, x, "causal"), dynamic=True, fullgraph=True, backend="eager")
    for length in (5, 9, 6, 12):
        x = torch.randn(1, 1, length, 8)
        torch.testing.assert_close(compiled(x), attention(x, x, x, "causal", backend="sdpa" if length < 8 else "own"))


def test_checks_and_the_command_line_know_it(dense: list[Call]) -> None:
    assert own_backends(make_setting(MASK, 9)) == ("sdpa", "dense")
    assert_equivalent(MASK, 9, dtypes=(torch.float32, torch.float64))
    assert len(dense) == 2
    result = run("check", "causal", "--seq-len", "6", "--backend", "dense")
    assert result.exit_code == 0
    assert "dense float32 gradient of query" in result.stdout


def test_a_backend_of_half_precision_is_checked_in_it(dense: list[Call]) -> None:
    def supports_half(call: Call) -> str | None:
        return None if call.query.dtype == torch.bfloat16 else "half takes bfloat16"

    register_backend(Backend("half", supports=supports_half, run=run_dense))
    names = [finding.name for finding in agreement(make_setting(MASK, 9), backends=["half"])]
    assert "half bfloat16 gradient of query" in names
    register_backend(Backend("none", supports=lambda call: "none takes nothing", run=run_dense))
    with pytest.raises(LoweringError, match="the backend 'none' cannot be checked here: none takes nothing"):
        assert_equivalent(MASK, 9, backends=["none"])


def test_a_wrong_backend_is_found(dense: list[Call]) -> None:
    register_backend(Backend("wrong", supports=supports_dense, run=lambda call: run_dense(call) * 1.1))
    with pytest.raises(AssertionError, match="wrong float32 output"):
        assert_equivalent(MASK, 9, backends=["wrong"])


# ---------------------------------------------------------------- names and reasons


def test_a_wrong_name_lists_those_there_are(dense: list[Call]) -> None:
    listed = r"no backend has the name 'cudnn'; the registered backends are 'sdpa', 'flash', 'flex', 'varlen', 'dense'"
    with pytest.raises(ExpressionError, match=listed):
        attention(QUERY, QUERY, QUERY, MASK, backend="cudnn")
    with pytest.raises(ExpressionError, match=listed):
        MultiheadFlexAttention(16, 16, 2, backend="cudnn")
    with pytest.raises(ExpressionError, match=listed):
        assert_equivalent(MASK, 9, backends=["cudnn"])


def test_a_call_that_a_backend_does_not_support_says_why(dense: list[Call]) -> None:
    with pytest.raises(LoweringError, match="dense takes a Mask, and no dropout_p"):
        attention(QUERY, QUERY, QUERY, MASK, backend="dense", dropout_p=0.5)


@pytest.mark.parametrize("answer", [True, False])
def test_an_answer_that_is_no_reason_is_refused(dense: list[Call], answer: bool) -> None:
    register_backend(Backend("answers", supports=lambda call: cast(Any, answer), run=run_dense))
    wanted = f"supports of the backend 'answers' must return None .*or?.*reason.*returned bool {answer}"
    for attempt in (lambda: attention(QUERY, QUERY, QUERY, backend="answers"), lambda: choose_backend(QUERY, QUERY, QUERY)):
        with pytest.raises(OperandError, match=wanted):
            attempt()


def test_a_call_that_none_supports_has_all_reasons() -> None:
    block_mask = fm.causal().block_mask(9)
    with FakeTensorMode():
        query = torch.randn(1, 1, 9, 16)
        with pytest.raises(LoweringError, match=r"no backend supports this call.*sdpa: a BlockMask.*flex: .*without values"):
            attention(query, query, query, block_mask)


def test_the_reasons_of_the_choice() -> None:
    for mask in (MASK, MASK.block_mask(9)):
        reasons = choose_backend(QUERY, QUERY, QUERY, mask).reasons
        assert reasons.keys() == {"flash", "flex"}
        assert reasons["flex"] == "sdpa comes first on cpu"
    chosen = choose_backend(QUERY.double(), QUERY.double(), QUERY.double())
    assert "float64" in chosen.reasons["flex"]
    assert pickle.loads(pickle.dumps(chosen)).reasons == chosen.reasons


@pytest.mark.parametrize("name", ["auto", "sdpa"])
def test_names_are_registered_once(name: str) -> None:
    before = backend_names()
    with pytest.raises(ExpressionError, match="another name"):
        register_backend(Backend(name, supports=supports_dense, run=run_dense))
    with pytest.raises(OperandError, match=r"flexmask.backends.Backend, got str"):
        register_backend("toy")  # type: ignore[arg-type]
    assert backend_names() == before == ("sdpa", "flash", "flex", "varlen")
