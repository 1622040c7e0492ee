"""The masks that the layers of a model use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from flexmask import Mask
from flexmask_transformers.arguments import check_model

__all__ = ["evaluated", "masks_of", "record", "using"]

_RECORD: ContextVar[dict[int, Mask] | None] = ContextVar("flexmask_transformers.record", default=None)


def masks_of(model: Any, **inputs: Any) -> dict[str, Mask]:
    """The mask that each attention layer of a model uses with flexmask for some inputs: to print, draw, compare and test.

    The model runs once, without gradients, in evaluation mode and with ``attn_implementation="flexmask"``; then it is as before.
    With an implementation of its own, such as ``"sdpa"``, it may use other masks: see :func:`check_packing`.

    Args:
        model: a model of transformers.
        inputs: the arguments of its forward, such as ``input_ids``, ``attention_mask`` and ``position_ids``.

    Returns:
        The mask of each layer under the layer's name, such as ``"model.layers.0.self_attn"``. Its queries start at 0 also with a
        cache. With one query it is a table.

    Raises:
        OperandError: no model of transformers.
        ValueError: the model does not support flexmask.
    """
    check_model(model, "masks_of")
    found: dict[int, Mask] = {}
    before = _RECORD.set(found)
    try:
        with using(model, "flexmask"), evaluated(model), torch.no_grad():
            model(**inputs)
    finally:
        _RECORD.reset(before)
    names = {id(module): name for name, module in model.named_modules()}
    return {names[module]: mask for module, mask in found.items()}


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
