"""Plans: the shards cover the sequence, and what they compute and see is what dense tables show."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import flexmask as fm
from flexmask.distributed import Sharding, query_units, shard_sequence
from flexmask.distributed.balance import exchanged, halved
from flexmask.distributed.query_units import KeyLists
from flexmask.errors import LoweringError, OperandError
from flexmask.intervals.context import Context
from tests.support.strategies import Case, Shape, mask_cases

BALANCES = ["work", "head_tail", "contiguous"]


def marked(runs: Tensor, length: int) -> Tensor:
    """The positions in intervals, ``bool[length]``."""
    found = torch.zeros(length, dtype=torch.bool)
    for lo, hi in runs.tolist():
        assert not found[lo:hi].any(), "intervals overlap"
        found[lo:hi] = True
    return found


def check_runs(runs: Tensor) -> None:
    """Intervals are in order, not empty, and do not touch."""
    assert runs.dtype == torch.int64
    assert runs.shape[1:] == (2,)
    assert (runs[:, 0] < runs[:, 1]).all()
    assert (runs[1:, 0] > runs[:-1, 1]).all()


def block_row_work(table: Tensor, top: int, block_size: int) -> int:
    """The cells that a kernel computes for each query of a block of queries, over all sequences and heads."""
    blocks = table[:, :, top : top + block_size].split(block_size, -1)
    return block_size * sum(int(block.any(-1).any(-1).sum()) for block in blocks)


def check_plan(sharding: Sharding, tables: list[Tensor], layers: list[int], block_size: int, exact: list[bool]) -> None:
    """Compares a plan with the masks as ``bool[B, H, n, n]``, which need no block size or batch of their own."""
    n = sharding.seq_len
    shape = [max(table.shape[axis] for table in tables) for axis in (0, 1)]
    tables = [table.expand(*shape, n, n) for table in tables]
    row_work = [[block_row_work(table, top, block_size) for top in range(0, n, block_size)] for table in tables]
    everywhere = torch.zeros(n, dtype=torch.int64)
    seen_of = [[marked(sharding.seen(rank, number), n) for rank in range(sharding.ranks)] for number in range(len(tables))]
    for rank in range(sharding.ranks):
        check_runs(sharding.runs(rank))
        positions = sharding.positions(rank)
        assert positions.tolist() == marked(sharding.runs(rank), n).nonzero().flatten().tolist()
        everywhere[positions] += 1
        work = visible = received = sent = 0
        seen_by_any = torch.zeros(n, dtype=torch.bool)
        for number, (table, count) in enumerate(zip(tables, layers, strict=True)):
            work += count * sum(row_work[number][q // block_size] for q in positions.tolist())
            visible += count * int(table[:, :, positions].sum())
            check_runs(sharding.seen(rank, number))
            seen, expected = seen_of[number][rank], table[:, :, positions].sum((0, 1, 2)) > 0
            assert (seen | ~expected).all()
            assert not exact[number] or torch.equal(seen, expected)
            seen_by_any |= seen
            received += count * int(seen.sum() - seen[positions].sum())
            sent += count * sum(int(seen_of[number][other][positions].sum()) for other in range(sharding.ranks) if other != rank)
        assert torch.equal(marked(sharding.seen(rank), n), seen_by_any)
        assert sharding.tokens[rank] == positions.numel()
        assert sharding.work[rank] == work
        assert sharding.visible[rank] == visible
        assert sharding.received[rank] == received
        assert sharding.sent[rank] == sent
    assert (everywhere == 1).all()


@st.composite
def plans(draw: st.DrawFn) -> tuple[list[Case], Shape, dict[str, Any]]:
    n = draw(st.integers(1, 40))
    shape = Shape(n, n, draw(st.integers(1, 2)), draw(st.integers(1, 2)))
    cases = draw(st.lists(mask_cases(shape, 2), min_size=1, max_size=2))
    options = {
        "ranks": draw(st.integers(1, 9)),
        "balance": draw(st.sampled_from(BALANCES)),
        "block_size": draw(st.sampled_from([1, 2, 3, 4, 8, 128])),
    }
    return cases, shape, options


@given(plans())
def test_plans_of_drawn_masks(drawn: tuple[list[Case], Shape, dict[str, Any]]) -> None:
    cases, shape, options = drawn
    sizes: dict[str, Any] = {"batch": shape.batch, "heads": shape.heads}
    sharding = shard_sequence([case.mask for case in cases], shape.q_len, **options, **sizes)
    exact = [case.mask.rows(shape.q_len, **sizes).exact for case in cases]
    check_plan(sharding, [case.expected(shape) for case in cases], [1] * len(cases), options["block_size"], exact)


@pytest.mark.parametrize("balance", BALANCES)
@pytest.mark.parametrize(("length", "ranks"), [(97, 4), (64, 8), (5, 8), (1, 3), (30, 1)])
def test_layers_count_as_often_as_there_are(balance: Any, length: int, ranks: int) -> None:
    masks = {fm.causal(): 2, fm.sliding_window(size=5): 3}
    sharding = shard_sequence(masks, length, ranks, balance=balance, block_size=4)
    q, kv = torch.arange(length).view(-1, 1), torch.arange(length)
    tables = [(kv <= q)[None, None], ((kv <= q) & (kv > q - 5))[None, None]]
    check_plan(sharding, tables, [2, 3], 4, [True, True])


def test_equal_masks_of_a_list_are_analyzed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list has a mask for each layer; models have many layers."""
    analyzed: list[Context] = []

    def counted(context: Context, *sizes: Any) -> query_units.QueryUnits:
        analyzed.append(context)
        return query_units.units_of(context, *sizes)

    monkeypatch.setattr("flexmask.distributed.sharding.units_of", counted)
    masks: Any = [fm.causal(), fm.sliding_window(size=5), fm.causal(), "causal", None]
    sharding = shard_sequence(masks, 33, 4, block_size=4)
    assert len(analyzed) == 3
    q, kv = torch.arange(33).view(-1, 1), torch.arange(33)
    causal, window, full = (table[None, None] for table in (kv <= q, (kv <= q) & (kv > q - 5), (kv <= 33) | (q < 0)))
    check_plan(sharding, [causal, window, causal, causal, full], [1] * 5, 4, [True] * 5)


def test_a_mask_for_each_sequence_counts_as_many_times_as_one_for_all() -> None:
    lengths = [[3, 9, 20], [30, 2, 0]]
    sharding = shard_sequence([fm.causal() & fm.document(lengths=lengths), fm.causal()], 32, 3, block_size=8)
    ids = torch.stack([torch.repeat_interleave(torch.tensor(row)) for row in lengths])
    q, kv = torch.arange(32).view(-1, 1), torch.arange(32)
    packed = (ids[:, :, None] == ids[:, None, :]) & (kv <= q)
    check_plan(sharding, [packed[:, None], (kv <= q)[None, None]], [1, 1], 8, [True, True])


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("sliding_window(size=5)", lambda q, kv: (kv <= q) & (kv > q - 5)),
        ("causal(align='lower_right') - (kv < q - 10)", lambda q, kv: (kv <= q) & (kv >= q - 10)),
        ("q * 3 - 20 >= kv", lambda q, kv: q * 3 - 20 >= kv),
        ("document(ids)", lambda q, kv: q // 7 == kv // 7),
        ("(abs(q - kv) < 9) & ((q - kv) % 3 == 0)", lambda q, kv: ((q - kv).abs() < 9) & ((q - kv) % 3 == 0)),
    ],
)
def test_long_sequences_are_analyzed_some_queries_at_a_time(text: str, meaning: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(query_units, "CHUNK", 4)
    q, kv = torch.arange(40).view(-1, 1), torch.arange(40)
    data = {"ids": torch.arange(40) // 7} if "ids" in text else {}
    sharding = shard_sequence(fm.parse(text, **data), 40, 3, block_size=2)
    check_plan(sharding, [meaning(q, kv)[None, None]], [1], 2, ["%" not in text])


DOCUMENTS = [5000, 130, 900, 2, 7000, 48, 300, 1100, 2500, 64, 3000, 700, 1, 6000, 1255, 4768]


@pytest.mark.parametrize("ranks", [4, 8, 16])
@pytest.mark.parametrize(
    "masks",
    [
        fm.causal(),
        fm.sliding_window(size=512),
        fm.causal() & fm.document(lengths=DOCUMENTS),
        [fm.causal(), fm.sliding_window(size=512)],
        fm.prefix_lm(prefix_lengths=9000),
        fm.causal() & fm.query_padding(lengths=20000),
    ],
    ids=str,
)
def test_shards_have_equal_tokens_and_work(masks: Any, ranks: int) -> None:
    length = sum(DOCUMENTS)
    sharding = shard_sequence(masks, length, ranks)
    assert sharding.tokens.max() - sharding.tokens.min() <= 128
    assert sharding.imbalance <= 1.02
    assert sharding.imbalance == float(sharding.work.max() / sharding.work.double().mean())


#: Documents of a log-normal law, mean 1,500, sigma 1.2.
HEAVY_TAILED = [
    502, 310, 304, 509, 539, 473, 2253, 2942, 594, 743, 689, 1409, 163, 1071, 1490, 2593, 1914, 1143, 1453,
    4802, 2082, 8, 82, 80, 176, 1406, 2581, 605, 58, 4860, 2679, 2123, 1581, 819, 119, 362, 61, 578, 1129,
    471, 4722, 10990, 2068,
]  # fmt: skip


def test_documents_of_very_different_lengths_over_many_ranks() -> None:
    sharding = shard_sequence(fm.causal() & fm.document(lengths=HEAVY_TAILED), 65536, 64)
    assert sharding.tokens.tolist() == [1024] * 64
    assert sharding.imbalance <= 1.02
    assert sharding.received_fraction < 0.1


def test_blocks_with_much_of_the_work_of_a_rank() -> None:
    """Half of the queries have no work, and no arc of the others has about the mean."""
    sharding = shard_sequence(fm.causal() & fm.query_padding(lengths=2**15), 2**16, 64)
    assert sharding.tokens.tolist() == [1024] * 64
    assert sharding.imbalance <= 1.02


@given(st.data())
def test_halves_are_arcs(data: st.DataObject) -> None:
    """Ranks have equally many units in few runs, and as even work as arcs of all units can have."""
    work = torch.tensor(data.draw(st.lists(st.integers(0, 50), min_size=1, max_size=40)))
    ranks, units = data.draw(st.integers(1, len(work))), len(work)
    at = torch.arange(units)
    owner = halved(work, KeyLists.union(units, at, torch.zeros_like(at), at + 1), ranks)
    counts = owner.bincount(minlength=ranks)
    assert counts.max() - counts.min() <= 1
    assert (owner.diff() != 0).sum() < 2 * ranks
    if ranks == 2:
        around = torch.cat((work, work)).tolist()
        arcs = [sum(around[start : start + length]) for start in range(units) for length in {units // 2, -(-units // 2)}]
        aside = [abs(2 * arc - int(work.sum())) for arc in arcs]
        assert abs(int(work[owner == 0].sum()) * 2 - int(work.sum())) <= max(2 * min(aside), 0.02 * int(work.sum()))


def test_exchanges_lower_the_work_of_units_without_keys() -> None:
    none = torch.empty(0, dtype=torch.int64)
    owner = exchanged(torch.tensor([0, 0, 1, 1]), torch.tensor([0, 0, 1, 1]), KeyLists.union(4, none, none, none), ranks=2)
    assert owner[2] != owner[3]


@given(st.data())
def test_exchanges_lower_the_keys_and_the_work_above_the_limit(data: st.DataObject) -> None:
    ranks, each = data.draw(st.integers(2, 5)), data.draw(st.integers(1, 4))
    units = ranks * each
    work = torch.tensor(data.draw(st.lists(st.integers(0, 50), min_size=units, max_size=units)))
    seen = [data.draw(st.sets(st.integers(0, 12), max_size=6)) for _ in range(units)]
    pairs = [(unit, key) for unit in range(units) for key in sorted(seen[unit])]
    unit, key = torch.tensor(pairs, dtype=torch.int64).view(-1, 2).unbind(1)
    before = torch.tensor(data.draw(st.permutations([rank for rank in range(ranks) for _ in range(each)])))
    after = exchanged(before, work, KeyLists.union(units, unit, key, key + 1), ranks)
    mean, all_keys = Fraction(int(work.sum()), ranks), max((key + 1 for keys in seen for key in keys), default=1)
    limit = int(mean * Fraction(102, 100))

    def costs(owner: list[int]) -> Fraction:
        """The keys of all ranks, and 20 times all keys for work above the limit that is as much as the mean."""
        held = [[unit for unit in range(units) if owner[unit] == rank] for rank in range(ranks)]
        above: int = sum(max(0, sum(works[unit] for unit in some) - limit) for some in held)
        keys: int = sum(len(set().union(*(seen[unit] for unit in some))) for some in held)
        return Fraction(keys) + 20 * all_keys * above / max(mean, Fraction(1))

    works, found = work.tolist(), after.tolist()
    assert after.bincount(minlength=ranks).tolist() == [each] * ranks
    assert costs(found) <= costs(before.tolist())
    for one in range(units):  # no exchange of two units is left that gains something
        for other in range(one):
            owner = found.copy()
            owner[one], owner[other] = found[other], found[one]
            assert costs(owner) >= costs(found)


def test_a_plan_is_printed_as_a_table() -> None:
    assert str(shard_sequence("causal", 12, 2, balance="contiguous", block_size=1)).split("\n") == [
        "rank  tokens  runs   work  keys in  keys out",
        "   0       6     1  0.538        0         6",
        "   1       6     1  1.462        6         0",
        "most work 1.462 of the mean, 50.0% of the keys of an all-gather received",
    ]
    lines = str(shard_sequence("causal", 100, 20)).split("\n")
    assert [line.split()[0] for line in lines] == ["rank", *map(str, range(8)), "...", *map(str, range(12, 20)), "most"]
    assert str(shard_sequence("empty", 3, 1)).split("\n")[1].split() == ["0", "3", "1", "0.000", "0", "0"]


def test_a_text_and_a_function_are_masks() -> None:
    of = shard_sequence(fm.causal(), 100, 3)
    for mask in ("causal", lambda b, h, q, kv: q >= kv):
        assert torch.equal(shard_sequence(mask, 100, 3).work, of.work)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"masks": []}, OperandError, "at least one, got none"),
        ({"masks": 3}, OperandError, "masks must be a Mask, its text, a list or a dict of them or a mask_mod function, got"),
        ({"masks": {fm.causal(): 0}}, Exception, "the number of layers of a mask must be at least 1, got 0"),
        ({"ranks": 0}, LoweringError, "ranks must be at least 1, got 0"),
        ({"ranks": 2**20 + 1}, LoweringError, "ranks must be at most 1048576, got 1048577"),
        ({"ranks": 2.0}, OperandError, "ranks must be an integer, got 2.0"),
        ({"seq_len": 0}, LoweringError, "seq_len must be at least 1"),
        ({"balance": "works"}, OperandError, "'work', 'head_tail', 'contiguous', got 'works'. Did you mean work?"),
        ({"block_size": 0}, LoweringError, "block_size must be at least 1"),
        ({"masks": fm.document([0, 0, 1])}, LoweringError, "3 values along"),
        ({"masks": "document(ids)"}, LoweringError, "unbound parameters"),
        ({"seq_len": 2**30, "heads": 128}, LoweringError, "exceed 64-bit integers"),
    ],
)  # fmt: skip
def test_bad_arguments(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        shard_sequence(**{"masks": "causal", "seq_len": 16, "ranks": 4, **arguments})


@pytest.mark.parametrize("ask", [Sharding.runs, Sharding.positions, Sharding.seen])
def test_bad_ranks(ask: Any) -> None:
    sharding = shard_sequence("causal", 16, 4)
    with pytest.raises(LoweringError, match="rank must be at most 3, got 4"):
        ask(sharding, 4)
    with pytest.raises(OperandError, match="rank must be an integer, got '1'"):
        ask(sharding, "1")
