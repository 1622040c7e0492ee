"""What a picture of a mask shows, as arrays: every renderer draws from these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from flexmask.algebra import Mask, PerHead
from flexmask.analysis import analyse
from flexmask.errors import OperandError, RenderError
from flexmask.frame import Frame
from flexmask.index import Symbol
from flexmask.preparation import check_mask, frame_of
from flexmask.render.area import Area
from flexmask.render.caption import shortened
from flexmask.tables import Lookup

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["EMPTY", "FULL", "PARTIAL", "Picture", "UNKNOWN", "picture"]

#: The kinds of blocks: nothing visible, something visible, all of a whole block visible, or (with a mask whose rows are
#: only bounds, at lengths where its cells are too many to evaluate) not known.
EMPTY, PARTIAL, FULL, UNKNOWN = range(4)

#: Queries or keys that are drawn at most. Their rows take about 3 GB; longer masks would run out of memory unexplained.
MOST_TOKENS = 2**27


@dataclass(frozen=True, eq=False)
class Picture:
    """One sequence and one head of a mask, ready to be drawn.

    Attributes:
        title: the mask's text.
        q_len: number of queries.
        kv_len: number of keys.
        q_offset: position of the first query.
        batch: index of the sequence.
        batches: sequences of the mask, 1 where it does not depend on them; None where nothing says how many.
        head: index of the head.
        heads: heads of the mask, likewise.
        step: queries and keys in one pixel; ``(1, 1)`` where every cell is drawn.
        visible: the visible fraction of each pixel, ``float32[rows, columns]``; pixels at the lower and right edge stand
            for the cells that there are.
        estimated: the pixels where ``visible`` is an estimate, ``bool[rows, columns]``; None where everything is exact.
        pairs: visible (query, key) pairs, at least and at most; the two are equal where everything is exact.
        block_size: queries and keys in a block, or None where no blocks were asked for.
        blocks: the kind of each block, ``int8[q_blocks, kv_blocks]``; None also where the blocks are too many to be told
            apart.
    """

    title: str
    q_len: int
    kv_len: int
    q_offset: int
    batch: int
    batches: int | None
    head: int
    heads: int | None
    step: tuple[int, int]
    visible: NDArray[np.float32]
    estimated: NDArray[np.bool_] | None
    pairs: tuple[int, int]
    block_size: tuple[int, int] | None
    blocks: NDArray[np.int8] | None

    @property
    def every_cell(self) -> bool:
        """Whether each pixel is one cell and known, so that ``visible`` is 0 or 1 throughout."""
        return self.step == (1, 1) and self.estimated is None


def picture(
    mask: Mask,
    q_len: int,
    kv_len: int | None = None,
    *,
    batch: int = 0,
    head: int = 0,
    block_size: int | tuple[int, int] | None = None,
    q_offset: int | Tensor = 0,
    most_pixels: tuple[int, int] = (1024, 1024),
    most_blocks: tuple[int, int] = (64, 64),
) -> Picture:
    """Works out what a picture of a mask shows.

    Args:
        mask: the mask.
        q_len: number of queries.
        kv_len: number of keys, by default ``q_len``.
        batch: which sequence of the batch.
        head: which head.
        block_size: queries and keys in a block of the block grid, or one number for both; None for no grid.
        q_offset: position of the first query.
        most_pixels: rows and columns of the picture at most; longer masks are drawn by area.
        most_blocks: rows and columns of the block grid at most; a finer grid is left out.

    Raises:
        RenderError: a sequence or head that the mask does not have, more than 2**27 queries or keys, or what
            :meth:`flexmask.Mask.rows` raises.
        OperandError: an index or block size that is not a positive integer.
    """
    frame, batches, heads = _frame(mask, q_len, kv_len, batch, head, q_offset)
    block = _block_size(block_size)
    area = Area(frame, analyse(frame), batch if frame.batch > 1 else 0, head if frame.heads > 1 else 0)
    step = (-(-frame.q_len // most_pixels[0]), -(-frame.kv_len // most_pixels[1]))
    least, most = area.counts(step)
    visible, estimated = least / _cells_in(frame, step), None
    if most is not least:
        estimated = least != most
        visible[estimated] = area.samples(least, most, step)[estimated]
    offset = frame.q_offset
    return Picture(
        title=shortened(str(mask)),
        q_len=frame.q_len,
        kv_len=frame.kv_len,
        q_offset=int(offset[min(batch, offset.numel() - 1)]) if isinstance(offset, torch.Tensor) else offset,
        batch=batch,
        batches=batches,
        head=head,
        heads=heads,
        step=step,
        visible=visible.astype(np.float32),
        estimated=estimated,
        pairs=(int(least.sum()), int(most.sum())),
        block_size=block,
        blocks=_kinds(area, block, most_blocks) if block else None,
    )


def _frame(
    mask: Mask, q_len: int, kv_len: int | None, batch: int, head: int, q_offset: int | Tensor
) -> tuple[Frame, int | None, int | None]:
    """The frame, and how many sequences and heads there are where the mask says it."""
    check_mask(mask)
    for name, index in (("batch", batch), ("head", head)):
        if not isinstance(index, int) or isinstance(index, bool) or index < 0:
            raise OperandError(f"{name} must be an index from 0, got {index!r}")
    sized = {"b"} if isinstance(q_offset, torch.Tensor) else set()
    for node in mask.expand().walk():
        if isinstance(node, Lookup):
            sized |= {index.name for index in node.indices if isinstance(index, Symbol)}
        elif isinstance(node, PerHead):
            sized.add("h")
    for name, length in (("q_len", q_len), ("kv_len", kv_len)):
        if isinstance(length, int) and length > MOST_TOKENS:
            raise RenderError(f"{name} {length:,} is too long to draw; at most {MOST_TOKENS:,} can be drawn")
    # Where nothing says how many there are, as in `q - b >= kv`, there are as many as it takes.
    free = {axis: axis in mask.symbols and axis not in sized for axis in ("b", "h")}
    frame = frame_of(
        mask, q_len, kv_len, batch=batch + 1 if free["b"] else None, heads=head + 1 if free["h"] else None, q_offset=q_offset
    )
    for name, index, size in (("batch", batch, frame.batch), ("head", head, frame.heads)):
        if index >= size:
            what = {"batch": "sequence", "head": "head"}[name]
            there = f"the {what}s are 0 to {size - 1}" if size > 1 else f"the mask is the same for every {what}: leave it 0"
            raise RenderError(f"{name} {index} is out of range: {there}")
    return frame, None if free["b"] else frame.batch, None if free["h"] else frame.heads


def _block_size(given: int | tuple[int, int] | None) -> tuple[int, int] | None:
    if given is None:
        return None
    pair = (given, given) if isinstance(given, int) else tuple(given)
    if len(pair) != 2 or not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in pair):
        raise OperandError(f"block_size must be a positive integer or a pair of them (queries, keys), got {given!r}")
    return pair


def _cells_in(frame: Frame, step: tuple[int, int]) -> NDArray[np.int64]:
    """How many cells each rectangle of a grid holds; fewer at the lower and right edge."""
    sides = [np.diff([*range(0, length, size), length]) for length, size in zip((frame.q_len, frame.kv_len), step, strict=True)]
    return np.multiply.outer(sides[0], sides[1]).astype(np.int64)


def _kinds(area: Area, block: tuple[int, int], most_blocks: tuple[int, int]) -> NDArray[np.int8] | None:
    """The kinds that FlexAttention's ``BlockMask`` has: one that reaches over the edge of the mask is never full there."""
    frame = area.frame
    if -(-frame.q_len // block[0]) > most_blocks[0] or -(-frame.kv_len // block[1]) > most_blocks[1]:
        return None
    least, most = area.counts(block)
    kinds = np.full(least.shape, UNKNOWN, dtype=np.int8)
    if most is not least:
        found = area.samples(least, most, block)
        kinds[(found > 0) & (found < 1)] = PARTIAL
    kinds[(least > 0) & (most < block[0] * block[1])] = PARTIAL
    kinds[most == 0] = EMPTY
    kinds[least == block[0] * block[1]] = FULL
    return kinds
