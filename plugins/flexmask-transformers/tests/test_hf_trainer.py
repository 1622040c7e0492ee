"""transformers' Trainer on packed rows trains as eager attention does on each document alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_alone import DOCUMENTS, SETTINGS, assert_same_training, check_trainer, llama, logged, loss_alone, next_tokens, train_alone
from hf_models import OLDEST, VERSION
from torch.multiprocessing.spawn import spawn
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

pytestmark = pytest.mark.filterwarnings("ignore:.*removed in v6:FutureWarning")  # names of transformers 5 for checkpointing
MIXED = pytest.mark.parametrize("is_mixed", [False, True], ids=["float32", "bf16"])


def make_trainer(folder: Path, is_mixed: bool, **options: Any) -> Trainer:
    rows: Any = [{"input_ids": document} for document in DOCUMENTS]
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=bool(options.pop("lengths", False)))
    arguments = TrainingArguments(str(folder), bf16=is_mixed, **{**SETTINGS, **options})
    return Trainer(llama("flexmask"), arguments, train_dataset=rows, eval_dataset=rows[:4], data_collator=collate)


@MIXED
@pytest.mark.parametrize(
    "options",
    [
        {"gradient_checkpointing": True},
        {"lengths": True},
        pytest.param(
            {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 3},
            marks=pytest.mark.skipif(VERSION == OLDEST, reason="with accelerate 1.15 it divides the gradient once more"),
        ),
    ],
    ids=str,
)
def test_packed_rows(tmp_path: Path, is_mixed: bool, options: dict[str, Any]) -> None:
    check_trainer(make_trainer(tmp_path, is_mixed, **options), llama("eager"), next_tokens(DOCUMENTS), is_mixed)


@pytest.mark.slow
@MIXED
def test_training_that_stops_evaluates_and_goes_on(tmp_path: Path, is_mixed: bool) -> None:
    alone, parts = llama("eager"), next_tokens(DOCUMENTS)
    start = {name: tensor.clone() for name, tensor in alone.state_dict().items()}
    options = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    make_trainer(tmp_path, is_mixed, **options, max_steps=2).train()
    trainer = make_trainer(tmp_path, is_mixed, **options, max_steps=4)
    trainer.train(resume_from_checkpoint=True)
    wanted = train_alone(alone, parts, is_mixed, steps=2)
    evaluated = [loss_alone(alone, next_tokens(DOCUMENTS[:4]), is_mixed)]
    wanted += train_alone(alone, parts, is_mixed, steps=2)
    evaluated.append(loss_alone(alone, next_tokens(DOCUMENTS[:4]), is_mixed))
    assert logged(trainer, "eval_loss") == pytest.approx(evaluated, rel=5e-3 if is_mixed else 1e-5)
    assert_same_training(logged(trainer), trainer.model, wanted, alone, start, is_mixed)


def train_rank(rank: int, store: str, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": 0}  # as torchrun does
    os.environ.update({name: str(value) for name, value in names.items()})
    trainer = make_trainer(Path(folder), is_mixed=True, per_device_train_batch_size=len(DOCUMENTS) // 2)
    assert trainer.args.world_size == 2
    check_trainer(trainer, llama("eager"), next_tokens(DOCUMENTS), is_mixed=True)
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    """Each has half of the documents."""
    spawn(train_rank, (str(tmp_path / "store"), str(tmp_path / "out")), 2)
