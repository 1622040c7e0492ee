"""What a KVCache refuses."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import flexmask as fm
from flexmask import KVCache, MultiheadFlexAttention
from flexmask.errors import ExpressionError, LoweringError, OperandError
from tests.nn.cache_cases import (
    inputs,
)


def filled(number: int, cache: KVCache) -> KVCache:
    mask = f"sliding_window(size={cache.window})" if cache.window else "causal"
    MultiheadFlexAttention(6, 8, 4).double()(inputs(number), mask, cache=cache)
    return copy.deepcopy(cache)  # with which another layer may go on


def call(cache: Any, x: Tensor | None = None, **options: Any) -> Callable[[], object]:
    module = MultiheadFlexAttention(6, 8, 4).double()
    return lambda: module(inputs(3) if x is None else x, cache=cache, **options)


def grown_to(mask: str | None, chunks: list[int], cache: KVCache, **data: Any) -> Callable[[], object]:
    """Gives the cache all chunks; the last call is the one that raises."""
    module = MultiheadFlexAttention(6, 8, 4).double()
    *before, last = inputs(sum(chunks)).split(chunks, 1)
    for part in before:
        module(part, mask, cache=cache, **data)
    return lambda: module(last, mask, cache=cache, **data)


REFUSED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "float": (lambda: KVCache(2.0), OperandError, r"capacity.*2\.0"),  # type: ignore[arg-type]
    "nothing": (lambda: KVCache(0), ExpressionError, "capacity.*at least 1.*0"),
    "no window": (lambda: KVCache(window=0), ExpressionError, "window.*at least 1.*0"),
    "no cache": (call({}), OperandError, "KVCache.*dict"),
    "no capacity": (call(KVCache()), LoweringError, r"KVCache\(capacity\)"),
    "overflow": (call(filled(6, KVCache(8))), LoweringError, "capacity=8.*6 are taken.*3 more.*window=.*reset"),
    "another batch": (call(filled(3, KVCache(8)), inputs(1, batch=3)), LoweringError, "2 sequences.*reset"),
    "context where tokens are": (call(filled(3, KVCache(8)), context=inputs(3)), LoweringError, r"of its own, KVCache\(\).*=8"),
    "truncate the empty": (lambda: KVCache(8).truncate(0), LoweringError, "empty"),
    "reorder the empty": (lambda: KVCache(8).reorder(torch.tensor([0])), LoweringError, "empty"),
    "reorder by numbers": (lambda: filled(3, KVCache(8)).reorder(torch.ones(2)), OperandError, r"integer tensor \[B\].*float32"),
    "reorder by a table": (lambda: filled(3, KVCache(8)).reorder(torch.zeros(1, 2).long()), OperandError, "integer tensor"),
    "reorder from below": (lambda: filled(3, KVCache(8)).reorder(torch.tensor([0, -1])), LoweringError, r"between 0 and 1.*-1"),
    "reorder from behind": (lambda: filled(3, KVCache(8)).reorder(torch.tensor([2, 0])), LoweringError, r"between 0 and 1.*\[2"),
    "truncate to more": (lambda: filled(3, KVCache(8)).truncate([4, 1]), LoweringError, r"\[3, 3\].*\[4, 1\]"),
    "truncate three": (lambda: filled(3, KVCache(8)).truncate([1, 1, 1]), LoweringError, r"int\[2\].*\[3\]"),
    "accept in the empty": (lambda: KVCache(8).accept([0], prefix=0), LoweringError, "empty"),
    "accept a node that is not there": (
        lambda: filled(5, KVCache(8)).accept([0, 2], prefix=3),
        LoweringError,
        r"path \[0, 2\] after prefix=3.*5 tokens",
    ),
    "accept in another order": (lambda: filled(5, KVCache(8)).accept([1, 0], prefix=3), LoweringError, r"increasing.*\[1, 0\]"),
    "accept a node twice": (lambda: filled(5, KVCache(8)).accept([0, 0], prefix=3), LoweringError, r"increasing.*\[0, 0\]"),
    "accept after a gap": (lambda: filled(5, KVCache(8)).accept([-1, 1], prefix=3), LoweringError, r"then -1.*\[-1, 1\]"),
    "accept before the start": (lambda: filled(5, KVCache(8)).accept([0], prefix=-1), LoweringError, "prefix=-1"),
    "accept in three": (lambda: filled(5, KVCache(8)).accept([[0], [0], [0]], prefix=3), LoweringError, r"int\[2, n\]"),
    "accept behind three": (lambda: filled(5, KVCache(8)).accept([0], prefix=[3, 3, 3]), LoweringError, r"int\[2\].*\[3\]"),
    "accept a number": (lambda: filled(5, KVCache(8)).accept(0, prefix=3), LoweringError, r"int\[n\]"),  # type: ignore[arg-type]
    "accept by truth": (lambda: filled(5, KVCache(8)).accept([True], prefix=3), OperandError, "path must be.*integers"),
    "accept half": (lambda: filled(5, KVCache(8)).accept([0], prefix=2.5), OperandError, r"prefix must be.*2\.5"),  # type: ignore[arg-type]
    "accept where the window is gone": (
        lambda: filled(3, filled(9, KVCache(window=4))).accept([1], prefix=7),
        LoweringError,
        r"window of 4",
    ),
    "window gone": (
        lambda: filled(3, filled(9, KVCache(window=4))).truncate(7),
        LoweringError,
        r"window of 4.*\[7, 7\].*\[6, 6\]",
    ),
    "unbound": (call(KVCache(8), mask="key_padding(n)"), ExpressionError, "n=..."),
    "padding on the left that moves": (
        call(KVCache(8), mask="causal & key_padding(lengths=[2, 3], side='left')"),
        LoweringError,
        r"key_padding\(lengths=\[2, 3\], side='left'\) depends on kv_len.*of a cache.*key_padding\(start=\.\.\.\)",
    ),
    "queries padded on the left": (
        call(KVCache(8), mask="query_padding(lengths=[2, 3], side='left')"),
        LoweringError,
        "depends on q_len.*start=",
    ),
    "accept paths of uneven lengths": (
        lambda: filled(5, KVCache(8)).accept([[0, 1], [0]], prefix=3),
        ExpressionError,
        "^accept: path has lists of uneven lengths.*shorter paths with -1",
    ),
    "accept floats": (
        lambda: filled(5, KVCache(8)).accept([0.5], prefix=3),  # type: ignore[arg-type]
        OperandError,
        "^accept: path must be a list or tensor of integers, got list",
    ),
    "a tree at the start of the sequence": (
        call(filled(3, KVCache(8)), inputs(2), mask="tree(parents=[-1, 0], prefix=3)"),
        LoweringError,
        r"tree\(.*2 values along q.*row 0 of a mask is the first token of the sequence.*shift\(mask, q=cache.length\)",
    ),
    "documents of the call": (
        grown_to("causal & document(ids)", [2, 2], KVCache(8), ids=torch.zeros(2, 2, dtype=torch.int64)),
        LoweringError,
        r"2 values along q.*position 4: give values for all tokens",
    ),
    "lower_right": (call(KVCache(8), mask="causal('lower_right')"), LoweringError, r"kv_len and q_len.*causal\(\)"),
    "a comparison with kv_len": (
        call(KVCache(8), mask="causal & (kv > kv_len - 3)"),
        LoweringError,
        "kv > kv_len - 3 depends",
    ),
    "lower_right over a context": (
        call(KVCache(), mask="causal('lower_right')", context=inputs(5)),
        LoweringError,
        r"causal\(align='lower_right'\) depends on q_len",
    ),
    "causal in a window": (
        call(KVCache(window=3), inputs(1), mask="causal"),
        LoweringError,
        r"^the expression of causal has no limit on .*: give KVCache\(capacity\) .*sliding_window\(size=3\)",
    ),
    "no mask": (
        call(KVCache(window=3), inputs(2)),
        LoweringError,
        r"a call without a mask lets the query at position 0 attend to the key at position 2, .* give the mask causal\(\)",
    ),
    "sinks in a window": (
        call(KVCache(window=8), inputs(1), mask="sink_window(1, size=3)"),
        LoweringError,
        r"the expression of sink_window\(sinks=1, size=3\) has no limit on how far back queries attend \(values in tensors are "
        r"not read\), and KVCache\(window=8\) holds the last 8 keys: give KVCache\(capacity\) .* sliding_window\(size=8\)",
    ),
    "sinks of one head in a window": (
        call(KVCache(window=8), inputs(1), mask="causal & per_head([empty, empty, empty, (kv == 2) | (kv == q)])"),
        LoweringError,
        "per_head.* has no limit on how far back",
    ),
    "another mask in a later step": (
        lambda: call(filled(4, KVCache(window=3)), inputs(1), mask="causal")(),
        LoweringError,
        "causal has no limit on how far back queries attend",
    ),
    "a longer window": (
        call(KVCache(window=4), inputs(1), mask="sliding_window(size=5)"),
        LoweringError,
        r"keys 4 positions back, and KVCache\(window=4\) holds the last 4 keys: give window=5, KVCache\(capacity\)",
    ),
    "documents without a window": (
        lambda: call(KVCache(window=3), inputs(2), mask=fm.causal() & fm.document(torch.tensor([0, 1])))(),
        LoweringError,
        r"no limit on how far back.*mask & sliding_window\(size=3\)",
    ),
    "diagonals beyond a window": (
        call(KVCache(window=4), inputs(1), mask="causal & ((q - kv) % 4 == 0)"),
        LoweringError,
        "no limit on how far back",
    ),
    "a plan for another length": (
        lambda: call(filled(4, KVCache(10)), inputs(1), mask=fm.plan("causal", 1, 8)(q_offset=4))(),
        LoweringError,
        r"LoweredMask is for kv_len=8, but the call attends to 5 keys.*5, or once for its capacity: flexmask.plan\(mask, 1, 10\)",
    ),
    "a BlockMask for another length": (
        lambda: call(filled(4, KVCache(window=4)), inputs(1), mask=fm.causal().block_mask(1, 8, q_offset=4))(),
        LoweringError,
        r"BlockMask is for kv_len=8, but the call attends to 4 keys, those in the cache after it. Make the mask for kv_len=4$",
    ),
    "documents that end": (
        grown_to("causal & document(lengths=[[2, 3], [3, 1]])", [3, 1, 1], KVCache(8)),
        LoweringError,
        "lengths of sequence 1 cover 4 of 5 tokens.*padding=True",
    ),
    "right padding that was not cut": (
        grown_to("causal & key_padding(lengths=[4, 2])", [4, 1], KVCache(8)),
        LoweringError,
        r"every token of this call padding.*position 4.*truncate\(lengths\).*key_padding\(start=",
    ),
    "right padding under another name": (
        grown_to("causal & cross_length([4, 2])", [4, 1], KVCache(8)),
        LoweringError,
        r"cross_length\(.* makes every token of this call padding.*position 4",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_errors(name: str) -> None:
    attempt, kind, message = REFUSED[name]
    with pytest.raises(kind, match=re.compile(message, re.DOTALL)):
        attempt()
