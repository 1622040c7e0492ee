"""Masks of sequences that grow: data may reach beyond the tokens so far, and the first keys may be gone.

The rows of a call must be those of the whole sequence. A mask that nothing but the rest of the sequence could decide, or that
shows keys which are gone, is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from flexmask import _sync
from flexmask.backends.cache import shared
from flexmask.errors import LoweringError
from flexmask.expr.index import Index, Symbol, b, kv, maximum, q
from flexmask.expr.linear import Linear
from flexmask.expr.mask import And, Mask, Named, Or, PerHead, Truth
from flexmask.expr.node import Node
from flexmask.expr.opaque import Captured
from flexmask.expr.packing import COVERING, Derived
from flexmask.expr.tables import Lookup, Param, Ranged, Table, TensorTable
from flexmask.intervals.derive import check_covers, derive
from flexmask.intervals.solve import Span, separate
from flexmask.report.compare import Difference, difference

__all__ = ["Tokens", "check_window", "grown"]


@dataclass(frozen=True)
class Tokens:
    """The tokens of a sequence so far, with those of a call.

    Attributes:
        batch: sequences, which data with a batch axis must have.
        number: tokens of the call, its queries.
        length: the position of the first of these, an int, or ``int64[B]``.
        end: the position behind the last token of any sequence.
        first: the position of the first key that is there, an int, or ``int64[B]``; below 0 there is no key.
        device: where the keys are.
        complete: whether the keys are those of a context, all there; then only the queries grow.
    """

    batch: int
    number: int
    length: int | Tensor
    end: int
    first: int | Tensor
    device: torch.device
    complete: bool = False


def grown(mask: Mask, tokens: Tokens) -> Mask:
    """The mask of a whole sequence as one over the keys that are there.

    Data along queries and keys may have more values than there are tokens so far, and lengths may be those of the whole
    sequence.

    Raises:
        LoweringError: an unbound parameter, data that ends before the tokens do, a mask that depends on the length of the whole
            sequence, or lengths of padded sequences that make every token of the call padding.
    """
    if mask.params:
        given = ", ".join(f"{name}=..." for name in mask.params)
        raise LoweringError(f"the mask {mask.brief()} has unbound parameters: give them with mask.bind({given})")
    _check_symbols(mask, tokens)
    if not tokens.complete:
        _check_padding(mask, tokens)
    grows = _Growth(tokens)
    moved = cast(Mask, mask.expand().replace(grows.node))
    return moved & (grows.kv >= 0) if isinstance(tokens.first, Tensor) else moved


def check_window(mask: Mask, tokens: Tokens, window: int, heads: int) -> None:
    """Checks that no query of a call sees a key that a cache with a window has dropped.

    A mask that says itself how far back it sees, such as ``sliding_window``, costs nothing. Of any other the rows of the queries
    are compared with the dropped keys. On another device than the CPU that is done where the mask holds no tensors, for the
    longest sequence.

    Args:
        mask: the mask of the whole sequence.
        tokens: the tokens, and the first key that is left.
        window: keys that the cache holds for a query, with its own.
        heads: heads of the queries.

    Raises:
        LoweringError: some query sees such a key.
    """
    reach = _lookback(mask)
    if tokens.end - tokens.number < window or (reach is not None and reach < window) or not tokens.batch * tokens.number:
        return
    length, first = tokens.length, tokens.first
    if tokens.device.type != "cpu":
        if any(isinstance(node, TensorTable | Captured) for node in mask.expand().walk()):
            return
        length = tokens.end - tokens.number
        first = length - window + 1
    whole = grown(mask, replace(tokens, length=length, first=0, device=torch.device("cpu")))
    if isinstance(first, Tensor):
        whole = whole & (kv < TensorTable(first)[b])
    dropped = int(first.max()) if isinstance(first, Tensor) else first

    def seen() -> Difference:
        return difference(whole, Truth(False), tokens.number, dropped, tokens.batch, heads, length, "cpu")

    cell = shared(mask, ("window", window, tokens.end, tokens.number, tokens.batch, heads), length, seen).first_self
    if cell is not None:
        query = cell.q + (int(length[cell.b]) if isinstance(length, Tensor) else length)
        raise LoweringError(
            f"{mask.brief()} shows the query at position {query} the key at position {cell.kv}, which KVCache(window={window}) "
            f"has dropped: give window={query - cell.kv + 1} or more, KVCache(capacity) to keep all keys, or a mask that shows "
            f"no key so far back, e.g. mask & sliding_window(size={window})"
        )


def _lookback(mask: Mask) -> int | None:
    """How far before its own position a query sees a key at most, where the mask says it without data; else None."""
    if "lookback" not in mask.memo:
        mask.memo["lookback"] = _folded(mask, _lookback_of)
    return cast("int | None", mask.memo["lookback"])


def _lookback_of(leaf: Mask) -> int | None:
    """The same for a comparison, which masks that are bound anew in each call share."""
    if "lookback" not in leaf.memo:
        of_data = any(isinstance(node, Lookup) for node in leaf.walk())
        leaf.memo["lookback"] = None if of_data else _folded(separate(leaf), _lookback_of_span)
    return cast("int | None", leaf.memo["lookback"])


def _lookback_of_span(leaf: Mask) -> int | None:
    if not isinstance(leaf, Span) or leaf.start is None:
        return None
    distance = Linear.of(q - leaf.start)
    return None if distance.terms else max(0, distance.constant)


def _folded(mask: Mask, of_leaf: Callable[[Mask], int | None]) -> int | None:
    """How far back a mask sees, from how far its leaves do: the least of what all hold, the greatest of what one may."""
    found: dict[int, int | None] = {}
    for node in (node for node in mask.walk() if isinstance(node, Mask)):
        match node:
            case Truth(False):
                found[id(node)] = 0
            case Named(body=body):
                found[id(node)] = found[id(body)]
            case And(parts):
                found[id(node)] = min((reach for part in parts if (reach := found[id(part)]) is not None), default=None)
            case Or(parts) | PerHead(parts):
                reaches = [found[id(part)] for part in parts]
                found[id(node)] = None if None in reaches else max(cast("list[int]", reaches))
            case _:
                found[id(node)] = of_leaf(node)
    return found[id(mask)]


def _check_symbols(mask: Mask, tokens: Tokens) -> None:
    """Checks that a mask does not depend on a length that each call changes."""
    unknown = {"q_len"} if tokens.complete else {"q_len", "kv_len"}
    if not mask.symbols & unknown:
        return
    parts = [node for node in mask.walk() if isinstance(node, Mask) and node.symbols & unknown]
    part = next((node for node in parts if isinstance(node, Named)), parts[0])
    raise LoweringError(
        f"{part.brief()} depends on {' and '.join(sorted(part.symbols & unknown))}, which grows with each call of a KVCache, so "
        "that the mask would move. Write it by positions, which stay: for padding on the left key_padding(start=...) with the "
        "number of padding tokens, for causal(align='lower_right') causal()"
    )


def _check_padding(mask: Mask, tokens: Tokens) -> None:
    """Checks that some token of a call that is not the first lies within the lengths of a key_padding."""
    if not tokens.batch * tokens.number:
        return
    for part in mask.operands if isinstance(mask, And) else (mask,):
        lengths = dict(part.arguments).get("lengths") if isinstance(part, Named) and part.name == "key_padding" else None
        if lengths is None:
            continue
        real = lengths.to_tensor() if isinstance(lengths, Table) else torch.tensor(cast(int, lengths))
        length = torch.as_tensor(tokens.length)
        if _sync.needs_sync(real) or _sync.needs_sync(length) or bool(((real > length) | (length == 0)).any()):
            continue
        raise LoweringError(
            f"{part.brief()} makes every token of this call padding, as the call begins at position {length.tolist()}. After a "
            "prompt with padding on the right call cache.truncate(lengths) and go on without key_padding, or put the padding on "
            "the left and give key_padding(start=...). Where only the first keys are to be seen, write kv < lengths[b]"
        )


class _Growth:
    """How each part of an expression changes."""

    def __init__(self, tokens: Tokens) -> None:
        self.tokens, first = tokens, tokens.first
        self.shifts = isinstance(first, Tensor) or first != 0
        self.kv: Index = kv + (TensorTable(first)[b] if isinstance(first, Tensor) else first)
        self.inside = maximum(self.kv, 0) if isinstance(first, Tensor) else self.kv  # what is below 0 is hidden
        self.tables: dict[object, Table] = {}

    def node(self, node: Node) -> Node | None:
        match node:
            case Lookup(Table() as source, indices):
                return Lookup(self.table(node, source, indices), tuple(cast(Index, i.replace(self.index)) for i in indices))
            case Symbol("kv") if self.shifts:
                return self.kv
        return None

    def index(self, node: Node) -> Node | None:
        """As :meth:`node`, for what a table is looked up at."""
        return self.inside if self.shifts and isinstance(node, Symbol) and node.name == "kv" else self.node(node)

    def table(self, lookup: Lookup, source: Table, indices: tuple[Index, ...]) -> Table:
        """The table of a lookup, which may have values to spare where a position looks it up."""
        tokens, names = self.tokens, [index.name if isinstance(index, Symbol) else "" for index in indices]
        if tokens.complete and "q" not in names:
            return source  # the keys of a context are complete
        if {"q", "kv"} & set(names):
            self.check_covers(source)
        elif not isinstance(source, Derived):
            # A limit by the length is one by the whole sequence's, which nothing says.
            return Ranged(source.source, source.what, source.low, None) if isinstance(source, Ranged) else source
        sizes = dict(zip(names, source.shape, strict=True))
        if self.shifts and sizes.get("kv") is not None and cast(int, sizes["kv"]) < tokens.end:
            raise LoweringError(f"{lookup.brief()} has {sizes['kv']} values along kv, but the keys reach position {tokens.end}")
        if sizes.get("b", tokens.batch) != tokens.batch:
            return source  # which is refused, as always
        if source.key not in self.tables:
            self.tables[source.key] = TensorTable(self.values(source), spare=True)
        return self.tables[source.key]

    def check_covers(self, source: Table) -> None:
        match source:
            case Derived(rule, Table() as below, False) if rule in COVERING:
                check_covers(rule, below.to_tensor(), self.tokens.length + self.tokens.number)

    def values(self, source: Table | Param) -> Tensor:
        match source:
            case TensorTable(tensor):
                return tensor
            case Ranged(below):
                return self.values(below)
            case Derived(rule, below):
                values = self.values(below)
                return derive(rule, values, self.positions(rule, values))
        return cast(Table, source).to_tensor().to(self.tokens.device)

    def positions(self, rule: str, values: Tensor) -> int:
        """How many positions derived documents need: those of all tokens so far, and of all documents."""
        if values.device.type != "cpu" or rule not in COVERING:
            return self.tokens.end
        totals = values.sum(-1) if rule == "lengths" else values[..., -1]
        return max(self.tokens.end, int(totals.max()))
