"""Ends of key intervals that kernels compute from the query's position instead of reading them, as elsewhere than on the CPU."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, cast

import pytest
import torch
from torch import Tensor

import flexmask as fm
from flexmask import _sync
from flexmask.expr.names import NAMES
from flexmask.intervals.bands import Band, End
from flexmask.lowering.mask_mod import Form
from tests.support.examples import EXAMPLES
from tests.support.exhaustive import each_run
from tests.support.lowerings import lowered
from tests.support.strategies import Case, Shape

READ: Literal["read"] = "read"
SHARED: Literal["shared"] = "shared"
#: An end: ``n`` for the place ``q + n``, another place, a list of places, "read", or None where no key is left out.
Ends: TypeAlias = tuple[Any, Any]
#: The text of a mask, where its key interval begins and ends, or a list for several, and its cells.
BANDS: dict[str, tuple[str, Ends | list[Ends], Callable[[Tensor, Tensor], Tensor]]] = {
    "causal": ("causal", (None, 1), lambda q, kv: kv <= q),
    "full": ("full", (None, None), lambda q, kv: kv >= 0),
    "window": ("sliding_window(size=3)", (-2, 1), lambda q, kv: (kv <= q) & (q - kv < 3)),
    "both sides": ("sliding_window(left=2, right=1)", (-2, 2), lambda q, kv: (q - kv).abs() <= 1 + (kv < q).long()),
    "both in one": ("causal & sliding_window(left=2, right=1)", (-2, 1), lambda q, kv: (kv <= q) & (q - kv <= 2)),
    "after": ("kv > q", (1, None), lambda q, kv: kv > q),
    "beyond all lengths": ("causal & sliding_window(size=1000000000000)", (None, 1), lambda q, kv: kv <= q),
    "outside of all lengths": ("kv > q + 1000000000000", (READ, None), lambda q, kv: kv < 0),
    "lower right, by the lengths": ("causal(align='lower_right')", (None, READ), lambda q, kv: kv <= q + 3),
    "rows that attend to nothing": ("(kv > q) & causal", (READ, READ), lambda q, kv: kv < 0),
    "of every second key": ("kv <= 2 * q", (None, READ), lambda q, kv: kv <= 2 * q),
    "of the key alone": ("kv < 3", (None, (0, 3)), lambda q, kv: kv < 3),
    "chunks": ("chunked(3)", ((3, 0), (3, 3)), lambda q, kv: q // 3 == kv // 3),
    "earlier keys of chunks": ("causal & chunked(3)", ((3, 0), 1), lambda q, kv: (kv <= q) & (q // 3 == kv // 3)),
    "up to the end of a chunk": ("block_causal(2)", (None, (2, 2)), lambda q, kv: kv // 2 <= q // 2),
    "chunks beyond all lengths": ("chunked(1000000000000)", (None, None), lambda q, kv: kv >= 0),
    "a window in a chunk": (  # whose first key is at the inner one of two places
        "sliding_window(size=2) & chunked(3)",
        (READ, 1),
        lambda q, kv: (kv <= q) & (q - kv < 2) & (q // 3 == kv // 3),
    ),
    "a window as long as a chunk": (
        "sliding_window(size=3) & chunked(3)",
        ((3, 0), 1),
        lambda q, kv: (kv <= q) & (q // 3 == kv // 3),
    ),
    "sinks and a window": (
        "sink_window(2, left=1)",
        [(-1, 1), (None, [(0, 2), 1])],
        lambda q, kv: (kv <= q) & ((kv < 2) | (q - kv <= 1)),
    ),
    "sinks and a window in documents": (
        "sink_window(2, left=1) & document(lengths=[2, 6])",
        (READ, READ),
        lambda q, kv: (kv <= q) & ((kv < 2) | (q - kv <= 1)) & ((q < 2) == (kv < 2)),
    ),
    "keys in three pieces": (
        "sink_window(1, left=0) | (kv > q + 3)",
        (READ, READ),
        lambda q, kv: (kv == q) | ((kv < 1) & (kv <= q)) | (kv > q + 3),
    ),
    "two tables": (  # of which each row may be one interval or none
        "(kv < 3) | (kv >= table([8, 3, 9, 0, 5])[q])",
        [(None, (0, 3)), (READ, None)],
        lambda q, kv: (kv < 3) | (kv >= torch.tensor([8, 3, 9, 0, 5])[q]),
    ),
    "a prefix and a window of data": (
        "causal & ((kv < table([5, 2])[1]) | (q - kv < table([1, 0, 9, 2, 1])[q]))",
        [(None, SHARED), (READ, 1)],
        lambda q, kv: (kv <= q) & ((kv < 2) | (q - kv < torch.tensor([1, 0, 9, 2, 1])[q])),
    ),
    "a gap that begins anywhere": (
        "causal & ((kv < table([1, 0, 2, 2, 1])[q]) | (kv > 2))",
        [(None, READ), ((0, 3), 1)],
        lambda q, kv: (kv <= q) & ((kv < torch.tensor([1, 0, 2, 2, 1])[q]) | (kv > 2)),
    ),
    "a gap in a window": (
        "(kv >= q - 3) & ((kv < 1) | (kv > table([1, 0, 2, 2, 3])[q]))",
        (READ, READ),
        lambda q, kv: (kv >= q - 3) & ((kv < 1) | (kv > torch.tensor([1, 0, 2, 2, 3])[q])),
    ),
    "a gap in chunks before the query": (
        "block_causal(2) & causal(offset=-1) & ((kv < 1) | (kv > table([1, 0, 2, 2, 3])[q]))",
        [(None, [(0, 1), 0]), (READ, 0)],
        lambda q, kv: (kv < q) & ((kv < 1) | (kv > torch.tensor([1, 0, 2, 2, 3])[q])),
    ),
    "a gap up to a key of data": (
        "causal & ((kv < 2) | (kv >= table([3, 4])[1]) | (q == 4))",
        [(None, [(0, 2), 1]), (READ, 1)],
        lambda q, kv: (kv <= q) & ((kv < 2) | (kv >= 4) | (q == 4)),
    ),
    "keys from one on, and a query that sees all": (
        "(kv >= table([3, 4])[1]) | (q == 1)",
        (READ, None),
        lambda q, kv: (kv >= 4) | (q == 1),
    ),
    "a prefix of data and a window": (
        "(kv < table([3, 2])[1]) | sliding_window(size=2) | (q == 1)",
        [(None, READ), (-1, 1)],
        lambda q, kv: (kv < 2) | ((kv <= q) & (kv >= q - 1)) | (q == 1),
    ),
    "a prefix of data and a window that has no key": (
        "(kv < table([3, 2])[1]) | ((kv >= q + 9) & (kv < q + 12))",
        [(None, READ), (9, 12)],
        lambda q, kv: kv + 0 * q < 2,
    ),
    "a prefix of data and chunks": (
        "((kv < table([3, 2])[1]) | chunked(3)) & (kv > 0)",
        (READ, READ),
        lambda q, kv: ((kv < 2) | (q // 3 == kv // 3)) & (kv > 0),
    ),
    "a prefix of data and an interval of data": (
        "(kv < table([3, 2])[1]) | ((kv > table([1, 0, 9, 3, 2])[q]) & (kv <= table([2, 4, 0, 6, 7])[q]) & (q != 4))",
        [(None, SHARED), (READ, READ)],
        lambda q, kv: (kv < 2) | ((kv > torch.tensor([1, 0, 9, 3, 2])[q]) & (kv <= torch.tensor([2, 4, 0, 6, 7])[q]) & (q != 4)),
    ),
    "a prefix and an interval of data": (
        "(kv < 2) | ((kv > table([1, 0, 9, 3, 2])[q]) & (kv <= table([2, 4, 0, 6, 7])[q]))",
        [(None, (0, 2)), (READ, READ)],
        lambda q, kv: (kv < 2) | ((kv > torch.tensor([1, 0, 9, 3, 2])[q]) & (kv <= torch.tensor([2, 4, 0, 6, 7])[q])),
    ),
    "prefixes and an interval of data": (  # of which off the CPU a row has three slots
        "(kv < 1) | (kv < 2) | ((kv > table([1, 0, 9, 3, 2])[q]) & (kv <= table([2, 4, 0, 6, 7])[q]))",
        [(None, (0, 2)), (READ, READ)],
        lambda q, kv: (kv < 2) | ((kv > torch.tensor([1, 0, 9, 3, 2])[q]) & (kv <= torch.tensor([2, 4, 0, 6, 7])[q])),
    ),
    "prefixes of data and blocks of drafts": (
        "(kv < table([1, 2])[0]) | (kv < table([3])[0]) | (((kv - table([3])[0]) // 2 == q // 2) & (kv - table([3])[0] <= q))",
        [(None, SHARED), (READ, READ)],
        lambda q, kv: (kv < 3) | (((kv - 3) // 2 == q // 2) & (kv - 3 <= q)),
    ),
    "a prefix and two pieces of data": (
        "(kv < table([1, 2])[0]) | ((kv > table([1, 0, 9, 3, 2])[q]) & (kv <= table([2, 4, 0, 6, 7])[q])) | "
        "((kv >= table([5, 6])[1]) & (kv < table([5, 7])[1] + q - q))",
        (READ, READ),
        lambda q, kv: (kv < 1) | ((kv > torch.tensor([1, 0, 9, 3, 2])[q]) & (kv <= torch.tensor([2, 4, 0, 6, 7])[q])) | (kv == 6),
    ),
    "a prefix of each query and later keys": (
        "(kv < table([1, 0, 2, 2, 1])[q]) | (kv >= table([3, 0, 8, 5, 4])[q])",
        (READ, READ),
        lambda q, kv: (kv < torch.tensor([1, 0, 2, 2, 1])[q]) | (kv >= torch.tensor([3, 0, 8, 5, 4])[q]),
    ),
    "a prefix of each query and an interval of data": (
        "(kv < table([1, 0, 2, 2, 1])[q]) | ((kv > table([1, 0, 9, 3, 2])[q]) & (kv <= table([2, 4, 0, 6, 7])[q]))",
        (READ, READ),
        lambda q, kv: (
            (kv < torch.tensor([1, 0, 2, 2, 1])[q])
            | ((kv > torch.tensor([1, 0, 9, 3, 2])[q]) & (kv <= torch.tensor([2, 4, 0, 6, 7])[q]))
        ),
    ),
    "a prefix and pieces of data": (
        "(kv < table([3, 2])[1]) | (table([0, 1, 0, 1, 0, 2, 2, 2])[q] == table([0, 1, 0, 1, 0, 2, 2, 2])[kv])",
        (READ, READ),
        lambda q, kv: (kv < 2) | ((q % 2 == kv % 2) & (kv < 5)),
    ),
    "a prefix of data, up to the query": (
        "causal & ((kv < table([3, 2])[1]) | ((kv > table([1, 0, 9, 3, 2])[q]) & (kv <= table([2, 4, 0, 6, 7])[q])))",
        (READ, READ),
        lambda q, kv: (
            (kv <= q) & ((kv < 2) | ((kv > torch.tensor([1, 0, 9, 3, 2])[q]) & (kv <= torch.tensor([2, 4, 0, 6, 7])[q])))
        ),
    ),
    "padding": ("causal & key_padding(4)", (None, READ), lambda q, kv: (kv <= q) & (kv < 4)),
    "padding on the left": ("causal & key_padding(start=2)", (READ, 1), lambda q, kv: (kv <= q) & (kv >= 2)),
    "prefix": ("prefix_lm(3)", (None, READ), lambda q, kv: (kv <= q) | (kv < 3)),
    "padded queries alone": ("query_padding(3)", (None, READ), lambda q, kv: q < 3 + 0 * kv),
    "padded queries": ("causal & query_padding(3)", (None, READ), lambda q, kv: (kv <= q) & (q < 3)),
    "padded queries and keys": ("cross_length(4, q_lengths=3)", (None, READ), lambda q, kv: (kv < 4) & (q < 3)),
    "padded queries in a window": ("sliding_window(size=3) & query_padding(3)", (-2, READ), lambda q, kv: (kv <= q) & (q < 3)),
    "padded queries in documents": (
        "causal & document(lengths=[2, 6]) & query_padding(4)",
        (READ, 1),
        lambda q, kv: (kv <= q) & ((q < 2) == (kv < 2)) & (q < 4),
    ),
    "a query that sees all": ("causal | (q == 2)", (None, READ), lambda q, kv: (kv <= q) | (q == 2)),
    "documents": ("document(lengths=[2, 6])", (READ, READ), lambda q, kv: (q < 2) == (kv < 2)),
    "causal documents": ("causal & document(lengths=[2, 6])", (READ, 1), lambda q, kv: (kv <= q) & ((q < 2) == (kv < 2))),
    "examples and a test": (
        "in_context([0, 0, 1, 2, 2, 2, 2, 2], test_start=3)",  # of which padding is left out among queries and keys
        (READ, 1),
        lambda q, kv: (kv <= q) & ((q >= 3) | ((q < 2) == (kv < 2))),
    ),
    "documents or later queries": (
        "causal & ((table([0, 0, 1, 1, 1, 2, 2, 2])[q] == table([0, 0, 1, 1, 1, 2, 2, 2])[kv]) | (q > 3))",
        (READ, 1),
        lambda q, kv: (kv <= q) & ((q > 3) | ((q < 2) == (kv < 2))),
    ),
    "another condition on keys than on queries": (
        "causal & document(lengths=[2, 6]) & (table([0, 1, 0])[q % 3] < 1) & (table([0, 0, 1])[kv % 3] < 1)",
        (READ, READ),
        lambda q, kv: (kv <= q) & ((q < 2) == (kv < 2)) & (q % 3 != 1) & (kv % 3 != 2),
    ),
    "later keys of documents": (
        "(kv >= q) & document(lengths=[2, 6])",
        (0, READ),
        lambda q, kv: (kv >= q) & ((q < 2) == (kv < 2)),
    ),
    "documents up to the next key": (  # which is not in each document
        "sliding_window(left=9, right=1) & document(lengths=[2, 6])",
        (READ, READ),
        lambda q, kv: (kv <= q + 1) & ((q < 2) == (kv < 2)),
    ),
    "documents from the key before": (
        "(kv >= q - 1) & document(lengths=[2, 6])",
        (READ, READ),
        lambda q, kv: (kv >= q - 1) & ((q < 2) == (kv < 2)),
    ),
    "keys before the query, in pieces": (  # of which the last one may end anywhere before it
        "(kv % 2 <= q % 2) & (kv < q)",
        (READ, READ),
        lambda q, kv: (kv % 2 <= q % 2) & (kv < q),
    ),
    "keys after the query, in pieces": (
        "(kv % 2 <= q % 2) & (kv > q)",
        (READ, READ),
        lambda q, kv: (kv % 2 <= q % 2) & (kv > q),
    ),
    "each token of its document": (  # and padding none
        "causal & (kv >= q) & document(lengths=[2, 1], padding=True)",
        (READ, 1),
        lambda q, kv: (kv == q) & (q < 3),
    ),
}


def band_of(ends: Ends | list[Ends]) -> Band:
    """A band of the table."""

    def end_of(end: Any) -> End:
        if end is None:
            return ()
        if end in (READ, SHARED):
            return cast(End, end)
        return tuple((1, place) if isinstance(place, int) else place for place in (end if isinstance(end, list) else [end]))

    pairs = ends if isinstance(ends, list) else [ends]
    return tuple((end_of(low), end_of(high)) for low, high in pairs)


def computed_by(mask_mod: Any) -> list[tuple[End, ...]]:
    """The ends that a mask_mod computes, and how it reads the others."""

    def end_of(end: Any) -> End:
        return READ if any(isinstance(place[0], Tensor) for place in end) else end

    return [tuple(map(end_of, pair)) for pair in tensors_of(mask_mod)["intervals"]]


def tensors_of(mask_mod: Any) -> dict[str, Any]:
    """What a mask_mod holds."""
    return {name: cell.cell_contents for name, cell in zip(mask_mod.__code__.co_freevars, mask_mod.__closure__, strict=True)}


def cells(mask_mod: Any, *sizes: int) -> Tensor:
    """The cells of a mask_mod, bool[B, H, q_len, kv_len]."""
    indices = torch.meshgrid(*map(torch.arange, sizes), indexing="ij")
    found: Tensor = mask_mod(*indices)
    return found.expand(sizes)


@pytest.mark.parametrize("name", BANDS)
@pytest.mark.usefixtures("elsewhere")
def test_bands(name: str) -> None:
    text, band, meaning = BANDS[name]
    plan, (q, kv) = lowered(fm.parse(text), 5, 8, batch=1), torch.meshgrid(torch.arange(5), torch.arange(8), indexing="ij")
    assert plan.band == band_of(band)
    for found in (plan.dense(), cells(plan.triton_block_mask.mask_mod, 1, 1, 5, 8)):
        assert torch.equal(found[0, 0], meaning(q, kv))


@pytest.mark.parametrize("name", each_run(BANDS, "causal documents", "sinks and a window"))
def test_compiled_bands(name: str) -> None:
    text, _, meaning = BANDS[name]
    plan, (q, kv) = fm.plan(text, 5, 8, batch=1), torch.meshgrid(torch.arange(5), torch.arange(8), indexing="ij")
    zero = torch.zeros((), dtype=torch.long)
    torch.compiler.reset()
    found = torch.compile(lambda q, kv: plan().mask_mod(zero, zero, q, kv), backend="eager", fullgraph=True)(q, kv)
    assert torch.equal(found, meaning(q, kv))


@pytest.mark.parametrize("name", BANDS)
@pytest.mark.usefixtures("elsewhere")
def test_bands_are_arithmetic_elsewhere_than_on_the_cpu(name: str) -> None:
    text, band, meaning = BANDS[name]
    q, kv = torch.meshgrid(torch.arange(5), torch.arange(8), indexing="ij")
    found = fm.parse(text).mask_mod(5, 8)
    wanted = [tuple(READ if end == SHARED else end for end in pair) for pair in band_of(band)]
    assert computed_by(found)[: len(wanted)] == wanted
    assert len(computed_by(found)) >= len(band_of(band))
    assert torch.equal(cells(found, 1, 1, 5, 8)[0, 0], meaning(q, kv))


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("prefix", ["table([2, 5])[b]", "table([2])[b]", "2", "2 + h"])
def test_around_a_gap(prefix: str) -> None:
    """Two values are read, the first without the query where it varies; of a mask without a batch they serve any.

    For Triton one that is the same for all is read without an index.
    """
    mask = fm.parse(f"causal & ((kv < {prefix}) | (kv > q - table([0, 1, 2, 0, 1, 9, 0, 1])[q]))")
    sizes: dict[str, Any] = {"batch": 2 if "5" in prefix else None, "heads": 2 if "h" in prefix else None}
    for form, of_all in zip(FORMS, ((2,), ()), strict=True):
        found = mask.block_mask(8, form=form, **sizes).mask_mod
        first = [end.axes for end in tensors_of(found)["intervals"][0][1] if isinstance(end[0], Tensor)]
        assert first == {"table([2, 5])[b]": [(0,)], "table([2])[b]": [of_all], "2": [], "2 + h": [(1,)]}[prefix]
        assert torch.equal(cells(found, 2, 2, 8, 8), mask.dense(8, **sizes).expand(2, 2, 8, 8))


def test_one_kernel_serves_most_masks_on_the_cpu() -> None:
    for text in (text for name, (text, _, _) in BANDS.items() if "pieces" not in name):
        found = fm.parse(text).mask_mod(5, 8, batch=2)
        assert computed_by(found) == [(READ, READ)] * 2
        assert {place.axes for pair in tensors_of(found)["intervals"] for end in pair for place in end} == {(0, 2)}


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.usefixtures("elsewhere")
def test_named_masks(name: str) -> None:
    for arguments, allowed in EXAMPLES[name]:
        mask, shape = NAMES[name](**arguments), Shape(4, 4, batch=2)
        wanted = Case(mask, allowed).expected(shape)
        for form in FORMS:
            assert torch.equal(cells(mask.mask_mod(4, batch=2, form=form), 2, 1, 4, 4), wanted.expand(2, 1, 4, 4))


FORMS: tuple[Form, ...] = ("auto", "triton")


#: Parts of conjunctions, and what they mean.
Part = tuple[str, Callable[..., Tensor]]


def part(draw: random.Random, n: int) -> Part:
    """A part of a conjunction, of two sequences of n tokens."""
    distance, ends = draw.randint(-3, n), torch.tensor([draw.randint(0, n), draw.randint(0, n)])
    ids = torch.tensor([draw.choices(range(-1, 4), k=n) for _ in range(2)])
    if contiguous := draw.random() < 0.5:
        ids = ids.sort(-1).values
    number, lengths = ids.tolist(), ends.tolist()
    return draw.choice(
        [
            (f"(kv <= q + {distance})", lambda b, q, kv: kv <= q + distance),
            ("causal", lambda b, q, kv: kv <= q),
            (f"(kv >= q - {distance})", lambda b, q, kv: kv >= q - distance),
            (f"document({number}, contiguous={contiguous})", lambda b, q, kv: (ids[b, q] == ids[b, kv]) & (ids[b, q] >= 0)),
            (f"(table({number})[b, kv] <= table({number})[b, q])", lambda b, q, kv: ids[b, kv] <= ids[b, q]),
            (f"(table({number})[b, kv] < table({number})[b, q])", lambda b, q, kv: ids[b, kv] < ids[b, q]),
            ("(kv % 2 <= q % 2)", lambda b, q, kv: kv % 2 <= q % 2),
            (f"key_padding({lengths})", lambda b, q, kv: kv < ends[b]),
            (f"key_padding(start={lengths})", lambda b, q, kv: kv >= ends[b]),
            (f"query_padding({lengths})", lambda b, q, kv: q < ends[b]),
            (f"(table({number})[b, q] != 1)", lambda b, q, kv: ids[b, q] != 1),
            (f"prefix_lm({lengths})", lambda b, q, kv: (kv <= q) | (kv < ends[b])),
        ]
    )


@pytest.mark.parametrize("seed", range(200))
@pytest.mark.usefixtures("elsewhere")
def test_conjunctions(seed: int) -> None:
    draw = random.Random(seed)
    n = draw.randint(1, 9)
    parts = [part(draw, n) for _ in range(draw.randint(1, 4))]
    offset = draw.choice([0, 0, draw.randint(0, n - 1)])
    q_len = n - offset
    mask = fm.parse(" & ".join(text for text, _ in parts))
    b, _, q, kv = torch.meshgrid(*map(torch.arange, (2, 1, q_len, n)), indexing="ij")
    wanted = torch.stack([meaning(b, q + offset, kv) for _, meaning in parts]).all(0)
    for form in FORMS:
        assert torch.equal(cells(mask.mask_mod(q_len, n, batch=2, q_offset=offset, form=form), 2, 1, q_len, n), wanted)


def interval(draw: random.Random, n: int) -> Part:
    """An interval of data of each query, of which some are empty."""
    low, high = (torch.tensor([draw.randint(0, n) for _ in range(n)]) for _ in range(2))
    text = f"((kv >= table({low.tolist()})[q]) & (kv < table({high.tolist()})[q]))"
    return text, lambda b, q, kv: (kv >= low[q]) & (kv < high[q])


def first_keys(draw: random.Random, n: int) -> Part:
    """The first keys of each sequence, or of all."""
    ends = torch.tensor([draw.randint(0, n), draw.randint(0, n)])
    if draw.random() < 0.3:
        return f"(kv < {int(ends[0])})", lambda b, q, kv: kv < ends[0]
    return f"key_padding({ends.tolist()})", lambda b, q, kv: kv < ends[b]


def of_query(draw: random.Random, n: int) -> Part:
    """A condition on the query alone, which has one interval or several."""
    one, other = draw.randrange(n), draw.randrange(n)
    return draw.choice(
        [
            (f"(q == {one})", lambda b, q, kv: q == one),
            (f"((q < {one}) ^ (q > {other}))", lambda b, q, kv: (q < one) ^ (q > other)),
        ]
    )


@pytest.mark.parametrize("seed", range(100))
@pytest.mark.usefixtures("elsewhere")
def test_unions(seed: int) -> None:
    """First keys, a condition on the query and an interval of data, perhaps up to the query."""
    draw = random.Random(seed)
    n = draw.randint(1, 8)
    kinds = [first_keys] * draw.randint(1, 3) + [of_query] * draw.randint(0, 1) + [interval] * draw.randint(0, 1)
    parts = [kind(draw, n) for kind in kinds]
    is_causal, text = draw.random() < 0.3, " | ".join(text for text, _ in parts)
    mask = fm.parse(f"causal & ({text})" if is_causal else text)
    b, _, q, kv = torch.meshgrid(*map(torch.arange, (2, 1, n, n)), indexing="ij")
    wanted = torch.stack([meaning(b, q, kv).expand(2, 1, n, n) for _, meaning in parts]).any(0)
    for form in FORMS:
        found = cells(mask.mask_mod(n, batch=2, form=form), 2, 1, n, n)
        assert torch.equal(found, wanted & (kv <= q) if is_causal else wanted)


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(("prefix", "axes"), [("table([2, 5])[b]", [(0,)]), ("table([2])[0]", [()])])
def test_first_keys_that_are_the_same_for_all_queries(prefix: str, axes: list[tuple[int, ...]]) -> None:
    """They are read without the query."""
    mask = fm.parse(f"(kv < {prefix}) | ((kv > table([1, 0, 2, 4, 3, 9, 0, 6])[q]) & (kv < table([3, 6, 0, 6, 7, 8, 9, 8])[q]))")
    found = mask.mask_mod(8, batch=2, form="triton")
    assert [end.axes for end in tensors_of(found)["intervals"][0][1]] == axes
    assert torch.equal(cells(found, 2, 1, 8, 8), mask.dense(8, batch=2).expand(2, 1, 8, 8))


@pytest.mark.usefixtures("elsewhere")
def test_queries_behind_the_keys() -> None:
    """Whose own document may have keys that are not next to them."""
    ids = torch.tensor([5, 5, 7, 7, 5, 5])
    q, kv = fm.minimum(fm.q, 5), fm.minimum(fm.kv, 5)
    same, lower = fm.table(ids)[kv] == fm.table(ids)[q], torch.ones(6, 4, dtype=torch.bool).tril()
    own = ids[:4] == ids[:, None]
    for mask, wanted in (
        (fm.causal() & same, own & lower),
        (fm.sliding_window(size=2) | same, own | (lower & ~lower.tril(-2))),
    ):
        assert torch.equal(cells(mask.mask_mod(6, 4), 1, 1, 6, 4)[0, 0], wanted)


@pytest.mark.usefixtures("elsewhere")
def test_documents_in_several_pieces() -> None:
    ids = torch.tensor([0, 1, 1, 0])
    found = (fm.causal() & (fm.table(ids)[fm.kv] == fm.table(ids)[fm.q])).mask_mod(4)
    assert len(computed_by(found)) == 2
    assert torch.equal(cells(found, 1, 1, 4, 4)[0, 0], (ids == ids[:, None]) & torch.ones(4, 4, dtype=torch.bool).tril())


@pytest.mark.parametrize("text", ["document(ids)", "causal & document(ids)", "bidirectional_spans(ids)"])
@pytest.mark.usefixtures("elsewhere")
def test_padding_between_documents_takes_no_interval(text: str) -> None:
    ids = torch.tensor([[-1, -1, 0, 0, -1, 1, 1, -1], [0, -1, 1, -1, 2, -1, 3, -1]])
    mask, same = fm.parse(text, ids=ids), (ids[:, :, None] == ids[:, None]) & (ids[:, :, None] >= 0)
    lower = torch.ones(8, 8, dtype=torch.bool).tril()
    wanted = same if text == "document(ids)" else same & lower if "causal" in text else same | lower
    assert mask.rows(8).lower.slots == 1
    assert torch.equal(cells(mask.mask_mod(8), 2, 1, 8, 8)[:, 0], wanted)


@pytest.mark.parametrize(
    "text",
    [
        "block_diffusion(length=4, size=2)",
        "multi_item(2, [0, 1, 2, 0, 1, 2])",
        "svg_spatial(2, width=1, prompt=1)",
        "causal & qk_sparse([2], [3])",
    ],
)
@pytest.mark.usefixtures("elsewhere")
def test_named_masks_of_two_intervals(text: str) -> None:
    """As their rows are, where the host cannot count them."""
    assert fm.parse(text).rows(8).lower.slots == 2


@pytest.mark.usefixtures("elsewhere")
def test_conditions_on_the_query_take_no_interval() -> None:
    conditions, q, kv = " | ".join(f"(q == {place})" for place in range(1, 71)), torch.arange(80)[:, None], torch.arange(80)
    whole = ((q >= 1) & (q <= 70)).expand(80, 80)
    for text, count, wanted in (
        (conditions, 1, whole),
        (f"(kv == 2) | {conditions} | (kv == 4)", 2, whole | (kv == 2) | (kv == 4)),
        (f"((q + kv) % 3 == 1) | (kv == 2) | {conditions}", 2, whole | (kv == 2)),  # from below, as a part is not separable
        ("(kv == 2) | ((q < 9) ^ (q > 70))", 1, ((q < 9) | (q > 70)) | (kv == 2)),  # whose own rows have several intervals
    ):
        rows = fm.parse(text).rows(80).lower
        assert torch.equal(rows.counts()[0, 0], wanted.sum(-1))
        assert rows.slots == count
        assert torch.equal(rows.holds(kv)[0, 0], wanted)


#: Masks whose parts share a key in each row, so that their union is one interval.
UNIONS = {
    "prefixes": "prefix_lm([3, 5]) & key_padding([7, 6])",
    "suffixes": "(kv >= q) | key_padding(start=[5, 6])",
    "around the query": "causal & sliding_window(size=3) | (document(lengths=[[2, 6], [5, 3]]) & query_padding([8, 4]))",
}


@pytest.mark.parametrize("name", UNIONS)
def test_unions_are_one_interval(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the host cannot read how many are used."""
    mask = fm.parse(UNIONS[name])
    wanted = mask.dense(8, batch=2)
    monkeypatch.setattr(_sync, "needs_sync", lambda tensor: True)
    rows = mask.rows(8, batch=2)
    assert rows.exact
    assert rows.lower.slots == 1
    assert torch.equal(cells(mask.mask_mod(8, batch=2), 2, 1, 8, 8), wanted)


@pytest.mark.slow
def test_a_union_of_more_intervals_than_are_listed() -> None:
    """Which a graph does not know, and lists as cells."""
    mask: fm.Mask = fm.causal()
    for place in range(70):
        mask |= fm.kv < fm.table(torch.tensor([place % 5 + 1]))[fm.b]
    wanted = torch.ones(8, 8, dtype=torch.bool).tril() | (torch.arange(8) < 5)
    assert torch.equal(mask.plan(8, batch=1)().dense()[0, 0], wanted)


@pytest.mark.usefixtures("elsewhere")
def test_unions_of_what_shares_no_key() -> None:
    for text in ("(kv < 2) | (kv >= q)", "(kv > q) | document(lengths=[2, 6])", "(kv < 2) | document(lengths=[2, 6])"):
        assert fm.parse(text).rows(8).lower.slots == 2
