"""What every mask means, cell by cell: plain Python that shares no code with the library.

A predicate answers one cell, ``allowed(b, h, q, kv, q_len, kv_len)``; ``q`` counts from the start of the sequence, so row ``i``
of a mask lowered with ``q_offset=n`` is ``q = n + i``. Data is an int, a list, or a list with one entry per batch element.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import ceil, inf, prod
from typing import Any, TypeAlias, cast

import torch

Predicate: TypeAlias = Callable[[int, int, int, int, int, int], bool]
Table: TypeAlias = list[list[list[list[bool]]]]
PerBatch: TypeAlias = int | Sequence[int]
Ids: TypeAlias = Sequence[int] | Sequence[Sequence[int]]

EMPTY, PARTIAL, FULL = 0, 1, 2


def of_batch(data: PerBatch, b: int) -> int:
    """The entry of batch element `b`; a plain int holds for all of them."""
    return data if isinstance(data, int) else data[b]


def row_of(data: Ids, b: int) -> Sequence[int]:
    """The sequence of batch element `b`; a flat list holds for all of them."""
    first = data[0]
    return data if isinstance(first, int) else data[b]  # type: ignore[return-value]


# ---------------------------------------------------------------- named masks


def full() -> Predicate:
    return lambda b, h, q, kv, q_len, kv_len: True


def empty() -> Predicate:
    return lambda b, h, q, kv, q_len, kv_len: False


def causal(align: str = "upper_left", offset: int = 0) -> Predicate:
    def allowed(b: int, h: int, q: int, kv: int, q_len: int, kv_len: int) -> bool:
        diagonal = q + offset + (kv_len - q_len if align == "lower_right" else 0)
        return kv <= diagonal

    return allowed


def sliding_window(left: int | None = None, right: int | None = None, *, size: int | None = None) -> Predicate:
    if size is not None:
        left, right = size - 1, 0

    def allowed(b: int, h: int, q: int, kv: int, q_len: int, kv_len: int) -> bool:
        if left is not None and q - kv > left:
            return False
        return not (right is not None and kv - q > right)

    return allowed


def key_padding(lengths: PerBatch, side: str = "right") -> Predicate:
    def allowed(b: int, h: int, q: int, kv: int, q_len: int, kv_len: int) -> bool:
        real = of_batch(lengths, b)
        return kv < real if side == "right" else kv >= kv_len - real

    return allowed


def key_start(start: PerBatch) -> Predicate:
    return lambda b, h, q, kv, q_len, kv_len: kv >= of_batch(start, b)


def key_keep(keep: Ids) -> Predicate:
    return lambda b, h, q, kv, q_len, kv_len: bool(row_of(keep, b)[kv])


def key_hide(hide: Ids) -> Predicate:
    return lambda b, h, q, kv, q_len, kv_len: not row_of(hide, b)[kv]


def query_padding(lengths: PerBatch, side: str = "right") -> Predicate:
    def allowed(b: int, h: int, q: int, kv: int, q_len: int, kv_len: int) -> bool:
        real = of_batch(lengths, b)
        return q < real if side == "right" else q >= q_len - real

    return allowed


def query_start(start: PerBatch) -> Predicate:
    return lambda b, h, q, kv, q_len, kv_len: q >= of_batch(start, b)


def query_keep(keep: Ids) -> Predicate:
    return lambda b, h, q, kv, q_len, kv_len: bool(row_of(keep, b)[q])


def query_hide(hide: Ids) -> Predicate:
    return lambda b, h, q, kv, q_len, kv_len: not row_of(hide, b)[q]


def cross_length(kv_lengths: PerBatch, q_lengths: PerBatch | None = None) -> Predicate:
    def allowed(b: int, h: int, q: int, kv: int, q_len: int, kv_len: int) -> bool:
        real_query = q_lengths is None or q < of_batch(q_lengths, b)
        return real_query and kv < of_batch(kv_lengths, b)

    return allowed


def document(ids: Ids, kv_ids: Ids | None = None) -> Predicate:
    def allowed(b: int, h: int, q: int, kv: int, q_len: int, kv_len: int) -> bool:
        mine = row_of(ids, b)[q]
        theirs = row_of(ids if kv_ids is None else kv_ids, b)[kv]
        return mine >= 0 and mine == theirs

    return allowed


def ids_of_lengths(lengths: Sequence[int], total: int) -> list[int]:
    """Document ids of `total` positions; -1 past the last document."""
    ids = [number for number, length in enumerate(lengths) for _ in range(length)]
    return ids + [-1] * (total - len(ids))


def ids_of_cu_seqlens(cu_seqlens: Sequence[int], total: int) -> list[int]:
    """Document ids from the documents' boundaries; -1 past the last one."""
    ids = [-1] * total
    for number in range(len(cu_seqlens) - 1):
        for position in range(cu_seqlens[number], cu_seqlens[number + 1]):
            ids[position] = number
    return ids


def ids_of_position_ids(positions: Sequence[int]) -> list[int]:
    """Document ids: a new document where a position is not the one before plus 1."""
    ids = [0]
    for before, here in pairwise(positions):
        ids.append(ids[-1] + (here != before + 1))
    return ids


def prefix_lm(prefix_lengths: PerBatch) -> Predicate:
    def allowed(b: int, h: int, q: int, kv: int, q_len: int, kv_len: int) -> bool:
        return kv < of_batch(prefix_lengths, b) or kv <= q

    return allowed


def dense(table: Sequence[Any]) -> Predicate:
    """`table` is nested lists of bools: [Q][KV], [B][Q][KV] or [B][H][Q][KV]."""
    depth, inner = 0, cast(Any, table)
    while isinstance(inner, Sequence):
        depth, inner = depth + 1, inner[0]

    def allowed(b: int, h: int, q: int, kv: int, q_len: int, kv_len: int) -> bool:
        cell: Any = table
        for place in {2: (q, kv), 3: (b, q, kv), 4: (b, h, q, kv)}[depth]:
            cell = cell[place]
        return bool(cell)

    return allowed


# ---------------------------------------------------------------- named masks by family


def dilated_window(left: int | None, right: int | None, dilation: int) -> Predicate:
    return both(sliding_window(left, right), lambda b, h, q, kv, q_len, kv_len: abs(q - kv) % dilation == 0)


def sink_window(sinks: int, left: int | None) -> Predicate:
    return both(causal(), either(sliding_window(left, 0), lambda b, h, q, kv, q_len, kv_len: kv < sinks))


def global_window(is_global: Ids, left: int | None, right: int | None) -> Predicate:
    return either(either(query_keep(is_global), key_keep(is_global)), sliding_window(left, right))


def bidirectional_spans(ids: Ids) -> Predicate:
    return either(causal(), document(ids))


def shared_prefix(ids: Ids, prefix_of: Ids) -> Predicate:
    def allowed(b: int, h: int, q: int, kv: int, q_len: int, kv_len: int) -> bool:
        mine, theirs = row_of(ids, b)[q], row_of(ids, b)[kv]
        if mine < 0 or theirs < 0:
            return False
        return kv <= q if mine == theirs else theirs == row_of(prefix_of, b)[mine]

    return allowed


def in_context(ids: Ids, test_start: PerBatch) -> Predicate:
    def allowed(b: int, h: int, q: int, kv: int, q_len: int, kv_len: int) -> bool:
        mine, theirs = row_of(ids, b)[q], row_of(ids, b)[kv]
        return kv <= q and min(mine, theirs) >= 0 and (mine == theirs or q >= of_batch(test_start, b))

    return allowed


def multi_item(prefix_length: PerBatch, positions: Ids) -> Predicate:
    def allowed(b: int, h: int, q: int, kv: int, q_len: int, kv_len: int) -> bool:
        prefix = of_batch(prefix_length, b)
        if q < prefix or kv < prefix or kv > q:
            return kv <= q
        return q - kv < row_of(positions, b)[q - prefix]

    return allowed


def chunked(size: int, start: PerBatch = 0) -> Predicate:
    return lambda b, h, q, kv, q_len, kv_len: (q - of_batch(start, b)) // size == (kv - of_batch(start, b)) // size


def per_chunk(inner: Predicate, size: int) -> Predicate:
    return both(chunked(size), lambda b, h, q, kv, q_len, kv_len: inner(b, h, q % size, kv % size, q_len, kv_len))


def block_causal(size: int) -> Predicate:
    return lambda b, h, q, kv, q_len, kv_len: q // size >= kv // size


def chunk_window(size: int, left: int) -> Predicate:
    return lambda b, h, q, kv, q_len, kv_len: 0 <= q // size - kv // size <= left


def block_diffusion(length: int, size: int) -> Predicate:
    def allowed(b: int, h: int, q: int, kv: int, q_len: int, kv_len: int) -> bool:
        own, other = q % length // size, kv % length // size
        if kv < length:
            return q < length and own == other
        return kv < 2 * length and (own > other if q < length else own >= other)

    return allowed


def packed_block_diffusion(lengths: Ids, length: int, size: int) -> Predicate:
    """The mask of each document alone, where it has tokens in both halves."""

    def allowed(b: int, h: int, q: int, kv: int, q_len: int, kv_len: int) -> bool:
        start = 0
        for n in row_of(lengths, b):
            (own, is_clean), (other, is_later) = ((i % length - start, i >= length) for i in (q, kv))
            if 0 <= own < n and 0 <= other < n and kv < 2 * length:
                return block_diffusion(n, size)(b, h, own + n * is_clean, other + n * is_later, 2 * n, 2 * n)
            start += n
        return False

    return allowed


def cross_document(inner: Predicate, q_lengths: Ids, kv_lengths: Ids, align: str = "upper_left") -> Predicate:
    def place(lengths: Sequence[int], position: int) -> tuple[int, int]:
        number = 0
        while number < len(lengths) and position >= lengths[number]:
            position, number = position - lengths[number], number + 1
        return number, position

    def allowed(b: int, h: int, q: int, kv: int, q_len: int, kv_len: int) -> bool:
        rows, columns = row_of(q_lengths, b), row_of(kv_lengths, b)
        (mine, row), (theirs, column) = place(rows, q), place(columns, kv)
        if mine != theirs or mine == len(rows):
            return False
        return inner(b, h, row + (columns[mine] - rows[mine] if align == "lower_right" else 0), column, q_len, kv_len)

    return allowed


def coordinates(position: int, canvas: Sequence[int], tile: Sequence[int] | None = None) -> list[int]:
    """Where a position lies on a canvas, the last axis fastest; with a tile, positions run through the tiles in turn."""
    if tile is not None:
        whole, within = divmod(position, prod(tile))
        outer = coordinates(whole, [size // step for size, step in zip(canvas, tile, strict=True)])
        return [o * step + i for o, step, i in zip(outer, tile, coordinates(within, tile), strict=True)]
    found: list[int] = []
    for size in reversed(canvas):
        position, at = divmod(position, size)
        found.insert(0, at)
    return found


def seen_from(at: int, size: int, window: int) -> range:
    """The coordinates that a window around one of them covers, moved inwards at the edges."""
    first = at - window // 2
    return range(size)[max(0, min(first, size - window)) :][:window]


def neighborhood(canvas: Sequence[int], kernel: Sequence[int], tile: Sequence[int] | None = None) -> Predicate:
    def allowed(b: int, h: int, q: int, kv: int, q_len: int, kv_len: int) -> bool:
        axes = zip(coordinates(q, canvas, tile), coordinates(kv, canvas, tile), canvas, kernel, strict=True)
        return kv < prod(canvas) and all(y in seen_from(x, size, window) for x, y, size, window in axes)

    return allowed


def sliding_tile(canvas: Sequence[int], kernel: Sequence[int], tile: Sequence[int], text: int = 0) -> Predicate:
    grid, reach = ([n // step for n, step in zip(sizes, tile, strict=True)] for sizes in (canvas, kernel))
    near = neighborhood(grid, reach)

    def allowed(b: int, h: int, q: int, kv: int, q_len: int, kv_len: int) -> bool:
        if kv >= prod(canvas) + text:
            return False
        return max(q, kv) >= prod(canvas) or near(b, h, q // prod(tile), kv // prod(tile), q_len, kv_len)

    return allowed


def svg_spatial(frame_length: int, width: float, prompt: int = 0, sinks: int = 0, round_to: int = 1) -> Predicate:
    reach = width * frame_length // round_to * round_to

    def allowed(b: int, h: int, q: int, kv: int, q_len: int, kv_len: int) -> bool:
        return abs(q - kv) < reach or q < prompt or kv < prompt + sinks * frame_length

    return allowed


def svg_temporal(frame_length: int, frames: int, width: int, prompt: int = 0) -> Predicate:
    def allowed(b: int, h: int, q: int, kv: int, q_len: int, kv_len: int) -> bool:
        if q < prompt or kv < prompt:
            return True
        distance = abs((q - prompt) % frame_length - (kv - prompt) % frame_length)
        return distance < width * frame_length // frames and kv < prompt + frames * frame_length

    return allowed


def image_cross(spans: Sequence[Any], image_length: int) -> Predicate:
    def allowed(b: int, h: int, q: int, kv: int, q_len: int, kv_len: int) -> bool:
        rows = spans if isinstance(spans[0][0], int) else spans[b]
        start, stop = rows[kv // image_length]
        return bool(start <= q < stop)

    return allowed


def tile_topk(topk: Sequence[Any], size: int, sizes: Ids | None = None) -> Predicate:
    def allowed(b: int, h: int, q: int, kv: int, q_len: int, kv_len: int) -> bool:
        rows: Any = topk
        for place in (b, h):
            if not isinstance(rows[0][0], int):
                rows = rows[place]
        return kv // size in rows[q // size] and (sizes is None or kv % size < row_of(sizes, b)[kv // size])

    return allowed


def tree(parents: Ids, prefix: PerBatch = 0) -> Predicate:
    def allowed(b: int, h: int, q: int, kv: int, q_len: int, kv_len: int) -> bool:
        wanted, node = kv - of_batch(prefix, b), q
        if wanted < 0:
            return True
        while node > wanted:
            node = row_of(parents, b)[node]
        return node == wanted

    return allowed


def prefix_tree(depths: Ids) -> Predicate:
    def allowed(b: int, h: int, q: int, kv: int, q_len: int, kv_len: int) -> bool:
        depth = row_of(depths, b)
        node = q if q < len(depth) else -1
        while node > kv:
            node = max((i for i in range(node) if depth[i] == depth[node] - 1), default=-1)
        return node == kv

    return allowed


def tree_of_ancestors(ancestors: Sequence[Any], prefix: PerBatch) -> Predicate:
    def allowed(b: int, h: int, q: int, kv: int, q_len: int, kv_len: int) -> bool:
        table = ancestors if isinstance(ancestors[0][0], bool) else ancestors[b]
        node = kv - of_batch(prefix, b)
        return node < 0 or (node < len(table) and bool(table[q][node]))

    return allowed


def draft_blocks(prefix: PerBatch, size: int) -> Predicate:
    def allowed(b: int, h: int, q: int, kv: int, q_len: int, kv_len: int) -> bool:
        own = kv - of_batch(prefix, b)
        return own < 0 or (own // size == q // size and own % size <= q % size)

    return allowed


def draft_anchors(anchors: Ids, size: int, context: int) -> Predicate:
    def allowed(b: int, h: int, q: int, kv: int, q_len: int, kv_len: int) -> bool:
        anchor = row_of(anchors, b)[q // size]
        if kv < context:
            return kv < anchor
        return anchor >= 0 and (kv - context) // size == q // size

    return allowed


def training_time_test(length: int, steps: int) -> Predicate:
    def allowed(b: int, h: int, q: int, kv: int, q_len: int, kv_len: int) -> bool:
        if kv < length:
            return kv <= q
        return kv in [q + step * length for step in range(1, steps + 1)]

    return allowed


def shifted_window(canvas: Sequence[int], window: Sequence[int], shift: Sequence[int]) -> Predicate:
    """On the canvas after a cyclic shift: the same window, and both or neither of the pixels from across an edge."""

    def place(pixel: int) -> list[tuple[int, bool]]:
        found = []
        for n, w, s in reversed(list(zip(canvas, window, shift, strict=True))):
            pixel, at = divmod(pixel, n)
            found.append(((at - s) % n // w if at >= s else -1, at < s))
        return found

    return lambda b, h, q, kv, q_len, kv_len: kv < prod(canvas) and q < prod(canvas) and place(q) == place(kv)


def eviction(steps: Sequence[Any]) -> Predicate:
    def allowed(b: int, h: int, q: int, kv: int, q_len: int, kv_len: int) -> bool:
        row: Any = steps
        for place in (b, h):
            if not isinstance(row[0], int):
                row = row[place]
        return bool(q < row[kv])

    return allowed


def qk_sparse(starts: Ids, lengths: Ids) -> Predicate:
    def allowed(b: int, h: int, q: int, kv: int, q_len: int, kv_len: int) -> bool:
        ranges = zip(row_of(starts, b), row_of(lengths, b), strict=True)
        return not any(start <= kv < start + length and q < start + length for start, length in ranges)

    return allowed


def random_cells(p: float, seed: int = 0) -> Predicate:
    prime = 2**31 - 1
    numbers = (1517746329, 1865811235, 1183186591, 2034287659, 1640531527)

    def allowed(b: int, h: int, q: int, kv: int, q_len: int, kv_len: int) -> bool:
        row = pow(seed * numbers[0] + numbers[1], 2, prime) + q * numbers[2]
        cell = pow(row, 2, prime) + kv * numbers[3]
        return pow(pow(cell, 2, prime) + numbers[4], 2, prime) < p * prime

    return allowed


# ---------------------------------------------------------------- masks made of masks


def coarse(inner: Predicate, size: int) -> Predicate:
    def allowed(b: int, h: int, q: int, kv: int, q_len: int, kv_len: int) -> bool:
        return inner(b, h, q // size, kv // size, ceil(q_len / size), ceil(kv_len / size))

    return allowed


def reorder(inner: Predicate, q: Ids | None = None, kv: Ids | None = None) -> Predicate:
    queries, keys = q, kv

    def allowed(b: int, h: int, q: int, kv: int, q_len: int, kv_len: int) -> bool:
        row = q if queries is None else row_of(queries, b)[q]
        return inner(b, h, row, kv if keys is None else row_of(keys, b)[kv], q_len, kv_len)

    return allowed


def paged(inner: Predicate, pages: Ids, page_size: int) -> Predicate:
    def allowed(b: int, h: int, q: int, kv: int, q_len: int, kv_len: int) -> bool:
        page, within = divmod(kv, page_size)
        held = row_of(pages, b)[page]
        return held >= 0 and inner(b, h, q, held * page_size + within, q_len, kv_len)

    return allowed


def per_document(inner: Predicate, ids: Ids) -> Predicate:
    def allowed(b: int, h: int, q: int, kv: int, q_len: int, kv_len: int) -> bool:
        row = row_of(ids, b)
        if row[q] < 0 or row[q] != row[kv]:
            return False
        start = list(row).index(row[q])
        return inner(b, h, q - start, kv - start, q_len, kv_len)

    return allowed


def per_head(inner: Sequence[Predicate]) -> Predicate:
    return lambda b, h, q, kv, q_len, kv_len: inner[h](b, h, q, kv, q_len, kv_len)


def shift(inner: Predicate, q: int = 0, kv: int = 0) -> Predicate:
    down, right = q, kv
    return lambda b, h, q, kv, q_len, kv_len: inner(b, h, q - down, kv - right, q_len, kv_len)


def transpose(inner: Predicate) -> Predicate:
    return lambda b, h, q, kv, q_len, kv_len: inner(b, h, kv, q, kv_len, q_len)


def where(cond: Predicate, yes: Predicate, no: Predicate) -> Predicate:
    def allowed(b: int, h: int, q: int, kv: int, q_len: int, kv_len: int) -> bool:
        chosen = yes if cond(b, h, q, kv, q_len, kv_len) else no
        return chosen(b, h, q, kv, q_len, kv_len)

    return allowed


def both(left: Predicate, right: Predicate) -> Predicate:
    return lambda *cell: left(*cell) and right(*cell)


def either(left: Predicate, right: Predicate) -> Predicate:
    return lambda *cell: left(*cell) or right(*cell)


def exactly_one(left: Predicate, right: Predicate) -> Predicate:
    return lambda *cell: left(*cell) != right(*cell)


def without(left: Predicate, right: Predicate) -> Predicate:
    return lambda *cell: left(*cell) and not right(*cell)


def negated(inner: Predicate) -> Predicate:
    return lambda *cell: not inner(*cell)


# ---------------------------------------------------------------- lowerings


def table_of(allowed: Predicate, q_len: int, kv_len: int, *, batch: int = 1, heads: int = 1, q_offset: PerBatch = 0) -> Table:
    """All cells, as nested lists [batch][heads][q_len][kv_len]."""
    starts = [of_batch(q_offset, b) for b in range(batch)]
    return [
        [
            [[allowed(b, h, q, kv, q_len, kv_len) for kv in range(kv_len)] for q in range(start, start + q_len)]
            for h in range(heads)
        ]
        for b, start in enumerate(starts)
    ]


def classify_blocks(cells: torch.Tensor, q_block: int, kv_block: int) -> torch.Tensor:
    """EMPTY, PARTIAL or FULL for each block of bool[..., q_len, kv_len]; a ragged last block is never full."""
    q_len, kv_len = cells.shape[-2:]
    whole = torch.nn.functional.pad(cells.int(), (0, -kv_len % kv_block, 0, -q_len % q_block))
    seen = whole.unflatten(-1, (-1, kv_block)).unflatten(-3, (-1, q_block)).sum((-3, -1))
    kinds: torch.Tensor = EMPTY + (seen > 0) * PARTIAL + (seen == q_block * kv_block) * (FULL - PARTIAL)
    return kinds


def intervals_of(row: Sequence[bool]) -> list[tuple[int, int]]:
    """The maximal runs of True in one row, as half-open intervals."""
    found: list[tuple[int, int]] = []
    for kv, visible in enumerate(row):
        if visible and found and found[-1][1] == kv:
            found[-1] = (found[-1][0], kv + 1)
        elif visible:
            found.append((kv, kv + 1))
    return found


def softmax(scores: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """The softmax of each row over the allowed scores; 0 in a fully masked row.

    Args:
        scores: [B, H, q_len, kv_len]; -inf is not allowed either.
        allowed: bool, broadcast to the scores.
    """
    allowed = allowed & (scores > -inf)
    fully_masked = ~allowed.any(-1, keepdim=True)
    return scores.masked_fill(~allowed, -inf).masked_fill(fully_masked, 0.0).softmax(-1).masked_fill(fully_masked, 0.0)


def attention_scores(
    query: torch.Tensor,
    key: torch.Tensor,
    scale: float | None = None,
    score_mod: Callable[..., torch.Tensor] | None = None,
) -> torch.Tensor:
    """Scores [B, H, q_len, kv_len] in float64, changed by a `score_mod` as FlexAttention calls it, on whole axes at once."""
    query, key = query.double(), key.double().repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if score_mod is None:
        return scores
    axes = [torch.arange(n).view([-1 if i == axis else 1 for i in range(4)]) for axis, n in enumerate(scores.shape)]
    return score_mod(scores, *axes)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    allowed: torch.Tensor,
    scale: float | None = None,
    score_mod: Callable[..., torch.Tensor] | None = None,
    factors: torch.Tensor | None = None,
) -> torch.Tensor:
    """Masked softmax attention in float64; a fully masked row gives 0, and the gradients follow from autograd.

    Args:
        query: [B, H, q_len, D]; `key` and `value` have kv_len in its place, and may have fewer heads (grouped queries).
        allowed: bool, broadcast to [B, H, q_len, kv_len].
        scale: Factor on the scores; 1/sqrt(D) if None.
        score_mod: see attention_scores.
        factors: Of the weights, as dropout has them.
    """
    value = value.double().repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    weights = softmax(attention_scores(query, key, scale, score_mod), allowed)
    return (weights if factors is None else weights * factors) @ value
