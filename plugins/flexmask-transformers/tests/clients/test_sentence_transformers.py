"""Sentence-transformers with flexmask embed and train padded sentences as eager attention does with each sentence alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hf_alone import DOCUMENTS, SETTINGS, check_trainer, text, tokenizer
from hf_models import ENCODER
from torch.nn.functional import cross_entropy, normalize
from transformers import BertConfig, BertModel

datasets: Any = pytest.importorskip("datasets")
sentence_transformers: Any = pytest.importorskip("sentence_transformers")

SENTENCES = [document[:-1] for document in DOCUMENTS]


def embed(model: Any, sentence: list[int]) -> torch.Tensor:
    """The mean over the tokens of one sentence, ``[1, width]``."""
    hidden: torch.Tensor = model(input_ids=torch.tensor([sentence])).last_hidden_state
    return hidden.mean(1)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    torch.manual_seed(0)
    options = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "initializer_range": 0.1}
    model = BertModel(BertConfig(**ENCODER, **options))
    model.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    return str(tmp_path)


def load(folder: str, attention: str) -> Any:
    return sentence_transformers.SentenceTransformer(folder, device="cpu", model_kwargs={"attn_implementation": attention})


def test_embeddings(folder: str) -> None:
    model = load(folder, "flexmask")
    assert model[0].model.config._attn_implementation == "flexmask"
    alone = BertModel.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        wanted = torch.cat([embed(alone, sentence) for sentence in SENTENCES])
    found = torch.from_numpy(model.encode([text(sentence) for sentence in SENTENCES]))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("is_mixed", [False, True], ids=["float32", "bf16"])
def test_training(folder: str, tmp_path: Path, is_mixed: bool) -> None:
    """Each sentence of the first half belongs to one of the second."""
    model = load(folder, "flexmask")
    half, rate = len(SENTENCES) // 2, 0.05  # a rate, and a scale of the loss, that do not amplify roundings
    first, second = ([text(sentence) for sentence in part] for part in (SENTENCES[:half], SENTENCES[half:]))
    options = {**SETTINGS, "learning_rate": rate, "per_device_train_batch_size": half, "bf16": is_mixed}
    trainer = sentence_transformers.SentenceTransformerTrainer(
        model,
        sentence_transformers.SentenceTransformerTrainingArguments(str(tmp_path / "out"), **options),
        train_dataset=datasets.Dataset.from_dict({"anchor": first, "positive": second}),
        loss=sentence_transformers.sentence_transformer.losses.MultipleNegativesRankingLoss(model, scale=4.0),
    )

    def loss(alone: Any) -> torch.Tensor:
        of_all = normalize(torch.cat([embed(alone[0].model, sentence) for sentence in SENTENCES]), dim=-1)
        return cross_entropy(4 * of_all[:half] @ of_all[half:].T, torch.arange(half))

    check_trainer(trainer, load(folder, "eager"), [loss], is_mixed, rate=rate)
