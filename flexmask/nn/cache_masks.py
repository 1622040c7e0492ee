"""Masks under a cache of keys: from the mask of a whole sequence to that of one call, ``[q_len, keys in the cache]``.

The rows of a call are those of the whole sequence. Data may have more values than there are tokens so far. A mask that depends on
tokens still to come is an error. Of some masks the expression alone says how far from a query its keys are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from flexmask import _sync
from flexmask.errors import LoweringError
from flexmask.expr.index import Index, Symbol, b, kv, maximum
from flexmask.expr.mask import ALL_CELLS, And, Compare, Mask, Named, Or, PerHead, Truth, operands_of
from flexmask.expr.node import Node
from flexmask.expr.packing import DocumentTable
from flexmask.expr.tables import Literal, Lookup, Ranged, Table, TensorTable
from flexmask.intervals.bands import band, reach
from flexmask.intervals.bind import check_bound
from flexmask.intervals.context import MAX_LENGTH
from flexmask.intervals.documents import document_table
from flexmask.intervals.sizes import check_batch, data_owner
from flexmask.intervals.solve import Span, separate


class Lookback(NamedTuple):
    """How far from a query the keys are that it attends to.

    Attributes:
        whole: it attends to its own key and to all keys at most so far back; -1 where data decides it.
        most: it attends to no key further back.
        ahead: it attends to no key further ahead.
    """

    whole: int
    most: int
    ahead: int


#: Of a comparison that limits nothing.
UNKNOWN = Lookback(-1, MAX_LENGTH, MAX_LENGTH)


def lookback_of(mask: Mask) -> Lookback:
    """The lookback of a mask; `whole` is -1 where any part of it has data, which is to be checked."""
    return mask.form.kept("lookback", lambda: _lookback_of(separate(mask.form)))


def lookback(mask: Mask) -> int | None:
    """How many positions before a query the furthest key is to which a mask may let it attend, by its expression alone.

    ``sliding_window(size=w)`` has ``w - 1``, and at most that whatever it is joined to by ``&``.

    Args:
        mask: the mask of the whole sequence.

    Returns:
        The number; None where no limit is found: where values in tensors decide it, and in ``^`` and ``minimum``.
    """
    most = lookback_of(mask).most
    return None if most == MAX_LENGTH else most


def _lookback_of(form: Mask) -> Lookback:
    """The lookback of a form over separable leaves."""
    found: dict[int, Lookback] = {}
    for node in (node for node in form.walk() if isinstance(node, Mask)):
        match node:
            case Truth(value):
                found[id(node)] = Lookback(MAX_LENGTH, MAX_LENGTH, MAX_LENGTH) if value else Lookback(-1, 0, 0)
            case And(parts) | Or(parts) | PerHead(parts):
                whole, most, ahead = zip(*(found[id(part)] for part in parts), strict=True)
                of_whole, of_most = max if isinstance(node, Or) else min, min if isinstance(node, And) else max
                found[id(node)] = Lookback(of_whole(whole), of_most(most), of_most(ahead))
            case _:
                found[id(node)] = _of_span(node) if isinstance(node, Span) else UNKNOWN
    has_data = any(isinstance(node, Lookup) for node in form.walk())
    return found[id(form)]._replace(whole=-1) if has_data else found[id(form)]


def _of_span(span: Span) -> Lookback:
    ((low, high),) = band(span, own_keys=False)
    if isinstance(low, str) or isinstance(high, str):
        return UNKNOWN
    furthest, nearest = reach(low[0]) if low else (-MAX_LENGTH, -MAX_LENGTH)
    least, most = reach(high[0]) if high else (MAX_LENGTH + 1, MAX_LENGTH + 1)
    whole = -1 if least <= 0 else max(-1, -nearest)
    return Lookback(*(int(min(distance, MAX_LENGTH)) for distance in (whole, max(0, -furthest), max(0, most - 1))))


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

    @property
    def is_empty(self) -> bool:
        """Whether there are no queries."""
        return not self.batch * self.q_len


def mask_over_cache(mask: Mask, tokens: CallTokens) -> Mask:
    """The mask of a whole sequence as a mask over the keys in a cache, to lower with the same ``q_offset``.

    Data along queries and keys may have more values than there are tokens so far, and lengths may be those of the whole
    sequence. Keys that the cache has dropped are left out: :func:`lookback` says how far back there may be some.

    Args:
        mask: the mask; its queries and keys are positions in the whole sequence.
        tokens: the queries, and the keys in the cache.

    Raises:
        LoweringError: an unbound parameter, data of another number of sequences, data that ends before the tokens do, a mask that
            depends on the length of the whole sequence, or lengths of padded sequences that make every token of the call padding.
    """
    check_bound(mask)
    mask.check_held()
    check_symbols(mask, is_context=tokens.is_context)
    last = last_keys(mask, tokens)
    if last is not None and last == tokens.kv_end - tokens.kv_start:
        return ALL_CELLS
    growing = _growing(mask, tokens)
    if growing is mask.expand():
        growing = mask
    else:
        check_batch(mask, tokens.batch)
        _check_ends(mask, tokens)
        if not tokens.is_context:
            _check_padding(mask, tokens)
    return _moved(mask if _is_of_these_tokens(mask, tokens) else growing, tokens)


def _is_of_these_tokens(mask: Mask, tokens: CallTokens) -> bool:
    """Whether a call has all tokens so far, and a mask has data of these alone: it keeps its form."""
    is_first = not isinstance(tokens.q_offset, Tensor) and not isinstance(tokens.kv_start, Tensor) and not tokens.is_context
    if not is_first or (tokens.q_offset, tokens.kv_start, tokens.kv_end) != (0, 0, tokens.q_len):
        return False
    along = {lookup.key for lookup, _, size in sizes_along(mask) if size == tokens.kv_end}
    tables = [node for node in mask.expand().walk() if isinstance(node, Lookup)]
    return all(node.key in along and not isinstance(node.table, DocumentTable) for node in tables)


def last_keys(mask: Mask, tokens: CallTokens) -> int | None:
    """How many keys a call with one query attends to, if it is the last ones at any position; None where the mask decides it."""
    q_offset, kv_start = tokens.q_offset, tokens.kv_start
    if tokens.q_len != 1 or tokens.is_context or isinstance(q_offset, Tensor) or isinstance(kv_start, Tensor):
        return None
    found = lookback_of(mask)
    last = min(found.most, q_offset - kv_start)
    return last + 1 if found.whole >= last and tokens.kv_end == q_offset + 1 else None


def sizes_along(mask: Mask) -> list[tuple[Lookup, str, int]]:
    """The data of a mask along queries and keys: how it is looked up, the axis, and how many values it has there."""

    def found() -> list[tuple[Lookup, str, int]]:
        return [
            (node, name, size)
            for node in mask.expand().walk()
            if isinstance(node, Lookup) and isinstance(node.table, Table)
            for name, size in zip(_axes_of(node), node.table.shape, strict=True)
            if name in ("q", "kv") and size is not None
        ]

    return mask.kept("sizes", found)


def _axes_of(lookup: Lookup) -> list[str]:
    """The axis of the mask along which each axis of data is; empty for none."""
    return [index.name if isinstance(index, Symbol) else "" for index in lookup.indices]


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


def _check_ends(mask: Mask, tokens: CallTokens) -> None:
    """Checks that data along queries or keys does not end before the tokens so far."""
    for lookup, axis, size in sizes_along(mask):
        if size >= tokens.kv_end or (axis == "kv" and tokens.is_context):
            continue
        owner = data_owner(lookup, mask)
        hint = "give values for all tokens, those of the prompt and the new ones"
        if owner.startswith("key_padding"):
            hint = (
                "append a 1 to keep= for each new token (a False to hide=), or give key_padding(start=...), which stays the same"
            )
        elif axis == "q" and size == tokens.q_len and not _is_along_keys(lookup, mask):
            hint = (
                "with a cache, row 0 of a mask is the first token of the sequence. Move one whose row 0 is the first token "
                "of this call: flexmask.masks.shift(mask, q=cache.length)"
            )
        raise LoweringError(
            f"{owner} has {size} values along {axis}, but the tokens in the cache reach position {tokens.kv_end}: {hint}"
        )


def _is_along_keys(lookup: Lookup, mask: Mask) -> bool:
    """Whether a value of the data of a lookup belongs to each key, as ids of documents do."""
    return any(other.table.key == lookup.table.key and axis == "kv" for other, axis, _ in sizes_along(mask))


def _check_padding(mask: Mask, tokens: CallTokens) -> None:
    """Checks that the lengths of padded keys do not end before a call that is not the first, for all sequences."""

    def limits() -> list[tuple[Mask, Table]]:
        leaves = [(part, leaf) for part in operands_of(mask) for leaf in operands_of(part.expand())]
        return [
            (part, leaf.right.table)
            for part, leaf in leaves
            if isinstance(leaf, Compare) and leaf.sign == "<" and leaf.left.key == kv.key and isinstance(leaf.right, Lookup)
            if isinstance(leaf.right.table, Ranged) and leaf.right.table.role == "length"
        ]

    for part, table in mask.kept("lengths", limits):
        real, q_offset = table.to_tensor(), torch.as_tensor(tokens.q_offset, device="cpu")
        if tokens.is_empty or _sync.needs_sync(real) or _sync.needs_sync(q_offset):
            continue
        if not bool(((real > q_offset) | (q_offset == 0)).any()):
            raise LoweringError(
                f"{part.brief()} makes every token of this call padding, as the call begins at position {q_offset.tolist()}. "
                "After a prompt with padding on the right call cache.truncate(lengths) and go on without key_padding, or put the "
                "padding on the left and give key_padding(start=...). To attend to the first keys only, write "
                "kv < lengths[b]"
            )


# ---------------------------------------------------------------- expressions


def _growing(mask: Mask, tokens: CallTokens) -> Mask:
    """The mask with data that may be longer than the sequence so far along the axes that grow."""
    axes, place = {"q"} if tokens.is_context else {"q", "kv"}, f"growing {tokens.device} {tokens.is_context}"

    def longer(node: Node) -> Node | None:
        if not isinstance(node, Lookup) or not isinstance(node.table, Table):
            return None
        is_along = bool(axes & set(_axes_of(node)))
        if tokens.is_context and not is_along:
            return None
        # A limit by the length is one by that of the whole sequence, which is not known.
        table = _longer(node.table, tokens.device, is_along=is_along)
        return (
            None if table is node.table else Lookup(table, tuple([cast(Index, index.replace(longer)) for index in node.indices]))
        )

    return cast(Mask, mask.kept(place, lambda: mask.expand().replace(longer)))


def _longer(table: Any, device: torch.device, *, is_along: bool) -> Any:
    """A table that may cover more positions than there are, where ``is_along`` says that it has a value for each."""
    match table:
        case DocumentTable():
            return replace(table, source=_longer(table.source, device, is_along=False), may_be_longer=True)
        case Ranged(source, what, low, high, role):
            if is_along:
                return _longer(source, device, is_along=True)
            return table if high is None else Ranged(source, what, low, None, role)
        case TensorTable(tensor, _, name) if is_along:
            return TensorTable(tensor, True, name)
        case Literal() if is_along:
            return TensorTable(table.to_tensor().to(device), True)
    return table


def _moved(mask: Mask, tokens: CallTokens) -> Mask:
    """A mask over the keys from the first in the cache on."""
    start = tokens.kv_start
    if isinstance(start, int):
        return mask if start == 0 else mask.substitute(kv=kv + start)
    at = kv + TensorTable(start)[b]
    inside = maximum(at, 0)  # keys below 0 are masked out

    def moved(node: Node) -> Node | None:
        if isinstance(node, Lookup):
            return Lookup(_written(node.table, tokens), tuple([_at(index, inside) for index in node.indices]))
        return at if isinstance(node, Symbol) and node.name == "kv" else None

    return cast(Mask, mask.expand().replace(moved)) & (at >= 0)


def _at(index: Index, key: Index) -> Index:
    """An expression at another key."""
    return cast(Index, index.replace(lambda node: key if isinstance(node, Symbol) and node.name == "kv" else None))


def _written(table: Any, tokens: CallTokens) -> Any:
    """A table with the documents of all tokens: where the queries end is read from no tensor in a lowering on a GPU."""
    match table:
        case DocumentTable(rule, source):
            values = _written(source, tokens).to_tensor().to(tokens.device)
            return TensorTable(document_table(rule, values, tokens.kv_end, may_be_longer=True), True)
        case Ranged(source):
            return _written(source, tokens)
    return table
