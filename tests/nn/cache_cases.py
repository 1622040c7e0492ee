"""Masks for decoding with a KVCache, with their meaning, and what dense masked softmax gives for them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from flexmask import KVCache, MultiheadFlexAttention
from tests.support import oracle
from tests.support.rope import turn

S, WINDOW = 23, 5
IDS = [[0] * 7 + [1] * 6 + [2] * 10, [3] * 4 + [4] * 16 + [-1] * 3]
STARTS = [3, 0]
#: How the sequence comes in: at once, in chunks, and token by token.
CHUNKS = {"prefill, then one by one": [9] + [1] * 14, "chunks": [4, 7, 1, 2, 9], "one by one": [1] * S, "at once": [S]}


@dataclass(frozen=True)
class Case:
    """A mask with the data of the whole sequence, its meaning in plain Python, and how the module and its cache are made."""

    mask: str
    allowed: oracle.Predicate
    data: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    window: int | None = None

    def module(self) -> MultiheadFlexAttention:
        torch.manual_seed(0)
        return MultiheadFlexAttention(6, 8, 4, mask=self.mask, **self.options).double()

    def cache(self) -> KVCache:
        return KVCache(window=self.window) if self.window else KVCache(S)


def after_start(b: int, h: int, q: int, kv: int, q_len: int, kv_len: int) -> bool:
    return STARTS[b] <= kv <= q


def third_diagonals(b: int, h: int, q: int, kv: int, q_len: int, kv_len: int) -> bool:
    return kv <= q and (q - kv) % 3 == 0


WINDOWED = oracle.sliding_window(size=WINDOW)
DOCUMENTS = oracle.both(oracle.causal(), oracle.document(IDS))
LENGTHS = torch.tensor([S, 17])
KEEP = torch.rand(2, S, generator=torch.Generator().manual_seed(3)) < 0.7
PACKED = [[7, 6, 10], [4, 16, 0]]
WHOLE = [[7, 6, 10], [4, 16, 3]]
CHUNKED = oracle.both(oracle.causal(), lambda b, h, q, kv, q_len, kv_len: q // WINDOW == kv // WINDOW)

CASES: dict[str, Case] = {
    "causal": Case("causal", oracle.causal()),
    "window": Case(f"sliding_window(size={WINDOW})", WINDOWED),
    "window, its keys only": Case(f"sliding_window(size={WINDOW})", WINDOWED, window=WINDOW),
    "window of 1": Case("sliding_window(size=1)", oracle.sliding_window(size=1), window=1),
    "documents": Case("causal & document(ids)", DOCUMENTS, {"ids": torch.tensor(IDS)}),
    "documents, literal": Case(f"causal & document(ids={IDS})", DOCUMENTS),
    "documents by lengths": Case(f"causal & document(lengths={PACKED}, padding=True)", DOCUMENTS),
    "documents by lengths of all tokens": Case(
        "causal & document(lengths=n)",
        oracle.both(oracle.causal(), oracle.document([oracle.ids_of_lengths(row, S) for row in WHOLE])),
        {"n": torch.tensor(WHOLE)},
    ),
    "documents shorter than the window, its keys only": Case(
        "sliding_window(size=16) & document(ids)", DOCUMENTS, {"ids": torch.tensor(IDS)}, {}, 16
    ),
    "documents restart": Case("per_document(causal, ids)", oracle.per_document(oracle.causal(), IDS), {"ids": torch.tensor(IDS)}),
    "documents within documents": Case(
        "causal & per_document(document(lengths=[4, 19]), ids)",
        oracle.both(oracle.causal(), oracle.per_document(oracle.document(oracle.ids_of_lengths([4, 19], S)), IDS)),
        {"ids": torch.tensor(IDS)},
    ),
    "documents in a window, its keys only": Case(
        f"sliding_window(size={WINDOW}) & document(ids)", oracle.both(WINDOWED, DOCUMENTS), {"ids": torch.tensor(IDS)}, {}, WINDOW
    ),
    "documents by lengths in a window, its keys only": Case(
        f"sliding_window(size={WINDOW}) & document(lengths={PACKED}, padding=True)",
        oracle.both(WINDOWED, DOCUMENTS),
        window=WINDOW,
    ),
    "lengths of the whole": Case(
        "causal & key_padding(lengths)", oracle.both(oracle.causal(), oracle.key_padding(LENGTHS.tolist())), {"lengths": LENGTHS}
    ),
    "keep, its keys only": Case(
        f"sliding_window(size={WINDOW}) & key_padding(keep=keep)",
        oracle.both(WINDOWED, oracle.key_keep(KEEP.tolist())),
        {"keep": KEEP},
        window=WINDOW,
    ),
    "padding on the left": Case("causal & (kv >= start[b])", after_start, {"start": torch.tensor(STARTS)}),
    "padding on the left, by name": Case("causal & key_padding(start=pad)", after_start, {"pad": torch.tensor(STARTS)}),
    "padding on the left, literal": Case(f"causal & key_padding(start={STARTS})", after_start),
    "padding on the left in a window, its keys only": Case(
        f"sliding_window(size={WINDOW}) & key_padding(start={STARTS})", oracle.both(WINDOWED, after_start), window=WINDOW
    ),
    "chunks, their keys only": Case(f"causal & chunked({WINDOW})", CHUNKED, window=WINDOW),
    "chunks from the second token on, their keys only": Case(
        f"sliding_window(size={WINDOW}) & chunked({WINDOW}, start=1)",
        oracle.both(oracle.causal(), oracle.chunked(WINDOW, 1)),
        window=WINDOW,
    ),
    "a window for each head, its keys only": Case(
        f"per_head([sliding_window(size={WINDOW}), sliding_window(size=2), sliding_window(size=1), empty])",
        oracle.per_head([WINDOWED, oracle.sliding_window(size=2), oracle.sliding_window(size=1), oracle.empty()]),
        window=WINDOW,
    ),
    "diagonals": Case("causal & ((q - kv) % 3 == 0)", third_diagonals),
    "diagonals in a window, its keys only": Case(
        f"sliding_window(size={WINDOW}) & ((q - kv) % 3 == 0)", oracle.both(WINDOWED, third_diagonals), window=WINDOW
    ),
    "grouped heads": Case("causal", oracle.causal(), options={"n_kv_heads": 2}),
    "one key head, rope, its keys only": Case(
        f"sliding_window(size={WINDOW})", WINDOWED, options={"n_kv_heads": 1, "rope": turn}, window=WINDOW
    ),
    "rope": Case("causal", oracle.causal(), options={"rope": turn}),
    "score_mod": Case(
        "causal",
        oracle.causal(),
        options={"score_mod": lambda score, b, h, q_idx, kv_idx: score - 0.1 * (h + 1) * (q_idx - kv_idx)},
    ),
    "score_mod, its keys only": Case(
        f"sliding_window(size={WINDOW})",
        WINDOWED,
        options={"score_mod": lambda score, b, h, q_idx, kv_idx: score * (1 + 0.2 * b + 0.01 * q_idx * kv_idx)},
        window=WINDOW,
    ),
}


def inputs(length: int = S, batch: int = 2) -> Tensor:
    return torch.randn(batch, length, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def check_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-11)


def dense_forward(case: Case, module: MultiheadFlexAttention, x: Tensor) -> Tensor:
    """Masked softmax over the whole sequence in float64, with the weights of the module."""
    query, key, value = (
        part.unflatten(-1, (-1, module.d_head)).transpose(1, 2)
        for part in module.in_proj(x).split([8, 2 * module.n_kv_heads, 2 * module.n_kv_heads], -1)
    )
    places = torch.arange(x.shape[1])
    if module.rope is not None:
        query, key = turn(query, places), turn(key, places)
    visible = torch.tensor(oracle.table_of(case.allowed, x.shape[1], x.shape[1], batch=2, heads=4, q_offset=0))
    heads = oracle.attention(query, key, value, visible, score_mod=cast(Any, module.score_mod))
    out: Tensor = module.out_proj(heads.transpose(1, 2).flatten(2))
    return out


def decode(module: MultiheadFlexAttention, x: Tensor, chunks: Iterable[int], cache: KVCache, **data: Any) -> Tensor:
    parts = x.split(list(chunks), 1)
    return torch.cat([module(part, cache=cache, **data) for part in parts], 1)
