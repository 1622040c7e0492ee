"""The cells of single blocks, ``bool[n, rows, width]``, evaluated a bounded number at a time."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor

from flexmask import _sync
from flexmask.blocks.layout import BlockLayout, Entries
from flexmask.intervals.closures import Closure
from flexmask.intervals.evaluation import hoisted_closure

#: Cells evaluated at a time, which bounds the memory of intermediate results: on the CPU they stay in its caches.
CHUNK = _sync.PerDevice(cpu=2**18, elsewhere=2**24)


class BlockCells:
    """Evaluates single blocks of a mask."""

    def __init__(self, layout: BlockLayout) -> None:
        self._layout = layout

    @cached_property
    def _closure(self) -> Closure:
        return hoisted_closure(self._layout.context)

    def evaluate(self, entries: Entries, rows: Tensor | None = None) -> Iterator[tuple[slice, slice, Tensor]]:
        """Evaluates rows of blocks.

        Do not keep a tensor of each step: small tensors that stay alive between large ones fragment the memory.

        Args:
            entries: the blocks.
            rows: the rows of each block, ``int64[r]``, counted from its first; by default all.

        Yields:
            Which blocks, which rows, and their cells ``bool[blocks, rows, width]``, False beyond the ends of the mask.
        """
        layout, context, device = self._layout, self._layout.context, entries.row.device
        rows = torch.arange(layout.height, device=device) if rows is None else rows
        chunk = CHUNK.on(entries.row)
        row_count = min(rows.numel(), max(1, chunk // layout.width))
        block_count = max(1, chunk // (row_count * layout.width))
        columns = torch.arange(layout.width, device=device)
        for block_start in range(0, entries.row.numel(), block_count):
            blocks = slice(block_start, block_start + block_count)
            group, block_row = entries.row[blocks] // layout.q_blocks, entries.row[blocks] % layout.q_blocks
            b, h = (group // context.heads).view(-1, 1, 1), (group % context.heads).view(-1, 1, 1)
            kv = entries.column[blocks].view(-1, 1, 1) * layout.kv_size + columns
            for row_start in range(0, rows.numel(), row_count):
                part = slice(row_start, row_start + row_count)
                q = block_row.view(-1, 1, 1) * layout.q_size + rows[part].view(1, -1, 1)
                cells = self._closure(b, h, q.clamp(max=context.q_len - 1), kv.clamp(max=context.kv_len - 1))
                yield blocks, part, cells & (q < context.q_len) & (kv < context.kv_len)
