"""Every lowering of named masks and of drawn expressions, against the oracle and against torch's create_block_mask."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode

import flexmask as fm
from flexmask import Mask
from flexmask.errors import LoweringError
from tests import oracle
from tests.strategies import Case, Shape, mask_cases, shaped_masks
from tests.test_catalogue import NAMES, SHAPES, name_and_shape, named

MOST_INTERVALS = 8  # of the interval form of a mask_mod


# ---------------------------------------------------------------- checks


def assert_canonical(rows: fm.intervals.Rows, shape: Shape) -> None:
    """Each row lists its maximal runs in order; unused slots are (kv_len, kv_len) and stand last."""
    assert rows.bounds.dtype == torch.int32
    assert rows.bounds.shape[-1] == 2
    assert rows.kv_len == shape.kv_len
    for size, wanted in zip(rows.bounds.shape, (shape.batch, shape.heads, shape.q_len), strict=False):
        assert size in {1, wanted}
    slots = rows.bounds.shape[3]
    for intervals, cells in zip(rows.bounds.flatten(0, 2).tolist(), own_cells_of(rows).flatten(0, 2).tolist(), strict=True):
        used = [list(pair) for pair in oracle.intervals_of(cells)]
        assert intervals == used + [[shape.kv_len] * 2] * (slots - len(used))


def own_cells_of(rows: fm.intervals.Rows) -> torch.Tensor:
    """The keys that rows show, with 1 for each axis that they do not depend on."""
    keys = torch.arange(rows.kv_len)
    low, high = rows.bounds[..., 0, None], rows.bounds[..., 1, None]
    return ((keys >= low) & (keys < high)).any(dim=-2)


def cells_of(rows: fm.intervals.Rows, shape: Shape) -> torch.Tensor:
    """The element mask that rows describe, bool [batch, heads, q_len, kv_len]."""
    return own_cells_of(rows).expand(shape.batch, shape.heads, shape.q_len, shape.kv_len)


def check_rows(case: Case, shape: Shape, expected: torch.Tensor) -> None:
    found = case.mask.rows(**shape.lowering)
    lower, upper = cells_of(found.lower, shape), cells_of(found.upper, shape)
    assert_canonical(found.lower, shape)
    assert_canonical(found.upper, shape)
    assert not (lower & ~expected).any(), "the lower bound shows a key that is hidden"
    assert not (expected & ~upper).any(), "the upper bound hides a key that is visible"
    assert not found.exact or torch.equal(lower, upper)
    assert torch.equal(found.lower.counts().expand(lower.shape[:3]), lower.sum(dim=-1))


def grid(shape: Shape) -> tuple[torch.Tensor, ...]:
    """Index tensors that broadcast to every cell."""
    sizes = (shape.batch, shape.heads, shape.q_len, shape.kv_len)
    return tuple(torch.arange(n).view([-1 if axis == i else 1 for i in range(4)]) for axis, n in enumerate(sizes))


def has_intervals(case: Case, shape: Shape) -> bool:
    """Whether the mask has the interval form of a mask_mod."""
    found = case.mask.rows(**shape.lowering)
    return found.exact and found.lower.bounds.shape[-2] <= MOST_INTERVALS


def check_mask_mod(case: Case, shape: Shape, expected: torch.Tensor) -> None:
    for form in ("auto", "interval", "expression"):
        if form == "interval" and not has_intervals(case, shape):
            with pytest.raises(LoweringError, match="interval"):
                case.mask.mask_mod(**shape.lowering, form=form)
            continue
        mask_mod = case.mask.mask_mod(**shape.lowering, form=form)
        answer = mask_mod(*grid(shape))
        assert answer.dtype == torch.bool
        assert torch.equal(answer.expand_as(expected), expected), form


def blocks_of(block_mask: BlockMask, kind: str, shape: Shape) -> Iterator[list[int]]:
    """The defined part of one list of a BlockMask, sorted, for each batch element, head and block row."""
    counts, indices = getattr(block_mask, f"{kind}_num_blocks"), getattr(block_mask, f"{kind}_indices")
    assert counts.dtype == indices.dtype == torch.int32
    counts = counts.expand(shape.batch, shape.heads, -1)
    indices = indices.expand(shape.batch, shape.heads, -1, -1)
    for row, count in zip(indices.flatten(0, 2).tolist(), counts.flatten().tolist(), strict=True):
        yield sorted(row[:count])


def element_mask(block_mask: BlockMask, shape: Shape) -> torch.Tensor:
    """The element mask as a kernel reads it: all of a full block, and of a partial one what mask_mod says."""
    q_block, kv_block = block_mask.BLOCK_SIZE
    q_blocks = -(-shape.q_len // q_block)
    seen = block_mask.mask_mod(*grid(shape)).expand(shape.batch, shape.heads, shape.q_len, shape.kv_len)
    cells = torch.zeros_like(seen)
    for kind in ("kv", "full_kv"):
        for place, columns in enumerate(blocks_of(block_mask, kind, shape)):
            b, h, row = place // q_blocks // shape.heads, place // q_blocks % shape.heads, place % q_blocks
            rows = slice(row * q_block, (row + 1) * q_block)
            for column in columns:
                keys = slice(column * kv_block, (column + 1) * kv_block)
                cells[b, h, rows, keys] = True if kind == "full_kv" else seen[b, h, rows, keys]
    return cells


def check_block_mask(case: Case, shape: Shape, expected: torch.Tensor, block_size: int | tuple[int, int]) -> None:
    found = case.mask.block_mask(**shape.lowering, block_size=block_size)
    wanted = create_block_mask(
        lambda b, h, q_idx, kv_idx: expected[b, h, q_idx, kv_idx],
        shape.batch,
        shape.heads,
        shape.q_len,
        shape.kv_len,
        device="cpu",
        BLOCK_SIZE=block_size,
    )
    assert found.BLOCK_SIZE == wanted.BLOCK_SIZE
    assert found.seq_lengths == wanted.seq_lengths
    for kind in ("kv", "full_kv", "q", "full_q"):
        ours, theirs = getattr(found, f"{kind}_indices"), getattr(wanted, f"{kind}_indices")
        assert ours.shape[2:] == theirs.shape[2:], kind
        assert list(blocks_of(found, kind, shape)) == list(blocks_of(wanted, kind, shape)), kind
    assert torch.equal(element_mask(found, shape), expected)
    check_oracle_blocks(wanted, expected, shape)


def check_oracle_blocks(block_mask: BlockMask, expected: torch.Tensor, shape: Shape) -> None:
    """torch classifies blocks as the oracle does: the two ways to count agree."""
    q_block, kv_block = block_mask.BLOCK_SIZE
    tables = expected.flatten(0, 1).tolist()
    kinds = [row for table in tables for row in oracle.classify_blocks(table, q_block, kv_block)]
    for kind, number in (("kv", oracle.PARTIAL), ("full_kv", oracle.FULL)):
        wanted = [[column for column, found in enumerate(row) if found == number] for row in kinds]
        assert list(blocks_of(block_mask, kind, shape)) == wanted


def check_stats(case: Case, shape: Shape, expected: torch.Tensor, block_size: tuple[int, int]) -> None:
    stats = case.mask.stats(**shape.lowering, block_size=block_size)
    tables = expected[: stats.batch, : stats.heads].flatten(0, 1).tolist()
    kinds = [kind for table in tables for row in oracle.classify_blocks(table, *block_size) for kind in row]
    assert stats.visible_fraction == pytest.approx(float(expected.double().mean()))
    for number, count in (
        (oracle.FULL, stats.full_blocks),
        (oracle.PARTIAL, stats.partial_blocks),
        (oracle.EMPTY, stats.empty_blocks),
    ):
        assert kinds.count(number) == count


# ---------------------------------------------------------------- named masks

each_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
each_name = pytest.mark.parametrize("name", NAMES)


@name_and_shape(NAMES)
def test_rows_of_named_mask(name: str, shape: Shape) -> None:
    case = named(name, shape)
    check_rows(case, shape, case.expected(shape))


@pytest.mark.parametrize("name", [name for name in NAMES if name != "dense"])
def test_rows_of_named_mask_are_exact(name: str) -> None:
    assert named(name, SHAPES["odd"]).mask.rows(**SHAPES["odd"].lowering).exact


@name_and_shape(NAMES)
def test_mask_mod_of_named_mask(name: str, shape: Shape) -> None:
    case = named(name, shape)
    check_mask_mod(case, shape, case.expected(shape))


@pytest.mark.parametrize("block_size", [4, (4, 8), 16], ids=str)
@name_and_shape(NAMES)
def test_block_mask_of_named_mask(name: str, shape: Shape, block_size: int | tuple[int, int]) -> None:
    case = named(name, shape, batched=shape.q_len % 2 == 1)
    check_block_mask(case, shape, case.expected(shape), block_size)


LONG = {
    "ragged": Shape(300, 300, batch=3),
    "wide": Shape(130, 400, batch=3),
    "tall": Shape(400, 130, batch=3),
    "exact": Shape(256, 256, batch=3),
    "offset": Shape(140, 390, batch=3, q_offset=250),
}


@pytest.mark.parametrize("shape", LONG.values(), ids=LONG.keys())
@pytest.mark.parametrize(
    "name", ["full", "causal", "transpose", "window both", "key_padding", "document lengths", "query_padding"]
)
def test_block_mask_of_128(name: str, shape: Shape) -> None:
    case = named(name, shape)
    check_block_mask(case, shape, case.expected(shape), 128)


@pytest.mark.parametrize("name", ["causal", "window both", "key_padding", "per_document", "dense", "per_head"])
def test_mask_mod_under_vmap(name: str) -> None:
    """As create_block_mask and FlexAttention call it: one scalar index each."""
    shape = SHAPES["odd"]
    case = named(name, shape)
    expected = case.expected(shape)
    for form in ("interval", "expression") if has_intervals(case, shape) else ("expression",):
        mask_mod = case.mask.mask_mod(**shape.lowering, form=form)
        made = create_block_mask(mask_mod, 3, 2, 9, 13, device="cpu", BLOCK_SIZE=4)
        assert torch.equal(element_mask(made, shape), expected)


@each_name
def test_stats_of_named_mask(name: str) -> None:
    shape = SHAPES["odd"]
    case = named(name, shape)
    check_stats(case, shape, case.expected(shape), (4, 8))


# ---------------------------------------------------------------- drawn expressions


@given(shaped_masks())
def test_dense_of_drawn_mask(drawn: tuple[Case, Shape]) -> None:
    case, shape = drawn
    expected = case.expected(shape)
    assert torch.equal(case.mask.dense(**shape.lowering).expand_as(expected), expected)


@given(shaped_masks())
def test_rows_of_drawn_mask(drawn: tuple[Case, Shape]) -> None:
    case, shape = drawn
    check_rows(case, shape, case.expected(shape))


@given(shaped_masks())
def test_mask_mod_of_drawn_mask(drawn: tuple[Case, Shape]) -> None:
    case, shape = drawn
    check_mask_mod(case, shape, case.expected(shape))


@given(shaped_masks(), st.sampled_from([1, 3, 4, (4, 8), (8, 3), 16]))
def test_block_mask_of_drawn_mask(drawn: tuple[Case, Shape], block_size: int | tuple[int, int]) -> None:
    case, shape = drawn
    check_block_mask(case, shape, case.expected(shape), block_size)


@given(shaped_masks(), st.sampled_from([(4, 4), (2, 8), (16, 16)]))
def test_stats_of_drawn_mask(drawn: tuple[Case, Shape], block_size: tuple[int, int]) -> None:
    case, shape = drawn
    check_stats(case, shape, case.expected(shape), block_size)


# ---------------------------------------------------------------- masks that do not separate into queries and keys

INSEPARABLE: list[tuple[Mask, oracle.Predicate]] = [
    ((fm.q - fm.kv) % 3 == 0, lambda b, h, q, kv, q_len, kv_len: (q - kv) % 3 == 0),
    (
        fm.causal() & ((fm.q - fm.kv) % 3 == 0),
        lambda b, h, q, kv, q_len, kv_len: kv <= q and (q - kv) % 3 == 0,
    ),
    (fm.q * fm.kv < 40, lambda b, h, q, kv, q_len, kv_len: q * kv < 40),
    (
        fm.sliding_window(left=4, right=4) - ((fm.q * fm.kv) % 5 == fm.h),
        lambda b, h, q, kv, q_len, kv_len: -4 <= kv - q <= 4 and (q * kv) % 5 != h,
    ),
]


@pytest.mark.parametrize(("mask", "allowed"), INSEPARABLE, ids=[str(mask) for mask, _ in INSEPARABLE])
@each_shape
def test_inseparable_mask(mask: Mask, allowed: oracle.Predicate, shape: Shape) -> None:
    case = Case(mask, allowed)
    expected = case.expected(shape)
    assert torch.equal(mask.dense(**shape.lowering).expand_as(expected), expected)
    check_rows(case, shape, expected)
    check_mask_mod(case, shape, expected)
    check_block_mask(case, shape, expected, (2, 4))


def test_bounded_rows_stay_tight_where_the_mask_separates() -> None:
    """Outside of the causal part the mask is known to be hidden, whatever the inseparable half says."""
    found = (fm.causal() & ((fm.q - fm.kv) % 3 == 0)).rows(16)
    causal = fm.causal().rows(16)
    shape = Shape(16, 16)
    assert not (cells_of(found.upper, shape) & ~cells_of(causal.lower, shape)).any()


def test_names_that_cancel_leave_data_unused() -> None:
    """`q < kv` and the predicate of `causal` contradict each other, which shows only once the name is expanded."""
    shape = Shape(4, 4)
    for mask, visible in (
        ((fm.q < fm.kv) & fm.causal() & fm.document([0, 0, 1, 1]), False),
        ((fm.q < fm.kv) | fm.causal() | fm.document([0, 0, 1, 1]), True),
    ):
        case = Case(mask, oracle.full() if visible else oracle.empty())
        expected = case.expected(shape)
        assert torch.equal(mask.dense(4).expand_as(expected), expected)
        check_rows(case, shape, expected)
        check_mask_mod(case, shape, expected)
        check_block_mask(case, shape, expected, 2)


def test_names_that_cancel_still_say_the_batch() -> None:
    mask = (fm.q < fm.kv) & fm.causal() & fm.key_padding([2, 1])
    assert not mask.dense(2).any()
    assert not mask.rows(2).upper.counts().any()


# ---------------------------------------------------------------- memory


class LargestTensor(TorchDispatchMode):
    """Notes the most elements that any tensor made within has."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor) and 0 not in tensor.stride():
                self.elements = max(self.elements, tensor.numel())
        return result


SEPARABLE = [
    fm.full(),
    fm.causal() & fm.document(lengths=[512] * 8),
    fm.sliding_window(left=256, right=0) | (fm.kv < 4),
    fm.per_head([fm.causal(), fm.masks.transpose(fm.causal()), ~fm.sliding_window(left=3, right=3)]),
    fm.prefix_lm([100, 2000]) & fm.key_padding([4000, 3000]) & fm.query_padding([4000, 3000]),
    fm.per_document(fm.causal(), lengths=[512] * 8),
    (fm.q // 16 == fm.kv // 16) ^ fm.causal(offset=-1000),
]


@pytest.mark.parametrize("mask", SEPARABLE, ids=str)
def test_nothing_grows_with_queries_times_keys(mask: Mask) -> None:
    length = 4096
    with LargestTensor() as largest:
        mask.rows(length)
        mask.mask_mod(length)
        mask.block_mask(length)
        mask.stats(length)
    assert 0 < largest.elements <= 64 * length


def test_cells_of_an_inseparable_mask_are_evaluated_in_parts() -> None:
    length = 8192
    mask = fm.sliding_window(left=2048, right=0) & ((fm.q * fm.kv) % 7 != 3)
    with LargestTensor() as largest:
        mask.block_mask(length)
        mask.stats(length)
    assert 0 < largest.elements <= length * length // 8


def test_the_largest_tensor_is_noticed() -> None:
    with LargestTensor() as largest:
        fm.causal().dense(64)
    assert largest.elements == 64 * 64


# ---------------------------------------------------------------- rows as sets


@given(st.data())
def test_rows_combine_as_sets(data: st.DataObject) -> None:
    first, shape = data.draw(shaped_masks())
    second = data.draw(mask_cases(shape))
    left, right = first.mask.rows(**shape.lowering).lower, second.mask.rows(**shape.lowering).lower
    a, b = cells_of(left, shape), cells_of(right, shape)
    results: list[tuple[Any, torch.Tensor]] = [
        (left & right, a & b),
        (left | right, a | b),
        (left - right, a & ~b),
        (~left, ~a),
    ]
    for rows, cells in results:
        assert_canonical(rows, shape)
        assert torch.equal(cells_of(rows, shape), cells)
