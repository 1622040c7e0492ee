"""What named masks are given: parameters that are bound later, text, and arguments that are refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import flexmask as fm
from flexmask.errors import ExpressionError, LoweringError, OperandError, TextError


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("sink_window(sinks=n, size=w)", {"n": 2, "w": 3}),
        ("dilated_window(left=w, right=0, dilation=d)", {"w": 6, "d": 2}),
        ("global_window(is_global=g, left=1, right=1)", {"g": [True] + [False] * 11}),
        ("chunked(size=n, start=s)", {"n": 5, "s": 2}),
        ("per_chunk(causal, size=n)", {"n": 4}),
        ("chunk_window(size=n, left=m)", {"n": 3, "m": 1}),
        ("block_diffusion(length=n, size=2)", {"n": 6}),
        ("block_diffusion(length=6, size=2, lengths=d)", {"d": [4, 2]}),
        ("shared_prefix(lengths=n, prefix_of=p)", {"n": [4, 4, 4], "p": [0, 0, 0]}),
        ("cross_document(causal, q_lengths=n, kv_lengths=m, align='lower_right')", {"n": [4, 8], "m": [6, 6]}),
        ("cross_document(causal, q_cu_seqlens=n, kv_cu_seqlens=n, align='lower_right')", {"n": [0, 4, 12]}),
        ("multi_item(prefix_length=4, positions=p)", {"p": [0, 1, 2, 3, 0, 1, 2, 3]}),
        ("bidirectional_spans(ids=i) & in_context(ids=i, test_start=s)", {"i": [0] * 6 + [1] * 6, "s": 6}),
        ("tree(ancestors=a)", {"a": [[i >= j for j in range(12)] for i in range(12)]}),
        ("tree(parents=p)", {"p": list(range(-1, 11))}),
        ("prefix_tree(end=e)", {"e": [12, 4, 3, 4, 12, 12, 9, 8, 9, 12, 11, 12]}),
        (
            "prefix_tree(end=e, order=o)",
            {"e": [12, 12, 4, 12, 12, 3, 4, 9, 12, 8, 9, 12], "o": [0, 4, 1, 9, 11, 2, 3, 5, 10, 6, 8, 7]},
        ),
        ("prefix_tree(position_ids=p)", {"p": [0, 1, 2, 2, 1, 2, 3, 4, 4, 3, 4, 0]}),
        ("draft_blocks(prefix=p, size=3)", {"p": 4}),
        ("draft_anchors(anchors=a, size=6, context=2)", {"a": [1, 2]}),
        ("image_cross(spans=s, image_length=6)", {"s": [[0, 12], [3, 6]]}),
        ("tile_topk(topk=[[0], [2], [1]], size=4, sizes=s)", {"s": [1, 2, 4]}),
        ("eviction(steps=s)", {"s": list(range(12))}),
        ("svg_spatial(frame_length=4, width=1.5, prompt=p)", {"p": 2}),
        ("random_cells(p=0.25, seed=s)", {"s": 3}),
        ("reorder(causal, q=p, kv=p)", {"p": list(range(11, -1, -1))}),
        ("paged(causal, pages=p, page_size=n)", {"p": [1, 0, 2], "n": 4}),
        ("coarse(block_causal(size=2), size=n)", {"n": 3}),
    ],
)
def test_parameters_and_text(text: str, values: dict[str, Any]) -> None:
    open_mask = fm.parse(text)
    assert str(open_mask) == text
    assert open_mask.params == tuple(sorted(values))
    mask = open_mask.bind(**values)
    assert fm.parse(str(mask)) == mask
    assert eval(repr(mask), {**vars(fm), **{name: getattr(fm.masks, name) for name in dir(fm.masks)}}) == mask
    dense = mask.dense(12)
    assert dense.any()
    assert torch.equal(mask.expand().dense(12), dense)


REFUSED: list[tuple[str, str]] = [
    ("dilated_window(left=4, right=4, dilation=0)", r"dilated_window: dilation must be at least 1, got 0"),
    ("dilated_window(left=-1, right=4, dilation=1)", r"dilated_window: left must be at least 0, got -1"),
    ("sink_window(4)", r"sink_window: give left= \(tokens to the left of the query's own; None for no limit\), or size= \("),
    ("sink_window(4, left=2, size=3)", r"sink_window: give either size or left, got size=3 with"),
    ("sink_window(-1, left=2)", r"sink_window: sinks must be at least 0, got -1"),
    ("bigbird(1000000, 1)", r"bigbird: blocks must be at most 131072, got 1000000"),
    ("sink_window(True, left=2)", r"sink_window: sinks must be an integer, got True"),
    ("global_window([2, 0], left=1, right=1)", r"is_global must be boolean, True for a global token, or of 0 and 1, got 2"),
    ("global_window([[[True]]], left=1, right=1)", r"is_global must have the axes \[S\] or \[B, S\], got shape \[1, 1, 1\]"),
    ("key_padding(start)", r"key_padding\(start\) would give start as lengths; write key_padding\(start=start\)"),
    ("key_padding(keep)", r"write key_padding\(keep=keep\)"),
    (
        "document([True, False])",
        r"ids must hold integers, got truth values; of an attention_mask take flexmask.key_padding\(keep=",
    ),
    (
        "document(cu_seqlens=[3, 4])",
        r"cu_seqlens must start with 0 and not decrease, got \[3, 4\]; the lengths themselves are len",
    ),
    ("document(cu_seqlens=[[0, 2], [0, -1]])", r"document: cu_seqlens must be at least 0, got -1"),
    ("per_document(causal, cu_seqlens=[0, 4, 3])", r"cu_seqlens must start with 0 and not decrease, got \[0, 4, 3\]"),
    ("document(position_ids)", r"would give position_ids as ids; write document\(position_ids=position_ids\)"),
    ("causal & document(lengths)", r"would give lengths as ids; write document\(lengths=lengths\)"),
    ("key_padding([[1, 1, 0]])", r"one axis, the batch; got shape \[1, 3\]; of an attention_mask of 0 and 1 write keep=, of a"),
    ("sliding_window(left=4)", r"give both left= and right=.*right=0 for causal"),
    ("sliding_window(left=-1, right=0)", r"left must be at least 0, got -1; None is no limit"),
    ("chunked(0)", r"chunked: size must be at least 1, got 0"),
    ("chunked(4, start=-1)", r"chunked: start must be at least 0, got -1"),
    ("per_chunk(causal('lower_right'), 4)", r"per_chunk: .* uses q_len or kv_len"),
    ("per_chunk(4, 4)", r"per_chunk: wanted a mask first, got int 4"),
    ("block_causal(0)", r"block_causal: size must be at least 1"),
    ("chunk_window(4, left=-1)", r"chunk_window: left must be at least 0, got -1"),
    ("block_diffusion(4, 1, padding=True)", r"block_diffusion: padding= goes with lengths or cu_seqlens"),
    ("block_diffusion(0, 1)", r"block_diffusion: length must be at least 1"),
    ("cross_document(q_lengths=[1])", r"give exactly one of kv_lengths and kv_cu_seqlens; got neither"),
    ("cross_document(q_lengths=[1], q_cu_seqlens=[0, 1])", r"one of q_lengths and q_cu_seqlens; got both"),
    ("cross_document(causal, q_lengths=[1], kv_lengths=[1])", r"got None; with a mask it says whether the first query"),
    ("cross_document(q_lengths=[1], kv_lengths=[1], align='left')", r"align must be .* got 'left'"),
    ("shared_prefix([0, 1], prefix_of=[[[0]]])", r"prefix_of must have the axes \[n\] or \[B, n\]"),
    ("neighborhood([4, 4], [5, 3])", r"the kernel \[5, 3\] must fit into the canvas \[4, 4\]"),
    ("neighborhood([4, 4], [3])", r"neighborhood: kernel must have 2 axes, got \[3\]"),
    ("neighborhood([4, 4, 4, 4], [1, 1, 1, 1])", r"neighborhood: canvas must have 1 or 2 or 3 axes"),
    ("neighborhood([4, 0], [1, 1])", r"canvas must be at least 1 along each axis, got \[4, 0\]"),
    ("neighborhood(4, 3)", r"canvas must be a list of integers, one for each axis, got 4"),
    ("neighborhood([[4]], [3])", r"canvas must be a list of integers, one for each axis, got a table of shape \[1, 1\]"),
    ("neighborhood(sizes, [3, 3])", r"canvas cannot be a parameter, .*: write a list instead of sizes"),
    ("neighborhood([4, 4], [3, 3], tile=[3, 2])", r"the tile \[3, 2\] must divide the canvas \[4, 4\]"),
    ("sliding_tile([4, 4], [3, 2], [2, 2])", r"the tile \[2, 2\] must divide the kernel \[3, 2\]"),
    ("sliding_tile([4], [4], [2], text=-1)", r"sliding_tile: text must be at least 0"),
    ("svg_spatial(4, width=1, round_to=8)", r"1 frames of 4 in steps of 8 are 0 tokens.* give a larger width"),
    ("svg_spatial(n, width=1)", r"frame_length cannot be a parameter, .*: write a number instead of n"),
    ("svg_spatial(4, width=1e999)", r"width must be a finite number of frames from 0 up, got inf"),
    ("svg_spatial(4, width='all')", r"width must be a number of frames, got 'all'"),
    ("svg_temporal(4, frames=8, width=1)", r"1 of 8 parts of a frame of 4 are 0 tokens"),
    ("image_cross([[0, 1, 2]], 4)", r"image_cross: spans must be pairs"),
    ("tile_topk(chosen, 4)", r"topk cannot be a parameter, .*: give the values of chosen"),
    ("tile_topk(4, 4)", r"topk must have the axes .* got an integer"),
    ("tile_topk([1, 2], 4)", r"topk must have the axes \[tiles, K\]"),
    ("tree()", r"tree: give exactly one of ancestors and parents; got neither"),
    ("tree([[True]], parents=[-1])", r"tree: give exactly one of ancestors and parents; got both"),
    ("tree([[2]])", r"tree: ancestors must be boolean, True for an ancestor, or of 0 and 1, got 2"),
    ("tree(parents=[-1, 1])", r"a parent stands before its children, but node 1 has the parent 1"),
    ("tree(parents=4)", r"tree: parents must be a list of integers"),
    ("draft_blocks(2, 0)", r"draft_blocks: size must be at least 1"),
    ("draft_anchors([1], 2, context=-1)", r"draft_anchors: context must be at least 0"),
    ("training_time_test(4, n)", r"steps cannot be a parameter, .*: write a number instead of n"),
    ("eviction([[[[1]]]])", r"eviction: steps must have the axes \[KV\], \[B, KV\] or \[B, H, KV\]"),
    ("qk_sparse([1, 2], [1])", r"qk_sparse: .* give as many of each"),
    ("qk_sparse(starts, [1])", r"starts cannot be a parameter, .*: write the values of starts"),
    ("random_cells(1.5)", r"random_cells: p must be between 0 and 1, got 1.5"),
    ("random_cells('half')", r"random_cells: p must be a number from 0 to 1, got 'half'"),
    ("random_cells(0.5, seed=-1)", r"random_cells: seed must be at least 0"),
    ("coarse(causal, 0)", r"coarse: size must be at least 1"),
    ("reorder(causal)", r"reorder: give the original positions of the queries as q=, of the keys as kv=, or both"),
    ("paged(causal('lower_right'), [0], page_size=4)", r"uses kv_len, which is the size of the cache"),
    ("paged(causal, [[[0]]], page_size=4)", r"pages must have the axes \[n\] or \[B, n\]"),
]


@pytest.mark.parametrize(("text", "message"), REFUSED)
def test_refused(text: str, message: str) -> None:
    with pytest.raises(TextError, match=message):
        fm.parse(text)


def test_parents_on_a_device_are_refused() -> None:
    with pytest.raises(OperandError, match=r"write tensor.tolist\(\), or give ancestors=, which may be a parameter of a plan"):
        fm.masks.tree(parents=torch.tensor([-1, 0]))


def test_a_prefix_must_be_known() -> None:
    with pytest.raises(ExpressionError, match=r"names the document -1, but it is for 2 documents.*names itself"):
        fm.masks.shared_prefix([0, 1], prefix_of=[-1, 0])
    with pytest.raises(ExpressionError, match=r"names the document 5"):
        fm.masks.shared_prefix([0, 0, 1, 1], prefix_of=[0, 5])
    with pytest.raises(LoweringError, match=r"prefix_of must be at least 0, got -1"):
        fm.masks.shared_prefix([0, 1], prefix_of=torch.tensor([-1, 0])).dense(2)


def test_values_that_shape_a_mask_come_with_its_text() -> None:
    mask = fm.parse("neighborhood(canvas, kernel=[1, n]) & random_cells(p=share)", canvas=[2, 4], n=3, share=0.5)
    assert mask == fm.masks.neighborhood([2, 4], [1, 3]) & fm.masks.random_cells(0.5)
    text = "document(ids) & (ids[b, kv] > m)"
    assert fm.parse(text, ids=[[0, 1]], m=0) == fm.parse(text).bind(ids=[[0, 1]], m=0)
    with pytest.raises(ExpressionError, match="has no parameter other; it has ids"):
        fm.parse("document(ids)", other=1)


FORGOTTEN: list[Callable[[], object]] = [
    lambda: fm.full() & fm.causal,  # type: ignore[operator]
    lambda: fm.causal & fm.full(),
    lambda: fm.masks.transpose(fm.causal),  # type: ignore[arg-type]
    lambda: fm.per_head([fm.causal, fm.full()]),  # type: ignore[list-item]
    lambda: fm.where(fm.causal, fm.full(), fm.empty()),  # type: ignore[call-overload]
]


@pytest.mark.parametrize("forgotten", FORGOTTEN)
def test_forgotten_parentheses_are_named(forgotten: Callable[[], object]) -> None:
    with pytest.raises(OperandError, match=r"the function causal: call it, causal\(\)"):
        forgotten()


@pytest.mark.parametrize("data", [(1, 2), ([1], 2), (1, [2])], ids=str)
def test_ranges_are_lists(data: tuple[Any, Any]) -> None:
    with pytest.raises(ExpressionError, match="must be a list, one entry for each range"):
        fm.masks.qk_sparse(*data)
