"""Finds named masks in the cells of dense tables.

Each kind of mask is proposed with the data that the cells give: the least mask of its kind that shows all visible cells. Those
that hide something are kept. The table is their conjunction if this shows nothing else, which is compared cell by cell.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from itertools import pairwise
from operator import and_
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from flexmask._transforms import has_values, is_captured
from flexmask.catalogue import (
    bidirectional_spans,
    block_causal,
    causal,
    chunk_window,
    chunked,
    document,
    empty,
    eviction,
    full,
    key_padding,
    per_head,
    prefix_lm,
    prefix_tree,
    query_padding,
    shift,
    sink_window,
    sliding_window,
)
from flexmask.expr.index import Constant, Symbol
from flexmask.expr.mask import Compare, Mask, Named, Not
from flexmask.expr.node import Node
from flexmask.expr.tables import Lookup, Table


def recognize_tables(mask: Mask) -> Mask:
    """A mask with named masks in place of its dense tables: see :meth:`flexmask.Mask.recognize`."""
    return cast(Mask, mask.replace(_named))


def _named(node: Node) -> Node | None:
    """A table, or the complement of one, as named masks; None to visit what is below."""
    table = node.operand if isinstance(node, Not) else node
    match table.body if isinstance(table, Named) and table.name == "from_dense" else table:
        case Compare(_, Lookup(Table() as data, (*_, Symbol("q"), Symbol("kv"))), Constant()):
            found = _of_table(cast(Mask, node), data)
            return node if found is None else found
        case Named():  # its definition is made of its arguments
            return node
    return None


def _of_table(mask: Mask, table: Table) -> Mask | None:
    if is_captured() or not has_values(table.to_tensor()):
        return None
    q_len, kv_len = cast("tuple[int, int]", table.shape[-2:])
    cells = mask.dense(q_len, kv_len)
    if not cells.numel():
        return None
    if (cells == cells[:, :1]).all():
        cells = cells[:, :1]
    found = [_Cells(cells[:, head]).mask() for head in range(cells.shape[1])]
    masks = [mask for mask in found if mask is not None]
    return None if len(masks) < len(found) else masks[0] if len(masks) == 1 else per_head(masks)


class _Cells:
    """The cells ``bool[B, Q, KV]`` of one head.

    Attributes:
        visible: the cells.
        extra: the hidden cells that the masks so far show.
        queries, keys: ``bool[B, Q]`` and ``bool[B, KV]``, those with a visible cell.
        first, last: ``int[B, Q]``, the first and the last visible key of each query.
        low, high: the least and the greatest distance ``kv - q`` of a visible cell.
    """

    def __init__(self, visible: Tensor) -> None:
        self.visible = visible[:1] if (visible == visible[:1]).all() else visible
        self.extra = ~self.visible
        self.batch, self.q_len, self.kv_len = self.visible.shape
        self.queries, self.keys = self.visible.any(2), self.visible.any(1)
        self.first, self.last = _ends(self.visible)

    def mask(self) -> Mask | None:
        """Named masks that together show these cells; None where none are found."""
        if not self.visible.any():
            return empty()
        places = torch.arange(self.q_len, device=self.visible.device)
        self.low = int((self.first - places)[self.queries].min())
        self.high = int((self.last - places)[self.queries].max())
        kept: list[tuple[Mask, Tensor]] = []
        for mask in self._proposals(places):
            if not self.extra.any():
                break
            hidden = ~mask.dense(self.q_len, self.kv_len, batch=self.batch, device=self.visible.device)[:, 0]
            if (hidden & self.extra).any() and not (hidden & self.visible).any():
                kept.append((mask, hidden))
                self.extra &= ~hidden
        if self.extra.any():
            return None
        masks, sides = _needed(kept), [self._window(None, self.high), self._window(self.low, None)]
        if all(side in masks for side in sides):
            masks = [self._window(self.low, self.high), *(mask for mask in masks if mask not in sides)]
        return reduce(and_, sorted(masks, key=lambda mask: "_padding" in str(mask)), full())

    def _proposals(self, q: Tensor) -> Iterator[Mask]:
        """Masks that may show all visible cells, the most usual first; ``extra`` changes in between."""
        visible, queries, keys, q_len, kv_len = self.visible, self.queries, self.keys, self.q_len, self.kv_len
        length = max(q_len, kv_len)
        for padding, keep in ((query_padding, queries), (key_padding, keys)):
            start, stop = _ends(keep)
            yield padding(start=_shared(start).tolist())
            yield padding(lengths=_shared(torch.where(keep.any(1), stop + 1, 0)).tolist())
            yield padding(keep=_shared(keep))
        yield self._window(None, self.high)

        first, last = torch.where(queries, self.first, q), torch.where(queries, self.last, q)
        left, right = torch.minimum(first, q), torch.maximum(last, q)
        used = F.pad(queries, (0, length - q_len)) | F.pad(keys, (0, length - kv_len))
        begin, end = _ends(used)
        size = int((right - left).max()) + 1
        if size * 2 <= int((end - begin).max()) + 1:
            yield chunked(size, start=_shared(begin).tolist())
        yield _documents(_starts(left, right, length) & (used | F.pad(used[:, :-1], (1, 0))), (end + 1).tolist())
        yield self._window(self.low, None)

        sinks = int(self.extra.any(0).any(0).to(torch.uint8).argmax())
        later = visible[..., sinks:]
        reach = torch.where(later.any(2), q - sinks - _ends(later)[0], 0)
        yield sink_window(sinks, left=max(int(reach.max()), 0))
        yield prefix_lm(_shared(torch.where(last > q, last + 1, 0).amax(1)).tolist())
        size = int((right - q).max()) + 1
        if size * 2 <= length:
            yield block_causal(size)
            yield chunk_window(size, left=max(int((q // size - first // size).max()), 0))
        if q_len <= kv_len:
            yield bidirectional_spans(_shared(_starts(q.expand_as(right), right, length).cumsum(1)))

        seen, gone = _ends(visible.mT)
        own = torch.where(queries, first, -1)
        other = torch.where(keys, own.gather(1, seen), -1)
        if q_len == kv_len:  # one sequence
            yield document(_shared(torch.where(queries, own, other)))
        yield document(_shared(own), _shared(other))

        gone = torch.where(keys, gone + 1, 0)
        behind = F.pad(gone, (0, max(q_len - kv_len, 0)))[:, :q_len]
        is_tree = self.high <= 0 and not (visible & (behind[:, :, None] > gone[:, None, :])).any()
        yield prefix_tree(_shared(gone)) if is_tree else eviction(_shared(gone))

    def _window(self, low: int | None, high: int | None) -> Mask:
        """The keys with ``low <= kv - q <= high``."""
        behind = self.kv_len - self.q_len
        if low is None:
            return causal() if high == 0 else causal("lower_right") if high == behind else causal(offset=cast(int, high))
        places = (place for place in (0, behind) if low <= place and (high is None or place <= high))
        place = next(places, low if high is None else high)
        window = sliding_window(left=place - low, right=None if high is None else high - place)
        return shift(window, kv=place) if place else window


def _needed(kept: Sequence[tuple[Mask, Tensor]]) -> list[Mask]:
    """The masks that hide a cell which no other hides, after the earlier of those that are not needed are left out."""
    count = sum((hidden.to(torch.uint8) for _, hidden in kept), torch.zeros((), dtype=torch.uint8, device="cpu"))
    needed = []
    for mask, hidden in kept:
        if (hidden & (count == 1)).any():
            needed.append(mask)
        else:
            count = count - hidden.to(torch.uint8)
    return needed


def _ends(visible: Tensor) -> tuple[Tensor, Tensor]:
    """The first and the last place of True along the last axis; where there is none, the first and the last."""
    cells = visible.to(torch.uint8)
    return cells.argmax(-1), visible.shape[-1] - 1 - cells.flip(-1).argmax(-1)


def _shared(data: Tensor) -> Tensor:
    """The data of each sequence, or that of one where all have the same."""
    return data[0] if (data == data[0]).all() else data


def _starts(left: Tensor, right: Tensor, length: int) -> Tensor:
    """``bool[B, length]``, where runs start so that the positions from ``left`` to ``right`` are in one, for all ``[B, Q]``."""
    steps = torch.zeros(len(left), length + 1, dtype=torch.int64, device=left.device)
    steps.scatter_add_(1, left + 1, torch.ones_like(left)).scatter_add_(1, right + 1, -torch.ones_like(right))
    return steps.cumsum(1)[:, :-1] == 0


def _documents(starts: Tensor, ends: Sequence[int]) -> Mask:
    """Documents that start at some positions, in sequences of ``ends`` tokens without the padding behind."""
    starts[:, 0] = True
    rows = []
    for row, end in zip(starts, ends, strict=True):
        rows.append([stop - start for start, stop in pairwise([*row[:end].nonzero()[:, 0].tolist(), end])])
    most = max(map(len, rows))
    lengths: Any = [row + [0] * (most - len(row)) for row in rows]
    return document(lengths=lengths if any(row != rows[0] for row in rows) else rows[0], padding=min(ends) < starts.shape[1])
