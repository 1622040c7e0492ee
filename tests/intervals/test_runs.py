"""Keys by the values of a column: what holds, what is above or below a value, and what is equal to one."""

import operator
from collections.abc import Callable, Iterator
from itertools import product
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from flexmask.intervals import Rows
from flexmask.intervals.columns import ValueRuns, equal_hull, nondecreasing_runs, runs, threshold, within_true
from tests.support import oracle
from tests.support.lowerings import assert_canonical, own_cells_of
from tests.support.paths import path
from tests.support.strategies import Shape

LENGTHS = [1, 2, 9, 40]
COMPARE: dict[str, Callable[[Any, Any], Any]] = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
AXES = [(1, 1), (2, 1), (1, 3), (2, 3)]

each_length = pytest.mark.parametrize("length", LENGTHS)
each_way = pytest.mark.parametrize("way", ["single queries", "runs of queries"])


def lines(length: int, greatest: int, *, least: int = -2) -> Iterator[Tensor]:
    """Integers int64[B, H, length] that come back after others, with and without an axis."""
    random = Random(length)
    for batch, heads in AXES:
        values = [random.randint(least, greatest) for _ in range(batch * heads * length)]
        yield torch.tensor(values).view(batch, heads, length)


def check(rows: Rows, expected: Tensor) -> None:
    assert_canonical(rows, Shape(expected.shape[2], expected.shape[3], batch=expected.shape[0], heads=expected.shape[1]))
    assert torch.equal(own_cells_of(rows).expand_as(expected), expected)


def most_runs(cells: Tensor) -> int:
    return max(len(oracle.intervals_of(row)) for row in cells.flatten(0, 2).tolist())


@each_length
def test_runs(length: int) -> None:
    for values in lines(length, 2):
        found = runs(values > 0, length)
        check(found, (values > 0).unsqueeze(2))
        assert found.slots == max(1, most_runs((values > 0).unsqueeze(2)))
    for value in (False, True):
        check(runs(torch.tensor(value).view(1, 1, 1), length), torch.tensor(value).expand(1, 1, 1, length))
        check(runs(torch.tensor(value).expand(2, 3, 1), length), torch.tensor(value).expand(2, 3, 1, length))


@pytest.mark.parametrize("sign", COMPARE)
@each_length
def test_threshold(length: int, sign: str) -> None:
    for column, value in product(lines(length, 5), lines(7, 7, least=-4)):
        expected = COMPARE[sign](column.sort(-1).values.unsqueeze(2), value.unsqueeze(3))
        check(threshold(column.sort(-1).values, value, length, sign, rises=True), expected)
        check(threshold(column.sort(-1).values.flip(-1), value, length, sign, rises=False), expected.flip(-1))
    same = torch.tensor(3).view(1, 1, 1)
    check(threshold(same, value, length, sign, rises=True), COMPARE[sign](same, value).unsqueeze(3).expand(*value.shape, length))


@each_way
@pytest.mark.parametrize("greatest", [0, 3, 100])
@each_length
def test_matching(length: int, greatest: int, way: str) -> None:
    for column, value in product(lines(length, greatest), lines(11, greatest + 1, least=-3)):
        found = ValueRuns.of(column, length)
        expected = column.unsqueeze(2) == value.unsqueeze(3)
        most = max(1, most_runs(expected))
        with path(way):
            rows = found.matching(value, most)
            fewer = found.matching(value, most - 1)
        assert rows is not None
        check(rows, expected)
        assert rows.slots == most
        assert fewer is None or found.distinct


@each_length
def test_own(length: int) -> None:
    for column in (*lines(length, 3), *(values.sort(-1).values for values in lines(length, 3))):
        found = ValueRuns.of(column, length)
        expected = column.unsqueeze(2) == column.unsqueeze(3)
        most = most_runs(expected)
        assert found.distinct == (most == 1)
        rows = found.own(most)
        assert rows is not None
        check(rows, expected)
        assert rows.slots == most
        assert found.distinct or found.own(most - 1) is None


@each_way
@each_length
def test_the_greatest_integer_is_a_value_like_any_other(length: int, way: str) -> None:
    """It also fills up lines with few runs, so that it may take more slots."""
    for column, value in product(lines(length, 3), lines(11, 3)):
        column, value = (values.masked_fill(values == 1, torch.iinfo(torch.int64).max) for values in (column, value))
        found = ValueRuns.of(column, length)
        with path(way):
            rows, own = found.matching(value, length), found.own(length)
        assert rows is not None
        assert own is not None
        keys = torch.arange(length)
        assert torch.equal(rows.holds(keys), column.unsqueeze(2) == value.unsqueeze(3))
        assert torch.equal(own.holds(keys), column.unsqueeze(2) == column.unsqueeze(3))


def test_one_value_for_all_keys() -> None:
    same = torch.tensor(3).view(1, 1, 1)
    found = ValueRuns.of(same, 6)
    assert found.distinct
    rows = found.matching(torch.tensor([[[2, 3]]]), 1)
    assert rows is not None
    check(rows, torch.tensor([False, True]).view(1, 1, 2, 1).expand(1, 1, 2, 6))


@each_length
def test_rising_runs(length: int) -> None:
    for column, value in product(lines(length, 5), lines(7, 7, least=-1)):
        rising = column.clamp(min=0).sort(-1).values
        rising[..., length - length // 3 :] = -1
        check(nondecreasing_runs(rising, value, length), rising.unsqueeze(2) == value.unsqueeze(3))


@each_length
def test_equal_hull(length: int) -> None:
    """One interval from the first to the last key of a value; none where no key has it."""
    for column, value in product(lines(length, 5), lines(7, 7)):
        equal = column.unsqueeze(2) == value.unsqueeze(3)
        before, after = equal.long().cummax(-1).values, equal.long().flip(-1).cummax(-1).values.flip(-1)
        check(equal_hull(column, value, length), (before & after).bool())


@each_length
def test_within_true(length: int) -> None:
    """Intervals lose the ends where nothing holds; each axis may be of another size than that of the condition."""
    random = Random(length)
    for (batch, heads), (rows_batch, rows_heads), slots in product(AXES, AXES, (1, 2)):
        if not {batch, rows_batch} <= {1, max(batch, rows_batch)} or not {heads, rows_heads} <= {1, max(heads, rows_heads)}:
            continue
        holds = torch.tensor([random.random() < 0.4 for _ in range(batch * heads * length)]).view(batch, heads, length)
        ends = [sorted(random.randint(0, length) for _ in range(2 * slots)) for _ in range(rows_batch * rows_heads * 3)]
        given = torch.tensor(ends, dtype=torch.int32).view(rows_batch, rows_heads, 3, slots, 2)
        found = within_true(Rows(given[..., 0], given[..., 1], length), holds)
        assert found.lo.dtype == found.hi.dtype == torch.int32
        for b, h, row in product(range(max(batch, rows_batch)), range(max(heads, rows_heads)), range(3)):
            wanted = []
            for lo, hi in given[min(b, rows_batch - 1), min(h, rows_heads - 1), row].tolist():
                kept = [key for key in range(lo, hi) if holds[min(b, batch - 1), min(h, heads - 1), key]]
                wanted += [[kept[0], kept[-1] + 1]] if kept else []
            assert found.bounds[b, h, row].tolist() == wanted + [[length, length]] * (found.slots - len(wanted))
