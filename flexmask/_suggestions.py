"""What to write for a name that is not at the top of flexmask: its own place, or the nearest name."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from importlib import import_module

from flexmask import registry
from flexmask._checks import closest
from flexmask.errors import DuplicateNameError
from flexmask.expr.names import NAMES

#: The packages whose ``__all__`` is public.
PACKAGES = (*sorted(import_module("flexmask")._PACKAGES - {"plotting"}), "distributed", "errors", "expr", "plotting.mpl")
#: Code that gives a thing here, and the names that other libraries have for it.
CODE = {
    "mask.to_bias(q_len)": "additive",
    "flexmask.scores.alibi()": "alibi",
    "a & b": "and_masks",
    "flexmask.full()": "bidirectional noop noop_mask",
    "mask.bind(**data)": "bind",
    "mask.block_mask(q_len)": "block_mask",
    "mask.dense(q_len)": "create_mask materialize to_dense",
    "flexmask.from_dense(table) or mask.dense(q_len)": "dense",
    "a.difference(b, q_len)": "diff difference",
    "flexmask.masks.dilated_window(left=8, right=8, dilation=2)": "dilated",
    "flexmask.document(lengths=[3, 5])": "document_mask packed",
    "a.equals(b, q_len)": "equals",
    "flexmask.attention(query, key, value, mask)": "flex_attention scaled_dot_product_attention sdpa",
    "mask.html(q_len)": "html",
    "flexmask.sliding_window(left=8, right=8)": "local",
    "flexmask.masks.global_window(is_global, left=8, right=8)": "longformer",
    "mask.mask_mod(q_len)": "mask_mod",
    "a | b": "or_masks",
    "flexmask.key_padding(lengths=[3, 5])": "padding",
    "mask.plot(q_len)": "plot render",
    "mask.rows(q_len)": "rows",
    "mask.show(q_len)": "show",
    "flexmask.masks.sink_window(4, size=8)": "sink",
    "mask.stats(q_len)": "stats",
    "flexmask.sliding_window(size=8)": "swa",
    "flexmask.from_mask_mod(mask_mod)": "trace",
    "mask.show(q_len) or mask.plot(q_len)": "visualize",
    "flexmask.sliding_window(left=8, right=0)": "window",
}
GUESSES = {name: code for code, names in CODE.items() for name in names.split()}


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
    with suppress(DuplicateNameError):
        registry.load()
    places = {name: f"flexmask.masks.{name}" for name in NAMES}
    for package in PACKAGES:
        places |= {name: f"flexmask.{package}.{name}" for name in import_module(f"flexmask.{package}").__all__}
    return places
