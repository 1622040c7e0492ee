"""Open blocks: equal to torch's whichever step decides them, with few evaluated cells and in bounded memory."""

from __future__ import annotations

import operator
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import flexmask as fm
from flexmask import Mask, _sync, h, kv, q
from flexmask.blocks import layout as blocks
from flexmask.blocks import survey
from flexmask.blocks.layout import BlockLayout
from flexmask.lowering import block_mask as lowering
from tests.support.exhaustive import one_in
from tests.support.lowerings import check_block_mask, check_lists_of_cells, check_stats, grid
from tests.support.strategies import Case, Shape, combined, constant, index_cases, mask_cases, shapes, symbols


@contextmanager
def small_steps() -> Iterator[None]:
    """Sets of blocks, few blocks, rows and cells at a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lowering, "MAX_GRID", _sync.PerDevice(0, 0))
        patch.setattr(blocks, "CHUNK", _sync.PerDevice(7, 7))
        patch.setattr(survey, "CHUNK", 5)
        patch.setattr(survey, "COUNTS", 9)
        patch.setattr(survey, "STEP", 3)
        yield


# ---------------------------------------------------------------- random masks

SIGNS = [operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne]


@st.composite
def periodic(draw: st.DrawFn, shape: Shape) -> Case:
    """A comparison of remainders of products and sums, in which query and key are not separable."""
    left, right = draw(index_cases(shape, 1)), draw(symbols(shape))
    operation = draw(st.sampled_from([operator.add, operator.sub, operator.mul]))
    index, value = operation(left.index, right.index), combined(operation, left.value, right.value)
    divisor = draw(st.sampled_from([-4, 2, 3, 4, 7, 16, 40]))
    compare, number = draw(st.sampled_from(SIGNS)), draw(st.integers(-2, 5))
    return Case(
        compare(index % divisor, number),
        lambda *cell: compare(combined(operator.mod, value, constant(divisor))(*cell), number),
    )


@st.composite
def surveyed(draw: st.DrawFn) -> tuple[Case, Shape]:
    """Such a condition combined with any mask."""
    shape = draw(shapes())
    one, other = draw(periodic(shape)), draw(st.one_of(periodic(shape), mask_cases(shape, 1)))
    if draw(st.booleans()):
        return Case(one.mask & other.mask, lambda *cell: one.allowed(*cell) and other.allowed(*cell)), shape
    return Case(one.mask | ~other.mask, lambda *cell: one.allowed(*cell) or not other.allowed(*cell)), shape


BLOCK_SIZES = st.sampled_from([1, 3, 4, (4, 8), (8, 3), 16])


@given(surveyed(), BLOCK_SIZES)
def test_blocks_and_counts_of_periodic_masks(drawn: tuple[Case, Shape], block_size: Any) -> None:
    case, shape = drawn
    expected = case.expected(shape)
    for steps in (nullcontext, small_steps):
        with steps():
            check_block_mask(case, shape, expected, block_size)
            check_counts(case, shape, expected, block_size)


def check_counts(case: Case, shape: Shape, expected: Tensor, block_size: Any) -> None:
    check_stats(case, shape, expected, block_size)
    found = case.mask.stats(**shape.lowering, block_size=block_size)
    repeated = shape.batch * shape.heads // (found.batch * found.heads)
    assert found.visible * repeated == int(expected.sum())
    assert found.fully_masked_rows * repeated == int((~expected.any(-1)).sum())
    against = case.mask.difference(fm.empty(), **shape.lowering)
    assert against.only_self * expected.numel() == int(expected.sum()) * against.cells


@pytest.mark.parametrize("steps", [nullcontext, small_steps])
def test_data_of_each_sequence_and_head(steps: Callable[[], Any]) -> None:
    """The ranges of a block are those of its own sequence and head."""
    rows, columns = [[0, 50, 9], [30, 2, 70]], [[3, 60], [90, 8], [5, 40]]
    mask = (fm.table(rows)[fm.b, q // 8] + fm.table(columns)[h, kv // 8]) * (q + kv) >= 1000
    shape = Shape(24, 16, batch=2, heads=3)
    case = Case(mask, lambda b, h, q, kv, *_: (rows[b][q // 8] + columns[h][kv // 8]) * (q + kv) >= 1000)
    with steps():
        check_block_mask(case, shape, case.expected(shape), 4)


# ---------------------------------------------------------------- conditions of every form

LENGTH = 260
GRID = torch.rand(33, 33, generator=torch.Generator().manual_seed(1)) > 0.4
BIAS = torch.randint(0, 3, (2 * LENGTH,), generator=torch.Generator().manual_seed(2))
CELLS = torch.rand(LENGTH, LENGTH, generator=torch.Generator().manual_seed(3)) > 0.999
LENGTHS = torch.tensor([3, 7])

MODS: dict[str, Callable[..., Any]] = {
    "dilated or local": lambda b, h, q, kv: ((q - kv) % 5 == 0) | ((q - kv).abs() < 20),
    "a period longer than a block": lambda b, h, q, kv: (q - kv) % 60 == 0,
    "a product": lambda b, h, q, kv: (q >= kv) & ((q * kv) % 3 == 0),
    "a remainder of a remainder": lambda b, h, q, kv: ((q * 7 + kv * 11) % 32 * (q + 1)) % 5 == 0,
    "a negative divisor": lambda b, h, q, kv: (q * 3 - kv) % -6 >= -2,
    "strided blocks": lambda b, h, q, kv: (q // 16 - kv // 16) % 3 == 0,
    "blocks of other sizes": lambda b, h, q, kv: (q // 24 + kv // 8) % 4 < 2,
    "strides of distances": lambda b, h, q, kv: (q - kv) // 16 % 3 == 0,
    "strides of strides": lambda b, h, q, kv: (q - kv) // 4 // 3 % 5 < 2,
    "a remainder of strides": lambda b, h, q, kv: (q + kv) % 48 // 8 == 2,
    "a product with strides": lambda b, h, q, kv: (q * kv + q // 8) // 6 % 4 == 1,
    "limits that grow": lambda b, h, q, kv: (q * kv) % 50 < (q + kv) // 4,
    "limits that fall": lambda b, h, q, kv: (q * kv) % 50 >= (q + kv) // 4,
    "part of a separable mask": lambda b, h, q, kv: (q * kv > 9000) & (kv % 64 < q % 64),
    "more than a separable mask": lambda b, h, q, kv: (q * kv > 9000) | (kv % 64 >= q % 64),
    "keys before others": lambda b, h, q, kv: (kv < q + 7) | ((q - kv) % 3 == 0),
    "one of two": lambda b, h, q, kv: (q * kv > 9000) ^ (q * kv + q > 5000),
    "per sequence": lambda b, h, q, kv: (q - kv) % LENGTHS[b] == 0,
    "moved per head": lambda b, h, q, kv: (q - kv + h * 3) % 8 == 0,
    "a table of blocks": lambda b, h, q, kv: GRID[q // 8, kv // 8],
    "a table of smaller blocks": lambda b, h, q, kv: GRID[q // 8, kv // 8] & (q // 4 != kv // 4),
    "a table of distances": lambda b, h, q, kv: BIAS[q - kv + LENGTH] == 0,
    "a table of distances, from its end": lambda b, h, q, kv: BIAS[q - kv] == 0,
    "a table of cells": lambda b, h, q, kv: CELLS[q, kv],
    "a choice": lambda b, h, q, kv: torch.where(q > kv, q - kv, kv * q) % 4 == 1,
    "extremes": lambda b, h, q, kv: torch.minimum(q * 2, kv * 3) % 9 <= torch.maximum(q, kv) // 40,
    "a distance": lambda b, h, q, kv: (q * q - kv * 3).abs() % 7 == 2,
    "few cells": lambda b, h, q, kv: q * kv == 6 * 35,
    "all but few cells": lambda b, h, q, kv: q * kv != 6 * 35,
    "wide": lambda b, h, q, kv: (q * (kv * 2**40 + 1)) % 10 == 3,
    "not an integer": lambda b, h, q, kv: torch.sin(q - kv) > 0.2,
    "of the query alone, not an integer": lambda b, h, q, kv: (torch.sin(q) + kv) % 2 < 1,
}


@pytest.mark.parametrize("name", MODS)
def test_counts_are_those_of_cells(name: str) -> None:
    mask = fm.from_mask_mod(MODS[name])
    cells = mask.dense(LENGTH, batch=2, heads=2)
    for block_size in (4, (16, 8)):
        found = mask.stats(LENGTH, batch=2, heads=2, block_size=block_size)
        assert (found.visible, found.cells) == (int(cells.sum()), cells.numel())
        assert found.fully_masked_rows == int((~cells.any(-1)).sum())


@pytest.mark.parametrize(("name", "stepwise"), one_in(2, MODS, [False, True]))
def test_lists_are_those_of_cells(name: str, stepwise: bool) -> None:
    shape = Shape(LENGTH, LENGTH - 3, batch=2, heads=2)
    expected = MODS[name](*grid(shape)).expand(2, 2, LENGTH, LENGTH - 3)
    with pytest.MonkeyPatch.context() as patch:
        if stepwise:
            patch.setattr(lowering, "MAX_GRID", _sync.PerDevice(0, 0))
            patch.setattr(survey, "CHUNK", 50)
            patch.setattr(blocks, "CHUNK", _sync.PerDevice(1000, 1000))
        for block_size in (16, (64, 8)):
            found = fm.create_block_mask(MODS[name], 2, 2, LENGTH, LENGTH - 3, device="cpu", BLOCK_SIZE=block_size)
            check_lists_of_cells(found, shape, expected)


# ---------------------------------------------------------------- work


def test_progress_ends_at_all_blocks() -> None:
    shares: list[float] = []
    with pytest.MonkeyPatch.context() as patch, survey.watched(shares.append):
        patch.setattr(survey, "COUNTS", 500)
        fm.from_mask_mod(MODS["dilated or local"]).stats(LENGTH, block_size=8)
        assert len(shares) > 2
    assert shares[-1] == 1
    assert all(one > 0 for one in shares)
    before = len(shares)
    fm.from_mask_mod(MODS["dilated or local"]).stats(LENGTH, block_size=8)
    assert len(shares) == before, "it is reported inside of the context only"


@contextmanager
def cells_counted() -> Iterator[list[int]]:
    """How many cells are evaluated within."""
    counts = [0]
    evaluate = BlockLayout.evaluate

    def counted(self: BlockLayout, *args: Any) -> Iterator[Any]:
        for step in evaluate(self, *args):
            counts[0] += step[2].numel()
            yield step

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlockLayout, "evaluate", counted)
        yield counts


#: Masks that are not separable, and the share of their cells that is evaluated at most, for their blocks and for their counts.
SHARES: list[tuple[Mask, float, float]] = [
    (((q - kv) % 64 == 0) | (abs(q - kv) < 128), 1 / 1000, 1 / 50),
    (fm.causal() & ((q * kv) % 3 == 0), 1 / 1000, 1 / 50),
    (fm.masks.dilated_window(left=None, right=0, dilation=1000), 1 / 1000, 1 / 50),
    ((q // 128 - kv // 128) % 4 == 0, 0, 0),
    ((q // 64 - kv // 64) % 4 == 0, 1 / 1000, 1 / 50),
    (fm.masks.random_cells(0.5), 1 / 50, 1),
    (fm.per_head([(q - kv) % 3 == 0, fm.causal()]), 1 / 1000, 1 / 50),
    ((q - kv + h) % 3 == 0, 1 / 1000, 1 / 50),
    (kv * 37 % 101 + kv // 512 * 1000 <= q // 512 * 1000 + 300, 0, 0),  # separable, with more intervals than are listed
    (fm.table([[i % 3 == j % 2 for i in range(64)] for j in range(64)])[q // 128, kv // 128] != 0, 0, 0),
]


@pytest.mark.parametrize(("mask", "for_blocks", "for_counts"), SHARES, ids=lambda value: str(value)[:40])
def test_few_cells_are_evaluated(mask: Mask, for_blocks: float, for_counts: float) -> None:
    length = 4096
    cells = mask.stats(1, heads=2).heads * length**2
    with cells_counted() as counts:
        mask.block_mask(length, heads=2)
    assert counts[0] <= for_blocks * cells
    with cells_counted() as counts:
        mask.stats(length, heads=2)
    assert counts[0] <= (for_blocks + for_counts) * cells


MEMORY = """
import resource, torch, flexmask as fm
torch.set_num_threads(1)
texts = {texts!r}
for text in texts:
    fm.parse(text).block_mask(512)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for text, length in texts.items():
    mask = fm.parse(text)
    mask.block_mask(length)
    mask.stats(length)
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * {unit})
"""
LARGE = {
    "((q - kv) % 64 == 0) | (abs(q - kv) < 128)": 12_288,
    "random_cells(0.5)": 4096,
    "per_head([(q * kv) % 7 == 0, random_cells(0.9)])": 4096,
}


@pytest.mark.exhaustive
def test_memory_is_bounded() -> None:
    """The memory of the process, not of single tensors: small tensors can keep the memory of large ones in use."""
    script = MEMORY.format(texts=LARGE, unit=1 if sys.platform == "darwin" else 1024)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    for text, taken in zip(LARGE, done.stdout.split(), strict=True):
        assert int(taken) < 200 * 2**20, text
