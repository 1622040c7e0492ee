"""Lightning's mixed precision trains a module of flexmask on packed rows as torch's attention does on each document alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hf_alone import DOCUMENTS, RATE, STEPS, assert_same_training, train_alone
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from flexmask import MultiheadFlexAttention

lightning: Any = pytest.importorskip("lightning")

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # of Lightning itself
HEADS, WIDTH = 4, 32


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embeddings, whose angles are float32 under autocast too."""
    angles = positions[..., None, :, None] * 0.5 ** torch.arange(x.shape[-1] // 2)
    first, second = x.chunk(2, -1)
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)


class Model(lightning.LightningModule):  # type: ignore[misc] # whose types are not installed everywhere
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.losses: list[float] = []
        self.embed = nn.Embedding(64, WIDTH)
        self.attention = MultiheadFlexAttention(WIDTH, WIDTH, HEADS, mask="causal & document(ids)", rope=rotate)
        self.head = nn.Linear(WIDTH, 64)

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        hidden = self.embed(batch["tokens"])
        hidden = hidden + self.attention(hidden, positions=batch["positions"], ids=batch["ids"])
        loss = cross_entropy(self.head(hidden).flatten(0, 1).float(), batch["labels"].flatten())
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=RATE)


def packed(documents: list[list[int]]) -> dict[str, Tensor]:
    """One row of all documents."""
    return {
        "tokens": torch.tensor([token for document in documents for token in document]),
        "labels": torch.tensor([token for document in documents for token in [*document[1:], -100]]),
        "ids": torch.tensor([i for i, document in enumerate(documents) for _ in document]),
        "positions": torch.tensor([place for document in documents for place in range(len(document))]),
    }


def alone(document: list[int], count: int) -> Any:
    ids = torch.tensor([document])

    def loss(model: Model) -> Tensor:
        hidden = model.embed(ids)
        query, key, value = model.attention.in_proj(hidden).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        query, key = (rotate(x, torch.arange(ids.shape[1])) for x in (query, key))
        out = scaled_dot_product_attention(query.to(value), key.to(value), value, is_causal=True)
        logits = model.head(hidden + model.attention.out_proj(out.transpose(1, 2).flatten(2)))
        return cross_entropy(logits[0, :-1].float(), ids[0, 1:], reduction="sum") / count

    return loss


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_packed_rows(precision: str) -> None:
    model, reference = Model(), Model()
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    rows: Any = [packed(DOCUMENTS)] * STEPS
    loader = torch.utils.data.DataLoader(rows, batch_size=1)
    names = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    lightning.Trainer(accelerator="cpu", precision=precision, max_steps=STEPS, **dict.fromkeys(names, False)).fit(model, loader)
    count = sum(len(document) - 1 for document in DOCUMENTS)
    is_mixed = precision == "bf16-mixed"
    wanted = train_alone(reference, [alone(document, count) for document in DOCUMENTS], is_mixed)
    assert_same_training(model.losses, model, wanted, reference, start, is_mixed)
