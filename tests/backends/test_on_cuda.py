"""Every backend of a GPU against dense attention in float64: masks of several forms, grouped queries, lengths that change."""

from __future__ import annotations

import warnings
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import flexmask as fm
from flexmask import attention, h, kv, q
from flexmask.backends import flash
from tests.support import oracle
from tests.support.gpu import needs_gpu

LENGTH, LENGTHS = 700, (700, 300, 515)
#: Two sequences of packed documents, in fractions of a length.
PARTS = torch.tensor([[0.3, 0.1, 0.6], [0.05, 0.9, 0.05]])
#: The first torch that a backend takes.
NEWER = {"flash": "2.15", "varlen": "2.15"}


def ids(length: int) -> Tensor:
    ends = (PARTS.cumsum(1) * length).int()
    return (torch.arange(length) >= ends[:, :-1, None]).sum(1).cuda()


MASKS: dict[str, Any] = {
    "no mask": lambda length: None,
    "causal": lambda length: fm.causal(),
    "documents": lambda length: fm.document(ids(length)),
    "crossed documents": lambda length: fm.document(ids(length), kv_ids=2 - ids(length)),
    "causal documents": lambda length: fm.causal() & fm.document(ids(length)),
    "window": lambda length: fm.sliding_window(size=100),
    "both sides of a window": lambda length: fm.sliding_window(left=70, right=9),
    "key padding": lambda length: fm.key_padding(lengths=[length, length // 3]),
    "causal padding": lambda length: fm.causal() & fm.key_padding(lengths=[length // 2, length - 1]),
    "sequences without a key": lambda length: fm.key_padding(lengths=[0, length // 2]),
    "prefixes": lambda length: fm.prefix_lm([length // 2, 9]),
    "sinks": lambda length: fm.masks.sink_window(4, size=50),
    "chunks": lambda length: fm.causal() & fm.masks.chunked(100),
    "a gap in each row": lambda length: fm.masks.multi_item([length // 2, 9], positions=[n % 37 for n in range(length)]),
    "examples and a test": lambda length: fm.masks.in_context(ids(length), test_start=length // 2),
    "heads": lambda length: fm.causal() & (q - kv < 64 * (h + 1)),
    "documents in padded queries": lambda length: fm.document(ids(length)) & fm.query_padding(lengths=[length // 2, 0]),
    "diagonals": lambda length: fm.causal() & ((q - kv) % 3 == 0),
    "products": lambda length: fm.causal() & (q * kv // 7 < 20_000),
}
#: Those of which each sequence is segments of queries and of keys.
OF_SEGMENTS = [
    "no mask",
    "causal",
    "documents",
    "causal documents",
    "window",
    "both sides of a window",
    "key padding",
    "sequences without a key",
    "chunks",
    "documents in padded queries",
]
#: Kernels of FlashAttention divide otherwise than Python.
CASES = [
    *product(["flash"], [name for name in MASKS if name != "diagonals"]),
    *product(["flex"], MASKS),
    *product(["varlen"], OF_SEGMENTS),
]
COMPILED = ["causal", "documents", "causal documents", "window", "causal padding", "prefixes"]


def skip_missing(backend: str) -> None:
    if torch.__version__ < NEWER.get(backend, "0"):
        pytest.skip(f"{backend} takes torch {NEWER[backend]}")
    if backend == "flash" and not flash._is_installed():
        pytest.skip("FlashAttention 4 is not installed")
    if backend == "flash":  # whose compiler warns of its own functions
        warnings.simplefilter("ignore")


def tensors(length: int, width: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    """Four heads of queries, two of keys and values."""
    query, key, value = (
        torch.randn(2, heads, length, width, device="cuda", dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2, 2)
    )
    return query, key, value


def check(found: Tensor, given: tuple[Tensor, ...], mask: Any) -> None:
    """The output and, where there are any, the gradients."""
    query, key, value = (tensor.detach().double().requires_grad_() for tensor in given)
    length = query.shape[2]
    cells = (fm.full() if mask is None else mask).dense(length, batch=2, heads=4, device="cuda")
    wanted = oracle.attention(query, key, value, cells)
    pairs = [(found, wanted)]
    if found.requires_grad:
        upstream = torch.randn_like(found)
        grads = torch.autograd.grad(found, given, upstream), torch.autograd.grad(wanted, (query, key, value), upstream.double())
        pairs += zip(*grads, strict=True)
    for one, other in pairs:
        assert (one.double() - other).norm() <= 0.01 * max(1.0, float(other.detach().norm()))


@needs_gpu
@pytest.mark.parametrize(("backend", "name"), CASES)
def test_backends(backend: Any, name: str) -> None:
    skip_missing(backend)
    mask, given = MASKS[name](LENGTH), tensors(LENGTH)
    check(attention(*given, mask, backend=backend, enable_gqa=True), given, mask)


@needs_gpu
@pytest.mark.parametrize(("backend", "name"), list(product(("flash", "flex"), COMPILED)))
def test_compiled_at_changing_lengths(backend: Any, name: str) -> None:
    skip_missing(backend)
    torch.compiler.reset()

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Any) -> Tensor:
        return attention(query, key, value, mask, backend=backend, enable_gqa=True)

    compiled = torch.compile(attend, fullgraph=True)
    for length in LENGTHS:
        mask, given = MASKS[name](length), tensors(length, 128)
        check(compiled(*given, mask), given, mask)


@needs_gpu
@pytest.mark.parametrize("backend", ["flex", "flash", "varlen"])
def test_the_logsumexp(backend: Any) -> None:
    skip_missing(backend)
    query, key, value = tensors(LENGTH)
    mask = fm.causal() & fm.document(ids(LENGTH))
    cells = mask.dense(LENGTH, batch=2, device="cuda")
    with torch.no_grad():
        out, lse = attention(query, key, value, mask, backend=backend, enable_gqa=True, return_lse=True)
    wanted = oracle.attention_scores(query, key).masked_fill(~cells, -torch.inf).logsumexp(-1)
    torch.testing.assert_close(lse.double(), wanted, rtol=1e-2, atol=1e-2)
    check(out, (query, key, value), mask)
