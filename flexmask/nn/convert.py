"""Conversion of sizes and weights from and to ``torch.nn.MultiheadAttention``, and the equivalents of its arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from flexmask._checks import kind_of
from flexmask.backends.api import PADDING_MASKS
from flexmask.errors import LoweringError, OperandError

if TYPE_CHECKING:
    from flexmask.nn.multihead import MultiheadFlexAttention

#: For arguments of other attention modules, what to write here. In torch's module True means masked out, here it means attend.
EQUIVALENTS = {
    "is_causal": "write mask='causal', in a decoding step together with cache=",
    "attn_mask": "here it is mask=: of torch.nn.MultiheadAttention's, whose True is for hidden, ~flexmask.from_dense(attn_mask); "
    "of scaled_dot_product_attention's, whose True is for visible, flexmask.from_dense(attn_mask); of an additive one, "
    "flexmask.from_dense(attn_mask == 0)",
    **PADDING_MASKS,
    "need_weights": "leave it out; for need_weights=True call module.attention_weights(x, mask), which gives "
    "float[B, n_heads, q_len, kv_len]",
    "average_attn_weights": "take module.attention_weights(x, mask).mean(1)",
    "output_attentions": "call module.attention_weights(x, mask), which gives float[B, n_heads, q_len, kv_len]",
    "query": "it is x",
    "key": "keys and values come from context=, or from x where that is left out",
    "value": "keys and values come from context=, or from x where that is left out",
    "position_ids": "it is positions=",
    "q_offset": "cache= has the position of the first query; positions= is for rope, and flexmask.attention takes q_offset=",
    "past_key_value": "it is cache=flexmask.KVCache(capacity)",
    "past_key_values": "it is cache=flexmask.KVCache(capacity)",
}
#: For the state of a ``torch.nn.MultiheadAttention``.
NOT_LOADED = (
    "the state is that of a torch.nn.MultiheadAttention: load it into one, and make this module from it, "
    "MultiheadFlexAttention.from_torch(module)"
)
#: For arguments with which other attention modules are made, what to write here.
SIZES = {
    "add_bias_kv": "it has no counterpart: no mask can hide the keys that it adds",
    "add_zero_attn": "it has no counterpart: no mask can hide the key that it adds",
    "batch_first": "the batch is always first, x is [B, length, d_in]",
    "embed_dim": "write d_in= and d_out=",
    "head_dim": "write d_head=",
    "kdim": "write d_context=",
    "num_heads": "write n_heads=",
    "num_key_value_heads": "write n_kv_heads=",
    "vdim": "write d_context=",
}


def sizes_from_torch(module: nn.MultiheadAttention, batch_first: bool) -> dict[str, Any]:
    """The arguments with which a :class:`flexmask.MultiheadFlexAttention` computes the same.

    Args:
        module: torch's module.
        batch_first: whether the calls will give the batch first, where those of ``module`` do not.

    Raises:
        OperandError: not a ``torch.nn.MultiheadAttention``.
        LoweringError: it has no counterpart: keys and values of two widths, ``add_bias_kv``, ``add_zero_attn``; or its calls give
            the length first.
    """
    if not isinstance(module, nn.MultiheadAttention):
        raise OperandError(f"from_torch takes a torch.nn.MultiheadAttention, got {_kind(module)}")
    if module.kdim != module.vdim:
        raise LoweringError(f"kdim={module.kdim} and vdim={module.vdim} differ, but keys and values come from one context here")
    if module.bias_k is not None or module.add_zero_attn:
        raise LoweringError("add_bias_kv and add_zero_attn add keys that no mask can hide; they have no counterpart here")
    if not (module.batch_first or batch_first):
        raise LoweringError(
            f"the module has batch_first=False, so its calls give [length, B, {module.embed_dim}]. Here the batch is always "
            "first: give x.transpose(0, 1) in each call, and say so by from_torch(module, batch_first=True)"
        )
    return {
        "d_in": module.embed_dim,
        "d_out": module.embed_dim,
        "n_heads": module.num_heads,
        "bias": module.in_proj_bias is not None,
        "out_bias": module.out_proj.bias is not None,
        "dropout": module.dropout,
        "d_context": None if module.kdim == module.embed_dim else module.kdim,
        "device": module.out_proj.weight.device,
        "dtype": module.out_proj.weight.dtype,
    }


def _names(module: nn.MultiheadAttention) -> dict[str, tuple[str, ...]]:
    """For each layer of ours the weights of torch's module that are stacked in it."""
    if module.kdim == module.embed_dim:
        return {"in_proj": ("in_proj_weight",)}
    return {"q_proj": ("q_proj_weight",), "kv_proj": ("k_proj_weight", "v_proj_weight")}


@torch.enable_grad()
def state_from_torch(module: nn.MultiheadAttention) -> dict[str, Tensor]:
    """The state of a :class:`flexmask.MultiheadFlexAttention` with the same weights; one of several is trainable if any is."""
    out = {"out_proj.weight": module.out_proj.weight, "out_proj.bias": cast("Tensor | None", module.out_proj.bias)}
    state: dict[str, Tensor] = {name: weight for name, weight in out.items() if weight is not None}
    stacked = {ours: torch.cat([getattr(module, name) for name in theirs]) for ours, theirs in _names(module).items()}
    state |= {f"{ours}.weight": weight for ours, weight in stacked.items()}
    if module.in_proj_bias is not None:
        biases = module.in_proj_bias.split([len(weight) for weight in stacked.values()])
        state |= {f"{ours}.bias": bias for ours, bias in zip(stacked, biases, strict=True)}
    return state


def load_weights(module: nn.Module, state: dict[str, Tensor]) -> None:
    """Copies weights into a module, each of which is then trainable where the one in ``state`` is."""
    module.load_state_dict(state)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(state[name].requires_grad)


@torch.enable_grad()
def to_torch(module: MultiheadFlexAttention, batch_first: bool) -> nn.MultiheadAttention:
    """A ``torch.nn.MultiheadAttention`` with the same weights; a bias that only one side has is 0, and trainable.

    Args:
        module: the module.
        batch_first: as in torch's module.

    Raises:
        LoweringError: torch's module has no counterpart: widths that differ, grouped queries, ``rope``, ``score_mod``, ``scale``;
            or a projection is not a plain ``Linear``, as one with an adapter or a quantized weight.
    """
    width, state = module.d_out, module.state_dict(keep_vars=True)
    differs = {
        "d_in": module.d_in != width,
        "d_head": module.d_head * module.n_heads != width,
        "n_kv_heads": module.n_kv_heads != module.n_heads,
        **{name: getattr(module, name) is not None for name in ("rope", "score_mod", "scale")},
    }
    if any(differs.values()):
        raise LoweringError(
            "torch.nn.MultiheadAttention has one width d_in = d_out = n_heads * d_head, as many key heads as query heads, and no "
            f"rope, score_mod or scale; this module differs in {', '.join(name for name, differ in differs.items() if differ)}"
        )
    for name, projection in module.named_children():
        if name in ("in_proj", "q_proj", "kv_proj", "out_proj"):
            held = {key.removeprefix(f"{name}."): tensor for key, tensor in state.items() if key.startswith(f"{name}.")}
            if not is_linear(projection) or held.keys() | {"bias"} != {"weight", "bias"} or not _is_plain(held["weight"]):
                given = ", ".join(f"{key} {kind_of(tensor)}" for key, tensor in held.items())
                raise LoweringError(
                    f"torch's module takes the weight and bias of a torch.nn.Linear; {name} is of the class {_kind(projection)} "
                    f"and has {given or 'no tensors'}: merge adapters, dequantize, remove parametrizations and offloading"
                )
    context = None if module.d_context == width else module.d_context
    theirs = nn.MultiheadAttention(
        width,
        module.n_heads,
        dropout=module.dropout,
        bias=bool({"in_proj.bias", "q_proj.bias", "out_proj.bias"} & set(state)),
        kdim=context,
        vdim=context,
        batch_first=batch_first,
        device=state["out_proj.weight"].device,
        dtype=state["out_proj.weight"].dtype,
    )
    made = {name: torch.zeros_like(weight, requires_grad=True) for name, weight in theirs.state_dict().items()}
    made |= {name: weight for name, weight in state.items() if name in made}  # of the output
    for ours, names in _names(theirs).items():
        made |= zip(names, state[f"{ours}.weight"].chunk(len(names)), strict=True)
    biases = [state[f"{ours}.bias"] for ours in _names(theirs) if f"{ours}.bias" in state]
    if biases:
        made["in_proj_bias"] = torch.cat(biases)
    load_weights(theirs, made)
    return theirs


def is_linear(module: nn.Module) -> bool:
    """Whether a module computes what ``torch.nn.Linear`` does: what adapts or offloads one replaces its ``forward``.

    Dynamo has a guard on the method, but none on its absence among the attributes of a module.
    """
    return getattr(module.forward, "__func__", None) is nn.Linear.forward


def _is_plain(weight: Tensor) -> bool:
    """Whether a weight has the numbers that a layer computes with: not one of codes, nor a part of one on this rank."""
    return type(weight) in (Tensor, nn.Parameter) and weight.itemsize > 1


def _kind(module: object) -> str:
    """The class of a module with its package, as adapters have the names of what they replace."""
    return f"{type(module).__name__} of {type(module).__module__}"
