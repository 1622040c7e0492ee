"""Each named mask at 4 x 4: arguments that are right, some in several ways, and what the mask then means.

Every named mask has a line here, with which its lowerings, its errors for wrong arguments and its host syncs are tested. Further
cases: ``support/named_masks.py`` (the masks at the top of the package) and ``catalogue/test_families.py`` (the others).
The predicate comes from the oracle, or is a plain ``lambda b, h, q, kv, q_len, kv_len: ...``.
"""

from typing import Any, TypeAlias

import flexmask as fm
from flexmask.expr.names import NAMES
from flexmask.registry import package_of
from tests.support import oracle

Example: TypeAlias = tuple[dict[str, Any], oracle.Predicate]

#: The named masks that the library itself defines.
OWN_MASKS = sorted(name for name, define in NAMES.items() if package_of(define.__module__) == "flexmask")

IDS = [0, 0, 1, 1]
ALL = [[True] * 4] * 4
GLOBAL = [True, False, False, False]
PADDED, padded = fm.causal() & fm.key_padding([2, 2]), oracle.both(oracle.causal(), oracle.key_padding(2))

EXAMPLES: dict[str, list[Example]] = {
    "bidirectional_spans": [({"ids": IDS}, oracle.bidirectional_spans(IDS))],
    "bigbird": [({"blocks": 4, "size": 1, "random_blocks": 0, "around": 0}, lambda b, h, q, kv, *_: 0 in (q, kv) or q == kv)],
    "block_causal": [({"size": 2}, oracle.block_causal(2))],
    "block_diffusion": [
        ({"length": 4, "size": 2}, oracle.block_diffusion(4, 2)),
        ({"length": 2, "size": 2, "ids": [0, 1]}, oracle.packed_block_diffusion([1, 1], 2, 2)),
    ],
    "causal": [({"align": "upper_left", "offset": 0}, oracle.causal())],
    "chunk_window": [({"size": 2, "left": 1}, oracle.chunk_window(2, 1))],
    "chunked": [({"size": 2, "start": 1}, oracle.chunked(2, 1))],
    "coarse": [({"mask": PADDED, "size": 2}, oracle.coarse(padded, 2))],
    "cross_document": [
        (
            {"mask": fm.causal(), "q_lengths": [4], "kv_lengths": [4], "align": "upper_left"},
            oracle.cross_document(oracle.causal(), [4], [4]),
        )
    ],
    "cross_length": [({"kv_lengths": 3, "q_lengths": 3}, oracle.cross_length(3, 3))],
    "dilated_window": [({"left": 1, "right": 1, "dilation": 2}, oracle.dilated_window(1, 1, 2))],
    "document": [
        ({"ids": IDS, "kv_ids": IDS}, oracle.document(IDS)),
        ({"lengths": [1, 3]}, oracle.document([0, 1, 1, 1])),
        ({"cu_seqlens": [0, 4]}, oracle.full()),
        ({"position_ids": IDS}, oracle.document([0, 1, 1, 2])),
    ],
    "draft_anchors": [({"anchors": [1, 0], "size": 2, "context": 1}, oracle.draft_anchors([1, 0], 2, 1))],
    "draft_blocks": [({"prefix": 2, "size": 2}, oracle.draft_blocks(2, 2))],
    "empty": [({}, oracle.empty())],
    "eviction": [({"steps": [1] * 4}, oracle.eviction([1] * 4))],
    "from_dense": [({"table": ALL}, oracle.dense(ALL))],
    "full": [({}, oracle.full())],
    "global_window": [({"is_global": GLOBAL, "left": 1, "right": 1}, oracle.global_window(GLOBAL, 1, 1))],
    "image_cross": [({"spans": [[0, 2]], "image_length": 4}, oracle.image_cross([[0, 2]], 4))],
    "in_context": [({"ids": IDS, "test_start": 1}, oracle.in_context(IDS, 1))],
    "key_padding": [
        ({"lengths": 3, "side": "left"}, oracle.key_padding(3, "left")),
        ({"keep": [True] * 4}, oracle.full()),
        ({"hide": [1, 0, 0, 0]}, oracle.key_hide([1, 0, 0, 0])),
        ({"start": 1}, oracle.key_start(1)),
    ],
    "multi_item": [({"prefix_length": 1, "positions": IDS}, oracle.multi_item(1, IDS))],
    "named": [({"mask": PADDED, "name": "near"}, padded)],
    "neighborhood": [({"canvas": [2, 2], "kernel": [1, 1]}, oracle.neighborhood([2, 2], [1, 1]))],
    "paged": [({"mask": fm.causal(), "pages": [0, 1], "page_size": 2}, oracle.paged(oracle.causal(), [0, 1], 2))],
    "per_chunk": [({"mask": fm.causal(), "size": 2}, oracle.per_chunk(oracle.causal(), 2))],
    "per_document": [({"mask": fm.causal(), "ids": IDS}, oracle.per_document(oracle.causal(), IDS))],
    "per_head": [({"masks": [PADDED]}, padded)],
    "prefix_lm": [({"prefix_lengths": 2}, oracle.prefix_lm(2))],
    "prefix_tree": [
        ({"end": [4, 2, 4, 4]}, oracle.prefix_tree([0, 1, 1, 2])),
        ({"position_ids": [0, 1, 1, 0]}, oracle.prefix_tree([0, 1, 1, 0])),
        ({"lengths": [1, 2, 1], "parents": [-1, 0, 0]}, oracle.prefix_tree([0, 1, 2, 1])),
        ({"end": [4, 3, 4, 3], "order": [0, 1, 3, 2]}, oracle.tree([-1, 0, 0, 1])),
    ],
    "qk_sparse": [({"starts": [1], "lengths": [2]}, oracle.qk_sparse([1], [2]))],
    "query_padding": [({"lengths": 3}, oracle.query_padding(3)), ({"keep": [1] * 4}, oracle.full())],
    "random_cells": [({"p": 0.5, "seed": 3}, oracle.random_cells(0.5, 3))],
    "reorder": [
        ({"mask": fm.causal(), "q": [0, 1, 2, 3], "kv": [3, 2, 1, 0]}, oracle.reorder(oracle.causal(), kv=[3, 2, 1, 0])),
    ],
    "shared_prefix": [({"ids": IDS, "prefix_of": [0, 0]}, oracle.shared_prefix(IDS, [0, 0]))],
    "shift": [({"mask": PADDED, "q": 1, "kv": 1}, oracle.shift(padded, 1, 1))],
    "shifted_window": [
        ({"canvas": [2, 2], "window": [2, 2], "shift": [1, 0]}, oracle.shifted_window([2, 2], [2, 2], [1, 0])),
        ({"canvas": [4], "window": [3]}, oracle.shifted_window([4], [3], [0])),
    ],
    "sink_window": [
        ({"sinks": 1, "left": 1}, oracle.sink_window(1, 1)),
        ({"sinks": 1, "size": 2}, oracle.sink_window(1, 1)),
    ],
    "sliding_tile": [({"canvas": [4], "kernel": [2], "tile": [2], "text": 0}, oracle.sliding_tile([4], [2], [2]))],
    "sliding_window": [({"left": 1, "right": 1}, oracle.sliding_window(1, 1)), ({"size": 3}, oracle.sliding_window(size=3))],
    "svg_spatial": [({"frame_length": 4, "width": 1}, oracle.svg_spatial(4, 1))],
    "svg_temporal": [({"frame_length": 4, "frames": 8, "width": 4}, oracle.svg_temporal(4, 8, 4))],
    "tile_topk": [({"topk": [[0], [1]], "size": 2}, oracle.tile_topk([[0], [1]], 2))],
    "training_time_test": [({"length": 3, "steps": 1}, oracle.training_time_test(3, 1))],
    "transpose": [({"mask": PADDED}, oracle.transpose(padded))],
    "tree": [
        ({"parents": [-1, 0, 1, 1], "prefix": 0}, oracle.tree([-1, 0, 1, 1])),
        ({"ancestors": ALL}, oracle.full()),
    ],
}
