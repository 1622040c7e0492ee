"""Keys after the tokens of a call with a KVCache, to which data says that a query attends."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from flexmask import _sync
from flexmask.backends.cache import shared
from flexmask.errors import LoweringError
from flexmask.expr.index import Index, Symbol, b, kv
from flexmask.expr.mask import Compare, Mask, Not, Truth, Xor
from flexmask.expr.node import Node
from flexmask.expr.packing import COVERING, DocumentTable
from flexmask.expr.tables import Lookup, Table, TensorTable
from flexmask.intervals.context import MAX_LENGTH
from flexmask.intervals.extent import INT64, Extent, value_range
from flexmask.intervals.solve import Span, separate
from flexmask.nn.cache_masks import FAR, CallTokens, mask_over_cache
from flexmask.nn.lookback import lookback_of
from flexmask.report.compare import Difference, difference

__all__ = ["check_later_keys"]


def check_later_keys(mask: Mask, tokens: CallTokens, heads: int, capacity: int | None = None) -> None:
    """Checks that no query of a call attends to a key after the tokens of its sequence, as far as the data of the mask goes.

    For a mask whose expression hides later keys, such as ``causal() & any_mask``, and for data that ends with the tokens of the
    call, the check is free. Data on a device other than the CPU is not checked. Data that limits keys from below only, as
    ``kv >= start[b]``, shows the tokens so far.

    Args:
        mask: the mask of the whole sequence.
        tokens: the queries, and the keys in the cache.
        heads: query heads.
        capacity: tokens that fit in the cache; None for any number.

    Raises:
        LoweringError: some query attends to such a key.
    """
    if lookback_of(mask).ahead == 0 or tokens.is_context or not tokens.batch * tokens.q_len:
        return
    q_offset = tokens.q_offset
    if any(map(_sync.needs_sync, mask.tensors)) or (isinstance(q_offset, Tensor) and _sync.needs_sync(q_offset)):
        return
    known = min(_known_end(mask, tokens, heads), capacity or tokens.kv_end + FAR, MAX_LENGTH)
    ends = q_offset + tokens.q_len
    if known <= (int(ends.min()) if isinstance(ends, Tensor) else ends):
        return

    def compare() -> Difference:
        whole = mask_over_cache(mask, replace(tokens, kv_start=0, kv_end=known, device=torch.device("cpu")))
        later = kv >= (TensorTable(ends)[b] if isinstance(ends, Tensor) else ends)
        return difference(whole & later, Truth(False), tokens.q_len, known, tokens.batch, heads, q_offset, "cpu")

    cell = shared(mask, ("later", known, tokens.q_len, tokens.batch, heads), q_offset, compare).first_self
    if cell is not None:
        query = cell.q + (int(q_offset[cell.b]) if isinstance(q_offset, Tensor) else q_offset)
        raise LoweringError(
            f"{mask.brief()} lets the query at position {query} attend to the key at position {cell.kv}, which comes after the "
            "tokens of this call, so that its row would not be that of the whole sequence. Hide later keys, mask & causal(), or "
            "give all of these tokens in one call"
        )


def _known_end(mask: Mask, tokens: CallTokens, heads: int) -> int:
    """Up to where all data along queries and keys goes, or else the greatest bound of keys that depends on data."""
    ends = []
    for node in mask.expand().walk():
        if isinstance(node, Lookup) and isinstance(node.table, Table):
            names = [index.name if isinstance(index, Symbol) else "" for index in node.indices]
            sizes = [size for name, size in zip(names, node.table.shape, strict=True) if name in ("q", "kv")]
            ends += [_documents_end(node.table) if size is None else size for size in sizes]
    return min(filter(None, ends), default=0) or _greatest_bound(mask, tokens, heads)


def _greatest_bound(mask: Mask, tokens: CallTokens, heads: int) -> int:
    """The greatest bound ``n`` of ``kv < n``, or of ``kv >= n`` in a complement, that depends on data; 0 where none does.

    A comparison of data that is not solved for the key, such as ``kv % 4 < n[b]``, may show any key.
    """
    extents = {"b": (0, tokens.batch - 1), "h": (0, heads - 1), "q": (0, tokens.kv_end - 1)}

    def leaf(index: Index) -> Extent | None:
        match index:
            case Symbol(name):
                return extents[name]
            case Lookup(table) if isinstance(table, Table) and not isinstance(table, DocumentTable):
                values = table.to_tensor()
                return (int(values.min()), int(values.max())) if values.numel() else None
        return None

    found = separate(mask)
    nodes = list(found.walk())
    signs = {id(found): {True}}  # by part: True where its cells show keys, False where they hide them
    for node in reversed(nodes):
        own = signs[id(node)]
        below = {True, False} if isinstance(node, Xor) else {not sign for sign in own} if isinstance(node, Not) else own
        for part in node.below:
            signs[id(part)] = signs.get(id(part), set()) | below
    bounds = [span.stop if sign else span.start for span in nodes if isinstance(span, Span) for sign in signs[id(span)]]
    limited = [bound for bound in bounds if bound is not None and _has_data(bound)]
    has_no_bound = any(isinstance(node, Compare) and "kv" in node.symbols and _has_data(node) for node in nodes)
    return INT64[1] if has_no_bound else max((cast(Extent, value_range(bound, leaf, {}))[1] for bound in limited), default=0)


def _has_data(node: Node) -> bool:
    return any(isinstance(part, Lookup) for part in node.walk())


def _documents_end(table: Table) -> int:
    """One more than the last position of documents that are given by lengths; 0 where only the tokens say it."""
    match table:
        case DocumentTable(rule, Table() as below) if rule in COVERING:
            values = below.to_tensor()
            return int((values.sum(-1) if rule == "lengths" else values[..., -1]).max())
    return 0
