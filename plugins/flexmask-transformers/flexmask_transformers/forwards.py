"""The forwards of models that are running, and the ``position_ids`` that they got.

Many models give their ``position_ids`` to their embeddings alone, and neither to their masks nor to their attention.
`observe_all` wraps the ``forward`` of every model class of transformers, so that masks and layers find what the model itself got.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import is_peft_available

from flexmask.errors import LoweringError, OperandError
from flexmask_transformers.arguments import GivenMask, is_user_mask, is_whole_mask, require, require_none
from flexmask_transformers.layers import Layers, layers_of
from flexmask_transformers.model_mask import ModelMask, in_graph
from flexmask_transformers.packing import Documents, packing_arguments, restarts, text_positions

__all__ = ["Forward", "check_layers", "observe_all", "require_unpacked", "running"]


#: Names of embeddings of absolute positions, in the code of a model that makes these positions itself.
POSITIONS = re.compile("embed_pos|pos_embed|position_embed|wpe$")
#: The warning of a model that makes positions itself, and ignores those that it got.
IGNORED = "`position_ids` were provided but will be ignored"
#: The start of the names of arguments that a model around another one gives to its decoder, which takes them without it.
PREFIX = "decoder_"


@dataclass(eq=False)
class Forward:
    """A forward of a model with ``attn_implementation="flexmask"``.

    Attributes:
        config: the config of the model.
        position_ids: those that the model got, ``int[B or 1, S]``, or ``int[R, B, S]`` of time, height and width. None where it
            got none, or a whole mask of its caller.
        keep: its 2-D mask, ``bool[B, S]``, or None.
        packing: the ``cu_seq_lens`` and ``seq_idx`` that it got, which it may not pass on to its attention.
        mixing: its layers that combine tokens without attention, as a text.
        has_masks: whether a mask was made that has the documents of ``position_ids``.
        documents: those of its mask in a graph of ``torch.compile``.
        cache: its empty cache in a graph.
    """

    config: Any
    position_ids: Tensor | None
    keep: Tensor | None
    packing: Mapping[str, Any]
    mixing: str
    has_masks: bool
    documents: Documents | None = None
    cache: Any = None

    def is_of(self, config: Any) -> bool:
        """Whether a config is the model's, or that of its text."""
        return config is self.config or config is self.config.get_text_config()

    def require_unpacked(self, what: str) -> None:
        """An error where ``position_ids`` restart; in a graph where it runs."""
        if self.position_ids is not None:
            require_unpacked(self.position_ids, self.keep, what)

    def require_positions_from(self, first: int, model: str) -> None:
        """An error where ``position_ids`` restart below the position of the first token; in a graph where it runs."""
        if self.position_ids is None:
            return
        early = self.position_ids < first if self.keep is None else (self.position_ids < first) & self.keep
        message = (
            f"position_ids restart below {first}, and {model} counts tokens from padding_idx + 1 = {first}: documents would have "
            f"other positions than alone. Give position_ids + {first} of those that restart at 0"
        )
        require(~(early & restarts(self.position_ids, self.keep).any()).any(), message, LoweringError)


def require_unpacked(position_ids: Tensor, keep: Tensor | None, what: str) -> None:
    """An error where ``position_ids`` describe several documents in a row, which ``what`` would not separate.

    Raises:
        LoweringError: they do. Where reading them would force a host sync, it is an error where the model runs.
    """
    message = (
        f"position_ids restart inside a row, and {what}: its documents would see each other, or have other positions than alone. "
        "Give each document a row; cu_seq_lens_q or seq_idx separate them where the model passes them on to its attention"
    )
    require_none(restarts(position_ids, keep), message, "they restart")


def check_layers(packed: bool | Tensor) -> None:
    """An error where rows are packed, and layers of the running model combine tokens in other ways than attention.

    Raises:
        LoweringError: they do. Where reading ``packed`` would force a host sync, it is an error where the model runs.
    """
    forward = running()
    if forward is not None and forward.mixing:
        message = (
            f"rows are packed, and other layers than attention combine their tokens: {forward.mixing}. Give each document a row. "
            "If these layers separate documents by the seq_idx or cu_seq_lens_q that you give (check_packing measures it), "
            "call flexmask_transformers.allow_mixing(model)"
        )
        condition = packed if isinstance(packed, Tensor) else torch.tensor(packed, device="cpu")
        require(condition.logical_not(), message, LoweringError)


class _Local(threading.local):
    def __init__(self) -> None:
        self.forward: Forward | None = None  # for one of the class dynamo guards that the instance has none


_LOCAL = _Local()


def running() -> Forward | None:
    """The innermost forward that is running in this thread; None outside of a model."""
    return _LOCAL.forward


def observe_all() -> None:
    """Observes the forwards of all model classes of transformers, also of those that are defined later, and of PEFT."""
    original: Any = vars(PreTrainedModel)["__init_subclass__"].__func__

    def init_subclass(cls: type[PreTrainedModel], /, **options: Any) -> None:
        original(cls, **options)
        _observe(cls)

    PreTrainedModel.__init_subclass__ = classmethod(init_subclass)
    observe_tree(PreTrainedModel)
    if is_peft_available():  # its prompt tuning drops position_ids
        observe_tree(importlib.import_module("peft").PeftModel)


def observe_tree(root: type[torch.nn.Module]) -> None:
    """Observes the forwards of a class and of those that extend it."""
    _observe(root)
    for kind in root.__subclasses__():
        observe_tree(kind)


@dataclass(frozen=True)
class _Positional:
    """The names of the arguments that a forward takes by their place, after ``self``."""

    names: tuple[str, ...]

    def get(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An argument of a call, or None."""
        place = self._place(name, args)
        return kwargs.get(name) if place is None else args[place]

    def replaced(
        self, name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call with another value for one that it has."""
        place = self._place(name, args)
        if place is None:
            return args, {**kwargs, name: value}
        return (*args[:place], value, *args[place + 1 :]), kwargs

    def _place(self, name: str, args: tuple[Any, ...]) -> int | None:
        place = self.names.index(name) if name in self.names else len(args)
        return place if place < len(args) else None


def _observe(kind: type[torch.nn.Module]) -> None:
    """Wraps the forward that a class defines itself."""
    forward: Any = vars(kind).get("forward")
    code = getattr(inspect.unwrap(forward), "__code__", None) if callable(forward) else None
    if code is None or getattr(forward, "__flexmask__", False):
        return
    positional = _Positional(code.co_varnames[1 : code.co_argcount])
    arguments, texts = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount], list(_texts(code))
    is_given = "position_ids" in arguments
    ignores = "decoder_input_ids" in arguments and "decoder_position_ids" not in arguments and PREFIX not in texts
    counts_positions = not is_given and any(map(POSITIONS.search, code.co_names))
    counts_positions = counts_positions or any(IGNORED in text for text in texts)

    @functools.wraps(forward)
    def observed(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self.config, "_attn_implementation", None) != "flexmask":
            return forward(self, *args, **kwargs)
        outer = _LOCAL.forward
        mask, position_ids = (positional.get(name, args, kwargs) for name in ("attention_mask", "position_ids"))
        layers = layers_of(self)
        own = _forward_of(self, layers, mask, position_ids, packing_arguments(kwargs), outer)
        if is_user_mask(mask) and not isinstance(mask, dict):
            given = GivenMask(mask.mask if isinstance(mask, GivenMask) else mask, type(self).__name__)
            args, kwargs = positional.replaced("attention_mask", given, args, kwargs)
        if torch.compiler.is_compiling() and isinstance(mask, ModelMask | dict):
            own.has_masks = True
            args, kwargs = positional.replaced("attention_mask", in_graph(mask, position_ids), args, kwargs)
        _LOCAL.forward = own
        try:
            if ignores:
                decoder_mask = positional.get("decoder_attention_mask", args, kwargs)
                ignored = _forward_of(self, layers, decoder_mask, kwargs.get("decoder_position_ids"), {}, None)
                ignored.require_unpacked(f"{type(self).__name__} ignores decoder_position_ids")
            if own.position_ids is not None:
                if getattr(self.config, "is_encoder_decoder", False):
                    own.require_unpacked(f"{type(self).__name__} has an encoder and a decoder")
                elif counts_positions:
                    own.require_unpacked(f"{type(self).__name__} counts positions by itself")
                elif is_given and position_ids is None:
                    own.require_unpacked(f"the model around {type(self).__name__}, as one of PEFT, does not pass them on to it")
                if layers is not None and layers.first_position:
                    own.require_positions_from(layers.first_position, type(self).__name__)
                if own.mixing:
                    check_layers(restarts(own.position_ids, own.keep).any())
            return forward(self, *args, **kwargs)
        finally:
            _LOCAL.forward = outer

    observed.__flexmask__ = True  # type: ignore[attr-defined]
    kind.forward = observed


def _texts(code: CodeType) -> Iterator[str]:
    """The texts in the code of a function, and of those in it, as comprehensions are before Python 3.12."""
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _texts(value)
        elif isinstance(value, str):
            yield value


def _forward_of(
    model: Any, layers: Layers | None, mask: Any, position_ids: Any, packing: Mapping[str, Any], outer: Forward | None
) -> Forward:
    """The forward of a model in that of another one, with what it got, or the other one for it.

    Raises:
        OperandError: no layer of the model calls transformers' attention.
    """
    around = outer if outer is not None and outer.is_of(model.config) else None
    positions = text_positions(position_ids)
    if is_whole_mask(mask):
        positions = None
    elif positions is None and around is not None:
        positions = around.position_ids
    if not packing and around is not None:
        packing = around.packing
    keep = None
    if positions is not None and isinstance(mask, Tensor) and mask.ndim == 2:
        keep = mask[:, -positions.shape[-1] :] != 0
    name = type(model).__name__
    if layers is not None and not layers.attend and outer is None:
        raise OperandError(
            f"no layer of {name} calls transformers' AttentionInterface, so that attn_implementation='flexmask' has no effect; "
            "use 'sdpa' or 'eager'"
        )
    unknown = f"those of {name}, for which set_attn_implementation('flexmask') was not called"
    mixing = unknown if layers is None else layers.mixing
    return Forward(model.config, positions, keep, packing, mixing, has_masks=outer is not None and outer.has_masks)
