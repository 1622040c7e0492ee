"""The analysis: from a mask to the rows that it shows.

A mask whose leaves all separate (:mod:`flexmask.separation`) has exact rows. A leaf that does not is bounded: no key for
certain, all keys at most. The bounds go through the algebra, so every mask has rows that are visible for certain and rows
beyond which nothing is visible.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from flexmask.closures import index_closure, mask_closure
from flexmask.errors import LoweringError
from flexmask.frame import Frame
from flexmask.index import Index
from flexmask.masks import And, Compare, Mask, Not, Or, PerHead, Truth, Xor
from flexmask.preparation import frame_of
from flexmask.rows import Rows
from flexmask.runs import matching_runs, runs, threshold
from flexmask.separation import Matches, Reaches, Span, separate

__all__ = ["MAX_SLOTS", "RowBounds", "analyse", "rows"]

#: More intervals in a row than this are not listed but bounded, which keeps the memory of rows linear.
MAX_SLOTS = 64


@dataclass(frozen=True, eq=False)
class RowBounds:
    """The rows of a mask from below and above.

    Attributes:
        lower: keys that are visible for certain.
        upper: keys that may be visible; no other is.
    """

    lower: Rows
    upper: Rows

    @property
    def exact(self) -> bool:
        """Whether the bounds coincide, so that both are the mask itself."""
        return self.lower is self.upper

    @classmethod
    def of(cls, rows: Rows) -> RowBounds:
        """Exact rows, or their hull where they take too many intervals."""
        if rows.slots <= MAX_SLOTS:
            return cls(rows, rows)
        return cls(Rows.nothing(rows.kv_len, rows.lo.device), rows.hull())

    def __and__(self, other: RowBounds) -> RowBounds:
        if self.exact and other.exact:
            return RowBounds.of(self.lower & other.lower)
        return RowBounds(RowBounds.of(self.lower & other.lower).lower, RowBounds.of(self.upper & other.upper).upper)

    def __or__(self, other: RowBounds) -> RowBounds:
        if self.exact and other.exact:
            return RowBounds.of(self.lower | other.lower)
        return RowBounds(RowBounds.of(self.lower | other.lower).lower, RowBounds.of(self.upper | other.upper).upper)

    def __invert__(self) -> RowBounds:
        lower = ~self.upper
        return RowBounds(lower, lower if self.exact else ~self.lower)

    def __xor__(self, other: RowBounds) -> RowBounds:
        return (self & ~other) | (~self & other)


def rows(
    mask: Mask,
    q_len: int,
    kv_len: int | None = None,
    *,
    batch: int | None = None,
    heads: int | None = None,
    q_offset: int | Tensor = 0,
    device: torch.device | str | None = None,
) -> RowBounds:
    """The rows of a mask: see :meth:`flexmask.masks.Mask.rows`."""
    return analyse(mask, frame_of(mask, q_len, kv_len, batch=batch, heads=heads, q_offset=q_offset, device=device))


def analyse(mask: Mask, frame: Frame) -> RowBounds:
    """The rows of a mask in a frame that was made for it."""
    return _Analysis(frame).rows(separate(mask))


class _Analysis:
    """One analysis: each index expression is evaluated once along the queries and once along the keys."""

    def __init__(self, frame: Frame) -> None:
        self.frame = frame
        self.values: dict[Any, Tensor] = {}

    def rows(self, mask: Mask) -> RowBounds:
        match mask:
            case And(operands):
                return reduce(lambda a, b: a & b, map(self.rows, operands))
            case Or(operands):
                return reduce(lambda a, b: a | b, map(self.rows, operands))
            case Xor(operands):
                return reduce(lambda a, b: a ^ b, map(self.rows, operands))
            case Not(operand):
                return ~self.rows(operand)
            case PerHead(masks):
                return _stacked([self.rows(mask) for mask in masks])
        return self.leaf(mask)

    def leaf(self, mask: Mask) -> RowBounds:
        frame, kv_len = self.frame, self.frame.kv_len
        match mask:
            case Truth(value):
                make = Rows.everything if value else Rows.nothing
                return RowBounds.of(make(kv_len, frame.device))
            case Span(start, stop):
                first = self.along("q", start) if start is not None else torch.zeros(1, 1, 1, device=frame.device)
                last = self.along("q", stop) if stop is not None else torch.full((1, 1, 1), kv_len, device=frame.device)
                return RowBounds.of(Rows.spans(first, last, kv_len))
            case Matches(column, value):
                found = matching_runs(self.along("kv", column), self.along("q", value), kv_len, MAX_SLOTS)
                return RowBounds.of(found) if found is not None else self.unknown()
            case Reaches(column, value):
                found = threshold(self.along("kv", column), self.along("q", value), kv_len)
                return RowBounds.of(found) if found is not None else self.unknown()
            case Compare() if "kv" not in mask.symbols:
                return RowBounds.of(Rows.where(self.along("q", mask), kv_len))
            case Compare() if "q" not in mask.symbols:
                return RowBounds.of(runs(self.along("kv", mask), kv_len))
            case Compare():
                return self.unknown()
        raise LoweringError(f"no rows for {type(mask).__name__} {mask}")

    def unknown(self) -> RowBounds:
        kv_len, device = self.frame.kv_len, self.frame.device
        return RowBounds(Rows.nothing(kv_len, device), Rows.everything(kv_len, device))

    def along(self, axis: str, node: Index | Mask) -> Tensor:
        """The values of an expression at all queries or all keys, ``[B, H, n]`` with 1 where it does not depend."""
        key = (axis, node.key)
        if key not in self.values:
            frame = self.frame
            node = frame.settled(node)
            closure = mask_closure(node, frame) if isinstance(node, Mask) else index_closure(node, frame)
            position = frame.index(axis).view(1, 1, -1)
            found = closure(frame.index("b").view(-1, 1, 1), frame.index("h").view(1, -1, 1), position, position)
            values = torch.as_tensor(found, device=frame.device)
            values = values.view(1, 1, 1) if values.dim() == 0 else values
            self.values[key] = values if values.dtype == torch.bool else values.long()
        return self.values[key]


def _stacked(heads: list[RowBounds]) -> RowBounds:
    """Head ``h`` of the result is head ``h`` of the ``h``-th rows."""

    def stack(parts: list[Rows]) -> Rows:
        slots = max(part.slots for part in parts)
        shape = torch.broadcast_shapes(*((part.lo.shape[0], 1, part.lo.shape[2], 1) for part in parts))
        ends = []
        for side in ("lo", "hi"):
            padded = []
            for head, part in enumerate(parts):
                end = getattr(part, side)
                end = end[:, min(head, end.shape[1] - 1), None].expand(shape[0], 1, shape[2], -1)
                padded.append(torch.nn.functional.pad(end, (0, slots - part.slots), value=part.kv_len))
            ends.append(torch.cat(padded, 1))
        return Rows(ends[0], ends[1], parts[0].kv_len)

    lower = stack([bounds.lower for bounds in heads])
    return RowBounds(lower, lower if all(b.exact for b in heads) else stack([b.upper for b in heads]))
