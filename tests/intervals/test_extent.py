"""The least and the greatest value of expressions."""

from typing import Any

import pytest
import torch

import flexmask as fm
from flexmask import b, h, kv, kv_len, q, q_len
from flexmask.expr.index import Constant, Index
from flexmask.expr.linear import Linear, Quotient
from flexmask.expr.tables import TensorTable
from flexmask.intervals.context import MAX_LENGTH, Context, Tables
from flexmask.intervals.extent import INT64, Extent, Read, combined_extent, extent, fits

GREAT = 2**62
INT32 = torch.iinfo(torch.int32)
LONG, INT, BOOL = torch.tensor([3, -5, 4]), torch.tensor([3, -5, 4], dtype=torch.int32), torch.tensor([True, True, True])

#: Expressions for 4 <= q < 10, 0 <= kv < 9, two sequences and three heads.
EXTENTS: list[tuple[Any, Extent]] = [
    (b + 0, (0, 1)),
    (h + 0, (0, 2)),
    (q + 0, (4, 9)),
    (kv + 0, (0, 8)),
    (q_len + 0, (6, 6)),
    (kv_len + 0, (9, 9)),
    (Constant(-7), (-7, -7)),
    (abs(kv - 5), (0, 5)),
    (abs(kv - 3), (0, 5)),
    (abs(kv + 1), (1, 9)),
    (abs(-kv - 1), (1, 9)),
    (fm.where(h == 0, kv, q + 20), (0, 29)),
    (fm.where(h == 0, q + 20, kv), (0, 29)),
    (fm.minimum(q, kv), (0, 8)),
    (fm.maximum(q, kv), (4, 9)),
    (q + kv, (4, 17)),
    (q - kv, (-4, 9)),
    (q * kv, (0, 72)),
    ((q - 6) * (kv - 3), (-10, 15)),
    (q // 2, (2, 4)),
    (kv // -2, (-4, 0)),
    (q // (kv + 1), (0, 9)),
    (q // (kv - 9), (-9, -1)),
    (q // kv, INT64),
    (q // (kv - 8), INT64),
    (q // (kv - 4), INT64),
    (q % 3, (0, 2)),
    (q % 9, (0, 8)),
    (q % 10, (4, 9)),
    ((kv - 2) % 20, (0, 19)),
    (kv % (h + 2), (0, 3)),
    (kv % -3, (-2, 0)),
    (kv % (h - 5), (-4, 0)),
    (q % kv, INT64),
    (kv * GREAT, (0, INT64[1])),
    (kv * -GREAT * 4, (INT64[0], 0)),
    (abs(q // kv), (0, INT64[1])),
    (fm.table([3, -5, 4])[h], (-5, 4)),
    (fm.table(LONG)[h], (-5, 4)),
    (fm.table(INT)[h], (INT32.min, INT32.max)),
    (fm.table(BOOL)[h], (0, 1)),
    # sums that the library makes, which are exact
    (Linear.of(kv * GREAT * 4 - q * GREAT + 1).index(), (1 - 9 * GREAT, 32 * GREAT - 4 * GREAT + 1)),
    (Quotient.make(Linear.of(kv * GREAT * 4 - q).index(), 5), (-2, (32 * GREAT - 4) // 5)),
]


def context_of(index: Index, q_offset: int | torch.Tensor = 4, q_end: int | None = 10) -> Context:
    tables = Tables()
    tables.update({node.key: node.tensor for node in index.walk() if isinstance(node, TensorTable)})
    return Context(fm.full(), 6, 9, 2, 2, 3, q_offset, q_end, torch.device("cpu"), tables)


@pytest.mark.parametrize(("index", "expected"), EXTENTS, ids=[str(index) for index, _ in EXTENTS])
def test_extent(index: Index, expected: Extent) -> None:
    context = context_of(index)
    assert extent(index, context) == expected
    assert extent(index, context) == expected


@pytest.mark.parametrize(
    ("data", "read", "expected"),
    [
        (LONG, Read.NOTHING, INT64),
        (LONG, Read.HERE, (-5, 4)),
        (LONG, Read.ALL, (-5, 4)),
        (INT, Read.NOTHING, (INT32.min, INT32.max)),
        (INT, Read.HERE, (INT32.min, INT32.max)),
        (INT, Read.ALL, (-5, 4)),
    ],
)
def test_what_may_be_read(data: torch.Tensor, read: Read, expected: Extent) -> None:
    index = fm.table(data)[h]
    assert extent(index, context_of(index), read) == expected


@pytest.mark.parametrize("unknown", [["q"], ["kv"], ["q", "kv"]], ids=str)
def test_unknown_parts(unknown: list[str]) -> None:
    def below(part: Index) -> Extent | None:
        return None if str(part) in unknown else (1, 2)

    for index in (fm.where(h == 0, q, kv), q + kv, q % kv):
        assert combined_extent(index, below) is None
    assert combined_extent(fm.where(h == 0, b, h + 0), below) == (1, 2)
    assert combined_extent(abs(q), below) == (None if "q" in unknown else (1, 2))


def test_offsets() -> None:
    index, offsets = q + 0, torch.tensor([2, 7])
    assert extent(index, context_of(index, offsets, 13)) == (0, 12)
    assert extent(index, context_of(index, offsets, None)) == (0, MAX_LENGTH - 1)


def test_fits() -> None:
    assert fits(INT64)
    assert not fits((INT64[0] - 1, 0))
    assert not fits((0, INT64[1] + 1))
    assert fits((-(2**31), 2**31 - 1), 32)
    assert not fits((-(2**31) - 1, 0), 32)
    assert not fits((0, 2**31), 32)
