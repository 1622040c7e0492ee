"""Comparisons of every lowering of a mask with the expected cells."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from flexmask.intervals.bounds import RowBounds
from flexmask.intervals.rows import Rows
from flexmask.lowering.block_mask import block_sizes
from flexmask.lowering.mask_mod import interval_count
from flexmask.testing.findings import Finding, compare_cells, compare_statistics
from flexmask.testing.settings import Setting


def check_lowerings(setting: Setting, wanted: Tensor, block_size: int | tuple[int, int]) -> Iterator[Finding]:
    """Checks dense, rows, mask_mod in both forms, BlockMask and stats.

    Args:
        setting: the mask with its lengths and device.
        wanted: the expected cells, ``bool[B, H, q_len, kv_len]``.
        block_size: tokens in a block, or the pair (queries, keys).
    """
    mask, lowering = setting.mask, setting.lowering
    yield compare_cells("dense", mask.dense(**lowering).expand(setting.shape), wanted)
    bounds = mask.rows(**lowering)
    yield compare_cells("rows" if bounds.exact else "rows (bounds)", _within(bounds, setting, wanted), wanted)
    forms = {"mask_mod (expression)": "expression", "mask_mod (interval)": "interval"}
    if interval_count(bounds) is None:
        del forms["mask_mod (interval)"]
    for name, form in forms.items():
        mask_mod = mask.mask_mod(**lowering, form=form)  # type: ignore[arg-type]
        yield compare_cells(name, setting.cells(mask_mod), wanted)
    found = mask.block_mask(**lowering, block_size=block_size)
    yield from _block_mask(found, setting, wanted)
    yield _stats(setting, wanted, block_size)


def _within(bounds: RowBounds, setting: Setting, wanted: Tensor) -> Tensor:
    """The cells of the lower bound, and between the bounds the expected cells."""
    lower, upper = (_cells(rows, setting) for rows in (bounds.lower, bounds.upper))
    return lower | (wanted & upper)


def _cells(rows: Rows, setting: Setting) -> Tensor:
    return rows.holds(torch.arange(setting.kv_len, device=setting.device)).expand(setting.shape)


def _block_mask(found: BlockMask, setting: Setting, wanted: Tensor) -> Iterator[Finding]:
    """Compares the lists of a BlockMask with those of torch, and the cells that a kernel computes from them."""
    theirs = create_block_mask(
        lambda b, h, q_idx, kv_idx: wanted[b, h, q_idx, kv_idx], *setting.shape, str(setting.device), found.BLOCK_SIZE
    )
    q_size, kv_size = found.BLOCK_SIZE
    seen = setting.cells(found.mask_mod)
    for along, what in (("kv", "forward"), ("q", "backward")):
        grids = []
        for kind in (along, f"full_{along}"):
            grid, named_twice = _grid(found, kind, setting)
            yield compare_cells(f"BlockMask ({kind}_indices)", grid ^ named_twice, _grid(theirs, kind, setting)[0], "blocks")
            grids.append(grid if along == "kv" else grid.transpose(2, 3))
        partial, full = (
            grid.repeat_interleave(q_size, 2).repeat_interleave(kv_size, 3)[:, :, : setting.q_len, : setting.kv_len]
            for grid in grids
        )
        yield compare_cells(f"BlockMask ({what} cells)", full | (partial & seen), wanted)


def _grid(block_mask: BlockMask, kind: str, setting: Setting) -> tuple[Tensor, Tensor]:
    """The blocks in a list of a BlockMask, and those listed more than once; ``bool[B, H, rows, columns]``."""
    counts, indices = getattr(block_mask, f"{kind}_num_blocks"), getattr(block_mask, f"{kind}_indices")
    width = indices.shape[-1]
    used = torch.arange(width, device=indices.device) < counts.unsqueeze(-1)
    times = torch.zeros(used.shape, dtype=torch.int32, device=indices.device)
    times.scatter_add_(-1, indices.where(used, 0).long(), used.to(torch.int32))
    shape = (setting.batch, setting.heads, *times.shape[2:])
    return (times > 0).expand(shape), (times > 1).expand(shape)


def _stats(setting: Setting, wanted: Tensor, block_size: int | tuple[int, int]) -> Finding:
    found = setting.mask.stats(**setting.lowering, block_size=block_size)
    cells = wanted[: found.batch, : found.heads]
    q_size, kv_size = block_sizes(block_size)
    padded = torch.nn.functional.pad(cells, (0, -setting.kv_len % kv_size, 0, -setting.q_len % q_size))
    visible = padded.unflatten(3, (-1, kv_size)).unflatten(2, (-1, q_size)).sum((3, 5))
    full = int((visible == q_size * kv_size).sum())
    statistics = {
        "visible": int(cells.sum()),
        "fully_masked_rows": int((~cells.any(-1)).sum()),
        "partial_blocks": int((visible > 0).sum()) - full,
        "full_blocks": full,
        "empty_blocks": int((visible == 0).sum()),
    }
    return compare_statistics("stats", {name: getattr(found, name) for name in statistics}, statistics)
