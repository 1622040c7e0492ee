"""The documents of packed rows, from what data collators give to a model: ``position_ids``, ``cu_seq_lens`` and ``seq_idx``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flexmask._sync import assert_async
from flexmask.errors import LoweringError, OperandError
from flexmask_transformers.arguments import is_readable, require, require_none

__all__ = [
    "Documents",
    "check_branches",
    "check_document_numbers",
    "chunk_positions",
    "document_ids",
    "is_packed",
    "packing_arguments",
    "restarts",
    "text_positions",
]

#: The arguments of attention that describe the documents of a row.
ARGUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")


@dataclass(frozen=True)
class Documents:
    """The documents of packed rows, from their ``position_ids``.

    Attributes:
        ids: ``int[B, kv_len]``, the document of each token, -1 after the last.
        positions: ``int[B, kv_len]``, the position of each token in its document.
        keep: ``bool[B, tokens]``, True for real tokens; None where all are.
    """

    ids: Tensor
    positions: Tensor
    keep: Tensor | None = None

    def to(self, device: torch.device) -> Documents:
        """The documents on a device."""
        return Documents(self.ids.to(device), self.positions.to(device), None if self.keep is None else self.keep.to(device))


def packing_arguments(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of attention that describe the documents of a row."""
    return {name: kwargs[name] for name in ARGUMENTS if kwargs.get(name) is not None}


def document_ids(packing: Mapping[str, Any], batch: int, q_len: int, kv_len: int, documents: Documents | None = None) -> Tensor:
    """The document of each token, ``int[B, S]``.

    Args:
        packing: one or more of ``cu_seq_lens_q`` and ``cu_seq_lens_k``, ``int[n + 1]``, where documents start among all ``B * S``
            tokens and where the last one ends; and ``seq_idx``, ``int[B, S]``, the document of each token.
        batch: B.
        q_len: S.
        kv_len: the number of keys.
        documents: those of ``position_ids`` if they are known, with one document in each row where no position restarts.

    Returns:
        ``documents.ids`` if reading values shows that they are the same.

    Raises:
        OperandError: no tensor of integers.
        LoweringError: the keys are not the tokens of the queries, another shape, offsets that do not start with 0, decrease, or
            do not end with ``B * S``, or different documents in two arguments or in ``position_ids``. Where reading values forces
            a host sync, and in a graph, wrong values are an error where it runs.
    """
    if q_len != kv_len:
        raise LoweringError(
            f"cu_seq_lens and seq_idx describe {q_len} tokens, but there are {kv_len} keys; do not give them with a cache that "
            "holds tokens already or has free places"
        )
    (name, ids), *others = ((name, _ids(name, value, batch, q_len)) for name, value in packing.items())
    starts = _starts(ids)
    for other, its_ids in others:
        its_starts = _starts(its_ids)
        _require_same(starts != its_starts, name, other, starts)
    if documents is None:
        return ids
    documents = documents.to(ids.device)
    positions, keep = documents.positions[:, :q_len], documents.keep
    starts, own = _starts(ids, keep), _starts(documents.ids[:, :q_len], keep)
    before, is_later = _previous(positions, keep)
    goes_on = is_later & (positions == before + 1)  # positions that skip some may be of the same document or of the next
    differ = (own & ~starts) | (starts & ~own & goes_on)
    _require_same(differ & own.any(), "position_ids", name, own)
    return documents.ids if is_readable(ids) and torch.equal(own, starts) else ids


def is_packed(ids: Tensor) -> Tensor:
    """Whether some row ``int[B, S]`` has several documents, ``bool[]``."""
    return (ids != ids[:, :1]).any()


def check_document_numbers(attention_mask: object, position_ids: Tensor | None) -> None:
    """Checks that documents which a 2-D ``attention_mask`` numbers are those of ``position_ids``; the mask alone would lose them.

    Raises:
        LoweringError: the number changes inside a row where ``position_ids`` do not restart.
    """
    if not isinstance(attention_mask, Tensor) or attention_mask.dim() != 2 or attention_mask.dtype == torch.bool:
        return
    if is_readable(attention_mask) and not (attention_mask > 1).any():
        return
    keep = attention_mask != 0
    differ = _starts(attention_mask, keep)
    if position_ids is not None and position_ids.shape[-2:] == keep.shape:
        differ = differ & ~restarts(position_ids, keep)
    message = (
        "attention_mask numbers documents that position_ids do not separate. A 2-D mask has 1 for real tokens and 0 for padding: "
        "give attention_mask != 0, and position_ids that restart, cu_seq_lens_q or seq_idx"
    )
    require_none(differ, message, "got another number")


def check_branches(documents: Documents, q_len: int) -> None:
    """Checks that documents begin at the position at which their row begins, as the branches of a tree of prefixes do not.

    Raises:
        LoweringError: positions go back to a greater one.
    """
    positions, keep = documents.positions[:, :q_len], documents.keep
    real = torch.ones_like(positions, dtype=torch.bool) if keep is None else keep[:, :q_len].expand_as(positions)
    first = positions.gather(-1, real.long().argmax(-1, keepdim=True))
    message = (
        "position_ids go back, but not to the position at which the row begins: these may be branches of samples that share "
        "prefixes, which would be taken for documents. Give the tree, with "
        "use_mask(model, prefix_tree(position_ids=position_ids), combine='replace'), or documents that begin at the same position"
    )
    begins = _starts(documents.ids[:, :q_len], keep) & restarts(positions, keep)  # not at gaps, nor inside images
    require_none(begins & (positions > first), message, "they go back")


def text_positions(position_ids: Any) -> Tensor | None:
    """The ``position_ids`` of a model as ``int[B or 1, S]``, or as ``int[R, B, S]``: time, height and width of each token.

    Of four rows the first is that of the text. None for other shapes, and on meta, where they have no values.
    """
    if not isinstance(position_ids, Tensor) or position_ids.device.type == "meta":
        return None
    if position_ids.dim() == 1:
        return position_ids[None]
    if position_ids.dim() == 3 and position_ids.shape[0] in (2, 3, 4):
        return position_ids[0] if position_ids.shape[0] == 4 else position_ids
    return position_ids if position_ids.dim() == 2 else None


def restarts(position_ids: Tensor, keep: Tensor | None) -> Tensor:
    """``bool[B, S]``: whether a token is the first of a further document.

    That is a token whose position is not greater than that of the real token before it. Positions of padding have no meaning.
    Where positions are those of time, height and width, the tokens of an image share their time: there a document starts with
    a token whose positions are all 0, or with a token of text whose position is not greater than that of the text before it.

    Args:
        position_ids: ``int[B, S]``, or ``int[R, B, S]`` of two or three axes, such as time, height and width.
        keep: ``bool[B, at least S]``, True for real tokens, or None.

    Raises:
        LoweringError: time goes back in other ways, so that it is not known where documents start.
    """
    before, is_later = _previous(position_ids, keep)
    if position_ids.dim() == 2:
        return is_later & (position_ids <= before)
    is_text, was_text = ((rows == rows[:1]).all(0) for rows in (position_ids, before))
    is_first = is_text & ((position_ids == 0).all(0) | was_text) & (position_ids <= before).all(0)
    is_unclear = (position_ids[0] < before[0]) & ~is_first
    message = (
        "position_ids of several rows go back in time where no document starts; give four rows, of which the first has the "
        "positions in the text, restarting at each document"
    )
    require(~(is_later[0] & is_unclear).any(), message, LoweringError)
    return is_later[0] & is_first


def chunk_positions(position_ids: Tensor, keep: Tensor | None) -> Tensor:
    """``int[B, S]``: positions in documents as a chunked mask function takes them, which subtracts the padding on the left."""
    return position_ids if keep is None else position_ids + (keep.cumsum(-1) == 0).sum(-1, keepdim=True)


def _previous(values: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
    """The value at the real token before each token, and whether the token is real and has one before it; ``[..., B, S]``."""
    length = values.shape[-1]
    places = torch.arange(length, device=values.device).expand_as(values)
    real = torch.ones_like(values, dtype=torch.bool) if keep is None else keep[:, :length].expand_as(values)
    last = F.pad(torch.where(real, places, -1).cummax(-1).values, (1, -1), value=-1)
    return values.gather(-1, last.clamp(min=0)), real & (last >= 0)


def _starts(ids: Tensor, keep: Tensor | None = None) -> Tensor:
    """``bool[B, S]``: whether a token belongs to another document than the real token before it."""
    before, is_later = _previous(ids, keep)
    return is_later & (ids != before)


def _ids(name: str, value: Any, batch: int, length: int) -> Tensor:
    """The document of each token, ``int[B, S]``, from one argument."""
    try:
        value = value if isinstance(value, Tensor) else torch.as_tensor(value, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise OperandError(f"{name} must be a tensor of integers, got {type(value).__name__}") from error
    if value.dtype not in (torch.int32, torch.int64):
        raise OperandError(f"{name} must be int32 or int64, got {str(value.dtype).removeprefix('torch.')}")
    if name == "seq_idx":
        if tuple(value.shape) != (batch, length):
            raise LoweringError(f"seq_idx must be [{batch}, {length}], the document of each token, got {list(value.shape)}")
        return value
    if value.dim() != 1 or value.shape[0] < 2:
        raise LoweringError(f"{name} must be [n + 1] for n documents, got {list(value.shape)}")
    tokens = batch * length
    fits = (value[0] == 0) & (value[1:] >= value[:-1]).all() & (value[-1] == tokens)
    message = f"{name} must start with 0, not decrease, and end with the number of tokens"
    if not is_readable(value):
        assert_async(fits, message)  # with the number in it, a graph would be of this length alone
    elif not fits:
        raise LoweringError(
            f"{message}, {tokens}; got {value.tolist()}. Padding behind the last document is a document of its own"
        )
    places = torch.arange(tokens, device=value.device, dtype=value.dtype)
    return torch.bucketize(places, value[1:].contiguous(), right=True).view(batch, length)


def _require_same(differ: Tensor, first: str, second: str, starts_of_first: Tensor) -> None:
    """An error unless two arguments describe the same documents.

    Args:
        differ: ``bool[B, S]``, the tokens where one argument alone starts a document.
        first: the name of one argument.
        second: the name of the other.
        starts_of_first: ``bool[B, S]``, where documents of ``first`` start.
    """
    message = f"{first} and {second} describe different documents"
    if not is_readable(differ):
        assert_async(~differ, message)
    elif differ.any():
        row, token = differ.nonzero()[0].tolist()
        alone = first if starts_of_first[row, token] else second
        raise LoweringError(
            f"{message}: in row {row} a document starts at token {token} by {alone} alone. Give one of them, or make them agree"
        )
