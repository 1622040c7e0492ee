"""The tiles of `block_sdpa`: how many calls they take, and of what sizes."""

import pytest
import torch
from torch import Tensor

from flexmask.backends import tile_blocks, tiling
from flexmask.backends.tile import Span, SymbolicSpan, Tile, size_of
from flexmask.backends.tile_blocks import document_starts
from flexmask.backends.tiling import plan_tiles, shared_tiling
from tests.backends.tiled_cases import (
    MASKS,
    block_sdpa,
    causal,
    check_attention,
    documents,
    inputs,
    intervals,
    packed,
    unchanged,
    window,
)


def tile_area(tiles: list[Tile]) -> int:
    return sum(
        size_of(tile.elements) * size_of(tile.key_heads) * tile.group * size_of(tile.rows) * sum(hi - lo for lo, hi in tile.runs)
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

    @pytest.mark.parametrize(("q_len", "sizes"), [(1, [1]), (200, [128, 72]), (2000, [250] * 8), (2001, [251] * 7 + [244])])
    def test_bounds_without_values_take_few_tiles_of_all_keys(self, q_len: int, sizes: list[int]) -> None:
        assert (tile_blocks.BLOCK_ROWS, tiling.MAX_CAPTURED_TILES) == (128, 8)
        both: Span = SymbolicSpan(0, 2)
        bounds, query = torch.empty(1, 1, q_len, 2, 2, dtype=torch.int32, device="meta"), torch.empty(2, 2, q_len, 1)
        for slots, runs in ((2, ((0, q_len),)), (1, ((0, q_len),)), (0, ())):
            tiles = plan_tiles(bounds[..., :slots, :], query, query).tiles
            assert [size_of(tile.rows) for tile in tiles] == sizes
            assert [tile.rows.stop for tile in tiles] == [*(tile.rows.start for tile in tiles[1:]), q_len]
            assert {(tile.elements, tile.key_heads, tile.runs) for tile in tiles} == {(both, both, runs)}
            assert len({tile.mask_id for tile in tiles}) == len(tiles)

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
        assert {size_of(tile.rows) for tile in tiles} == {128}

    @pytest.mark.parametrize(
        ("mask", "calls", "waste"),
        [(window(2048, 2048, 255, 0), 6, 1.7), (window(2048, 2048, 15, 16), 6, 2.6), (documents(2048, 33), 2, 1.01)],
        ids=["window", "narrow window", "documents of 33"],
    )
    def test_tiles_along_the_diagonal_take_few_calls(self, mask: Tensor, calls: int, waste: float) -> None:
        query = torch.empty(1, 8, 2048, 1)
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
        monkeypatch.setattr(tiling, "MAX_KEPT", 1300)
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
        assert found == [True] * tiling.MAX_TILINGS + [False] * (40 - tiling.MAX_TILINGS)

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
