"""Keys that no query of a call may attend to: those that a cache drops, those after the tokens, and padding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from flexmask import _sync
from flexmask._checks import count_text
from flexmask.backends.cache import shared
from flexmask.errors import LoweringError
from flexmask.expr.data import as_table
from flexmask.expr.deferral import deferrable
from flexmask.expr.index import b, kv, q
from flexmask.expr.mask import ALL_CELLS, And, Compare, Mask, Named, Or, PerHead
from flexmask.expr.tables import TensorTable
from flexmask.intervals.bind import bind
from flexmask.intervals.bounds import analyze
from flexmask.intervals.context import MAX_LENGTH
from flexmask.intervals.solve import is_separable, separate
from flexmask.nn.cache_masks import CallTokens, check_symbols, lookback, lookback_of, mask_over_cache, sizes_along
from flexmask.report.compare import Cell, first_visible

#: A distance that stands for any: not greater, as ids that follow from lengths of documents take memory for each position. Where
#: cells are computed one by one, keys up to the second distance are compared.
FAR, FAR_CELLS = 2**20, 2**10


def first_shown(mask: Mask, tokens: CallTokens, keys: Mask, number: int, heads: int) -> Cell | None:
    """The first cell of a call whose key is one of some keys; None where the queries attend to none of them.

    The rows of the queries are compared with these keys, once for all layers within a :class:`flexmask.MaskCache`.

    Args:
        mask: the mask of the whole sequence.
        tokens: the queries.
        keys: which keys, a condition on their positions in the whole sequence.
        number: all of them are less than it.
        heads: query heads.

    Returns:
        The cell, with ``q`` and ``kv`` as positions in the whole sequence.

    Raises:
        LoweringError: as :func:`flexmask.nn.mask_over_cache`.
    """
    q_offset, device = tokens.q_offset, torch.device("cpu")
    whole = mask_over_cache(mask, replace(tokens, kv_start=0, kv_end=max(number, tokens.kv_end), device=device))
    sizes = tokens.q_len, number, tokens.batch, heads

    def compare() -> Cell | None:
        of_both = [analyze(bind(part, *sizes, q_offset, device)) for part in (whole, keys)]
        upper = (of_both[0] & of_both[1]).upper
        return first_visible(bind(whole & keys, *sizes, q_offset, device)) if bool((upper.lo < upper.hi).any()) else None

    cell = shared(whole, ("shown", keys, *sizes), q_offset, compare)
    return cell and cell._replace(q=cell.q + (int(q_offset[cell.b]) if isinstance(q_offset, Tensor) else q_offset))


def described(mask: Mask) -> str:
    """The mask of a call, for a message."""
    return "a call without a mask" if mask is ALL_CELLS else mask.brief()


# ---------------------------------------------------------------- keys after the tokens


def check_later_keys(mask: Mask, tokens: CallTokens, heads: int, capacity: int | None) -> bool:
    """Checks that no query of a call attends to a key after the tokens of its sequence.

    For a mask whose expression hides later keys, such as ``causal() & any_mask``, the check is free. Others are compared up to
    the capacity of the cache, and to the end of their data along queries and keys, after which there are no tokens; at most with
    the next 2**20 keys, and with the next 1,024 where they are not separable in q and kv and are evaluated cell by cell. Data on
    a device other than the CPU is not checked.

    Args:
        mask: the mask of the whole sequence.
        tokens: the queries, and the keys in the cache.
        heads: query heads.
        capacity: tokens that fit in the cache; None for any number.

    Returns:
        Whether the expression hides later keys.

    Raises:
        LoweringError: some query attends to such a key.
    """
    if lookback_of(mask).ahead == 0 or tokens.is_context or tokens.is_empty:
        return lookback_of(mask).ahead == 0
    ends = tokens.q_offset + tokens.q_len
    if any(map(_sync.needs_sync, mask.tensors)) or (isinstance(ends, Tensor) and _sync.needs_sync(ends)):
        return False
    is_exact = all(is_separable(node) for node in separate(mask).walk() if isinstance(node, Compare) and "kv" in node.symbols)
    limits = [size for _, _, size in sizes_along(mask)] + [capacity or MAX_LENGTH]
    number = min(*limits, tokens.kv_end + (FAR if is_exact else FAR_CELLS))
    if number <= (int(ends.min()) if isinstance(ends, Tensor) else ends):
        return False
    # Of one query the condition is the same in each step, so that it is solved once.
    later = kv > q if tokens.q_len == 1 else kv >= (TensorTable(ends)[b] if isinstance(ends, Tensor) else ends)
    cell = first_shown(mask, tokens, later, number, heads)
    if cell is not None:
        raise LoweringError(_shows_later(mask, cell.q, cell.kv))
    return False


@deferrable
def mask_over_places(mask: Mask, end: Tensor | None) -> Mask:
    """The mask of a whole sequence as a mask over all places of a cache, in code that ``torch.compile`` traces.

    No value is read there: later keys are checked for one query of a mask, as far as its expression decides.

    Args:
        mask: the mask.
        end: the tokens in the cache, ``int64`` or ``int64[B]``; None for the keys of a context.

    Raises:
        LoweringError: the mask depends on the length of the whole sequence, or shows keys after the tokens of a call.
    """
    check_symbols(mask, is_context=end is None)
    if end is None:
        return mask
    if mask.substitute(b=0, h=0, q=FAR, kv=FAR + 1) == ALL_CELLS:
        raise LoweringError(_shows_later(mask, FAR, FAR + 1))
    table = TensorTable(end)
    return mask & (kv < (table[b] if end.dim() else table[()]))


def _shows_later(mask: Mask, query: int, key: int) -> str:
    """The message for a mask that shows a key after the tokens of a call."""
    remedy = "give the mask causal()" if mask is ALL_CELLS else "hide later keys, mask & causal()"
    return (
        f"{described(mask)} lets the query at position {query} attend to the key at position {key}, which comes after the tokens "
        f"of this call, so that its row would not be that of the whole sequence: {remedy}. Where the first n tokens attend to "
        "each other, give all of them in one call, and prefix_lm(n) in each call"
    )


# ---------------------------------------------------------------- keys before a window


def check_window(mask: Mask, window: int) -> None:
    """Checks that the keys a mask shows are among those that ``KVCache(window=...)`` holds, by its expression alone.

    Args:
        mask: the mask of the whole sequence.
        window: keys that the cache holds for a query, its own included.

    Raises:
        LoweringError: its expression does not limit how far back queries attend, or to more keys.
    """
    most = lookback(mask)
    if most is not None and most < window:
        return
    shown, wider = "has no limit on how far back queries attend (values in tensors are not read)", ""
    if most is not None:
        shown, wider = f"lets queries attend to keys {count_text(most, 'position')} back", f"window={most + 1}, "
    raise LoweringError(
        f"the expression of {described(mask)} {shown}, and KVCache(window={window}) holds the last {count_text(window, 'key')}: "
        f"give {wider}KVCache(capacity) for all keys, or limit the mask, mask & sliding_window(size={window})"
    )


# ---------------------------------------------------------------- padding


def padded_keys(mask: Mask, tokens: CallTokens, before: Tensor | None, heads: int) -> Tensor | None:
    """The padding in a cache after a call: the keys that ``key_padding`` or documents in the mask say to be padding.

    It is not known where reading it forces a host sync.

    Args:
        mask: the mask of the whole sequence, after the checks of :func:`mask_over_cache`.
        tokens: the queries of the call, and the keys in the cache.
        before: the padding that earlier calls have cached; None for none.
        heads: query heads.

    Raises:
        LoweringError: some query attends to a key that was padding when it was cached.
    """
    if before is None and not _says_padding(mask):
        return None
    if isinstance(tokens.q_offset, Tensor) and _sync.needs_sync(tokens.q_offset):
        return before
    if before is not None:
        own = _padding(mask, torch.arange(before.shape[1], device="cpu").expand_as(before))
        if bool((before if own is None else before & ~own).any()):
            _check_shows_no_padding(mask, tokens, before, heads)
    first = torch.as_tensor(tokens.q_offset, device="cpu").expand(tokens.batch)
    positions = first[:, None] + torch.arange(tokens.q_len, device="cpu")
    found = _padding(mask, positions)
    if found is None or not bool(found.any()):
        return before
    hidden = torch.zeros(tokens.batch, tokens.kv_end, dtype=torch.bool, device="cpu").scatter(1, positions, found)
    if before is not None:
        hidden[:, : before.shape[1]] |= before
    return trimmed(hidden)


def _says_padding(mask: Mask) -> bool:
    """Whether any part of a mask says what padding is."""
    return mask.kept("says padding", lambda: any(isinstance(node, Named) and node.name in RULES for node in mask.walk()))


def trimmed(padded: Tensor) -> Tensor:
    """The padding in a cache, ``bool[B, length]``, without the positions after the last one that has some."""
    last = padded.any(0).nonzero()
    return padded[:, : int(last[-1]) + 1 if len(last) else 0]


def _check_shows_no_padding(mask: Mask, tokens: CallTokens, padded: Tensor, heads: int) -> None:
    """Compares the rows of a call with the padding in the cache. A mask with tensors on a device is not checked."""
    if any(map(_sync.needs_sync, mask.tensors)):
        return
    first = TensorTable(tokens.kv_start.cpu())[b] if isinstance(tokens.kv_start, Tensor) else tokens.kv_start
    keys = (TensorTable(padded)[b, kv] != 0) & (kv >= first)
    cell = first_shown(mask, tokens, keys, padded.shape[1], heads)
    if cell is not None:
        raise LoweringError(
            f"{described(mask)} lets a query attend to the key at position {cell.kv} of sequence {cell.b}, which was padding "
            "when the cache got it. After a prompt with padding on the right call cache.truncate(lengths); with padding on the "
            "left give key_padding(start=...) in every call, or key_padding(keep=...) with a value for each token so far"
        )


# ---------------------------------------------------------------- what a mask says of padding

#: From the arguments of a named mask and positions ``int64[B, n]`` to ``bool[B, n]``, True for padding; None where it is unknown.
Rule = Callable[[dict[str, Any], Tensor], "Tensor | None"]


def _padding(mask: Mask, positions: Tensor) -> Tensor | None:
    """Which positions a mask says to be padding, ``bool[B, n]``; None where it says it of none, or in tensors on a device."""
    match mask:
        case Named(name=name, arguments=arguments) if name in RULES:
            return RULES[name](dict(arguments), positions)
        case Named(body=body):
            return _padding(body, positions)
        case And(operands):
            found = [part for part in (_padding(operand, positions) for operand in operands) if part is not None]
            return reduce(torch.logical_or, found) if found else None
        case Or(operands) | PerHead(operands):
            every = [_padding(operand, positions) for operand in operands]
            found = [part for part in every if part is not None]
            return reduce(torch.logical_and, found) if len(found) == len(every) else None
    return None


def _of_key_padding(arguments: dict[str, Any], positions: Tensor) -> Tensor | None:
    ((name, data),) = ((name, data) for name, data in arguments.items() if name != "side")
    if name in ("keep", "hide"):
        return _compared(data, positions, lambda value: (value == 0) if name == "keep" else (value != 0))
    limits = _values(data)
    if limits is None:
        return None
    return positions < limits.view(-1, 1) if name == "start" else positions >= limits.view(-1, 1)


def _of_documents(arguments: dict[str, Any], positions: Tensor) -> Tensor | None:
    ids = arguments.get("kv_ids", arguments.get("ids"))
    if ids is not None:
        return _compared(ids, positions, lambda value: value < 0)
    sources = [(name, arguments[name]) for name in ("lengths", "cu_seqlens") if name in arguments]
    if not arguments.get("padding") or not sources:
        return None
    ((name, data),) = sources
    ends = _values(data)
    return None if ends is None else positions >= (ends.sum(-1) if name == "lengths" else ends[..., -1]).view(-1, 1)


RULES: dict[str, Rule] = {
    "key_padding": _of_key_padding,
    "cross_length": lambda arguments, positions: _of_key_padding({"lengths": arguments["kv_lengths"]}, positions),
    "document": _of_documents,
    "per_document": _of_documents,
    "shared_prefix": _of_documents,
    "in_context": _of_documents,
}


def _compared(data: object, positions: Tensor, is_padding: Callable[[Tensor], Tensor]) -> Tensor | None:
    """A condition on data ``[S]`` or ``[B, S]`` at some positions; False after its end."""
    values = _values(data)
    if values is None:
        return None
    every = is_padding(values).expand(positions.shape[0], values.shape[-1])
    return every.gather(1, positions.clamp(max=values.shape[-1] - 1)) & (positions < values.shape[-1])


def _values(data: object) -> Tensor | None:
    """The values of an argument; None where reading them forces a host sync."""
    values = as_table(data, "padding").to_tensor()
    return None if _sync.needs_sync(values) else values
