"""Where a name is that someone looks for at the top of flexmask."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from importlib import import_module

from flexmask import registry

__all__ = ["suggestion"]

#: The packages whose ``__all__`` is public.
PACKAGES = ("backends", "errors", "expr", "intervals", "lowering", "nn", "plotting.mpl", "registry", "report", "testing")
#: What other libraries call a thing that has another name here.
GUESSES = {
    "additive": "mask.dense(q_len) gives a boolean tensor; torch.where(dense, 0.0, -torch.inf) makes it additive",
    "and_masks": "masks are joined with &",
    "bidirectional": "flexmask.full()",
    "block_mask": "mask.block_mask(q_len)",
    "create_mask": "mask.dense(q_len)",
    "dense": "flexmask.from_dense(table), or of a mask mask.dense(q_len)",
    "dilated": "flexmask.masks.dilated_window(...)",
    "flex_attention": "flexmask.attention(query, key, value, mask)",
    "local": "flexmask.sliding_window(left=..., right=...)",
    "longformer": "flexmask.masks.global_window(...)",
    "mask_mod": "mask.mask_mod(q_len)",
    "materialize": "mask.dense(q_len)",
    "noop": "flexmask.full()",
    "noop_mask": "flexmask.full()",
    "or_masks": "masks are joined with |",
    "packed": "flexmask.document(lengths=[...])",
    "packing": "flexmask.document(lengths=[...])",
    "padding": "flexmask.key_padding(lengths=[...])",
    "plot": "mask.plot(q_len)",
    "scaled_dot_product_attention": "flexmask.attention(query, key, value, mask)",
    "sdpa": "flexmask.attention(query, key, value, mask)",
    "show": "mask.show(q_len)",
    "to_dense": "mask.dense(q_len)",
    "trace": "flexmask.from_mask_mod(mask_mod)",
    "visualize": "mask.show(q_len) in the terminal, mask.plot(q_len) with matplotlib",
    "window": "flexmask.sliding_window(left=..., right=...)",
}


def suggestion(name: str, top: Iterable[str]) -> str:
    """What to write for a name, as the end of a message; nothing where none is near.

    Args:
        name: what was looked for.
        top: the names at the top of the package.
    """
    if name in GUESSES:
        return f". Write {GUESSES[name]}"
    places = {known: f"flexmask.masks.{known}" for known in registry.names()}
    for package in PACKAGES:
        places |= {known: f"flexmask.{package}.{known}" for known in import_module(f"flexmask.{package}").__all__}
    places |= {known: f"flexmask.{known}" for known in top}
    if name in places:
        return f". It is {places[name]}"
    close = get_close_matches(name, places, n=1)
    return f". Did you mean {places[close[0]]}?" if close else ""
