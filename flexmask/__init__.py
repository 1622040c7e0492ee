"""flexmask: attention masks as values.

``causal() & key_padding(lengths=[3, 5, 4])`` is a small immutable expression. It lowers to a dense tensor, to a FlexAttention
``mask_mod`` or ``BlockMask``, to key intervals and to pictures. True means that the query attends to the key.

The names here are those that most models need. All named masks are in :mod:`flexmask.masks`, errors in :mod:`flexmask.errors`,
everything else in its package. Expressions import without torch; what needs torch is imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from flexmask import errors, masks
from flexmask.catalogue import (
    causal,
    cross_length,
    document,
    empty,
    from_dense,
    full,
    key_padding,
    per_document,
    per_head,
    prefix_lm,
    query_padding,
    sliding_window,
)
from flexmask.expr.choice import where
from flexmask.expr.data import table
from flexmask.expr.index import b, h, kv, kv_len, maximum, minimum, q, q_len
from flexmask.expr.mask import Mask
from flexmask.expr.tables import param
from flexmask.parser import parse

if TYPE_CHECKING:
    from flexmask import backends as backends
    from flexmask import intervals as intervals
    from flexmask import lowering as lowering
    from flexmask import nn as nn
    from flexmask import packing as packing
    from flexmask import plans as plans
    from flexmask import plotting as plotting
    from flexmask import registry as registry
    from flexmask import report as report
    from flexmask import scores as scores
    from flexmask import testing as testing
    from flexmask import tracing as tracing
    from flexmask.backends.api import attention
    from flexmask.backends.cache import MaskCache
    from flexmask.backends.weights import merge_attention
    from flexmask.nn.kv_cache import KVCache
    from flexmask.nn.multihead import MultiheadFlexAttention
    from flexmask.plans.api import plan
    from flexmask.report.explain import explain
    from flexmask.tracing.create_block_mask import create_block_mask
    from flexmask.tracing.trace import from_mask_mod

__version__ = "0.1.0"

__all__ = [
    "KVCache",
    "Mask",
    "MaskCache",
    "MultiheadFlexAttention",
    "attention",
    "b",
    "causal",
    "create_block_mask",
    "cross_length",
    "document",
    "empty",
    "errors",
    "explain",
    "from_dense",
    "from_mask_mod",
    "full",
    "h",
    "key_padding",
    "kv",
    "kv_len",
    "masks",
    "maximum",
    "merge_attention",
    "minimum",
    "param",
    "parse",
    "per_document",
    "per_head",
    "plan",
    "prefix_lm",
    "q",
    "q_len",
    "query_padding",
    "sliding_window",
    "table",
    "where",
]

#: Names whose modules import torch, and these modules.
_LAZY = {
    "KVCache": "flexmask.nn.kv_cache",
    "MaskCache": "flexmask.backends.cache",
    "MultiheadFlexAttention": "flexmask.nn.multihead",
    "attention": "flexmask.backends.api",
    "create_block_mask": "flexmask.tracing.create_block_mask",
    "explain": "flexmask.report.explain",
    "from_mask_mod": "flexmask.tracing.trace",
    "merge_attention": "flexmask.backends.weights",
    "plan": "flexmask.plans.api",
}
#: Packages with public names, which ``flexmask.NAME`` imports.
_PACKAGES = {
    "backends",
    "intervals",
    "lowering",
    "nn",
    "packing",
    "plans",
    "plotting",
    "registry",
    "report",
    "scores",
    "testing",
    "tracing",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    if name in _PACKAGES:
        return import_module(f"flexmask.{name}")
    message = f"module 'flexmask' has no attribute {name!r}"
    if name.startswith("_"):  # tools ask for these, and read no message
        raise AttributeError(message)
    from flexmask._suggestions import suggestion

    raise AttributeError(message + suggestion(name, [*__all__, *_PACKAGES]))


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, *_PACKAGES})
