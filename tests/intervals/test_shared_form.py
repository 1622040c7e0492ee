"""What is worked out about a mask serves all masks that differ in their tensors alone, and none of their values."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import flexmask as fm
from flexmask import kv, minimum, q
from flexmask.errors import LoweringError
from flexmask.expr.tables import TensorTable
from flexmask.intervals import shared_form as forms
from flexmask.intervals import solve
from flexmask.intervals.bind import bind
from flexmask.intervals.runs import ValueRuns
from flexmask.intervals.shared_form import shared_form
from flexmask.registry import named, withdraw
from tests.support import oracle

LENGTH = 12


class Solved:
    """Counts the comparisons that are solved."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, original = 0, solve._separated

        def counting(node: Any) -> Any:
            self.count += 1
            return original(node)

        monkeypatch.setattr(solve, "_separated", counting)


@pytest.fixture
def solved(monkeypatch: pytest.MonkeyPatch) -> Solved:
    monkeypatch.setattr(forms, "_FORMS", type(forms._FORMS)())
    return Solved(monkeypatch)


def packed(ends: Tensor) -> fm.Mask:
    return fm.causal() & fm.document(cu_seqlens=ends)


def padded(lengths: Tensor) -> fm.Mask:
    return fm.sliding_window(size=4) & fm.key_padding(lengths)


def by_ids(ids: Tensor) -> fm.Mask:
    return fm.causal() & fm.document(ids)


def documents_of(*lengths: int) -> oracle.Predicate:
    return oracle.both(oracle.causal(), oracle.document(oracle.ids_of_lengths(lengths, LENGTH)))


#: How a mask is made of a tensor, and some tensors with what they mean.
MADE: list[tuple[Callable[[Tensor], fm.Mask], list[tuple[Tensor, oracle.Predicate]]]] = [
    (
        packed,
        [(torch.tensor([0, 5, 12]), documents_of(5, 7)), (torch.tensor([0, 2, 12]), documents_of(2, 10))],
    ),
    (
        padded,
        [(torch.tensor([n]), oracle.both(oracle.sliding_window(size=4), oracle.key_padding([n]))) for n in (7, 12)],
    ),
    (
        by_ids,
        [
            (torch.tensor(ids), oracle.both(oracle.causal(), oracle.document(ids)))
            for ids in ([0] * 5 + [1] * 7, [0, 1, 2, 0, 1, 2] * 2, [3] * 12)
        ],
    ),
]


@pytest.mark.parametrize(("make", "cases"), MADE, ids=["cu_seqlens", "lengths", "ids"])
def test_masks_made_anew_are_solved_once_and_have_their_own_data(
    make: Callable[[Tensor], fm.Mask], cases: list[tuple[Tensor, oracle.Predicate]], solved: Solved
) -> None:
    masks = [(make(data), allowed) for data, allowed in cases]
    first, allowed = masks[0]
    assert first.dense(LENGTH).tolist() == oracle.table_of(allowed, LENGTH, LENGTH)
    first.block_mask(LENGTH)
    at_first = solved.count
    assert at_first
    for mask, allowed in [*masks, *reversed(masks)]:
        assert mask.rows(LENGTH).lower.holds(torch.arange(LENGTH)).tolist() == oracle.table_of(allowed, LENGTH, LENGTH)
        assert mask.dense(LENGTH).tolist() == oracle.table_of(allowed, LENGTH, LENGTH)
        mask.block_mask(LENGTH)
    if make is not by_ids:  # runs of equal values are kept with the mask, so that it is analyzed for itself
        assert solved.count == at_first


def test_definitions_that_depend_on_values_are_not_shared() -> None:
    """A named mask may read its data when it is made, so equal names and shapes do not mean equal masks."""

    def reads_its_data(lengths: Any) -> fm.Mask:
        return (q - kv < int(lengths.to_tensor().max())) & (kv <= q)

    make: Any = named(reads_its_data)
    try:
        for size in (1, 4):
            mask, table = make(torch.tensor([size])), oracle.table_of(oracle.sliding_window(size=size), LENGTH, LENGTH)
            for found in (
                mask.dense(LENGTH),
                mask.rows(LENGTH).lower.holds(torch.arange(LENGTH)),
                fm.plan(mask, LENGTH)().dense(),
            ):
                assert found.tolist() == table
    finally:
        withdraw(["reads_its_data"])


def test_masks_with_a_part_in_common_find_its_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Tensor] = []
    original = ValueRuns.of

    def counting(values: Tensor, n: int) -> ValueRuns:
        found.append(values)
        return original(values, n)

    monkeypatch.setattr(ValueRuns, "of", counting)
    part = fm.document(torch.tensor([0] * 5 + [1] * 7))
    for whole in (fm.causal() & part, fm.sliding_window(size=3) & part, fm.causal() & part):
        whole.rows(LENGTH)
    assert len(found) == 1


def test_nothing_as_long_as_the_keys_is_kept_with_a_form() -> None:
    for number in range(2, 6):
        ((kv % number) == (q % number)).rows(1, 3001, q_offset=3000)
        nested = fm.parse("per_document(document(lengths=m), lengths=n)", m=torch.tensor([1, 3000]), n=torch.tensor([3001]))
        nested.rows(1, 3001, q_offset=3000)
        crossed = fm.masks.cross_document(q_cu_seqlens=torch.tensor([0, 1]), kv_cu_seqlens=torch.tensor([0, 3001]))
        crossed.rows(1, 3001)
    del nested, crossed
    gc.collect()
    assert not [tensor for tensor in gc.get_objects() if type(tensor) is Tensor and tensor.numel() in (3000, 3001)]


def test_data_that_changes_in_place_is_read_again() -> None:
    ids = torch.tensor([0] * 5 + [1] * 7)
    mask, other = by_ids(ids), by_ids(torch.tensor([2] * 12))
    for lengths in ((5, 7), (1, 11)):
        ids[:] = torch.tensor(oracle.ids_of_lengths(lengths, LENGTH))
        for one, allowed in ((mask, documents_of(*lengths)), (other, documents_of(12))):
            assert one.rows(LENGTH).lower.holds(torch.arange(LENGTH)).tolist() == oracle.table_of(allowed, LENGTH, LENGTH)


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (torch.tensor([3]), torch.tensor([3, 4])),
        (torch.tensor([3]), torch.tensor([3], dtype=torch.int32)),
    ],
    ids=["shape", "dtype"],
)
def test_other_shapes_and_dtypes_have_another_form(one: Tensor, two: Tensor) -> None:
    assert shared_form(padded(one)) is shared_form(padded(one.clone()))
    assert shared_form(padded(one)) is not shared_form(padded(two))


def test_messages_are_those_of_the_mask() -> None:
    for name in ("first", "second"):
        mask = fm.parse(f"kv < {name}[q]").bind(**{name: torch.zeros(8, dtype=torch.long)})
        with pytest.raises(LoweringError, match=f"{name}: int64"):
            mask.dense(9)


def test_data_that_may_be_longer_is_another_structure() -> None:
    """Data that a function captures may have more values than positions; data of a mask may not."""
    data = torch.arange(9) % 2 == 0
    captured = TensorTable(data, may_be_longer=True)[kv] != 0
    assert captured.dense(8).shape == (1, 1, 8, 8)
    with pytest.raises(LoweringError, match="9 values"):
        (fm.table(data)[kv] != 0).dense(8)
    assert fm.plan(captured, 8)().dense().tolist() == captured.dense(8).tolist()
    with pytest.raises(LoweringError, match="9 values"):
        fm.plan(fm.table(data)[kv] != 0, 8)()


def test_no_data_is_kept_with_a_form() -> None:
    data = torch.tensor([0, 5, 12])
    gone = weakref.ref(data)
    packed(data).dense(LENGTH)
    del data
    gc.collect()
    assert gone() is None


def test_a_mask_that_is_its_own_form_is_no_cycle() -> None:
    masks = [fm.document([0] * 5 + [1] * 7), fm.causal(offset=7)]
    gc.collect()
    gc.disable()
    try:
        gone = []
        while masks:
            mask = masks.pop()
            bind(mask, LENGTH)
            assert shared_form(mask) is mask
            gone.append(weakref.ref(mask))
            del mask
        assert [ref() is None for ref in gone] == [False, True]  # the first has no data: it is kept for the next time
    finally:
        gc.enable()


def test_the_number_of_forms_is_bounded(monkeypatch: pytest.MonkeyPatch, solved: Solved) -> None:
    monkeypatch.setattr(forms, "MAX_FORMS", 3)
    for size in range(1, 9):
        fm.sliding_window(size=size).rows(4)
    assert len(forms._FORMS) == 3
    before = solved.count
    fm.sliding_window(size=8).rows(4)
    assert solved.count == before
    fm.sliding_window(size=1).rows(4)
    assert solved.count > before


def test_a_structure_takes_time_in_the_number_of_nodes() -> None:
    def doubled(data: Tensor) -> fm.Mask:
        index = q - kv
        for _ in range(45):
            index = minimum(index + q, index + kv)
        return index < fm.table(data)[q]

    one, two = (doubled(torch.arange(8)) for _ in range(2))
    assert one.structure == two.structure
    assert one.structure != doubled(torch.arange(8)).substitute(q=q + 1).structure
