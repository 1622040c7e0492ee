"""Importing the plugin: what it registers, and what it says where it cannot."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import transformers
from flexmask_transformers.registration import register
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

CODE = """
import sys
import flexmask, flexmask.cli
flexmask.parse("causal").dense(4); flexmask.masks.sink_window; flexmask.attention
print("transformers" in sys.modules)
sys.modules["transformers"] = None
try:
    import flexmask_transformers
except ImportError as error:
    print(error)
del sys.modules["transformers"]
from transformers import masking_utils
from types import ModuleType
name = "_preprocess_mask_arguments"
model = sys.modules["transformers.models.model"] = ModuleType("model")
setattr(model, name, getattr(masking_utils, name))
import flexmask_transformers
print(getattr(model, name) is getattr(masking_utils, name))
"""


@pytest.mark.slow
def test_imports_in_a_new_process() -> None:
    """flexmask does not import transformers; without it the plugin says what to install; models may be imported before it."""
    found = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    install = "flexmask_transformers needs Hugging Face Transformers: pip install 'transformers<6,>=5.4'"
    assert found.stdout.split("\n") == ["False", install, "True", ""]


@pytest.mark.parametrize("other", [None, lambda config, cache_position: None])
def test_other_interfaces_of_transformers_are_refused(other: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(AttentionInterface._global_mapping, "flexmask")
    monkeypatch.setattr(masking_utils, "_preprocess_mask_arguments", other)
    with pytest.raises(ImportError, match=r"flexmask_transformers needs transformers<6,>=5\.4, and this version, "):
        register()
    assert "flexmask" not in AttentionInterface()


def test_registering_again_changes_nothing() -> None:
    before = masking_utils._preprocess_mask_arguments
    register()
    assert masking_utils._preprocess_mask_arguments is before
    assert "flexmask" in AttentionInterface()
    assert "flexmask" in AttentionMaskInterface()


def test_other_implementations_are_as_before() -> None:
    """A mask of ``sdpa`` is still a tensor of transformers, and leaks as it did."""
    config = transformers.LlamaConfig(attn_implementation="sdpa")
    positions = torch.tensor([[0, 1, 2, 0, 1]])
    arguments = {"config": config, "inputs_embeds": torch.empty(1, 5, 1), "past_key_values": None, "position_ids": positions}
    packed = masking_utils.create_causal_mask(attention_mask=None, **arguments)
    assert type(packed) is torch.Tensor
    assert packed[0, 0].sum(-1).tolist() == [1, 2, 3, 1, 2]
    assert masking_utils.create_causal_mask(attention_mask=torch.ones(1, 5), **arguments) is None


def test_a_model_takes_it_from_its_config_and_later() -> None:
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = transformers.LlamaConfig(**sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="flexmask")
    assert model.config._attn_implementation == "flexmask"
    model.set_attn_implementation("sdpa")
    model.set_attn_implementation("flexmask")
    assert model(torch.ones(1, 3, dtype=torch.int64)).logits.shape == (1, 3, 8)
