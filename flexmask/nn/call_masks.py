"""The masks that a module is made with or called with: the Mask that they stand for, with the parameters of the call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexmask._checks import kind_of
from flexmask.backends.api import described, unknown_names
from flexmask.errors import ExpressionError, OperandError
from flexmask.expr.mask import Mask
from flexmask.nn.convert import EQUIVALENTS
from flexmask.nn.kv_cache import KVCache
from flexmask.plans.api import Plan
from flexmask.plans.lowered import LoweredMask
from flexmask.tracing.trace import as_mask

if TYPE_CHECKING:
    from flexmask.nn.multihead import MultiheadFlexAttention

#: A mask, or what it was lowered to.
AnyMask: TypeAlias = Mask | LoweredMask | BlockMask

#: The arguments of forward, which no parameter of a mask may be named like.
RESERVED = {"self", "x", "mask", "context", "cache", "positions", "return_qk"}
EXAMPLE = 'module(x, "key_padding(n)", n=n)'


def bound_mask(
    module: MultiheadFlexAttention, mask: Any, parameters: dict[str, Any], device: torch.device, *, bind: bool
) -> AnyMask | None:
    """The mask of a call, with its parameters bound where ``bind`` is True.

    Raises:
        ExpressionError: an unknown or missing parameter of the mask.
        OperandError: no mask.
    """
    if isinstance(mask, Tensor) and mask.is_floating_point() and mask.dim() == 3 and mask.shape[-1] == module.d_context:
        raise OperandError(f"mask is {kind_of(mask)}: where keys and values come from it, call module(x, mask, context=tensor)")
    if isinstance(mask, KVCache):
        raise OperandError("mask is a KVCache: give it as cache=, module(x, mask, cache=cache)")
    if isinstance(mask, Plan):
        raise OperandError("mask is a plan: call it with the mask's data, as in module(x, plan(cu=cu))")
    mask = module.mask if mask is None else mask if isinstance(mask, LoweredMask | BlockMask) else module_mask(mask, device)
    wanted = set(mask.params) if isinstance(mask, Mask) else set()
    missing, unknown = sorted(wanted - set(parameters)), sorted(set(parameters) - wanted)
    if unknown:
        message = unknown_names("MultiheadFlexAttention.forward", unknown, mask, RESERVED - {"self"}, EXAMPLE)
        raise ExpressionError(message + "".join(f"\n  {name}: {EQUIVALENTS[name]}" for name in unknown if name in EQUIVALENTS))
    if missing:
        calls = ", ".join(f"{name}=..." for name in missing)
        raise ExpressionError(f"{described(mask)} has parameters that are not given: call the module with {calls}")
    return cast(Mask, mask).bind(**parameters) if bind and parameters else cast("AnyMask | None", mask)


def unplaced(others: tuple[Any, ...]) -> str:
    """The message for arguments of forward by position after the mask."""
    taken = f"MultiheadFlexAttention.forward takes x and a mask by position, got {len(others)} more"
    if isinstance(others[0], KVCache):
        return f"{taken}: give the KVCache as cache="
    return (
        f"{taken}: where torch's module is called with query, key and value, call this one with module(x), or "
        "module(x, context=key) where the keys come from elsewhere. Layers of torch, such as nn.TransformerEncoderLayer, cannot "
        "call it"
    )


def module_mask(mask: object, device: torch.device | None = None) -> Mask | None:
    """The mask that an argument of the module stands for, whose parameters are not named like arguments of forward."""
    if mask is None:
        return None
    if isinstance(mask, BlockMask):
        raise OperandError("mask is a BlockMask; give it to forward, as it is for one length, or give the Mask it was made from")
    found = as_mask(mask, also="None", device=device)
    if taken := sorted(RESERVED & set(found.params)):
        raise ExpressionError(f"{found.brief()} has the parameter {', '.join(taken)}, which forward takes itself; rename it")
    return found
