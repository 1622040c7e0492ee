"""The backend ``varlen``, with kernels on the CPU for torch's operators, which have them on CUDA alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen as torch_varlen

import flexmask as fm
from flexmask.backends import choose_backend, varlen
from flexmask.errors import LoweringError
from flexmask.lowering import varlen as lowering
from tests.support import oracle

if torch.__version__ < "2.13":
    pytest.skip("varlen_attn has other arguments", allow_module_level=True)

calls: list[tuple[int, int, list[int]]] = []


def scores_of(query: Tensor, key: Tensor, scale: float | None, window: list[int]) -> Tensor:
    """``[H, n, m]``, -inf outside of the window, whose diagonal ends at the last query and key, as FlashAttention defines it."""
    n, m = query.shape[1], key.shape[1]
    ahead = torch.arange(m) - (torch.arange(n)[:, None] + m - n)
    hidden = (ahead > window[1] if window[1] >= 0 else ahead > m + n) | (ahead < -window[0] if window[0] >= 0 else ahead < -m - n)
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    return scores.masked_fill(hidden, -math.inf)


def segments(cu_q: Tensor, cu_k: Tensor, *tensors: Tensor) -> Iterator[tuple[slice, slice]]:
    starts, keys = cu_q.tolist(), cu_k.tolist()
    for first, stop, first_key, end in zip(starts, starts[1:], keys, keys[1:], strict=False):
        yield slice(first, stop), slice(first_key, end)


def forward(
    query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int,
    is_causal: bool = False, scale: float | None = None, window_size: Any = None, *_: Any, **__: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    calls.append((max_q, max_k, list(window_size)))
    out, lse = query.new_empty(*query.shape[:2], value.shape[2]), query.new_empty(query.shape[1], query.shape[0])
    groups = query.shape[1] // key.shape[1]
    for rows, columns in segments(cu_q, cu_k):
        own_key, own_value = (tensor[columns].transpose(0, 1).repeat_interleave(groups, 0) for tensor in (key, value))
        scores = scores_of(query[rows].transpose(0, 1), own_key, scale, window_size)
        out[rows] = (scores.softmax(-1) @ own_value).transpose(0, 1)
        lse[:, rows] = scores.logsumexp(-1)
    return out, lse.float(), torch.zeros(2, dtype=torch.uint64)


def backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, cu_q: Tensor, cu_k: Tensor,
    max_q: int, max_k: int, is_causal: bool, state: Tensor, scale: float | None = None, window_size: Any = None, *_: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    grads = [torch.zeros_like(tensor) for tensor in (query, key, value)]
    groups = query.shape[1] // key.shape[1]
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    for rows, columns in segments(cu_q, cu_k):
        own_query, own_grad = (tensor[rows].transpose(0, 1) for tensor in (query, grad))
        own_key, own_value = (tensor[columns].transpose(0, 1).repeat_interleave(groups, 0) for tensor in (key, value))
        weights = scores_of(own_query, own_key, scale, window_size).softmax(-1)
        of_weights = own_grad @ own_value.mT
        of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True)) * factor
        grads[0][rows] = (of_scores @ own_key).transpose(0, 1)
        for at, found in ((1, of_scores.mT @ own_query), (2, weights.mT @ own_grad)):
            grads[at][columns] = found.unflatten(0, (-1, groups)).sum(1).transpose(0, 1)
    return grads[0], grads[1], grads[2]


for operator, kernel in ((torch_varlen._varlen_attn, forward), (torch_varlen._varlen_attn_backward, backward)):
    operator.register_kernel("cpu")(kernel)


@pytest.fixture
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"DEVICES": {"cpu"}, "DTYPES": {torch.float32}, "OLDEST": "2.13"}.items():
        monkeypatch.setattr(varlen, name, value)
    calls.clear()


on_the_cpu = pytest.mark.usefixtures("_on_the_cpu")
LENGTHS = [[3, 1, 5], [6, 0, 3]]
DOCUMENTS = fm.causal() & fm.document(lengths=LENGTHS)
#: The mask, the lengths, the most queries in a segment and the window, and further arguments.
CASES: dict[str, tuple[fm.Mask | None, tuple[int, int], tuple[int, list[int]], dict[str, Any]]] = {
    "no mask": (None, (5, 7), (5, [-1, -1]), {}),
    "documents": (DOCUMENTS, (9, 9), (6, [-1, 0]), {}),
    "a window in documents": (
        fm.sliding_window(left=2, right=1) & fm.document(lengths=LENGTHS),
        (9, 9),
        (6, [2, 1]),
        {"scale": 0.3},
    ),
    "padding": (fm.causal() & fm.query_padding([4, 9]) & fm.key_padding([4, 9]), (9, 9), (9, [-1, 0]), {}),
    "padding of keys, grouped heads": (fm.key_padding([4, 9]), (9, 9), (9, [-1, -1]), {"enable_gqa": True}),
    "a prompt's chunk": (fm.causal(), (3, 9), (3, [-1, 0]), {"q_offset": 4}),
}


@on_the_cpu
@pytest.mark.parametrize("name", CASES)
def test_attention(name: str) -> None:
    mask, (q_len, kv_len), expected, options = CASES[name]
    kv_heads = 1 if "enable_gqa" in options else 2
    shapes = (2, 2, q_len, 8), (2, kv_heads, kv_len, 8), (2, kv_heads, kv_len, 6)
    query, key, value = tensors = [torch.randn(shape, requires_grad=True) for shape in shapes]
    found: Any = fm.attention(query, key, value, mask, backend="varlen", **options)
    assert [(most, window) for most, _, window in calls] == [expected]
    visible = (fm.full() if mask is None else mask).dense(q_len, kv_len, q_offset=options.get("q_offset", 0)).expand(2, 2, -1, -1)
    scores = oracle.attention_scores(query, key, options.get("scale"))
    wanted = oracle.softmax(scores, visible) @ value.double().repeat_interleave(2 // kv_heads, 1)
    grads = [torch.autograd.grad(loss, tensors) for loss in (found.square().sum(), wanted.square().sum())]
    for one, other in [(found, wanted), *zip(*grads, strict=True)]:
        torch.testing.assert_close(one.double(), other.double(), rtol=1e-5, atol=1e-5)
    assert not found[~visible.any(-1)].any()


@on_the_cpu
def test_logsumexp() -> None:
    mask = fm.causal() & fm.query_padding([4, 9]) & fm.key_padding([4, 9])
    x = torch.randn(2, 2, 9, 8)
    found, lse = fm.attention(x, x, x, mask, backend="varlen", return_lse=True)
    wanted, wanted_lse = fm.attention(x, x, x, mask, backend="sdpa", return_lse=True)
    torch.testing.assert_close((found, lse), (wanted, wanted_lse))
    with pytest.raises(LoweringError, match="no gradients"):
        fm.attention(x.requires_grad_(), x, x, mask, backend="varlen", return_lse=True)


@on_the_cpu
def test_a_cache_makes_the_arguments_once() -> None:
    x = torch.randn(2, 2, 9, 8)
    with fm.MaskCache() as cache:
        for _ in range(2):
            fm.attention(x, x, x, DOCUMENTS, backend="varlen")
    assert (cache.builds, cache.hits) == (1, 1)


@pytest.mark.slow
def test_compiled_code_takes_torch_s_function() -> None:
    query, key, value = tensors = [torch.randn(1, 2, 9, 8, requires_grad=True) for _ in range(3)]
    mask = fm.causal() & fm.document(lengths=LENGTHS[0])
    segments = mask.varlen(9)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def attend(*tensors: Tensor) -> Any:
        rows: list[Any] = [*(tensor[0].transpose(0, 1) for tensor in tensors), *segments[:4]]
        return torch_varlen.varlen_attn(*rows, window_size=segments.window_size)

    found, wanted = attend(*tensors).transpose(0, 1)[None], fm.attention(query, key, value, mask, backend="sdpa")
    grads = [torch.autograd.grad(loss, tensors) for loss in (found.square().sum(), wanted.square().sum())]
    for one, other in [(found, wanted), *zip(*grads, strict=True)]:
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


QUERY = torch.randn(1, 2, 4, 8)


@on_the_cpu
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"query": QUERY.double()}, "float16 and bfloat16, got torch.float64"),
        ({"mask": fm.causal().block_mask(4)}, "takes a Mask, got a "),
        ({"mask": fm.prefix_lm(2)}, "does not compute"),
        ({"dropout_p": 0.1}, "no dropout_p"),
        ({"score_mod": lambda score, *_: score}, "no score_mod"),
        ({"kernel_options": {"BLOCK_M": 64}}, "no kernel_options"),
        ({"scale": -1.0}, "scale above 0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)  # fmt: skip
def test_calls_that_it_refuses(changed: dict[str, Any], message: str) -> None:
    query = changed.get("query", QUERY)
    with pytest.raises(LoweringError, match=message):
        fm.attention(**{"query": query, "key": query, "value": query, "mask": fm.causal(), "backend": "varlen", **changed})


@on_the_cpu
def test_compiled_code_is_told_what_to_call() -> None:
    call = torch.compile(lambda x: fm.attention(x, x, x, "causal", backend="varlen"), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=r"arguments of mask.varlen\(\), made outside"):
        call(QUERY)


def test_by_its_name_alone() -> None:
    with pytest.raises(LoweringError, match=r"takes tensors on CUDA|takes torch 2\.15"):
        fm.attention(QUERY, QUERY, QUERY, fm.causal(), backend="varlen")
    assert "varlen" not in choose_backend(QUERY, QUERY, QUERY, fm.causal()).reasons
    assert lowering.VarlenArguments._fields[:4] == ("cu_seq_q", "cu_seq_k", "max_q", "max_k")
