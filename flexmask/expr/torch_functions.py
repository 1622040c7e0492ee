"""The message for a torch function that is called with an expression: what to write instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

#: What to write for a torch function, by its name.
EQUIVALENTS = {
    "abs": "abs({0})",
    "absolute": "abs({0})",
    "clamp": "flexmask.minimum(flexmask.maximum({0}, low), high)",
    "floor_divide": "{0} // {1}",
    "logical_and": "{0} & {1}",
    "logical_not": "~({0})",
    "logical_or": "{0} | {1}",
    "logical_xor": "{0} ^ {1}",
    "maximum": "flexmask.maximum({0}, {1})",
    "minimum": "flexmask.minimum({0}, {1})",
    "remainder": "{0} % {1}",
    "where": "flexmask.where({0}, {1}, {2})",
}


#: What to write for torch functions that take a mask as a tensor.
TAKE_MASKS = {
    "masked_fill": "tensor.masked_fill(~mask.dense(q_len, kv_len), value), since True is visible",
    "multi_head_attention_forward": "attn_mask=~mask.dense(q_len, kv_len)[0, 0], since True is hidden there",
    "scaled_dot_product_attention": "attn_mask=mask.dense(q_len, kv_len), or flexmask.attention(query, key, value, mask)",
}


#: What to do about functions of torch that take no mask as an argument.
WITHOUT_MASKS = {
    "tag_activation_checkpoint": "In compiled code torch.utils.checkpoint takes no mask as an argument: give the layer text and "
    'data, checkpoint(layer, x, "causal & key_padding(n)", n=n), or make the mask in the function that is checkpointed',
}


def torch_function_message(function: Callable[..., Any], args: tuple[Any, ...]) -> str:
    """The message for a torch function that was called with expressions.

    Args:
        function: the torch function.
        args: its arguments by position.
    """
    name = getattr(function, "__name__", str(function)).strip("_")
    if name in WITHOUT_MASKS:
        return WITHOUT_MASKS[name]
    if name in TAKE_MASKS:
        return f"torch's function {name} takes a tensor, not a mask of flexmask. Write {TAKE_MASKS[name]}"
    if name in ("getitem", "setitem") and len(args) > 1:
        given = args[1] if isinstance(args[1], tuple) else args[1:2]
        indices = ", ".join(map(_text, given))
        return f"a tensor is not indexed with [{indices}]: wrap it as data, flexmask.table(tensor)[{_indices(given)}]"
    try:
        written = EQUIVALENTS[name].format(*map(_text, args))
    except (KeyError, IndexError):  # unknown, or called with arguments by name
        symbols = "+ - * // %, abs(), flexmask.minimum(), flexmask.maximum(), flexmask.where(), comparisons, & | ^ and ~"
        written = f"{symbols}; a mask_mod that calls torch functions is traced by flexmask.from_mask_mod(mask_mod)"
    return f"torch's function {name} takes tensors, not masks or index expressions of flexmask. Write {written}"


def _indices(given: tuple[Any, ...]) -> str:
    """Indices of a table, where a first axis that a tensor keeps by a slice is that of the sequences."""
    keeps_batch = len(given) > 1 and isinstance(given[0], slice)
    return ", ".join(["b", *map(_text, given[1:])] if keeps_batch else map(_text, given))


def _text(value: Any) -> str:
    if isinstance(value, slice) and value == slice(None):
        return ":"
    return "tensor" if hasattr(value, "dtype") else value.brief() if hasattr(value, "brief") else str(value)
