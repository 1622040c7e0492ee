"""Calls of the functions that users check, and what to write where a call fails or lacks an argument."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from inspect import Parameter
from typing import Any

import torch
from torch import Tensor, nn

from flexmask.errors import LoweringError, OperandError

#: Names of parameters for masks, here and in other libraries.
MASKS = {"mask", "attn_mask", "attention_mask", "attn_bias", "src_mask", "tgt_mask", "block_mask", "is_causal"}


def output_of(function: Callable[..., Any], x: Tensor, given: Mapping[str, Any], note: str = "") -> Tensor:
    """The output ``[B, length, ...]`` of ``function(x, name=value, ...)``; of a tuple the first item.

    Args:
        function: a module or function.
        x: ``[B, length, ...]``.
        given: its other arguments, by name.
        note: what to write, for the message where the function fails.

    Raises:
        LoweringError: the output has other sequences or another length than ``x``.
        OperandError: the function fails, or gives no tensor.
    """
    __tracebackhide__ = True
    try:
        out = function(x, **given)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever a function of the user raises
        raise OperandError(
            f"the function fails where it is called as {call_text(given)}: {type(error).__name__}: {error}\n"
            f"{note or 'If your code calls it in another way, write that call as a lambda'}"
        ) from error
    if isinstance(out, tuple):
        out = out[0]
    if not isinstance(out, Tensor):
        raise OperandError(f"the function must give a tensor [B, length, ...], got {type(out).__name__}")
    if out.shape[:2] != x.shape[:2]:
        raise LoweringError(f"the output must be [B, length, ...] = {[*x.shape[:2]]} and more, got {list(out.shape)}")
    return out


def call_text(names: Iterable[str]) -> str:
    """A call as code, e.g. ``function(x, context=context)``."""
    return f"function({', '.join(['x', *(f'{name}={name}' for name in names)])})"


def required_parameters(function: Callable[..., Any]) -> list[str]:
    """The names of the parameters without a default, after the first parameter."""
    return [parameter.name for parameter in _others(function) if _is_required(parameter)]


def missing_arguments(function: Callable[..., Any], given: Collection[str]) -> str:
    """The required parameters of a function, and the first one for a mask, that a call lacks, and how to give them.

    Empty where there are none. A module with a mask of its own needs no other.
    """
    others = [parameter for parameter in _others(function) if parameter.name not in given]
    own = isinstance(function, nn.Module) and getattr(function, "mask", None) is not None
    masks = [] if own else [parameter.name for parameter in others if parameter.name in MASKS][:1]
    names = [parameter.name for parameter in others if _is_required(parameter) or parameter.name in masks]
    if not names:
        return ""
    wrapped = f"lambda {', '.join(['x', *given])}: {call_text([*given, *names])}"
    lines = [
        f"The check calls {call_text(given)}, without {', '.join(names)}: it gives the function no mask and no other argument.",
        f"Write the call of your code: assert_no_leak({wrapped}, ...)",
    ]
    if masks:
        lines.append(
            f"with {masks[0]} as your code gives it: a flexmask mask, the tensor of a tokenizer, or cells. Where True means "
            "visible, as in scaled_dot_product_attention, these are mask.dense(length)[0, 0]; where True means hidden, as in "
            "torch.nn.MultiheadAttention and TransformerEncoderLayer, ~mask.dense(length)[0, 0]"
        )
    return "\n".join(lines)


def _is_required(parameter: Parameter) -> bool:
    """Whether a call must give a parameter."""
    return parameter.default is Parameter.empty and parameter.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


def _others(function: Callable[..., Any]) -> list[Parameter]:
    """The parameters of a function or module after the first; none of a function in C, which has no signature."""
    try:
        return [*inspect.signature(function.forward if isinstance(function, nn.Module) else function).parameters.values()][1:]
    except ValueError:
        return []
