"""Plans of drawn masks, lowered with other data than they were captured with: against the oracle and the eager lowering."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import flexmask as fm
from flexmask import Mask, attention
from flexmask.plans import LoweredMask
from flexmask.plans.capture import GRAPHS
from tests.support import oracle
from tests.support.block_lists import check_lists
from tests.support.exhaustive import exhaustive, quarter
from tests.support.lowerings import blocks_of, element_mask
from tests.support.strategies import BOOLEANS, BOOLS, IDS, Case, Shape, filled, lengths_of, shaped_masks, shapes

BLOCK_SIZE = 8


def check(lowered: LoweredMask, mask: Mask, expected: Tensor, shape: Shape) -> None:
    """A lowered mask has the cells of the oracle and the blocks of the eager lowering, for the batch and for each sequence.

    The eager lowering reads values on the CPU, so that it may have one list where all heads or sequences are equal.
    """
    found, eager = lowered.block_mask, mask.block_mask(**shape.lowering, block_size=BLOCK_SIZE)
    assert torch.equal(lowered.dense().expand(expected.shape), expected)
    assert torch.equal(element_mask(found, shape), expected)
    for kind in ("kv", "full_kv", "q", "full_q"):
        assert list(blocks_of(found, kind, shape)) == list(blocks_of(eager, kind, shape)), kind
    for index in range(shape.batch):
        part = lowered[index]
        assert torch.equal(part.dense().expand(expected[:1].shape), expected[index : index + 1])
        check_lists(part.block_mask, found[index : index + 1])


def positions_exist(shape: Shape) -> bool:
    """Whether all queries are at positions of the keys, as a plan expects of data over positions, since it reads no offset."""
    return shape.q_offset == 0 or shape.q_end <= shape.kv_len


def plan_for(mask: fm.Mask | str, shape: Shape) -> fm.Plan:
    return fm.plan(mask, shape.q_len, shape.kv_len, batch=shape.batch, heads=shape.heads, block_size=BLOCK_SIZE)


@quarter
@given(shaped_masks(longest=24, depth=2).filter(lambda drawn: positions_exist(drawn[1])))
def test_drawn_masks(drawn: tuple[Case, Shape]) -> None:
    case, shape = drawn
    lowered = plan_for(case.mask, shape)(q_offset=shape.lowering["q_offset"])
    check(lowered, case.mask, case.expected(shape), shape)


@pytest.mark.exhaustive
@quarter
@given(shaped_masks(longest=24, depth=2).filter(lambda drawn: positions_exist(drawn[1])))
def test_drawn_masks_without_lengths(drawn: tuple[Case, Shape]) -> None:
    case, shape = drawn
    plan = fm.plan(case.mask, batch=shape.batch, heads=shape.heads, block_size=BLOCK_SIZE)
    check(plan(shape.q_len, shape.kv_len, q_offset=shape.lowering["q_offset"]), case.mask, case.expected(shape), shape)


# ---------------------------------------------------------------- masks with parameters


@dataclass(frozen=True)
class Part:
    """A part of a mask: its text with ``{}`` for the name of its parameter, its data at a shape, and what it means."""

    text: str
    data: Callable[[Shape], st.SearchStrategy[Any]]
    meaning: Callable[[Any], oracle.Predicate]


def of_batch(least: int, most: Callable[[Shape], int]) -> Callable[[Shape], st.SearchStrategy[Any]]:
    return lambda shape: st.lists(st.integers(least, most(shape)), min_size=shape.batch, max_size=shape.batch)


def packing(shape: Shape) -> st.SearchStrategy[Any]:
    """The ``cu_seqlens`` of three documents in each sequence, some of them empty."""
    ends = st.lists(st.integers(0, shape.longest), min_size=2, max_size=2).map(sorted)
    row = ends.map(lambda ends: [0, *ends, shape.longest])
    return st.lists(row, min_size=shape.batch, max_size=shape.batch)


def packed_ids(shape: Shape) -> st.SearchStrategy[Any]:
    """Ids of documents of which each is one run, with padding at the end."""
    return packing(shape).map(
        lambda rows: [[-1 if one == 2 else one for one in oracle.ids_of_cu_seqlens(row, shape.longest)] for row in rows]
    )


def ids_in_documents(rows: list[list[int]]) -> oracle.Predicate:
    return oracle.document([oracle.ids_of_cu_seqlens(row, row[-1]) for row in rows])


PARTS = [
    Part("causal", lambda shape: st.none(), lambda data: oracle.causal()),
    Part("sliding_window(left=5, right=2)", lambda shape: st.none(), lambda data: oracle.sliding_window(5, 2)),
    Part("key_padding({})", of_batch(0, lambda shape: shape.kv_len), oracle.key_padding),
    Part("key_padding(start={})", of_batch(0, lambda shape: shape.kv_len), oracle.key_start),
    Part("key_padding(keep={})", lambda shape: filled(BOOLS, shape.batch, shape.kv_len), oracle.key_keep),
    Part("prefix_lm({})", of_batch(0, lambda shape: shape.kv_len), oracle.prefix_lm),
    Part("document(cu_seqlens={})", packing, ids_in_documents),
    Part(
        "per_document(causal, cu_seqlens={})",
        packing,
        lambda rows: oracle.per_document(oracle.causal(), [oracle.ids_of_cu_seqlens(row, row[-1]) for row in rows]),
    ),
    Part(
        "document(lengths={})",
        lambda shape: packing(shape).map(lambda rows: list(map(lengths_of, rows))),
        lambda rows: oracle.document([oracle.ids_of_lengths(row, sum(row)) for row in rows]),
    ),
    Part(
        "(q - kv < {}[h])",
        lambda shape: st.lists(st.integers(-3, 9), min_size=shape.heads, max_size=shape.heads),
        lambda widths: lambda b, h, q, kv, q_len, kv_len: q - kv < widths[h],
    ),
    Part(
        "(kv <= {}[b, q])",
        lambda shape: filled(range(shape.kv_len), shape.batch, shape.q_end),
        lambda ends: lambda b, h, q, kv, q_len, kv_len: kv <= ends[b][q],
    ),
]
#: Those with data of one length for queries and keys.
SQUARE = [
    Part("document({})", lambda shape: filled(IDS, shape.batch, shape.kv_len), oracle.document),
    Part("document({}, contiguous=True)", packed_ids, oracle.document),
]
SIGNS = ["&", "&", "|", "|", "^", "-"]


@st.composite
def masks_with_data(draw: st.DrawFn) -> tuple[str, Shape, list[tuple[dict[str, Any], oracle.Predicate]]]:
    """The text of a mask, a shape, and three times data with the meaning of the mask."""
    shape = draw(shapes(24).filter(positions_exist))
    parts = draw(st.lists(st.sampled_from(PARTS + (SQUARE if shape.q_end == shape.kv_len else [])), min_size=1, max_size=3))
    names = [f"data{number}" for number in range(len(parts))]
    texts = [part.text.format(name) for part, name in zip(parts, names, strict=True)]
    text, operations = texts[0], []
    for other in texts[1:]:
        at = draw(st.integers(0, len(SIGNS) - 1))
        text = f"({text}) {SIGNS[at]} {other}"
        operations.append(BOOLEANS[at][1])
    filled_in = []
    for _ in range(3):
        values = [draw(part.data(shape)) for part in parts]
        meanings = [part.meaning(value) for part, value in zip(parts, values, strict=True)]
        meaning = meanings[0]
        for combine, other_meaning in zip(operations, meanings[1:], strict=True):
            meaning = combine(meaning, other_meaning)
        data = {name: value for name, value in zip(names, values, strict=True) if name in fm.parse(text).params}
        filled_in.append((data, meaning))
    return text, shape, filled_in


@quarter
@given(masks_with_data())
def test_other_data_than_it_was_captured_with(drawn: tuple[str, Shape, list[tuple[dict[str, Any], oracle.Predicate]]]) -> None:
    text, shape, filled_in = drawn
    plan, before = plan_for(text, shape), GRAPHS.captures
    for data, meaning in filled_in:
        tensors = {name: torch.tensor(value) for name, value in data.items()}
        mask = fm.parse(text).bind(**tensors)
        lowered = plan(**tensors, q_offset=shape.lowering["q_offset"])
        expected = Case(mask, meaning).expected(shape)
        check(lowered, mask, expected, shape)
        check_attention(expected, partial(attention, mask=lowered, backend="sdpa"))
    assert GRAPHS.captures <= before + 1


@quarter
@given(st.data())
def test_conditions_of_keys_are_evaluated_once_for_each_key(data: st.DataObject) -> None:
    """Joined to a mask with key intervals they need no cells of each query."""
    shape = data.draw(shapes(24).filter(positions_exist))
    part = data.draw(st.sampled_from([part for part in PARTS if "keep" not in part.text]))
    value, keep = data.draw(part.data(shape)), data.draw(filled(BOOLS, shape.batch, shape.kv_len))
    text = f"{part.text.format('data')} & key_padding(keep=keep) & (kv % 5 != h)"
    mask = fm.parse(text).bind(keep=torch.tensor(keep), **({} if value is None else {"data": torch.tensor(value)}))
    lowered = plan_for(mask, shape)(q_offset=shape.lowering["q_offset"])
    assert lowered.cells is not None
    assert lowered.cells.shape[2] == 1
    of_keys = oracle.both(oracle.key_keep(keep), lambda b, h, q, kv, q_len, kv_len: kv % 5 != h)
    expected = Case(mask, oracle.both(part.meaning(value), of_keys)).expected(shape)
    check(lowered, mask, expected, shape)
    check_attention(expected, partial(attention, mask=lowered, backend="sdpa"))


# ---------------------------------------------------------------- attention


def check_attention(expected: Tensor, attend: Callable[..., Tensor]) -> None:
    """Output and gradients against a softmax in float64 that is written out."""
    batch, heads, q_len, kv_len = expected.shape
    inputs = [torch.randn(batch, heads, length, 4, requires_grad=True) for length in (q_len, kv_len, kv_len)]
    query, key, value = (tensor.detach().double().requires_grad_() for tensor in inputs)
    wanted = oracle.attention(query, key, value, expected)
    found = attend(*inputs)
    upstream = torch.randn_like(found)
    torch.testing.assert_close(found, wanted.float())
    ours = torch.autograd.grad(found, inputs, upstream)
    theirs = torch.autograd.grad(wanted, (query, key, value), upstream.double())
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other.float())


PACKED = "causal & document(cu_seqlens=cu) & key_padding(lengths) | (q == kv)"
TOKENS, BATCH, HEADS = 20, 2, 2


@st.composite
def packings(draw: st.DrawFn) -> tuple[dict[str, Tensor], Tensor]:
    """The data of PACKED, and its cells as the oracle has them."""
    shape = Shape(TOKENS, TOKENS, BATCH, HEADS)
    cu, lengths = draw(packing(shape)), draw(of_batch(0, lambda shape: TOKENS)(shape))
    packed = oracle.both(oracle.both(oracle.causal(), ids_in_documents(cu)), oracle.key_padding(lengths))
    meaning = oracle.either(packed, lambda b, h, q, kv, q_len, kv_len: q == kv)
    data = {"cu": torch.tensor(cu), "lengths": torch.tensor(lengths)}
    return data, Case(fm.parse(PACKED).bind(**data), meaning).expected(shape)


def called_inside(query: Tensor, key: Tensor, value: Tensor, data: dict[str, Tensor]) -> Tensor:
    return attention(query, key, value, PLAN(**data))


def given_a_mask(query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> Tensor:
    return attention(query, key, value, mask)


PLAN = fm.plan(PACKED, TOKENS, batch=BATCH, heads=HEADS)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", *exhaustive(["inductor"])])
@pytest.mark.parametrize("way", ["a plan called inside", "a mask"])
def test_compiled_attention_is_one_graph_for_all_data(way: str, backend: str) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    step: Callable[..., Tensor] = given_a_mask if way == "a mask" else called_inside
    compiled = torch.compile(step, fullgraph=True, backend=counter)

    @quarter
    @given(packings())
    def check_packing(drawn: tuple[dict[str, Tensor], Tensor]) -> None:
        data, expected = drawn
        given_data = fm.parse(PACKED).bind(**data) if way == "a mask" else data
        check_attention(expected, lambda *inputs: compiled(*inputs, given_data))

    check_packing()
    assert counter.frame_count == 1


# ---------------------------------------------------------------- traced functions

LENGTHS = torch.tensor([13, 5])
WEIGHTS = torch.tensor([0.5, -1.0, 2.0, 0.25])

#: Each with the predicate of its cells; the last two are not separable, of which one is an opaque call.
MODS: dict[str, tuple[Any, Callable[..., Any]]] = {
    "causal": (lambda b, h, q, kv: q >= kv, lambda b, h, q, kv: kv <= q),
    "lengths": (lambda b, h, q, kv: (q >= kv) & (kv < LENGTHS[b]), lambda b, h, q, kv: kv <= q and kv < int(LENGTHS[b])),
    "heads": (lambda b, h, q, kv: q - kv <= 2 * h + 1, lambda b, h, q, kv: q - kv <= 2 * h + 1),
    "dilated": (lambda b, h, q, kv: (q - kv) % 3 == 0, lambda b, h, q, kv: (q - kv) % 3 == 0),
    "opaque": (
        lambda b, h, q, kv: torch.sin(WEIGHTS[(q + kv) % 4]) > 0.3,
        lambda b, h, q, kv: math.sin(float(WEIGHTS[(q + kv) % 4])) > 0.3,
    ),
}


@pytest.mark.parametrize("name", MODS)
def test_a_mask_mod(name: str) -> None:
    mod, meaning = MODS[name]
    shape = Shape(16, 16, 2, 2)
    plan, mask = plan_for(mod, shape), fm.from_mask_mod(mod)
    for kept in ((13, 5), (0, 16)):
        LENGTHS.copy_(torch.tensor(kept))
        check(plan(), mask, Case(mask, lambda b, h, q, kv, q_len, kv_len: meaning(b, h, q, kv)).expected(shape), shape)
