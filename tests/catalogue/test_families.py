"""The named masks of each family against their plain Python meaning, cell by cell, in every lowering, and their errors."""

import pickle
from collections.abc import Callable
from itertools import accumulate
from typing import Any, TypeAlias

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import flexmask as fm
from flexmask import Mask
from flexmask.expr.tables import Literal
from tests.support import oracle
from tests.support.exhaustive import one_in
from tests.support.lowerings import check_lowerings
from tests.support.named_masks import FORMS, SHAPES, Convert, assert_means, draw
from tests.support.strategies import Case, Shape

Build: TypeAlias = tuple[Callable[[], Mask], oracle.Predicate]

#: Masks without data, at every shape.
PLAIN: dict[str, Build] = {
    "dilated_window": (lambda: fm.masks.dilated_window(left=4, right=3, dilation=2), oracle.dilated_window(4, 3, 2)),
    "dilated_window left": (lambda: fm.masks.dilated_window(left=None, right=0, dilation=3), oracle.dilated_window(None, 0, 3)),
    "dilated_window 1": (lambda: fm.masks.dilated_window(left=2, right=2, dilation=1), oracle.dilated_window(2, 2, 1)),
    "sink_window": (lambda: fm.masks.sink_window(2, left=3), oracle.sink_window(2, 3)),
    "sink_window size": (lambda: fm.masks.sink_window(3, size=2), oracle.sink_window(3, 1)),
    "sink_window without sinks": (lambda: fm.masks.sink_window(0, size=1), oracle.sink_window(0, 0)),
    "chunked": (lambda: fm.masks.chunked(3), oracle.chunked(3)),
    "chunked start": (lambda: fm.masks.chunked(4, start=2), oracle.chunked(4, 2)),
    "chunked 1": (lambda: fm.masks.chunked(1), oracle.chunked(1)),
    "per_chunk": (
        lambda: fm.masks.per_chunk(fm.masks.sink_window(1, left=1) & (fm.kv % 3 != 2), 4),
        oracle.per_chunk(oracle.both(oracle.sink_window(1, 1), lambda b, h, q, kv, q_len, kv_len: kv % 3 != 2), 4),
    ),
    "per_chunk dense": (
        lambda: fm.masks.per_chunk(fm.from_dense([[True, False], [True, True]]), 2),
        oracle.per_chunk(oracle.dense([[True, False], [True, True]]), 2),
    ),
    "block_causal": (lambda: fm.masks.block_causal(3), oracle.block_causal(3)),
    "chunk_window": (lambda: fm.masks.chunk_window(3, left=1), oracle.chunk_window(3, 1)),
    "chunk_window own": (lambda: fm.masks.chunk_window(2, left=0), oracle.chunk_window(2, 0)),
    "block_diffusion": (lambda: fm.masks.block_diffusion(8, 3), oracle.block_diffusion(8, 3)),
    "block_diffusion beyond its halves": (lambda: fm.masks.block_diffusion(3, 2), oracle.block_diffusion(3, 2)),
    "svg_spatial": (lambda: fm.masks.svg_spatial(3, width=1, prompt=2), oracle.svg_spatial(3, 1, 2)),
    "svg_spatial sinks": (
        lambda: fm.masks.svg_spatial(4, width=1.5, sinks=1, round_to=4),
        oracle.svg_spatial(4, 1.5, sinks=1, round_to=4),
    ),
    "svg_temporal": (lambda: fm.masks.svg_temporal(3, frames=3, width=2, prompt=1), oracle.svg_temporal(3, 3, 2, 1)),
    "draft_blocks": (lambda: fm.masks.draft_blocks(3, 2), oracle.draft_blocks(3, 2)),
    "training_time_test": (lambda: fm.masks.training_time_test(4, 2), oracle.training_time_test(4, 2)),
    "training_time_test once": (lambda: fm.masks.training_time_test(5, 0), oracle.training_time_test(5, 0)),
    "random_cells": (lambda: fm.masks.random_cells(0.4, seed=3), oracle.random_cells(0.4, 3)),
    "random_cells none": (lambda: fm.masks.random_cells(0), oracle.empty()),
    "random_cells all": (lambda: fm.masks.random_cells(1.0), oracle.full()),
    "coarse": (lambda: fm.masks.coarse(fm.sliding_window(left=1, right=0), 3), oracle.coarse(oracle.sliding_window(1, 0), 3)),
}


#: Masks that are made for one shape, with further ones that they still have a meaning at.
MADE_FOR: dict[str, tuple[Callable[[], Mask], oracle.Predicate, list[tuple[int, int]]]] = {
    "neighborhood 1-D": (lambda: fm.masks.neighborhood([9], [4]), oracle.neighborhood([9], [4]), [(9, 9), (9, 5), (3, 9)]),
    "neighborhood": (lambda: fm.masks.neighborhood([4, 7], [3, 5]), oracle.neighborhood([4, 7], [3, 5]), [(28, 28), (9, 20)]),
    "neighborhood even": (
        lambda: fm.masks.neighborhood([5, 4], [2, 4]),
        oracle.neighborhood([5, 4], [2, 4]),
        [(20, 20), (20, 30)],
    ),
    "neighborhood whole": (lambda: fm.masks.neighborhood([3, 4], [3, 4]), oracle.full(), [(12, 12)]),
    "neighborhood 3-D": (
        lambda: fm.masks.neighborhood([3, 4, 5], [2, 3, 3]),
        oracle.neighborhood([3, 4, 5], [2, 3, 3]),
        [(60, 60), (7, 60)],
    ),
    "neighborhood of many rows": (
        lambda: fm.masks.neighborhood([9, 9, 2], [9, 8, 1]),
        oracle.neighborhood([9, 9, 2], [9, 8, 1]),
        [(20, 162)],
    ),
    "neighborhood tiled": (
        lambda: fm.masks.neighborhood([4, 6], [3, 4], tile=[2, 3]),
        oracle.neighborhood([4, 6], [3, 4], [2, 3]),
        [(24, 24), (24, 9)],
    ),
    "neighborhood tiled 3-D": (
        lambda: fm.masks.neighborhood([2, 4, 6], [2, 1, 5], tile=[1, 2, 2]),
        oracle.neighborhood([2, 4, 6], [2, 1, 5], [1, 2, 2]),
        [(48, 48)],
    ),
    "neighborhood tiled, of many rows": (
        lambda: fm.masks.neighborhood([66, 2], [65, 1], tile=[1, 2]),
        oracle.neighborhood([66, 2], [65, 1], [1, 2]),
        [(9, 132)],
    ),
    "sliding_tile 1-D": (lambda: fm.masks.sliding_tile([8], [4], [2]), oracle.sliding_tile([8], [4], [2]), [(8, 8)]),
    "sliding_tile": (
        lambda: fm.masks.sliding_tile([4, 6], [4, 4], [2, 2], text=3),
        oracle.sliding_tile([4, 6], [4, 4], [2, 2], 3),
        [(27, 27), (29, 30), (5, 11)],
    ),
    "sliding_tile 3-D": (
        lambda: fm.masks.sliding_tile([4, 2, 6], [2, 2, 4], [2, 1, 2]),
        oracle.sliding_tile([4, 2, 6], [2, 2, 4], [2, 1, 2]),
        [(48, 48)],
    ),
    "svg_temporal whole": (lambda: fm.masks.svg_temporal(2, frames=3, width=9, prompt=2), oracle.full(), [(8, 8)]),
    "paged lower_right": (
        lambda: fm.masks.paged(fm.sliding_window(left=3, right=0), [2, -1, 0, 1], page_size=3),
        oracle.paged(oracle.sliding_window(3, 0), [2, -1, 0, 1], 3),
        [(9, 12), (2, 12)],
    ),
    "coarse lower_right": (
        lambda: fm.masks.coarse(fm.causal("lower_right"), 2),
        oracle.coarse(oracle.causal("lower_right"), 2),
        [(8, 8), (3, 9), (9, 4)],
    ),
}


# ---------------------------------------------------------------- masks with data: one for all, and one for each batch element


def of_each(rows: list[Any], batched: bool) -> Any:
    return rows if batched else rows[-1]


def own(lengths: list[int], total: int) -> list[int]:
    return oracle.ids_of_lengths(lengths, total)


IDS = [own([5, 4, 3], 14), own([7, 7], 14), [-1, 0, 0, 1, 1, 2, 2, -1, -1, 3, 3, 3, 4, -1]]
CROSS = [[3, 0, 4], [2, 3, 2], [1, 2, 1]], [[2, 4, 5], [0, 5, 4], [3, 3, 1]]
PARENTS = [[-1, 0, 1, 2, 3], [-1, 0, 0, 1, 1], [-1, -1, 0, 2, 1]]
MIXED = [[3, 0, 2, 1, 5, 4, 6], [6, 5, 4, 3, 2, 1, 0], [0, 6, 1, 5, 2, 4, 3]]
PREFIXES = [0, 2, 5]
Data: TypeAlias = Callable[[Convert, bool], tuple[Case, Shape]]


def case(build: Callable[..., Mask], meaning: Callable[..., oracle.Predicate], shape: tuple[int, int], *data: list[Any]) -> Data:
    """A mask and its meaning from the same data."""

    def made(form: Convert, batched: bool) -> tuple[Case, Shape]:
        values = [of_each(rows, batched) for rows in data]
        given = [form(value) if isinstance(value, list) else value for value in values]
        return Case(build(*given), meaning(*values)), Shape(*shape, batch=3, heads=2)

    return made


def cross(align: Any) -> Data:
    inner, meaning = fm.causal() & (fm.kv % 3 != 1), oracle.both(oracle.causal(), lambda b, h, q, kv, *_: kv % 3 != 1)
    return case(
        lambda q, kv: fm.masks.cross_document(inner, q_lengths=q, kv_lengths=kv, align=align, padding=True),
        lambda q, kv: oracle.cross_document(meaning, q, kv, align),
        (7, 12),
        *CROSS,
    )


def cumulated(form: Convert, batched: bool) -> tuple[Case, Shape]:
    rows, columns = (of_each(lengths, batched) for lengths in CROSS)

    def ends(lengths: Any) -> Any:
        return form([list(accumulate(row, initial=0)) for row in lengths] if batched else list(accumulate(lengths, initial=0)))

    window = fm.sliding_window(left=1, right=1)
    mask = fm.masks.cross_document(
        window, q_cu_seqlens=ends(rows), kv_cu_seqlens=ends(columns), align="lower_right", padding=True
    )
    meaning = oracle.cross_document(oracle.sliding_window(1, 1), rows, columns, "lower_right")
    return Case(mask, meaning), Shape(7, 12, batch=3, heads=2)


WITH_DATA: dict[str, Data] = {
    "global_window": case(
        lambda x: fm.masks.global_window(x, left=1, right=2),
        lambda x: oracle.global_window(x, 1, 2),
        (13, 13),
        draw(1, [False, False, False, True], 3, 13),
    ),
    "bidirectional_spans": case(fm.masks.bidirectional_spans, oracle.bidirectional_spans, (14, 14), IDS),
    "shared_prefix": case(
        lambda ids, of: fm.masks.shared_prefix(ids, prefix_of=of),
        oracle.shared_prefix,
        (14, 14),
        IDS,
        [[0, 0, 0, 3, 3], [1, 1, 2, 3, 4], [0, 0, 4, 3, 3]],
    ),
    "shared_prefix lengths": case(
        lambda lengths: fm.masks.shared_prefix(lengths=lengths, prefix_of=[0, 0, 0, 3, 3], padding=True),
        lambda lengths: (
            oracle.shared_prefix([own(row, 14) for row in lengths], [0, 0, 0, 3, 3])
            if isinstance(lengths[0], list)
            else oracle.shared_prefix(own(lengths, 14), [0, 0, 0, 3, 3])
        ),
        (14, 14),
        [[3, 3, 3, 3, 2], [5, 0, 4, 2, 1], [2, 2, 2, 3, 3]],
    ),
    "in_context": case(
        lambda ids, start: fm.masks.in_context(ids, test_start=start), oracle.in_context, (14, 14), IDS, [9, 7, 12]
    ),
    "multi_item": case(
        fm.masks.multi_item,
        oracle.multi_item,
        (10, 10),
        PREFIXES,
        [[0, 1, 2, 3, 0, 1, 0, 0, 1, 2], [0, 1, 2, 0, 1, 2, 0, 1, 2, 3], [1, 2, 3, 4, 5, 0, 0, 0, 0, 0]],
    ),
    "chunked": case(lambda start: fm.masks.chunked(4, start=start), lambda start: oracle.chunked(4, start), (9, 13), PREFIXES),
    "cross_document": case(
        lambda q, kv: fm.masks.cross_document(q_lengths=q, kv_lengths=kv, padding=True),
        lambda q, kv: oracle.cross_document(oracle.full(), q, kv),
        (7, 12),
        *CROSS,
    ),
    "cross_document upper_left": cross("upper_left"),
    "cross_document lower_right": cross("lower_right"),
    "cross_document cu_seqlens": cumulated,
    "image_cross": case(
        lambda spans: fm.masks.image_cross(spans, 3),
        lambda spans: oracle.image_cross(spans, 3),
        (8, 9),
        [[[0, 4], [1, 4], [4, 8]], [[3, 8], [0, 3], [5, 5]], [[0, 8], [2, 8], [7, 8]]],
    ),
    "tile_topk": case(
        lambda topk: fm.masks.tile_topk(topk, 3),
        lambda topk: oracle.tile_topk(topk, 3),
        (9, 11),
        draw(4, [0, 1, 2, 3, -1], 3, 3, 2),
    ),
    "tile_topk sizes": case(
        lambda topk, sizes: fm.masks.tile_topk(topk, 3, sizes=sizes),
        lambda topk, sizes: oracle.tile_topk(topk, 3, sizes),
        (8, 12),
        draw(5, [0, 1, 2, 3], 3, 3, 2),
        [[3, 2, 1, 3], [0, 3, 3, 3], [1, 2, 3, 0]],
    ),
    "tree": case(
        lambda ancestors, prefix: fm.masks.tree(ancestors, prefix=prefix),
        oracle.tree_of_ancestors,
        (5, 10),
        draw(6, [False, True], 3, 5, 5),
        PREFIXES,
    ),
    "block_diffusion documents": case(
        lambda lengths: fm.masks.block_diffusion(8, 2, lengths=lengths, padding=True),
        lambda lengths: oracle.packed_block_diffusion(lengths, 8, 2),
        (16, 17),
        [[5, 3], [1, 4], [3, 5]],
    ),
    "prefix_tree": case(
        lambda depths: fm.masks.prefix_tree(position_ids=depths),
        oracle.prefix_tree,
        (7, 7),
        [[0, 1, 2, 1, 2, 3, 0], [0, 1, 2, 3, 2, 1, 0], [0, 0, 1, 2, 2, 1, 2]],
    ),
    "draft_blocks": case(
        lambda prefix: fm.masks.draft_blocks(prefix, 3), lambda prefix: oracle.draft_blocks(prefix, 3), (9, 14), PREFIXES
    ),
    "draft_anchors": case(
        lambda anchors: fm.masks.draft_anchors(anchors, 3, context=7),
        lambda anchors: oracle.draft_anchors(anchors, 3, 7),
        (9, 16),
        [[0, 3, 7], [5, -1, 6], [2, 2, -1]],
    ),
    "eviction": case(fm.masks.eviction, oracle.eviction, (9, 8), draw(7, list(range(10)), 3, 8)),
    "qk_sparse": case(fm.masks.qk_sparse, oracle.qk_sparse, (14, 13), [[0, 5], [2, 2], [3, 8]], [[3, 4], [1, 6], [2, 0]]),
    "reorder": case(
        lambda at: fm.masks.reorder(fm.sliding_window(left=2, right=0), q=at, kv=at),
        lambda at: oracle.reorder(oracle.sliding_window(2, 0), at, at),
        (7, 7),
        MIXED,
    ),
    "reorder queries": case(
        lambda at: fm.masks.reorder(fm.causal(), q=at), lambda at: oracle.reorder(oracle.causal(), at), (7, 9), MIXED
    ),
    "reorder keys": case(
        lambda at: fm.masks.reorder(fm.causal(), kv=at), lambda at: oracle.reorder(oracle.causal(), kv=at), (5, 7), MIXED
    ),
    "paged": case(
        lambda pages: fm.masks.paged(fm.causal() & (fm.table(list(range(9)))[fm.kv] != 4), pages, page_size=3),
        lambda pages: oracle.paged(oracle.both(oracle.causal(), lambda b, h, q, kv, *_: kv != 4), pages, 3),
        (9, 12),
        [[2, -1, 0, 1], [0, 1, 2, -1], [-1, -1, 1, 0]],
    ),
}


@pytest.mark.parametrize("batched", [True, False], ids=["batched", "unbatched"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", WITH_DATA)
def test_mask_with_data(name: str, form: str, batched: bool) -> None:
    made, shape = WITH_DATA[name](FORMS[form], batched)
    dense = assert_means(made, shape)
    assert dense.shape[:2] == (3 if batched else 1, 1)


@pytest.mark.parametrize("batched", [True, False], ids=["batched", "unbatched"])
def test_tree_from_parents(batched: bool) -> None:
    parents = of_each(PARENTS, batched)
    made = Case(fm.masks.tree(parents=parents, prefix=3), oracle.tree(parents, 3))
    assert_means(made, Shape(5, 8, batch=3))
    assert not made.mask.dense(5, 10, batch=3)[..., 8:].any()


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=14), st.integers(0, 3))
def test_any_tree_from_parents(drawn: list[int], prefix: int) -> None:
    """Nodes in any order that has parents before children, and several roots."""
    parents = [number % (node + 1) - 1 for node, number in enumerate(drawn)]
    mask, n = fm.masks.tree(parents=parents, prefix=prefix), len(parents)
    assert_means(Case(mask, oracle.tree(parents, prefix)), Shape(n, n + prefix))
    assert fm.parse(str(mask)) == mask
    assert pickle.loads(pickle.dumps(mask)) == mask


@pytest.mark.parametrize("parents", [list(range(-1, 4_999)), [-1] + [node // 3 for node in range(4_999)]], ids=["chain", "wide"])
def test_a_large_tree_takes_memory_for_its_nodes(parents: list[int]) -> None:
    mask = fm.masks.tree(parents=parents)
    tables = [node for node in mask.expand().walk() if isinstance(node, Literal)]
    assert sum(len(table.data) for table in tables) <= 2 * 8 * len(parents)
    found = mask.rows(len(parents))
    path = node = len(parents) - 1
    ancestors = {path}
    while node > 0:
        node = parents[node]
        ancestors.add(node)
    at = torch.tensor(sorted(ancestors), dtype=torch.int32)
    assert found.upper.holds(at)[0, 0, -1].all()
    assert not found.exact or int(found.lower.counts()[0, 0, -1]) == len(ancestors)


@pytest.mark.parametrize("form", FORMS)
def test_tables_for_each_head(form: str) -> None:
    shape = Shape(6, 9, batch=2, heads=3)
    topk, steps = draw(8, [0, 1, 2], 2, 3, 2, 2), draw(9, list(range(7)), 2, 3, 9)
    mask = fm.masks.tile_topk(FORMS[form](topk), 3) ^ fm.masks.eviction(FORMS[form](steps))
    assert_means(Case(mask, oracle.exactly_one(oracle.tile_topk(topk, 3), oracle.eviction(steps))), shape)


def test_an_axis_of_1_stands_for_all() -> None:
    assert fm.masks.eviction([[[4, 2, 3]]]).dense(3, batch=2).shape == (1, 1, 3, 3)
    assert torch.equal(fm.masks.tile_topk([[[[0]]]], 3).dense(3), fm.masks.tile_topk([[0]], 3).dense(3))


# ---------------------------------------------------------------- lowerings

LOWERED: dict[str, tuple[Case, Shape]] = {
    **{f"{name} {at}": (Case(row[0](), row[1]), shape) for name, row in PLAIN.items() for at, shape in SHAPES.items()},
    **{f"{name} {lengths}": (Case(row[0](), row[1]), Shape(*lengths)) for name, row in MADE_FOR.items() for lengths in row[2]},
    **{f"{name} of {form}": made(FORMS[form], True) for name, made in WITH_DATA.items() for form in ("literal", "tensor")},
}


@pytest.mark.parametrize("name", one_in(2, LOWERED))
def test_every_lowering(name: str) -> None:
    made, shape = LOWERED[name]
    check_lowerings(made, shape, made.expected(shape), 4)


# ---------------------------------------------------------------- rows

#: Masks of this many queries (and keys) whose rows are known exactly, with the intervals of a row.
EXACT: dict[str, tuple[str, tuple[int, int], int]] = {
    "sink_window": ("sink_window(sinks=4, size=16)", (256, 256), 2),
    "chunked": ("chunked(size=16, start=3)", (256, 256), 1),
    "per_chunk": ("per_chunk(prefix_lm(prefix_lengths=4), size=16)", (256, 256), 1),
    "block_causal": ("block_causal(size=16)", (256, 256), 1),
    "chunk_window": ("chunk_window(size=16, left=2)", (256, 256), 1),
    "block_diffusion": ("block_diffusion(length=128, size=16)", (256, 256), 2),
    "block_diffusion documents": ("block_diffusion(length=128, size=16, lengths=[40, 3, 85])", (256, 256), 2),
    "cross_document": (
        "cross_document(causal, q_lengths=[64, 64], kv_lengths=[128, 128], align='lower_right')",
        (128, 256),
        1,
    ),
    "shared_prefix": ("shared_prefix(lengths=[64, 64, 64, 64], prefix_of=[0, 0, 0, 0])", (256, 256), 2),
    "in_context": ("in_context(lengths=[64, 64, 64, 64], test_start=192)", (256, 256), 1),
    "neighborhood": ("neighborhood(canvas=[16, 16], kernel=[7, 7])", (256, 256), 7),
    "neighborhood 3-D": ("neighborhood(canvas=[4, 8, 8], kernel=[3, 3, 3])", (256, 256), 9),
    "sliding_tile": ("sliding_tile(canvas=[16, 16], kernel=[8, 8], tile=[4, 4], text=8)", (264, 264), 3),
    "svg_spatial": ("svg_spatial(frame_length=32, width=1, prompt=16)", (272, 272), 2),
    "svg_temporal": ("svg_temporal(frame_length=32, frames=8, width=2, prompt=16)", (272, 272), 9),
    "image_cross": ("image_cross(spans=[[0, 128], [64, 128]], image_length=64)", (128, 128), 1),
    "tile_topk": ("tile_topk(topk=[[0, 3], [2, 1], [0, 2], [1, 3]], size=64, sizes=[64, 50, 64, 1])", (256, 256), 2),
    "prefix_tree": ("prefix_tree(lengths=[64, 64, 32, 32, 64], parents=[-1, 0, 1, 1, 0])", (256, 256), 2),
    "draft_blocks": ("draft_blocks(prefix=64, size=16)", (64, 128), 2),
    "draft_anchors": ("draft_anchors(anchors=[3, 20, 40, 64], size=16, context=64)", (64, 128), 2),
    "training_time_test": ("training_time_test(length=64, steps=3)", (64, 256), 4),
    "qk_sparse": ("causal & qk_sparse(starts=[32, 128], lengths=[16, 16])", (256, 256), 1),
    "reorder": ("reorder(causal, q=[7, 0, 6, 1, 5, 2, 4, 3])", (8, 8), 1),
    "coarse": ("coarse(sink_window(sinks=1, size=2), size=16)", (256, 256), 2),
}


@pytest.mark.parametrize("name", EXACT)
def test_rows_are_exact(name: str) -> None:
    text, lengths, slots = EXACT[name]
    bounds = fm.parse(text).rows(*lengths)
    assert bounds.exact
    assert bounds.lower.slots == slots


def test_rows_of_a_tiled_neighborhood_stay_within_the_tiles_around() -> None:
    bounds = fm.masks.neighborhood([32, 32], [3, 3], tile=[4, 4]).rows(1024)
    assert int(bounds.upper.counts().max()) <= 4 * 16


# ---------------------------------------------------------------- what they are about


@pytest.mark.parametrize(("canvas", "kernel"), [([5, 12], [3, 5]), ([12, 5], [4, 2]), ([3, 4, 6], [3, 2, 5]), ([7], [7])])
def test_every_pixel_sees_as_many_keys(canvas: list[int], kernel: list[int]) -> None:
    total, wanted = 1, 1
    for size, window in zip(canvas, kernel, strict=True):
        total, wanted = total * size, wanted * window
    seen = fm.masks.neighborhood(canvas, kernel).dense(total)[0, 0]
    assert seen.sum(-1).unique().tolist() == [wanted]
    assert seen.diagonal().all()


@pytest.mark.parametrize("p", [0.02, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("seed", [0, 1, 12345, 2**40])
def test_random_cells_come_in_the_share_asked_for(p: float, seed: int) -> None:
    n = 512
    cells = fm.masks.random_cells(p, seed=seed).dense(n)[0, 0].double()
    spread = (p * (1 - p)) ** 0.5
    assert abs(float(cells.mean()) - p) < 5 * spread / n
    at = torch.arange(n)
    along, against = cells[at, (at + at[:, None]) % n], cells[at, (at[:, None] - at) % n]  # the diagonals of both directions
    for lines in (cells, cells.T, along, against):
        assert float((lines.mean(1) - p).abs().max()) < 6 * spread / n**0.5


def test_random_cells_do_not_depend_on_each_other() -> None:
    masks = [fm.masks.random_cells(0.3, seed=seed).dense(256).double() - 0.3 for seed in range(3)]
    for other in (*masks[1:], masks[0].roll(1, 2), masks[0].roll(1, 3), masks[0].roll((1, 1), (2, 3)), masks[0].mT):
        assert abs(float((masks[0] * other).mean()) / 0.21) < 5 / 256


def test_a_seed_for_each_sequence_and_head() -> None:
    cells = fm.masks.random_cells(0.5, seed=2 * fm.b + fm.h).dense(32, batch=2, heads=2)
    assert all(
        torch.equal(cells[seed // 2, seed % 2], fm.masks.random_cells(0.5, seed=seed).dense(32)[0, 0]) for seed in range(4)
    )


def test_random_cells_at_the_positions_of_kernels() -> None:
    """Kernels count in 32 bits, as numbers or in tensors."""
    b, h, q, kv = (torch.arange(n, dtype=torch.int32) for n in (2, 1, 40, 50))
    mask = fm.masks.random_cells(0.5, seed=fm.b)
    mask_mod, dense = mask.mask_mod(40, 50, batch=2), mask.dense(40, 50, batch=2)
    grid = b.view(-1, 1, 1, 1), h.view(-1, 1, 1), q.view(-1, 1), kv
    assert torch.equal(mask_mod(*grid).expand_as(dense), dense)
    assert all(bool(mask_mod(b[1], h[0], q[i], kv[i])) == bool(dense[1, 0, i, i]) for i in range(40))


def test_random_cells_far_out() -> None:
    far = fm.masks.random_cells(0.5).dense(2, 4, q_offset=2**30 - 4)
    expected = oracle.table_of(oracle.random_cells(0.5), 2, 4, q_offset=2**30 - 4)
    assert far.tolist() == expected
