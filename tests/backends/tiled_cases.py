"""Masks and inputs for `block_sdpa`, and dense masked attention in float64."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from flexmask.backends.problem import Problem
from flexmask.backends.tile import Cells
from flexmask.backends.tiled_sdpa import attend
from tests.support import oracle

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}

DEFAULT_SIZES = {"batch": 2, "heads": 4, "key_heads": 2, "q_len": 50, "kv_len": 50, "dim": 8, "value_dim": 8}

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def intervals(mask: Tensor) -> Tensor:
    """Dense mask [B', H', Q', KV] -> bounds [B', H', Q', K, 2]."""
    kv_len = mask.size(3)
    hidden_around = F.pad(mask, (1, 1))
    is_edge = hidden_around[..., 1:] != hidden_around[..., :-1]
    slots = max([1, *(is_edge.sum(-1) // 2).flatten().tolist()])
    edges = torch.where(is_edge, torch.arange(kv_len + 1), kv_len).sort(-1).values
    found: Tensor = F.pad(edges, (0, 1), value=kv_len)[..., : 2 * slots].int().unflatten(-1, (slots, 2))
    return found


def block_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    *,
    cells: Cells = None,
    score_mod: ScoreMod | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    hashes: tuple[Tensor, Tensor] | tuple[()] = (),
) -> Tensor:
    """Attention in tiles, of key intervals in place of a mask."""
    scale = 1 / math.sqrt(query.size(-1)) if scale is None else scale
    out, _ = attend(Problem(query, key, value, bounds, cells, scale, dropout_p, *hashes), score_mod)
    return out


def inputs(dtype: torch.dtype = torch.float64, /, **sizes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random query, key and value that need gradients: 2 x 4 heads over 2 key heads, 50 x 50 tokens of 8 by default."""
    batch, heads, key_heads, q_len, kv_len, dim, value_dim = (sizes.get(name, default) for name, default in DEFAULT_SIZES.items())
    shapes = (batch, heads, q_len, dim), (batch, key_heads, kv_len, dim), (batch, key_heads, kv_len, value_dim)
    query, key, value = (torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes)
    return query, key, value


def check_close(actual: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype == dtype
    error = (actual.double() - wanted.double()).abs().max().item() if wanted.numel() else 0.0
    assert error <= TOLERANCE[dtype] * max(1.0, wanted.abs().max().item() if wanted.numel() else 0.0)


def check_attention(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    tensors: tuple[Tensor, Tensor, Tensor],
    mask: Tensor,
    **extra: object,
) -> None:
    """Output and gradients of `attend` equal those of dense attention; exactly 0 in fully masked rows, and never NaN."""
    query, key, value = tensors
    out = attend(query, key, value)
    wanted = oracle.attention(query, key, value, mask, **extra)  # type: ignore[arg-type]
    check_close(out, wanted, query.dtype)
    grad = torch.randn_like(out)
    grads = torch.autograd.grad(out, tensors, grad)
    for actual, expected in zip(grads, torch.autograd.grad(wanted, tensors, grad.double()), strict=True):
        check_close(actual, expected, query.dtype)
    seen = mask.expand(*query.shape[:3], key.size(2))
    fully_masked = ~seen.any(-1)
    unseen = ~seen.unflatten(1, (key.size(1), -1)).any(3).any(2)
    assert torch.all(out[fully_masked] == 0)
    assert torch.all(grads[0][fully_masked] == 0)
    assert torch.all(grads[1][unseen] == 0)
    assert torch.all(grads[2][unseen] == 0)


def causal(q_len: int, kv_len: int) -> Tensor:
    return torch.ones(1, 1, q_len, kv_len, dtype=torch.bool).tril()


def window(q_len: int, kv_len: int, left: int, right: int) -> Tensor:
    return torch.ones(1, 1, q_len, kv_len, dtype=torch.bool).tril(right).triu(-left)


def lengths(kv_len: int, *visible: int) -> Tensor:
    return (torch.arange(kv_len) < torch.tensor(visible)[:, None])[:, None, None]


def ragged_noise(density: float, *shape: int) -> Tensor:
    return torch.rand(shape) < density


def documents(length: int, size: int) -> Tensor:
    ids = torch.arange(length) // size
    return (ids[:, None] == ids)[None, None]


def packed(*sizes: int) -> Tensor:
    """Documents of these sizes; a negative one is that of padding."""
    ids = torch.cat([torch.full((abs(size),), i if size > 0 else -1) for i, size in enumerate(sizes)])
    return ((ids[:, None] == ids) & (ids >= 0))[None, None]


def unchanged(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return score


def past(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_idx


def middle_rows_only(q_len: int) -> Tensor:
    row = torch.arange(q_len)[:, None]
    return causal(q_len, q_len) & ((row > q_len // 3) & (row < q_len // 2))


def sinks(q_len: int) -> Tensor:
    return window(q_len, q_len, 5, 0) | (causal(q_len, q_len) & (torch.arange(q_len) < 2))


MASKS: dict[str, Callable[[], Tensor]] = {
    "everything": lambda: torch.ones(1, 1, 1, 50, dtype=torch.bool),
    "nothing": lambda: torch.zeros(1, 1, 1, 50, dtype=torch.bool),
    "nothing, row by row": lambda: torch.zeros(2, 4, 50, 50, dtype=torch.bool),
    "causal": lambda: causal(50, 50),
    "window": lambda: window(50, 50, 7, 3),
    "sinks and a window": lambda: sinks(50),
    "documents of one length": lambda: causal(50, 50) & documents(50, 16),
    "documents of 13": lambda: causal(50, 50) & documents(50, 13),
    "documents of 3, of both directions": lambda: documents(50, 3),
    "documents of some lengths, with padding": lambda: causal(50, 50) & packed(5, 13, -4, 1, 20, -2, 5),
    "documents of two lengths": lambda: causal(50, 50) & torch.cat((documents(50, 16), documents(50, 8))),
    "empty rows and empty blocks": lambda: middle_rows_only(50),
    "one row in the middle of nothing": lambda: causal(50, 50) & (torch.arange(50)[:, None] == 20),
    "rows alike": lambda: ragged_noise(0.3, 1, 1, 1, 50),
    "rows alike, per batch": lambda: lengths(50, 50, 3),
    "rows alike, one batch sees nothing": lambda: lengths(50, 0, 50),
    "rows alike, per head": lambda: ragged_noise(0.1, 1, 4, 1, 50),
    "causal with padding": lambda: causal(50, 50) & lengths(50, 41, 17),
    "per batch": lambda: torch.cat((window(50, 50, 4, 0), window(50, 50, 0, 30))),
    "per head": lambda: torch.cat([window(50, 50, 4 * left, 0) for left in (0, 1, 12, 3)], 1),
    "per head and batch": lambda: ragged_noise(0.5, 2, 4, 50, 50),
    "many intervals": lambda: ragged_noise(0.5, 1, 1, 50, 50),
    "few cells": lambda: ragged_noise(0.01, 2, 1, 50, 50),
    "far apart": lambda: torch.cat((lengths(50, 5).expand(1, 1, 50, 50), lengths(50, 5).flip(3).expand(1, 1, 50, 50))),
    "wide": lambda: window(7, 90, 2, 60),
    "tall": lambda: window(90, 7, 60, 2),
    "one row": lambda: window(1, 70, 0, 40),
    "one key": lambda: ragged_noise(0.5, 2, 1, 70, 1),
    "1 x 1": lambda: torch.ones(1, 1, 1, 1, dtype=torch.bool),
    "1 x 1, hidden": lambda: torch.zeros(1, 1, 1, 1, dtype=torch.bool),
    "exact blocks": lambda: causal(32, 32),
    "one over": lambda: causal(33, 33),
}


def shape_of(mask: Tensor, q_len: int = 50) -> dict[str, int]:
    return {"q_len": max(mask.size(2), q_len if mask.size(3) == 50 else 1), "kv_len": mask.size(3)}
