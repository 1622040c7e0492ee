"""The named masks, by family. Each is a short definition on top of the index expressions."""

from flexmask.catalogue.combinators import dense, per_head, shift, transpose
from flexmask.catalogue.documents import document, per_document, prefix_lm
from flexmask.catalogue.padding import cross_length, key_padding, query_padding
from flexmask.catalogue.windows import causal, empty, full, sliding_window

__all__ = [
    "causal",
    "cross_length",
    "dense",
    "document",
    "empty",
    "full",
    "key_padding",
    "per_document",
    "per_head",
    "prefix_lm",
    "query_padding",
    "shift",
    "sliding_window",
    "transpose",
]
