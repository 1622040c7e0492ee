"""From key intervals [B', H', Q', K, 2] to the tiles that cover all visible cells, on the host. Shapes as in `tile`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, compress

import torch
from torch import Tensor

from flexmask import _sync
from flexmask._transforms import has_values, is_captured, is_observed, is_static, outside_transforms
from flexmask.backends import tile_blocks
from flexmask.backends.tile import Cells, Runs, SymbolicSpan, Tile, join_bands, key_count
from flexmask.backends.tile_blocks import Blocks, block_starts, check_within, score_cost, union

# Neighbors in the batch or heads share a tile unless that is a quarter more work than their own tiles would be; the
# call that they save counts as this many keys.
JOINT_WORK = 1.25
CALL_WORK = 64
# The calls for a tile cost as much as this many scores, and one call of a fused kernel, as in bands, as the second number: one
# call for all rows may be cheaper than tiles. It is tried up to a size.
CALL_SCORES = 2**16
FUSED_CALL_SCORES = 2**15
# Reading the bounds costs as much as this many scores.
READ_SCORES = 2**19
MAX_DENSE_SCORES = 2**23
# The most tiles in a graph: each adds its operations to it.
MAX_CAPTURED_TILES = 8
# The most elements of the biases that are kept with a tiling.
MAX_KEPT_BIASES = 2**20
# The most tilings that are kept, as each call compares its bounds with theirs, and the most elements of them all. The last used
# one is kept whatever its size.
MAX_TILINGS = 8
MAX_KEPT = 2**23
#: The last used first. On the CPU stamps have copies: the layers in a graph have several tensors of the same bounds, and a graph
#: writes other bounds to their memory where torch's version counter does not see it.
_KEPT: tuple[_sync.Stamped[Tiling], ...] = ()


@dataclass(frozen=True, eq=False)
class Tiling:
    """The tiles that cover all visible cells.

    Attributes:
        tiles: no two have a cell in common.
        bounds: int [B', H', Q', K, 2], from which they were made.
        kv_len: KV.
        all_rows_attend: whether no row is fully masked.
        is_dense: whether there is one tile, of all rows and all keys, which are not folded.
    """

    tiles: list[Tile]
    bounds: Tensor
    kv_len: int
    all_rows_attend: bool
    is_dense: bool = False
    _biases: dict[tuple[torch.dtype, int | None], Tensor] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """The elements of the bounds, of their copy without fully masked rows, and of the biases that are kept."""
        return self.bounds.numel() * (1 if self.all_rows_attend else 2) + self._biases_size()

    @cached_property
    def fully_masked(self) -> Tensor | None:
        """Which rows are fully masked, bool [B', H', Q', 1]; None where no row is."""
        return None if self.all_rows_attend else (self.bounds[..., 0] >= self.bounds[..., 1]).all(-1, keepdim=True)

    def with_biases(self, cells: Cells, dtype: torch.dtype) -> Iterator[tuple[Tile, Tensor | None, Tensor | None]]:
        """Each tile with its `Tile.bias`, where fully masked rows of the bounds attend to all keys, to avoid NaN.

        Tiles with equal masks share a bias where they are neighbors, or where it is kept for later tiles and passes.
        """
        mask_id, bias = None, None
        for tile in self.tiles:
            if cells is not None:
                yield tile, *tile.bias(self._unmasked_bounds, cells, dtype)
                continue
            if tile.mask_id != mask_id:
                mask_id, bias = tile.mask_id, self._bias(tile, dtype)
            yield tile, bias, None

    def dense_bias(self, dtype: torch.dtype) -> Tensor | None:
        """The bias of a dense tiling, with fully masked rows of -inf, for a kernel that gives 0 for them."""
        return self._bias(self.tiles[0], dtype, is_dense=not self.all_rows_attend)

    def _bias(self, tile: Tile, dtype: torch.dtype, *, is_dense: bool = False) -> Tensor | None:
        key = dtype, None if is_dense else tile.mask_id
        if key in self._biases:
            return self._biases[key]
        bias, _ = tile.bias(self.bounds if is_dense else self._unmasked_bounds, None, dtype)
        if bias is not None and bias.numel() + self._biases_size() <= MAX_KEPT_BIASES:
            self._biases[key] = bias
        return bias

    def _biases_size(self) -> int:
        return sum(bias.numel() for bias in self._biases.values())

    @cached_property
    def _unmasked_bounds(self) -> Tensor:
        if self.fully_masked is None:
            return self.bounds
        return torch.where(self.fully_masked[..., None], self.bounds.new_tensor([0, self.kv_len]), self.bounds)


def may_be_dense(query: Tensor, key: Tensor, most_scores: int | None) -> bool:
    """Whether one tile of all rows and all keys, of at most so many scores, may be cheaper than several."""
    scores = query.size(0) * query.size(1) * query.size(2) * key.size(2)
    return most_scores is not None and 0 < scores <= min(most_scores, MAX_DENSE_SCORES)


def shared_tiling(
    bounds: Tensor, query: Tensor, key: Tensor, *, most_scores: int | None = None, in_bands: bool = False
) -> Tiling:
    """The tiles of `plan_tiles`, made once for equal bounds; where comparing values forces a host sync, once for their memory."""
    global _KEPT
    if is_observed(bounds) or not _sync.has_stamp(bounds):
        return plan_tiles(bounds, query, key, most_scores=most_scores, in_bands=in_bands)
    shapes = *query.shape[:3], *key.shape[1:3], *bounds.shape
    setting = *shapes, bounds.device, most_scores, in_bands, torch.is_inference_mode_enabled()
    with outside_transforms():
        for found in _KEPT:
            if found.stamp.holds([bounds], setting):
                break
        else:
            stamp = _sync.Stamp([bounds], setting)
            found = _sync.Stamped(stamp, plan_tiles(stamp.kept[0], query, key, most_scores=most_scores, in_bands=in_bands))
    if not _KEPT or found is not _KEPT[0]:
        others = [other for other in _KEPT if other is not found][: MAX_TILINGS - 1]
        ends = accumulate(other.result.size for other in (found, *others))
        _KEPT = found, *compress(others, [end <= MAX_KEPT for end in ends][1:])
    return found.result


def plan_tiles(bounds: Tensor, query: Tensor, key: Tensor, *, most_scores: int | None = None, in_bands: bool = False) -> Tiling:
    """The tiles that cover all visible cells. Reads the bounds on the host, except in a graph that is captured.

    Args:
        bounds: int [B', H', Q', K, 2], the disjoint key intervals of each row.
        query: [B, H, Q, D].
        key: [B, H_kv, KV, D].
        most_scores: a tile with more scores is cut along batch and heads. None: one tile for each block of rows, even
            where all its rows are fully masked.
        in_bands: whether each tile is one call of a fused kernel, and tiles along the diagonal are joined to bands.

    Raises:
        LoweringError: an interval outside 0..KV.
    """
    (batch, heads, q_len, _), kv_len = query.shape, key.size(2)
    if is_captured() or not has_values(bounds):
        return Tiling(_any_keys(bounds, query, key), bounds, kv_len, not is_captured())
    scores = batch * heads * q_len * kv_len
    try_dense = may_be_dense(query, key, most_scores)
    if try_dense and scores <= READ_SCORES and bounds.size(3):
        return _dense(bounds, query, key, _fewest(bounds, kv_len))
    call_scores = FUSED_CALL_SCORES if in_bands else CALL_SCORES
    in_bands = in_bands and batch == 1 and bounds.size(2) == q_len
    choices = block_starts(bounds, q_len, batch * heads, call_scores, in_bands=in_bands)
    found = [_tiles(bounds, query, key, starts, most_scores, in_bands=in_bands) for starts in choices]
    costs = [_cost(tiles, call_scores) for tiles, _ in found]
    tiles, fewest = found[costs.index(min(costs))]
    if try_dense and call_scores + scores <= min(costs):
        return _dense(bounds, query, key, fewest)
    return Tiling(tiles, bounds, kv_len, fewest > 0)


def _tiles(
    bounds: Tensor, query: Tensor, key: Tensor, starts: Sequence[int], most_scores: int | None, *, in_bands: bool
) -> tuple[list[Tile], int]:
    """The tiles of the blocks of rows that start there, and the least number of visible keys of a row."""
    elements, key_heads, kv_len = range(query.size(0)), range(key.size(1)), key.size(2)
    group = query.size(1) // len(key_heads)
    blocks = Blocks.read(bounds, kv_len, group, starts)
    tiles: list[Tile] = []
    mask_ids: dict[tuple[object, ...], int] = {}
    for block, rows in enumerate(map(range, starts, (*starts[1:], query.size(2)))):
        if most_scores is None:
            tiles.append(Tile(elements, key_heads, group, rows, *blocks.key_runs(block, elements, key_heads), block))
            continue
        for area in _areas(blocks, block, elements, key_heads):
            runs, all_visible = blocks.key_runs(block, *area)
            if not runs:
                continue
            for part in _cut(*area, most_scores // (group * len(rows) * key_count(runs))):
                mask_key = blocks.mask_key(block, len(rows), *part, runs)
                tiles.append(Tile(*part, group, rows, runs, all_visible, mask_ids.setdefault(mask_key, len(mask_ids))))
    if in_bands:
        tiles = list(join_bands(tiles, kv_len, FUSED_CALL_SCORES))
    return tiles, min(blocks.fewest)


def _cost(tiles: Sequence[Tile], call_scores: int) -> float:
    """The time of the tiles, as a number of scores."""
    return sum(call_scores + tile.scores * score_cost(tile.folded_rows) for tile in tiles)


def _dense(bounds: Tensor, query: Tensor, key: Tensor, fewest: int) -> Tiling:
    """One tile of all rows and all keys, where each row attends to at least ``fewest`` of them."""
    (batch, heads, q_len, _), (_, key_heads, kv_len, _) = query.shape, key.shape
    group = heads // key_heads
    tile = Tile(range(batch), range(key_heads), group, range(q_len), ((0, kv_len),), fewest == kv_len, 0)
    return Tiling([tile], bounds, kv_len, fewest > 0, is_dense=group == 1)


def _fewest(bounds: Tensor, kv_len: int) -> int:
    """The least number of visible keys of a row.

    Raises:
        LoweringError: an interval outside 0..KV.
    """
    lo, hi = bounds.unbind(-1)
    sizes = (hi - lo).clamp(min=0)
    outside = ((lo < 0) | (hi > kv_len)) & (sizes > 0)
    fewest, wrong = torch.stack((sizes.sum(-1).amin(), outside.any())).tolist()
    check_within(wrong, kv_len)
    return int(fewest)


def _any_keys(bounds: Tensor, query: Tensor, key: Tensor) -> list[Tile]:
    """A few tiles of all keys, for bounds whose values are not those of each run of a captured graph, or that have none.

    One tile where lengths are symbols, so that the graph is one for all. Outside a graph only the shape of the output matters.
    """
    (batch, heads, q_len, _), (_, key_heads, kv_len, _) = query.shape, key.shape
    blocks = [SymbolicSpan(0, q_len)]
    if is_static(q_len):
        step = max(tile_blocks.BLOCK_ROWS, -(-q_len // MAX_CAPTURED_TILES))
        blocks = [SymbolicSpan(start, min(start + step, q_len)) for start in range(0, q_len, step)]
    area = SymbolicSpan(0, batch), SymbolicSpan(0, key_heads), heads // key_heads
    runs = ((0, kv_len),) if bounds.size(3) else ()
    return [Tile(*area, rows, runs, not is_captured(), block) for block, rows in enumerate(blocks)]


def _areas(blocks: Blocks, block: int, elements: range, key_heads: range) -> Iterator[tuple[range, range]]:
    """Batch elements and key heads to compute in one tile, for one block of rows."""
    batches = [elements]
    if blocks.batch > 1:
        batches = _join([blocks.key_runs(block, (b,), key_heads)[0] for b in elements])
    for some in batches:
        if blocks.heads == 1:
            yield some, key_heads
        else:
            for own in _join([blocks.key_runs(block, some, range(n, n + 1))[0] for n in key_heads]):
                yield some, own


def _join(choices: list[Runs]) -> list[range]:
    """Ranges of neighbors whose keys overlap so much that one tile costs less than one for each."""
    ranges: list[range] = []
    joint: Runs = ()
    work = 0
    for i, runs in enumerate(choices):
        together = union([joint, runs])
        work += key_count(runs)
        if ranges and key_count(together) * (i + 1 - ranges[-1].start) <= JOINT_WORK * work + CALL_WORK:
            ranges[-1] = range(ranges[-1].start, i + 1)
            joint = together
        else:
            ranges.append(range(i, i + 1))
            joint, work = runs, key_count(runs)
    return ranges


def _cut(elements: range, key_heads: range, most: int) -> Iterator[tuple[range, range]]:
    """Split into parts of at most `most` key heads, counted over the batch, and at least one."""
    heads = max(1, min(most, len(key_heads)))
    for some in _even_parts(elements, max(1, most // heads)):
        for own in _even_parts(key_heads, heads):
            yield some, own


def _even_parts(whole: range, most: int) -> list[range]:
    parts = -(-len(whole) // most)
    step = -(-len(whole) // parts)
    return [whole[i : i + step] for i in range(0, len(whole), step)]
