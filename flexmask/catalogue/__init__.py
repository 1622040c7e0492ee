"""The named masks, by family. Each is a short definition on top of the index expressions."""

from flexmask.catalogue.blocks import block_causal, block_diffusion, chunk_window, chunked, per_chunk
from flexmask.catalogue.combinators import coarse, from_dense, paged, per_head, reorder, shift, transpose
from flexmask.catalogue.documents import cross_document, document, per_document
from flexmask.catalogue.padding import cross_length, key_padding, query_padding
from flexmask.catalogue.prefixes import bidirectional_spans, in_context, multi_item, prefix_lm, shared_prefix
from flexmask.catalogue.sparse import eviction, qk_sparse, random_cells
from flexmask.catalogue.trees import draft_anchors, draft_blocks, training_time_test, tree
from flexmask.catalogue.vision import image_cross, neighborhood, sliding_tile, svg_spatial, svg_temporal, tile_topk
from flexmask.catalogue.windows import causal, dilated_window, empty, full, global_window, sink_window, sliding_window

__all__ = [
    "bidirectional_spans",
    "block_causal",
    "block_diffusion",
    "causal",
    "chunk_window",
    "chunked",
    "coarse",
    "cross_document",
    "cross_length",
    "dilated_window",
    "document",
    "draft_anchors",
    "draft_blocks",
    "empty",
    "eviction",
    "from_dense",
    "full",
    "global_window",
    "image_cross",
    "in_context",
    "key_padding",
    "multi_item",
    "neighborhood",
    "paged",
    "per_chunk",
    "per_document",
    "per_head",
    "prefix_lm",
    "qk_sparse",
    "query_padding",
    "random_cells",
    "reorder",
    "shared_prefix",
    "shift",
    "sink_window",
    "sliding_tile",
    "sliding_window",
    "svg_spatial",
    "svg_temporal",
    "tile_topk",
    "training_time_test",
    "transpose",
    "tree",
]
