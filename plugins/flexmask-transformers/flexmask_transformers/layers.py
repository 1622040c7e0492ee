"""Which layers of a model combine tokens without flexmask's attention, such as recurrent ones and convolutions."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from flexmask_transformers.arguments import check_model

__all__ = ["Layers", "allow_mixing", "layers_of", "note_layers"]

#: What a layer takes that combines tokens: the mask of padding, and the state that further tokens continue.
STATE = {"attention_mask", "mask", "causal_mask", "past_key_values", "past_key_value", "layer_past", "cache_params", "seq_idx"}
#: Functions of torch that move tokens to the places of others.
SHIFTS = {"pad", "roll", "unfold"}
#: The attribute of a model that has its `Layers`; a graph of ``torch.compile`` reads it.
ATTRIBUTE = "_flexmask_layers"
#: That of a model whose owner called `allow_mixing`.
ALLOWED = "_flexmask_allows_mixing"


@dataclass(frozen=True)
class Layers:
    """How the layers of a model combine tokens.

    Attributes:
        attend: whether some call the attention function of transformers' interface.
        mixing: those that combine tokens in another way, as a text; empty where there are none, or they are allowed.
        first_position: the position of the first token, which is above 0 where those up to ``padding_idx`` are of padding.
    """

    attend: bool
    mixing: str
    first_position: int = 0


def layers_of(model: torch.nn.Module) -> Layers | None:
    """How the layers of a model combine tokens; None in a graph where that was not found before."""
    if not isinstance(model, PreTrainedModel):  # one of PEFT, around a model
        return Layers(attend=True, mixing="")
    if ATTRIBUTE not in vars(model) and not torch.compiler.is_compiling():
        note_layers(model)
    return getattr(model, ATTRIBUTE, None)


def note_layers(model: torch.nn.Module) -> None:
    """Finds how the layers of a model, and of the models in it, combine tokens."""
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            attend = any(_code_of(module).attends for module in part.modules())
            mixing = "" if vars(part).get(ALLOWED) else _mixing(part)
            setattr(part, ATTRIBUTE, Layers(attend, mixing, _first_position(part)))


def allow_mixing(model: Any) -> None:
    """Allows packed rows in a model some of whose layers combine tokens without attention, such as recurrent ones.

    flexmask separates documents in attention alone, and refuses packed rows where other layers combine tokens. Some of them
    separate documents by ``seq_idx`` or ``cu_seq_lens_q``, which depends on the kernels that are installed:
    :func:`check_packing` measures it for a model that allows it.

    Args:
        model: a model of transformers.

    Raises:
        OperandError: no model of transformers.
    """
    check_model(model, "allow_mixing")
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            setattr(part, ALLOWED, True)
    note_layers(model)


def _mixing(model: PreTrainedModel) -> str:
    found: dict[str, list[str]] = {}
    inside: tuple[str, ...] = ()
    for name, module in _own_modules(model):
        if not name.startswith(inside) and _mixes(module):
            found.setdefault(type(module).__name__, []).append(name)
            inside += (f"{name}.",)
    texts = (f"{kind} ({names[0]}{f' and {len(names) - 1} more' if names[1:] else ''})" for kind, names in found.items())
    return ", ".join(texts)


def _first_position(model: PreTrainedModel) -> int:
    """The position that a model gives to the first token: as in RoBERTa, that of padding has an embedding, and they follow it."""
    for name, module in _own_modules(model):
        if isinstance(module, torch.nn.Embedding) and name.endswith("position_embeddings") and module.padding_idx is not None:
            return module.padding_idx + 1
    return 0


def _own_modules(model: PreTrainedModel) -> Iterator[tuple[str, torch.nn.Module]]:
    """The modules of a model; where it has one for its text, those of that one, without what reads images and sound."""
    text = model.config.get_text_config()
    for name, module in () if text is model.config else model.named_modules():
        if isinstance(module, PreTrainedModel) and module.config is text:
            yield from ((f"{name}.{own}" if own else name, part) for own, part in module.named_modules())
            return
    others: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if isinstance(module, PreTrainedModel) and module.config is not model.config:
            others += (f"{name}.",)
        elif not name.startswith(others):
            yield name, module


def _mixes(module: torch.nn.Module) -> bool:
    """Whether a module itself, and none within it, combines tokens without transformers' attention."""
    if isinstance(module, torch.nn.Conv1d):
        return module.kernel_size != (1,)
    if isinstance(module, torch.nn.Embedding):  # one of positions takes the mask of padding to count them
        return False
    own, *parts = (_code_of(part) for part in module.modules())
    if own.attends or any(part.attends for part in parts):
        return False
    return own.shifts or (own.takes_state and not any(part.takes_state for part in parts))


class _Code(NamedTuple):
    """What the code of a module's forward shows: whether it calls transformers' attention, moves tokens, and takes `STATE`."""

    attends: bool = False
    shifts: bool = False
    takes_state: bool = False


_CODES: dict[type[torch.nn.Module], _Code] = {}


def _code_of(module: torch.nn.Module) -> _Code:
    kind = type(module)
    if kind not in _CODES:
        code = None if kind.__module__.startswith("torch.nn.") else getattr(inspect.unwrap(kind.forward), "__code__", None)
        if code is None:
            _CODES[kind] = _Code()
        else:
            arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            at_positions = "gather" in code.co_names and "positions" in arguments  # tokens of places that the caller chooses
            shifts, takes_state = at_positions or not SHIFTS.isdisjoint(code.co_names), not STATE.isdisjoint(arguments)
            _CODES[kind] = _Code("ALL_ATTENTION_FUNCTIONS" in code.co_names, shifts, takes_state)
    return _CODES[kind]
