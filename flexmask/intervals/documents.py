"""Packed documents from their lengths, offsets or positions: the document of each position, or where each document ends."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flexmask import _sync
from flexmask.errors import LoweringError
from flexmask.expr.index import Index, Symbol
from flexmask.expr.packing import COVERING
from flexmask.intervals.columns import picked
from flexmask.intervals.rows import padded
from flexmask.intervals.subtrees import subtree_ends


def document_table(rule: str, source: Tensor, positions: int, *, may_be_longer: bool = False) -> Tensor:
    """Document ids, starts or ends of subtrees, ``int64[..., positions]``, from the data that a user gives.

    Args:
        rule: ``"lengths"``, ``"cu_seqlens"`` or ``"position_ids"``, which give document ids; ``"starts"``, which gives the first
            position of each position's document from the ids; or ``"subtrees"``, which gives the first position behind the
            subtree of each token from its depth.
        source: integers ``[n]`` or ``[B, n]``.
        positions: the number of positions for ``"lengths"`` and ``"cu_seqlens"``; the others have one for each value.
        may_be_longer: whether lengths may cover more positions than there are.

    Raises:
        LoweringError: values that contradict themselves. Values in another device's memory are not read.
    """
    if rule in COVERING:
        return _ids(document_stops(rule, source, positions, may_be_longer=may_be_longer), positions)
    if rule == "subtrees":
        return subtree_ends(source)
    changes = torch.ones_like(source, dtype=torch.bool)
    if rule == "position_ids":
        changes[..., 1:] = source.diff() != 1
        return changes.long().cumsum(-1) - 1
    changes[..., 1:] = source.diff() != 0
    _check_runs(source, changes)
    at = torch.arange(source.shape[-1], device=source.device)
    return torch.where(changes, at, 0).cummax(-1).values


def document_stops(rule: str, source: Tensor, positions: int, *, may_be_longer: bool = False) -> Tensor:
    """The first position behind each document.

    Args:
        rule: ``"lengths"`` or ``"cu_seqlens"``.
        source: see :func:`document_table`.
        positions: see :func:`document_table`.
        may_be_longer: see :func:`document_table`.

    Returns:
        ``int64[..., n]`` for ``n`` documents, non-decreasing, at most ``positions``.

    Raises:
        LoweringError: see :func:`document_table`.
    """
    if rule == "lengths":
        ends = source.long().cumsum(-1)
        if not may_be_longer:
            _check_total(ends, positions, "lengths", source)
            _check_total(source, positions, "lengths")  # one that is too great may wrap around in the sum
    else:
        _sync.check(
            lambda: (source[..., 0] == 0).all() & (source[..., 1:] >= source[..., :-1]).all(),
            source,
            "document: cu_seqlens must start with 0 and not decrease",
            lambda: f", got {source.tolist()}",
        )
        if source.shape[-1] < 2:
            raise LoweringError("document: cu_seqlens must name at least one document, [0, length]; got one number alone")
        if not may_be_longer:
            _check_total(source, positions, "cu_seqlens")
        ends = source[..., 1:].long()
    return ends.clamp(0, positions).cummax(-1).values


def document_numbers(stops: Tensor, position: Tensor) -> Tensor:
    """The document of each position, ``int64[B, n]`` of ``[B, n]``, by :func:`document_stops`; their number for the padding."""
    stops = stops.view(-1, stops.shape[-1])
    if stops.shape[1] == 1:  # which Inductor of torch 2.11 does not search
        return (position >= stops).long()
    (batch,) = torch.broadcast_shapes(stops.shape[:1], position.shape[:1])
    return torch.searchsorted(stops.expand(batch, -1).contiguous(), position.expand(batch, -1).contiguous(), right=True)


def first_positions(stops: Tensor, number: Tensor) -> Tensor:
    """Where some documents begin, by their numbers ``int64[B, 1, n]``; the padding begins behind the last document."""
    return picked(F.pad(_of_sequences(stops), (1, 0)), number)


def document_spans(stops: Tensor, number: Tensor, padding: int | None) -> tuple[Tensor, Tensor]:
    """Where some documents begin, and the first positions behind them.

    Args:
        stops: of all documents: see :func:`document_stops`.
        number: of the documents, ``int64[B, 1, n]``.
        padding: the position behind the padding; None where the padding ends where it begins.
    """
    if padding is None:
        return first_positions(stops, number), picked(_of_sequences(stops), number.clamp(max=stops.shape[-1] - 1))
    return first_positions(stops, number), picked(_of_sequences(padded(stops, (0, 1), padding)), number)


def is_at_positions(indices: tuple[Index, ...]) -> bool:
    """Whether documents are looked up by position, ``ids[q]`` or ``ids[b, q]`` and the same of ``kv``, as ``stops`` serve."""
    names = [index.name if isinstance(index, Symbol) else "" for index in indices]
    return names[-1] in ("q", "kv") and names[:-1] in ([], ["b"])


def _of_sequences(stops: Tensor) -> Tensor:
    return stops.view(-1, 1, stops.shape[-1])


def check_covers(rule: str, source: Tensor, needed: int | Tensor) -> None:
    """Checks that documents cover as many positions as are needed, for each sequence where these are a tensor ``[B]``.

    Raises:
        LoweringError: some position belongs to no document. Values in another device's memory are not read.
    """
    those = "the queries, which end at q_offset + q_len" if isinstance(needed, Tensor) else "all tokens"
    _sync.require(
        lambda: _totals(rule, source) >= needed,
        source.device,
        f"document: {rule} must cover {those}; give padding=True where tokens behind the last document are padding",
    )
    if _sync.needs_sync(source) or (isinstance(needed, Tensor) and _sync.needs_sync(needed)):
        return
    totals = _totals(rule, source)
    missing = (torch.as_tensor(needed, device="cpu") - totals).flatten()
    if int(missing.max()) <= 0:
        return
    worst = int(missing.argmax())
    total, wanted = (int(torch.as_tensor(n, device="cpu").expand(missing.shape).flatten()[worst]) for n in (totals, needed))
    where = f" of sequence {worst}" if missing.numel() > 1 else ""
    raise LoweringError(
        f"document: {rule}{where} cover {total} of {wanted} tokens, so that {wanted - total} would attend to nothing; give "
        f"{rule} that cover all tokens, or padding=True where those behind the last document are padding"
    )


def _totals(rule: str, source: Tensor) -> Tensor:
    """How many positions documents cover, ``int64[...]``."""
    return source.long().sum(-1) if rule == "lengths" else source[..., -1].long()


def _ids(stops: Tensor, positions: int) -> Tensor:
    """The number of the document of each position; -1 for the padding."""
    edges = padded(F.pad(stops, (1, 0)), (0, 1), positions)
    ids = torch.arange(edges.shape[-1] - 1, device=edges.device)
    ids[-1] = -1
    ids, size = ids.expand(*edges.shape[:-1], -1), edges[..., 0].numel() * positions
    return ids.flatten().repeat_interleave(edges.diff().flatten(), output_size=size).view(*edges.shape[:-1], positions)


def _check_total(ends: Tensor, positions: int, name: str, lengths: Tensor | None = None) -> None:
    _sync.require(lambda: ends <= positions, ends.device, f"document: {name} cover more tokens than the {positions} positions")
    if not _sync.needs_sync(ends) and int(ends.max()) > positions:
        is_offsets = lengths is not None and bool((lengths[..., 0] == 0).all() & (lengths.diff() >= 0).all())
        hint = ". They begin with 0 and rise: did you mean cu_seqlens=?" if is_offsets else ""
        raise LoweringError(f"document: {name} cover {int(ends.max())} tokens, but there are {positions} positions{hint}")


def _check_runs(ids: Tensor, changes: Tensor) -> None:
    _sync.require(
        lambda: _has_distinct_runs(ids, changes),
        ids.device,
        "document ids: each document must be one run of equal ids; some id comes back after another",
        everywhere=True,
    )
    if _sync.needs_sync(ids):
        return
    for row, starts in zip(ids.reshape(-1, ids.shape[-1]), changes.reshape(-1, ids.shape[-1]), strict=True):
        first = row[starts]
        first = first[first >= 0]
        if first.unique().numel() != first.numel():
            raise LoweringError("document ids: each document must be one run of equal ids; some id comes back after another")


def _has_distinct_runs(ids: Tensor, starts: Tensor) -> Tensor:
    """Whether no two runs of equal ids from 0 up have the same id, ``bool`` without axes."""
    least = torch.iinfo(ids.dtype).min
    sorted_ids = torch.where(starts & (ids >= 0), ids, least).sort(-1).values  # one of each run
    return ~((sorted_ids[..., 1:] == sorted_ids[..., :-1]) & (sorted_ids[..., 1:] > least)).any()
