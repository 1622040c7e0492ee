"""`block_sdpa`, which the backend `sdpa` runs, against dense masked attention in float64."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from flexmask import attention
from flexmask.backends.tile import Tile
from flexmask.backends.tiled_sdpa import fused_sdpa
from flexmask.errors import LoweringError
from tests.backends.tiled_cases import (
    MASKS,
    TOLERANCE,
    block_sdpa,
    causal,
    check_attention,
    check_close,
    inputs,
    intervals,
    lengths,
    middle_rows_only,
    ragged_noise,
    shape_of,
    sinks,
    unchanged,
    window,
)
from tests.support import oracle


def test_a_band_whose_tiles_have_masks_of_their_own(small_bands: None) -> None:
    q, kv = torch.arange(96)[:, None], torch.arange(96)
    mask = ((q >= kv) & (q - kv < 6) & ((q < 41) == (kv < 41)))[None, None]
    bounds = intervals(mask)
    check_attention(lambda q, k, v: block_sdpa(q, k, v, bounds), inputs(batch=1, **shape_of(mask)), mask)


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


def test_each_sequence_and_head_has_its_own_keys(small_tiles: None) -> None:
    start = torch.tensor([[0, 30, 10, 40], [20, 5, 35, 15]])[..., None, None]
    mask = ((start <= torch.arange(50)) & (torch.arange(50) < start + 10)).expand(2, 4, 50, 50)
    bounds = intervals(mask)
    check_attention(lambda q, k, v: block_sdpa(q, k, v, bounds), inputs(), mask)


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
    for kv_len, ends in ((50, [-1, 4]), (50, [3, 51]), (4, [3, 5])):
        query, key, value = inputs(q_len=1, kv_len=kv_len)
        with pytest.raises(LoweringError, match=f"at most {kv_len}|<= {kv_len} keys"):
            block_sdpa(query, key, value, torch.tensor([[[[ends]]]]))


def test_causal_attention_takes_one_fused_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(*problem: object) -> None:
        raise AssertionError("in tiles")

    monkeypatch.setattr("flexmask.backends.tiled_sdpa.attend", attend)
    query, key, value = inputs(q_len=50, kv_len=50)
    assert attention(query, key, value, "causal", enable_gqa=True).shape == (*query.shape[:3], value.shape[3])


def test_second_derivative_of_one_interval() -> None:
    tensors = inputs(batch=1, heads=2, key_heads=2, q_len=2, kv_len=6, dim=3, value_dim=3)
    assert torch.autograd.gradgradcheck(lambda q, k, v: block_sdpa(q, k, v, torch.tensor([[[[[1, 4]]]]])), tensors)


def test_as_many_keys_as_heads() -> None:
    check_attention(
        partial(fused_sdpa, scale=8**-0.5, is_causal=True), inputs(heads=4, key_heads=2, q_len=4, kv_len=4), causal(4, 4)
    )


def test_a_tile_without_keys_takes_none() -> None:
    tile = Tile(range(1), range(1), 2, range(3), (), False, 0)
    assert tile.gather_cells(torch.ones(1, 2, 5, 7, dtype=torch.bool)).shape == (1, 2, 3, 0)
    assert tile.gather_keys(torch.ones(1, 1, 7, 4)).shape == (1, 1, 0, 4)
