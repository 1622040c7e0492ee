"""Makes ``attn_implementation="flexmask"`` available in transformers."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import transformers
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, masking_utils

from flexmask_transformers.attention import attention_forward
from flexmask_transformers.forwards import observe_all
from flexmask_transformers.layers import note_layers
from flexmask_transformers.masks import make_mask
from flexmask_transformers.request import preprocess
from flexmask_transformers.versions import requirement

__all__ = ["NAME", "register"]

#: The name of the attention implementation.
NAME = "flexmask"
#: The function of ``masking_utils`` that reads the arguments of each mask, and its parameters that `preprocess` relies on.
PREPROCESS = "_preprocess_mask_arguments"
PARAMETERS = ["config", "inputs_embeds", "attention_mask", "past_key_values", "position_ids", "layer_idx"]


def register() -> None:
    """Registers flexmask's attention and masks with transformers; again, it changes nothing.

    Raises:
        ImportError: a version of transformers with other interfaces.
    """
    if NAME in AttentionInterface._global_mapping:
        return
    original: Any = getattr(masking_utils, PREPROCESS, None)
    if original is None or list(inspect.signature(original).parameters)[: len(PARAMETERS)] != PARAMETERS:
        raise ImportError(
            f"flexmask_transformers needs {requirement()}, and this version, {transformers.__version__}, makes its masks in "
            "another way; install another one, or a newer flexmask_transformers"
        )
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, make_mask)
    replacement = preprocess(original)
    for name, module in list(sys.modules.items()):  # models that are imported already may have it by name
        if name.startswith("transformers.") and vars(module).get(PREPROCESS) is original:
            setattr(module, PREPROCESS, replacement)
    observe_all()
    PreTrainedModel.get_correct_attn_implementation = _checked(PreTrainedModel.get_correct_attn_implementation)
    PreTrainedModel.set_attn_implementation = _effective(PreTrainedModel.set_attn_implementation)
    PreTrainedModel.post_init = _noted(PreTrainedModel.post_init)


def _checked(original: Callable[..., str]) -> Callable[..., str]:
    """The method that checks an ``attn_implementation``, which would accept any registered name for models that ignore it."""

    @functools.wraps(original)
    def get_correct_attn_implementation(self: Any, requested_attention: str | None, is_init_check: bool = False) -> str:
        if requested_attention == NAME and not self._can_set_attn_implementation():
            raise _unsupported(self)
        return original(self, requested_attention, is_init_check)

    return get_correct_attn_implementation


def _effective(original: Callable[..., None]) -> Callable[..., None]:
    """The method that sets an ``attn_implementation``, which would log a line and go on where a model does not support it.

    It still goes on where that is a part for images or sound, which has no documents, unless the caller named this part.
    """

    @functools.wraps(original)
    def set_attn_implementation(self: Any, attn_implementation: Any, *arguments: Any, **options: Any) -> None:
        named = {id(config) for config, wanted in _requests(self.config, attn_implementation) if wanted == NAME}
        if not isinstance(attn_implementation, dict):
            named &= {id(self.config), id(self.config.get_text_config())}
        for part in self.modules():
            if isinstance(part, PreTrainedModel) and id(part.config) in named and not part._can_set_attn_implementation():
                raise _unsupported(part)
        original(self, attn_implementation, *arguments, **options)
        note_layers(self)

    return set_attn_implementation


def _requests(config: Any, wanted: Any) -> Iterator[tuple[Any, Any]]:
    """What an ``attn_implementation`` asks for in a config and in those in it: one name for all, or a dict of their names."""
    yield config, wanted.get("") if isinstance(wanted, dict) else wanted
    for name in config.sub_configs:
        if (part := getattr(config, name, None)) is not None:
            yield from _requests(part, wanted.get(name) if isinstance(wanted, dict) else wanted)


def _noted(original: Callable[..., None]) -> Callable[..., None]:
    """The last step of making a model, after which its layers are known."""

    @functools.wraps(original)
    def post_init(self: Any) -> None:
        original(self)
        if self.config._attn_implementation == NAME:
            note_layers(self)

    return post_init


def _unsupported(model: Any) -> ValueError:
    return ValueError(
        f"{type(model).__name__} does not support attn_implementation='{NAME}': transformers {transformers.__version__} "
        "computes its attention without the AttentionInterface; use 'eager' for it"
    )
