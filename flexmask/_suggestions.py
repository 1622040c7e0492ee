"""What to write for a name that is not at the top of flexmask: its own place, or the nearest name."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module

from flexmask import registry
from flexmask._checks import closest
from flexmask.errors import DuplicateNameError
from flexmask.expr.names import NAMES

#: The packages whose ``__all__`` is public.
PACKAGES = (*sorted(import_module("flexmask")._PACKAGES - {"plotting"}), "distributed", "errors", "expr", "plotting.mpl")
#: Names that other libraries have for a thing, and the code that gives it here.
GUESSES = {
    "additive": "mask.to_bias(q_len)",
    "and_masks": "a & b",
    "bidirectional": "flexmask.full()",
    "alibi": "flexmask.scores.alibi()",
    "bind": "mask.bind(**data)",
    "block_mask": "mask.block_mask(q_len)",
    "create_mask": "mask.dense(q_len)",
    "dense": "flexmask.from_dense(table) or mask.dense(q_len)",
    "diff": "a.difference(b, q_len)",
    "difference": "a.difference(b, q_len)",
    "dilated": "flexmask.masks.dilated_window(left=8, right=8, dilation=2)",
    "document_mask": "flexmask.document(lengths=[3, 5])",
    "equals": "a.equals(b, q_len)",
    "flex_attention": "flexmask.attention(query, key, value, mask)",
    "html": "mask.html(q_len)",
    "local": "flexmask.sliding_window(left=8, right=8)",
    "longformer": "flexmask.masks.global_window(is_global, left=8, right=8)",
    "mask_mod": "mask.mask_mod(q_len)",
    "materialize": "mask.dense(q_len)",
    "noop": "flexmask.full()",
    "noop_mask": "flexmask.full()",
    "or_masks": "a | b",
    "packed": "flexmask.document(lengths=[3, 5])",
    "padding": "flexmask.key_padding(lengths=[3, 5])",
    "plot": "mask.plot(q_len)",
    "render": "mask.plot(q_len)",
    "rows": "mask.rows(q_len)",
    "scaled_dot_product_attention": "flexmask.attention(query, key, value, mask)",
    "sdpa": "flexmask.attention(query, key, value, mask)",
    "show": "mask.show(q_len)",
    "sink": "flexmask.masks.sink_window(4, size=8)",
    "stats": "mask.stats(q_len)",
    "swa": "flexmask.sliding_window(size=8)",
    "to_dense": "mask.dense(q_len)",
    "trace": "flexmask.from_mask_mod(mask_mod)",
    "visualize": "mask.show(q_len) or mask.plot(q_len)",
    "window": "flexmask.sliding_window(left=8, right=0)",
}


def suggestion(name: str, top: Iterable[str]) -> str:
    """What to write for a name, as the end of a message; nothing where no name is near.

    Args:
        name: the name that does not exist.
        top: the names at the top of the package.
    """
    if name in GUESSES:
        return f". Write {GUESSES[name]}"
    places = _places() | {known: f"flexmask.{known}" for known in top}
    if name in places:
        return f". It is {places[name]}"
    near = closest(name, places)
    return f". Did you mean {places[near]}?" if near else ""


def _places() -> dict[str, str]:
    """Where each public name is that is not at the top of the package."""
    try:
        masks = registry.names()
    except DuplicateNameError:
        masks = list(NAMES)
    places = {name: f"flexmask.masks.{name}" for name in masks}
    for package in PACKAGES:
        places |= {name: f"flexmask.{package}.{name}" for name in import_module(f"flexmask.{package}").__all__}
    return places
