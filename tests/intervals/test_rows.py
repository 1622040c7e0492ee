"""Rows as sets of keys, against tables of bools: with few and with many slots, where a host sync is free and where it is not."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import product
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from flexmask.intervals import Rows
from flexmask.intervals.rows import FEW
from tests.support import oracle
from tests.support.exhaustive import one_in
from tests.support.lowerings import assert_canonical, own_cells_of
from tests.support.paths import path
from tests.support.strategies import Shape

KV_LEN = 40
SHAPES = [(1, 1, 1), (1, 1, 5), (2, 1, 5), (1, 3, 1), (2, 3, 5)]
#: In which an axis has the size of two slots.
TWO = 1, 2, 2
#: How many intervals the rows of a table have, of which each row has any number up to it.
INTERVALS = [0, 1, 2, 3, 12]

each_path = pytest.mark.parametrize("on_cpu", [True, False], ids=["on the CPU", "where a host sync costs"])
each_count = pytest.mark.parametrize("most", INTERVALS)


def tables(most: int, shapes: list[tuple[int, int, int]] = SHAPES) -> Iterator[Tensor]:
    """Tables bool[B, H, Q, KV] of several shapes; no row has more intervals than ``most``, and one has as many."""
    random = Random(most)
    for shape in shapes:
        table = torch.zeros((*shape, KV_LEN), dtype=torch.bool)
        for number, row in enumerate(table.view(-1, KV_LEN)):
            ends = sorted(random.sample(range(KV_LEN + 1), 2 * (random.randint(0, most) if number else most)))
            for lo, hi in zip(ends[::2], ends[1::2], strict=True):
                row[lo:hi] = True
        yield table


def rows_of(table: Tensor, *, room: int = 0) -> Rows:
    """The rows of a table, with unused slots more than it needs."""
    lines = [list(oracle.intervals_of(row)) for row in table.flatten(0, 2).tolist()]
    slots = max(1, *map(len, lines)) + room
    bounds = [line + [(KV_LEN, KV_LEN)] * (slots - len(line)) for line in lines]
    lo, hi = torch.tensor(bounds, dtype=torch.int32).view(*table.shape[:3], slots, 2).unbind(-1)
    return Rows(lo.contiguous(), hi.contiguous(), KV_LEN)


def check(rows: Rows, expected: Tensor, *, on_cpu: bool, slots: int) -> None:
    """Rows are canonical, hold the keys of a table, and have no slots that can be known to be unused."""
    assert torch.equal(own_cells_of(rows), expected)
    assert_canonical(rows, Shape(expected.shape[2], KV_LEN, batch=expected.shape[0], heads=expected.shape[1]))
    used = rows_of(expected).slots
    assert rows.slots == used if on_cpu else rows.slots <= max(used, min(slots, FEW))


def on_path(on_cpu: bool) -> Any:
    return nullcontext() if on_cpu else path("host syncs avoided")


OPERATORS: dict[str, tuple[Callable[[Any, Any], Any], Callable[[int, int], int]]] = {
    "and": (lambda a, b: a & b, lambda a, b: a + b - 1),
    "or": (lambda a, b: a | b, lambda a, b: a + b),
    "minus": (lambda a, b: a & ~b, lambda a, b: a + b),
}


@each_path
@pytest.mark.parametrize(("left", "right", "name"), one_in(3, INTERVALS, INTERVALS, OPERATORS))
def test_operators(left: int, right: int, name: str, on_cpu: bool) -> None:
    operator, slots = OPERATORS[name]
    pairs = [*product(tables(left), tables(right)), *zip(tables(left, [TWO]), tables(right, [TWO]), strict=True)]
    for first, second in pairs:
        a, b = rows_of(first), rows_of(second.flip(-1))
        with on_path(on_cpu):
            found = a - b if name == "minus" else operator(a, b)
        check(found, operator(first, second.flip(-1)), on_cpu=on_cpu, slots=slots(a.slots, b.slots))


@each_path
@each_count
def test_complement(most: int, on_cpu: bool) -> None:
    for table in tables(most):
        rows = rows_of(table)
        with on_path(on_cpu):
            check(~rows, ~table, on_cpu=on_cpu, slots=rows.slots + 1)


@each_path
@pytest.mark.parametrize("counts", [(1,), (0, 1, 2), (1, 1, 1), (3, 12, 1)], ids=str)
def test_union_of_several(counts: tuple[int, ...], on_cpu: bool) -> None:
    for shapes in product(SHAPES, repeat=len(counts)):
        several = [next(tables(most, [shape])) for most, shape in zip(counts, shapes, strict=True)]
        parts = [rows_of(table) for table in several]
        expected = several[0]
        for table in several[1:]:
            expected = expected | table
        with on_path(on_cpu):
            check(Rows.union(parts), expected, on_cpu=on_cpu, slots=sum(part.slots for part in parts))


@pytest.mark.parametrize("counts", [(3,), (1, 2), (2, 1), tuple(INTERVALS)], ids=str)
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_stacked(axis: int, counts: tuple[int, ...]) -> None:
    several = [next(tables(most, [(2, 3, 5)])) for most in counts]
    found = Rows.stacked([rows_of(table) for table in several], axis)
    check(found, torch.cat(several, axis), on_cpu=True, slots=max(counts))


@each_count
def test_of_each_row(most: int) -> None:
    """What is read of rows that have a slot more than they need."""
    for table in tables(most):
        rows = rows_of(table, room=1)
        assert torch.equal(rows.counts(), table.sum(-1))
        assert torch.equal(rows.holds(torch.arange(KV_LEN)), table)
        assert torch.equal(rows.holds(torch.tensor([3])), table[..., 3:4])
        between = (table.cumsum(-1) > 0) & (table.flip(-1).cumsum(-1).flip(-1) > 0)
        check(rows.hull(), between, on_cpu=True, slots=1)
        wide = rows.expand(2, 3, 5)
        assert wide.lo.shape == wide.hi.shape == (2, 3, 5, rows.slots)
        assert torch.equal(own_cells_of(wide), table.expand(2, 3, 5, KV_LEN))
        for head in range(3):
            own = rows.of_head(head, 2, 5)
            assert own.lo.shape == own.hi.shape == (2, 1, 5, rows.slots)
            assert torch.equal(own_cells_of(own), table.expand(2, 3, 5, KV_LEN)[:, head, None])


@each_path
@each_count
def test_empty_intervals_between_others(most: int, on_cpu: bool) -> None:
    for table in tables(most):
        full = rows_of(table, room=2)
        emptied = torch.arange(full.slots) % 3 == 1
        rows = Rows(full.lo, torch.where(emptied, full.lo, full.hi), KV_LEN)
        with on_path(on_cpu):
            check(rows.compact(), own_cells_of(rows), on_cpu=on_cpu, slots=rows.slots)
        kept = Rows(torch.where(emptied, 0, full.lo), torch.where(emptied, 0, full.hi), KV_LEN)
        with on_path(on_cpu):
            check(kept.compact(), own_cells_of(rows), on_cpu=on_cpu, slots=rows.slots)


@pytest.mark.parametrize("slots", [2, FEW, FEW + 1])
def test_unused_slots_are_kept_where_counting_them_forces_a_host_sync(slots: int) -> None:
    rows = rows_of(next(tables(1)), room=slots - 1)
    assert rows.compact().slots == 1
    with on_path(False):
        assert rows.compact().slots == (slots if slots <= FEW else 1)


@each_path
@each_count
def test_intervals_that_touch(most: int, on_cpu: bool) -> None:
    """Each interval in two halves, of which the first is empty where it has one key."""
    for table in tables(most):
        rows = rows_of(table)
        middle = (rows.lo + rows.hi) // 2
        halves = Rows(torch.stack((rows.lo, middle), -1).flatten(-2), torch.stack((middle, rows.hi), -1).flatten(-2), KV_LEN)
        with on_path(on_cpu):
            check(halves.joined(), table, on_cpu=on_cpu, slots=halves.slots)


def test_rows_of_few_values() -> None:
    device = torch.device("cpu")
    assert Rows.everything(KV_LEN, torch.device("meta")).lo.is_meta
    assert Rows.nothing(KV_LEN, torch.device("meta")).lo.is_meta
    check(Rows.everything(KV_LEN, device), torch.ones(1, 1, 1, KV_LEN, dtype=torch.bool), on_cpu=True, slots=1)
    check(Rows.nothing(KV_LEN, device), torch.zeros(1, 1, 1, KV_LEN, dtype=torch.bool), on_cpu=True, slots=1)
    seen = torch.tensor([[[True, False, True]]])
    check(Rows.where(seen, KV_LEN), seen.unsqueeze(-1).expand(1, 1, 3, KV_LEN), on_cpu=True, slots=1)
    start, stop = torch.tensor([[[0, 3, 7, 39, 40]]]), torch.tensor([[[1, 40, 7, 2, 40]], [[0, 4, 8, 40, 0]]])
    keys = torch.arange(KV_LEN)
    inside = (keys >= start.unsqueeze(-1)) & (keys < stop.unsqueeze(-1))
    check(Rows.spans(start.expand_as(stop), stop, KV_LEN), inside, on_cpu=True, slots=1)
