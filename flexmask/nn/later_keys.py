"""Keys after the tokens of a call with a KVCache, to which data says that a query attends."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from flexmask import _sync
from flexmask.backends.cache import shared
from flexmask.errors import LoweringError
from flexmask.expr.index import Symbol, kv
from flexmask.expr.mask import Compare, Mask, Truth
from flexmask.expr.packing import COVERING, DocumentTable
from flexmask.expr.tables import Lookup, Param, Table
from flexmask.nn.cache_masks import CallTokens, mask_over_cache
from flexmask.nn.lookback import lookback_of
from flexmask.report.compare import Difference, difference

__all__ = ["check_later_keys"]


def check_later_keys(mask: Mask, tokens: CallTokens, heads: int) -> None:
    """Checks that no query of a call attends to a key after the tokens of the call, as far as the data of the mask goes.

    For a mask whose expression hides later keys, such as ``causal() & any_mask``, and for data that ends with the tokens of the
    call, the check is free. Data on a device other than the CPU is not checked.

    Args:
        mask: the mask of the whole sequence.
        tokens: the queries, and the keys in the cache.
        heads: query heads.

    Raises:
        LoweringError: some query attends to such a key.
    """
    if lookback_of(mask).ahead == 0 or tokens.is_context or not tokens.batch * tokens.q_len:
        return
    q_offset, end = tokens.q_offset, tokens.kv_end
    if any(map(_sync.needs_sync, mask.tensors)) or (isinstance(q_offset, Tensor) and _sync.needs_sync(q_offset)):
        return
    known = _known_end(mask)
    if known <= end:
        return

    def compare() -> Difference:
        whole = mask_over_cache(mask, replace(tokens, kv_start=0, kv_end=known, device=torch.device("cpu")))
        return difference(whole & (kv >= end), Truth(False), tokens.q_len, known, tokens.batch, heads, q_offset, "cpu")

    cell = shared(mask, ("later", end, tokens.q_len, tokens.batch, heads), q_offset, compare).first_self
    if cell is not None:
        query = cell.q + (int(q_offset[cell.b]) if isinstance(q_offset, Tensor) else q_offset)
        raise LoweringError(
            f"{mask.brief()} lets the query at position {query} attend to the key at position {cell.kv}, which comes after the "
            "tokens of this call, so that its row would not be that of the whole sequence. Hide later keys, mask & causal(), or "
            "give all of these tokens in one call"
        )


def _known_end(mask: Mask) -> int:
    """Up to where all data along queries and keys goes, or else the greatest number that a key is compared with."""
    ends, limits = [], [0]
    for node in mask.expand().walk():
        match node:
            case Lookup(table, indices) if isinstance(table, Table):
                names = [index.name if isinstance(index, Symbol) else "" for index in indices]
                sizes = [size for name, size in zip(names, table.shape, strict=True) if name in ("q", "kv")]
                ends += [_documents_end(table) if size is None else size for size in sizes]
            case Compare(left=Symbol("kv"), right=Lookup() as limit) | Compare(left=Lookup() as limit, right=Symbol("kv")):
                if not limit.symbols & {"q", "kv"} and not isinstance(limit.table, Param | DocumentTable):
                    limits.append(int(limit.table.to_tensor().max()))
    return min(filter(None, ends), default=max(limits))


def _documents_end(table: Table) -> int:
    """One more than the last position of documents that are given by lengths; 0 where only the tokens say it."""
    match table:
        case DocumentTable(rule, Table() as below) if rule in COVERING:
            values = below.to_tensor()
            return int((values.sum(-1) if rule == "lengths" else values[..., -1]).max())
    return 0
