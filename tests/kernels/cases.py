"""Calls of attention whose kernels are checked: each mask, and what it means in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

import flexmask as fm
from flexmask._sync import PerDevice
from flexmask.lowering import block_mask as lowering

__all__ = ["BUILT", "CASES", "Case", "Shown", "attended", "block_mask", "inputs"]

#: Which of the cells ``(b, h, q, kv)`` are visible, of index tensors that broadcast.
Shown: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """One call of attention, of two sequences.

    Args:
        mask: the mask.
        shown: the same in plain torch.
        q_len: queries.
        kv_len: keys, as many as queries by default.
        heads: heads of the query, and of the key.
        q_offset: position of the first query, for all sequences or for each.
        call: further arguments of `flexmask.attention`.
        training: whether there are gradients.
        layout: the order of [B, H, S, D] in which the inputs lie in memory.
        packed: whether the lists of blocks are packed, as those of long masks are.
        block_size: tokens in a block, or queries and keys.
        dims: channels of a head of query and key, and of the value.
    """

    mask: fm.Mask
    shown: Shown
    q_len: int = 256
    kv_len: int | None = None
    heads: tuple[int, int] = (2, 2)
    q_offset: int | Tensor = 0
    call: dict[str, Any] = field(default_factory=dict)
    training: bool = True
    layout: tuple[int, ...] = (0, 1, 2, 3)
    packed: bool = False
    block_size: int | tuple[int, int] = 128
    dims: tuple[int, int] = (32, 32)


LENGTHS = [[100, 156], [30, 226]]
IDS = torch.tensor([[-1] * 20 + [0] * 150 + [1] * 30, [0] * 60 + [-1] * 90 + [2] * 50])
POSITIONS = torch.tensor([299, 40])


def is_causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return kv <= q


def in_documents(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    stop = torch.tensor([lengths[0] for lengths in LENGTHS])[b]
    return (kv <= q) & ((q < stop) == (kv < stop))


def alibi(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return score - 0.05 * (h + 1) * (q - kv).abs()


CAUSAL, DOCUMENTS = fm.causal(), fm.causal() & fm.document(lengths=LENGTHS)
PIECES = (fm.kv < 9) | ((fm.kv > 60) & (fm.kv < 70)) | ((fm.kv > 140) & (fm.kv < 180)) | (fm.kv == fm.q)

#: By query, the keys of a window.
WIDTHS = torch.arange(256) * 7 % 40
CASES: dict[str, Case] = {
    # kinds of masks
    "causal": Case(CAUSAL, is_causal),
    "full": Case(fm.full(), lambda b, h, q, kv: kv >= 0),
    "empty": Case(fm.empty(), lambda b, h, q, kv: kv < 0),
    "documents": Case(DOCUMENTS, in_documents),
    "window": Case(fm.sliding_window(left=40, right=3), lambda b, h, q, kv: (kv >= q - 40) & (kv <= q + 3), 384),
    "chunks": Case(CAUSAL & fm.masks.chunked(100), lambda b, h, q, kv: (kv <= q) & (q // 100 == kv // 100)),
    "prefix": Case(fm.prefix_lm([50, 130]), lambda b, h, q, kv: (kv <= q) | (kv < torch.tensor([50, 130])[b])),
    "per head": Case(
        fm.per_head([CAUSAL, fm.sliding_window(left=20, right=20)]),
        lambda b, h, q, kv: torch.where(h == 0, kv <= q, (q - kv).abs() <= 20),
    ),
    "two intervals": Case(
        CAUSAL & (fm.sliding_window(size=32) | (fm.kv < 10)), lambda b, h, q, kv: (kv <= q) & ((q - kv < 32) | (kv < 10)), 384
    ),
    "a gap in each row": Case(
        CAUSAL & ((fm.kv < fm.table(torch.tensor([50, 130]))[fm.b]) | (fm.kv > fm.q - fm.table(WIDTHS)[fm.q])),
        lambda b, h, q, kv: (kv <= q) & ((kv < torch.tensor([50, 130])[b]) | (q - kv < WIDTHS[q])),
    ),
    "four intervals": Case(
        PIECES, lambda b, h, q, kv: (kv < 9) | ((kv > 60) & (kv < 70)) | ((kv > 140) & (kv < 180)) | (kv == q)
    ),
    "not separable": Case(
        DOCUMENTS & ((fm.q - fm.kv) % 3 == 0), lambda b, h, q, kv: in_documents(b, h, q, kv) & ((q - kv) % 3 == 0)
    ),
    "not separable, with full blocks": Case(
        ((fm.q * fm.kv) % 5 != 1) | (fm.kv < 130), lambda b, h, q, kv: ((q * kv) % 5 != 1) | (kv < 130), 384
    ),
    "a sequence that is empty": Case(
        fm.key_padding(lengths=[200, 0]), lambda b, h, q, kv: kv < torch.tensor([200, 0])[b]
    ),
    "rows that are empty": Case(
        CAUSAL & (fm.kv >= 100) & (fm.q != 200), lambda b, h, q, kv: (kv <= q) & (kv >= 100) & (q != 200)
    ),
    # shapes
    "fewer queries than keys": Case(fm.causal("lower_right"), lambda b, h, q, kv: kv <= q + 256, 128, 384),
    "more queries than keys": Case(fm.causal("lower_right"), lambda b, h, q, kv: kv <= q - 256, 384, 128),
    "ragged": Case(
        CAUSAL & fm.document(IDS), lambda b, h, q, kv: (kv <= q) & (IDS[b, q] == IDS[b, kv]) & (IDS[b, q] >= 0), 200
    ),
    "ragged, of two lengths": Case(
        fm.key_padding(lengths=[300, 7]) & (fm.kv >= fm.q),
        lambda b, h, q, kv: (kv < torch.tensor([300, 7])[b]) & (kv >= q), 130, 300,
    ),
    "grouped heads": Case(DOCUMENTS, in_documents, heads=(4, 2)),
    "grouped heads that differ": Case(
        fm.per_head([CAUSAL, fm.sliding_window(left=9, right=9), fm.full(), fm.empty()]),
        lambda b, h, q, kv: ((h == 0) & (kv <= q)) | ((h == 1) & ((q - kv).abs() <= 9)) | (h == 2), 200, heads=(4, 2),
    ),
    "heads of 64, values of 32": Case(DOCUMENTS, in_documents, dims=(64, 32)),
    "views of one projection": Case(CAUSAL, is_causal, layout=(0, 2, 1, 3)),
    # lists of blocks
    "packed lists": Case(
        fm.sliding_window(left=200, right=0) & fm.document(lengths=LENGTHS),
        lambda b, h, q, kv: in_documents(b, h, q, kv) & (q - kv <= 200), packed=True,
    ),
    "packed lists, read off a range": Case(CAUSAL, is_causal, 512, packed=True),
    "packed lists, the last row is longest": Case(CAUSAL, is_causal, 520, packed=True),
    "packed lists of two intervals": Case(
        CAUSAL & ((fm.q - fm.kv < 130) | (fm.kv < 140)),
        lambda b, h, q, kv: (kv <= q) & ((q - kv < 130) | (kv < 140)), 640, packed=True,
    ),
    "packed lists of heads": Case(
        fm.per_head([CAUSAL, fm.kv >= fm.q + 100]),
        lambda b, h, q, kv: torch.where(h == 0, kv <= q, kv >= q + 100), 384, packed=True,
    ),
    # decoding
    "decoding": Case(CAUSAL, is_causal, 1, 300, q_offset=POSITIONS, training=False),
    "decoding of a window": Case(
        CAUSAL & fm.sliding_window(size=50), lambda b, h, q, kv: (kv <= q) & (q - kv < 50), 3, 256, (4, 2),
        torch.tensor([100, 253]), training=False,
    ),
    # Two block rows, which torch's kernel for decoding has by these options alone.
    "decoding, packed lists": Case(
        CAUSAL & ((fm.q - fm.kv < 200) | (fm.kv < 10)),
        lambda b, h, q, kv: (kv <= q) & ((q - kv < 200) | (kv < 10)), 64, 640, q_offset=576, training=False, packed=True,
        block_size=(32, 64), call={"kernel_options": {"BLOCK_M": 16, "FORCE_USE_FLEX_ATTENTION": False}},
    ),
    "decoding with gradients": Case(CAUSAL, is_causal, 5, 256, q_offset=251),
    "a chunk of a prompt": Case(
        CAUSAL & fm.sliding_window(size=90), lambda b, h, q, kv: (kv <= q) & (q - kv < 90), 130, 300, q_offset=170
    ),
    # scores and weights
    "scores": Case(DOCUMENTS, in_documents, call={"score_mod": alibi}),
    "dropout": Case(CAUSAL & fm.key_padding(lengths=[256, 0]), lambda b, h, q, kv: (kv <= q) & (b == 0), call={"dropout_p": 0.3}),
    "dropout, scores and grouped heads": Case(
        DOCUMENTS, in_documents, heads=(4, 2), call={"dropout_p": 0.1, "score_mod": alibi, "scale": -0.3}
    ),
}  # fmt: skip

#: Those that show every kernel, which are also built for GPUs.
BUILT = ["documents", "four intervals", "not separable", "decoding", "dropout"]


def inputs(case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """The query, the key and the value."""
    made, kv_len = [], case.kv_len or case.q_len
    (heads, kv_heads), (dim, value_dim) = case.heads, case.dims
    for shape in ((2, heads, case.q_len, dim), (2, kv_heads, kv_len, dim), (2, kv_heads, kv_len, value_dim)):
        stored = torch.randn([shape[axis] for axis in case.layout]).to(dtype)
        back = [case.layout.index(axis) for axis in range(4)]
        made.append(stored.permute(back).requires_grad_(case.training))
    return made[0], made[1], made[2]


def block_mask(case: Case) -> BlockMask:
    """The mask as the kernels take it."""
    with pytest.MonkeyPatch.context() as patch:
        if case.packed:
            for name in ("MAX_GRID", "MAX_ROOM"):
                patch.setattr(lowering, name, PerDevice(-1, -1))
            patch.setattr("flexmask.lowering.block_lists.LEAST_PITCH", 1)
        options: dict[str, Any] = {"batch": 2, "heads": case.heads[0], "q_offset": case.q_offset, "block_size": case.block_size}
        return case.mask.block_mask(case.q_len, case.kv_len or case.q_len, form="triton", **options)


def attended(case: Case, tensors: tuple[Tensor, Tensor, Tensor], mask: BlockMask) -> Tensor:
    """What the kernels give."""
    with torch.set_grad_enabled(case.training):
        options: dict[str, Any] = {
            "enable_gqa": True,
            "backend": "flex",
            "dropout_seed": 11 if "dropout_p" in case.call else None,
        }
        query, key, value = tensors
        out: Tensor = fm.attention(query, key, value, mask, **options, **case.call)
        return out
