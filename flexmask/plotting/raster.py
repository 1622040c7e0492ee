"""Pictures of masks as arrays ``[categories, rows, columns]``, which every renderer draws."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from flexmask._checks import check_flag, kind_of
from flexmask.errors import OperandError, RenderError
from flexmask.intervals.context import MAX_LENGTH
from flexmask.plotting.annotations import Band, Tokens, bands_of, key_labels, picture_lengths, query_labels
from flexmask.plotting.caption import shortened
from flexmask.plotting.categories import Category, difference, reasons, visibility
from flexmask.plotting.categories import shards as by_shard
from flexmask.plotting.density import MaskSlice, Selection, cells_in, select
from flexmask.tracing.trace import MaskLike, as_mask

if TYPE_CHECKING:
    from flexmask.distributed.sharding import Sharding

#: The states of blocks. UNKNOWN: the bounds of a long mask differ there, and its cells are too many to evaluate.
EMPTY, PARTIAL, FULL, UNKNOWN = range(4)
#: The most rows and columns of blocks that are drawn by default.
MAX_BLOCKS = (64, 64)


@dataclass(frozen=True, eq=False)
class Scores:
    """Attention weights in the pixels of a picture.

    Attributes:
        values: the mean weight of each pixel, ``float32[rows, columns]``.
        most: the weight with the darkest color.
        averaged: the number of heads that are averaged; None for a single head.
    """

    values: NDArray[np.float32]
    most: float
    averaged: int | None


@dataclass(frozen=True, eq=False)
class Picture:
    """One sequence and one head of a mask, or a comparison of two masks, ready to be drawn.

    Attributes:
        text: the mask's text; one line for each of two masks.
        q_len: number of queries.
        kv_len: number of keys.
        q_offset: position of the first query.
        batch: index of the sequence.
        batches: number of sequences, 1 if the mask does not depend on them; None if unknown.
        head: index of the head.
        heads: number of heads, in the same way.
        step: queries and keys in one pixel; ``(1, 1)`` where every cell is drawn.
        categories: the categories of the cells.
        pairs: lower and upper bound of the number of cells of each category; equal where everything is exact.
        shares: the share of each category in each pixel, ``float32[categories, rows, columns]``; pixels at the lower and right
            edge cover fewer cells.
        estimated: the pixels whose shares are estimates, ``bool[rows, columns]``; None where everything is exact.
        hidden_by: for each cell the categories whose terms mask it out, bit ``i`` for category ``i``, ``uint32[rows, columns]``;
            None if a pixel covers several cells, or without terms.
        block_size: queries and keys in a block, or None without blocks.
        blocks: the state of each block, ``int8[q_blocks, kv_blocks]``; None if there are too many to draw.
        bands: documents, prefix trees and padding along the edges.
        q_tokens: labels of the queries; None for their numbers.
        kv_tokens: labels of the keys, in the same way.
        scores: attention weights of the visible cells; None for the mask alone.
    """

    text: str
    q_len: int
    kv_len: int
    q_offset: int
    batch: int
    batches: int | None
    head: int
    heads: int | None
    step: tuple[int, int]
    categories: tuple[Category, ...]
    pairs: tuple[tuple[int, int], ...]
    shares: NDArray[np.float32]
    estimated: NDArray[np.bool_] | None
    hidden_by: NDArray[np.uint32] | None
    block_size: tuple[int, int] | None
    blocks: NDArray[np.int8] | None
    bands: tuple[Band, ...]
    q_tokens: tuple[str, ...] | None
    kv_tokens: tuple[str, ...] | None
    scores: Scores | None = None

    @property
    def every_cell(self) -> bool:
        """Whether each pixel is one cell with a known category."""
        return self.step == (1, 1) and self.estimated is None

    @property
    def cells(self) -> NDArray[np.uint8]:
        """The category of each cell, ``uint8[q_len, kv_len]``, if :attr:`every_cell`."""
        assert self.every_cell
        categories: NDArray[np.uint8] = self.shares.argmax(0).astype(np.uint8)
        return categories

    def block_count(self, state: int) -> int:
        """The number of blocks in a state; 0 where blocks are not drawn."""
        return 0 if self.blocks is None else int((self.blocks == state).sum())


def rasterize(
    mask: MaskLike,
    q_len: int | None = None,
    kv_len: int | None = None,
    *,
    batch: int = 0,
    head: int = 0,
    q_offset: int | Tensor = 0,
    block_size: int | tuple[int, int] | None = None,
    why: bool | None = False,
    against: MaskLike | None = None,
    shards: Sharding | None = None,
    tokens: Tokens | None = None,
    kv_tokens: Tokens | None = None,
    bands: bool = True,
    max_pixels: tuple[int, int] = (1024, 1024),
    max_blocks: tuple[int, int] | None = None,
    split_heads: bool = True,
) -> Picture:
    """Computes the picture of a mask.

    Args:
        mask: the mask.
        q_len: number of queries; by default from the tokens or the mask's data, else equal to the keys, else 16.
        kv_len: number of keys; by default ``q_len`` if given, else from the tokens or the mask's data.
        batch: which sequence of the batch.
        head: which head.
        q_offset: position of the first query.
        block_size: queries and keys in a block of the block grid, or one number for both; None for no grid.
        why: whether hidden cells are colored by the term that masks them out, the first one in reading order.
        against: another mask (B), its text, or a ``mask_mod``: cells are colored by whether they are visible in both masks, only
            in the first (A), only in the other, or in neither.
        shards: a plan of context parallelism: visible cells are colored by the rank that holds the query.
        tokens: labels of the positions, a list or a text that is split at blanks: of the queries, and also of the keys
            without ``kv_tokens``; with ``q_offset`` queries have the later labels.
        kv_tokens: labels of the keys, if they differ.
        bands: whether to show documents, prefix trees and padding along the edges.
        max_pixels: the most rows and columns of the picture; longer masks are downsampled.
        max_blocks: the most rows and columns of the block grid, 64 of each by default; a finer grid is left out.
        split_heads: with ``why``, whether ``per_head`` is split into the terms of the head's mask, or is one term.

    Raises:
        RenderError: a sequence or head that the mask does not have, more than 2**27 queries or keys, tokens that are not as
            many as positions, ``against`` together with ``why`` or blocks, ``shards`` together with one of these or of another
            length, or what :meth:`flexmask.Mask.rows` raises.
        OperandError: an index or block size that is not a positive integer, a number of pixels or blocks that is not a pair of
            these, tokens that are no texts, or ``shards`` that are no plan.
    """
    mask = as_mask(mask)
    check_flag(bands, "bands")
    if why is not None:
        check_flag(why, "why")
    if against is not None:
        against = as_mask(against, "against")
        if why or block_size is not None:
            raise RenderError("against= shows in which of two masks cells are visible; leave out why= and block_size=")
    if shards is not None and not hasattr(shards, "seq_len"):
        raise OperandError(f"shards must be a Sharding of flexmask.distributed.shard_sequence(), got {kind_of(shards)}")
    if shards is not None and (why or block_size is not None or against is not None):
        raise RenderError("shards= shows which rank holds each query; leave out why=, block_size= and against=")
    block = _block_size(block_size)
    max_blocks = MAX_BLOCKS if max_blocks is None else max_blocks
    for name, most in (("max_pixels", max_pixels), ("max_blocks", max_blocks)):
        if not isinstance(most, tuple | list) or len(most) != 2 or not all(isinstance(size, int) and size > 0 for size in most):
            raise OperandError(f"{name} must be a pair of positive integers, got {most!r}")
    queries, keys = picture_lengths(mask, q_len, kv_len, {"tokens": tokens, "kv_tokens": kv_tokens, "q_offset": q_offset})
    selection = select([mask] if against is None else [mask, against], queries, keys, batch, head, q_offset)
    if shards is not None and (queries != shards.seq_len or isinstance(q_offset, Tensor) or q_offset):
        raise RenderError(f"shards= is a plan of {shards.seq_len:,} tokens; give q_len={shards.seq_len} and no q_offset")
    if against is not None:
        categories = difference(mask, against)
    elif shards is not None:
        categories = by_shard(mask, shards)
    else:
        categories = reasons(mask, head if split_heads else None) if why else visibility(mask)
    step = (-(-queries // max_pixels[0]), -(-keys // max_pixels[1]))
    slices = [selection.slice(category.cells) for category in categories if category.cells is not None]
    pairs, shares, estimated = _shares(slices, step)
    whole = slices[0] if against is None else selection.slice(mask)
    offset = whole.context.q_offset
    first = int(offset[min(batch, offset.numel() - 1)]) if isinstance(offset, Tensor) else offset
    return Picture(
        text=shortened(mask.spoken()) if against is None else f"A: {shortened(mask.spoken())}\nB: {shortened(against.spoken())}",
        q_len=queries,
        kv_len=keys,
        q_offset=first,
        batch=batch,
        batches=selection.batches,
        head=head,
        heads=selection.heads,
        step=step,
        categories=categories,
        pairs=pairs,
        shares=shares,
        estimated=estimated,
        hidden_by=_hidden_by(categories, selection) if step == (1, 1) and estimated is None else None,
        block_size=block,
        blocks=_blocks(whole, block, max_blocks) if block else None,
        bands=bands_of(whole.context, batch, head) if bands else (),
        q_tokens=None if tokens is None else query_labels(tokens, queries, keys, first),
        kv_tokens=key_labels(keys, tokens, kv_tokens),
    )


def _shares(
    slices: list[MaskSlice], step: tuple[int, int]
) -> tuple[tuple[tuple[int, int], ...], NDArray[np.float32], NDArray[np.bool_] | None]:
    """The numbers and shares of cells of each category (the last one is the rest), and the pixels with estimated shares."""
    cells = cells_in(slices[0].context.q_len, slices[0].context.kv_len, step)
    counts = [part.counts(step) for part in slices]
    estimated = np.logical_or.reduce([least != most for least, most in counts])
    pairs = [(int(least.sum()), int(most.sum())) for least, most in counts]
    total = int(cells.sum())
    pairs.append((total - sum(most for _, most in pairs), total - sum(least for least, _ in pairs)))
    shares = np.empty((len(slices) + 1, *cells.shape), dtype=np.float32)
    for share, part, (least, most) in zip(shares, slices, counts, strict=False):
        share[:] = least / cells
        if most is not least:
            unsure = least != most
            share[unsure] = part.samples(least, most, step)[unsure]
    known = sum(least for least, _ in counts)
    shares[-1] = np.where(estimated, 1 - shares[:-1].sum(0), (cells - known) / cells)  # 0 only where nothing is left
    return tuple((max(0, least), most) for least, most in pairs), shares.clip(0, 1), estimated if estimated.any() else None


def _hidden_by(categories: Iterable[Category], selection: Selection) -> NDArray[np.uint32] | None:
    """The categories whose terms mask out each cell; None without terms."""
    found = [
        selection.slice(category.hides).counts((1, 1))[0].astype(np.uint32) << np.uint32(number)
        for number, category in enumerate(categories)
        if category.hides is not None
    ]
    return np.bitwise_or.reduce(found) if found else None


def _block_size(given: int | tuple[int, int] | None) -> tuple[int, int] | None:
    if given is None:
        return None
    pair = (given, given) if isinstance(given, int) else tuple(given) if isinstance(given, tuple | list) else ()
    if len(pair) != 2 or not all(type(size) is int and 0 < size <= MAX_LENGTH for size in pair):
        raise OperandError(f"block_size must be a positive integer or a pair of them (queries, keys), got {given!r}")
    return pair


def _blocks(part: MaskSlice, block: tuple[int, int], max_blocks: tuple[int, int]) -> NDArray[np.int8] | None:
    """The states of the blocks, ``int8[q_blocks, kv_blocks]``, or None where they are too many to draw."""
    context = part.context
    if -(-context.q_len // block[0]) > max_blocks[0] or -(-context.kv_len // block[1]) > max_blocks[1]:
        return None
    least, most = part.counts(block)
    size = block[0] * block[1]  # more than the cells of a block at the edge, which is never full
    states = np.select([most == 0, least == size], [EMPTY, FULL], PARTIAL).astype(np.int8)
    unsure = ((least == 0) != (most == 0)) | ((least == size) != (most == size))
    if unsure.any():
        fraction = part.samples(least, most, block)
        states[unsure & ((fraction == 0) | (fraction == 1))] = UNKNOWN
    return states
