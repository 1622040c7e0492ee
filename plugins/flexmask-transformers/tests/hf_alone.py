"""Training with eager attention and each document in a row of its own, which training on packed or padded rows must equal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from hf_models import TEXT, initialise, tokens
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.testing import assert_close
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

#: Token ids from 4 on, and the one of the end, which trainers append to a text.
DOCUMENTS = [[*tokens(1, length - 1, seed=length)[0].clamp(min=4).tolist(), 2] for length in (4, 10, 6, 15, 3, 8, 12, 5)]
#: Settings of a Trainer in which each step uses all documents, so that their order does not matter.
RATE, STEPS = 0.5, 3
SETTINGS: dict[str, Any] = {
    "max_steps": STEPS,
    "per_device_train_batch_size": len(DOCUMENTS),
    "optim": "sgd",
    "learning_rate": RATE,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
    "logging_steps": 1,
    "save_strategy": "no",
    "use_cpu": True,
    "report_to": [],
    "disable_tqdm": True,
}
#: A part of what is trained alone: the loss of a model in one document, or in a pair of them.
Part = Callable[[Any], torch.Tensor]


def tokenizer() -> PreTrainedTokenizerFast:
    """One token for each word: the numbers of the tokens, after those of padding, start and end."""
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    words = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate([*special, *map(str, range(4, 64))])}, unk_token="<unk>")
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), special, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=words, **names)


def text(document: list[int]) -> str:
    """The text of token ids from 4 on."""
    return "".join(f" {token}" for token in document)


def llama(attention: str, **options: Any) -> Any:
    """A tiny Llama whose weights do not depend on its attention."""
    made = LlamaForCausalLM._from_config(LlamaConfig(**{**TEXT, **options}), attn_implementation=attention)
    initialise(made)
    return made


def saved_llama(folder: Path) -> str:
    """The folder that holds a tiny Llama."""
    llama("eager").save_pretrained(folder)
    return str(folder)


@contextmanager
def mixed(is_mixed: bool) -> Iterator[None]:
    """The precision that ``bf16=True`` of a Trainer sets."""
    with torch.autocast("cpu", torch.bfloat16, enabled=is_mixed):
        yield


def next_tokens(documents: Sequence[list[int]], prompts: Sequence[int] | None = None) -> list[Part]:
    """The losses of the tokens after the first of each document, or after its prompt, which add up to their mean.

    Args:
        documents: token ids.
        prompts: the number of tokens in the prompt of each document.
    """
    prompts = [1] * len(documents) if prompts is None else prompts
    count = sum(len(document) - prompt for document, prompt in zip(documents, prompts, strict=True))

    def part(document: list[int], prompt: int) -> Part:
        ids = torch.tensor([document])

        def loss(model: Any) -> torch.Tensor:
            logits = model(input_ids=ids, use_cache=False).logits[0, prompt - 1 : -1].float()
            return torch.nn.functional.cross_entropy(logits, ids[0, prompt:], reduction="sum") / count

        return loss

    return [part(*pair) for pair in zip(documents, prompts, strict=True)]


def loss_alone(model: Any, parts: Sequence[Part], is_mixed: bool) -> float:
    """The sum of the parts without a step."""
    with torch.no_grad(), mixed(is_mixed):
        return sum(part(model).item() for part in parts)


def train_alone(model: Any, parts: Sequence[Part], is_mixed: bool, steps: int = STEPS, rate: float = RATE) -> list[float]:
    """Steps down the gradient of the sum of the parts, which run one after the other; the sum in each step."""
    optimizer, losses = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=rate), []
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(0.0)
        for part in parts:
            with mixed(is_mixed):
                loss = part(model)
            loss.backward()
            losses[-1] += loss.item()
        optimizer.step()
    return losses


def logged(trainer: Any, name: str = "loss") -> list[float]:
    """The losses that a Trainer logged."""
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def assert_same_training(
    found: Sequence[float], trained: Any, wanted: Sequence[float], alone: Any, start: dict[str, torch.Tensor], is_mixed: bool
) -> None:
    """The losses are the same, and so is the way that the parameters went from the start.

    Documents that attend to each other change that way by 0.9 of its length, and the roundings of mixed precision by 0.003.
    """
    assert_close(torch.tensor(found), torch.tensor(wanted), rtol=5e-3 if is_mixed else 1e-5, atol=0)
    parameters = dict(trained.named_parameters())
    moved = torch.cat([(parameter.detach() - start[name]).flatten() for name, parameter in alone.named_parameters()])
    apart = torch.cat([(parameter - parameters[name]).detach().flatten() for name, parameter in alone.named_parameters()])
    assert apart.norm() <= (0.02 if is_mixed else 1e-4) * moved.norm(), f"{float(apart.norm() / moved.norm()):.1e} of the way"
    assert moved.norm() > 0


def check_trainer(
    trainer: Any, alone: Any, parts: Sequence[Part], is_mixed: bool, steps: int = STEPS, rate: float = RATE
) -> None:
    """Trains with a Trainer, and a model alone from the same weights, and compares both."""
    start = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    alone.load_state_dict(start)
    trainer.train()
    wanted = train_alone(alone, parts, is_mixed, steps, rate)
    assert_same_training(logged(trainer), trainer.model, wanted, alone, start, is_mixed)
