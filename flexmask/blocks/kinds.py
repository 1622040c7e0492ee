"""Kinds of blocks: blocks of one kind have the same cells, so that one block of each kind is evaluated.

In ``(q - kv) % 64 == 0`` the cells of a block depend on the remainder at its first cell alone. Kinds are numbers ``int64[n]``
for ``n`` blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from flexmask.blocks.ranges import BlockRanges, axis_name
from flexmask.expr.index import Arithmetic, Constant, Index, Opaque, Symbol, kv
from flexmask.expr.linear import Linear, Quotient, Sum
from flexmask.expr.mask import And, Mask, Not, Or, Xor
from flexmask.expr.node import Node
from flexmask.intervals.extent import extent
from flexmask.intervals.solve import Span

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
