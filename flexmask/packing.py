"""Packs samples into rows of tokens, with the mask that keeps them apart: documents, or samples that share prefixes.

Plain functions on lists and tensors. What they return says where each sample's tokens are, so that what a model gives for the
rows is read sample by sample, and what is known of samples is put into rows.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor

from flexmask._checks import checked_int, checked_number, kind_of, not_plain_reason
from flexmask._sync import listed, resolve_device
from flexmask.catalogue.documents import document
from flexmask.catalogue.trees import prefix_tree
from flexmask.errors import OperandError
from flexmask.expr.mask import Mask

__all__ = ["Packed", "PackedPrefixes", "pack_documents", "pack_prefixes"]

#: The most tokens of a row.
MAX_CAPACITY = 2**30
#: The tokens of a sample.
Tokens: TypeAlias = "Sequence[int] | Tensor"
#: The samples of a tree in depth-first order: the number of each, its tokens, and how many it shares with the one before it.
_Tree: TypeAlias = list[tuple[int, list[int], int]]


@dataclass(frozen=True, eq=False)
class Packed:
    """Samples in rows of ``S`` tokens.

    Attributes:
        mask: which tokens of a row attend to each other.
        position_ids: the position of each token in its samples, ``int64[B, S]``; 0 for padding.
        previous: the place in its row of the token before each in its samples, ``int64[B, S]``; -1 for first tokens and padding.
            What a model gives there predicts the token.
        rows: the row of each sample.
        places: the places of each sample's tokens in its row, ``int64[n]`` each.
    """

    mask: Mask
    position_ids: Tensor
    previous: Tensor
    rows: list[int]
    places: list[Tensor]

    def to(self, device: torch.device | str) -> Self:
        """The same with all tensors, those of the mask too, on a device. Trainers call it for what a data loader gives."""
        moved: dict[str, Any] = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor | Mask)}
        return replace(self, **moved, places=[at.to(device) for at in self.places])

    def gather(self, values: Tensor) -> list[Tensor]:
        """What rows have, ``[B, S, ...]``, for the tokens of each sample, a list of ``[n, ...]``; differentiable.

        Raises:
            OperandError: values of other rows.
        """
        size = self.position_ids.shape
        is_plain = isinstance(values, Tensor) and not not_plain_reason(values)
        if not is_plain or values.shape[:2] != size:
            got = list(values.shape) if is_plain else kind_of(values)
            raise OperandError(f"gather: values must be a tensor of the shape [{size[0]}, {size[1]}, ...], got {got}")
        return [values[row, at.to(values.device)] for row, at in zip(self.rows, self.places, strict=True)]

    def scatter(self, values: Sequence[Any], fill: float = 0) -> Tensor:
        """What samples have, ``[n, ...]`` each, as rows ``[B, S, ...]``, summed where samples share a token; differentiable.

        Of ones it is the number of samples that each token belongs to. The sum of a loss per token, times weights that were
        scattered, is the sum of the samples' losses with their own weights.

        Args:
            values: for each sample a value for each of its tokens, lists or tensors.
            fill: the value of padding.

        Raises:
            OperandError: other numbers of samples or of values, or no numbers.
        """
        fill = checked_number(fill, "scatter: fill")
        try:
            given = [
                value if isinstance(value, Tensor) else torch.tensor(value, device=self.position_ids.device) for value in values
            ]
        except (TypeError, ValueError, RuntimeError):
            raise OperandError(f"scatter: values must be a list of lists or tensors of numbers, got {kind_of(values)}") from None
        if [value.shape[:1] for value in given] != [at.shape for at in self.places]:
            wanted = [len(at) for at in self.places]
            raise OperandError(
                f"scatter: values must be one for each token of each sample, as many as {wanted}; got the shapes "
                f"{[list(value.shape) for value in given]}"
            )
        joined, size = torch.cat(given), self.position_ids.shape
        at = torch.cat([row * size[1] + at for row, at in zip(self.rows, self.places, strict=True)]).to(joined.device)
        found = joined.new_zeros(size.numel(), *joined.shape[1:]).index_add(0, at, joined)
        is_padding = torch.ones(size.numel(), dtype=torch.bool, device=at.device).index_fill(0, at, value=False)
        return found.masked_fill(is_padding.view(-1, *[1] * (found.dim() - 1)), fill).view(*size, *joined.shape[1:])


@dataclass(frozen=True, eq=False)
class PackedPrefixes(Packed):
    """Samples in rows of trees, where each prefix that samples share is there once.

    Attributes:
        tokens: ``int64[B, S]``; 0 for padding.
    """

    tokens: Tensor


def pack_documents(lengths: Tokens, capacity: int, *, device: torch.device | str | None = None) -> Packed:
    """Documents in as few rows of ``capacity`` tokens as the best fit for each, the longest first, finds.

    The mask is ``document(lengths=..., padding=True)``; write ``packed.mask & flexmask.causal()`` for a decoder.
    ``packed.scatter(documents)`` are the rows of tokens.

    Args:
        lengths: the number of tokens of each document.
        capacity: tokens in a row.
        device: where the tensors are made; by default on the CPU.

    Raises:
        ExpressionError: a length or a capacity below 1.
        OperandError: no documents, other values than integers, or a document that is longer than a row.
    """
    if isinstance(lengths, Sequence) and any(isinstance(tokens, Sequence) or getattr(tokens, "ndim", 0) for tokens in lengths):
        raise OperandError(
            "pack_documents takes the lengths of documents, not their tokens: give [len(tokens) for tokens in documents], and "
            "the tokens to packed.scatter(documents)"
        )
    sizes = _numbers(lengths, "pack_documents: lengths", least=1)
    trees = [[(at, [0] * size, 0)] for at, size in enumerate(sizes)]
    device = None if device is None else resolve_device(device)
    rows = _best_fit(trees, checked_int(capacity, "pack_documents: capacity", 1, MAX_CAPACITY), "pack_documents: a document")
    most = max(len(row.places) for row in rows)
    table = [[*map(len, row.places.values())] + [0] * (most - len(row.places)) for row in rows]
    mask = document(lengths=torch.tensor(table, device=device), padding=True)
    return Packed(mask, **_laid_out(rows, capacity, len(sizes), device, ["position_ids", "previous"]))


def pack_prefixes(
    samples: Sequence[Tokens], capacity: int | None = None, *, device: torch.device | str | None = None
) -> PackedPrefixes:
    """Samples as trees of tokens in depth-first order, in which each prefix that samples share is there once.

    The mask is ``prefix_tree(end)``, which is causal. Given it and ``position_ids``, a causal model computes for each sample what
    it computes for the sample alone.

    Args:
        samples: the tokens of each sample, from the prompt to the end of the answer, ``[n]``. Samples share a prefix where their
            tokens are equal; what else a model is given for them must be equal there too.
        capacity: tokens in a row. A tree that is longer is cut between samples, and each part has the prefix that they share, so
            that a token with which all samples begin does not keep them in one row. By default there is one row for all.
        device: where the tensors are made; by default on the CPU.

    Raises:
        ExpressionError: a capacity below 1.
        OperandError: no samples, a sample without tokens, or one that is longer than a row.

    Source: https://arxiv.org/abs/2511.00413
    """
    device = None if device is None else resolve_device(device)
    samples = listed(samples, "pack_prefixes: samples")
    if not isinstance(samples, Sequence) or not samples:
        raise OperandError(f"pack_prefixes: samples must be a list of the tokens of each, at least one; got {kind_of(samples)}")
    tokens = [_numbers(sample, f"pack_prefixes: samples[{at}]") for at, sample in enumerate(samples)]
    most = MAX_CAPACITY if capacity is None else checked_int(capacity, "pack_prefixes: capacity", 1, MAX_CAPACITY)
    trees = _trees(tokens, most)
    if capacity is None:
        trees = [list(chain.from_iterable(trees))]
        capacity = _size(trees[0])
    rows = _best_fit(trees, capacity, "pack_prefixes: a sample")
    made = _laid_out(rows, capacity, len(samples), device, ["position_ids", "previous", "tokens", "end"])
    return PackedPrefixes(prefix_tree(made.pop("end")), **made)


def _size(tree: _Tree) -> int:
    """The tokens of a tree."""
    return sum(len(tokens) - shared for _, tokens, shared in tree)


class _Row:
    """Trees of tokens one after another, each in depth-first order.

    Attributes:
        tokens: the tokens, ``[n]``.
        position_ids: their depths.
        previous: the place of the token above each; -1 for the first of a tree.
        end: the first place behind the subtree of each.
        places: by the number of each sample the places of its tokens.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.position_ids: list[int] = []
        self.previous: list[int] = []
        self.end: list[int] = []
        self.places: dict[int, list[int]] = {}

    def add(self, tree: _Tree) -> None:
        """Adds a tree."""
        path: list[int] = []
        for number, tokens, shared in tree:
            start = len(self.tokens)
            self.tokens += tokens[shared:]
            path = path[:shared] + list(range(start, len(self.tokens)))
            self.position_ids += range(shared, len(tokens))
            self.previous += [-1, *path][shared:-1]
            self.end += [0] * (len(tokens) - shared)
            for at in path:
                self.end[at] = len(self.tokens)
            self.places[number] = path


def _trees(samples: list[list[int]], most: int) -> list[_Tree]:
    """The trees of samples, of at most so many tokens if no sample has more, in the order of the first sample of each."""
    trees: list[_Tree] = []
    last: list[int] = []
    size = 0
    for at in sorted(range(len(samples)), key=samples.__getitem__):  # neighbors share the longest prefixes
        tokens = samples[at]
        shared = next((i for i, (a, b) in enumerate(zip(last, tokens, strict=False)) if a != b), min(len(last), len(tokens)))
        if not shared or size + len(tokens) - shared > most:
            trees.append([])
            size = shared = 0
        trees[-1].append((at, tokens, shared))
        size += len(tokens) - shared
        last = tokens
    return sorted(trees, key=min)


def _best_fit(trees: list[_Tree], capacity: int, what: str) -> list[_Row]:
    """The trees in rows: each, the largest first, in the row with the least room that is enough for it."""
    rows: list[_Row] = []
    room: list[tuple[int, int]] = []  # of each row that has some, and its number, in order
    for tree in sorted(trees, key=_size, reverse=True):
        size = _size(tree)
        if size > capacity:
            raise OperandError(f"{what} has {size} tokens, more than a row of {capacity}: cut it, or give a greater capacity")
        place = bisect_left(room, (size, 0))
        if place < len(room):
            left, row = room.pop(place)
        else:
            left, row = capacity, len(rows)
            rows.append(_Row())
        rows[row].add(tree)
        insort(room, (left - size, row))
    return rows


def _laid_out(rows: list[_Row], size: int, samples: int, device: torch.device | str | None, names: list[str]) -> dict[str, Any]:
    """The fields of a :class:`Packed`, and lists of the rows as ``int64[B, size]``."""
    made: dict[str, Any] = {"rows": [0] * samples, "places": [torch.empty(0, device="cpu")] * samples}
    for number, row in enumerate(rows):
        for sample, at in row.places.items():
            made["rows"][sample], made["places"][sample] = number, torch.tensor(at, device=device)
    for name in names:
        fill = [-1 if name == "previous" else 0]
        made[name] = torch.tensor([getattr(row, name) + fill * (size - len(row.tokens)) for row in rows], device=device)
    return made


def _numbers(data: Any, what: str, least: int | None = None) -> list[int]:
    """Integers along one axis, at least one."""
    values = listed(data, what)
    if not isinstance(values, Sequence) or isinstance(values, str | bytes) or not values:
        raise OperandError(f"{what} must be integers along one axis, at least one; got {kind_of(data)}")
    return [checked_int(value, what, least) for value in values]
