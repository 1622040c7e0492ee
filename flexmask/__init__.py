"""flexmask: attention masks as values.

``causal() & key_padding(lengths=[3, 5, 4])`` is a small immutable expression. It lowers to a dense tensor, to a FlexAttention
``mask_mod`` or ``BlockMask``, to rows of key intervals and to pictures. True means that the query may attend to the key.

Expressions import without torch; what needs torch is imported when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from flexmask import masks
from flexmask.algebra import Mask, where
from flexmask.catalogue import (
    bidirectional_spans,
    block_causal,
    block_diffusion,
    causal,
    chunk_window,
    chunked,
    coarse,
    cross_document,
    cross_length,
    dense,
    dilated_window,
    document,
    draft_anchors,
    draft_blocks,
    empty,
    eviction,
    full,
    global_window,
    image_cross,
    in_context,
    key_padding,
    multi_item,
    neighborhood,
    paged,
    per_chunk,
    per_document,
    per_head,
    prefix_lm,
    qk_sparse,
    query_padding,
    random_cells,
    reorder,
    shared_prefix,
    shift,
    sink_window,
    sliding_tile,
    sliding_window,
    svg_spatial,
    svg_temporal,
    tile_topk,
    training_time_test,
    transpose,
    tree,
)
from flexmask.errors import (
    DuplicateNameError,
    ExpressionError,
    FlexmaskError,
    LoweringError,
    OperandError,
    PluginWarning,
    RenderError,
    TextError,
    TraceError,
)
from flexmask.index import Index, b, h, kv, kv_len, maximum, minimum, q, q_len
from flexmask.naming import named
from flexmask.packing import document_ids, document_starts
from flexmask.tables import Table, param, table
from flexmask.text import parse

if TYPE_CHECKING:
    from flexmask.aligning import AlignedDocuments, align_documents
    from flexmask.analysis import RowBounds
    from flexmask.comparing import Difference
    from flexmask.drop_in import create_block_mask
    from flexmask.explaining import Explanation, explain
    from flexmask.functional import attention, choose_backend
    from flexmask.kv_cache import KVCache
    from flexmask.lowering.stats import Stats
    from flexmask.mask_cache import MaskCache
    from flexmask.nn import MultiheadFlexAttention
    from flexmask.plotting.mpl.panels import plot_score_panels
    from flexmask.plotting.mpl.plot import plot_scores
    from flexmask.rows import Rows
    from flexmask.tracing.trace import trace
    from flexmask.weights import attention_weights

__version__ = "0.1.0"

__all__ = [
    "AlignedDocuments",
    "Difference",
    "DuplicateNameError",
    "Explanation",
    "ExpressionError",
    "FlexmaskError",
    "Index",
    "KVCache",
    "LoweringError",
    "Mask",
    "MaskCache",
    "MultiheadFlexAttention",
    "OperandError",
    "PluginWarning",
    "RenderError",
    "RowBounds",
    "Rows",
    "Stats",
    "Table",
    "TextError",
    "TraceError",
    "align_documents",
    "attention",
    "attention_weights",
    "b",
    "bidirectional_spans",
    "block_causal",
    "block_diffusion",
    "causal",
    "choose_backend",
    "chunk_window",
    "chunked",
    "coarse",
    "create_block_mask",
    "cross_document",
    "cross_length",
    "dense",
    "dilated_window",
    "document",
    "document_ids",
    "document_starts",
    "draft_anchors",
    "draft_blocks",
    "empty",
    "eviction",
    "explain",
    "full",
    "global_window",
    "h",
    "image_cross",
    "in_context",
    "key_padding",
    "kv",
    "kv_len",
    "masks",
    "maximum",
    "minimum",
    "multi_item",
    "named",
    "neighborhood",
    "paged",
    "param",
    "parse",
    "per_chunk",
    "per_document",
    "per_head",
    "plot_score_panels",
    "plot_scores",
    "prefix_lm",
    "q",
    "q_len",
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
    "table",
    "tile_topk",
    "trace",
    "training_time_test",
    "transpose",
    "tree",
    "where",
]

_HEAVY = {
    "AlignedDocuments": "flexmask.aligning",
    "MultiheadFlexAttention": "flexmask.nn",
    "Difference": "flexmask.comparing",
    "Explanation": "flexmask.explaining",
    "KVCache": "flexmask.kv_cache",
    "MaskCache": "flexmask.mask_cache",
    "RowBounds": "flexmask.analysis",
    "Rows": "flexmask.rows",
    "Stats": "flexmask.lowering.stats",
    "align_documents": "flexmask.aligning",
    "attention": "flexmask.functional",
    "attention_weights": "flexmask.weights",
    "choose_backend": "flexmask.functional",
    "create_block_mask": "flexmask.drop_in",
    "explain": "flexmask.explaining",
    "plot_score_panels": "flexmask.plotting.mpl.panels",
    "plot_scores": "flexmask.plotting.mpl.plot",
    "trace": "flexmask.tracing.trace",
}


def __getattr__(name: str) -> Any:
    if name not in _HEAVY:
        raise AttributeError(f"module 'flexmask' has no attribute {name!r}")
    return getattr(import_module(_HEAVY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HEAVY})
