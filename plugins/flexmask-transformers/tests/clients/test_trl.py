"""TRL's trainers with flexmask on packed, padding-free and padded rows train as eager attention does on each document alone."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_alone import (
    DOCUMENTS,
    SETTINGS,
    assert_same_training,
    check_trainer,
    llama,
    logged,
    loss_alone,
    next_tokens,
    saved_llama,
    text,
    tokenizer,
)
from torch.nn.functional import logsigmoid

from tests.support.pages import run_page

trl: Any = pytest.importorskip("trl")
peft: Any = pytest.importorskip("peft")
datasets: Any = pytest.importorskip("datasets")

pytestmark = pytest.mark.filterwarnings("ignore:.*removed in v6:FutureWarning")  # names of transformers 5 for checkpointing
#: Tokens in the prompt of each document.
PROMPTS = [len(document) // 3 for document in DOCUMENTS]
RECIPE = Path(__file__).parents[4] / "docs" / "recipes" / "grpo.md"
MIXED = pytest.mark.parametrize("is_mixed", [False, True], ids=["float32", "bf16"])


def settings(folder: Path, is_mixed: bool, **options: Any) -> dict[str, Any]:
    own = {"output_dir": str(folder), "bf16": is_mixed, "dataset_num_proc": None}
    return {**SETTINGS, **own, **options}


def sft_trainer(folder: Path, is_mixed: bool, model: Any = None, lora: Any = None, **options: Any) -> Any:
    """TRL appends the last token of a document itself."""
    return trl.SFTTrainer(
        llama("flexmask") if model is None else model,
        trl.SFTConfig(**settings(folder, is_mixed, **options)),
        train_dataset=datasets.Dataset.from_dict({"text": [text(document[:-1]) for document in DOCUMENTS]}),
        processing_class=tokenizer(),
        peft_config=lora,
    )


@MIXED
class TestSFT:
    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"gradient_checkpointing": False},
            {"gradient_checkpointing_kwargs": {"use_reentrant": True}},
            {"gradient_checkpointing_kwargs": {"selective": True}},
            {"pad_to_multiple_of": 8},
            {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4},
        ],
        ids=str,
    )
    def test_packed_rows(self, tmp_path: Path, is_mixed: bool, options: dict[str, Any]) -> None:
        trainer = sft_trainer(tmp_path, is_mixed, packing=True, max_length=16, **options)
        assert trainer.args.gradient_checkpointing == options.get("gradient_checkpointing", True)
        assert len(trainer.train_dataset) == 4
        check_trainer(trainer, llama("eager"), next_tokens(DOCUMENTS), is_mixed)

    @pytest.mark.parametrize("strategy", ["bfd", "bfd_split"])
    def test_packed_rows_of_documents_that_are_too_long(self, tmp_path: Path, is_mixed: bool, strategy: str) -> None:
        trainer = sft_trainer(tmp_path, is_mixed, packing=True, packing_strategy=strategy, max_length=8)
        parts = [document[start : start + 8] for document in DOCUMENTS for start in range(0, len(document), 8)]
        rows = parts if strategy == "bfd_split" else [document[:8] for document in DOCUMENTS]
        check_trainer(trainer, llama("eager"), next_tokens(rows), is_mixed)

    @pytest.mark.parametrize("padding_free", [False, True])
    def test_wrapped_rows(self, tmp_path: Path, is_mixed: bool, padding_free: bool) -> None:
        options = {"packing": True, "packing_strategy": "wrapped", "max_length": 12, "padding_free": padding_free}
        trainer = sft_trainer(tmp_path, is_mixed, **options)
        stream = list(chain(*DOCUMENTS))
        rows = [stream[start : start + 12] for start in range(0, len(stream), 12)]
        check_trainer(trainer, llama("eager"), next_tokens(rows), is_mixed)

    @pytest.mark.parametrize("options", [{}, {"padding_free": True, "max_length": None}], ids=["padded", "padding-free"])
    def test_rows_of_documents(self, tmp_path: Path, is_mixed: bool, options: dict[str, Any]) -> None:
        trainer = sft_trainer(tmp_path, is_mixed, **options)
        check_trainer(trainer, llama("eager"), next_tokens(DOCUMENTS), is_mixed)

    def test_the_loss_of_completions(self, tmp_path: Path, is_mixed: bool) -> None:
        pairs = [(document[:count], document[count:-1]) for document, count in zip(DOCUMENTS, PROMPTS, strict=True)]
        rows = {"prompt": [text(first) for first, _ in pairs], "completion": [text(second) for _, second in pairs]}
        dataset = datasets.Dataset.from_dict(rows)
        trainer = trl.SFTTrainer(
            llama("flexmask"),
            trl.SFTConfig(**settings(tmp_path, is_mixed, packing=True, max_length=16)),
            train_dataset=dataset,
            eval_dataset=dataset,
            processing_class=tokenizer(),
        )
        alone, parts = llama("eager"), next_tokens(DOCUMENTS, PROMPTS)
        found = trainer.evaluate()["eval_loss"]
        assert found == pytest.approx(loss_alone(alone, parts, is_mixed), rel=5e-3 if is_mixed else 1e-5)
        check_trainer(trainer, alone, parts, is_mixed)

    def test_lora_of_a_saved_model(self, tmp_path: Path, is_mixed: bool) -> None:
        lora, again = (
            peft.LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", init_lora_weights=False) for _ in range(2)
        )
        options = {"packing": True, "max_length": 16, "model_init_kwargs": {"attn_implementation": "flexmask"}}
        trainer = sft_trainer(tmp_path / "out", is_mixed, saved_llama(tmp_path / "model"), lora, **options)
        assert trainer.model.config._attn_implementation == "flexmask"
        check_trainer(trainer, peft.get_peft_model(llama("eager"), again), next_tokens(DOCUMENTS), is_mixed)


def test_compiled_models(tmp_path: Path) -> None:
    options = {"packing": True, "max_length": 64, "torch_compile": True, "torch_compile_backend": "aot_eager"}
    trainer = sft_trainer(tmp_path, is_mixed=True, model=llama("flexmask", num_hidden_layers=1), **options)
    check_trainer(trainer, llama("eager", num_hidden_layers=1), next_tokens(DOCUMENTS), is_mixed=True)
    torch.compiler.reset()


@MIXED
def test_dpo(tmp_path: Path, is_mixed: bool) -> None:
    """TRL 1.16 warns that it ignores ``padding_free=True`` here, and pads."""
    saved, pairs = saved_llama(tmp_path / "model"), list(zip(DOCUMENTS[:4], DOCUMENTS[4:], strict=True))
    prompts, completions = [chosen[:2] for chosen, _ in pairs], [(chosen[2:-1], rejected[:-1]) for chosen, rejected in pairs]
    rows = {
        "prompt": [text(prompt) for prompt in prompts],
        "chosen": [text(chosen) for chosen, _ in completions],
        "rejected": [text(rejected) for _, rejected in completions],
    }
    options = {"beta": 0.5, "padding_free": True, "model_init_kwargs": {"attn_implementation": "flexmask"}}
    trainer = trl.DPOTrainer(
        saved,
        args=trl.DPOConfig(**settings(tmp_path / "out", is_mixed, **options)),
        train_dataset=datasets.Dataset.from_dict(rows),
        processing_class=tokenizer(),
    )
    assert trainer.ref_model.config._attn_implementation == trainer.model.config._attn_implementation == "flexmask"
    reference = llama("eager")

    def log_probability(model: Any, prompt: list[int], completion: list[int]) -> torch.Tensor:
        ids = torch.tensor([[*prompt, *completion, 2]])
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        return -torch.nn.functional.cross_entropy(logits, ids[0, len(prompt) :], reduction="sum")

    def part(prompt: list[int], chosen: list[int], rejected: list[int]) -> Any:
        def loss(model: Any) -> torch.Tensor:
            with torch.no_grad():
                fixed = log_probability(reference, prompt, chosen) - log_probability(reference, prompt, rejected)
            free = log_probability(model, prompt, chosen) - log_probability(model, prompt, rejected)
            return -logsigmoid(0.5 * (free - fixed)) / len(pairs)

        return loss

    parts = [part(prompt, *both) for prompt, both in zip(prompts, completions, strict=True)]
    check_trainer(trainer, llama("eager"), parts, is_mixed)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_the_recipe_of_grpo_on_a_tree(tmp_path: Path, loss_type: str) -> None:
    """As TRL's own trainer, with a reference model and with samples that are used twice, so that probabilities change."""
    recipe: Any = run_page(RECIPE)["TreeGRPOTrainer"]
    options = {
        "bf16": False,
        "loss_type": loss_type,
        "beta": 0.1,
        "num_iterations": 2,
        "num_generations": 4,
        "max_completion_length": 6,
    }
    saved, prompts = saved_llama(tmp_path / "model"), [text(document[:4]) for document in DOCUMENTS[:2]]
    trainers, sizes = [], list[int]()
    for kind, attention in ((trl.GRPOTrainer, "eager"), (recipe, "flexmask")):
        made = kind(
            saved,
            reward_funcs=lambda completion_ids, **_: [float(sum(ids) % 7) for ids in completion_ids],
            args=trl.GRPOConfig(
                **SETTINGS, **options, output_dir=str(tmp_path / "out"), model_init_kwargs={"attn_implementation": attention}
            ),
            train_dataset=datasets.Dataset.from_dict({"prompt": prompts}),
            processing_class=tokenizer(),
        )
        start = {name: tensor.clone() for name, tensor in made.model.state_dict().items()}
        made.model.register_forward_pre_hook(lambda _, given: sizes.extend(tokens.numel() for tokens in given))
        made.train()
        trainers.append(made)
    theirs, ours = trainers
    assert_same_training(logged(ours), ours.model, logged(theirs), theirs.model, start, is_mixed=False)
    assert sizes  # of the trees; TRL gives tokens by name
    assert max(sizes) < 0.8 * 8 * (4 + 6)
