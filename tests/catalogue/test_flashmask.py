"""The twelve mask types of FlashMask (https://arxiv.org/abs/2410.01359), built as it builds them: by the rows masked per key.

``startend_row_indices`` has 1, 2 or 4 numbers for each key. With ``causal``, the rows above the diagonal are masked, and
besides them the rows from ``[start, end)``, where one number is a start whose end is the last row. Without, two numbers are
the start of the masked rows below and the end of those above, four are ``[start, end)`` below and ``[start, end)`` above.
"""

import random
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import TypeAlias

import pytest
import torch

import flexmask as fm
from flexmask import Mask, causal, kv, q
from tests.support.lowerings import check_block_mask, check_rows
from tests.support.strategies import Case, Shape

Columns: TypeAlias = Sequence[Sequence[int]]

SIZES = [1, 2, 7, 24, 33, 64]


def expanded(columns: Columns, causal: bool, rows: int) -> torch.Tensor:
    """The dense mask of a column representation, bool[rows, keys]."""
    seen = torch.ones(rows, len(columns), dtype=torch.bool)
    for key, numbers in enumerate(columns):
        if causal:
            seen[:key, key] = False
            start, end = (*numbers, rows)[:2]
            seen[start:end, key] = False
        elif len(numbers) == 2:
            start, end = numbers
            seen[start:, key] = False
            seen[:end, key] = False
        else:
            below, above = numbers[:2], numbers[2:]
            seen[below[0] : below[1], key] = False
            seen[above[0] : above[1], key] = False
    return seen


def documents(n: int) -> list[tuple[int, int]]:
    """Where the documents of a sequence of n tokens start and end."""
    numbers = random.Random(n)
    edges = sorted({0, n, *(numbers.randrange(n) for _ in range(n // 6))})
    return list(pairwise(edges))


def lengths(n: int) -> list[int]:
    return [end - start for start, end in documents(n)]


def each(n: int, column: Callable[[int, int, int], Sequence[int]]) -> Columns:
    """One entry for each key, from the key and the ends of its document."""
    return [column(key, start, end) for start, end in documents(n) for key in range(start, end)]


def causal_type(n: int) -> tuple[Mask, Columns, bool]:
    return causal(), [[n] for _ in range(n)], True


def sliding_window(n: int) -> tuple[Mask, Columns, bool]:
    return fm.sliding_window(size=5), [[min(key + 5, n)] for key in range(n)], True


def causal_document(n: int) -> tuple[Mask, Columns, bool]:
    return causal() & fm.document(lengths=lengths(n)), each(n, lambda key, start, end: [end]), True


def document(n: int) -> tuple[Mask, Columns, bool]:
    return fm.document(lengths=lengths(n)), each(n, lambda key, start, end: [end, start]), False


def shared_question(n: int) -> tuple[Mask, Columns, bool]:
    """The first document is the question, the others are its answers."""
    mask = fm.masks.shared_prefix(lengths=lengths(n), prefix_of=[0] * len(lengths(n)))
    return mask, each(n, lambda key, start, end: [n if start == 0 else end]), True


def global_and_sliding_window(n: int) -> tuple[Mask, Columns, bool]:
    first, left, right = min(3, n), 4, 2

    def column(key: int) -> list[int]:
        if key < first:
            return [n, n, 0, 0]
        return [min(key + left + 1, n), n, first, max(first, key - right)]

    mask = (kv < first) | (q < first) | fm.sliding_window(left=left, right=right)
    return mask, [column(key) for key in range(n)], False


def causal_blockwise(n: int) -> tuple[Mask, Columns, bool]:
    test = documents(n)[-1][0]
    mask = fm.masks.in_context(lengths=lengths(n), test_start=test)
    return mask, each(n, lambda key, start, end: [min(end, test) if start < test else n, test if start < test else n]), True


def prefix_lm_causal(n: int) -> tuple[Mask, Columns, bool]:
    prefix = n // 3
    return fm.prefix_lm(prefix), [[n, 0 if key < prefix else key] for key in range(n)], False


def prefix_lm_document(n: int) -> tuple[Mask, Columns, bool]:
    mask = fm.per_document(causal() | (kv < 2), lengths=lengths(n))
    return mask, each(n, lambda key, start, end: [end, start if key - start < 2 else key]), False


def qk_sparse(n: int) -> tuple[Mask, Columns, bool]:
    ranges = [(n // 5, n // 6), (n // 2, n // 4)]
    ends = [next((start + size for start, size in ranges if start <= key < start + size), None) for key in range(n)]
    mask = causal() & fm.masks.qk_sparse([start for start, _ in ranges], [size for _, size in ranges])
    return mask, [[n, n] if end is None else [key, end] for key, end in enumerate(ends)], True


def hash_sparse(n: int) -> tuple[Mask, Columns, bool]:
    """Tokens stand sorted by their bucket, whose numbers have gaps."""
    numbers = random.Random(n)
    buckets = sorted(numbers.randrange(0, 40, 3) for _ in range(n))
    sizes = [buckets.count(bucket) for bucket in sorted(set(buckets))]
    ends = [end for size, end in zip(sizes, accumulate(sizes), strict=True) for _ in range(size)]
    return causal() & fm.document(buckets), [[end] for end in ends], True


def random_eviction(n: int) -> tuple[Mask, Columns, bool]:
    numbers = random.Random(n)
    steps = [numbers.randint(key + 1, n) for key in range(n)]
    return causal() & fm.masks.eviction(steps), [[step] for step in steps], True


TYPES = [
    causal_type,
    sliding_window,
    causal_document,
    document,
    shared_question,
    global_and_sliding_window,
    causal_blockwise,
    prefix_lm_causal,
    prefix_lm_document,
    qk_sparse,
    hash_sparse,
    random_eviction,
]


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("build", TYPES, ids=lambda build: build.__name__)
def test_type(build: Callable[[int], tuple[Mask, Columns, bool]], n: int) -> None:
    mask, columns, is_causal = build(n)
    seen = expanded(columns, is_causal, n)
    assert seen.diagonal().all() or build is qk_sparse
    assert torch.equal(mask.dense(n)[0, 0], seen)
    case, shape = Case(mask, lambda b, h, q, kv, *_: bool(seen[q, kv])), Shape(n, n)
    check_rows(case, shape, seen[None, None])
    check_block_mask(case, shape, seen[None, None], 8)


def test_the_types_are_all() -> None:
    assert len(TYPES) == 12
    assert len({tuple(map(tuple, build(33)[1])) for build in TYPES}) == 12
