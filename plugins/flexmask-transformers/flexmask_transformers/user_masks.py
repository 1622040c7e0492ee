"""The masks that users give for a model, by ``use_mask`` or as its ``attention_mask``, and what they are in one forward."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import ContextDecorator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch

from flexmask import Mask, kv
from flexmask.errors import ExpressionError, LoweringError, OperandError
from flexmask.nn import CallTokens, lookback, mask_over_cache
from flexmask.tracing import MaskLike, as_mask

__all__ = ["mask_of_call", "use_mask", "user_mask_for"]

LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")


@dataclass(eq=False)
class _UserMask:
    """A mask for the layers of some configs."""

    configs: list[Any]
    masks: Mapping[str, Mask] | Mask
    replaces: bool
    given: object  # the context manager
    is_used: bool = field(default=False)


_ACTIVE: ContextVar[tuple[_UserMask, ...]] = ContextVar("flexmask_transformers.user_masks", default=())
#: The same for graphs of ``torch.compile``, which does not trace context variables.
_OF_ALL_THREADS: list[_UserMask] = []


class use_mask(ContextDecorator):  # noqa: N801 - named like a function, as torch.no_grad is
    """Within ``with use_mask(model, mask): ...`` the attention layers of a model use a mask of your own.

    Nothing happens without ``with``, so a value that is dropped unused is a warning.

    In code that ``torch.compile`` traces it counts for all threads, and other data runs without compiling again.

    Args:
        model: a model of transformers with ``attn_implementation="flexmask"``, or a part of it, such as ``model.encoder``, whose
            config is its own.
        mask: a Mask, its text, or a ``mask_mod``, of positions in the whole sequence; or a dict of them for each layer type,
            ``"full_attention"``, ``"sliding_attention"`` and ``"chunked_attention"``.
        combine: ``"and"`` for the model's own mask and this one; ``"replace"`` for this one alone, without the model's padding,
            windows and documents, also those of ``cu_seq_lens`` and ``seq_idx``.
        data: the data of the parameters in the mask, such as ``ids=tensor``. In ``generate`` it has values for the prompt and for
            the new tokens.

    Raises:
        OperandError: the model has another ``attn_implementation``, or the mask is none.
        ExpressionError: another value of ``combine``, or another layer type; an unknown or missing parameter of the masks; no
            layer of the model used the mask.
        LoweringError: in a forward, data that ends before the tokens do, or with ``"replace"`` a mask whose expression does
            not leave out the keys which the cache of a sliding layer has dropped.
    """

    _is_used = True  # where an argument is refused

    def __init__(
        self,
        model: torch.nn.Module,
        mask: MaskLike | Mapping[str, MaskLike],
        *,
        combine: Literal["and", "replace"] = "and",
        **data: Any,
    ) -> None:
        if combine not in ("and", "replace"):
            raise ExpressionError(f"combine must be 'and' or 'replace', got {combine!r}")
        if not isinstance(model, torch.nn.Module):
            raise OperandError(f"use_mask takes a model of transformers or a part of one, got {type(model).__name__}")
        configs = [module.config for module in model.modules() if hasattr(module, "config")]
        chosen = {getattr(config, "_attn_implementation", None) for config in configs}
        if "flexmask" not in chosen:
            raise OperandError(
                f"use_mask needs a model of transformers with attn_implementation='flexmask', got {type(model).__name__} with "
                f"{', '.join(sorted(map(repr, chosen))) or 'none'}; call model.set_attn_implementation('flexmask')"
            )
        self._model, self._configs, self._masks, self._replaces = model, configs, _bound(mask, data), combine == "replace"
        self._is_used = False

    def __enter__(self) -> None:
        self._is_used = True
        own = _UserMask(self._configs, self._masks, self._replaces, self)
        _ACTIVE.set((*_ACTIVE.get(), own))
        _OF_ALL_THREADS.append(own)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        active = _ACTIVE.get()  # of this thread, others of which may have entered too
        own = next(one for one in reversed(active) if one.given is self)
        _ACTIVE.set(tuple([one for one in active if one is not own]))
        _OF_ALL_THREADS.remove(own)
        if kind is None and not own.is_used:
            raise ExpressionError(
                f"no attention layer of {type(self._model).__name__} used the mask: the model was not called, or makes no mask"
            )

    def __del__(self) -> None:
        if not self._is_used:
            warnings.warn("use_mask(...) did nothing: write `with use_mask(model, mask): ...` around the calls", stacklevel=2)


class UserMask(NamedTuple):
    """The mask of the user for a layer type.

    Attributes:
        mask: the mask; None where there is none.
        replaces: whether it replaces the model's own.
        is_whole: whether it replaces documents of ``cu_seq_lens`` and ``seq_idx`` as well.
    """

    mask: Mask | None
    replaces: bool
    is_whole: bool


def user_mask_for(config: Any, layer_type: str, given: Any) -> UserMask:
    """The mask of the user for a layer type.

    Args:
        config: the config of the model that asks.
        layer_type: such as ``"full_attention"``.
        given: what the caller gave as ``attention_mask`` where that is a mask of flexmask; it replaces the model's own.
    """
    mask = None if given is None else _select_type(given, layer_type)
    replaces, is_whole = mask is not None, False
    for active in _OF_ALL_THREADS if torch.compiler.is_compiling() else _ACTIVE.get():
        if not any(config is own for own in active.configs):
            continue
        own = _select_type(active.masks, layer_type)
        if own is None:
            continue
        active.is_used = True  # never read here: a graph of torch.compile would depend on it
        if active.replaces:
            mask, replaces, is_whole = own, True, True
        else:
            mask = own if mask is None else mask & own
    return UserMask(mask, replaces, is_whole)


def mask_of_call(mask: Mask, tokens: CallTokens, *, has_cache: bool, replaces: bool) -> Mask:
    """The mask of the user over the keys of one forward, which are those in a cache if there is one.

    Args:
        mask: a mask of positions in the whole sequence. Its data may have more values than there are tokens so far.
        tokens: the queries, and the keys, of which a static cache has some behind the queries that are free.
        has_cache: whether there is a cache.
        replaces: whether the mask replaces the model's own, which shows no dropped keys and no free places.

    Raises:
        LoweringError: its expression may show keys that the cache has dropped, it depends on lengths that grow, or its data
            ends too early.
    """
    q_offset, kv_start, end = tokens.q_offset, tokens.kv_start, tokens.kv_end
    assert isinstance(q_offset, int)
    assert isinstance(kv_start, int)
    if tokens.q_len == end and mask.symbols & {"q_len", "kv_len"}:
        return mask  # of all tokens, so that lengths are known
    if tokens.q_len != end and q_offset == 0 and not has_cache:
        return mask  # of the keys of an encoder or a prefix
    if replaces and kv_start:
        window, most = q_offset - kv_start + 1, lookback(mask)
        if most is None or most >= window:
            raise LoweringError(
                f"the expression of {mask.brief()} lets queries attend to keys before position {kv_start}, which the cache of a "
                "layer with a sliding window has dropped: give use_cache=False, past_key_values=DynamicCache() for a cache of "
                f"all keys, or limit the mask, mask & sliding_window(size={window})"
            )
    over_keys, behind = mask_over_cache(mask, tokens), q_offset + tokens.q_len
    return over_keys & (kv < behind - kv_start) if replaces and behind < end else over_keys


def _select_type(masks: Any, layer_type: str) -> Mask | None:
    if isinstance(masks, Mapping):
        masks = masks.get(layer_type)
    return None if masks is None else as_mask(masks, "attention_mask")


def _bound(mask: MaskLike | Mapping[str, MaskLike], data: Mapping[str, Any]) -> Mask | dict[str, Mask]:
    if not isinstance(mask, Mapping):
        return _without_parameters(as_mask(mask).bind(**data))
    for name in mask:
        if name not in LAYER_TYPES:
            raise ExpressionError(f"a layer type of masks is one of {', '.join(LAYER_TYPES)}; got {name!r}")
    masks = {name: as_mask(own) for name, own in mask.items()}
    unknown = set(data).difference(*(own.params for own in masks.values()))
    if unknown:
        raise ExpressionError(f"no mask of the dict has a parameter {', '.join(sorted(unknown))}")
    bound = {name: own.bind(**{key: data[key] for key in own.params if key in data}) for name, own in masks.items()}
    return {name: _without_parameters(own) for name, own in bound.items()}


def _without_parameters(mask: Mask) -> Mask:
    """The mask, where all its parameters have got their data."""
    if mask.params:
        calls = ", ".join(f"{name}=..." for name in mask.params)
        raise ExpressionError(f"the mask {mask.brief()} has parameters that are not given: write use_mask(model, mask, {calls})")
    return mask
