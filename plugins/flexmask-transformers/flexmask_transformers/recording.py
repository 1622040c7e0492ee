"""The masks that the layers of a model use."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import AttentionInterface

from flexmask import Mask, causal, full
from flexmask.errors import ExpressionError, OperandError
from flexmask_transformers.arguments import check_model
from flexmask_transformers.model_mask import to_mask

__all__ = ["evaluated", "masks_of", "record", "using"]

_RECORD: ContextVar[dict[int, Mask] | None] = ContextVar("flexmask_transformers.record", default=None)


def masks_of(model: Any, *, attention: Literal["flexmask", "sdpa", "eager"] = "flexmask", **inputs: Any) -> dict[str, Mask]:
    """The mask that each attention layer of a model uses for some inputs: to print, draw, compare and test.

    The model runs once, without gradients, in evaluation mode and with this ``attn_implementation``; then it is as before.

    Args:
        model: a model of transformers.
        attention: ``"sdpa"`` and ``"eager"`` show the masks of transformers' own implementations, which may leak between packed
            documents: see :func:`check_packing`. These are tensors; :meth:`flexmask.Mask.recognize` finds their names.
        inputs: the arguments of its forward, such as ``input_ids``, ``attention_mask`` and ``position_ids``.

    Returns:
        The mask of each layer under the layer's name, such as ``"model.layers.0.self_attn"``. Its queries start at 0 also with a
        cache. With flexmask and one query it is a table. Layers that do not call transformers' attention have none.

    Raises:
        OperandError: no model of transformers, or with ``"sdpa"`` or ``"eager"`` no layer that calls its attention, or a position
            bias in a mask.
        ExpressionError: another ``attention``.
        ValueError: the model does not support the ``attention``.
    """
    check_model(model, "masks_of")
    if attention not in ("flexmask", "sdpa", "eager"):
        raise ExpressionError(f"masks_of: attention must be 'flexmask', 'sdpa' or 'eager', got {attention!r}")
    found: dict[int, Mask] = {}
    before = _RECORD.set(found)
    try:
        observed = nullcontext() if attention == "flexmask" else _observed()
        with using(model, attention), evaluated(model), observed, torch.no_grad():
            model(**inputs)
    finally:
        _RECORD.reset(before)
    if not found and attention != "flexmask":
        raise OperandError(
            f"no layer of {type(model).__name__} calls the attention of transformers, so that it has no mask to show"
        )
    names = {id(module): name for name, module in model.named_modules()}
    return {names[module]: mask for module, mask in found.items()}


@contextmanager
def _observed() -> Iterator[None]:
    """Records the masks with which layers call the attention of transformers."""
    original = AttentionInterface.get_interface
    known: dict[int, tuple[Tensor, Mask]] = {}  # the layers share a tensor

    def as_mask(tensor: Tensor, kv_len: int) -> Mask:
        if id(tensor) not in known:
            known[id(tensor)] = (tensor, to_mask(tensor[..., :kv_len]))  # a static cache may have free places
        return known[id(tensor)][1]

    def get_interface(self: AttentionInterface, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        function = original(self, name, default)

        @functools.wraps(function)
        def attend(
            module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *rest: Any, **options: Any
        ) -> Any:
            given = options.get("is_causal")
            is_causal = name == "sdpa" and query.shape[2] > 1 and (getattr(module, "is_causal", True) if given is None else given)
            own = causal() if is_causal else full()
            record(module, lambda: own if mask is None else as_mask(mask, key.shape[2]))
            return function(module, query, key, value, mask, *rest, **options)

        return attend

    AttentionInterface.get_interface = get_interface
    try:
        yield
    finally:
        AttentionInterface.get_interface = original


def record(module: torch.nn.Module, mask: Callable[[], Mask]) -> None:
    """Records the mask of a layer for :func:`masks_of`; does nothing outside of it."""
    if torch.compiler.is_compiling():
        return
    found = _RECORD.get()
    if found is not None:
        found[id(module)] = mask()


@contextmanager
def evaluated(model: Any) -> Iterator[None]:
    """Puts a model into evaluation mode within a ``with`` block; each module is then in its own mode again."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def using(model: Any, implementation: str) -> Iterator[None]:
    """Gives a model another ``attn_implementation`` within a ``with`` block.

    Raises:
        ValueError: the model does not support it.
    """
    configs = [module.config for module in model.modules() if hasattr(module, "config")]
    before = [(config, config._attn_implementation) for config in configs]
    model.get_correct_attn_implementation(implementation)
    try:
        model.set_attn_implementation(implementation)
        yield
    finally:
        for config, own in before:
            config._attn_implementation_internal = own
