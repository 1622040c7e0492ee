"""The named masks with the oracle's predicates."""

import random
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch

import flexmask as fm
from flexmask import Mask
from tests.support import oracle
from tests.support.strategies import Case, Shape

Convert: TypeAlias = Callable[[Any], Any]
SHAPES = {
    "1x1": Shape(1, 1, batch=3, heads=2),
    "square": Shape(8, 8, batch=3, heads=2),
    "wide": Shape(5, 12, batch=3, heads=2),
    "tall": Shape(12, 5, batch=3, heads=2),
    "odd": Shape(9, 13, batch=3, heads=2),
    "offset": Shape(4, 11, batch=3, heads=2, q_offset=7),
    "one row": Shape(1, 16, batch=3, heads=2, q_offset=15),
    "offsets": Shape(4, 11, batch=3, heads=2, q_offset=(0, 7, 3)),
}
FORMS: dict[str, Convert] = {
    "literal": lambda data: data,
    "numpy": np.asarray,
    "tensor": torch.tensor,
    "int32": lambda data: torch.tensor(data) if isinstance(data, list) and data_of_bools(data) else as_int32(data),
}


def data_of_bools(data: Any) -> bool:
    return data_of_bools(data[0]) if isinstance(data, list) else isinstance(data, bool)


def as_int32(data: Any) -> torch.Tensor:
    return torch.tensor(data, dtype=torch.int32)


def draw(seed: int, entries: list[Any], *sizes: int) -> Any:
    """Nested lists of these sizes, the same for the same seed."""
    numbers = random.Random(seed)

    def fill(sizes: tuple[int, ...]) -> Any:
        return [fill(sizes[1:]) for _ in range(sizes[0])] if sizes else numbers.choice(entries)

    return fill(sizes)


def keys(shape: Shape) -> list[int]:
    return [shape.kv_len, 0, shape.kv_len // 2]


def queries(shape: Shape) -> list[int]:
    return [shape.q_len // 2, shape.q_len, 0]


BOOLS, IDS = [False, True, True], [-1, 0, 0, 1]
PLAIN: dict[str, tuple[Callable[[], Mask], oracle.Predicate]] = {
    "full": (fm.full, oracle.full()),
    "empty": (fm.empty, oracle.empty()),
    "causal": (fm.causal, oracle.causal()),
    "causal upper_left": (lambda: fm.causal(align="upper_left"), oracle.causal("upper_left")),
    "causal lower_right": (lambda: fm.causal(align="lower_right"), oracle.causal("lower_right")),
    "causal strict": (lambda: fm.causal(offset=-1), oracle.causal(offset=-1)),
    "causal ahead": (lambda: fm.causal(align="lower_right", offset=3), oracle.causal("lower_right", 3)),
    "window both": (lambda: fm.sliding_window(left=2, right=1), oracle.sliding_window(2, 1)),
    "window names": (lambda: fm.sliding_window(left=0, right=4), oracle.sliding_window(0, 4)),
    "window left": (lambda: fm.sliding_window(left=3, right=None), oracle.sliding_window(3, None)),
    "window right": (lambda: fm.sliding_window(left=None, right=0), oracle.sliding_window(None, 0)),
    "window size": (lambda: fm.sliding_window(size=3), oracle.sliding_window(size=3)),
    "window size 1": (lambda: fm.sliding_window(size=1), oracle.sliding_window(size=1)),
    "window longer": (lambda: fm.sliding_window(left=99, right=99), oracle.sliding_window(99, 99)),
    "shift": (lambda: fm.masks.shift(fm.causal(), q=2, kv=-1), oracle.shift(oracle.causal(), 2, -1)),
    "shift down": (
        lambda: fm.masks.shift(fm.sliding_window(left=1, right=1), q=3),
        oracle.shift(oracle.sliding_window(1, 1), 3, 0),
    ),
    "shift right": (
        lambda: fm.masks.shift(fm.sliding_window(left=1, right=1), kv=3),
        oracle.shift(oracle.sliding_window(1, 1), 0, 3),
    ),
    "transpose": (lambda: fm.masks.transpose(fm.causal()), oracle.transpose(oracle.causal())),
    "transpose lower_right": (
        lambda: fm.masks.transpose(fm.causal(align="lower_right", offset=1)),
        oracle.transpose(oracle.causal("lower_right", 1)),
    ),
    "where": (
        lambda: fm.where(fm.q % 2 == 0, fm.causal(), fm.sliding_window(left=0, right=2)),
        oracle.where(lambda b, h, q, kv, q_len, kv_len: q % 2 == 0, oracle.causal(), oracle.sliding_window(0, 2)),
    ),
    "per_head": (
        lambda: fm.per_head([fm.causal(), fm.sliding_window(left=1, right=1)]),
        oracle.per_head([oracle.causal(), oracle.sliding_window(1, 1)]),
    ),
}


def document_lengths(shape: Shape, form: Convert, batched: bool) -> Case:
    total = shape.longest
    rows = [[total // 2, total - total // 2], [total, 0], [total // 3, total - total // 3]]
    ids = [oracle.ids_of_lengths(row, shape.longest) for row in rows]
    if batched:
        return Case(fm.document(lengths=form(rows)), oracle.document(ids))
    return Case(fm.document(lengths=form(rows[0])), oracle.document(ids[0]))


def document_lengths_padding(shape: Shape, form: Convert, batched: bool) -> Case:
    total = min(shape.q_end, shape.kv_len)
    rows = [[total // 2, total - total // 2], [total, 0], [total // 3, 0]]
    ids = [oracle.ids_of_lengths(row, shape.longest) for row in rows]
    if batched:
        return Case(fm.document(lengths=form(rows), padding=True), oracle.document(ids))
    return Case(fm.document(lengths=form(rows[2]), padding=True), oracle.document(ids[2]))


def document_cu_seqlens(shape: Shape, form: Convert, batched: bool) -> Case:
    total = min(shape.q_end, shape.kv_len)
    rows = [[0, total // 2, total], [0, 0, total], [0, total // 3, total // 2]]
    ids = [oracle.ids_of_cu_seqlens(row, shape.longest) for row in rows]
    if batched:
        return Case(fm.document(cu_seqlens=form(rows), padding=True), oracle.document(ids))
    return Case(fm.document(cu_seqlens=form(rows[2]), padding=True), oracle.document(ids[2]))


def document_position_ids(shape: Shape, form: Convert, batched: bool) -> Case:
    rows = [[position % size for position in range(shape.longest)] for size in (3, 50, 4)]
    ids = [oracle.ids_of_position_ids(row) for row in rows]
    if batched:
        return Case(fm.document(position_ids=form(rows)), oracle.document(ids))
    return Case(fm.document(position_ids=form(rows[2])), oracle.document(ids[2]))


def per_document(shape: Shape, form: Convert, batched: bool) -> Case:
    total = shape.longest
    lengths = [[total // 2, total - total // 2], [0, total], [total // 3, total // 4]]
    rows = [oracle.ids_of_lengths(row, total) for row in lengths]
    ids = rows if batched else rows[2]
    inner = fm.sliding_window(left=2, right=1) & (fm.kv % 3 != 1)
    meaning = oracle.both(oracle.sliding_window(2, 1), lambda b, h, q, kv, q_len, kv_len: kv % 3 != 1)
    if shape.q_end <= shape.kv_len:
        mask = fm.per_document(inner, form(ids))
    else:
        mask = fm.per_document(inner, lengths=form(lengths if batched else lengths[2]), padding=True)
    return Case(mask, oracle.per_document(meaning, ids))


def simple(
    build: Callable[..., Mask], meaning: Callable[..., oracle.Predicate], *data: Callable[[Shape, bool], Any]
) -> Callable[[Shape, Convert, bool], Case]:
    """A mask whose library function and oracle take the same data."""

    def case(shape: Shape, form: Convert, batched: bool) -> Case:
        values = [entry(shape, batched) for entry in data]
        return Case(build(*map(form, values)), meaning(*values))

    return case


def lengths_of(rows: Callable[[Shape], list[int]]) -> Callable[[Shape, bool], Any]:
    return lambda shape, batched: rows(shape) if batched else rows(shape)[2]


def over(axis: str, entries: list[Any]) -> Callable[[Shape, bool], Any]:
    """Data along one axis of the mask, drawn at random."""

    def data(shape: Shape, batched: bool) -> Any:
        length = getattr(shape, axis)
        return draw(7, entries, shape.batch, length) if batched else draw(7, entries, length)

    return data


key_lengths, query_lengths = lengths_of(keys), lengths_of(queries)
WITH_DATA: dict[str, Callable[[Shape, Convert, bool], Case]] = {
    "key_padding": simple(fm.key_padding, oracle.key_padding, key_lengths),
    "key_padding left": simple(
        lambda lengths: fm.key_padding(lengths, side="left"),
        lambda lengths: oracle.key_padding(lengths, "left"),
        key_lengths,
    ),
    "key_padding start": simple(lambda start: fm.key_padding(start=start), oracle.key_start, key_lengths),
    "key_padding keep": simple(lambda keep: fm.key_padding(keep=keep), oracle.key_keep, over("kv_len", BOOLS)),
    "key_padding hide": simple(lambda hide: fm.key_padding(hide=hide), oracle.key_hide, over("kv_len", BOOLS)),
    "query_padding": simple(fm.query_padding, oracle.query_padding, query_lengths),
    "query_padding left": simple(
        lambda lengths: fm.query_padding(lengths, side="left"),
        lambda lengths: oracle.query_padding(lengths, "left"),
        query_lengths,
    ),
    "query_padding start": simple(lambda start: fm.query_padding(start=start), oracle.query_start, query_lengths),
    "query_padding keep": simple(lambda keep: fm.query_padding(keep=keep), oracle.query_keep, over("q_end", BOOLS)),
    "query_padding hide": simple(lambda hide: fm.query_padding(hide=hide), oracle.query_hide, over("q_end", BOOLS)),
    "cross_length": simple(fm.cross_length, oracle.cross_length, key_lengths),
    "cross_length both": simple(
        lambda kv_lengths, q_lengths: fm.cross_length(kv_lengths, q_lengths=q_lengths),
        oracle.cross_length,
        key_lengths,
        query_lengths,
    ),
    "document ids": simple(fm.document, oracle.document, over("longest", IDS)),
    "document kv_ids": simple(fm.document, oracle.document, over("q_end", IDS), over("kv_len", IDS)),
    "document lengths": document_lengths,
    "document lengths padding": document_lengths_padding,
    "document cu_seqlens": document_cu_seqlens,
    "document position_ids": document_position_ids,
    "prefix_lm": simple(fm.prefix_lm, oracle.prefix_lm, key_lengths),
    "dense": simple(
        fm.from_dense,
        oracle.dense,
        lambda shape, batched: (
            draw(5, BOOLS, shape.batch, shape.q_end, shape.kv_len) if batched else draw(5, BOOLS, shape.q_end, shape.kv_len)
        ),
    ),
    "per_document": per_document,
}
NAMES = [*PLAIN, *WITH_DATA]
#: They depend on q_len, which has no meaning next to a q_offset.
FROM_THE_END = {"causal lower_right", "causal ahead", "transpose lower_right", "query_padding left"}
#: One list of as many ids as keys serves the queries too, so these must not be more.
ONE_SEQUENCE = {"document ids", "document position_ids"}


def fits(name: str, shape: Shape) -> bool:
    if name in FROM_THE_END:
        return shape.q_offset == 0
    return name not in ONE_SEQUENCE or shape.q_end <= shape.kv_len


def named(name: str, shape: Shape, batched: bool = True) -> Case:
    """A named mask with its data as lists."""
    if name in PLAIN:
        build, allowed = PLAIN[name]
        return Case(build(), allowed)
    return WITH_DATA[name](shape, FORMS["literal"], batched)


def assert_means(case: Case, shape: Shape) -> torch.Tensor:
    """The dense mask is exactly the oracle's table; returns the dense mask as it came."""
    dense = case.mask.dense(**shape.lowering)
    expected = case.expected(shape)
    assert dense.dtype == torch.bool
    assert dense.shape[2:] == expected.shape[2:]
    assert torch.equal(dense.expand_as(expected), expected)
    return dense
