"""Calls of attention that a model makes at each step: short sequences, dropout, scores by name, and a step of decoding."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.measuring import Measurement, measure
from benchmarks.rows import Row, Section
from benchmarks.workloads import Workload, causal_work, packed_work, window_work
from flexmask import KVCache, MaskCache, MultiheadFlexAttention, attention, causal, document, scores
from flexmask.scores.score import Score, ScoreLike

__all__ = ["decoding_step", "dropout", "named_scores", "short_sequences"]

HEADS, D_HEAD = 8, 64


#: A call with query, key and value.
Run: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]


def _timed(run: Run, batch: int, length: int, device: str, *, backward: bool, others: tuple[Tensor, ...] = ()) -> Measurement:
    """A call with new tensors, and with ``backward`` its gradients by all of them and by others."""
    shape = batch, HEADS, length, D_HEAD
    query, key, value = (torch.randn(shape, device=device, requires_grad=backward) for _ in range(3))
    if not backward:
        return measure(lambda _: run(query, key, value), device=device)
    return measure(lambda _: torch.autograd.grad(run(query, key, value).sum(), (query, key, value, *others)), device=device)


# ---------------------------------------------------------------- short sequences


def short_sequences(device: str, *, quick: bool) -> Section:
    """Sequences at which a call of dense SDPA costs little."""
    rows = []
    for batch, length in ((1, 64), (1, 128), (1, 256), (1, 512), (32, 64)):
        for backward in (False, True):
            name = f"packed, batch {batch}, {'forward and backward' if backward else 'forward'}"
            rows.append(
                Row(name, length, _short(packed_work(length, device, batch, mean=max(16, length // 4)), device, backward))
            )
    rows += [Row("documents of 33, forward", length, _of_33(length, device)) for length in ([1024] if quick else [1024, 4096])]
    text = (
        "8 heads of 64, float32. The first column lowers the mask in each call, the second in the first only, as the layers of a "
        "model in a `MaskCache` do. Dense SDPA gets a mask that is made before."
    )
    return Section("Short sequences", text, "flexmask sdpa", rows)


def _short(work: Workload, device: str, backward: bool) -> dict[str, Callable[[], Measurement]]:
    mask, batch, length = work.mask(), work.batch or 1, work.length
    cells, cache = mask.dense(length, batch=batch, device=device), MaskCache()

    def cached(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with cache:
            return attention(query, key, value, mask, backend="sdpa")

    runs: dict[str, Run] = {
        "flexmask sdpa": lambda q, k, v: attention(q, k, v, mask, backend="sdpa"),
        "in a MaskCache": cached,
        "dense SDPA": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=cells),
    }
    return {name: partial(_timed, run, batch, length, device, backward=backward) for name, run in runs.items()}


def _of_33(length: int, device: str) -> dict[str, Callable[[], Measurement]]:
    sizes = [33] * (length // 33) + [length % 33] * (length % 33 > 0)
    mask = causal() & document(lengths=sizes)
    cells = mask.dense(length, device=device)

    def loop(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        parts = zip(*(tensor.split(sizes, 2) for tensor in (query, key, value)), strict=True)
        return torch.cat([F.scaled_dot_product_attention(q, k, v, is_causal=True) for q, k, v in parts], 2)

    runs: dict[str, Run] = {
        "flexmask sdpa": lambda q, k, v: attention(q, k, v, mask, backend="sdpa"),
        "dense SDPA": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=cells),
        "loop over the documents": loop,
    }
    return {name: partial(_timed, run, 1, length, device, backward=False) for name, run in runs.items()}


# ---------------------------------------------------------------- scores


def named_scores(device: str, *, quick: bool) -> Section:
    """Attention with what a model does to its scores, next to the same attention without it."""
    rows = [
        Row(f"{work.name}, batch {batch}, {'forward and backward' if backward else 'forward'}", length, scored)
        for length in ([1024] if quick else [1024, 2048])
        for work in (window_work(length), causal_work(length))
        for batch in (1, 4)
        for backward in (False, True)
        for scored in [_scored(work, batch, device, backward)]
    ]
    text = (
        "8 heads of 64, float32. T5's table has gradients in the backward pass. The function is ALiBi, as a `score_mod` by hand."
    )
    return Section("Scores by name", text, "no score", rows)


def _scored(work: Workload, batch: int, device: str, backward: bool) -> dict[str, Callable[[], Measurement]]:
    mask, slopes = work.mask(), 2.0 ** -torch.arange(1, HEADS + 1, device=device)
    table = torch.randn(32, HEADS, device=device, requires_grad=backward)
    given: dict[str, ScoreLike | None] = {
        "no score": None,
        "alibi()": "alibi()",
        "relative_bias(table)": scores.relative_bias(table),
        "softcap(30.0)": "softcap(30.0)",
        "a function": lambda score, b, h, q, kv: score - slopes[h] * (q - kv),
    }

    def timed(score: ScoreLike | None) -> Measurement:
        others = (table,) if isinstance(score, Score) and backward else ()
        run = partial(attention, mask=mask, score_mod=score, backend="sdpa")
        return _timed(cast(Run, run), batch, work.length, device, backward=backward, others=others)

    return {name: partial(timed, score) for name, score in given.items()}


# ---------------------------------------------------------------- dropout


def dropout(device: str, *, quick: bool) -> Section:
    """Attention with dropout of its weights."""
    length = 1024 if quick else 4096
    rows = [
        Row(f"{work.name}, {'forward and backward' if backward else 'forward'}", length, _dropped(work, device, backward))
        for work in (window_work(length), causal_work(length))
        for backward in (False, True)
    ]
    text = "8 heads of 64, float32, batch 1, dropout 0.1. SDPA drops other weights in each call, flexmask those of the seed."
    return Section("Dropout", text, "flexmask sdpa", rows)


def _dropped(work: Workload, device: str, backward: bool) -> dict[str, Callable[[], Measurement]]:
    mask, cells = work.mask(), work.mask().dense(work.length, device=device)
    runs: dict[str, Run] = {
        "flexmask sdpa": lambda q, k, v: attention(q, k, v, mask, backend="sdpa", dropout_p=0.1),
        "without dropout": lambda q, k, v: attention(q, k, v, mask, backend="sdpa"),
        "SDPA with dropout_p": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=cells, dropout_p=0.1),
    }
    return {name: partial(_timed, run, 1, work.length, device, backward=backward) for name, run in runs.items()}


# ---------------------------------------------------------------- a decoding step


def decoding_step(device: str) -> Section:
    """One token through a module with a KVCache."""
    width, before = HEADS * D_HEAD, 1024
    layer = MultiheadFlexAttention(width, width, HEADS, bias=True, device=device).eval()
    peer = nn.MultiheadAttention(width, width // D_HEAD, batch_first=True, device=device).eval()
    token, tokens = torch.randn(1, 1, width, device=device), torch.randn(1, before, width, device=device)

    def ours(mask: str) -> Measurement:
        cache = KVCache(capacity=2 * before)
        with torch.no_grad():
            layer(tokens, mask, cache=cache)
            return measure(lambda _: layer(token, mask, cache=cache), lambda: cache.truncate(before), device=device)

    def by_hand() -> Measurement:
        """The projections and the kernel, with the new key and value written into tensors."""
        keys, values = torch.randn(2, 1, HEADS, 2 * before, D_HEAD, device=device)

        def step(_: None) -> Tensor:
            query, key, value = (
                part.unflatten(-1, (HEADS, D_HEAD)).transpose(1, 2) for part in layer.in_proj(token).chunk(3, -1)
            )
            keys[:, :, before : before + 1], values[:, :, before : before + 1] = key, value
            held = slice(before + 1)
            out = F.scaled_dot_product_attention(query, keys[:, :, held], values[:, :, held])
            return cast(Tensor, layer.out_proj(out.transpose(1, 2).flatten(2)))

        with torch.no_grad():
            return measure(step, device=device)

    def torchs() -> Measurement:
        with torch.no_grad():
            return measure(lambda _: peer(token, tokens, tokens, need_weights=False), device=device)

    rows = [
        Row(mask, before, {"flexmask": partial(ours, mask), "by hand": by_hand, "nn.MultiheadAttention": torchs})
        for mask in ("causal", "sliding_window(size=256)")
    ]
    text = (
        "One token behind 1,024 through `MultiheadFlexAttention(512, 512, 8)` with a `KVCache`, in eager mode; the same by hand, "
        "without a mask; and `nn.MultiheadAttention`, which has no cache and projects all keys again."
    )
    return Section("A decoding step", text, "flexmask", rows)
