"""Masks that differ in their tensors alone have one form: it is found, what is worked out of it is shared, and no data is."""

from __future__ import annotations

import gc
import pickle
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any
from weakref import WeakValueDictionary

import pytest
import torch
from torch import Tensor

import flexmask as fm
from flexmask import kv, minimum, q
from flexmask.errors import LoweringError
from flexmask.expr import form as forms
from flexmask.expr import node
from flexmask.expr.tables import TensorTable
from flexmask.intervals import solve
from flexmask.intervals.bind import bind
from flexmask.intervals.columns import ValueRuns
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
    """Forms that other tests made are not found."""
    made: WeakValueDictionary[str, Any] = WeakValueDictionary()
    monkeypatch.setattr(forms, "MADE", forms.Kept(4096))
    monkeypatch.setattr(forms, "FORMS", made)
    monkeypatch.setattr(node, "FORMS", made)
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


def test_masks_that_differ_in_values_and_sizes_have_one_form() -> None:
    lengths = torch.tensor([3])
    assert padded(lengths).form is padded(torch.tensor([3, 4])).form
    assert padded(lengths).form is not padded(lengths.int()).form
    assert padded(lengths).form is not (fm.sliding_window(size=5) & fm.key_padding(lengths)).form
    assert padded(lengths) == padded(lengths)
    assert padded(lengths) != padded(lengths.clone())


def test_one_tensor_is_one_slot() -> None:
    ids, lengths = torch.tensor([0] * 5 + [1] * 7), torch.tensor([3])
    for mask, tensors in (
        (by_ids(ids) & fm.key_padding(lengths), [ids, lengths]),
        (fm.key_padding(lengths) | by_ids(ids) | fm.query_padding(lengths), [lengths, ids]),
        (by_ids(ids) & fm.full(), [ids]),
        (fm.key_padding(lengths) & (by_ids(ids) ^ by_ids(ids)), []),
        ((fm.key_padding(lengths) | fm.document(ids)) & fm.document(ids), [ids]),
    ):
        assert [id(tensor) for tensor in mask.tensors] == [id(tensor) for tensor in tensors]
    assert (by_ids(ids) & fm.document(ids.clone())).form is not (by_ids(ids) & fm.document(ids)).form


def test_parts_of_a_mask_have_their_own_data() -> None:
    ids, lengths = torch.tensor([0] * 5 + [1] * 7), torch.tensor([3])
    mask = fm.causal() & fm.document(ids) & fm.key_padding(lengths)
    _, of_ids, of_lengths = mask.operands  # type: ignore[attr-defined]
    for part, made, tensor in ((of_ids, fm.document(ids), ids), (of_lengths, fm.key_padding(lengths), lengths)):
        assert part == made
        assert part.form is made.form
        assert [id(own) for own in part.tensors] == [id(tensor)]
        assert part.dense(LENGTH).tolist() == made.dense(LENGTH).tolist()
    assert (of_lengths & of_ids).form is (fm.key_padding(lengths) & fm.document(ids)).form


def test_forms_of_pickled_masks_are_found() -> None:
    mask = by_ids(torch.tensor([0] * 5 + [1] * 7))
    assert pickle.loads(pickle.dumps(mask)).form is mask.form
    assert pickle.loads(pickle.dumps(fm.causal())) is fm.causal()


def test_threads_make_one_form() -> None:
    start = Barrier(8)

    def made(_: int) -> list[fm.Mask]:
        start.wait(60)
        return [(fm.sliding_window(size=7000 + n) & fm.document(torch.zeros(4, dtype=torch.long))).form for n in range(20)]

    with ThreadPoolExecutor(8) as threads:
        first, *others = threads.map(made, range(8))
    assert all(one is other for found in others for one, other in zip(first, found, strict=True))


def test_named_masks_that_read_sizes_are_made_of_their_data() -> None:
    """A definition that takes another way by a size is called for each tensor; one that asks how many axes there are is not."""
    calls: list[int] = []

    def by_size(ids: Any) -> fm.Mask:
        calls.append(1)
        return (kv <= q) & (q - kv < int(ids.shape[0]))

    def by_axes(ids: Any) -> fm.Mask:
        calls.append(1)
        return q >= 0 if len(ids.shape) > 1 else kv < fm.minimum(ids[0], LENGTH)

    try:
        make: Any = named(by_size)
        for size in (1, 4, 1):
            table = oracle.table_of(oracle.sliding_window(size=size), LENGTH, LENGTH)
            assert make(torch.zeros(size, dtype=torch.long)).dense(LENGTH).tolist() == table
        assert len(calls) > 3
        calls.clear()
        make = named(by_axes)
        for length in (1, 4, 5):
            assert make(torch.tensor([length])).dense(1, LENGTH).sum() == length
        assert len(calls) == 1
    finally:
        withdraw(["by_size", "by_axes"])


def test_shapes_are_compared_by_their_axes_where_those_decide_and_else_by_the_data() -> None:
    calls: list[int] = []

    def of_scalar(size: Any) -> fm.Mask:
        calls.append(1)
        return kv < minimum(size[()] if size.shape == () and size.shape != (1,) else size[0], LENGTH)

    def of_two(starts: Any) -> fm.Mask:
        if starts.shape != (2,):
            raise ValueError(f"of two, not {starts.shape}")
        return kv >= minimum(starts[0], LENGTH)

    try:
        make: Any = named(of_scalar)
        for size in (1, 4, 5):
            assert make(torch.tensor(size)).dense(1, LENGTH).sum() == size
        assert len(calls) == 1
        make = named(of_two)
        for start in (3, 5):
            assert make(torch.tensor([start, 7])).dense(1, LENGTH).sum() == LENGTH - start
    finally:
        withdraw(["of_scalar", "of_two"])


def test_a_definition_with_data_of_its_own() -> None:
    own = torch.tensor([2])

    def with_own(lengths: Any) -> fm.Mask:
        return (kv < fm.table(own)[0]) | (kv == fm.minimum(lengths[0], LENGTH))

    try:
        make: Any = named(with_own)
        for length in (4, 6):
            given = torch.tensor([length])
            assert make(given).dense(1, LENGTH)[0, 0, 0].nonzero().flatten().tolist() == [0, 1, length]
            assert [id(tensor) for tensor in make(given).tensors] == [id(given), id(own)]
    finally:
        withdraw(["with_own"])


def test_messages_are_those_of_the_mask() -> None:
    for name in ("first", "second"):
        mask = fm.parse(f"kv < {name}[q]").bind(**{name: torch.zeros(8, dtype=torch.long)})
        with pytest.raises(LoweringError, match=f"{name}: int64"):
            mask.dense(9)


def test_data_that_may_be_longer_has_another_form() -> None:
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
            assert mask.form is mask
            gone.append(weakref.ref(mask))
            del mask
        assert [ref() is None for ref in gone] == [False, True]  # the first has no data: its form is kept for the next time
    finally:
        gc.enable()


def test_the_number_of_forms_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "MADE", forms.Kept(100))
    before = len(forms.FORMS)
    gone = weakref.ref(fm.sliding_window(size=10_000))
    assert gone() is fm.sliding_window(size=10_000)
    for size in range(1, 700):
        fm.sliding_window(size=size)
    assert len(forms.MADE) <= 202
    gc.collect()
    assert gone() is None
    assert len(forms.FORMS) < before + 400


def test_digests_tell_forms_apart() -> None:
    """Graphs are found by them, also in another process."""
    ids = torch.tensor([0] * 5 + [1] * 7)
    masks = [
        fm.causal() & fm.document(ids),
        fm.document(ids) & fm.causal(),
        fm.causal() & fm.document(ids.int()),
        fm.causal() & fm.document(fm.table(ids, "ids")),
        fm.causal() & fm.document(lengths=ids),
        fm.causal() & fm.document(list(ids)),
        fm.causal(offset=1) & fm.document(ids),
        fm.from_mask_mod(lambda b, h, q, kv: torch.sin(ids[q] - ids[kv]) > 0),
        fm.from_mask_mod(lambda b, h, q, kv: torch.cos(ids[q] - ids[kv]) > 0),
    ]
    assert len({mask.form.digest for mask in masks}) == len(masks)
    assert fm.causal().digest == "bd4265afa4430ebee9b5d8c4b9ddb0b0"


def test_functions_without_a_name_have_numbers_of_their_own() -> None:
    def kept() -> None: ...

    assert len({forms.name_of_value(lambda: 0), forms.name_of_value(kept), forms.name_of_value(lambda: 1)}) == 3
    assert forms.name_of_value(kept) == forms.name_of_value(kept)
    assert forms.name_of_value(torch.sin) == forms.name_of_value(torch.sin)


def test_a_digest_takes_time_in_the_number_of_nodes() -> None:
    def doubled(data: Tensor) -> fm.Mask:
        index = q - kv
        for _ in range(45):
            index = minimum(index + q, index + kv)
        return index < fm.table(data)[q]

    one, two = (doubled(torch.arange(8)) for _ in range(2))
    assert one.form is two.form
    assert one.form.digest != doubled(torch.arange(8)).substitute(q=q + 1).form.digest
