"""Surveys: open blocks decided by value ranges, and the others by evaluating as few cells as possible.

Value ranges come first (:mod:`flexmask.blocks.ranges`), then one block of each kind is evaluated. A block that is partial mostly
shows it in a few of its rows, so those are evaluated first.

Blocks of one kind have the same cells: in ``(q - kv) % 64 == 0`` the cells of a block depend on the remainder at its first cell
alone. Kinds are numbers ``int64[n]`` for ``n`` blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias

import torch
from torch import Tensor

from flexmask.blocks.layout import BlockLayout, Entries
from flexmask.blocks.ranges import AxisRanges, BlockRanges, axis_name
from flexmask.expr.index import Arithmetic, Constant, Index, Opaque, Symbol, kv
from flexmask.expr.linear import Linear, Quotient, Sum
from flexmask.expr.mask import And, Mask, Not, Or, Xor
from flexmask.expr.node import Node
from flexmask.intervals.extent import extent
from flexmask.intervals.rows import Rows
from flexmask.intervals.solve import Span

# ---------------------------------------------------------------- the kinds of blocks

#: What the cells of a block depend on: a value at its first cell, or the remainder of it by a divisor other than 0.
Feature: TypeAlias = tuple[Index, int]


def block_kinds(blocks: BlockRanges, mask: Mask) -> Tensor:
    """A number for each block, equal only where the cells are, as far as they lie inside the mask."""
    match mask:
        case And(operands) | Or(operands) | Xor(operands):
            kind = group_numbers([block_kinds(blocks, operand) for operand in operands])
        case Not(operand):
            kind = block_kinds(blocks, operand)
        case _:
            features = [_feature_values(blocks, *feature) for feature in _features(mask)]
            kind = group_numbers(features or [torch.zeros_like(blocks.positions["q"])])
    full, empty = blocks.decide(mask)
    return torch.where(full, 0, torch.where(empty, 1, kind + 2))


def group_numbers(numbers: list[Tensor]) -> Tensor:
    """A number for each place, from 0 up, equal only where each of several numbers is."""
    group = torch.zeros_like(numbers[0])
    for values in numbers:
        rank = values.unique(return_inverse=True)[1]
        group = (group * values.numel() + rank).unique(return_inverse=True)[1]
    return group


def _feature_values(blocks: BlockRanges, index: Index, divisor: int) -> Tensor:
    """The value of an expression at the first cell of each block, or its remainder where the divisor is not 0."""
    terms = list(Linear.of(index).terms.values())  # the constant is the same everywhere
    values = [_first_values(blocks, term) for term, _ in terms]
    if not divisor and not _fits_64_bits(blocks, terms):
        return group_numbers(values)
    total = torch.zeros_like(blocks.positions["q"])
    for (_, factor), term_values in zip(terms, values, strict=True):
        if divisor:
            total = (total + term_values % divisor * (factor % divisor)) % divisor
        else:  # it may wrap around, and different values never to the same one
            total += term_values * ((factor + 2**63) % 2**64 - 2**63)
    return total


def _fits_64_bits(blocks: BlockRanges, terms: list[tuple[Index, int]]) -> bool:
    """Whether all values of a sum differ by less than 2**64, so that different values differ in their low 64 bits."""
    low, high = extent(Sum(tuple(terms), 0), blocks.context)
    return high - low < 2**64


def _first_values(blocks: BlockRanges, term: Index) -> Tensor:
    axis = axis_name(term)
    values = blocks.axes.values[axis].tensor(term).long()
    return blocks.gather(values[..., :: blocks.axes.sizes[axis]] if values.shape[-1] > 1 else values, axis)


def _features(mask: Mask) -> list[Feature]:
    """What the cells of a block depend on in a condition."""
    features: list[Feature] = []
    visited: set[Any] = set()
    match mask:
        case Span(start, stop):
            values: Sequence[Node] = [kv - end for end in (start, stop) if end is not None]
        case _:
            values = mask.below
    for value in values:
        _collect(value, 0, features, visited)
    return features


def _collect(node: Node, divisor: int, features: list[Feature], visited: set[Any]) -> None:
    """Collects what the values of an expression in a block depend on, or their remainders where the divisor is not 0.

    From its first cell on, a sum of multiples of ``q`` and ``kv`` changes in the same way in every block. The value of an
    opaque call may be no integer, and the dividend of a quotient may need more than 64 bits, so their operands count instead.
    """
    if (node.key, divisor) in visited:
        return
    visited.add((node.key, divisor))
    if isinstance(node, Index) and not isinstance(node, Constant | Opaque):
        terms = [term for term, _ in Linear.of(node).terms.values()]
        if all(
            isinstance(term, Symbol) or not (isinstance(term, Opaque | Quotient) or term.symbols & {"q", "kv"}) for term in terms
        ):
            features.append((node, divisor))
            return
    match node:
        case Sum(parts):  # its remainder follows from the remainders of its terms
            for term, _ in parts:
                _collect(term, divisor, features, visited)
        case Arithmetic("%", left, Constant(value)) if 0 < abs(value) < 2**31:
            _collect(left, abs(value), features, visited)
        case Arithmetic("//", left, Constant(value)) if 0 < abs(value) * divisor < 2**31:
            _collect(left, abs(value) * divisor, features, visited)
        case Arithmetic("+" | "-" | "*", left, right):  # its remainder follows from the remainders of both sides
            _collect(left, divisor, features, visited)
            _collect(right, divisor, features, visited)
        case _:
            for child in node.below:
                _collect(child, 0, features, visited)


# ---------------------------------------------------------------- the cells of kinds

#: Blocks that are decided at a time, which bounds the memory.
CHUNK = 2**18
#: Counts of single rows that are held at a time, which bounds the memory, too.
COUNTS = 2**22
#: Every such row is evaluated next, where the first and the last row do not show that a block is partial.
STEP = 8

#: Is called with the share of the blocks that are done, from 0 to 1.
Progress = Callable[[float], None]

_PROGRESS: ContextVar[Progress | None] = ContextVar("flexmask.blocks.survey.progress", default=None)


@contextmanager
def watched(progress: Progress) -> Iterator[None]:
    """Reports to ``progress`` the share of blocks that each survey inside has done: many blocks of many kinds take long."""
    before = _PROGRESS.set(progress)
    try:
        yield
    finally:
        _PROGRESS.reset(before)


class Survey:
    """Decides and counts single blocks of a mask. Everything here forces host syncs."""

    def __init__(self, layout: BlockLayout) -> None:
        self._layout, self._axes = layout, AxisRanges(layout)

    def chunks(self, blocks: Rows, size: int = CHUNK) -> Iterator[Entries]:
        """The blocks of a set ``[B, H, q_blocks]`` in order, about ``size`` at a time."""
        progress = _PROGRESS.get()
        done, total = 0, int(blocks.counts().sum()) if progress else 0
        for entries in Entries.chunks(blocks, size):
            yield entries
            if progress:
                done += entries.row.numel()
                progress(done / total)

    def classes(self, entries: Entries) -> tuple[Tensor, Tensor]:
        """Which blocks are partial, and which are full: visible in each of ``q_size * kv_size`` cells; ``bool[n]`` each."""
        partial, full = torch.zeros((2, entries.row.numel()), dtype=torch.bool, device=entries.row.device)
        for start in range(0, entries.row.numel(), CHUNK):
            part = slice(start, start + CHUNK)
            blocks = entries.select(part)
            always, never = BlockRanges(self._axes, blocks).decide(self._axes.mask)
            undecided = (~(always | never)).nonzero().squeeze(-1)
            visible, hidden = ~never, ~(always & self._is_complete(blocks))
            kinds, examples = self._kinds(blocks.select(undecided))
            of_kind = self._evaluate(blocks.select(undecided).select(examples))
            visible[undecided], hidden[undecided] = of_kind[0][kinds], of_kind[1][kinds]
            partial[part], full[part] = visible & hidden, ~hidden
        return partial, full

    def row_counts(self, blocks: Rows) -> Iterator[tuple[Entries, Tensor]]:
        """The number of visible cells in each row of the blocks of a set: some blocks at a time, and ``int64[n, height]``."""
        height = self._layout.height
        for entries in self.chunks(blocks, max(1, COUNTS // height)):
            kinds, examples = self._kinds(entries)
            counts = torch.zeros((examples.numel(), height), dtype=torch.int64, device=examples.device)
            for part, rows, cells in self._layout.evaluate(entries.select(examples)):
                counts[part, rows] = cells.sum(-1)
            yield entries, counts[kinds]

    def _kinds(self, entries: Entries) -> tuple[Tensor, Tensor]:
        """For each block a number from 0 up, equal only where the cells are, and for each number one of its blocks."""
        if not entries.row.numel():
            return entries.row, entries.row
        kinds = group_numbers([block_kinds(BlockRanges(self._axes, entries), self._axes.mask), *self._sizes(entries)])
        examples = torch.zeros(int(kinds.max()) + 1, dtype=torch.int64, device=kinds.device)
        examples[kinds] = torch.arange(kinds.numel(), device=kinds.device)
        return kinds, examples

    def _sizes(self, entries: Entries) -> tuple[Tensor, Tensor]:
        """How many queries and how many keys of each block lie inside the mask."""
        layout, context = self._layout, self._layout.context
        queries = context.q_len - entries.row % layout.q_blocks * layout.q_size
        keys = context.kv_len - entries.column.long() * layout.kv_size
        return queries.clamp(max=layout.q_size), keys.clamp(max=layout.kv_size)

    def _is_complete(self, entries: Entries) -> Tensor:
        queries, keys = self._sizes(entries)
        return (queries == self._layout.q_size) & (keys == self._layout.kv_size)

    def _evaluate(self, entries: Entries) -> tuple[Tensor, Tensor]:
        """Of which blocks some cell is visible, and of which some is hidden or lies beyond the ends of the mask."""
        visible, hidden = torch.zeros_like(entries.row, dtype=torch.bool), ~self._is_complete(entries)
        for rows in self._passes(entries.row.device):
            undecided = (~(visible & hidden)).nonzero().squeeze(-1)
            some, lacks = torch.zeros((2, undecided.numel()), dtype=torch.bool, device=undecided.device)
            for blocks, _, cells in self._layout.evaluate(entries.select(undecided), rows):
                some[blocks] |= cells.flatten(1).any(1)
                lacks[blocks] |= ~cells.flatten(1).all(1)
            visible[undecided] |= some
            hidden[undecided] |= lacks
        return visible, hidden

    def _passes(self, device: torch.device) -> Iterator[Tensor]:
        """The rows of a block to evaluate at once: its ends, then some between these, then the others."""
        row = torch.arange(self._layout.height, device=device)
        turn = torch.where(row % STEP == 0, 1, 2)
        turn[0] = turn[-1] = 0
        yield from filter(torch.numel, ((turn == number).nonzero().squeeze(-1) for number in range(3)))
