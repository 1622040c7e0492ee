"""The checks for everyone: what is right passes, what is wrong fails, and the message says where."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import flexmask as fm
from flexmask.errors import ExpressionError, LoweringError, OperandError
from flexmask.intervals.rows import Rows
from flexmask.testing import assert_equivalent, assert_subset
from flexmask.testing.equivalence import agreement
from flexmask.testing.settings import make_setting
from tests.support import oracle
from tests.support.exhaustive import half
from tests.support.gpu import needs_gpu
from tests.support.strategies import Case, Shape, shaped_masks
from tests.testing.packed_documents import DOCUMENTS, LENGTHS, PACKED, check_fails


def packed(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    ids, lengths = torch.tensor(DOCUMENTS), torch.tensor(LENGTHS)
    return (kv_idx <= q_idx) & (ids[b, q_idx] == ids[b, kv_idx]) & (kv_idx < lengths[b])


# ---------------------------------------------------------------- assert_equivalent: what is right


@half
@given(shaped_masks(longest=12, depth=2))
def test_drawn_masks_equal_their_meaning(drawn: tuple[Case, Shape]) -> None:
    case, shape = drawn
    assert_equivalent(case.mask, **shape.lowering, reference=case.expected(shape), block_size=4, dtypes=(torch.float64,))


@half
@given(shaped_masks(longest=12, depth=2), st.integers(0, 10**6))
def test_one_cell_that_differs_is_found(drawn: tuple[Case, Shape], place: int) -> None:
    case, shape = drawn
    reference = case.expected(shape)
    at = torch.unravel_index(torch.tensor(place % reference.numel()), reference.shape)
    reference[at] = ~reference[at]
    b, h, q, kv = (int(i) for i in at)
    check_fails(
        lambda: assert_equivalent(case.mask, **shape.lowering, reference=reference, backends=()),
        f"dense, against the reference: 1 of {reference.numel():,} cells differ",
        f"the first at b={b}, h={h}, q={q}, kv={kv}",
    )


REFERENCES: dict[str, Any] = {
    "none": None,
    "a mask": fm.key_padding(LENGTHS) & (fm.kv < fm.q + 1) & fm.document(DOCUMENTS),
    "a function": packed,
    "a table": torch.tensor(
        oracle.table_of(
            oracle.both(oracle.causal(), oracle.both(oracle.document(DOCUMENTS), oracle.key_padding(LENGTHS))), 12, 12, batch=2
        )
    ),
}


@pytest.mark.parametrize("name", REFERENCES)
def test_every_kind_of_reference(name: str) -> None:
    assert_equivalent(PACKED, 12, reference=REFERENCES[name])
    if isinstance(REFERENCES[name], Tensor):
        assert_equivalent(PACKED, 12, reference=REFERENCES[name][:, 0])
        assert_equivalent(fm.from_dense(REFERENCES[name][0, 0]), 12, reference=REFERENCES[name][0, 0])


@pytest.mark.parametrize(
    ("mask", "lengths", "options"),
    [
        ("causal & (kv < 5)", (12,), {}),
        (fm.causal("lower_right"), (5, 9), {"reference": lambda b, h, q_idx, kv_idx: kv_idx <= q_idx + 4}),
        (fm.causal(), (3, 9), {"q_offset": 5, "reference": lambda b, h, q_idx, kv_idx: kv_idx <= q_idx + 5}),
        (fm.causal(), (1, 9), {"q_offset": torch.tensor([2, 5])}),
        (fm.per_head([fm.causal(), fm.full()]), (9,), {"reference": lambda b, h, q_idx, kv_idx: (h == 1) | (kv_idx <= q_idx)}),
        (fm.causal() & ((fm.q + fm.b) % 2 == fm.h), (9,), {"batch": 3, "heads": 2}),
        (fm.causal() & ((fm.q - fm.kv) % 3 == 0), (19,), {"block_size": (4, 8)}),
        (fm.empty(), (4,), {"batch": 2, "heads": 3}),
        (fm.sliding_window(left=3, right=0), (30,), {"dtypes": (torch.float64, torch.bfloat16, torch.float16)}),
        (fm.full(), (300,), {"backends": (), "block_size": 128}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else str(value),
)
def test_what_is_right_passes(mask: Any, lengths: tuple[int, ...], options: dict[str, Any]) -> None:
    assert_equivalent(mask, *lengths, **options)


def test_every_lowering_is_checked() -> None:
    names = [finding.name for finding in agreement(make_setting(PACKED, 12))]
    assert names[:4] == ["dense", "rows", "mask_mod (expression)", "mask_mod (interval)"]
    assert [name for name in names if "BlockMask" in name] == [
        f"BlockMask ({part})"
        for part in ("kv_indices", "full_kv_indices", "forward cells", "q_indices", "full_q_indices", "backward cells")
    ]
    assert names[10:] == ["stats", *(f"sdpa float32 {part}" for part in ("output", *(f"gradient of {t}" for t in TENSORS)))]


TENSORS = ("query", "key", "value")


@pytest.mark.slow
@pytest.mark.exhaustive
def test_flex_on_the_cpu_has_outputs_alone() -> None:
    names = [
        finding.name for finding in agreement(make_setting(PACKED, 12), backends=["flex"], dtypes=(torch.float32, torch.float64))
    ]
    assert [name for name in names if "flex" in name] == ["flex float32 output"]
    assert_equivalent(PACKED, 12, backends=["flex"])


# ---------------------------------------------------------------- assert_equivalent: what is wrong


def test_a_wrong_mask_is_shown() -> None:
    message = check_fails(
        lambda: assert_equivalent(fm.sliding_window(size=4), 6, reference=lambda b, h, q_idx, kv_idx: (q_idx - kv_idx).abs() < 3),
        "sliding_window(size=4)\ndense, against the reference: 12 of 36 cells differ (9 missing, 3 extra)",
        "the first at b=0, h=0, q=0, kv=1",
        "also wrong: rows, mask_mod (expression)",
        "sdpa float32 gradient of key",
    )
    picture = message.split("\n\n")[1].splitlines()
    assert picture == [
        "q\\kv 0 1 2 3 4 5",
        "   0 # - - . . .",
        "   1 # # - - . .",
        "   2 # # # - - .",
        "   3 + # # # - -",
        "   4 . + # # # -",
        "   5 . . + # # #",
    ]


def test_a_picture_of_a_part_says_so() -> None:
    message = check_fails(
        lambda: assert_equivalent(fm.causal(), 1200, reference=fm.causal() - ((fm.q == 1100) & (fm.kv == 50)), backends=()),
        "1 of 1,440,000 cells differ",
    )
    assert "- missing   + extra\nrows 1092 to 1107 of 1,200, columns 38 to 61 of 1,200" in message


WRONG: dict[str, tuple[Any, Any]] = {
    "one cell of one sequence": (PACKED, lambda b, h, q_idx, kv_idx: packed(b, h, q_idx, kv_idx) & ~((b == 1) & (kv_idx == 6))),
    "one head": (fm.per_head([fm.causal(), fm.causal()]), fm.per_head([fm.causal(), fm.causal(offset=1)])),
    "off by one": (fm.causal(), lambda b, h, q_idx, kv_idx: kv_idx < q_idx),
    "table": (fm.causal(), torch.ones(12, 12, dtype=torch.bool)),
    "sequences that the mask does not know": (fm.causal(), fm.causal() & fm.key_padding([12, 11])),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_reference(name: str) -> None:
    mask, reference = WRONG[name]
    check_fails(lambda: assert_equivalent(mask, 12, reference=reference, backends=()), "cells differ")


def tampered_rows(self: Rows) -> Tensor:
    """The intervals as they are, but that the second row is one key longer."""
    ends = self.hi.clone()
    ends[:, :, 1:2] += 1
    return torch.stack((self.lo, ends), -1)


def one_less(function: Any) -> Any:
    """A closure that hides key 1."""
    return lambda *arguments, **options: lambda b, h, q, kv: function(*arguments, **options)(b, h, q, kv) & (kv != 1)


def doubled(function: Any) -> Any:
    def lists(*arguments: Any, **options: Any) -> Any:
        return [(counts + (counts == 1).int(), indices) for counts, indices in function(*arguments, **options)]

    return lists


TAMPERED: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "dense": ("flexmask.lowering.dense.mask_closure", one_less, "dense, against the reference"),
    "rows": (
        "flexmask.intervals.rows.Rows.holds",
        lambda f: lambda self, kv: f(self, kv) & (kv != 1),
        "rows, against the reference",
    ),
    "expression": ("flexmask.lowering.mask_mod._expression_mod", one_less, "mask_mod (expression), against"),
    "interval": ("flexmask.lowering.mask_mod.interval_mod", one_less, "mask_mod (interval), against"),
    "lists": ("flexmask.lowering.block_mask.grid_lists", doubled, "BlockMask (kv_indices), against"),
    "stats": (
        "flexmask.report.stats.stats",
        lambda f: lambda *a: replace(f(*a), visible=7),
        "stats, against the reference: visible 7, not 78",
    ),
    "outputs": ("flexmask.testing.equivalence.attention", lambda f: lambda *a, **o: f(*a, **o) * 1.001, "sdpa float32 output"),
    "gradients": (
        "flexmask.testing.equivalence.attention",
        lambda f: lambda query, key, value, *a, **o: f(query, key.detach() + 0 * key, value, *a, **o),
        "sdpa float32 gradient of key",
    ),
    "not a number": (
        "flexmask.testing.equivalence.attention",
        lambda f: lambda *a, **o: f(*a, **o) * torch.nan,
        "largest error nan",
    ),
}


@pytest.mark.parametrize("name", TAMPERED)
def test_a_tampered_lowering(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, tamper, message = TAMPERED[name]
    owner, _, attribute = path.rpartition(".")
    module, _, cls = owner.rpartition(".") if owner.split(".")[-1][0].isupper() else (owner, "", "")
    import importlib

    holder = importlib.import_module(module)
    holder = getattr(holder, cls) if cls else holder
    monkeypatch.setattr(holder, attribute, tamper(getattr(holder, attribute)))
    reference = torch.ones(12, 12, dtype=torch.bool).tril()
    check_fails(lambda: assert_equivalent(fm.causal(), 12, reference=reference, block_size=4), message)


def test_a_query_without_keys_must_give_exactly_0(monkeypatch: pytest.MonkeyPatch) -> None:
    from flexmask.testing import equivalence

    monkeypatch.setattr(equivalence, "attention", lambda *a, **o: fm.attention(*a, **o) + 1e-9)
    check_fails(lambda: assert_equivalent(fm.key_padding(0), 4), "sdpa float32 output", "1e-09 in a fully masked row")


def test_without_a_reference_a_mask_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_equivalent(fm.causal(offset=3), 12)
    monkeypatch.setattr(Rows, "holds", lambda self, kv: kv > -1)
    check_fails(lambda: assert_equivalent(fm.causal(), 12), "rows, against its own expression: 66 of 144 cells differ")


def broken(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    raise KeyError("no such table")


def test_equivalence_refused() -> None:
    with pytest.raises(LoweringError, match=r"16,777,216 cells; at most 4,194,304.*mask.difference"):
        assert_equivalent(fm.causal(), 4096)
    with pytest.raises(OperandError, match=r"bool\[q_len, kv_len\].*float32"):
        assert_equivalent(fm.causal(), 4, reference=torch.ones(4, 4))
    with pytest.raises(OperandError, match=r"reference is for \[1, 1, 4, 5\], the mask for \[1, 1, 4, 4\]"):
        assert_equivalent(fm.causal(), 4, reference=torch.ones(4, 5, dtype=torch.bool))
    with pytest.raises(OperandError, match="must be a Mask, its text, a mask_mod or a boolean tensor, got int"):
        assert_equivalent(fm.causal(), 4, reference=3)  # type: ignore[arg-type]
    with pytest.raises(OperandError, match=r"reference broken cannot be called.*KeyError"):
        assert_equivalent(fm.causal(), 4, reference=broken)
    with pytest.raises(OperandError, match=r"mask must be a Mask, its text or a mask_mod function, got Tensor float32\[4, 4\]"):
        assert_equivalent(torch.ones(4, 4), 4)  # type: ignore[arg-type]
    with pytest.raises(ExpressionError, match=r"'cudnn'.*'sdpa', 'flash', 'flex'"):
        assert_equivalent(fm.causal(), 4, backends=["cudnn"])
    with pytest.raises(ExpressionError, match=r"dtypes are .*float64.* got torch.int32"):
        assert_equivalent(fm.causal(), 4, dtypes=[torch.int32])
    with pytest.raises(LoweringError, match="the backend 'flash' cannot be checked here: FlashAttention 4 takes tensors on CUDA"):
        assert_equivalent(fm.causal(), 4, backends=["flash"])


# ---------------------------------------------------------------- assert_subset


def test_subset() -> None:
    assert_subset(PACKED, "causal", 12)
    assert_subset(fm.causal(), fm.causal(), 100_000)
    message = check_fails(
        lambda: assert_subset(fm.sliding_window(left=1, right=1), fm.causal(), 100_000),
        "sliding_window(left=1, right=1)\nshows 99,999 of 10,000,000,000 cells that are hidden in\ncausal\n"
        "the first at b=0, h=0, q=0, kv=1",
    )
    assert message.split("\n\n")[1].splitlines()[1:4] == [
        "   0 # +" + " ." * 22,
        "   1 # # +" + " ." * 21,
        "   2 . # # +" + " ." * 20,
    ]


def test_subset_shows_the_sequence_and_the_head() -> None:
    mask = fm.per_head([fm.empty(), fm.causal() & fm.key_padding([3, 40])])
    message = check_fails(lambda: assert_subset(mask, fm.kv < 30, 40), "b=1, h=1, q=30, kv=30")
    assert re.search(r"  30 (# )+\+", message)


@needs_gpu
def test_checks_on_cuda() -> None:
    assert_equivalent(PACKED, 12, reference=REFERENCES["a table"], device="cuda")
    names = [finding.name for finding in agreement(make_setting(PACKED, 12, device="cuda"))]
    assert "flex float32 gradient of key" in names
    assert_subset(PACKED, "causal", 12, device="cuda")
    message = check_fails(lambda: assert_equivalent(PACKED, 12, reference=fm.causal(), device="cuda"), "cells differ")
    assert "flex float32 output" in message
