"""A check of whether packed documents leak into each other, for any model and any attention implementation."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor

from flexmask.errors import ExpressionError, OperandError
from flexmask_transformers.arguments import check_model
from flexmask_transformers.models import small_model
from flexmask_transformers.recording import evaluated, using

__all__ = ["PackingCheck", "PackingResult", "check_packing", "leaks"]

#: The attention implementations that are checked by default.
IMPLEMENTATIONS = ("eager", "sdpa", "flex_attention", "flexmask")
#: Why a model is not checked whose outputs, also in a row that is no packed one, do not change with other tokens.
NOTHING_SEEN = "no output depends on other tokens, so nothing could leak: give weights that are zeros random values"


@dataclass(frozen=True)
class PackingResult:
    """How one attention implementation treats rows that are packed in one way.

    Attributes:
        attention: the ``attn_implementation``.
        packed_by: what describes the documents, such as ``"position_ids, with a cache"``.
        leak: how much the output of a document changes at most when the tokens of the other documents change.
        positions: the positions of the row whose output changes.
        difference: how much a document's output differs at most from that of the document alone. Without a leak it comes from
            positions that do not restart.
        error: why the implementation refused the input; empty where it ran.
    """

    attention: str
    packed_by: str
    leak: float = 0.0
    positions: tuple[int, ...] = ()
    difference: float = 0.0
    error: str = ""

    def __str__(self) -> str:
        if self.error:
            return f"refused: {self.error}"
        if self.positions:
            return f"LEAKS by {self.leak:.3g} into positions {_ranges(self.positions)}"
        return "isolated" if self.difference < 1e-3 else f"isolated, at other positions (differs by {self.difference:.3g})"


@dataclass(frozen=True)
class PackingCheck:
    """The results of :func:`check_packing`; printed, it is a table.

    Attributes:
        results: one for each attention implementation and way to pack.
    """

    results: tuple[PackingResult, ...]

    @property
    def leaks(self) -> tuple[PackingResult, ...]:
        """The results in which documents leak."""
        return tuple(result for result in self.results if result.positions)

    def __str__(self) -> str:
        first = max((len(result.attention) for result in self.results), default=0)
        second = max((len(result.packed_by) for result in self.results), default=0)
        return "\n".join(f"{result.attention:{first}}  {result.packed_by:{second}}  {result}" for result in self.results)


def check_packing(
    model: Any,
    *,
    attention: Sequence[str] = IMPLEMENTATIONS,
    lengths: Sequence[int] = (5, 7, 4),
    tolerance: float = 1e-4,
) -> PackingCheck:
    """Whether documents that are packed into one row see each other.

    Packs random documents in each way that trainers do: with ``position_ids`` that restart, without and with a cache (the default
    of ``forward``), with a 2-D mask of ones or of document numbers, with ``cu_seq_lens`` and with ``seq_idx``. A document leaks
    where another one's output changes with its tokens.

    Args:
        model: a model of transformers, which is as before afterwards; or a config, or the path of a ``config.json`` or of its
            folder, from which a small model with random weights is made. Nothing is downloaded.
        attention: the attention implementations to check.
        lengths: the lengths of the documents; at least two.
        tolerance: the change of an output that counts as a leak, relative to the largest output.

    Returns:
        The results; ``leaks`` are those in which documents leak.

    Raises:
        OperandError: no model of transformers, no config, or arguments of other types.
        ExpressionError: fewer than two documents, no attention implementation, or a negative tolerance.
        ValueError: a model of an encoder and a decoder, or one that has no tokens or no values.
        FileNotFoundError: there is no such config.
    """
    lengths = _checked_lengths(lengths)
    if isinstance(attention, str) or not isinstance(attention, Sequence) or not all(isinstance(one, str) for one in attention):
        raise OperandError(f"attention must be a list of names, such as ['sdpa', 'flexmask'], got {attention!r}")
    if not attention:
        raise ExpressionError("attention names no implementation, so that nothing would be checked")
    if isinstance(tolerance, bool) or not isinstance(tolerance, int | float):
        raise OperandError(f"tolerance must be a number, got {type(tolerance).__name__}")
    if not tolerance >= 0:  # NaN compares as False
        raise ExpressionError(f"tolerance must be at least 0, got {tolerance}")
    if not isinstance(model, torch.nn.Module):
        model = small_model(model)
    check_model(model, "check_packing")
    if model.config.is_encoder_decoder:
        raise ValueError(f"{type(model).__name__} has an encoder and a decoder; only models of one sequence can be packed")
    if not hasattr(model.config.get_text_config(), "vocab_size"):
        raise ValueError(f"{type(model).__name__} has no vocabulary; only models of text can be packed")
    if model.device.type == "meta":
        raise ValueError(f"{type(model).__name__} is on meta, where its weights have no values; load it on another device")
    with evaluated(model), torch.no_grad():
        return PackingCheck(tuple(_results(model, attention, lengths, tolerance)))


def _checked_lengths(lengths: Sequence[int]) -> tuple[int, ...]:
    try:
        found = tuple(map(operator.index, lengths))
    except TypeError as error:
        raise OperandError(f"lengths must be a list of integers, got {lengths!r}") from error
    if len(found) < 2 or min(found) < 1:
        raise ExpressionError(f"check_packing needs at least two documents of at least one token, got lengths={list(found)}")
    return found


def _results(model: Any, attention: Sequence[str], lengths: tuple[int, ...], tolerance: float) -> Iterator[PackingResult]:
    for implementation in attention:
        try:
            with using(model, implementation):
                tokens, others = (_tokens(model, sum(lengths), seed) for seed in (1, 2))
                row, seen = leaks(lambda ids: _outputs(model, ids, {}), tokens, others, lengths)
                if not (seen > tolerance * float(row.abs().max())).any():
                    raise ValueError(NOTHING_SEEN)
                alone = torch.cat([_outputs(model, part, {}) for part in tokens.split(lengths, 1)], 1)
                for packed_by, inputs in _packings(lengths, model.device).items():
                    yield _result(model, implementation, packed_by, inputs, lengths, tolerance, alone)
        except (ImportError, ValueError) as error:  # also of `using`: the model does not support the implementation
            yield PackingResult(implementation, "", error=_first_line(error))


def _packings(lengths: tuple[int, ...], device: torch.device) -> dict[str, dict[str, Any]]:
    """The arguments of a forward for each way to pack."""
    ids = torch.repeat_interleave(torch.arange(len(lengths), device="cpu"), torch.tensor(lengths, device="cpu"))[None].to(device)
    positions = {"position_ids": torch.cat([torch.arange(length, device="cpu") for length in lengths])[None].to(device)}
    ends = torch.tensor([0, *lengths], device="cpu").cumsum(0).to(device, torch.int32)
    flash = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": max(lengths), "max_length_k": max(lengths)}
    seq_idx = {"seq_idx": ids.to(torch.int32)}
    return {
        "position_ids": {**positions, "use_cache": False},
        "position_ids, with a cache": {**positions, "use_cache": True},
        "position_ids, 2-D mask of ones": {**positions, "attention_mask": torch.ones_like(ids), "use_cache": False},
        "position_ids, 2-D mask of document numbers": {**positions, "attention_mask": ids + 1, "use_cache": False},
        "position_ids, cu_seq_lens": {**positions, **flash, "use_cache": False},
        "cu_seq_lens": {**flash, "use_cache": False},
        "position_ids, seq_idx": {**positions, **seq_idx, "use_cache": False},
        "seq_idx": {**seq_idx, "use_cache": False},
    }


def _result(
    model: Any,
    implementation: str,
    packed_by: str,
    inputs: dict[str, Any],
    lengths: tuple[int, ...],
    tolerance: float,
    alone: Tensor,
) -> PackingResult:
    tokens, others = (_tokens(model, sum(lengths), seed) for seed in (1, 2))
    if "use_cache" in inputs and not hasattr(model.config, "use_cache"):
        inputs = {name: value for name, value in inputs.items() if name != "use_cache"}
    try:
        packed, leak = leaks(lambda ids: _outputs(model, ids, inputs), tokens, others, lengths)
    except Exception as error:  # whatever an implementation raises, it gave no other numbers
        return PackingResult(implementation, packed_by, error=_first_line(error))
    wrong = (leak > tolerance * float(packed.abs().max())).nonzero()[:, 0].tolist()
    return PackingResult(implementation, packed_by, float(leak.max()), tuple(wrong), float((packed - alone).abs().max()))


def leaks(run: Callable[[Tensor], Tensor], tokens: Tensor, others: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The outputs of a packed row, and how much each of them changes with the tokens of the other documents.

    Args:
        run: the model, from tokens ``int[1, S]`` to outputs ``float[1, S, channels]``.
        tokens: the tokens of the row.
        others: tokens that replace those of the other documents.
        lengths: the lengths of the documents, S together.

    Returns:
        The outputs, and the changes ``float[S]``.
    """
    packed = run(tokens)
    leak = torch.zeros(sum(lengths), device="cpu")
    for start, stop in pairwise(accumulate(lengths, initial=0)):
        changed = others.clone()
        changed[:, start:stop] = tokens[:, start:stop]
        leak[start:stop] = (run(changed) - packed)[:, start:stop].abs().amax((0, 2)).cpu()
    return packed, leak


def _tokens(model: Any, length: int, seed: int) -> Tensor:
    size = model.config.get_text_config().vocab_size
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(min(3, size - 1), size, (1, length), generator=draw, device="cpu").to(model.device)


def _outputs(model: Any, tokens: Tensor, inputs: dict[str, Any]) -> Tensor:
    """The first output, ``float[1, tokens, channels]``."""
    found = model(input_ids=tokens, **inputs)[0]
    assert isinstance(found, Tensor)
    return found.float()


def _first_line(error: Exception) -> str:
    return shorten(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}", 120, placeholder="...")


def _ranges(positions: Sequence[int]) -> str:
    """Sorted positions as ``3-5, 9``."""
    parts: list[list[int]] = []
    for position in positions:
        if parts and position == parts[-1][-1] + 1:
            parts[-1][1:] = [position]
        else:
            parts.append([position])
    return ", ".join("-".join(map(str, part)) for part in parts)
