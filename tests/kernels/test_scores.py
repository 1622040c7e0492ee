"""Scores and dropout whose numbers change from call to call, and gradients of a part, in FlexAttention's CUDA kernels.

``torch.compile`` makes variables of numbers that change, with which not all kernels compile. Soft-capping is not among them, as
the interpreter has no hyperbolic tangent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

import flexmask as fm
from flexmask.backends import flex
from flexmask.scores import Score, alibi, relative_bias
from tests.kernels.interpreted import virtual_gpu
from tests.support.exhaustive import exhaustive

pytestmark = pytest.mark.kernels
TOKENS = 130  # from 128 on torch takes the kernel for prompts


def inputs(heads: int) -> list[Tensor]:
    return [tensor.requires_grad_() for tensor in torch.randn(3, 1, heads, TOKENS, 16)]


def check(call: Callable[..., Tensor], run: Callable[..., Tensor], heads: int, others: Sequence[Tensor] = ()) -> None:
    """Compares what ``run`` does with ``call`` and its gradients by query, key, value and others with the backend sdpa."""
    tensors = inputs(heads)
    before = len(virtual_gpu.launched)
    found, wanted = run(*tensors), call(*tensors, backend="sdpa")
    grads = [torch.autograd.grad(out.square().sum(), (*tensors, *others), materialize_grads=True) for out in (found, wanted)]
    for one, other in [(found, wanted), *zip(*grads, strict=True)]:
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert len(virtual_gpu.launched) > before


@pytest.mark.parametrize("in_graph", [True, *exhaustive([False])])
def test_scores(backend: Any, in_graph: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of other numbers of heads, other distances, and one kind in the place of another."""
    if not in_graph:  # in eager mode a kernel is compiled for the function of each score
        compiled = torch.compile(flex_attention, fullgraph=True, backend=backend)
        monkeypatch.setattr(flex, "_inference_only", lambda tensor: False)
        monkeypatch.setattr(flex, "_compiled", lambda device: compiled)
    near, far = (relative_bias(torch.randn(32, 4, requires_grad=True), max_distance=most) for most in (16, 64))
    scores: list[tuple[int, Score]] = [(2, alibi()), (4, near), (4, far), (3, alibi())]
    for heads, score in scores:
        call = partial(fm.attention, mask="causal", score_mod=score)
        run = partial(call, backend="flex")
        check(call, torch.compile(run, backend=backend, fullgraph=True) if in_graph else run, heads, score.tensors)


def test_dropout(backend: Any) -> None:
    """The hashes of rows and keys are computed in the graph, from indices that its kernels count in 32 bits."""
    for p in (0.1, 0.3):
        call = partial(fm.attention, mask="causal", dropout_p=p, dropout_seed=3)
        check(call, torch.compile(partial(call, backend="flex"), backend=backend, fullgraph=True), 2)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # of infinite values, which are not asked for
def test_logsumexp_alone(backend: Any) -> None:
    """A loss of the logsumexp, without the output."""

    def logsumexp(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        return fm.attention(query, key, value, "causal", return_lse=True, **options)[1]

    compiled = torch.compile(partial(logsumexp, backend="flex"), backend=backend, fullgraph=True)
    check(logsumexp, compiled, 2)
    query, key, value = inputs(2)
    with torch.no_grad():
        value[:, :, 7] = torch.inf
    torch.testing.assert_close(compiled(query, key, value), logsumexp(query, key, value))
