"""Importing the plugin: what it registers, and what it says where it cannot."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import transformers
from flexmask_transformers.registration import register
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils


def run(code: str) -> tuple[str, str]:
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return found.stdout.strip(), found.stderr.strip().split("\n")[-1]


def test_flexmask_alone_does_not_import_transformers() -> None:
    code = (
        "import sys, flexmask, flexmask.cli; flexmask.parse('causal').dense(4); flexmask.masks.sink_window; "
        "flexmask.attention; print('transformers' in sys.modules)"
    )
    assert run(code) == ("False", "")


def test_without_transformers_it_says_what_to_install() -> None:
    _, error = run("import sys; sys.modules['transformers'] = None; import flexmask_transformers")
    assert error == "ImportError: flexmask_transformers needs Hugging Face Transformers: pip install 'transformers<6,>=5.4'"


@pytest.mark.parametrize("other", ["None", "lambda config, cache_position: None"])
def test_other_interfaces_of_transformers_are_refused(other: str) -> None:
    code = f"from transformers import masking_utils as m; m._preprocess_mask_arguments = {other}; import flexmask_transformers"
    _, error = run(code)
    assert error.startswith("ImportError: flexmask_transformers needs transformers<6,>=5.4, and this version, ")


def test_models_that_are_imported_before_it() -> None:
    code = (
        "from transformers.models.gemma3 import modeling_gemma3 as model; import flexmask_transformers; "
        "from transformers import masking_utils; name = '_preprocess_mask_arguments'; "
        "print(vars(model).get(name, None) in (None, vars(masking_utils)[name]))"
    )
    assert run(code)[0] == "True"


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
