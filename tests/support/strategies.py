"""Hypothesis strategies that draw a mask together with its meaning.

Every strategy builds two things in parallel from the same drawn numbers: the flexmask object, and a plain Python function
that answers one cell. The second needs nothing from the library, so a test can compare the two.
"""

import operator
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, Literal, TypeAlias

import torch
from hypothesis import strategies as st

import flexmask as fm
from flexmask import Mask
from tests.support import oracle

Value: TypeAlias = Callable[[int, int, int, int, int, int], int]

LONGEST = 40


@dataclass(frozen=True)
class Shape:
    """What a mask is lowered with, and what may be drawn for it.

    Attributes:
        q_offset: One for all, or one for each batch element.
        anywhere: Only masks that have a meaning outside of the sequence too, as `shift` asks.
        lengths: Which of `q_len` and `kv_len` a mask may depend on: not on `q_len` with a `q_offset`, at neither in a
            `per_document`.
    """

    q_len: int
    kv_len: int
    batch: int = 1
    heads: int = 1
    q_offset: int | tuple[int, ...] = 0
    anywhere: bool = False
    lengths: tuple[str, ...] = ("q_len", "kv_len")

    @property
    def q_end(self) -> int:
        """One past the last query position; data over queries must reach it."""
        return self.q_len + (self.q_offset if isinstance(self.q_offset, int) else max(self.q_offset))

    @property
    def longest(self) -> int:
        """One past the last position of either axis."""
        return max(self.q_end, self.kv_len)

    @property
    def lowering(self) -> dict[str, Any]:
        """The arguments of a lowering."""
        return {
            "q_len": self.q_len,
            "kv_len": self.kv_len,
            "batch": self.batch,
            "heads": self.heads,
            "q_offset": self.q_offset if isinstance(self.q_offset, int) else torch.tensor(self.q_offset),
        }


@dataclass(frozen=True)
class Case:
    """A mask, and what it should say about one cell. Printed, as where a drawn one fails, it is what makes the mask."""

    mask: Mask
    allowed: oracle.Predicate

    def __repr__(self) -> str:
        return f"fm.parse({str(self.mask)!r})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # of Hypothesis, which prints the fields of a dataclass else
        printer.text(repr(self))

    def expected(self, shape: Shape) -> torch.Tensor:
        """The oracle's answer, bool [batch, heads, q_len, kv_len]."""
        table = oracle.table_of(
            self.allowed,
            shape.q_len,
            shape.kv_len,
            batch=shape.batch,
            heads=shape.heads,
            q_offset=shape.q_offset,
        )
        return torch.tensor(table, dtype=torch.bool)


@dataclass(frozen=True)
class IndexCase:
    """An index expression or an integer, and its value in one cell."""

    index: Any
    value: Value


@st.composite
def shapes(draw: st.DrawFn, longest: int = LONGEST, offsets: bool = True) -> Shape:
    """Single cells, squares, wide, tall and odd rectangles; small batches and few heads; now and then a `q_offset`."""
    length = st.integers(1, longest)
    q_len, kv_len = draw(
        st.one_of(
            st.just((1, 1)),
            length.map(lambda n: (n, n)),
            st.tuples(st.integers(1, min(4, longest)), length),
            st.tuples(length, st.integers(1, min(4, longest))),
            st.tuples(length, length),
        )
    )
    batch, heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    position = st.sampled_from([0, 1, 3, 8])
    of_each = st.lists(position, min_size=batch, max_size=batch).map(tuple)
    q_offset = draw(st.one_of(st.just(0), position, of_each)) if offsets else 0
    lengths = ("q_len", "kv_len") if q_offset == 0 else ("kv_len",)
    return Shape(q_len, kv_len, batch, heads, q_offset, lengths=lengths)


# ---------------------------------------------------------------- index expressions

SYMBOLS: dict[str, IndexCase] = {
    "q": IndexCase(fm.q, lambda b, h, q, kv, q_len, kv_len: q),
    "kv": IndexCase(fm.kv, lambda b, h, q, kv, q_len, kv_len: kv),
    "b": IndexCase(fm.b, lambda b, h, q, kv, q_len, kv_len: b),
    "h": IndexCase(fm.h, lambda b, h, q, kv, q_len, kv_len: h),
    "q_len": IndexCase(fm.q_len, lambda b, h, q, kv, q_len, kv_len: q_len),
    "kv_len": IndexCase(fm.kv_len, lambda b, h, q, kv, q_len, kv_len: kv_len),
}
small = st.integers(-6, 12)
factors = st.sampled_from([-3, -2, -1, 1, 2, 3, 5])


def symbols(shape: Shape) -> st.SearchStrategy[IndexCase]:
    """One of the six; q and kv most often, they are what a mask is about."""
    return st.sampled_from(["q", "q", "q", "kv", "kv", "kv", "b", "h", *shape.lengths]).map(SYMBOLS.__getitem__)


def constant(number: int) -> Value:
    return lambda *cell: number


def combined(operation: Callable[[int, int], int], left: Value, right: Value) -> Value:
    return lambda *cell: operation(left(*cell), right(*cell))


@st.composite
def lookups(draw: st.DrawFn, shape: Shape, depth: int) -> IndexCase:
    """A small literal table read at an index that the remainder keeps in range."""
    size = draw(st.integers(1, 4))
    numbers = st.integers(-3, 8)
    place = draw(index_cases(shape, depth - 1))
    if draw(st.booleans()):
        data = draw(st.lists(numbers, min_size=size, max_size=size))
        return IndexCase(fm.table(data)[place.index % size], lambda *cell: data[place.value(*cell) % size])
    other = draw(index_cases(shape, depth - 1))
    grid = draw(st.lists(st.lists(numbers, min_size=3, max_size=3), min_size=size, max_size=size))
    return IndexCase(
        fm.table(grid)[place.index % size, other.index % 3],
        lambda *cell: grid[place.value(*cell) % size][other.value(*cell) % 3],
    )


@st.composite
def index_cases(draw: st.DrawFn, shape: Shape, depth: int = 2) -> IndexCase:
    """An expression over the symbols; the sizes stay far from overflow."""
    if depth <= 0:
        return draw(symbols(shape))
    kind = draw(st.sampled_from(["symbol", "symbol", "sum", "pair", "scale", "divide", "abs", "extreme", "lookup", "choice"]))
    if kind == "symbol":
        return draw(symbols(shape))
    if kind == "lookup":
        return draw(lookups(shape, depth))
    part = draw(index_cases(shape, depth - 1))
    index, value = part.index, part.value
    if kind == "abs":
        return IndexCase(abs(index), lambda *cell: abs(value(*cell)))
    if kind == "sum":
        number = draw(small)
        if draw(st.booleans()):
            return IndexCase(number - index, combined(operator.sub, constant(number), value))
        return IndexCase(index + number, combined(operator.add, value, constant(number)))
    if kind == "scale":
        number = draw(factors)
        return IndexCase(number * index, combined(operator.mul, constant(number), value))
    if kind == "divide":
        number = draw(factors)
        divide = draw(st.sampled_from([operator.floordiv, operator.mod]))
        return IndexCase(divide(index, number), combined(divide, value, constant(number)))
    other = draw(st.one_of(index_cases(shape, depth - 1), small.map(lambda n: IndexCase(n, constant(n)))))
    if kind == "pair":
        operation = draw(st.sampled_from([operator.add, operator.sub]))
        return IndexCase(operation(index, other.index), combined(operation, value, other.value))
    if kind == "choice":
        condition = draw(comparisons(shape, depth - 1))
        return IndexCase(
            fm.where(condition.mask, index, other.index),
            lambda *cell: value(*cell) if condition.allowed(*cell) else other.value(*cell),
        )
    pick, plain = draw(st.sampled_from([(fm.minimum, min), (fm.maximum, max)]))
    return IndexCase(pick(index, other.index), combined(plain, value, other.value))


COMPARISONS = [operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne]


@st.composite
def comparisons(draw: st.DrawFn, shape: Shape, depth: int = 2) -> Case:
    left = draw(index_cases(shape, depth))
    right = draw(st.one_of(index_cases(shape, depth), small.map(lambda n: IndexCase(n, constant(n)))))
    compare = draw(st.sampled_from(COMPARISONS))
    return Case(compare(left.index, right.index), lambda *cell: compare(left.value(*cell), right.value(*cell)))


# ---------------------------------------------------------------- named masks


def per_batch(shape: Shape, entry: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """One entry for all, or a list of one for each batch element."""
    return st.one_of(entry, st.lists(entry, min_size=shape.batch, max_size=shape.batch))


def filled(entries: Sequence[Any], *sizes: int) -> st.SearchStrategy[Any]:
    """Nested lists of these sizes; one drawn seed stands for them all, which keeps long data cheap to draw."""

    def fill(numbers: random.Random, sizes: tuple[int, ...]) -> Any:
        return [fill(numbers, sizes[1:]) for _ in range(sizes[0])] if sizes else numbers.choice(entries)

    return st.integers(0, 9999).map(lambda seed: fill(random.Random(seed), sizes))


def over(shape: Shape, length: int, entries: Sequence[Any]) -> st.SearchStrategy[Any]:
    """`length` entries, or that for each batch element."""
    return st.one_of(filled(entries, length), filled(entries, shape.batch, length))


IDS = [-1, 0, 1, 2, 3]
# The second of each depends on the lengths.
ALIGNS: list[Literal["upper_left", "lower_right"]] = ["upper_left", "lower_right"]
SIDES: list[Literal["right", "left"]] = ["right", "left"]
BOOLS = [False, True, True]


@st.composite
def everywhere(draw: st.DrawFn, shape: Shape) -> Case:
    """A named mask that has a meaning at any position, even outside of the sequence."""
    kind = draw(
        st.sampled_from(
            ["full", "empty", "causal", "causal", "window", "window", "key_padding", "query_padding", "cross", "prefix"]
        )
    )
    if kind == "full":
        return Case(fm.full(), oracle.full())
    if kind == "empty":
        return Case(fm.empty(), oracle.empty())
    if kind == "causal":
        offset = draw(st.integers(-4, 4))
        align = draw(st.sampled_from(ALIGNS if len(shape.lengths) == 2 else ALIGNS[:1]))
        return Case(fm.causal(align=align, offset=offset), oracle.causal(align, offset))
    if kind == "window":
        if draw(st.booleans()):
            size = draw(st.integers(1, 9))
            return Case(fm.sliding_window(size=size), oracle.sliding_window(size=size))
        distance = st.one_of(st.none(), st.integers(0, 8))
        left, right = draw(distance), draw(distance)
        if left is None and right is None:
            left = 2
        return Case(fm.sliding_window(left=left, right=right), oracle.sliding_window(left, right))
    keys, queries = (per_batch(shape, st.integers(0, length)) for length in (shape.kv_len, shape.q_len))
    length = "kv_len" if kind == "key_padding" else "q_len"
    side = draw(st.sampled_from(SIDES if length in shape.lengths else SIDES[:1]))
    if kind == "key_padding":
        lengths = draw(keys)
        if draw(st.booleans()):
            return Case(fm.key_padding(start=lengths), oracle.key_start(lengths))
        return Case(fm.key_padding(lengths, side=side), oracle.key_padding(lengths, side))
    if kind == "query_padding":
        lengths = draw(queries)
        if draw(st.booleans()):
            return Case(fm.query_padding(start=lengths), oracle.query_start(lengths))
        return Case(fm.query_padding(lengths, side=side), oracle.query_padding(lengths, side))
    if kind == "cross":
        kv_lengths, q_lengths = draw(keys), draw(st.one_of(st.none(), queries))
        return Case(fm.cross_length(kv_lengths, q_lengths=q_lengths), oracle.cross_length(kv_lengths, q_lengths))
    prefix = draw(keys)
    return Case(fm.prefix_lm(prefix), oracle.prefix_lm(prefix))


@st.composite
def boundaries(draw: st.DrawFn, total: int, padding: bool) -> list[int]:
    """Cumulative lengths of up to five documents, which may be empty; with padding they need not reach the end."""
    ends = sorted(draw(st.lists(st.integers(0, total), min_size=1, max_size=4)))
    return [0, *ends] if padding else [0, *ends, total]


def lengths_of(cu_seqlens: list[int]) -> list[int]:
    return [end - start for start, end in pairwise(cu_seqlens)]


@st.composite
def documents(draw: st.DrawFn, shape: Shape) -> Case:
    """`document` from each of its sources; one list of ids for both axes only where these reach equally far."""
    kinds = ["kv_ids", "lengths", "cu_seqlens"] + (["ids", "position_ids"] if shape.q_end == shape.kv_len else [])
    kind = draw(st.sampled_from(kinds))
    if kind == "ids":
        ids = draw(over(shape, shape.kv_len, IDS))
        return Case(fm.document(ids), oracle.document(ids))
    if kind == "kv_ids":
        ids, kv_ids = draw(over(shape, shape.q_end, IDS)), draw(over(shape, shape.kv_len, IDS))
        return Case(fm.document(ids, kv_ids), oracle.document(ids, kv_ids))
    if kind == "position_ids":
        positions = draw(over(shape, shape.kv_len, [0, 1, 2]))
        batched = isinstance(positions[0], list)
        found = [oracle.ids_of_position_ids(row) for row in (positions if batched else [positions])]
        return Case(fm.document(position_ids=positions), oracle.document(found if batched else found[0]))
    padding = draw(st.booleans())
    cu_seqlens = draw(boundaries(shape.longest, padding))
    ids = oracle.ids_of_cu_seqlens(cu_seqlens, shape.longest)
    if kind == "cu_seqlens":
        return Case(fm.document(cu_seqlens=cu_seqlens, padding=padding), oracle.document(ids))
    return Case(fm.document(lengths=lengths_of(cu_seqlens), padding=padding), oracle.document(ids))


@st.composite
def per_documents(draw: st.DrawFn, shape: Shape, inner: Case) -> Case:
    """`per_document` of a mask, from lengths for each batch element or for all, or from ids."""
    padding = draw(st.booleans())
    rows = [draw(boundaries(shape.longest, padding)) for _ in range(shape.batch)]
    ids = [oracle.ids_of_cu_seqlens(row, shape.longest) for row in rows]
    if shape.q_end == shape.kv_len and draw(st.booleans()):
        return Case(fm.per_document(inner.mask, ids), oracle.per_document(inner.allowed, ids))
    if draw(st.booleans()):
        lengths = lengths_of(rows[0])
        return Case(fm.per_document(inner.mask, lengths=lengths, padding=padding), oracle.per_document(inner.allowed, ids[0]))
    several = max(map(len, rows))
    padded = [row + row[-1:] * (several - len(row)) for row in rows]
    return Case(fm.per_document(inner.mask, cu_seqlens=padded, padding=padding), oracle.per_document(inner.allowed, ids))


@st.composite
def inside(draw: st.DrawFn, shape: Shape) -> Case:
    """A mask with data for each position of the sequence, and for no other."""
    kind = draw(st.sampled_from(["document", "document", "key_keep", "query_keep", "dense"]))
    if kind == "document":
        return draw(documents(shape))
    if kind == "key_keep":
        keep = draw(over(shape, shape.kv_len, BOOLS))
        return Case(fm.key_padding(keep=keep), oracle.key_keep(keep))
    if kind == "query_keep":
        keep = draw(over(shape, shape.q_end, BOOLS))
        return Case(fm.query_padding(keep=keep), oracle.query_keep(keep))
    sizes = (shape.batch, shape.heads, shape.q_end, shape.kv_len)
    table = draw(filled(BOOLS, *draw(st.sampled_from([sizes[2:], (sizes[0], *sizes[2:]), sizes]))))
    return Case(fm.from_dense(table), oracle.dense(table))


# ---------------------------------------------------------------- whole masks

BOOLEANS: list[tuple[Callable[[Mask, Mask], Mask], Callable[..., oracle.Predicate]]] = [
    (operator.and_, oracle.both),
    (operator.and_, oracle.both),
    (operator.or_, oracle.either),
    (operator.or_, oracle.either),
    (operator.xor, oracle.exactly_one),
    (operator.sub, oracle.without),
]


#: What a transposed mask may depend on, by what the mask around it may.
SWAPPED: dict[tuple[str, ...], tuple[str, ...]] = {
    ("q_len", "kv_len"): ("q_len", "kv_len"),
    ("kv_len",): ("q_len",),
    ("q_len",): ("kv_len",),
    (): (),
}


@st.composite
def mask_cases(draw: st.DrawFn, shape: Shape, depth: int = 3) -> Case:
    """A whole mask of up to `depth` levels."""
    kinds = ["leaf", *["boolean"] * 4, "not", "named", "where", "per_head", "shift", "transpose", "per_document"]
    kind = draw(st.sampled_from(kinds[: 1 if depth <= 0 else -1 if shape.anywhere else None]))
    below = partial(mask_cases, depth=depth - 1)
    if kind == "leaf":
        leaves = [comparisons(shape), everywhere(shape)] + ([] if shape.anywhere else [inside(shape)])
        return draw(st.one_of(leaves))
    if kind == "shift":
        case = draw(below(replace(shape, anywhere=True)))
        down, right = draw(st.integers(-4, 4)), draw(st.integers(-4, 4))
        return Case(fm.masks.shift(case.mask, q=down, kv=right), oracle.shift(case.allowed, down, right))
    if kind == "transpose":
        swapped = replace(shape, q_len=shape.kv_len, kv_len=shape.q_len, q_offset=0, lengths=SWAPPED[shape.lengths])
        case = draw(below(replace(swapped, anywhere=shape.anywhere or shape.q_offset != 0)))
        return Case(fm.masks.transpose(case.mask), oracle.transpose(case.allowed))
    if kind == "per_document":
        return draw(per_documents(shape, draw(below(replace(shape, lengths=())))))
    if kind == "per_head":
        cases = [draw(below(shape)) for _ in range(shape.heads)]
        return Case(fm.per_head([case.mask for case in cases]), oracle.per_head([case.allowed for case in cases]))
    first = draw(below(shape))
    if kind == "not":
        return Case(~first.mask, oracle.negated(first.allowed))
    if kind == "named":
        return Case(first.mask.named("a part"), first.allowed)
    second = draw(below(shape))
    if kind == "boolean":
        combine, meaning = draw(st.sampled_from(BOOLEANS))
        return Case(combine(first.mask, second.mask), meaning(first.allowed, second.allowed))
    third = draw(below(shape))
    return Case(fm.where(first.mask, second.mask, third.mask), oracle.where(first.allowed, second.allowed, third.allowed))


@st.composite
def shaped_masks(draw: st.DrawFn, longest: int = LONGEST, offsets: bool = True, depth: int = 3) -> tuple[Case, Shape]:
    """A mask, its meaning, and lengths at which it is defined."""
    shape = draw(shapes(longest, offsets))
    return draw(mask_cases(shape, depth)), shape
