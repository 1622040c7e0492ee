"""Pictures: the arrays that are drawn against dense masks, and their words."""

import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import flexmask as fm
from flexmask import Mask
from flexmask.errors import FlexmaskError, LoweringError, OperandError, RenderError
from flexmask.plotting import density
from flexmask.plotting.caption import notes, numbered, shortened, title_lines
from flexmask.plotting.mpl.plot import save
from flexmask.plotting.raster import EMPTY, FULL, PARTIAL, UNKNOWN, rasterize
from tests.support.pictures import STRIDED, packed
from tests.support.strategies import Case, Shape, shaped_masks


def averaged(cells: NDArray[Any], step: tuple[int, int]) -> NDArray[np.float64]:
    """The mean of each rectangle of ``step`` cells, of those that there are."""
    padding = [(0, -length % size) for length, size in zip(cells.shape, step, strict=True)]
    sums, numbers = (
        np.pad(values.astype(np.float64), padding)
        .reshape(-(-cells.shape[0] // step[0]), step[0], -(-cells.shape[1] // step[1]), step[1])
        .sum((1, 3))
        for values in (cells, np.ones_like(cells))
    )
    return np.asarray(sums / numbers)


def block_kinds(cells: NDArray[Any], block: tuple[int, int]) -> NDArray[np.int8]:
    """The kind of each block; one that reaches over the edge is never full."""
    rows, columns = (-(-length // size) * size for length, size in zip(cells.shape, block, strict=True))
    whole = np.zeros((rows, columns))
    whole[: cells.shape[0], : cells.shape[1]] = cells
    mean = averaged(whole, block)
    return np.where(mean == 0, EMPTY, np.where(mean == 1, FULL, PARTIAL)).astype(np.int8)


# ---------------------------------------------------------------- what is drawn


@given(shaped_masks(), st.data())
def test_picture_is_the_dense_mask(drawn: tuple[Case, Shape], data: st.DataObject) -> None:
    case, shape = drawn
    lowering = {name: shape.lowering[name] for name in ("q_len", "kv_len", "q_offset")}
    expected = case.expected(shape).numpy()
    for batch in range(shape.batch):
        for head in range(shape.heads):
            try:
                shown = rasterize(case.mask, **lowering, batch=batch, head=head)
            except RenderError as error:
                assert "leave it 0" in str(error)  # noqa: PT017  the mask does not depend on that axis
                assert batch or head
                continue
            assert shown.every_cell
            assert np.array_equal(shown.cells == 0, expected[batch, head])
            assert np.array_equal(shown.shares[0], expected[batch, head])
            assert shown.pairs[0] == (expected[batch, head].sum(),) * 2
    pixels = data.draw(st.tuples(st.integers(1, 12), st.integers(1, 12)))
    block = data.draw(st.tuples(st.integers(1, 9), st.integers(1, 9)))
    shown = rasterize(case.mask, **lowering, max_pixels=pixels, block_size=block)
    assert shown.shares.shape[1:] <= pixels
    assert np.allclose(shown.shares[0], averaged(expected[0, 0], shown.step), atol=1e-6)
    assert shown.blocks is not None
    assert np.array_equal(shown.blocks, block_kinds(expected[0, 0], block))


@pytest.mark.parametrize("block", [(4, 4), (3, 5), (16, 8), (128, 128)])
@pytest.mark.parametrize("mask", [fm.causal(), fm.causal() & fm.document(packed(40, 6)), STRIDED], ids=str)
def test_block_kinds_are_those_of_the_block_mask(mask: Mask, block: tuple[int, int]) -> None:
    shown, blocks = rasterize(mask, 40, block_size=block), mask.block_mask(40, block_size=block)
    assert shown.blocks is not None
    assert (shown.blocks == PARTIAL).sum(1).tolist() == blocks.kv_num_blocks[0, 0].tolist()
    assert blocks.full_kv_num_blocks is not None
    assert (shown.blocks == FULL).sum(1).tolist() == blocks.full_kv_num_blocks[0, 0].tolist()


@pytest.mark.parametrize("pixels", [(1024, 1024), (100, 37), (8, 400), (1, 1)])
@pytest.mark.parametrize(
    "mask",
    [
        fm.causal() & fm.document(packed(500, 40)),
        fm.sliding_window(left=30, right=5) | (fm.kv < 7) | fm.key_padding(keep=[i % 5 > 0 for i in range(500)]),
        fm.from_dense([[(7 * x + y * y) % 3 == 0 for x in range(500)] for y in range(500)]),
        fm.full(),
        fm.empty(),
        STRIDED,
    ],
    ids=["documents", "many intervals", "table", "full", "empty", "strided"],
)
def test_area_is_the_average(mask: Mask, pixels: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(density, "CHUNK_INTERVALS", 500)
    monkeypatch.setattr(density, "CHUNK_CELLS", 5000)
    shown = rasterize(mask, 500, max_pixels=pixels)
    assert shown.estimated is None
    cells = mask.dense(500)[0, 0].numpy()
    assert np.allclose(shown.shares[0], averaged(cells, shown.step), atol=1e-6)
    assert shown.pairs[0] == (cells.sum(), cells.sum())
    assert ((shown.shares[0] == 0) == (averaged(cells, shown.step) == 0)).all()


def test_what_is_not_known_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = rasterize(STRIDED, 600, max_pixels=(60, 60), block_size=20)
    monkeypatch.setattr(density, "MAX_CELLS", 1000)
    shown = rasterize(STRIDED, 600, max_pixels=(60, 60), block_size=20)
    assert shown.estimated is not None
    assert exact.blocks is not None
    assert shown.blocks is not None
    assert np.array_equal(shown.shares[:, ~shown.estimated], exact.shares[:, ~shown.estimated])
    assert (~shown.estimated).sum() == 60 * 59 / 2
    assert np.abs(shown.shares - exact.shares).max() < 0.35
    known = shown.blocks != UNKNOWN
    assert known.sum() > 800
    assert np.array_equal(shown.blocks[known], exact.blocks[known])
    for (least, most), (pairs, _) in zip(shown.pairs, exact.pairs, strict=True):
        assert least <= pairs <= most
    assert "shades estimated from samples" in notes(shown)
    assert notes(shown)[1] == "0 to 50.1 % visible"
    assert np.array_equal(shown.shares, rasterize(STRIDED, 600, max_pixels=(60, 60)).shares)


def test_long_masks_need_no_dense_tensor() -> None:
    tokens = 2**17
    mask = fm.causal() & fm.document(torch.tensor(packed(tokens, 512)))
    fm.causal().rows(64)
    tracemalloc.start()
    start = time.perf_counter()
    shown = rasterize(mask, tokens)
    seconds = time.perf_counter() - start
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert shown.step == (128, 128)
    assert shown.pairs[0][0] == int(mask.rows(tokens).upper.counts().sum())
    assert seconds < 5
    assert peak < 100e6


def test_indices_that_nothing_counts() -> None:
    mask = (fm.kv - fm.b <= fm.q) & (fm.kv >= fm.h)
    shown = rasterize(mask, 6, batch=2, head=1)
    assert (shown.batches, shown.heads) == (None, None)
    assert np.array_equal(shown.cells == 0, mask.dense(6, batch=3, heads=2)[2, 1])
    assert notes(shown)[:2] == ["sequence 2", "head 1"]


def test_offset_for_each_sequence() -> None:
    shown = rasterize(fm.causal(), 2, 8, batch=1, q_offset=torch.tensor([0, 5]))
    assert shown.q_offset == 5
    assert shown.shares[0].sum(1).tolist() == [6, 7]
    assert "sequence 1 of 2" in notes(shown)


PADDED = fm.key_padding([3, 5, 4])

REFUSED: list[tuple[str, Callable[[], object], type[FlexmaskError], str]] = [
    ("batch", lambda: rasterize(PADDED, 5, batch=3), RenderError, r"batch 3 .*sequences are 0 to 2"),
    ("no batch", lambda: rasterize(fm.causal(), 5, batch=1), RenderError, r"batch 1 .*same for every sequence"),
    ("head", lambda: rasterize(fm.per_head([PADDED, fm.full()]), 5, head=2), RenderError, r"head 2 .*heads are 0 to 1"),
    ("negative batch", lambda: rasterize(PADDED, 5, batch=-1), OperandError, r"batch .*-1"),
    ("batch of a kind", lambda: rasterize(PADDED, 5, batch="0"), OperandError, r"batch .*'0'"),  # type: ignore[arg-type]
    ("block size", lambda: rasterize(PADDED, 5, block_size=0), OperandError, r"block_size .*0"),
    ("three block sizes", lambda: rasterize(PADDED, 5, block_size=(1, 2, 3)), OperandError, r"block_size"),  # type: ignore[arg-type]
    ("no queries", lambda: rasterize(PADDED, 0), LoweringError, r"q_len .*0"),
    ("too long", lambda: rasterize(fm.causal(), 2**40), RenderError, r"q_len 1,099,511,627,776 .*at most"),
    ("length", lambda: rasterize(PADDED, 4), LoweringError, r"lengths .*4"),
    ("parameter", lambda: rasterize(fm.parse("document(ids)"), 4), LoweringError, r"ids"),
    ("why as a text", lambda: rasterize(PADDED, 5, why="no"), OperandError, r"why must be True or False, got str no"),  # type: ignore[arg-type]
    ("bands as a tensor", lambda: rasterize(PADDED, 5, bands=torch.ones(2)), OperandError, r"bands must be True or False"),  # type: ignore[arg-type]
    ("pixels", lambda: rasterize(PADDED, 5, max_pixels=(0, 4)), OperandError, r"max_pixels .*\(0, 4\)"),
    ("ending", lambda: save(rasterize(PADDED, 5), "mask.gif"), RenderError, r"\.png, \.svg or \.pdf, got .*mask\.gif"),
]


@pytest.mark.parametrize(("attempt", "error", "message"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_refused(attempt: Callable[[], object], error: type[FlexmaskError], message: str) -> None:
    with pytest.raises(error, match=message):
        attempt()


# ---------------------------------------------------------------- words


def test_long_lists_are_shortened() -> None:
    assert shortened("a(x=[0, 0, 1, 1, -1])", 3) == "a(x=[0, 0, 1, …])"
    assert shortened("a(x=[0, 0, 1])", 3) == "a(x=[0, 0, 1])"
    assert shortened("[[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 9, 9]]", 2) == "[[0, 1, …], [3, 4, …], …]"
    assert shortened(shortened("[True, False, True, True, True]", 3), 2) == "[True, False, …]"


def test_titles_fit_and_do_not_break_lists() -> None:
    mask = fm.causal() & fm.document(packed(64, 5)) & fm.key_padding([64]) & (fm.kv < 60)
    for width in (40, 50, 60, 100, 1000):
        lines = title_lines(str(mask), width)
        assert len(lines) <= 3
        assert max(map(len, lines)) <= width
        assert "…" in "".join(lines) or width == 1000
        assert all(line.count("[") == line.count("]") for line in lines)


def test_numbers_are_round_and_fit() -> None:
    assert list(numbered(5, 5)) == [0, 1, 2, 3, 4]
    assert list(numbered(50, 10)) == [0, 5, 10, 15, 20, 25, 30, 35, 40, 45]
    assert list(numbered(64, 5)) == [0, 16, 32, 48]
    assert list(numbered(8192, 5)) == [0, 2048, 4096, 6144]
    assert list(numbered(1_000_000, 6)) == [0, 200_000, 400_000, 600_000, 800_000]
    assert list(numbered(6400, 8)) == [0, 1000, 2000, 3000, 4000, 5000, 6000]
    assert list(numbered(12, 4, 3)) == [0, 3, 6, 9]
    assert list(numbered(7, 0.5)) == [0]
