"""The part of a mask that is drawn: one sequence and one head, at given lengths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from flexmask._checks import checked_int
from flexmask.errors import OperandError, RenderError
from flexmask.expr.mask import Mask
from flexmask.intervals.bind import bind
from flexmask.intervals.bounds import analyze
from flexmask.intervals.context import Context
from flexmask.intervals.sizes import own_sizes
from flexmask.plotting.density import MaskSlice

if TYPE_CHECKING:
    from torch import Tensor

#: The most queries or keys. Their rows take about 3 GB; longer masks would run out of memory without an explanation.
MAX_TOKENS = 2**27


@dataclass(frozen=True)
class Selection:
    """One sequence and one head of masks at given lengths.

    Attributes:
        q_len: queries.
        kv_len: keys.
        q_offset: position of the first query.
        batch: index of the sequence.
        head: index of the head.
        batches: sequences of the masks; None if unknown.
        heads: heads of the masks, in the same way.
    """

    q_len: int
    kv_len: int
    q_offset: int | Tensor
    batch: int
    head: int
    batches: int | None
    heads: int | None

    def context(self, mask: Mask) -> Context:
        """The lowering context of a mask; sequences and heads that its data does not determine are those of the selection."""
        own = own_sizes(mask)
        batch, heads = (
            None if axis in own or axis not in mask.symbols else index + 1 if size is None else size
            for axis, index, size in (("b", self.batch, self.batches), ("h", self.head, self.heads))
        )
        return bind(mask, self.q_len, self.kv_len, batch=batch, heads=heads, q_offset=self.q_offset)

    def slice(self, mask: Mask) -> MaskSlice:
        """One sequence and head of a mask."""
        context = self.context(mask)
        return MaskSlice(context, analyze(context), self.batch if context.batch > 1 else 0, self.head if context.heads > 1 else 0)


def select(masks: list[Mask], q_len: int, kv_len: int, batch: int, head: int, q_offset: int | Tensor) -> Selection:
    """The selection, with the numbers of sequences and heads if a mask determines them."""
    for name, index in (("batch", batch), ("head", head)):
        checked_int(index, name, 0, kind=OperandError, wanted="one index, of which Mask.plot_panels draws several")
    for name, length in (("q_len", q_len), ("kv_len", kv_len)):
        if isinstance(length, int) and length > MAX_TOKENS:
            raise RenderError(f"{name} {length:,} is too long to draw; at most {MAX_TOKENS:,} can be drawn")
    found = [own_sizes(mask) for mask in masks]
    if isinstance(q_offset, torch.Tensor):
        found.append({"b": q_offset.numel()})
    depends = {symbol for mask in masks for symbol in mask.symbols}
    batches, heads = (
        max((sizes[axis] for sizes in found if axis in sizes), default=None if axis in depends else 1) for axis in ("b", "h")
    )
    for what, name, index, size in (("sequence", "batch", batch, batches), ("head", "head", head, heads)):
        if size is not None and index >= size:
            there = f"the {what}s are 0 to {size - 1}" if size > 1 else f"leave it 0, as the mask is the same for every {what}"
            raise RenderError(f"{name} {index} is out of range: {there}")
    return Selection(q_len, kv_len, q_offset, batch, head, batches, heads)
