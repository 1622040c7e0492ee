"""What comparisons of query and key become when they are solved for the key. That they mean the same is proved in test_laws."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import pytest

import flexmask as fm
from flexmask import Mask, kv, q
from flexmask.expr.mask import Compare
from flexmask.intervals.solve import MAX_BRANCHES, is_separable, linear, separate

LIMIT, DATA = fm.table([3, 5])[q % 2], fm.table([3, 5])[kv % 2]

#: Masks, and what they become, with L and D for the two tables.
SOLVED: list[tuple[Mask, str]] = [
    # for the key
    (kv <= q, "(kv < q + 1)"),
    (q > kv, "(kv < q)"),
    (kv < 5, "(kv < 5)"),
    (kv * 3 < q * 2 + 1, "(kv < (q * 2) // 3 + 1)"),
    (kv * -4 >= LIMIT - 7, "(kv < (-L + 7) // 4 + 1)"),
    (kv * 6 == q * 4 + 2, "(kv >= (q * 2 + 3) // 3 & kv < (q * 2 + 1) // 3 + 1)"),
    (kv * 6 == q * 4 + 3, "empty"),
    (kv * 6 != q * 4 + 3, "full"),
    (kv != q, "~(kv >= q & kv < q + 1)"),
    (q - kv - kv == 1, "(kv >= q // 2 & kv < (q - 1) // 2 + 1)"),
    (kv // 16 <= LIMIT, "(kv < L * 16 + 16)"),
    (kv // 16 > LIMIT, "(kv >= L * 16 + 16)"),
    (kv // 4 == 2, "(kv >= 8) & (kv < 12)"),
    ((kv * 5 - LIMIT) // 7 > q // 3, "(kv >= (q // 3 * 7 + L + 11) // 5)"),
    # by pieces
    (abs(q - kv) <= 2, "(kv >= q - 2) & (kv < q + 3)"),
    (abs(q - kv) > 2, "(kv < q - 2) | (kv >= q + 3)"),
    (abs(q - kv) == 2, "(kv >= q - 2) & (kv < q + 3) & ((kv < q - 1) | (kv >= q + 2))"),
    (fm.minimum(kv, LIMIT) * -2 <= q, "(kv >= (-q + 1) // 2) & (-L * 2 - q <= 0)"),
    (fm.maximum(kv, q) <= LIMIT, "(kv < L + 1) & (q - L <= 0)"),
    (fm.where(kv < LIMIT, kv * 2, q - kv) <= 9, "(kv < L) & (kv < 5) | ~(kv < L) & (kv >= q - 9)"),
    (fm.where(kv < LIMIT, kv * 2, q) == 6, "(kv < L) & (kv >= 3 & kv < 4) | ~(kv < L) & (q - 6 == 0)"),
    # into a side of the key and one of the query
    (DATA <= LIMIT, "D <= L"),
    (LIMIT < DATA, "D > L"),
    (kv % 5 == q % 3, "kv % 5 == q % 3"),
    (DATA - q * 3 <= LIMIT, "D <= q * 3 + L"),
    (q <= LIMIT - DATA, "D <= L - q"),
    (DATA * 2 - q * 4 == LIMIT * 2, "D == q * 2 + L"),
    (q - DATA * kv % 3 < 2, "D * kv % 3 >= q - 1"),
    (kv % 5 - q % 2 != kv // 7, "kv % 5 - kv // 7 != q % 2"),
    # not at all
    (q < 5, "q < 5"),
    (DATA == 3, "D == 3"),
    (kv * kv < 9, "kv * kv < 9"),
    ((q - kv) % 3 == 0, "(q - kv) % 3 == 0"),
    (q * kv < 40, "q * kv - 39 <= 0"),
    (DATA + q * kv < 40, "D + q * kv - 39 <= 0"),
    # inside of others
    (fm.causal(), "(kv < q + 1)"),
    (fm.document([0, 0, 1]), "(table([0, 0, 1])[kv] == table([0, 0, 1])[q]) & (table([0, 0, 1])[q] >= 0)"),
    (fm.causal() & (q < 5) & ~fm.masks.block_causal(8), "(kv < q + 1) & (q < 5) & ~(kv < q // 8 * 8 + 8)"),
]


def text_of(mask: Mask) -> str:
    return str(mask).replace(str(LIMIT), "L").replace(str(DATA), "D")


@pytest.mark.parametrize(("mask", "solved"), SOLVED, ids=[text_of(mask) for mask, _ in SOLVED])
def test_solved(mask: Mask, solved: str) -> None:
    assert text_of(separate(mask)) == solved
    assert separate(mask) is separate(mask)


@pytest.mark.parametrize(
    ("mask", "separable"),
    [
        (DATA <= LIMIT, True),
        (DATA <= 3, False),
        (LIMIT <= 3, False),
        (LIMIT <= DATA, False),
        (DATA + q <= LIMIT, False),
        (Compare("<=", DATA, LIMIT + kv), False),
        (DATA + q <= LIMIT + kv, False),
        (fm.causal(), False),
    ],
    ids=text_of,
)
def test_is_separable(mask: Mask, separable: bool) -> None:
    assert is_separable(mask) == separable


PIECEWISE: dict[str, Callable[[Any], Any]] = {
    "abs": abs,
    "minimum": lambda index: fm.minimum(index, 1),
    "maximum": lambda index: fm.maximum(index, 1),
    "where": lambda index: fm.where(index > 1, 1, index),
}


def piecewise(kind: str, index: Any, count: int) -> Any:
    return reduce(lambda left, right: left + right, [PIECEWISE[kind](index - number) for number in range(count)])


@pytest.mark.parametrize("kind", PIECEWISE)
def test_many_pieces(kind: str) -> None:
    """Only those of the key count, since each may double the number of conditions."""
    many: Any = piecewise(kind, kv, MAX_BRANCHES + 1) <= q
    assert separate(many) is many
    of_query = piecewise(kind, q, MAX_BRANCHES + 1) + kv <= 5
    assert isinstance(of_query, Compare)
    assert separate(of_query) is not of_query
    most: Any = piecewise(kind, kv, MAX_BRANCHES) <= q
    assert separate(most) is not most
    assert isinstance(many, Compare)
    assert linear(many, lambda form, sign: fm.full()) is many
    assert linear(most, lambda form, sign: fm.full()) is not most
