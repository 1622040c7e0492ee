"""The attention patterns in use: each is an expression, and means cell by cell what its definition says.

A definition is written out here from the pattern's paper or code, with no help of the library or of the oracle.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

import flexmask as fm
from flexmask import Mask, b, causal, h, kv, q, table
from tests.support import oracle
from tests.support.exhaustive import exhaustive
from tests.support.lowerings import check_lowerings
from tests.support.strategies import Case, Shape

SQUARES = [Shape(1, 1), Shape(21, 21)]
ANY = [*SQUARES, Shape(10, 23), Shape(23, 10), Shape(6, 24, q_offset=17)]
#: Data for sequences of 24 tokens.
DOC = [0] * 7 + [1] * 5 + [2] * 9 + [-1] * 3
START = [0] * 7 + [7] * 5 + [12] * 9 + [21] * 3
GLOBAL = [i in (0, 5, 6, 17) for i in range(24)]
VALID = [[i % 5 != 2 for i in range(24)], [i < 13 for i in range(24)]]
BUCKETS = [i * 7 % 4 for i in range(24)]
EVICT = [[[(i * 5 + head * 3 + sequence) % 26 for i in range(24)] for head in range(2)] for sequence in range(2)]
CELLS = [[(i * i + 3 * j) % 5 < 2 for j in range(24)] for i in range(24)]
PARENTS = [-1, 0, 0, 1, 1, 2, 5, 3]
TOPK = [[[[0, 2], [1, 3], [3, 0], [2, 1]], [[1, 2], [3, 1], [0, 3], [0, 2]]]]
SIZES = [6, 4, 6, 1]
ITEMS = [0, 1, 2, 3, 0, 1, 0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]
SPANS = [[0, 7], [3, 9], [9, 12]]
PAGES = [[2, 0, -1, 1], [-1, 1, 0, 2]]
ROW, COLUMN = [i % 6 for i in range(24)], [i // 6 for i in range(24)]
MORTON = [sum((i >> 2 * bit & 1) << bit | (i >> 2 * bit + 1 & 1) << bit + 2 for bit in range(2)) for i in range(16)]


@dataclass(frozen=True)
class Pattern:
    """A pattern: its expression, its definition, and the shapes at which they are compared."""

    mask: Mask
    allowed: oracle.Predicate
    shapes: Sequence[Shape] = tuple(SQUARES)


def ancestor(node: int, other: int) -> bool:
    while node > other:
        node = PARENTS[node]
    return node == other


def natten(x: int, y: int, size: int, kernel: int) -> bool:
    reach = kernel // 2
    center = min(max(x, reach), size - 1 - reach)
    return abs(center - y) <= reach


def sta(x: int, y: int, size: int, kernel: int) -> bool:
    left, right = kernel // 2, kernel // 2 + kernel % 2 - 1
    center = min(max(x, left), size - 1 - right)
    return center - left <= y <= center + right


def tiled(i: int) -> tuple[int, int]:
    """Row and column of the i-th of 4 x 6 pixels in tiles of 2 x 3."""
    tile, within = divmod(i, 6)
    return tile // 2 * 2 + within // 3, tile % 2 * 3 + within % 3


def diffusion(q: int, kv: int, length: int, size: int) -> bool:
    row, column = q % length // size, kv % length // size
    q_noised, kv_noised = q < length, kv < length
    return (
        (row == column and q_noised == kv_noised)
        or (row > column and q_noised and not kv_noised)
        or (row >= column and not q_noised and not kv_noised)
    )


def video(x: int, y: int) -> bool:
    """Temporal distance of places in frames of 5 tokens."""
    return abs((x - 4) % 5 - (y - 4) % 5) < 2 * 5 // 4


def mixed(*numbers: int) -> int:
    """A counter-based hash by squares, with Python's own integers."""
    seed, row, column = numbers
    prime, state = 2**31 - 1, seed * 1517746329 + 1865811235
    state = state * state % prime + row * 1183186591
    state = state * state % prime + column * 2034287659
    state = state * state % prime + 1640531527
    return state * state % prime


long = Shape(24, 24)
two = Shape(24, 24, batch=2)

PATTERNS: dict[str, Pattern] = {
    "full": Pattern(fm.full(), lambda b, h, q, kv, *_: True, ANY),
    "causal": Pattern(causal(), lambda b, h, q, kv, *_: q - kv >= 0, ANY),
    "causal, lower right": Pattern(
        causal("lower_right"), lambda b, h, q, kv, q_len, kv_len: q + kv_len - q_len - kv >= 0, ANY[:4]
    ),
    "causal, an offset for each sequence": Pattern(
        causal(),
        lambda b, h, q, kv, *_: kv <= q,
        [Shape(3, 24, batch=2, q_offset=(4, 21))],
    ),
    "anti-causal": Pattern(fm.masks.transpose(causal()), lambda b, h, q, kv, *_: q - kv <= 0, ANY),
    "bi-causal": Pattern((kv <= q + 3) & (kv >= q - 2), lambda b, h, q, kv, *_: 3 + q >= kv and -2 + q <= kv, ANY),
    "causal sliding window": Pattern(fm.sliding_window(size=6), lambda b, h, q, kv, *_: 0 <= q - kv < 6, ANY),
    "window": Pattern(fm.sliding_window(left=4, right=2), lambda b, h, q, kv, *_: -2 <= q - kv <= 4, ANY),
    "window, exclusive": Pattern(
        fm.sliding_window(left=4 - 1, right=3 - 1),
        lambda b, h, q, kv, *_: (0 <= q - kv < 4) or (q - kv < 0 and kv - q < 3),
        ANY,
    ),
    "left-bounded window": Pattern(fm.sliding_window(left=5, right=None), lambda b, h, q, kv, *_: kv + 6 > q, ANY),
    "dilated window": Pattern(
        fm.masks.dilated_window(left=8, right=8, dilation=3), lambda b, h, q, kv, *_: abs(q - kv) <= 8 and (q - kv) % 3 == 0, ANY
    ),
    "sinks and window": Pattern(
        fm.masks.sink_window(sinks=2, size=5), lambda b, h, q, kv, *_: q - kv >= 0 and (q - kv < 5 or kv < 2), ANY
    ),
    "global and window (Longformer)": Pattern(
        fm.masks.global_window(GLOBAL, left=3, right=3),
        lambda b, h, q, kv, *_: GLOBAL[q] or GLOBAL[kv] or abs(q - kv) <= 3,
        [long],
    ),
    "global and window, the first tokens": Pattern(
        (kv < 3) | (q < 3) | fm.sliding_window(left=2, right=4),
        lambda b, h, q, kv, *_: kv < 3 or q < 3 or -4 <= q - kv <= 2,
        ANY,
    ),
    "chunked causal": Pattern(fm.masks.chunked(5) & causal(), lambda b, h, q, kv, *_: q // 5 == kv // 5 and q - kv >= 0, ANY),
    "chunked causal, padded on the left": Pattern(
        fm.masks.chunked(5, start=[3, 0]) & causal(),
        lambda b, h, q, kv, *_: (q - [3, 0][b]) // 5 == (kv - [3, 0][b]) // 5 and q >= kv,
        [two],
    ),
    "fixed blocks": Pattern(
        fm.masks.per_chunk(causal() | (kv == 3), 6),
        lambda b, h, q, kv, *_: q // 6 == kv // 6 and (kv % 6 <= q % 6 or kv % 6 == 3),
        ANY,
    ),
    "block-causal": Pattern(fm.masks.block_causal(4), lambda b, h, q, kv, *_: q // 4 >= kv // 4, ANY),
    "streaming chunks": Pattern(fm.masks.chunk_window(4, left=2), lambda b, h, q, kv, *_: 0 <= q // 4 - kv // 4 <= 2, ANY),
    "key padding": Pattern(fm.key_padding([9, 4]), lambda b, h, q, kv, *_: kv < [9, 4][b], [two, Shape(5, 10, batch=2)]),
    "key padding on the left": Pattern(
        kv >= table([9, 4])[b], lambda b, h, q, kv, *_: kv >= [9, 4][b], [two, Shape(5, 10, batch=2)]
    ),
    "key validity": Pattern(fm.key_padding(keep=VALID), lambda b, h, q, kv, *_: VALID[b][kv], [two, Shape(4, 24, batch=2)]),
    "query padding": Pattern(fm.query_padding([9, 4]), lambda b, h, q, kv, *_: q < [9, 4][b], [two]),
    "documents": Pattern(fm.document(DOC), lambda b, h, q, kv, *_: DOC[q] == DOC[kv] != -1, [long]),
    "causal documents": Pattern(causal() & fm.document(DOC), lambda b, h, q, kv, *_: DOC[q] == DOC[kv] != -1 and kv <= q, [long]),
    "a mask within documents": Pattern(
        fm.per_document(fm.masks.dilated_window(left=4, right=4, dilation=2) | (kv == 1), DOC),
        lambda b, h, q, kv, *_: DOC[q] == DOC[kv] != -1 and ((abs(q - kv) <= 4 and (q - kv) % 2 == 0) or kv - START[kv] == 1),
        [long],
    ),
    "packed queries and keys of other lengths": Pattern(
        fm.masks.cross_document(causal(), q_lengths=[3, 4, 2], kv_lengths=[8, 4, 12], align="lower_right"),
        lambda b, h, q, kv, *_: (
            (q < 3 and kv <= q + 5)
            or (3 <= q < 7 and 8 <= kv < 12 and kv - 8 <= q - 3)
            or (7 <= q < 9 and 12 <= kv < 24 and kv - 12 <= q - 7 + 10)
        ),
        [Shape(9, 24)],
    ),
    "packed queries, padded keys of a fixed stride": Pattern(
        fm.masks.cross_document(q_lengths=[3, 4, 2], kv_lengths=[8, 8, 8]) & (kv % 8 < table([8, 3, 5])[kv // 8]),
        lambda b, h, q, kv, *_: [0, 0, 0, 1, 1, 1, 1, 2, 2][q] == kv // 8 and kv % 8 < [8, 3, 5][kv // 8],
        [Shape(9, 24)],
    ),
    "shared prefix": Pattern(
        fm.masks.shared_prefix(DOC, prefix_of=[0, 0, 0]),
        lambda b, h, q, kv, *_: DOC[q] >= 0 and kv <= q and (DOC[q] == DOC[kv] or DOC[kv] == 0),
        [long],
    ),
    "causal blockwise": Pattern(
        fm.masks.in_context(DOC, test_start=12),
        lambda b, h, q, kv, *_: -1 not in (DOC[q], DOC[kv]) and kv <= q and (DOC[q] == DOC[kv] or DOC[q] == 2),
        [long],
    ),
    "prefix LM": Pattern(
        fm.prefix_lm([6, 9]), lambda b, h, q, kv, *_: kv < [6, 9][b] or q - kv >= 0, [two, Shape(5, 24, batch=2, q_offset=8)]
    ),
    "prefix LM documents": Pattern(
        fm.per_document(causal() | (kv < 3), DOC),
        lambda b, h, q, kv, *_: DOC[q] == DOC[kv] != -1 and (kv - START[kv] < 3 or kv <= q),
        [long],
    ),
    "prefix LM documents, a length for each": Pattern(
        fm.document(DOC) & (causal() | (kv - table(START)[kv] < table([4, 0, 6, 0])[fm.maximum(table(DOC)[kv], 0)])),
        lambda b, h, q, kv, *_: DOC[q] == DOC[kv] != -1 and (kv - START[kv] < [4, 0, 6][DOC[kv]] or kv <= q),
        [long],
    ),
    "bidirectional blocks in causal": Pattern(
        fm.masks.bidirectional_spans(DOC), lambda b, h, q, kv, *_: kv <= q or DOC[q] == DOC[kv] != -1, [long]
    ),
    "bidirectional blocks in a window": Pattern(
        fm.sliding_window(size=3) | fm.document(DOC),
        lambda b, h, q, kv, *_: 0 <= q - kv < 3 or DOC[q] == DOC[kv] != -1,
        [long],
    ),
    "QK-sparse": Pattern(
        causal() & fm.masks.qk_sparse([2, 10], [3, 6]),
        lambda b, h, q, kv, *_: kv <= q and not any(o <= kv < o + n and q < o + n for o, n in ((2, 3), (10, 6))),
        ANY,
    ),
    "hash-sparse": Pattern(
        causal() & fm.document(BUCKETS), lambda b, h, q, kv, *_: kv <= q and BUCKETS[q] == BUCKETS[kv], [long]
    ),
    "random eviction": Pattern(
        causal() & fm.masks.eviction(EVICT), lambda b, h, q, kv, *_: kv <= q < EVICT[b][h][kv], [Shape(24, 24, batch=2, heads=2)]
    ),
    "image-text cross attention": Pattern(
        fm.masks.image_cross(SPANS, 4), lambda b, h, q, kv, *_: SPANS[kv // 4][0] <= q < SPANS[kv // 4][1], [Shape(12, 12)]
    ),
    "neighborhood": Pattern(
        fm.masks.neighborhood([4, 6], [3, 5]),
        lambda b, h, q, kv, *_: natten(COLUMN[q], COLUMN[kv], 4, 3) and natten(ROW[q], ROW[kv], 6, 5),
        [long],
    ),
    "neighborhood in tiles": Pattern(
        fm.masks.neighborhood([4, 6], [3, 3], tile=[2, 3]),
        lambda b, h, q, kv, *_: all(natten(x, y, n, 3) for x, y, n in zip(tiled(q), tiled(kv), (4, 6), strict=True)),
        [long],
    ),
    "neighborhood in Morton order": Pattern(
        fm.masks.reorder(fm.masks.neighborhood([4, 4], [3, 3]), q=MORTON, kv=MORTON),
        lambda b, h, q, kv, *_: all(
            natten((q >> s & 1) | (q >> s + 1 & 2), (kv >> s & 1) | (kv >> s + 1 & 2), 4, 3) for s in (0, 1)
        ),
        [Shape(16, 16)],
    ),
    "sliding tile": Pattern(
        fm.masks.sliding_tile([4, 8], [4, 4], [2, 2], text=2),
        lambda b, h, q, kv, *_: (
            kv < 34 and (q >= 32 or kv >= 32 or (sta(q // 16, kv // 16, 2, 2) and sta(q // 4 % 4, kv // 4 % 4, 4, 2)))
        ),
        [Shape(34, 34), Shape(35, 36)],
    ),
    "sliding tile, 3-D": Pattern(
        fm.masks.sliding_tile([2, 2, 6], [2, 1, 3], [1, 1, 1]),
        lambda b, h, q, kv, *_: sta(q // 6 % 2, kv // 6 % 2, 2, 1) and sta(q % 6, kv % 6, 6, 3),
        [long],
    ),
    "spatial head of a video": Pattern(
        fm.masks.svg_spatial(5, width=2, prompt=4, round_to=4),
        lambda b, h, q, kv, *_: abs(q - kv) < 2 * 5 // 4 * 4 or q < 4 or kv < 4,
        [long],
    ),
    "spatial head of a video, with a sink": Pattern(
        fm.masks.svg_spatial(5, width=1, prompt=4, sinks=1),
        lambda b, h, q, kv, *_: abs(q - kv) < 5 or q < 4 or kv < 4 + 5,
        [long],
    ),
    "temporal head of a video": Pattern(
        fm.masks.svg_temporal(5, frames=4, width=2, prompt=4),
        lambda b, h, q, kv, *_: video(q, kv) or q < 4 or kv < 4,
        [long],
    ),
    "top-k tiles": Pattern(
        fm.masks.tile_topk(TOPK, 6, sizes=SIZES),
        lambda b, h, q, kv, *_: kv // 6 in TOPK[b][h][q // 6] and kv % 6 < SIZES[kv // 6],
        [Shape(24, 24, heads=2)],
    ),
    "block diffusion": Pattern(fm.masks.block_diffusion(12, 5), lambda b, h, q, kv, *_: diffusion(q, kv, 12, 5), [long]),
    "drafts after anchors": Pattern(
        fm.masks.draft_anchors([[2, 9], [11, 0]], 4, context=12),
        lambda b, h, q, kv, *_: kv < [[2, 9], [11, 0]][b][q // 4] if kv < 12 else (kv - 12) // 4 == q // 4,
        [Shape(8, 20, batch=2)],
    ),
    "training of a draft head": Pattern(
        fm.masks.draft_blocks(7, 4),
        lambda b, h, q, kv, *_: kv < 7 or ((kv - 7) // 4 == q // 4 and kv - 7 <= q),
        [Shape(12, 19)],
    ),
    "tree of drafts": Pattern(
        fm.masks.tree(parents=PARENTS, prefix=9),
        lambda b, h, q, kv, *_: kv < 9 or ancestor(q, kv - 9),
        [Shape(8, 17)],
    ),
    "training-time test": Pattern(
        fm.masks.training_time_test(8, 2),
        lambda b, h, q, kv, *_: (kv < 8 and kv <= q) or (kv >= 8 and (kv - q) % 8 == 0),
        [Shape(8, 24)],
    ),
    "multi-item scoring": Pattern(
        fm.masks.multi_item(6, ITEMS),
        lambda b, h, q, kv, *_: kv <= q and (q < 6 or kv < 6 or q - kv < ITEMS[q - 6]),
        [long, Shape(5, 24, q_offset=19)],
    ),
    "a mask for each head": Pattern(
        fm.per_head([causal(), fm.sliding_window(left=1, right=1), fm.full()]),
        lambda b, h, q, kv, *_: [kv <= q, abs(q - kv) <= 1, True][h],
        [Shape(9, 13, heads=3)],
    ),
    "a mask for groups of heads": Pattern(
        fm.where(h < 2, causal(), fm.full()), lambda b, h, q, kv, *_: h >= 2 or kv <= q, [Shape(9, 13, heads=3)]
    ),
    "from_dense": Pattern(fm.from_dense(CELLS), lambda b, h, q, kv, *_: CELLS[q][kv], [long]),
    "random": Pattern(
        fm.masks.random_cells(0.4, seed=3 * b + h),
        lambda b, h, q, kv, *_: mixed(3 * b + h, q, kv) < 0.4 * (2**31 - 1),
        [Shape(21, 24, batch=2, heads=3)],
    ),
    # ------------------------------------------------ transforms of the index
    "head-tail shards": Pattern(
        fm.masks.reorder(causal(), q=[0, 1, 2, 9, 10, 11]),
        lambda b, h, q, kv, *_: kv <= [0, 1, 2, 9, 10, 11][q],
        [Shape(6, 12)],
    ),
    "paged keys": Pattern(
        fm.masks.paged(fm.sliding_window(size=5), PAGES, page_size=6),
        lambda b, h, q, kv, *_: PAGES[b][kv // 6] >= 0 and 0 <= q - (PAGES[b][kv // 6] * 6 + kv % 6) < 5,
        [Shape(18, 24, batch=2), Shape(1, 24, batch=2, q_offset=(17, 9))],
    ),
    "a coarse mask": Pattern(
        fm.masks.coarse(fm.masks.sink_window(1, size=2), 4),
        lambda b, h, q, kv, *_: kv // 4 <= q // 4 and (q // 4 - kv // 4 < 2 or kv // 4 < 1),
        ANY,
    ),
}


EACH = [(name, shape) for name, pattern in PATTERNS.items() for shape in pattern.shapes]


@pytest.mark.parametrize(("name", "shape"), [*EACH[::2], *exhaustive(EACH[1::2])])
def test_every_lowering(name: str, shape: Shape) -> None:
    case = Case(PATTERNS[name].mask, PATTERNS[name].allowed)
    check_lowerings(case, shape, case.expected(shape), 4)


def test_patterns_are_told_apart() -> None:
    """No definition is that of nothing or, but for ``full``, of everything, so that none holds by chance."""
    for name, pattern in PATTERNS.items():
        shape = pattern.shapes[-1] if pattern.shapes[-1].q_len > 1 else pattern.shapes[0]
        cells = Case(pattern.mask, pattern.allowed).expected(shape)
        assert cells.any(), name
        assert name == "full" or not cells.all(), name
