"""flexmask: attention masks as values.

``causal() & key_padding(lengths=[3, 5, 4])`` is a small immutable expression. It lowers to a dense tensor, to a FlexAttention
``mask_mod`` or ``BlockMask``, to rows of key intervals and to pictures. True means that the query may attend to the key.

Expressions import without torch; what needs torch is imported when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from flexmask.algebra import Mask, where
from flexmask.catalogue import (
    causal,
    cross_length,
    dense,
    document,
    empty,
    full,
    key_padding,
    per_document,
    per_head,
    prefix_lm,
    query_padding,
    shift,
    sliding_window,
    transpose,
)
from flexmask.errors import ExpressionError, FlexmaskError, LoweringError, OperandError, RenderError, TextError
from flexmask.index import Index, b, h, kv, kv_len, maximum, minimum, q, q_len
from flexmask.naming import named
from flexmask.tables import Table, document_ids, document_starts, param, table
from flexmask.text import parse

if TYPE_CHECKING:
    from flexmask.analysis import RowBounds
    from flexmask.functional import attention, choose_backend
    from flexmask.lowering.stats import Stats
    from flexmask.nn import MultiheadFlexAttention
    from flexmask.render.plot import plot
    from flexmask.render.terminal import show
    from flexmask.rows import Rows

__version__ = "0.1.0"

__all__ = [
    "ExpressionError",
    "FlexmaskError",
    "Index",
    "LoweringError",
    "Mask",
    "MultiheadFlexAttention",
    "OperandError",
    "RenderError",
    "RowBounds",
    "Rows",
    "Stats",
    "Table",
    "TextError",
    "attention",
    "b",
    "causal",
    "choose_backend",
    "cross_length",
    "dense",
    "document",
    "document_ids",
    "document_starts",
    "empty",
    "full",
    "h",
    "key_padding",
    "kv",
    "kv_len",
    "maximum",
    "minimum",
    "named",
    "param",
    "parse",
    "per_document",
    "per_head",
    "plot",
    "prefix_lm",
    "q",
    "q_len",
    "query_padding",
    "shift",
    "show",
    "sliding_window",
    "table",
    "transpose",
    "where",
]

_HEAVY = {
    "MultiheadFlexAttention": "flexmask.nn",
    "RowBounds": "flexmask.analysis",
    "Rows": "flexmask.rows",
    "Stats": "flexmask.lowering.stats",
    "attention": "flexmask.functional",
    "choose_backend": "flexmask.functional",
    "plot": "flexmask.render.plot",
    "show": "flexmask.render.terminal",
}


def __getattr__(name: str) -> Any:
    if name not in _HEAVY:
        raise AttributeError(f"module 'flexmask' has no attribute {name!r}")
    return getattr(import_module(_HEAVY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HEAVY})
