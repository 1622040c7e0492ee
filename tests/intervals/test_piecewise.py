"""Columns that rise in pieces, such as ``kv % n``: their rows, and the masks that are made of them."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import flexmask as fm
from flexmask.intervals.columns import MAX_CANDIDATES, MAX_ENTRIES, PiecewiseColumn, direction
from flexmask.intervals.rows import Rows
from tests.support.lowerings import check_block_mask, check_lowerings, check_stats
from tests.support.strategies import Case, Shape

b, h, kv, q = fm.b, fm.h, fm.kv, fm.q


@given(st.lists(st.integers(-5, 9), min_size=1, max_size=24))
def test_direction(values: list[int]) -> None:
    found = direction(torch.tensor(values))
    rises, falls = values == sorted(values), values == sorted(values, reverse=True)
    assert found == (1 if rises else -1 if falls else 0)


@given(st.data())
def test_between(data: st.DataObject) -> None:
    """The keys of some rows with values between two bounds, against looking at each key."""
    column = data.draw(st.lists(st.integers(-5, 9), min_size=1, max_size=24))
    count = len(column)
    ends = st.tuples(st.integers(0, count), st.integers(0, count)).map(lambda pair: (min(pair), max(pair)))
    spans = data.draw(st.lists(ends, min_size=1, max_size=6))
    limits = data.draw(st.lists(st.tuples(st.integers(-8, 12), st.integers(-8, 12)), min_size=len(spans), max_size=len(spans)))
    lo, hi = torch.tensor(spans).unbind(1)
    low, high = (end[None, None] for end in torch.tensor(limits).unbind(1))
    pieces = PiecewiseColumn.of(torch.tensor(column))
    assert pieces is not None
    assert pieces.count == 1 + sum(after < before for before, after in pairwise(column))
    first, behind = pieces.rank(low, inclusive=False), pieces.rank(high, inclusive=True)
    found = pieces.between(Rows.spans(lo[None, None], hi[None, None], count), first, behind, MAX_CANDIDATES)
    assert found is not None
    for row, (span, (least, most)) in enumerate(zip(spans, limits, strict=True)):
        wanted = [span[0] <= key < span[1] and least <= value <= most for key, value in enumerate(column)]
        assert found.holds(torch.arange(count))[0, 0, row].tolist() == wanted


def test_too_many_entries() -> None:
    """A column whose values lie far apart has no table of its pieces."""
    assert PiecewiseColumn.of(torch.tensor([0, 10**9, 0])) is None
    assert PiecewiseColumn.of(torch.tensor([0, MAX_ENTRIES * 32, 0])) is not None


def test_too_many_pieces() -> None:
    length = 2 * (MAX_CANDIDATES + 1)
    pieces = PiecewiseColumn.of(torch.arange(length) % 2)
    assert pieces is not None
    zero = torch.zeros(1, 1, 1, dtype=torch.int32)
    assert pieces.between(Rows.everything(length, zero.device), zero, zero + 1, MAX_CANDIDATES) is None
    fewer = pieces.between(Rows.spans(zero, zero + 2 * MAX_CANDIDATES, length), zero, zero + 1, MAX_CANDIDATES)
    assert fewer is not None
    assert int(fewer.counts()) == MAX_CANDIDATES
    two = Rows(torch.cat((zero, zero + length // 2), -1)[None], torch.cat((zero + 4, zero + length), -1)[None], length)
    assert pieces.between(two, zero, zero + 1, MAX_CANDIDATES) is None


@pytest.mark.parametrize("count", [2, 3])
def test_entries_at_most(count: int) -> None:
    """As many values as there may be in ``count`` pieces, and one more."""
    length = 2 * count - 1
    size = MAX_ENTRIES * (length + 64) // count
    for top, expected in ((size - 1, True), (size, False)):
        column = torch.arange(length) % 2 * top
        assert (PiecewiseColumn.of(column) is not None) == expected


def test_integers_of_32_bits() -> None:
    pieces = PiecewiseColumn.of(torch.tensor([0, 1, 0, 1]))
    assert pieces is not None
    assert pieces.piece.dtype == pieces.first.dtype == torch.int32
    assert pieces.rank(torch.tensor([1]), inclusive=True).dtype == torch.int32


#: Masks over columns that rise in pieces, and the same for a single cell; whether the rows are known exactly.
WRITTEN: list[tuple[str, bool]] = [
    ("q % 5 == kv % 5", True),
    ("abs(q % 7 - kv % 7) <= 2", True),
    ("(kv % 4 <= q % 4) & (kv <= q)", True),
    ("(abs(q // 6 - kv // 6) <= 1) & (abs(q % 6 - kv % 6) <= 1)", True),
    ("(q // 6 == kv // 6) | (q % 6 == kv % 6)", True),
    ("(q % 5 == kv % 5) ^ (kv <= q)", True),
    ("(abs(q // 12 - kv // 12) <= 1) & (abs(q // 4 % 3 - kv // 4 % 3) <= 1) & (abs(q % 4 - kv % 4) <= 1)", True),
    ("(q % 3 + h == kv % 4) & (kv <= q)", True),
    ("(kv % 5 >= q // 3) & ((q - kv) % 2 == 0)", False),
    ("(-kv % 5 < q % 4 + b) & (kv < q + 8)", True),
]

SHAPES = [Shape(13, 11, batch=2, heads=2), Shape(1, 30), Shape(30, 4, heads=2), Shape(37, 37), Shape(9, 40, q_offset=31)]


def case_of(text: str) -> Case:
    mask = eval(text, {"q": q, "kv": kv, "b": b, "h": h})
    return Case(mask, eval(f"lambda b, h, q, kv, q_len, kv_len: {text}"))


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape.q_len}x{shape.kv_len}+{shape.q_offset}")
@pytest.mark.parametrize(("text", "exact"), WRITTEN, ids=[text for text, _ in WRITTEN])
def test_lowerings(text: str, exact: bool, shape: Shape) -> None:
    case = case_of(text)
    check_lowerings(case, shape, case.expected(shape), 4 if shape.q_len > 13 else (4, 8))
    assert case.mask.rows(**shape.lowering).exact >= exact


AXES = st.sampled_from(["{0}", "{0} % {1}", "{0} // {1}", "{0} // {1} % 3", "{0} % 6 // {1}"])
CONDITIONS = st.one_of(
    st.builds(
        lambda axis, n, m, sign: f"({axis.format('q', n)}) {sign} ({axis.format('kv', m)})",
        *(AXES, st.integers(1, 6), st.integers(1, 6), st.sampled_from(["==", "<=", "<", ">=", "!="])),
    ),
    st.builds(
        lambda axis, n, reach: f"abs(({axis.format('q', n)}) - ({axis.format('kv', n)})) <= {reach}",
        *(AXES, st.integers(1, 6), st.integers(0, 3)),
    ),
    st.just("kv <= q"),
    st.integers(1, 5).map(lambda n: f"(q - kv) % {n} == 0"),
)


@given(
    st.lists(CONDITIONS, min_size=1, max_size=4),
    st.lists(st.sampled_from("&|^"), min_size=4, max_size=4),
    st.tuples(st.integers(1, 24), st.integers(1, 24)),
    st.sampled_from([1, 4, (4, 8), 32]),
)
def test_drawn_masks(conditions: list[str], signs: list[str], lengths: tuple[int, int], block_size: Any) -> None:
    text = f"({conditions[0]})"
    for sign, condition in zip(signs, conditions[1:], strict=False):
        text = f"({text} {sign} ({condition}))"
    case, shape = case_of(text), Shape(*lengths)
    check_lowerings(case, shape, case.expected(shape), block_size)


@pytest.mark.parametrize(
    "text",
    [
        "(kv * 13 % 5 > q // 2) & (kv <= q + 40)",
        "(abs(q - kv) <= 9) & ((q - kv) % 3 == 0) & (kv % 7 < 5)",
        "((q + kv) % 2 == 0) & (kv // 16 != q // 16)",
        "((q * kv) % 3 == 0) | (q // 32 > kv // 32)",
        "~((q * kv) % 3 == 0) ^ (q // 32 >= kv // 32)",
        "((q - kv) % 5 == 0) & (kv > 0) & (q < 40)",
        "((q - kv) % 5 == 0) | (q == 3) | (kv >= 48)",
    ],
)
@pytest.mark.parametrize("block_size", [4, 16, (16, 8), 128], ids=str)
def test_blocks_decided_by_ranges(text: str, block_size: Any) -> None:
    """Blocks that rows leave open, of which some are decided by the least and greatest values in them."""
    shape = Shape(70, 61, batch=2, heads=2)
    mask = eval(text, {"q": q, "kv": kv})
    query, key = torch.arange(shape.q_len)[:, None], torch.arange(shape.kv_len)
    expected = eval(text, {"q": query, "kv": key}).expand(2, 2, -1, -1)
    case = Case(mask, lambda b, h, q, kv, q_len, kv_len: bool(expected[b, h, q, kv]))
    check_block_mask(case, shape, expected, block_size)
    check_stats(case, shape, expected, block_size)


def test_more_intervals_than_are_listed_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flexmask.intervals.columns.CHUNK", 2**10)
    mask = fm.causal() & (fm.kv % 3 <= fm.q % 3)
    bounds = mask.rows(300)
    assert not bounds.exact
    assert torch.equal(bounds.upper.hull().counts().flatten(), torch.arange(300) + 1)
    few = fm.sliding_window(left=40, right=0) & (fm.kv % 3 <= fm.q % 3)
    held = few.rows(300)
    assert held.exact
    assert torch.equal(held.lower.expand(1, 1, 300).holds(torch.arange(300)), few.dense(300))
