"""Plans without lengths: one captured graph for all lengths, batch sizes and numbers of documents."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import flexmask as fm
from flexmask import attention, kv, q
from flexmask.errors import LoweringError, OperandError
from flexmask.plans.capture import GRAPHS, MOST_VARYING
from tests.support import oracle
from tests.support.block_lists import check_lists
from tests.support.exhaustive import each_run, exhaustive, slow

BLOCK_SIZE, HEADS = 8, 2
#: Batch, tokens and documents of each step, of more than one block and one of each.
SIZES = [(2 + rng.randrange(3), 9 + rng.randrange(24), 2 + rng.randrange(4)) for rng in [random.Random(0)] for _ in range(20)]

Numbers = list[list[int]]


def stops(rng: random.Random, batch: int, tokens: int, documents: int) -> Numbers:
    """The ``cu_seqlens`` of each sequence."""
    return [[0, *sorted(rng.sample(range(1, tokens), documents - 1)), tokens] for _ in range(batch)]


def lengths(rng: random.Random, batch: int, tokens: int, documents: int) -> Numbers:
    return [[stop - start for start, stop in pairwise(row)] for row in stops(rng, batch, tokens, documents)]


def runs(rng: random.Random, batch: int, tokens: int, documents: int) -> Numbers:
    """The ids of contiguous documents."""
    return [oracle.ids_of_cu_seqlens(row, tokens) for row in stops(rng, batch, tokens, documents)]


def tree(rng: random.Random, batch: int, tokens: int, documents: int) -> Numbers:
    """The depths of nodes in depth-first order."""
    rows = [[0] for _ in range(batch)]
    for row in rows:
        while len(row) < tokens:
            row.append(rng.randrange(1, row[-1] + 2))
    return rows


def some(least: int) -> Callable[..., list[int]]:
    """A number of tokens for each sequence."""
    return lambda rng, batch, tokens, documents: [rng.randint(least, tokens) for _ in range(batch)]


def ids(rng: random.Random, batch: int, tokens: int, documents: int) -> Numbers:
    return [[rng.randrange(-1, documents) for _ in range(tokens)] for _ in range(batch)]


def nothing(*sizes: Any) -> None:
    return None


def of_runs(rows: Numbers) -> oracle.Predicate:
    return oracle.document([oracle.ids_of_cu_seqlens(row, row[-1]) for row in rows])


CAUSAL = oracle.causal()
#: The text of a mask with its data as ``x``, the data at some sizes, and the meaning of the mask with it.
MASKS: dict[str, tuple[str, Callable[..., Any], Callable[[Any], oracle.Predicate]]] = {
    "causal": ("causal", nothing, lambda x: CAUSAL),
    "window": ("sliding_window(left=7, right=2)", nothing, lambda x: oracle.sliding_window(7, 2)),
    "a window by a number": (
        "causal & (q - kv < x[b])",
        some(1),
        lambda x: oracle.both(CAUSAL, lambda b, h, q, kv, q_len, kv_len: q - kv < x[b]),
    ),
    "sink": ("sink_window(4, size=9)", nothing, lambda x: oracle.sink_window(4, 8)),
    "aligned right": ("causal(align='lower_right')", nothing, lambda x: oracle.causal("lower_right")),
    "padding": ("causal & key_padding(x)", some(0), lambda x: oracle.both(CAUSAL, oracle.key_padding(x))),
    "padding on the left": (
        "causal & key_padding(x, side='left')",
        some(0),
        lambda x: oracle.both(CAUSAL, oracle.key_padding(x, "left")),
    ),
    "keys kept": (
        "causal & key_padding(keep=x)",
        lambda rng, batch, tokens, documents: [[rng.random() < 0.8 for _ in range(tokens)] for _ in range(batch)],
        lambda x: oracle.both(CAUSAL, oracle.key_keep(x)),
    ),
    "cu_seqlens": ("causal & document(cu_seqlens=x)", stops, lambda x: oracle.both(CAUSAL, of_runs(x))),
    "lengths of documents": (
        "document(lengths=x)",
        lengths,
        lambda x: oracle.document([oracle.ids_of_lengths(row, sum(row)) for row in x]),
    ),
    "contiguous ids": ("causal & document(x, contiguous=True)", runs, lambda x: oracle.both(CAUSAL, oracle.document(x))),
    "ids": ("causal & document(x)", ids, lambda x: oracle.both(CAUSAL, oracle.document(x))),
    "prefix": ("prefix_lm(x)", some(0), oracle.prefix_lm),
    "tree": ("prefix_tree(position_ids=x)", tree, oracle.prefix_tree),
    "chunks": ("chunked(6)", nothing, lambda x: oracle.chunked(6)),
    "heads": (
        "per_head([causal & key_padding(x), sliding_window(left=3, right=0)])",
        some(0),
        lambda x: oracle.per_head([oracle.both(CAUSAL, oracle.key_padding(x)), oracle.sliding_window(3, 0)]),
    ),
}
#: Those with as many graphs as there are lengths.
GROWING: dict[str, tuple[str, Callable[..., Any], Callable[[Any], oracle.Predicate]]] = {
    "every third key": ("kv % 3 == q % 3", nothing, lambda x: lambda b, h, q, kv, q_len, kv_len: kv % 3 == q % 3),
}


def check(plan: fm.Plan, data: Any, meaning: oracle.Predicate, batch: int, *lengths: int, q_offset: Any = 0) -> None:
    given = {} if data is None else {"x": torch.tensor(data)}
    lowered = plan(*lengths, q_offset=q_offset, **given)
    wanted = torch.tensor(
        oracle.table_of(meaning, lengths[0], lengths[-1], batch=batch, heads=HEADS, q_offset=q_offset), dtype=torch.bool
    )
    assert torch.equal(lowered.dense().expand(wanted.shape), wanted)
    sizes = {"batch": lowered.shape[0], "block_size": BLOCK_SIZE}
    check_lists(lowered.block_mask, plan.mask.bind(**given).block_mask(*lengths, q_offset=q_offset, **sizes))


@pytest.fixture(autouse=True)
def no_graphs() -> None:
    GRAPHS.clear()


@pytest.mark.parametrize("text", ["sink_window(2, left=3)", *slow(["table([1, 0])[table([0, 1])[q_len % 2]] < q"])])
def test_whole_blocks_and_others(text: str) -> None:
    plan, mask = fm.plan(text, block_size=BLOCK_SIZE), fm.parse(text)
    for tokens in (2 * BLOCK_SIZE, 2 * BLOCK_SIZE + 1, 3 * BLOCK_SIZE):
        lowered = plan(tokens)
        assert torch.equal(lowered.dense(), mask.dense(tokens))
        check_lists(lowered.block_mask, mask.block_mask(tokens, block_size=BLOCK_SIZE))


@pytest.mark.parametrize(
    "name", ["padding", *slow(["cu_seqlens"]), *exhaustive(sorted(MASKS.keys() - {"padding", "cu_seqlens"}))]
)
def test_one_graph_for_20_sizes(name: str) -> None:
    text, make, meaning = MASKS[name]
    plan, rng, before = fm.plan(text, block_size=BLOCK_SIZE), random.Random(1), GRAPHS.captures
    for batch, tokens, documents in SIZES:
        data = make(rng, batch, tokens, documents)
        check(plan, data, meaning(data), batch, tokens)
    assert GRAPHS.captures == before + 1


def test_numbers_of_blocks_are_inputs_of_a_graph() -> None:
    """Kernels that compute them from the lengths do so at each index."""
    plan = fm.plan("causal & document(cu_seqlens=x)", block_size=BLOCK_SIZE)
    setting = plan.setting._replace(q_len=20, kv_len=30)
    graph = GRAPHS.get(plan.mask, setting, [torch.tensor([0, 13, 30])], varies=True)
    assert operator.floordiv not in {node.target for node in graph.module.graph.nodes}


@pytest.mark.parametrize(("length", "block_size"), [(2**20, 128), (60_000, 1)])
def test_lengths_and_numbers_of_blocks_whose_product_overflows(length: int, block_size: int) -> None:
    for plan, given in (
        (fm.plan("causal", block_size=block_size), [length]),
        (fm.plan("causal", length, block_size=block_size), []),
    ):
        assert plan(*given).shape == (1, 1, length, length)


@pytest.mark.slow
@pytest.mark.parametrize("name", each_run(["cu_seqlens", "padding", "heads"], "padding"))
def test_sizes_of_one_have_other_graphs(name: str) -> None:
    """One sequence, one document, one query, one block; no more than torch takes apart."""
    text, make, meaning = MASKS[name]
    plan, rng, before = fm.plan(text, block_size=BLOCK_SIZE), random.Random(1), GRAPHS.captures
    for batch, tokens, documents in (
        (2, 20, 3),
        (1, 30, 3),
        (2, 30, 1),
        (1, 40, 3),
        (3, 25, 1),
        (2, 5, 3),
        (2, 7, 2),
        (2, 33, 2),
    ):
        data = make(rng, batch, tokens, documents)
        check(plan, data, meaning(data), batch, tokens)
    assert 2 <= GRAPHS.captures - before <= 4


@pytest.mark.slow
def test_other_numbers_of_keys_and_offsets() -> None:
    plan, rng, before = fm.plan("causal & key_padding(x)", block_size=BLOCK_SIZE), random.Random(1), GRAPHS.captures
    for batch, q_len, kv_len in ((2, 20, 30), (3, 40, 27), (2, 31, 31), (4, 17, 90)):
        data = some(0)(rng, batch, kv_len, 1)
        meaning = oracle.both(CAUSAL, oracle.key_padding(data))
        check(plan, data, meaning, batch, q_len, kv_len)
    assert GRAPHS.captures == before + 2  # as many keys as queries, and not
    for batch, q_len, kv_len in ((2, 12, 30), (3, 19, 40)):
        data, offset = some(0)(rng, batch, kv_len, 1), [rng.randrange(9) for _ in range(batch)]
        meaning = oracle.both(CAUSAL, oracle.key_padding(data))
        check(plan, data, meaning, batch, q_len, kv_len, q_offset=torch.tensor(offset))
        check(plan, data, meaning, batch, q_len, kv_len, q_offset=torch.tensor(offset) + 1)
    assert GRAPHS.captures == before + 3


def test_steps_of_decoding_behind_more_and_more_keys() -> None:
    """What the data alone decides is computed again where the number of keys changes."""
    plan, before = fm.plan("causal & document(cu_seqlens=x)", block_size=BLOCK_SIZE), GRAPHS.captures
    for kv_len in (40, 41, 57):
        data = [[0, 13, kv_len]]
        for offset in (kv_len - 1, 12, 13):
            check(plan, data, oracle.both(CAUSAL, of_runs(data)), 1, 1, kv_len, q_offset=torch.tensor([offset]))
    assert GRAPHS.captures == before + 1


@pytest.mark.slow
def test_data_of_other_types_has_another_graph() -> None:
    plan, before = fm.plan("key_padding(x)", block_size=BLOCK_SIZE), GRAPHS.captures
    for dtype in (torch.int64, torch.int32, torch.int64):
        for lengths in ([3, 9], [12, 0, 4]):
            wanted = torch.arange(12).expand(len(lengths), 1, 12, 12) < torch.tensor(lengths).view(-1, 1, 1, 1)
            assert torch.equal(plan(12, x=torch.tensor(lengths, dtype=dtype)).dense().expand(wanted.shape), wanted)
    assert GRAPHS.captures == before + 2


@pytest.mark.slow
@pytest.mark.parametrize("name", GROWING)
def test_more_key_intervals_in_longer_rows(name: str) -> None:
    """Each length has a graph, which is found again."""
    text, _, meaning = GROWING[name]
    plan, tokens, before = fm.plan(text, block_size=BLOCK_SIZE), range(20, 22 + MOST_VARYING), GRAPHS.captures
    for length in (*tokens, *tokens):
        check(plan, None, meaning(None), 1, length)
    assert GRAPHS.captures == before + len(tokens)


@pytest.mark.slow
def test_a_length_in_cells() -> None:
    mask = fm.key_padding(torch.tensor([1]), side="left") & fm.document(torch.tensor([0, 1]), kv_ids=torch.tensor([1, 0]))
    assert mask.plan()(2, 2).dense()[0, 0].tolist() == [[False, True], [False, False]]


def test_a_table_that_symbols_cannot_check() -> None:
    """Whether an index of queries and keys stays in its table follows from lengths that are numbers: a graph for each."""
    table = torch.arange(64) % 3
    plan = (fm.table(table)[q - kv + 30] > 0).plan(block_size=BLOCK_SIZE)
    before = GRAPHS.captures
    for tokens in (20, 30, 20):
        position = torch.arange(tokens)
        assert torch.equal(plan(tokens).dense()[0, 0], table[position[:, None] - position + 30] > 0)
    assert GRAPHS.captures == before + 2
    with pytest.raises(LoweringError, match=r"ranges from -1 to 61, but the table has 64 values"):
        plan(32)


@pytest.mark.slow
def test_an_index_that_leaves_its_table() -> None:
    table = torch.arange(6) % 2 == 0
    plan = (fm.table(table)[kv // 8] != 0).plan(block_size=BLOCK_SIZE)
    for tokens in (48, 30):
        assert torch.equal(plan(tokens).dense()[0, 0, 0], table[torch.arange(tokens) // 8])
    with pytest.raises(LoweringError, match=r"ranges from 0 to 6, but the table has 6 values"):
        plan(49)


@pytest.mark.slow
@pytest.mark.parametrize("name", each_run(["padding", "cu_seqlens"], "padding"))
def test_a_compiled_plan(name: str) -> None:
    text, draw, meaning = MASKS[name]
    plan, rng, before = fm.plan(text, block_size=BLOCK_SIZE, compile=True), random.Random(1), GRAPHS.captures
    for sizes in SIZES:
        data = draw(rng, *sizes)
        check(plan, data, meaning(data), *sizes[:2])
    assert GRAPHS.captures == before + 1
    wrong, error = {
        "padding": ([20, 31], "must be at most kv_len = 30, got 31"),
        "cu_seqlens": ([[0, 9, 20], [0, 3, 20]], "cover 20 of 30 tokens"),
    }[name]
    with pytest.raises(LoweringError, match=error):
        plan(30, x=torch.tensor(wrong))


@pytest.mark.slow
def test_a_model_that_is_compiled() -> None:
    plan, graphs = fm.plan("causal & document(cu_seqlens=x)"), CompileCounterWithBackend("eager")
    compiled = torch.compile(lambda x, cu: attention(x, x, x, plan(x.shape[2], x=cu)), fullgraph=True, backend=graphs)
    rng = random.Random(1)
    for batch, tokens, documents in SIZES[:6]:
        x, data = torch.randn(batch, HEADS, tokens, 8), stops(rng, batch, tokens, documents)
        visible = torch.tensor(oracle.table_of(oracle.both(CAUSAL, of_runs(data)), tokens, tokens, batch=batch))
        torch.testing.assert_close(
            compiled(x, torch.tensor(data)).double(), oracle.attention(x, x, x, visible), rtol=1e-5, atol=1e-5
        )
    assert graphs.frame_count <= 3


NO_LENGTHS = "made without lengths, so each call begins with q_len, or q_len, kv_len: plan"
ERRORS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no lengths": (lambda: fm.plan("causal")(), OperandError, rf"{NO_LENGTHS}\(q_len\)"),
    "no lengths, but data": (lambda: fm.plan("key_padding(x)")(x=[3]), OperandError, rf"{NO_LENGTHS}\(q_len, x=...\)"),
    "lengths by name": (lambda: fm.plan("causal")(q_len=9), OperandError, NO_LENGTHS),
    "three lengths": (lambda: fm.plan("causal")(1, 2, 3), OperandError, NO_LENGTHS),
    "a length of 0": (lambda: fm.plan("causal")(0), LoweringError, "q_len must be at least 1"),
    "a length that is too great": (lambda: fm.plan("causal")(9, 2**31), LoweringError, "kv_len must be at most"),
    "a length that is no integer": (lambda: fm.plan("causal")("9"), OperandError, "q_len must be an integer"),  # type: ignore[arg-type]
    "keys of a plan": (lambda: fm.plan("causal", kv_len=9), OperandError, "kv_len=9 without q_len: give both, or"),
    "lengths twice": (
        lambda: fm.plan("causal", 9)(9),
        OperandError,
        "its data by name; the mask causal has no parameters, so call the plan with none. Its lengths are q_len=9, kv_len=9",
    ),
    "values": (
        lambda: fm.plan("key_padding(x)")(30, x=torch.tensor([31, 2])),
        LoweringError,
        "lengths must be at most kv_len = 30, got 31",
    ),
    "sizes": (
        lambda: fm.plan("document(x)")(30, x=torch.zeros(2, 31, dtype=torch.int64)),
        LoweringError,
        "has 31 values along q, but q_len is 30",
    ),
    "batch": (
        lambda: fm.plan("document(x) & key_padding(n)")(30, x=torch.zeros(2, 30, dtype=torch.int64), n=[1, 2, 3]),
        LoweringError,
        "two sizes of batch",
    ),
    "cells": (lambda: fm.plan("(q * kv) % 3 == 0")(2**14), LoweringError, f"evaluates all {2**28} cells"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    run, kind, message = ERRORS[name]
    with pytest.raises(kind, match=message):
        run()


@pytest.mark.slow
def test_wrong_sizes_after_right_ones() -> None:
    """A graph that holds for equal sizes alone does not take others."""
    plan = fm.plan("document(x)", block_size=BLOCK_SIZE)
    plan(30, x=torch.zeros(2, 30, dtype=torch.int64))
    with pytest.raises(LoweringError, match="has 31 values along q, but q_len is 30"):
        plan(30, x=torch.zeros(2, 31, dtype=torch.int64))


def test_the_method_of_a_mask_and_what_is_printed() -> None:
    plan = fm.causal().plan(batch=3)
    assert plan(9).shape == (3, 1, 9, 9)
    assert plan(9)[1].shape == (1, 1, 9, 9)
    assert repr(plan) == "plan('causal', batch=3, block_size=(128, 128), device=None, compile=False)"
    assert eval(repr(plan), {"plan": fm.plan}).setting == plan.setting
