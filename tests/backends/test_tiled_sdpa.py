"""`block_sdpa`, which the backend `sdpa` runs, against dense masked attention in float64."""

import contextlib
import math
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from flexmask.backends import tile_blocks, tile_rows, tiling_cache
from flexmask.backends import tiling as tile_plan
from flexmask.backends.dropout import hashes_of
from flexmask.backends.tile import Tile
from flexmask.backends.tile_rows import document_starts
from flexmask.backends.tiled_sdpa import block_sdpa, fused_sdpa
from flexmask.backends.tiling import plan_tiles
from flexmask.backends.tiling_cache import shared_tiling
from flexmask.errors import LoweringError, OperandError
from tests.support import oracle

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}

DEFAULT_SIZES = {"batch": 2, "heads": 4, "key_heads": 2, "q_len": 50, "kv_len": 50, "dim": 8, "value_dim": 8}

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def intervals(mask: Tensor) -> Tensor:
    """Dense mask [B', H', Q', KV] -> bounds [B', H', Q', K, 2]."""
    kv_len = mask.size(3)
    rows = []
    for row in mask.flatten(0, 2).tolist():
        edges = [i for i in range(kv_len + 1) if (i > 0 and row[i - 1]) != (i < kv_len and row[i])]
        rows.append(edges)
    slots = max(map(len, rows), default=0) // 2 or 1
    padded = [row + [kv_len] * (2 * slots - len(row)) for row in rows]
    return torch.tensor(padded, dtype=torch.int32).reshape(*mask.shape[:3], slots, 2)


def inputs(dtype: torch.dtype = torch.float64, /, **sizes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random query, key and value that need gradients: 2 x 4 heads over 2 key heads, 50 x 50 tokens of 8 by default."""
    batch, heads, key_heads, q_len, kv_len, dim, value_dim = (sizes.get(name, default) for name, default in DEFAULT_SIZES.items())
    shapes = (batch, heads, q_len, dim), (batch, key_heads, kv_len, dim), (batch, key_heads, kv_len, value_dim)
    query, key, value = (torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes)
    return query, key, value


def check_close(actual: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype == dtype
    error = (actual.double() - wanted.double()).abs().max().item() if wanted.numel() else 0.0
    assert error <= TOLERANCE[dtype] * max(1.0, wanted.abs().max().item() if wanted.numel() else 0.0)


def check_attention(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    tensors: tuple[Tensor, Tensor, Tensor],
    mask: Tensor,
    **extra: object,
) -> None:
    """Output and gradients of `attend` equal those of dense attention; exactly 0 in fully masked rows, and never NaN."""
    query, key, value = tensors
    out = attend(query, key, value)
    wanted = oracle.attention(query, key, value, mask, **extra)  # type: ignore[arg-type]
    check_close(out, wanted, query.dtype)
    grad = torch.randn_like(out)
    grads = torch.autograd.grad(out, tensors, grad)
    for actual, expected in zip(grads, torch.autograd.grad(wanted, tensors, grad.double()), strict=True):
        check_close(actual, expected, query.dtype)
    seen = mask.expand(*query.shape[:3], key.size(2))
    fully_masked = ~seen.any(-1)
    unseen = ~seen.unflatten(1, (key.size(1), -1)).any(3).any(2)
    assert torch.all(out[fully_masked] == 0)
    assert torch.all(grads[0][fully_masked] == 0)
    assert torch.all(grads[1][unseen] == 0)
    assert torch.all(grads[2][unseen] == 0)


def causal(q_len: int, kv_len: int) -> Tensor:
    return torch.ones(1, 1, q_len, kv_len, dtype=torch.bool).tril()


def window(q_len: int, kv_len: int, left: int, right: int) -> Tensor:
    return torch.ones(1, 1, q_len, kv_len, dtype=torch.bool).tril(right).triu(-left)


def lengths(kv_len: int, *visible: int) -> Tensor:
    return (torch.arange(kv_len) < torch.tensor(visible)[:, None])[:, None, None]


def ragged_noise(density: float, *shape: int) -> Tensor:
    return torch.rand(shape) < density


def documents(length: int, size: int) -> Tensor:
    ids = torch.arange(length) // size
    return (ids[:, None] == ids)[None, None]


def packed(*sizes: int) -> Tensor:
    """Documents of these sizes; a negative one is that of padding."""
    ids = torch.cat([torch.full((abs(size),), i if size > 0 else -1) for i, size in enumerate(sizes)])
    return ((ids[:, None] == ids) & (ids >= 0))[None, None]


def unchanged(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return score


def past(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_idx


def middle_rows_only(q_len: int) -> Tensor:
    row = torch.arange(q_len)[:, None]
    return causal(q_len, q_len) & ((row > q_len // 3) & (row < q_len // 2))


def sinks(q_len: int) -> Tensor:
    return window(q_len, q_len, 5, 0) | (causal(q_len, q_len) & (torch.arange(q_len) < 2))


MASKS: dict[str, Callable[[], Tensor]] = {
    "everything": lambda: torch.ones(1, 1, 1, 50, dtype=torch.bool),
    "nothing": lambda: torch.zeros(1, 1, 1, 50, dtype=torch.bool),
    "nothing, row by row": lambda: torch.zeros(2, 4, 50, 50, dtype=torch.bool),
    "causal": lambda: causal(50, 50),
    "window": lambda: window(50, 50, 7, 3),
    "sinks and a window": lambda: sinks(50),
    "documents of one length": lambda: causal(50, 50) & documents(50, 16),
    "documents of 13": lambda: causal(50, 50) & documents(50, 13),
    "documents of 3, of both directions": lambda: documents(50, 3),
    "documents of some lengths, with padding": lambda: causal(50, 50) & packed(5, 13, -4, 1, 20, -2, 5),
    "documents of two lengths": lambda: causal(50, 50) & torch.cat((documents(50, 16), documents(50, 8))),
    "empty rows and empty blocks": lambda: middle_rows_only(50),
    "one row in the middle of nothing": lambda: causal(50, 50) & (torch.arange(50)[:, None] == 20),
    "rows alike": lambda: ragged_noise(0.3, 1, 1, 1, 50),
    "rows alike, per batch": lambda: lengths(50, 50, 3),
    "rows alike, one batch sees nothing": lambda: lengths(50, 0, 50),
    "rows alike, per head": lambda: ragged_noise(0.1, 1, 4, 1, 50),
    "causal with padding": lambda: causal(50, 50) & lengths(50, 41, 17),
    "per batch": lambda: torch.cat((window(50, 50, 4, 0), window(50, 50, 0, 30))),
    "per head": lambda: torch.cat([window(50, 50, 4 * left, 0) for left in (0, 1, 12, 3)], 1),
    "per head and batch": lambda: ragged_noise(0.5, 2, 4, 50, 50),
    "many intervals": lambda: ragged_noise(0.5, 1, 1, 50, 50),
    "few cells": lambda: ragged_noise(0.01, 2, 1, 50, 50),
    "far apart": lambda: torch.cat((lengths(50, 5).expand(1, 1, 50, 50), lengths(50, 5).flip(3).expand(1, 1, 50, 50))),
    "wide": lambda: window(7, 90, 2, 60),
    "tall": lambda: window(90, 7, 60, 2),
    "one row": lambda: window(1, 70, 0, 40),
    "one key": lambda: ragged_noise(0.5, 2, 1, 70, 1),
    "1 x 1": lambda: torch.ones(1, 1, 1, 1, dtype=torch.bool),
    "1 x 1, hidden": lambda: torch.zeros(1, 1, 1, 1, dtype=torch.bool),
    "exact blocks": lambda: causal(32, 32),
    "one over": lambda: causal(33, 33),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small are slower with several threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks so small that few tokens make many, with several runs of keys."""
    monkeypatch.setattr(tile_rows, "BLOCK_ROWS", 16)
    monkeypatch.setattr(tile_blocks, "GAP", 3)
    monkeypatch.setattr(tile_blocks, "ALIGNMENT", 2)
    monkeypatch.setattr(tile_plan, "CALL_WORK", 0)
    monkeypatch.setattr(tile_plan, "CALL_SCORES", 0)
    monkeypatch.setattr(tile_plan, "FUSED_CALL_SCORES", 0)
    monkeypatch.setattr(tile_plan, "READ_SCORES", 0)


@pytest.fixture
def small_bands(small_tiles: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bands of small tiles wherever tiles lie along the diagonal."""
    monkeypatch.setattr(tile_rows, "MIN_BLOCK_ROWS", 4)
    monkeypatch.setattr(tile_plan, "CALL_SCORES", 2**16)
    monkeypatch.setattr(tile_plan, "FUSED_CALL_SCORES", 2**16)
    monkeypatch.setattr(tile_plan, "MAX_DENSE_SCORES", 0)


def shape_of(mask: Tensor, q_len: int = 50) -> dict[str, int]:
    return {"q_len": max(mask.size(2), q_len if mask.size(3) == 50 else 1), "kv_len": mask.size(3)}


@pytest.mark.parametrize("name", MASKS)
class TestAgainstDense:
    def test_one_block(self, name: str) -> None:
        mask = MASKS[name]()
        bounds = intervals(mask)
        check_attention(lambda q, k, v: block_sdpa(q, k, v, bounds), inputs(**shape_of(mask)), mask)

    def test_small_tiles(self, name: str, small_tiles: None) -> None:
        mask = MASKS[name]()
        bounds = intervals(mask)
        check_attention(lambda q, k, v: block_sdpa(q, k, v, bounds), inputs(**shape_of(mask)), mask)

    def test_values_of_another_width(self, name: str, small_tiles: None) -> None:
        """Then torch's fused kernel cannot be used."""
        mask = MASKS[name]()
        bounds = intervals(mask)
        check_attention(lambda q, k, v: block_sdpa(q, k, v, bounds), inputs(value_dim=5, **shape_of(mask)), mask)

    @pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
    def test_bands(self, name: str, heads: tuple[int, int], small_bands: None) -> None:
        mask = MASKS[name]()[:1]
        bounds = intervals(mask)
        tensors = inputs(batch=1, heads=heads[0], key_heads=heads[1], **shape_of(mask))
        check_attention(lambda q, k, v: block_sdpa(q, k, v, bounds), tensors, mask)

    @pytest.mark.parametrize("heads", [(4, 4), (4, 1)])
    def test_small_tiles_cut(self, name: str, heads: tuple[int, int], small_tiles: None, monkeypatch: pytest.MonkeyPatch) -> None:
        """Tiles of so many scores are cut along heads and batch."""
        for limit in ("FUSED_SCORES", "UNFUSED_SCORES_PER_THREAD"):
            monkeypatch.setattr(f"flexmask.backends.tile_passes.{limit}", 1000)
        mask = MASKS[name]()
        bounds = intervals(mask)
        tensors = inputs(heads=heads[0], key_heads=heads[1], **shape_of(mask))
        check_attention(lambda q, k, v: block_sdpa(q, k, v, bounds), tensors, mask)

    @pytest.mark.parametrize("of", [(1, 1), (2, 4)])
    def test_cells(self, name: str, of: tuple[int, int], small_tiles: None) -> None:
        """Intervals that show too much, cut down by cells given as a tensor and as a callable."""
        upper = MASKS[name]()
        bounds, shape = intervals(upper), shape_of(upper)
        cells = ragged_noise(0.3, *of, shape["q_len"], shape["kv_len"])
        cells[:, :, ::7] = False

        def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return cells[b if of[0] > 1 else 0, h if of[1] > 1 else 0, q_idx, kv_idx]

        tensors = inputs(**shape)
        check_attention(lambda q, k, v: block_sdpa(q, k, v, bounds, cells=cells), tensors, upper & cells)
        check_attention(lambda q, k, v: block_sdpa(q, k, v, bounds, cells=mask_mod), tensors, upper & cells)

    def test_score_mod(self, name: str, small_tiles: None) -> None:
        mask = MASKS[name]()
        bounds = intervals(mask)

        def tilt(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return score * (1 + 0.1 * h) - 0.05 * (q_idx - kv_idx).abs() + 0.3 * b

        tensors = inputs(**shape_of(mask))
        check_attention(lambda q, k, v: block_sdpa(q, k, v, bounds, score_mod=tilt), tensors, mask, score_mod=tilt)


class TestInputs:
    @pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
    @pytest.mark.parametrize("variant", ["rows", "cells", "callable", "score_mod"])
    def test_dtypes(self, dtype: torch.dtype, variant: str) -> None:
        mask = middle_rows_only(300) | sinks(300) & (torch.arange(300)[:, None] > 170)
        bounds = intervals(mask)
        cells = ragged_noise(0.5, 1, 1, 300, 300)

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            if variant == "score_mod":
                return block_sdpa(query, key, value, bounds, score_mod=unchanged)
            if variant == "callable":
                return block_sdpa(query, key, value, bounds, cells=lambda b, h, q_idx, kv_idx: cells[0, 0, q_idx, kv_idx])
            return block_sdpa(query, key, value, bounds, cells=cells if variant == "cells" else None)

        seen = mask & cells if variant in ("cells", "callable") else mask
        check_attention(attend, inputs(dtype, q_len=300, kv_len=300, dim=16, value_dim=16), seen)

    @pytest.mark.parametrize(("dim", "value_dim"), [(1, 1), (3, 3), (64, 64), (192, 128), (8, 5), (5, 64)])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_head_dims(self, dim: int, value_dim: int, dtype: torch.dtype) -> None:
        mask = window(140, 140, 30, 2)
        tensors = inputs(dtype, q_len=140, kv_len=140, dim=dim, value_dim=value_dim)
        check_attention(lambda q, k, v: block_sdpa(q, k, v, intervals(mask)), tensors, mask)

    @pytest.mark.parametrize("scale", [0.0, -0.3, 2.5])
    def test_scale(self, scale: float) -> None:
        mask = causal(50, 50)
        check_attention(lambda q, k, v: block_sdpa(q, k, v, intervals(mask), scale=scale), inputs(), mask, scale=scale)

    @pytest.mark.parametrize(
        "shape",
        [{"batch": 0}, {"q_len": 0}, {"kv_len": 0}, {"heads": 0}, {"value_dim": 0}],
        ids=lambda shape: next(iter(shape)),
    )
    @pytest.mark.parametrize("score_mod", [None, unchanged])
    def test_empty_axis(self, shape: dict[str, int], score_mod: ScoreMod | None) -> None:
        tensors = inputs(**shape)
        mask = torch.ones(1, 1, 1, shape.get("kv_len", 50), dtype=torch.bool)
        check_attention(lambda q, k, v: block_sdpa(q, k, v, intervals(mask), score_mod=score_mod), tensors, mask)

    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
    def test_slots_of_any_order_and_unused_ones_anywhere(self, dtype: torch.dtype) -> None:
        bounds = torch.tensor([[[[[30, 40], [9, 9], [0, 5], [50, 50], [0, 0]]]]], dtype=dtype)
        mask = (torch.arange(50) < 5) | ((torch.arange(50) >= 30) & (torch.arange(50) < 40))
        check_attention(lambda q, k, v: block_sdpa(q, k, v, bounds), inputs(), mask[None, None, None])

    def test_no_slots(self) -> None:
        bounds = torch.zeros(1, 1, 50, 0, 2, dtype=torch.int32)
        mask = torch.zeros(1, 1, 50, 50, dtype=torch.bool)
        check_attention(lambda q, k, v: block_sdpa(q, k, v, bounds), inputs(), mask)

    def test_strided_inputs(self) -> None:
        mask = causal(50, 50)
        query, key, value = (tensor.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for tensor in inputs())
        check_attention(lambda q, k, v: block_sdpa(q, k, v, intervals(mask)), (query, key, value), mask)

    def test_only_some_inputs_need_gradients(self) -> None:
        query, key, value = (tensor.detach() for tensor in inputs())
        value.requires_grad_()
        block_sdpa(query, key, value, intervals(causal(50, 50))).sum().backward()
        assert value.grad is not None
        assert query.grad is None


class TestScoreMod:
    def test_gradient_of_what_it_captures(self, small_tiles: None) -> None:
        mask = sinks(50) & lengths(50, 50, 30)
        tensors = inputs()
        slopes, bias, offsets, table = (
            torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((4,), (2, 4), (99,), (4, 50, 50))
        )

        def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            near = torch.where(q_idx - kv_idx < 4, offsets[q_idx - kv_idx + 49], 0.0)
            return score * slopes[h] + bias[b, h] + near + table[h, q_idx, kv_idx]

        def score_mod_by_scalars(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            near = torch.where(q_idx - kv_idx < 4, offsets[q_idx - kv_idx + 49], 0.0)
            return score * slopes[h] + bias[b][h] + near + table[h][q_idx][kv_idx]

        out = block_sdpa(*tensors, intervals(mask), score_mod=score_mod_by_scalars)
        wanted = oracle.attention(*tensors, mask, score_mod=score_mod)
        check_close(out, wanted, torch.float64)
        captured = slopes, bias, offsets, table
        grad = torch.randn_like(out)
        actual = torch.autograd.grad(out, (*tensors, *captured), grad)
        for one, other in zip(actual, torch.autograd.grad(wanted, (*tensors, *captured), grad), strict=True):
            check_close(one, other, torch.float64)

    def test_only_what_it_captures_needs_gradients(self) -> None:
        query, key, value = (tensor.detach() for tensor in inputs())
        slopes = torch.randn(4, dtype=torch.float64, requires_grad=True)
        bounds = intervals(causal(50, 50))
        out = block_sdpa(query, key, value, bounds, score_mod=lambda score, b, h, q_idx, kv_idx: score * slopes[h])
        out.square().sum().backward()
        assert slopes.grad is not None
        assert torch.all(slopes.grad != 0)

    def test_scores_of_minus_infinity_mask_out(self) -> None:
        def even(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return torch.where((kv_idx % 2 == 0) & (q_idx != 3), score, -math.inf)

        mask = causal(50, 50) & (torch.arange(50) % 2 == 0) & (torch.arange(50)[:, None] != 3)
        bounds = intervals(causal(50, 50))
        check_attention(lambda q, k, v: block_sdpa(q, k, v, bounds, score_mod=even), inputs(), mask)

    def test_with_cells(self, small_tiles: None) -> None:
        cells = ragged_noise(0.3, 2, 1, 50, 50)
        bounds = intervals(causal(50, 50))

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return block_sdpa(query, key, value, bounds, cells=cells, score_mod=lambda score, *at: score * 2)

        check_attention(attend, inputs(), causal(50, 50) & cells, scale=2 / math.sqrt(8))


@pytest.mark.parametrize("sizes", [{"q_len": 1}, {"q_len": 7}, {"q_len": 1, "key_heads": 4}, {"value_dim": 5}], ids=str)
@pytest.mark.parametrize("ends", [(0, 50), (13, 31), (49, 50), (20, 20)], ids=str)
def test_one_interval_of_all_rows(ends: tuple[int, int], sizes: dict[str, int]) -> None:
    """Such keys are a part of the tensors: no other key is read, so that NaN there reaches no output and no gradient."""
    bounds, tensors = torch.tensor([[[[list(ends)]]]]), inputs(**sizes)
    keys = torch.arange(50)
    mask = ((keys >= ends[0]) & (keys < ends[1])).view(1, 1, 1, 50).expand(1, 1, tensors[0].size(2), 50)
    check_attention(lambda q, k, v: block_sdpa(q, k, v, bounds), tensors, mask)
    query, key, value = (tensor.detach() for tensor in tensors)
    hidden = ~mask[0, 0, 0]
    wanted = block_sdpa(query, key, value, bounds)
    for tensor in (key, value):
        tensor[:, :, hidden] = math.nan
    torch.testing.assert_close(block_sdpa(query, key, value, bounds), wanted)


def test_one_interval_outside_the_keys_is_an_error() -> None:
    query, key, value = inputs(q_len=1)
    for ends in ([-1, 4], [3, 51]):
        with pytest.raises(LoweringError, match="50"):
            block_sdpa(query, key, value, torch.tensor([[[[ends]]]]))


def test_second_derivative_of_one_interval() -> None:
    tensors = inputs(batch=1, heads=2, key_heads=2, q_len=2, kv_len=6, dim=3, value_dim=3)
    assert torch.autograd.gradgradcheck(lambda q, k, v: block_sdpa(q, k, v, torch.tensor([[[[[1, 4]]]]])), tensors)


def test_as_many_keys_as_heads() -> None:
    check_attention(partial(fused_sdpa, is_causal=True), inputs(heads=4, key_heads=2, q_len=4, kv_len=4), causal(4, 4))


def test_a_tile_without_keys_takes_none() -> None:
    tile = Tile(range(1), range(1), 2, range(3), (), False, 0)
    assert tile.gather_cells(torch.ones(1, 2, 5, 7, dtype=torch.bool)).shape == (1, 2, 3, 0)
    assert tile.gather_keys(torch.ones(1, 1, 7, 4)).shape == (1, 1, 0, 4)


def tile_area(tiles: list[Tile]) -> int:
    return sum(
        len(tile.elements) * len(tile.key_heads) * tile.group * len(tile.rows) * sum(hi - lo for lo, hi in tile.runs)
        for tile in tiles
    )


def rows_between(lo: Tensor, hi: Tensor) -> Tensor:
    return torch.stack((lo, hi), -1).to(torch.int32)


class TestCost:
    LONG = 16384

    def plan(self, bounds: Tensor, batch: int = 1, heads: int = 2, key_heads: int = 2, most: int = 2**26) -> list[Tile]:
        query = torch.empty(batch, heads, self.LONG, 1)
        return plan_tiles(bounds, query, query[:, :key_heads], most_scores=most).tiles

    def test_sinks_and_a_window(self) -> None:
        row = torch.arange(self.LONG)
        start = (row - 255).clamp(min=0)
        sink = rows_between(row.new_zeros(self.LONG), start.clamp(max=4))
        bounds = torch.stack((sink, rows_between(start, row + 1)), 1)[None, None]
        visible = 2 * (bounds[..., 1] - bounds[..., 0]).sum().item()
        assert visible < tile_area(self.plan(bounds)) < 1.6 * visible

    def test_sink_slots_that_some_rows_do_not_have(self) -> None:
        """The slots of one row are not those of the next, so a hull of each slot would span everything."""
        row = torch.arange(self.LONG)
        near = rows_between((row - 255).clamp(min=0), row + 1)
        sink = rows_between(row * 0, row * 0 + 4)
        has_sink = ((row % 2 == 0) & (row >= 300))[:, None]
        none = rows_between(row + 1, row + 1)
        bounds = torch.stack((sink.where(has_sink, near), near.where(has_sink, none)), 1)[None, None]
        assert tile_area(self.plan(bounds)) < 2 * self.LONG * 400

    def test_ragged_batch(self) -> None:
        """Each batch element attends to its own keys; those of about one length share a tile."""
        ends = torch.tensor([self.LONG, 100, 120, 130, 5000])
        bounds = rows_between(ends * 0, ends)[:, None, None, None]
        tiles = self.plan(bounds, batch=5, most=2**40)
        assert tile_area(tiles) <= 1.1 * 2 * self.LONG * ends.sum().item()
        assert {tile.elements for tile in tiles} == {range(1), range(1, 4), range(4, 5)}

    def test_heads_with_masks_of_their_own(self) -> None:
        row = torch.arange(self.LONG)
        near = rows_between((row - 255).clamp(min=0), row + 1)
        bounds = torch.stack((near, near, near, rows_between(row * 0, row + 1)))[None, :, :, None]
        visible = (bounds[..., 1] - bounds[..., 0]).sum().item()
        tiles = self.plan(bounds, heads=4, key_heads=4)
        assert tile_area(tiles) < 1.1 * visible
        assert {tile.key_heads for tile in tiles} >= {range(3), range(3, 4)}
        assert all(tile.group == 2 for tile in self.plan(bounds, heads=4, key_heads=2))

    def test_limit_of_scores(self) -> None:
        row = torch.arange(self.LONG)
        tiles = self.plan(rows_between(row * 0, row + 1)[None, None, :, None], batch=3, heads=8, key_heads=8, most=2**22)
        assert max(tile_area([tile]) for tile in tiles) <= 2**22
        assert tile_area(tiles) == sum(24 * 128 * 128 * (i + 1) for i in range(128))

    def test_no_mask_where_all_is_visible(self) -> None:
        row = torch.arange(self.LONG)
        start = row // 512 * 512
        tiles = self.plan(rows_between(start, start + 512)[None, None, :, None])
        assert all(tile.all_visible for tile in tiles)
        assert {tile.runs for tile in tiles} == {((i, i + 512),) for i in range(0, self.LONG, 512)}

    def test_tiles_with_equal_masks(self) -> None:
        """The tiles of a window have equal masks after its start, and so have those of documents of one length."""
        row = torch.arange(self.LONG)

        def pictures(*bounds: Tensor, **options: int) -> list[int]:
            tiles = self.plan(torch.stack(bounds)[:, None, :, None], batch=len(bounds), **options)
            return [tile.mask_id for tile in tiles]

        windowed, causal_rows = rows_between((row - 255).clamp(min=0), row + 1), rows_between(row * 0, row + 1)
        assert pictures(windowed) == [0, 1] + [2] * 126
        assert pictures(rows_between(row // 512 * 512, row + 1)) == [0, 1, 2, 3] * 32
        assert pictures(causal_rows) == list(range(128))
        assert set(pictures(causal_rows, most=2**18)) == set(range(128))
        assert len(set(pictures(windowed, causal_rows, most=2**26))) >= 128

    def test_masks_are_made_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made: list[int] = []
        bias = Tile.bias

        def noted(tile: Tile, bounds: Tensor, cells: None, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
            made.append(tile.mask_id)
            return bias(tile, bounds, cells, dtype)

        monkeypatch.setattr(Tile, "bias", noted)
        query, key, value = (tensor.detach() for tensor in inputs(q_len=1000, kv_len=1000))
        block_sdpa(query, key, value, intervals(window(1000, 1000, 127, 0)))
        assert len(made) == len(set(made)) == 3

    def test_short_sequences_take_one_call(self) -> None:
        """Tiles are worth their calls only where they leave out enough: 4 tiles at 512 tokens do, of 8 heads, 2 at 256 do not."""
        for length, number in ((64, 1), (256, 1), (512, 4)):
            query = torch.empty(1, 8, length, 1)
            tiles = plan_tiles(intervals(documents(length, 64)), query, query, most_scores=2**26).tiles
            assert len(tiles) == number
        assert {len(tile.rows) for tile in tiles} == {128}

    @pytest.mark.parametrize(
        ("mask", "calls", "waste"),
        [(window(4096, 4096, 255, 0), 6, 1.6), (window(4096, 4096, 15, 16), 6, 2.6), (documents(4096, 33), 2, 1.01)],
        ids=["window", "narrow window", "documents of 33"],
    )
    def test_tiles_along_the_diagonal_take_few_calls(self, mask: Tensor, calls: int, waste: float) -> None:
        query = torch.empty(1, 8, 4096, 1)
        tiles = plan_tiles(intervals(mask), query, query, most_scores=2**26, in_bands=True).tiles
        assert len(tiles) <= calls
        assert sum(tile.scores for tile in tiles) <= 8 * waste * mask.sum()

    def test_blocks_end_where_documents_do(self) -> None:
        """Blocks that start at multiples of 128 would have 1.6 times the visible cells."""
        mask = causal(2048, 2048) & packed(*[320] * 6, 128)
        query = torch.empty(1, 8, 2048, 1)
        tiles = plan_tiles(intervals(mask), query, query, most_scores=2**26).tiles
        assert len(tiles) <= 19
        assert sum(tile.scores for tile in tiles) < 1.4 * 8 * mask.sum()

    @pytest.mark.parametrize(
        ("sizes", "heads", "waste"),
        [([257, 10, 261, 30, 257, 205, 31, 122, 63, 390], 8, 1.8), ([13, 87, 40, 110, 22, 71, 9] * 6, 1, 3.3)],
        ids=["long", "short"],
    )
    def test_bands_are_for_short_documents(self, sizes: list[int], heads: int, waste: float) -> None:
        """Bands of the long ones would have 2.1 times the visible cells, blocks of 128 rows of the short ones 5.5 times."""
        total = sum(sizes)
        mask = causal(total, total) & packed(*sizes)
        query = torch.empty(1, heads, total, 1)
        tiles = plan_tiles(intervals(mask), query, query, most_scores=2**26, in_bands=True).tiles
        assert sum(tile.scores for tile in tiles) <= heads * waste * mask.sum()

    @pytest.mark.parametrize("name", [name for name in MASKS if "nothing" not in name])
    def test_starts_of_documents(self, name: str) -> None:
        cells = MASKS[name]().flatten(0, 1).any(0).tolist()
        seen = [{key for key, visible in enumerate(row) if visible} for row in cells]
        wanted = [0] + [
            row
            for row in range(1, len(seen))
            if seen[row] and max(set().union(*seen[:row]), default=-1) < min(set().union(*seen[row:]))
        ]
        assert document_starts(intervals(MASKS[name]()))[0] == wanted

    def test_tiling_is_made_once_for_equal_bounds(self) -> None:
        """The layers in a graph have several tensors of the same bounds."""
        query, bounds = torch.empty(1, 2, 300, 1), intervals(causal(300, 300))
        first = shared_tiling(bounds, query, query, most_scores=2**26)
        assert shared_tiling(bounds.clone(), query, query, most_scores=2**26) is first
        assert shared_tiling(bounds, query[:, :1], query[:, :1], most_scores=2**26) is not first
        assert shared_tiling(bounds.long(), query, query, most_scores=2**26) is not first
        assert shared_tiling(intervals(window(300, 300, 9, 0)), query, query, most_scores=2**26) is not first
        assert shared_tiling(bounds, query, query, most_scores=2**26) is first

    def test_latest_tilings_are_kept_up_to_a_size(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each of these has 600 elements."""
        monkeypatch.setattr(tiling_cache, "MAX_KEPT", 1300)
        query = torch.empty(1, 2, 300, 1)
        first, second, third = (intervals(window(300, 300, left, 0)) for left in (1, 2, 3))
        kept = [shared_tiling(bounds, query, query) for bounds in (first, second)]
        assert shared_tiling(first, query, query) is kept[0]
        shared_tiling(third, query, query)
        assert shared_tiling(first, query, query) is kept[0]
        assert shared_tiling(second, query, query) is not kept[1]

    def test_few_tilings_are_kept(self) -> None:
        """Each call compares its bounds with those that are kept, and steps of decoding have new ones."""
        query, key = torch.empty(1, 2, 1, 1), torch.empty(1, 2, 40, 1)
        kept = [shared_tiling(torch.tensor([[[[[0, stop]]]]], dtype=torch.int32), query, key) for stop in range(40)]
        found = [shared_tiling(tiling.bounds, query, key) is tiling for tiling in reversed(kept)]
        assert found == [True] * tiling_cache.MAX_TILINGS + [False] * (40 - tiling_cache.MAX_TILINGS)

    def test_bounds_that_change_in_place(self) -> None:
        bounds = intervals(causal(50, 50))
        for mask in (causal(50, 50), window(50, 50, 6, 0)):
            bounds.copy_(intervals(mask))
            check_attention(lambda q, k, v: block_sdpa(q, k, v, bounds), inputs(), mask)

    def test_bounds_that_a_graph_overwrites(self) -> None:
        """The kernels of Inductor write to memory, of which torch's version counter knows nothing."""
        bounds = intervals(causal(50, 50))
        for mask in (causal(50, 50), window(50, 50, 6, 0)):
            bounds.numpy()[...] = intervals(mask).numpy()
            check_attention(lambda q, k, v: block_sdpa(q, k, v, bounds), inputs(), mask)

    def test_training_after_inference_mode(self) -> None:
        mask, tensors = causal(50, 50), inputs(torch.float32, heads=2)
        bounds = intervals(mask)
        with torch.inference_mode():
            block_sdpa(*tensors, bounds)
        check_attention(lambda q, k, v: block_sdpa(q, k, v, bounds), tensors, mask)

    def test_backward_saves_what_is_linear(self) -> None:
        tensors = inputs(q_len=300, kv_len=300)
        bounds = intervals(causal(300, 300))
        saved: list[int] = []

        def note(tensor: Tensor) -> Tensor:
            saved.append(tensor.numel())
            return tensor

        for score_mod in (None, unchanged):
            saved.clear()
            with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                block_sdpa(*tensors, bounds, score_mod=score_mod).sum()
            assert max(saved, default=0) <= 2 * 4 * 300 * 8

    def test_callable_cells_get_one_tile_at_a_time(self, small_tiles: None) -> None:
        sizes = []

        def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            cells = (q_idx - kv_idx) % 3 == 0
            sizes.append(cells.numel())
            return cells

        mask = window(90, 90, 6, 0)
        upper = intervals(mask)
        cells = (torch.arange(90)[:, None] - torch.arange(90)) % 3 == 0
        check_attention(lambda q, k, v: block_sdpa(q, k, v, upper, cells=mask_mod), inputs(q_len=90, kv_len=90), mask & cells)
        assert max(sizes) <= 16 * 22


@pytest.fixture
def compiling() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("compiling")
class TestCompile:
    def test_bounds_that_change_do_not_recompile(self) -> None:
        tensors = inputs(torch.float32, q_len=200, kv_len=200)

        def loss(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor) -> Tensor:
            return block_sdpa(query * 2, key, value, bounds).square().sum()

        compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
        for number, mask in enumerate((causal(200, 200), window(200, 200, 9, 0), middle_rows_only(200))):
            bounds = intervals(mask)
            with torch.compiler.set_stance("fail_on_recompile") if number else contextlib.nullcontext():
                grads = torch.autograd.grad(compiled(*tensors, bounds), tensors)
            for actual, wanted in zip(grads, torch.autograd.grad(loss(*tensors, bounds), tensors), strict=True):
                assert torch.equal(actual, wanted)

    def test_lengths_that_change(self) -> None:
        compiled = torch.compile(block_sdpa, fullgraph=True, backend="aot_eager", dynamic=True)
        for number, length in enumerate((150, 70, 200)):
            tensors = inputs(torch.float32, q_len=length, kv_len=length)
            mask = causal(length, length)
            with torch.compiler.set_stance("fail_on_recompile") if number else contextlib.nullcontext():
                check_attention(partial(compiled, bounds=intervals(mask)), tensors, mask)


class TestOperator:
    @pytest.mark.parametrize("dropout_p", [0.0, 0.5])
    @pytest.mark.parametrize("with_cells", [False, True])
    @pytest.mark.parametrize("transposed", [False, True])
    def test_opcheck(self, with_cells: bool, transposed: bool, dropout_p: float) -> None:
        query, key, value = inputs(q_len=20, kv_len=20, value_dim=5)
        if transposed:
            query, key, value = (t.detach().transpose(1, 2).contiguous().transpose(1, 2) for t in (query, key, value))
        cells = ragged_noise(0.5, 1, 1, 20, 20) if with_cells else None
        bounds = intervals(causal(20, 20))
        sizes = *query.shape[:3], key.shape[2]
        hashes = hashes_of(torch.tensor(3), *map(torch.arange, sizes)) if dropout_p else (None, None)
        arguments = (query, key, value, bounds, cells, 0.5, dropout_p, *hashes)
        checks = torch.library.opcheck(torch.ops.flexmask.block_sdpa.default, arguments)
        assert set(checks.values()) == {"SUCCESS"}

    def test_opcheck_backward(self) -> None:
        query, key, value = (tensor.detach() for tensor in inputs(q_len=20, kv_len=20))
        bounds = intervals(causal(20, 20))
        outputs = torch.ops.flexmask.block_sdpa(query, key, value, bounds, None, 0.5, 0.0, None, None)
        arguments = (query, query, key, value, *outputs, bounds, None, 0.5, 0.0, None, None)
        operator = torch.ops.flexmask.block_sdpa_backward.default
        checks = torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))
        assert set(checks.values()) == {"SUCCESS"}

    @pytest.mark.parametrize("cells", [None, past], ids=["operator", "callable"])
    def test_gradcheck(self, cells: Callable[..., Tensor] | None, small_tiles: None) -> None:
        """Derivatives of both modes and of second order, against differences, in tiles of several runs."""
        tensors = inputs(batch=1, heads=2, key_heads=1, q_len=18, kv_len=20, dim=2, value_dim=2)
        bounds = intervals(window(18, 20, 3, 1) | (torch.arange(20) == 17))
        attend = partial(block_sdpa, bounds=bounds, cells=cells)
        torch.autograd.gradcheck(attend, tensors, check_forward_ad=True)
        torch.autograd.gradgradcheck(attend, tensors, check_fwd_over_rev=True, fast_mode=True)


BROKEN = (math.nan, math.inf, -math.inf)


def row_by_row(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Attention of each row to only the keys that it attends to, in float64, without products of weight 0."""
    group = query.size(1) // key.size(1)
    rows = []
    for b, h, i in torch.cartesian_prod(*map(torch.arange, query.shape[:3])).tolist():
        seen = mask[b if mask.size(0) > 1 else 0, h if mask.size(1) > 1 else 0, i]
        k, v = (tensor[b, h // group][seen].double() for tensor in (key, value))
        scores = k @ query[b, h, i].double() / math.sqrt(query.size(3))
        weights = torch.softmax(scores, 0)
        used = (weights != 0) & ~torch.all(scores == -math.inf)
        rows.append(weights[used] @ v[used])
    return torch.stack(rows).view(*query.shape[:3], value.size(3))


HASHES = hashes_of(torch.tensor(1), *map(torch.arange, (2, 4, 50, 50)))


class TestNonfiniteValues:
    """NaN and inf in keys and values reach the rows that attend to them, and no other."""

    ATTENDS: dict[str, Callable[[Tensor], Callable[..., Tensor]]] = {  # noqa: RUF012
        "rows": lambda mask: partial(block_sdpa, bounds=intervals(mask)),
        "cells": lambda mask: partial(block_sdpa, bounds=intervals(mask | causal(50, 50)), cells=mask.expand(2, 4, 50, 50)),
        "callable": lambda mask: partial(
            block_sdpa,
            bounds=intervals(torch.ones(1, 1, 1, 50, dtype=torch.bool)),
            cells=lambda b, h, q_idx, kv_idx: mask.expand(2, 4, 50, 50)[b, h, q_idx, kv_idx],
        ),
        "score_mod": lambda mask: partial(block_sdpa, bounds=intervals(mask), score_mod=unchanged),
        "dropout": lambda mask: partial(block_sdpa, bounds=intervals(mask), dropout_p=1e-9, hashes=HASHES),
    }

    @pytest.mark.parametrize(
        "name", ["window", "documents of two lengths", "per head and batch", "rows alike, per batch", "few cells"]
    )
    @pytest.mark.parametrize("how", ATTENDS)
    @pytest.mark.parametrize("where", ["keys", "values", "both"])
    def test_only_rows_that_attend_to_them(self, name: str, how: str, where: str, small_tiles: None) -> None:
        mask = MASKS[name]()
        mask = mask.expand(-1, -1, 50, -1)
        query, key, value = (tensor.detach() for tensor in inputs(torch.float32))
        for tensor, kind in ((key, "keys"), (value, "values")):
            if where in (kind, "both"):
                for number, broken in enumerate(BROKEN):
                    tensor[number % 2, number % 2, [7 + number, 33 - number, 49], number] = broken
        wanted = row_by_row(query, key, value, mask)
        tensors = query.requires_grad_(), key.requires_grad_(), value.requires_grad_()
        out = self.ATTENDS[how](mask)(*tensors)
        torch.testing.assert_close(out.double(), wanted, equal_nan=True, rtol=1e-5, atol=1e-5)
        self.check_gradients(out, tensors, mask)

    @staticmethod
    def check_gradients(out: Tensor, tensors: tuple[Tensor, Tensor, Tensor], mask: Tensor) -> None:
        """Of a loss of the rows that attend to no NaN or inf, those that no other row has a part in."""
        _, key, value = tensors
        broken = ~(key.isfinite().all(-1) & value.isfinite().all(-1)).repeat_interleave(2, 1)
        touched = (mask & broken.unsqueeze(2)).any(-1)
        assert touched.any()
        weight = torch.randn_like(out).masked_fill(touched.unsqueeze(-1), 0)
        grads = torch.autograd.grad(out, tensors, weight)
        q, k, v = (tensor.detach().nan_to_num(0, 0, 0).double().requires_grad_() for tensor in tensors)
        wanted = torch.autograd.grad(oracle.attention(q, k, v, mask & ~touched.unsqueeze(-1)), (q, k, v), weight.double())
        apart = ~(mask & touched.unsqueeze(-1)).any(2).unflatten(1, (2, 2)).any(2)  # keys that no touched row sees
        for found, other, clean in zip(grads, wanted, (~touched, apart, apart), strict=True):
            torch.testing.assert_close(found[clean].double(), other[clean], rtol=1e-4, atol=1e-5)

    def test_padding_of_nothing_but_nan(self) -> None:
        mask = lengths(300, 300, 170) & causal(300, 300)
        query, key, value = (tensor.detach() for tensor in inputs(torch.float32, q_len=300, kv_len=300))
        whole = block_sdpa(query, key, value, intervals(mask))
        key[1, :, 170:], value[1, :, 170:] = math.nan, math.inf
        tensors = query.requires_grad_(), key.requires_grad_(), value.requires_grad_()
        out = block_sdpa(*tensors, intervals(mask))
        torch.testing.assert_close(out, whole)
        grads = torch.autograd.grad(out.square().sum(), tensors)
        assert all(grad.isfinite().all() for grad in grads)

    @pytest.mark.parametrize("length", [16, 300])
    def test_gradients_of_fully_masked_rows_count_as_0(self, length: int) -> None:
        mask = causal(length, length)
        mask[..., -3:, :] = False
        tensors = inputs(torch.float32, q_len=length, kv_len=length, key_heads=4)
        out = block_sdpa(*tensors, intervals(mask))
        weight = torch.randn_like(out)
        weight[:, :, -3:] = 0
        wanted = torch.autograd.grad(out, tensors, weight, retain_graph=True)
        weight[:, :, -3:] = math.nan
        for found, other in zip(torch.autograd.grad(out, tensors, weight), wanted, strict=True):
            torch.testing.assert_close(found, other)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("masked", [[0], [3, 7], [*range(16)]])
    def test_fully_masked_rows_in_one_call(self, masked: list[int], dtype: torch.dtype) -> None:
        """They are 0 with gradients of 0, also where all other rows attend to all keys, and where a query of theirs is NaN."""
        mask = torch.ones(1, 1, 16, 16, dtype=torch.bool)
        mask[:, :, masked] = False
        query, key, value = (torch.randn(2, 2, 16, 8, dtype=dtype) for _ in range(3))
        wanted = oracle.attention(query, key, value, mask).to(dtype)
        for broken in (False, True):
            if broken:
                query[1, :, masked[0]] = math.nan
            q, k, v = (tensor.clone().requires_grad_() for tensor in (query, key, value))
            out = block_sdpa(q, k, v, intervals(mask))
            torch.testing.assert_close(out, wanted)
            assert not out[:, :, masked].any()
            of_query, of_key, of_value = torch.autograd.grad(out.square().sum(), (q, k, v))
            assert not of_query[:, :, masked].any()
            assert of_key[0].isfinite().all()  # those of the sequence with NaN are NaN, as documented
            assert of_value.isfinite().all()

    @pytest.mark.parametrize("number", BROKEN)
    @pytest.mark.parametrize("where", ["key", "value"])
    def test_one_call_of_all_cells(self, where: str, number: float) -> None:
        """A masked-out key of -inf, with the score -inf, leaves the output of torch's kernel as it is, but not its gradient."""
        query, key, value = (torch.rand(1, 2, 16, 8) + 0.1 for _ in range(3))
        mask = window(16, 16, 2, 0)
        clean = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
        {"key": key, "value": value}[where][:, :, 12] = number
        tensors = [tensor.requires_grad_() for tensor in (query, key, value)]
        rows = torch.tensor([*range(12), 15])  # which do not attend to the key
        attend: Callable[..., Tensor] = partial(block_sdpa, bounds=intervals(mask))
        wanted, out = (attend(*every)[:, :, rows] for every in (clean, tensors))
        torch.testing.assert_close(out, wanted)
        grads, of_clean = torch.autograd.grad(out.sum(), tensors), torch.autograd.grad(wanted.sum(), clean)
        for found, other in zip(grads, of_clean, strict=True):
            torch.testing.assert_close(found[:, :, :10], other[:, :, :10])
            assert found[:, :, 15].isfinite().all()


class TestErrors:
    @pytest.mark.parametrize(
        ("changes", "error", "message"),
        [
            ({"query": torch.zeros(2, 4, 50).double()}, LoweringError, r"query has shape \(2, 4, 50\); wanted \[batch"),
            (
                {"query": torch.zeros(2, 4, 50, 8)},
                OperandError,
                r"query, key and value are torch.float32, torch.float64",
            ),
            ({"key": torch.zeros(2, 2, 50, 7).double()}, LoweringError, r"wanted \[B, H, Q, D\], \[B, H_kv, KV, D\]"),
            ({"value": torch.zeros(2, 2, 49, 8).double()}, LoweringError, r"\(2, 2, 49, 8\); wanted"),
            ({"query": torch.zeros(2, 3, 50, 8).double()}, LoweringError, "query has 3 heads and key has 2"),
            (
                {"bounds": torch.zeros(3, 1, 50, 1, 2).int()},
                LoweringError,
                r"\(3, 1, 50, 1, 2\); wanted \[2 or 1, 4 or 1",
            ),
            ({"bounds": torch.zeros(1, 1, 50, 2).int()}, LoweringError, "bounds has shape"),
            ({"bounds": torch.zeros(1, 1, 50, 1, 2)}, OperandError, "bounds is torch.float32; wanted an integer"),
            ({"bounds": torch.tensor([[[[[0, 51]]]]])}, LoweringError, r"outside 0..50; wanted 0 <= lo and hi <= 50"),
            ({"bounds": torch.tensor([[[[[-1, 5]]]]])}, LoweringError, "outside 0..50"),
            ({"cells": torch.zeros(1, 1, 50, 50)}, OperandError, "cells is torch.float32; wanted torch.bool"),
            ({"cells": torch.zeros(1, 3, 50, 50).bool()}, LoweringError, r"wanted \[2 or 1, 4 or 1, 50, 50\]"),
            ({"cells": torch.zeros(1, 1, 50, 1).bool()}, LoweringError, "cells has shape"),
        ],
    )
    def test_message(self, changes: dict[str, Tensor], error: type[Exception], message: str) -> None:
        given = dict(zip(("query", "key", "value"), inputs(), strict=True))
        given |= {"bounds": intervals(causal(50, 50))} | changes
        with pytest.raises(error, match=message):
            block_sdpa(given["query"], given["key"], given["value"], given["bounds"], cells=given.get("cells"))
