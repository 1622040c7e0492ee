"""What is checked, and what is promised, between a mask and the lengths that it is lowered at."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch

import flexmask as fm
from flexmask import attention, b, h, kv, q
from flexmask.backends.tiling import MAX_TILINGS
from flexmask.errors import ExpressionError, LoweringError, OperandError
from flexmask.expr.data import along
from flexmask.expr.packing import document_ids
from flexmask.expr.tables import Literal
from flexmask.intervals.bind import bind
from flexmask.intervals.bounds import analyze
from flexmask.tracing.trace import as_mask
from tests.support import oracle


@pytest.mark.parametrize(
    "mask",
    [
        fm.cross_length([6], q_lengths=[6]),
        fm.key_padding([6]) & fm.query_padding([6]),
        fm.prefix_lm([6]) & fm.key_padding([6]),
        fm.query_padding(torch.tensor([6])) & fm.key_padding(torch.tensor([6])),
    ],
)
def test_data_used_twice_is_checked_for_each_use(mask: fm.Mask) -> None:
    with pytest.raises(LoweringError, match="kv_len = 4"):
        mask.dense(8, 4)


def test_sequences_with_very_different_numbers_of_documents_stay_exact() -> None:
    ids = torch.stack((torch.zeros(400, dtype=torch.long), torch.arange(400) // 4))
    mask = fm.causal() & fm.document(ids)
    rows = mask.rows(400)
    assert rows.exact
    assert rows.lower.slots == 1
    assert torch.equal(rows.lower.holds(torch.arange(400)), mask.dense(400))


def test_overflow_is_refused() -> None:
    with pytest.raises(LoweringError, match="beyond 64-bit"):
        (kv * 2**62 >= 0).dense(5)
    with pytest.raises(ExpressionError, match="64-bit"):
        _ = kv < 10**30
    with pytest.raises(OperandError, match="uint64"):
        fm.document(torch.zeros(3, dtype=torch.uint64))


def test_truth_values_count_as_numbers_at_an_offset_of_each_sequence() -> None:
    mask = fm.table([True, True, False])[q] + fm.table([True, True, True])[q] == 2
    rows = mask.rows(2, q_offset=torch.tensor([1]))
    assert rows.exact
    assert torch.equal(rows.lower.counts().flatten(), torch.tensor([2, 0]))
    assert torch.equal(mask.dense(2, q_offset=torch.tensor([1])).sum(-1).flatten(), torch.tensor([2, 0]))


def test_a_mask_mod_keeps_what_the_data_was() -> None:
    ids = torch.tensor([0, 0, 1, 1])
    mask = fm.document(ids)
    index = torch.arange(4)
    expected = mask.dense(4)[0, 0]
    closures = [mask.mask_mod(4, form="interval"), mask.mask_mod(4, form="expression")]
    ids.zero_()
    for closure in closures:
        assert torch.equal(closure(torch.tensor(0), torch.tensor(0), index[:, None], index[None, :]), expected)
    assert mask.dense(4).all()


def test_a_mask_of_one_sequence_serves_any_batch() -> None:
    mask = fm.key_padding([5]) & ((q - kv) % 2 == 0)
    closure = mask.mask_mod(8, form="expression")
    index = torch.arange(8)
    found = closure(torch.arange(3).view(3, 1, 1), torch.tensor(0), index[:, None], index[None, :])
    assert torch.equal(found, mask.dense(8)[0].expand(3, 8, 8))


def test_lengths_are_indices_too() -> None:
    assert (fm.table([1, 2, 3])[fm.q_len] == kv).dense(2, 5)[0, 0, 0].tolist() == [False, False, False, True, False]
    with pytest.raises(LoweringError, match="3 values"):
        (fm.table([1, 2, 3])[fm.q_len] == kv).dense(3, 5)


def test_an_index_is_judged_by_its_values() -> None:
    """Its terms alone would allow -1 to 3."""
    index = fm.table([0, 1, 2, 3])[kv] - fm.table([0, 1, 1, 1])[kv]
    assert (fm.table([5, 6, 7])[index] == 6).dense(1, 4).flatten().tolist() == [False, False, True, False]
    with pytest.raises(LoweringError, match="ranges from -1 to 1"):
        (fm.table([5, 6, 7])[index - 1] == 6).dense(1, 4)


@pytest.mark.parametrize("divisor", [kv, 2 - kv, fm.table([3, 2, 1, 0])[kv]], ids=["first", "inside", "last"])
def test_a_divisor_that_may_be_0_is_refused(divisor: fm.expr.Index) -> None:
    for mask in (q // divisor <= 1, q % divisor <= 1):
        with pytest.raises(LoweringError, match="may divide by 0"):
            mask.dense(4)


def test_a_longer_table_of_queries_is_refused_without_an_offset() -> None:
    mask = fm.query_padding(keep=[True] * 10)
    with pytest.raises(LoweringError, match="10 values along q, but q_len is 4"):
        mask.dense(4)
    assert mask.dense(4, q_offset=6).all()
    assert fm.document([0, 0, 1, 1]).dense(2, 4).sum() == 4


def test_shared_parts_are_visited_once() -> None:
    index: fm.expr.Index = q
    for _ in range(40):
        index = fm.minimum(index + index, index + 3)
    mask = index <= kv
    assert mask.params == ()
    assert len(mask.walk()) < 1000


def test_a_dense_mask_of_one_sequence_serves_any_batch() -> None:
    cells = fm.causal().dense(5)
    query = torch.randn(3, 2, 5, 4)
    torch.testing.assert_close(attention(query, query, query, fm.from_dense(cells)), attention(query, query, query, "causal"))


def test_numpy_scalars_are_integers() -> None:
    one: Any = np.int64(1)
    four: Any = np.int32(4)
    assert fm.causal(offset=one) == fm.causal(offset=1)
    assert fm.sliding_window(size=four) == fm.sliding_window(size=4)
    assert (q - kv < fm.param("w")).bind(w=np.int64(3)) == (q - kv < 3)
    with pytest.raises(OperandError, match="ndarray"):
        np.ones((4, 4), bool) & fm.causal()


def test_parameters_inside_derived_tables_are_bound() -> None:
    mask = fm.parse("document_ids(lengths=n)[q] == document_ids(lengths=n)[kv]").bind(n=[3, 4])
    assert mask.params == ()
    assert torch.equal(mask.dense(7), fm.document(lengths=[3, 4]).dense(7))
    assert fm.parse("sliding_window(size=w)").bind(w=4).dense(6).equal(fm.sliding_window(size=4).dense(6))


def test_tables_compare_by_value() -> None:
    assert fm.table([1, 2]) == fm.table([1, 2])
    assert fm.table([1, 2]) != fm.table([1, 3])
    assert len({fm.table([1, 2]), fm.table([1, 2])}) == 1


@pytest.mark.parametrize("device", ["foo", "cuda:99"])
def test_unknown_devices_are_refused(device: str) -> None:
    with pytest.raises(LoweringError, match=device):
        fm.causal().dense(4, device=device)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.int32])
def test_an_offset_of_any_integer_dtype(dtype: torch.dtype) -> None:
    offset = torch.tensor([0, 3], dtype=dtype)
    assert torch.equal(fm.causal().dense(2, 6, q_offset=offset), fm.causal().dense(2, 6, q_offset=offset.long()))
    assert torch.equal(fm.plan(fm.causal(), 2, 6)(q_offset=offset).dense(), fm.causal().dense(2, 6, q_offset=offset.long()))


def test_an_empty_offset_is_refused() -> None:
    with pytest.raises(LoweringError, match="q_offset"):
        fm.causal().dense(4, q_offset=torch.zeros(0, dtype=torch.long))


NO_LIMIT = 2**63 - 1


@pytest.mark.parametrize(
    ("mask", "allowed"),
    [
        (kv <= fm.table([NO_LIMIT])[b], lambda q, kv: True),
        (kv > fm.table([NO_LIMIT])[b], lambda q, kv: False),
        (abs(q - kv) <= fm.table([NO_LIMIT])[b], lambda q, kv: True),
        (fm.causal(offset=fm.table(torch.tensor([NO_LIMIT]))[b]), lambda q, kv: True),
        (fm.sliding_window(left=NO_LIMIT, right=NO_LIMIT), lambda q, kv: True),
        (fm.sliding_window(left=1, right=fm.where(q < 2, NO_LIMIT, 0)), lambda q, kv: q - kv <= 1 and (q < 2 or kv <= q)),
        (fm.masks.global_window([True, False, False, False], left=0, right=NO_LIMIT), lambda q, kv: q == 0 or kv == 0 or kv >= q),
        (kv > q + -(2**63), lambda q, kv: True),
        (fm.table([-NO_LIMIT] * 4)[kv] < q, lambda q, kv: True),
    ],
    ids=lambda value: str(value) if isinstance(value, fm.Mask) else None,
)
def test_the_largest_integer_is_no_limit(mask: fm.Mask, allowed: Callable[[int, int], bool]) -> None:
    wanted = torch.tensor([[allowed(row, key) for key in range(4)] for row in range(4)])
    assert torch.equal(mask.dense(4)[0, 0], wanted)
    assert torch.equal(mask.block_mask(4, block_size=1).to_dense()[0, 0].bool(), wanted)
    assert torch.equal(mask.rows(4).lower.holds(torch.arange(4)).expand(1, 1, 4, 4)[0, 0], wanted)


@pytest.mark.parametrize(
    "mask",
    [
        kv <= q + fm.table(torch.tensor([NO_LIMIT]))[b],
        fm.causal(offset=-NO_LIMIT - 1) & (kv - fm.table([-NO_LIMIT])[b] < q),
        abs(fm.table([-NO_LIMIT - 1, 0, 0, 0])[q]) >= kv,
        fm.where(q < 2, 2**62, 0) + fm.where(kv < 2, 2**62, 0) > 0,
        fm.table([NO_LIMIT, 0, 0, 0])[kv] + fm.table([1, 1, 1, 1])[kv] > q,
    ],
    ids=str,
)
def test_data_that_overflows_is_refused(mask: fm.Mask) -> None:
    for lower in (mask.dense, mask.block_mask, mask.rows):
        with pytest.raises(LoweringError, match="beyond 64-bit"):
            lower(4)


def test_sums_that_stay_within_64_bits_are_not_refused() -> None:
    """The extents of the two tables allow an overflow; their values do not come together so."""
    great, small = fm.table([NO_LIMIT, 0, 0, -NO_LIMIT - 1]), fm.table([0, 5, -5, 0])
    mask = kv <= great[q] + small[q]
    assert mask.dense(4).sum((0, 1, 3)).tolist() == [4, 4, 0, 0]
    assert mask.stats(4).visible == 8


def test_data_that_is_only_compared_may_be_large() -> None:
    assert fm.document([NO_LIMIT, NO_LIMIT, 0, 0]).dense(4).sum() == 8
    assert fm.document([NO_LIMIT, NO_LIMIT, 0, 0]).block_mask(4, block_size=1).to_dense().sum() == 8
    assert (kv <= fm.table([2**60])[b]).block_mask(4, block_size=1).to_dense().sum() == 16


def test_a_block_may_be_larger_than_the_mask() -> None:
    assert fm.causal().block_mask(16, block_size=2**29).kv_num_blocks.tolist() == [[[1]]]
    assert (fm.causal() & ((q - kv) % 3 == 0)).block_mask(16, block_size=2**20).kv_num_blocks.tolist() == [[[1]]]
    with pytest.raises(LoweringError, match="block_size"):
        fm.causal().block_mask(16, block_size=2**40)


def test_truth_values_are_no_lengths() -> None:
    with pytest.raises(OperandError, match="q_len must be an integer"):
        fm.causal().dense(True)
    with pytest.raises(OperandError, match="q_offset"):
        fm.causal().dense(4, q_offset=True)


def test_one_sequence_is_not_every_sequence() -> None:
    with pytest.raises(LoweringError, match=r"two sizes of batch.*has no batch axis"):
        fm.document(lengths=[[2, 2]]).dense(4, batch=3)
    assert fm.document(lengths=[2, 2]).dense(4, batch=3).shape == (1, 1, 4, 4)


# ---------------------------------------------------------------- what is kept with a text

TEXTS = [
    "causal & document(lengths=[5, 4, 3])",
    "per_document(causal, ids=[0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]) & key_padding(lengths=[9, 12])",
    "key_padding(keep=[[True, True, False, True, True, True, False, True, True, True, True, True]])",
]


def tensors() -> set[int]:
    return {id(found) for found in gc.get_objects() if type(found) is torch.Tensor}


def test_a_text_keeps_no_tensors_alive() -> None:
    """Texts are kept for the next time; what their data becomes on a device is not."""
    for text in TEXTS:
        as_mask(text)
    gc.collect()
    before = tensors()
    for text in TEXTS:
        for device in (torch.device("cpu"), torch.device("meta")):
            mask = as_mask(text) if device.type == "cpu" else as_mask(text, device=device)
            context = bind(mask, 12, device=device)
            if device.type == "cpu":
                analyze(context)
            gone = [weakref.ref(table) for table in (*context.tables.values(), *context.stops.values())]
            assert gone
            del mask, context
            gc.collect(0)
            assert [ref() for ref in gone] == [None] * len(gone), text
    gc.collect()
    assert tensors() <= before


def test_a_text_is_the_same_mask_each_time() -> None:
    for text in (*TEXTS, "causal & key_padding(n)"):
        assert as_mask(text) == as_mask(text) == fm.parse(text)
        assert as_mask(text, device=torch.device("cpu")) is as_mask(text, device=torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("text", TEXTS)
def test_a_text_keeps_no_memory_of_a_gpu(text: str) -> None:
    batch = fm.parse(text).dense(12).shape[0]
    query, x = torch.randn(batch, 1, 12, 16, device="cuda"), torch.randn(batch, 12, 16, device="cuda")
    layer = fm.MultiheadFlexAttention(16, 16, 2, device="cuda", backend="sdpa")
    with torch.no_grad():
        after = []
        for _ in range(MAX_TILINGS + 1):  # the tiles of the last calls are kept
            fm.attention(query, query, query, text, backend="sdpa")
            layer(x, text)
            gc.collect()
            after.append(torch.cuda.memory_allocated())
    assert after[-1] == after[-2]


# ---------------------------------------------------------------- documents that leave tokens out

UNCOVERED: list[tuple[str, dict[str, Any], str]] = [
    (
        "document(lengths=[3, 4]{padding})",
        {"q_len": 8},
        "lengths cover 7 of 8 tokens.*give lengths that cover all tokens, or padding=True",
    ),
    ("document(lengths=[[3, 4], [8, 0], [2, 2]]{padding})", {"q_len": 8}, "lengths of sequence 2 cover 4 of 8"),
    ("document(cu_seqlens=[0, 3, 7]{padding})", {"q_len": 8}, "cu_seqlens cover 7 of 8.*give cu_seqlens"),
    ("document(cu_seqlens=[[0, 3, 8], [0, 3, 7]]{padding})", {"q_len": 8}, "cu_seqlens of sequence 1 cover 7 of 8"),
    ("document(lengths=[3, 4]{padding})", {"q_len": 1, "kv_len": 8, "q_offset": 3}, "cover 7 of 8"),
    ("document(lengths=[3, 4]{padding})", {"q_len": 2, "kv_len": 7, "q_offset": 6}, "cover 7 of 8"),
    ("document(lengths=[3, 4]{padding})", {"q_len": 2, "kv_len": 7, "q_offset": torch.tensor([0, 6])}, "cover 7 of 8"),
    ("per_document(causal, lengths=[3, 4]{padding})", {"q_len": 8}, "cover 7 of 8"),
    ("shared_prefix(lengths=[3, 4], prefix_of=[0, 0]{padding})", {"q_len": 8}, "cover 7 of 8"),
    ("in_context(lengths=[3, 4], test_start=3{padding})", {"q_len": 8}, "cover 7 of 8"),
    ("cross_document(q_lengths=[2, 2], kv_lengths=[3, 4]{padding})", {"q_len": 5, "kv_len": 7}, "cover 4 of 5"),
    ("cross_document(q_lengths=[2, 2], kv_lengths=[3, 4]{padding})", {"q_len": 4, "kv_len": 9}, "cover 7 of 9"),
    ("coarse(document(lengths=[1, 2]{padding}), 4)", {"q_len": 13}, "cover 3 of 4"),
    ("document_ids(lengths=[3, 4]{padding})[kv // 2] == 0", {"q_len": 16}, "cover 7 of 8"),
]


@pytest.mark.parametrize("form", ["literal", "tensor"])
@pytest.mark.parametrize(
    ("text", "lowering", "message"), UNCOVERED, ids=[f"{text} {lowering}" for text, lowering, _ in UNCOVERED]
)
def test_documents_cover_all_tokens(text: str, lowering: dict[str, Any], message: str, form: str) -> None:
    mask = fm.parse(text.format(padding=""))
    if form == "tensor":
        mask = cast(fm.Mask, mask.replace(lambda node: fm.table(node.to_tensor()) if isinstance(node, Literal) else None))
    for lower in (mask.dense, mask.rows, mask.block_mask):
        with pytest.raises(LoweringError, match=message):
            lower(**lowering)


@pytest.mark.parametrize(
    ("text", "lowering"), [row[:2] for row in UNCOVERED], ids=[f"{text} {low}" for text, low, _ in UNCOVERED]
)
def test_what_documents_leave_out_is_padding_where_that_is_said(text: str, lowering: dict[str, Any]) -> None:
    mask = fm.parse(text.format(padding=", padding=True"))
    assert "padding=True" in str(mask)
    assert fm.parse(str(mask)) == mask
    assert mask.dense(**lowering).any()


def test_padding_behind_documents() -> None:
    """What the lengths leave out sees and is seen by nothing; data on another device is not read."""
    lengths = [[3, 4], [8, 0]]
    ids = [oracle.ids_of_lengths(row, 8) for row in lengths]
    found = fm.document(lengths=lengths, padding=True).dense(8)
    assert found.tolist() == oracle.table_of(oracle.document(ids), 8, 8, batch=2)
    assert fm.document(lengths=torch.tensor(lengths, device="meta")).rows(8, device="meta").upper.bounds.shape[:3] == (2, 1, 8)
    with pytest.raises(LoweringError, match="cover 7 of 8"):
        fm.document(lengths=[3, 4]).rows(8, device="meta")


IDS_OF_ROWS = [oracle.ids_of_lengths(row, 8) for row in ([3, 4], [8, 0], [0, 2])]
OF_LENGTHS = document_ids(lengths=[[3, 4], [8, 0], [0, 2]], padding=True)


@pytest.mark.parametrize(
    ("mask", "allowed"),
    [
        ((along(OF_LENGTHS, q) == along(OF_LENGTHS, kv)) & (along(OF_LENGTHS, q) >= 0), oracle.document(IDS_OF_ROWS)),
        ((along(OF_LENGTHS, q) >= 0) & (along(OF_LENGTHS, kv) == along(OF_LENGTHS, q)), oracle.document(IDS_OF_ROWS)),
        (
            along(OF_LENGTHS, q) == along(OF_LENGTHS, kv),  # the padding is like a document
            lambda b, h, q, kv, q_len, kv_len: IDS_OF_ROWS[b][q] == IDS_OF_ROWS[b][kv],
        ),
        (along(OF_LENGTHS, q) >= 0, lambda b, h, q, kv, q_len, kv_len: IDS_OF_ROWS[b][q] >= 0),
        (
            fm.per_document(fm.document(lengths=[1, 7]), lengths=[[3, 5], [8, 0], [4, 4]]),
            oracle.per_document(
                oracle.document(oracle.ids_of_lengths([1, 7], 8)),
                [oracle.ids_of_lengths(row, 8) for row in ([3, 5], [8, 0], [4, 4])],
            ),
        ),
    ],
)
def test_the_keys_of_documents_given_by_lengths(mask: fm.Mask, allowed: oracle.Predicate) -> None:
    for one, wanted in ((mask, allowed), (~mask, lambda *cell: not allowed(*cell))):
        rows = one.rows(8, batch=3)
        table = oracle.table_of(wanted, 8, 8, batch=3)
        assert rows.lower.holds(torch.arange(8)).expand(3, 1, 8, 8).tolist() == table
        assert fm.plan(one, 8, batch=3)().dense().tolist() == table


@pytest.mark.parametrize("text", ["document(lengths=[3, 5])", "per_document(causal, lengths=[3, 5])"])
def test_documents_given_by_lengths_are_not_numbered_position_by_position(text: str) -> None:
    context = bind(fm.parse(text), 8)
    assert analyze(context).exact
    assert context.stops.keys() >= context.tables.derived.keys() > set()
    assert not context.tables


THREE_IDS = oracle.ids_of_lengths([3, 1, 4], 8)
OF_THREE = document_ids(lengths=torch.tensor([3, 1, 4]))
IDS_OF_HEADS = [oracle.ids_of_lengths(row, 8) for row in ([3, 5], [6, 2])]
OF_HEADS = document_ids(lengths=torch.tensor([[3, 5], [6, 2]]))


@pytest.mark.parametrize(
    ("mask", "allowed"),
    [
        (OF_THREE[b] < OF_THREE[q], lambda b, h, q, kv, q_len, kv_len: THREE_IDS[b] < THREE_IDS[q]),
        (OF_THREE[h + 2] == OF_THREE[q], lambda b, h, q, kv, q_len, kv_len: THREE_IDS[h + 2] == THREE_IDS[q]),
        (OF_THREE[h] == OF_THREE[kv], lambda b, h, q, kv, q_len, kv_len: THREE_IDS[h] == THREE_IDS[kv]),
        (OF_HEADS[h, q] == OF_HEADS[h, kv], lambda b, h, q, kv, q_len, kv_len: IDS_OF_HEADS[h][q] == IDS_OF_HEADS[h][kv]),
        (
            (OF_HEADS[h, q] == OF_HEADS[h, kv]) & (OF_HEADS[h, q] >= 0),
            lambda b, h, q, kv, q_len, kv_len: IDS_OF_HEADS[h][q] == IDS_OF_HEADS[h][kv],
        ),
    ],
)
def test_documents_given_by_lengths_at_sequences_and_heads(mask: fm.Mask, allowed: oracle.Predicate) -> None:
    table = oracle.table_of(allowed, 8, 8, batch=4, heads=2)
    rows = mask.rows(8, batch=4, heads=2)
    assert rows.exact
    assert rows.lower.holds(torch.arange(8)).expand(4, 2, 8, 8).tolist() == table
    assert fm.plan(mask, 8, batch=4, heads=2)().dense().expand(4, 2, 8, 8).tolist() == table


@pytest.mark.parametrize("padding", [False, True])
def test_documents_given_by_lengths_that_end_behind_the_keys(padding: bool) -> None:
    mask = fm.document(lengths=[3, 6] if padding else [3, 9], padding=padding)
    ids = oracle.ids_of_lengths([3, 6] if padding else [3, 9], 12)
    assert mask.dense(12, 8).tolist() == oracle.table_of(oracle.document(ids), 12, 8)
    assert mask.block_mask(12, 8, block_size=4).to_dense()[0, 0].tolist() == [
        [int(any(ids[i] == ids[j] >= 0 for i in range(row, row + 4) for j in range(at, at + 4))) for at in (0, 4)]
        for row in (0, 4, 8)
    ]


@pytest.mark.parametrize("padding", [1, None, "yes"])
def test_padding_is_a_truth_value(padding: Any) -> None:
    with pytest.raises(OperandError, match="padding must be True or False"):
        fm.document(lengths=[3], padding=padding)


@pytest.mark.parametrize("source", ["ids", "position_ids"])
def test_padding_goes_with_lengths(source: str) -> None:
    with pytest.raises(ExpressionError, match=f"padding= goes with lengths or cu_seqlens, got {source}"):
        fm.document(padding=True, **cast(Any, {source: [0, 0, 1]}))


def test_a_parameter_keeps_the_padding_of_its_documents() -> None:
    direct = document_ids(lengths=fm.param("n"), padding=True)
    for mask in (fm.parse("document(lengths=n, padding=True)"), along(direct, q) == along(direct, kv)):
        bound = mask.bind(n=[3, 4])
        for shown in (mask, bound):
            assert "padding=True" in str(shown)
            assert fm.parse(str(shown)) == shown
        assert bound.dense(8).shape == (1, 1, 8, 8)
    assert fm.document(lengths=[3, 4], padding=True) != fm.document(lengths=[3, 4])


def test_a_function_with_branches_is_told_how_to_be_written() -> None:
    def window(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return kv <= q and q - kv < 4

    with pytest.raises(LoweringError, match=r"give batch=; or write a function of tensors, with & \| ~ in place of `and`"):
        fm.from_mask_mod(window).dense(6)
