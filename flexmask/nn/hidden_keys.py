"""Keys that no query of a call with a cache may attend to: those that the cache has dropped, and those after the tokens."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from flexmask import _sync
from flexmask.backends.cache import shared
from flexmask.errors import FlexmaskError, LoweringError
from flexmask.expr.deferral import deferrable
from flexmask.expr.index import b, kv
from flexmask.expr.mask import ALL_CELLS, Compare, Mask, Truth
from flexmask.expr.opaque import Opaque
from flexmask.expr.tables import Lookup, TensorTable
from flexmask.intervals.context import MAX_LENGTH
from flexmask.intervals.solve import is_separable, separate
from flexmask.nn.cache_masks import CallTokens, check_symbols, mask_over_cache, sizes_along
from flexmask.nn.lookback import lookback_of
from flexmask.report.compare import Cell, Difference, difference

#: A distance that stands for any: not greater, as ids that follow from lengths of documents take memory for each position. Where
#: cells are computed one by one, keys up to the second distance are compared.
FAR, FAR_CELLS = 2**20, 2**10


def first_shown(mask: Mask, tokens: CallTokens, keys: Mask, number: int, heads: int | None = None) -> Cell | None:
    """The first cell of a call whose key is one of some keys; None where the queries attend to none of them.

    The rows of the queries are compared with these keys, once for all layers within a :class:`flexmask.MaskCache`.

    Args:
        mask: the mask of the whole sequence.
        tokens: the queries.
        keys: which keys, a condition on their positions in the whole sequence.
        number: all of them are less than it.
        heads: query heads; taken from the mask where not given.

    Returns:
        The cell, with ``q`` and ``kv`` as positions in the whole sequence.

    Raises:
        LoweringError: as :func:`flexmask.nn.mask_over_cache`.
    """
    q_offset, device = tokens.q_offset, tokens.device if mask.tensors else torch.device("cpu")
    shown = mask_over_cache(mask, replace(tokens, kv_start=0, kv_end=max(number, tokens.kv_end), device=device)) & keys

    def compare() -> Difference:
        return difference(shown, Truth(False), tokens.q_len, number, tokens.batch, heads, q_offset, device)

    cell = shared(shown, ("shown", tokens.q_len, number, tokens.batch, heads), q_offset, compare).first_self
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
    later = kv >= (TensorTable(ends)[b] if isinstance(ends, Tensor) else ends)
    cell = first_shown(mask, replace(tokens, device=torch.device("cpu")), later, number, heads)
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
    if tokens.kv_end - tokens.q_len < window or lookback_of(mask).most < window or tokens.is_empty:
        return None
    start = tokens.kv_start
    if isinstance(start, Tensor):
        return first_shown(mask, tokens, kv < TensorTable(start)[b], int(start.max()), heads)
    return first_shown(mask, tokens, ALL_CELLS, start, heads)


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
    if tokens.kv_end == tokens.q_len and not tokens.is_empty:
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
