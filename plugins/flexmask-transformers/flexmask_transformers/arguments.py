"""Checks of what users give to a model: the model itself, its tokens, and the tensors that are its ``attention_mask``."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from flexmask import Mask
from flexmask._sync import assert_async
from flexmask.errors import LoweringError, OperandError

__all__ = [
    "GivenMask",
    "as_cells",
    "check_attention_mask",
    "check_model",
    "check_padding",
    "check_rows",
    "is_readable",
    "is_user_mask",
    "is_whole_mask",
    "require",
    "require_none",
    "truth_values",
]


class GivenMask:
    """A mask of flexmask on its way through a model, as its ``attention_mask``: an error where the model itself reads it.

    Attributes:
        mask: the Mask, its text or a mask_mod.
        model: the name of the class of the model.
    """

    def __init__(self, mask: Any, model: str) -> None:
        self.mask, self.model = mask, model

    def _refuse(self, *_: Any) -> NoReturn:
        raise OperandError(
            f"{self.model} itself reads its attention_mask, which must then be a tensor. Give your mask with "
            "flexmask_transformers.use_mask(model, mask, combine='replace')"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # of Python, which asks whether there is one
            raise AttributeError(name)
        self._refuse()

    __getitem__ = __len__ = __contains__ = __bool__ = __invert__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __and__ = __rand__ = __or__ = __ror__ = _refuse
    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        for given in (*args, *(kwargs or {}).values()):
            for value in given if isinstance(given, list | tuple) else (given,):
                if isinstance(value, cls):
                    value._refuse()
        raise AssertionError("torch calls it for an argument of this class")


def is_readable(tensor: Tensor) -> bool:
    """Whether values can be read without a host sync."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def require(condition: Tensor, message: str, kind: type[Exception] = OperandError) -> None:
    """An error unless a truth value holds. Where reading it would force a host sync, it is an error where the model runs."""
    if not is_readable(condition):
        assert_async(condition, message)
    elif not condition:
        raise kind(message)


def require_none(tokens: Tensor, message: str, what: str) -> None:
    """An error where ``bool[B, S]`` holds for a token, whose place follows ``message`` and ``what``.

    Raises:
        LoweringError: it does. Where reading it would force a host sync, it is an error where the model runs.
    """
    if not is_readable(tokens):
        assert_async(~tokens, message)
    elif tokens.any():
        row, token = tokens.nonzero()[0].tolist()
        raise LoweringError(f"{message}; {what} at token {token} of row {row}")


def is_user_mask(value: object) -> bool:
    """Whether an ``attention_mask`` is a mask of flexmask: a Mask, a text, a mask_mod, or a dict of them."""
    if isinstance(value, dict):
        return bool(value) and all(map(is_user_mask, value.values()))
    return isinstance(value, GivenMask | Mask | str) or (
        callable(value) and not isinstance(value, Tensor) and not hasattr(value, "shape")
    )


def is_whole_mask(value: object) -> bool:
    """Whether an ``attention_mask`` replaces the model's own: a mask of flexmask, a tensor of four axes, or a dict of them."""
    if isinstance(value, dict):
        return bool(value) and all(map(is_whole_mask, value.values()))
    return (type(value) is Tensor and value.dim() == 4) or is_user_mask(value)


def check_model(model: object, function: str) -> None:
    """Raises an OperandError for what is no model of transformers."""
    if not isinstance(model, torch.nn.Module) or not hasattr(model, "set_attn_implementation"):
        what = model.__name__ if isinstance(model, type) else type(model).__name__
        raise OperandError(f"{function} takes a model of transformers, such as one of AutoModelForCausalLM, got {what}")


def check_attention_mask(mask: object, embeds: Tensor) -> None:
    """Checks the ``attention_mask`` that a model gives to its mask, with the embeddings ``[B, q_len, channels]`` of its tokens.

    Raises:
        LoweringError: there are no tokens.
        OperandError: no tensor of two or four axes, additive values with two axes, or a tensor without values.
    """
    if 0 in embeds.shape[:2]:
        raise LoweringError(f"the model got tokens {list(embeds.shape[:2])}; give at least one row of at least one token")
    if mask is None:
        return
    axes = mask.dim() if isinstance(mask, Tensor) else len(getattr(mask, "shape", ()))
    if not (isinstance(mask, Tensor) and axes == 2) and axes != 4:
        what = f"a tensor {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise OperandError(
            f"attention_mask must be a tensor [B, tokens] or [B, H, q_len, kv_len], a Mask, its text or a mask_mod, got {what}"
        )
    if not isinstance(mask, Tensor):
        return
    if mask.device.type == "meta" and embeds.device.type != "meta":
        raise OperandError(f"attention_mask is on meta, without values, and the model on {embeds.device.type}")
    if axes == 2 and mask.is_floating_point():
        message = (
            f"a 2-D attention_mask has 1 for real tokens and 0 for padding; this one, of {_name(mask.dtype)}, has other values. "
            "Of an additive mask give (mask == 0)"
        )
        require(((mask == 0) | (mask == 1)).all(), message)


def check_rows(keep: Tensor, batch: int) -> None:
    """Raises a LoweringError unless a 2-D mask ``bool[B, tokens]`` has a row for each of the model."""
    if len(keep) != batch:
        raise LoweringError(f"attention_mask has {len(keep)} rows, and the model got {batch}")


def check_padding(keep: Tensor, q_len: int, kv_end: int, q_offset: int | Tensor) -> None:
    """Checks the length of a 2-D mask of a decoder.

    Args:
        keep: ``bool[B, tokens]``.
        q_len: the number of queries.
        kv_end: the position behind the last key; a static cache has free places.
        q_offset: the position of the first query, which is the number of tokens in the cache.

    Raises:
        LoweringError: another number of tokens.
    """
    length = keep.shape[1]
    if isinstance(q_offset, Tensor):  # of a static cache, for which a longer mask is usual
        if is_readable(q_offset):
            q_offset = int(q_offset)
        else:
            message = f"attention_mask has {length} tokens, fewer than the cache and the {q_len} of this call"
            require(q_offset + q_len <= length, message, LoweringError)
            return
        fits = q_offset + q_len <= length
    else:
        fits = q_offset + q_len <= length <= max(kv_end, q_offset + q_len)
    if not fits:
        cached = f"{q_offset} tokens in the cache and {q_len} of this call" if q_offset else f"{q_len} tokens"
        raise LoweringError(f"attention_mask has {length} tokens for {cached}; it must have {q_offset + q_len}")


def as_cells(mask: Tensor, query: Tensor, kv_len: int) -> Tensor:
    """A mask of four axes as ``bool``, or additive ``float`` of the dtype of the query.

    Args:
        mask: ``bool``, integers 0 and 1, or additive ``float``, each ``[B or 1, H or 1, q_len or 1, kv_len or 1]``.
        query: ``[B, H, q_len, D]``.
        kv_len: the number of keys.

    Raises:
        LoweringError: another shape or device.
        OperandError: another dtype, or integers that are not 0 or 1.
    """
    wanted = (*query.shape[:3], kv_len)
    if not all(own == 1 or own == size for own, size in zip(mask.shape, wanted, strict=True)):
        raise LoweringError(f"attention_mask must be {list(wanted)} or have 1 in their place, got {list(mask.shape)}")
    if mask.device != query.device:
        raise LoweringError(f"attention_mask is on {mask.device}, and the model on {query.device}; move it with .to(...)")
    if mask.is_floating_point():
        return mask.to(query.dtype).clamp(min=torch.finfo(query.dtype).min)  # -inf in a whole row would give NaN
    return truth_values(mask)


def truth_values(mask: Tensor) -> Tensor:
    """A mask of four axes of truth values, or of integers 0 and 1, as ``bool``."""
    if mask.dtype == torch.bool:
        return mask
    if mask.is_complex() or mask.is_floating_point():
        raise OperandError(f"a mask of four axes must be bool, integers or float, got {_name(mask.dtype)}")
    require(((mask == 0) | (mask == 1)).all(), "an integer attention_mask of four axes has 1 for visible and 0 for hidden only")
    return mask != 0


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
