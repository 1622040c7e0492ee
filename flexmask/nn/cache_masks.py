"""Masks under a cache of keys: from the mask of a whole sequence to that of one call, ``[q_len, keys in the cache]``.

The rows of a call are those of the whole sequence. Data may have more values than there are tokens so far. A mask that depends on
tokens still to come, or that shows keys which the cache has dropped, is an error.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from flexmask import _sync
from flexmask.backends.cache import shared
from flexmask.errors import FlexmaskError, LoweringError
from flexmask.expr.index import Index, Symbol, b, kv, maximum
from flexmask.expr.mask import ALL_CELLS, And, Compare, Mask, Named, Truth
from flexmask.expr.node import Node
from flexmask.expr.opaque import Opaque
from flexmask.expr.packing import COVERING, DocumentTable
from flexmask.expr.tables import Lookup, Param, Ranged, Table, TensorTable
from flexmask.intervals.bind import check_bound
from flexmask.intervals.context import MAX_LENGTH
from flexmask.intervals.documents import check_covers, document_table
from flexmask.intervals.sizes import check_batch, data_owner
from flexmask.nn.lookback import lookback_of
from flexmask.report.compare import Cell, Difference, difference

__all__ = ["CallTokens", "FAR", "check_symbols", "check_window", "described", "first_dropped", "mask_over_cache"]

#: A distance that stands for any: not greater, as ids that follow from lengths of documents take memory for each position.
FAR = 2**20


@dataclass(frozen=True)
class CallTokens:
    """The queries of a call, and the keys in the cache.

    Attributes:
        batch: sequences. Data with a batch axis must have as many.
        q_len: tokens of the call.
        q_offset: position of the first of these, an int, or ``int64[B]``.
        kv_end: one more than the position of the last token of any sequence.
        kv_start: position of the first key in the cache, an int, or ``int64[B]``. Keys at positions below 0 are masked out.
        device: device of the keys.
        is_context: whether the keys are those of a context, all in the cache. Then only the queries grow.
    """

    batch: int
    q_len: int
    q_offset: int | Tensor
    kv_end: int
    kv_start: int | Tensor
    device: torch.device
    is_context: bool = False


def mask_over_cache(mask: Mask, tokens: CallTokens) -> Mask:
    """The mask of a whole sequence as a mask over the keys in a cache, to lower with the same ``q_offset``.

    Data along queries and keys may have more values than there are tokens so far, and lengths may be those of the whole
    sequence. Keys that the cache has dropped are left out: see :func:`first_dropped`.

    Args:
        mask: the mask; its queries and keys are positions in the whole sequence.
        tokens: the queries, and the keys in the cache.

    Raises:
        LoweringError: an unbound parameter, data of another number of sequences, data that ends before the tokens do, a mask that
            depends on the length of the whole sequence, or lengths of padded sequences that make every token of the call padding.
    """
    check_bound(mask)
    mask.check_held()
    check_batch(mask, tokens.batch)
    check_symbols(mask, is_context=tokens.is_context)
    if _attends_to_all(mask, tokens):
        return Truth(True)
    if not tokens.is_context:
        _check_padding(mask, tokens)
    rewriter, expanded = _Rewriter(mask, tokens), mask.expand()
    place = "over_context" if tokens.is_context else "over_cache"
    if not rewriter.shifts and place in mask.memo:
        return cast(Mask, mask.memo[place])
    rewritten = cast(Mask, expanded.replace(rewriter.node))
    if rewritten is expanded:
        rewritten = mask
    elif rewriter.is_same_in_each_call:
        mask.memo[place] = rewritten
    return rewritten & (rewriter.kv >= 0) if isinstance(tokens.kv_start, Tensor) else rewritten


def _attends_to_all(mask: Mask, tokens: CallTokens) -> bool:
    """Whether a call has one query, which attends to all keys in the cache under a mask without data."""
    if tokens.q_len != 1 or tokens.is_context or isinstance(tokens.q_offset, Tensor) or isinstance(tokens.kv_start, Tensor):
        return False
    if tokens.kv_end != tokens.q_offset + 1:  # places after the query
        return False
    return lookback_of(mask).whole >= tokens.q_offset - tokens.kv_start


def check_window(mask: Mask, tokens: CallTokens, window: int, heads: int) -> None:
    """Checks that no query of a call attends to a key that ``KVCache(window=...)`` has dropped.

    On a device other than the CPU masks with tensors are not checked, and others for the longest sequence. A mask without data
    for which no window is enough is found in the first call.

    Args:
        mask: the mask of the whole sequence.
        tokens: the queries, and the keys in the cache.
        window: keys that the cache holds for a query, its own included.
        heads: query heads.

    Raises:
        LoweringError: some query attends to such a key, or will in later calls.
    """
    if tokens.kv_end == tokens.q_len and tokens.batch * tokens.q_len:
        _check_some_window(mask, tokens, window, heads)
    if tokens.device.type != "cpu":
        if mask.tensors:
            return
        q_offset = tokens.kv_end - tokens.q_len
        tokens = replace(tokens, q_offset=q_offset, kv_start=q_offset - window + 1)
    cell = first_dropped(mask, tokens, window, heads)
    if cell is not None:
        remedy = _wider_window(mask, tokens, heads, cell.kv, cell.q - cell.kv)
        raise LoweringError(
            f"{described(mask)} lets the query at position {cell.q} attend to the key at position {cell.kv}, which "
            f"KVCache(window={window}) has dropped: {remedy}KVCache(capacity) for all keys, or a mask without keys so far back, "
            f"e.g. mask & sliding_window(size={window})"
        )


def _check_some_window(mask: Mask, tokens: CallTokens, window: int, heads: int) -> None:
    """Checks that some window is enough for a mask; one with data or functions is not checked."""
    if lookback_of(mask).most < MAX_LENGTH or any(isinstance(node, Lookup | Opaque) for node in mask.expand().walk()):
        return
    far = _far_row(mask, tokens, window, heads)
    if far is not None and far.any():
        key = int(far.nonzero()[:, -1].min())
        raise LoweringError(
            f"{described(mask)} lets queries at any distance attend to the key at position {key}, so that no KVCache(window=...) "
            "is enough: give KVCache(capacity) for all keys, or a mask without keys so far back, e.g. "
            f"mask & sliding_window(size={window})"
        )


def _far_row(mask: Mask, tokens: CallTokens, keys: int, heads: int) -> Tensor | None:
    """The first cells of the row of a query far behind them, ``bool[B, H, 1, keys]``; None where the mask has no such row."""
    try:
        return mask.dense(1, keys, batch=tokens.batch, heads=heads, q_offset=keys + FAR, device="cpu")
    except FlexmaskError:  # such as data that ends before
        return None


def _wider_window(mask: Mask, tokens: CallTokens, heads: int, key: int, distance: int) -> str:
    """The window that a mask needs, for a message.

    Args:
        mask: the mask of the whole sequence.
        tokens: as of `check_window`.
        heads: as of `check_window`.
        key: the position of a key to which a query of the call attends.
        distance: from that key to the query.
    """
    most = lookback_of(mask).most
    if most < MAX_LENGTH:
        return f"give window={most + 1}, "
    far = _far_row(mask, tokens, key + 1, heads)
    if far is None or not far[..., key].any():
        return f"give window={distance + 1} or more, "
    return "no window is enough, since queries at any distance attend to that key. Give "


def described(mask: Mask) -> str:
    """The mask of a call, for a message."""
    return "a call without a mask" if mask is ALL_CELLS else mask.brief()


def first_dropped(mask: Mask, tokens: CallTokens, window: int, heads: int | None = None) -> Cell | None:
    """The first cell of a call whose key a cache with a window has dropped; None where the queries attend to no such key.

    For a mask whose expression limits the distance, such as ``sliding_window``, this is free. For any other mask the rows of the
    queries are compared with the dropped keys; this forces a host sync where the mask holds tensors in another device's memory.

    Args:
        mask: the mask of the whole sequence.
        tokens: the queries, and the keys in the cache.
        window: keys that the cache holds for a query, its own included.
        heads: query heads; taken from the mask where not given.

    Returns:
        The cell, with ``q`` and ``kv`` as positions in the whole sequence.

    Raises:
        LoweringError: as :func:`mask_over_cache`.
    """
    if tokens.kv_end - tokens.q_len < window or lookback_of(mask).most < window or not tokens.batch * tokens.q_len:
        return None
    q_offset, kv_start = tokens.q_offset, tokens.kv_start
    device = tokens.device if mask.tensors else torch.device("cpu")
    whole = mask_over_cache(mask, replace(tokens, kv_start=0, device=device))
    if isinstance(kv_start, Tensor):
        whole = whole & (kv < TensorTable(kv_start)[b])
    dropped = int(kv_start.max()) if isinstance(kv_start, Tensor) else kv_start

    def compare() -> Difference:
        return difference(whole, Truth(False), tokens.q_len, dropped, tokens.batch, heads, q_offset, device)

    cell = shared(mask, ("window", window, tokens.kv_end, tokens.q_len, tokens.batch, heads), q_offset, compare).first_self
    return cell and cell._replace(q=cell.q + (int(q_offset[cell.b]) if isinstance(q_offset, Tensor) else q_offset))


def check_symbols(mask: Mask, *, is_context: bool) -> None:
    """Checks that a mask does not depend on a length that changes with each call."""
    unknown = {"q_len"} if is_context else {"q_len", "kv_len"}
    if not mask.symbols & unknown:
        return
    parts = [node for node in mask.walk() if isinstance(node, Mask) and node.symbols & unknown]
    part = next((node for node in parts if isinstance(node, Named)), parts[0])
    lengths = sorted(part.symbols & unknown)
    grow = "grow" if len(lengths) > 1 else "grows"
    raise LoweringError(
        f"{part.brief()} depends on {' and '.join(lengths)}, which {grow} with each call of a cache, so that the mask would "
        "move. Write it by positions, which stay: for padding on the left key_padding(start=...) with the "
        "number of padding tokens, for causal(align='lower_right') causal()"
    )


def _check_padding(mask: Mask, tokens: CallTokens) -> None:
    """Checks that the lengths of padded keys do not end before a call that is not the first, for all sequences."""
    if not tokens.batch * tokens.q_len:
        return
    q_offset = tokens.q_offset
    if not isinstance(q_offset, Tensor):
        q_offset = torch.tensor(q_offset, device="cpu")
    for part in _operands(mask):
        for leaf in _operands(part.expand()):
            match leaf:
                case Compare("<", Symbol("kv"), Lookup(Ranged(role="length") as lengths)):
                    real = lengths.to_tensor()
                case _:
                    continue
            if _sync.needs_sync(real) or _sync.needs_sync(q_offset) or bool(((real > q_offset) | (q_offset == 0)).any()):
                continue
            raise LoweringError(
                f"{part.brief()} makes every token of this call padding, as the call begins at position {q_offset.tolist()}. "
                "After a prompt with padding on the right call cache.truncate(lengths) and go on without key_padding, or put the "
                "padding on the left and give key_padding(start=...). To attend to the first keys only, write "
                "kv < lengths[b]"
            )


def _operands(mask: Mask) -> tuple[Mask, ...]:
    """The operands of a conjunction; of any other mask, the mask."""
    return mask.operands if isinstance(mask, And) else (mask,)


class _Rewriter:
    """Rewrites the nodes of an expression over the whole sequence into those over the keys in the cache.

    Attributes:
        shifts: whether the first key in the cache is not that at position 0.
        is_same_in_each_call: whether what was rewritten so far depends on nothing but the expression.
    """

    def __init__(self, mask: Mask, tokens: CallTokens) -> None:
        self.mask, self.tokens, kv_start = mask, tokens, tokens.kv_start
        self.shifts = isinstance(kv_start, Tensor) or kv_start != 0
        self.is_same_in_each_call = not self.shifts
        self.is_whole = not self.shifts and tokens.q_len == tokens.kv_end
        self.kv: Index = kv + (TensorTable(kv_start)[b] if isinstance(kv_start, Tensor) else kv_start)
        self.kv_at_least_0 = maximum(self.kv, 0) if isinstance(kv_start, Tensor) else self.kv  # keys below 0 are masked out
        self.tables: dict[object, Table] = {}

    def node(self, node: Node) -> Node | None:
        match node:
            case Lookup(Table() as source, indices):
                table = self.table(node, source, indices)
                if table is source and not self.shifts:
                    return None
                return Lookup(table, tuple(cast(Index, i.replace(self.index)) for i in indices))
            case Symbol("kv") if self.shifts:
                return self.kv
        return None

    def index(self, node: Node) -> Node | None:
        """As :meth:`node`, within the indices of a table."""
        return self.kv_at_least_0 if self.shifts and isinstance(node, Symbol) and node.name == "kv" else self.node(node)

    def table(self, lookup: Lookup, source: Table, indices: tuple[Index, ...]) -> Table:
        """The table of a lookup, which may be longer than the sequence where it is indexed by position."""
        tokens, names = self.tokens, [index.name if isinstance(index, Symbol) else "" for index in indices]
        if tokens.is_context and "q" not in names:
            return source  # all keys of a context are in the cache
        if not {"q", "kv"} & set(names) and not isinstance(source, DocumentTable):
            # A limit by the length is one by that of the whole sequence, which is not known.
            return Ranged(source.source, source.what, source.low, None) if isinstance(source, Ranged) else source
        if not self.shifts and (documents := _growing_documents(source)) is not None:
            return documents
        self.is_same_in_each_call = False
        sizes = dict(zip(names, source.shape, strict=True))
        self.check_ends(lookup, sizes)
        if self.is_whole and not isinstance(source, DocumentTable) and {sizes.get("q"), sizes.get("kv")} <= {tokens.kv_end, None}:
            return source
        if sizes.get("b", tokens.batch) != tokens.batch:
            return source  # the lowering raises
        if source.key not in self.tables:
            self.tables[source.key] = TensorTable(self.values(source), may_be_longer=True)
        return self.tables[source.key]

    def check_ends(self, lookup: Lookup, sizes: dict[str, int | None]) -> None:
        """Checks that data along queries or keys does not end before the tokens so far."""
        for axis in ("q", "kv"):
            size, tokens = sizes.get(axis), self.tokens
            if size is None or size >= tokens.kv_end or (axis == "kv" and tokens.is_context):
                continue
            owner = data_owner(lookup, self.mask)
            hint = "give values for all tokens, those of the prompt and the new ones"
            if owner.startswith("key_padding"):
                hint = (
                    "append a 1 to keep= for each new token (a False to hide=), or give key_padding(start=...), which stays the "
                    "same"
                )
            elif axis == "q" and size == tokens.q_len and not self.is_along_keys(lookup):
                hint = (
                    "with a cache, row 0 of a mask is the first token of the sequence. Move one whose row 0 is the first token "
                    "of this call: flexmask.masks.shift(mask, q=cache.length)"
                )
            raise LoweringError(
                f"{owner} has {size} values along {axis}, but the tokens in the cache reach position {tokens.kv_end}: {hint}"
            )

    def is_along_keys(self, lookup: Lookup) -> bool:
        """Whether a value of the data of a lookup belongs to each key, as ids of documents do."""
        return any(
            isinstance(node, Lookup) and node.table.key == lookup.table.key and kv.key in [index.key for index in node.indices]
            for node in self.mask.expand().walk()
        )

    def values(self, source: Table | Param) -> Tensor:
        match source:
            case TensorTable(tensor):
                return tensor
            case Ranged(below):
                return self.values(below)
            case DocumentTable(rule, below, padding):
                values = self.values(below)
                if rule in COVERING and not padding:
                    check_covers(rule, values, self.tokens.q_offset + self.tokens.q_len)
                return document_table(rule, values, self.tokens.kv_end, may_be_longer=True)
        return cast(Table, source).to_tensor().to(self.tokens.device)


def _growing_documents(table: Table) -> Table | None:
    """Documents given by lengths, which may be those of the whole sequence; None for other tables."""
    match table:
        case DocumentTable(rule) if rule in COVERING:
            return replace(table, may_be_longer=True)
        case DocumentTable("starts", DocumentTable(rule) as ids) if rule in COVERING:
            return replace(table, source=replace(ids, may_be_longer=True))
    return None
