"""PEFT with flexmask: adapters in layers keep documents apart, and packed rows behind prompts are errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hf_alone import llama
from hf_models import initialise, pair, tokens
from torch.testing import assert_close

from flexmask.errors import LoweringError

peft: Any = pytest.importorskip("peft")

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*removed in v6:FutureWarning"),  # names of transformers 5 for checkpointing
    pytest.mark.filterwarnings("ignore:Position ids are not supported:UserWarning"),
]
LENGTHS = (5, 7)
POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS])[None]
PACKINGS: dict[str, dict[str, Any]] = {
    "position_ids": {"position_ids": POSITIONS},
    "position_ids and a 2-D mask": {"position_ids": POSITIONS, "attention_mask": torch.ones(1, 12, dtype=torch.int64)},
    "cu_seq_lens_q": {"cu_seq_lens_q": torch.tensor([0, 5, 12])},
    "seq_idx": {"seq_idx": torch.tensor([[0] * 5 + [1] * 7])},
}
PACKED = pytest.mark.parametrize("packing", PACKINGS.values(), ids=PACKINGS)
PROMPTS: dict[str, tuple[str, dict[str, Any]]] = {
    "prompt tuning": ("PromptTuningConfig", {}),
    "p-tuning": ("PromptEncoderConfig", {"encoder_hidden_size": 16}),
    "prefix tuning": ("PrefixTuningConfig", {}),
    "multitask prompt tuning": ("MultitaskPromptTuningConfig", {"num_tasks": 2}),
    "context-aware prompt tuning": (
        "CPTConfig",
        {"cpt_token_ids": [3, 4, 5], "cpt_mask": [1] * 3, "cpt_tokens_type_mask": [1] * 3},
    ),
}
PROMPTED = pytest.mark.parametrize("kind", PROMPTS)
LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    "LoRA": ("LoraConfig", {"target_modules": "all-linear", "init_lora_weights": False}),
    "IA3": ("IA3Config", {}),
    "Llama-Adapter": ("AdaptionPromptConfig", {"adapter_len": 3, "adapter_layers": 2}),
}


def prompted(kind: str, model: Any, task: str = "CAUSAL_LM") -> Any:
    """A model behind three tokens of a prompt; the same ones each time."""
    name, options = PROMPTS[kind]
    torch.manual_seed(0)
    virtual = {} if name == "CPTConfig" else {"num_virtual_tokens": 3}
    return peft.get_peft_model(model, getattr(peft, name)(task_type=task, **virtual, **options)).eval()


def logits(model: Any, ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
    tasks = (
        {"task_ids": torch.zeros(len(ids), dtype=torch.int64)} if "MULTITASK" in str(model.active_peft_config.peft_type) else {}
    )
    found: torch.Tensor = model(input_ids=ids, **inputs, **tasks).logits
    return found


@PROMPTED
@PACKED
@pytest.mark.parametrize("is_training", [False, True], ids=["evaluation", "training"])
def test_packed_rows_behind_prompts_are_refused(kind: str, packing: dict[str, Any], is_training: bool) -> None:
    model = prompted(kind, llama("flexmask")).train(is_training)
    with pytest.raises(LoweringError, match=r"position_ids restart inside a row|cu_seq_lens|seq_idx must be \[1, 15\]"):
        logits(model, tokens(1), use_cache=False, **packing)


def test_packed_rows_of_an_encoder_behind_prompts_are_refused() -> None:
    model = prompted("prompt tuning", pair("bert")[1], task="FEATURE_EXTRACTION")
    with pytest.raises(LoweringError, match="position_ids restart inside a row"):
        logits(model, tokens(1), **PACKINGS["position_ids"])


@PROMPTED
def test_rows_with_padding_behind_prompts(kind: str) -> None:
    keep = torch.ones(2, 12, dtype=torch.int64)
    keep[1, 9:] = 0
    found, wanted = (
        logits(prompted(kind, llama(name)), tokens(), attention_mask=keep)[:, -12:][keep.bool()] for name in ("flexmask", "eager")
    )
    assert_close(found, wanted)


@PACKED
@pytest.mark.parametrize("kind", LAYERS)
def test_adapters_in_layers_keep_documents_apart(kind: str, packing: dict[str, Any]) -> None:
    """Llama-Adapter's prompts have no positions, so that those of the tokens must restart."""
    name, options = LAYERS[kind]
    model, alone = (
        peft.get_peft_model(llama(attention), getattr(peft, name)(task_type="CAUSAL_LM", **options)).eval()
        for attention in ("flexmask", "eager")
    )
    for one in (model, alone):
        initialise(one)
    wanted = torch.cat([logits(alone, part) for part in tokens(1).split(LENGTHS, 1)], 1)
    assert_close(logits(model, tokens(1), **{"position_ids": POSITIONS, **packing}), wanted, rtol=1e-4, atol=1e-4)
