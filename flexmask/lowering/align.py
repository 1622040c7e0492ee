"""Documents packed so that each begins at a block, which makes their outputs independent of how they are packed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flexmask._checks import checked_int, kind_of
from flexmask._sync import listed, resolve_device
from flexmask.errors import LoweringError, OperandError
from flexmask.intervals.context import MAX_LENGTH
from flexmask.lowering.block_mask import block_sizes


@dataclass(frozen=True, eq=False)
class AlignedDocuments:
    """The positions of the tokens of documents in sequences in which each document begins at a block.

    Attributes:
        lengths: the tokens of each document, for each sequence.
        ids: the document of each position, counted in its sequence, ``int64[B, length]``; -1 for padding. For
            :func:`flexmask.document` and :func:`flexmask.per_document`.
        position_ids: the position of each token in its document, ``int64[B, length]``; 0 for padding.
        index: the position of each token, one document after the other, ``int64[tokens]``, counted over all sequences.
    """

    lengths: tuple[tuple[int, ...], ...]
    ids: Tensor
    position_ids: Tensor
    index: Tensor

    def pack(self, tokens: Tensor, fill: float = 0) -> Tensor:
        """Tokens, one document after the other, at their positions.

        Args:
            tokens: ``[tokens, ...]``.
            fill: the value at the positions of padding.

        Returns:
            ``[B, length, ...]``.

        Raises:
            LoweringError: there are more or fewer tokens than the documents have.
        """
        if not tokens.dim() or tokens.shape[0] != self.index.numel():
            raise LoweringError(
                f"tokens must be [{self.index.numel()}, ...], those of all documents; got a tensor {list(tokens.shape)}"
            )
        packed = tokens.new_full((self.ids.numel(), *tokens.shape[1:]), fill)
        return packed.index_copy(0, self.index, tokens).view(*self.ids.shape, *tokens.shape[1:])

    def unpack(self, packed: Tensor) -> Tensor:
        """The tokens of :meth:`pack`, one document after the other, without padding.

        Args:
            packed: ``[B, length, ...]``.

        Returns:
            ``[tokens, ...]``.

        Raises:
            LoweringError: ``packed`` has another number of sequences or positions.
        """
        if packed.shape[:2] != self.ids.shape:
            raise LoweringError(f"packed must be [B, length, ...] = {[*self.ids.shape]} and more, got {list(packed.shape)}")
        return packed.flatten(0, 1).index_select(0, self.index)

    def split(self, packed: Tensor) -> tuple[Tensor, ...]:
        """The tokens of each document, ``[tokens of the document, ...]``; ``packed`` is as for :meth:`unpack`."""
        return torch.split(self.unpack(packed), [tokens for sequence in self.lengths for tokens in sequence])


def align_documents(
    lengths: Sequence[int] | Sequence[Sequence[int]] | Tensor,
    block_size: int | tuple[int, int] = 128,
    *,
    length: int | None = None,
    device: torch.device | str | None = None,
) -> AlignedDocuments:
    """Packs documents so that each begins at a block, and no block holds tokens of two documents.

    FlexAttention sums over the keys of a row block by block, so the bits of its output depend on where in a packed sequence a
    document begins. They do not where each document begins at a block and the BlockMask is
    ``mask.block_mask(..., separate_full_blocks=False)``, which lists the key blocks of a row in one order. This also holds for
    the queries of a document a few at a time::

        documents = align_documents([300, 150, 250])
        x = documents.pack(tokens)  # [1, 896, ...]: 384 + 256 + 256 positions
        mask = causal() & document(documents.ids)
        block_mask = mask.block_mask(x.shape[1], separate_full_blocks=False)
        ...
        answers = documents.unpack(out)  # [700, ...]

    :func:`flexmask.testing.assert_batch_invariant` checks a model for it. The output can still depend on the packing in operators
    that choose a kernel by the size of the batch, such as matrix products and autotuned kernels, and in ``backend="sdpa"``, which
    computes the sequences of a batch together.

    Args:
        lengths: the tokens of each document of one sequence, or a list of these for each sequence; 0 for no document.
        block_size: tokens in a block of the BlockMask, or of the kernel if its blocks are larger: an int or (queries, keys).
        length: positions of each sequence, a multiple of the block size; by default the fewest that hold all documents.
        device: where the tensors are made; by default the device of ``lengths`` if it is a tensor, else the CPU. A tensor is
            read, which forces a host sync.

    Raises:
        OperandError: ``lengths`` or ``length`` are not integers.
        LoweringError: a length is negative, there is no token, or ``length`` is too small or no multiple of the block size.
    """
    step = math.lcm(*block_sizes(block_size))
    if device is None:
        device = lengths.device if isinstance(lengths, Tensor) else "cpu"
    device = resolve_device(device)
    sequences = _sequences(listed(lengths, "lengths"))
    if min((tokens for sequence in sequences for tokens in sequence), default=0) < 0:
        raise LoweringError(f"the lengths of documents must not be negative, got {lengths}")
    if not any(map(any, sequences)):
        raise LoweringError(f"there must be at least one token, got the lengths {lengths}")
    spaces = [[-(-tokens // step) * step for tokens in sequence] for sequence in sequences]
    least = max(map(sum, spaces))
    length = least if length is None else checked_int(length, "length", least=None, most=MAX_LENGTH)
    if length < least or length % step:
        raise LoweringError(
            f"length must be a multiple of {step} and at least {least}, the space of the aligned documents; got {length}"
        )
    ids = torch.full((len(sequences), length), -1, device="cpu")
    positions, index = torch.zeros_like(ids), []
    for row, (sequence, space) in enumerate(zip(sequences, spaces, strict=True)):
        start = 0
        for number, (tokens, taken) in enumerate(zip(sequence, space, strict=True)):
            place = torch.arange(tokens, device="cpu")
            ids[row, start : start + tokens], positions[row, start : start + tokens] = number, place
            index.append(place + (row * length + start))
            start += taken
    counts = tuple(map(tuple, sequences))
    return AlignedDocuments(counts, ids.to(device), positions.to(device), torch.cat(index).to(device))


def _sequences(lengths: Any) -> list[list[int]]:
    """The lengths of documents for each sequence."""
    if not isinstance(lengths, Sequence) or isinstance(lengths, str | bytes):
        raise OperandError(f"lengths must be integers, or a list of them for each sequence, got {kind_of(lengths)}")
    nested = [part.tolist() if isinstance(part, Tensor) else part for part in lengths]
    many = [isinstance(part, Sequence) for part in nested]
    if any(many) and not all(many):
        raise OperandError(f"lengths must be integers, or a list of them for each sequence, got both: {lengths!r}")
    rows = nested if any(many) else [nested]
    return [[checked_int(tokens, "lengths", least=None, wanted="integers") for tokens in row] for row in rows]
