"""flexmask: attention masks as values.

``causal() & key_padding(lengths=[3, 5, 4])`` is a small immutable expression. It lowers to a dense tensor, to a FlexAttention
``mask_mod`` or ``BlockMask``, to rows of key intervals and to pictures. True means that the query may attend to the key.

Expressions import without torch; what needs torch is imported when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from flexmask import masks
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
from flexmask.expr.index import Index, b, h, kv, kv_len, maximum, minimum, q, q_len
from flexmask.expr.mask import Mask, where
from flexmask.expr.packing import document_ids, document_starts
from flexmask.expr.tables import Table, param, table
from flexmask.parser import parse
from flexmask.registry import named

if TYPE_CHECKING:
    from flexmask.backends.api import attention, choose_backend
    from flexmask.backends.cache import MaskCache
    from flexmask.backends.weights import attention_weights
    from flexmask.intervals.bounds import RowBounds
    from flexmask.intervals.rows import Rows
    from flexmask.lowering.align import AlignedDocuments, align_documents
    from flexmask.nn.kv_cache import KVCache
    from flexmask.nn.multihead import MultiheadFlexAttention
    from flexmask.plotting.mpl.panels import plot_score_panels
    from flexmask.plotting.mpl.plot import plot_scores
    from flexmask.report.compare import Difference
    from flexmask.report.explain import Explanation, explain
    from flexmask.report.stats import Stats
    from flexmask.tracing.drop_in import create_block_mask
    from flexmask.tracing.trace import trace

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
    "AlignedDocuments": "flexmask.lowering.align",
    "MultiheadFlexAttention": "flexmask.nn.multihead",
    "Difference": "flexmask.report.compare",
    "Explanation": "flexmask.report.explain",
    "KVCache": "flexmask.nn.kv_cache",
    "MaskCache": "flexmask.backends.cache",
    "RowBounds": "flexmask.intervals.bounds",
    "Rows": "flexmask.intervals.rows",
    "Stats": "flexmask.report.stats",
    "align_documents": "flexmask.lowering.align",
    "attention": "flexmask.backends.api",
    "attention_weights": "flexmask.backends.weights",
    "choose_backend": "flexmask.backends.api",
    "create_block_mask": "flexmask.tracing.drop_in",
    "explain": "flexmask.report.explain",
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
