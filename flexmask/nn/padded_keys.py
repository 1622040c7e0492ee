"""The keys in a KVCache that were padding when they were computed, to which no later query may attend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, cast

import torch
from torch import Tensor

from flexmask import _sync
from flexmask.errors import LoweringError
from flexmask.expr.data import as_table
from flexmask.expr.index import b, kv
from flexmask.expr.mask import And, Mask, Named, Or, PerHead
from flexmask.expr.tables import TensorTable
from flexmask.nn.cache_masks import CallTokens
from flexmask.nn.hidden_keys import described, first_shown


@dataclass(frozen=True)
class PaddedKeys:
    """The keys in a cache that were padding when they were computed; on the CPU.

    Attributes:
        hidden: ``bool[B, length]``, True at the positions of such keys. Positions from ``length`` on have none.
    """

    hidden: Tensor

    def truncate(self, lengths: Tensor) -> PaddedKeys:
        """After the keys from ``lengths``, ``int64[B]``, have left the cache."""
        return _trimmed(self.hidden & (torch.arange(self.hidden.shape[1], device="cpu") < lengths[:, None]))

    def reorder(self, indices: Tensor) -> PaddedKeys:
        """Of the sequences ``indices``, ``int[B]``."""
        return _trimmed(self.hidden[indices.cpu()])


def padded_keys(mask: Mask, tokens: CallTokens, before: PaddedKeys | None, heads: int) -> PaddedKeys | None:
    """The padding in a cache after a call: the keys that ``key_padding`` or documents in the mask say to be padding.

    It is not known where reading it forces a host sync.

    Args:
        mask: the mask of the whole sequence, after the checks of :func:`mask_over_cache`.
        tokens: the queries of the call, and the keys in the cache.
        before: the padding that earlier calls have cached; None for none.
        heads: query heads.

    Raises:
        LoweringError: some query attends to a key that was padding when it was cached.
    """
    if before is None and not _says_padding(mask):
        return None
    if isinstance(tokens.q_offset, Tensor) and _sync.needs_sync(tokens.q_offset):
        return before
    if before is not None:
        own = _padding(mask, torch.arange(before.hidden.shape[1], device="cpu").expand_as(before.hidden))
        if bool((before.hidden if own is None else before.hidden & ~own).any()):
            _check_shows_no_padding(mask, tokens, before, heads)
    first = torch.as_tensor(tokens.q_offset, device="cpu").expand(tokens.batch)
    positions = first[:, None] + torch.arange(tokens.q_len, device="cpu")
    found = _padding(mask, positions)
    if found is None or not bool(found.any()):
        return before
    hidden = torch.zeros(tokens.batch, tokens.kv_end, dtype=torch.bool, device="cpu").scatter(1, positions, found)
    if before is not None:
        hidden[:, : before.hidden.shape[1]] |= before.hidden
    return _trimmed(hidden)


def _says_padding(mask: Mask) -> bool:
    """Whether any part of a mask says what padding is."""
    if "says padding" not in mask.memo:
        mask.memo["says padding"] = any(isinstance(node, Named) and node.name in RULES for node in mask.walk())
    return cast(bool, mask.memo["says padding"])


def _trimmed(hidden: Tensor) -> PaddedKeys:
    """The keys of ``hidden``, without the positions after the last one."""
    last = hidden.any(0).nonzero()
    return PaddedKeys(hidden[:, : int(last[-1]) + 1 if len(last) else 0])


def _check_shows_no_padding(mask: Mask, tokens: CallTokens, padded: PaddedKeys, heads: int) -> None:
    """Compares the rows of a call with the padding in the cache. A mask with tensors on a device is not checked."""
    if any(map(_sync.needs_sync, mask.tensors)):
        return
    first = TensorTable(tokens.kv_start.cpu())[b] if isinstance(tokens.kv_start, Tensor) else tokens.kv_start
    keys = (TensorTable(padded.hidden)[b, kv] != 0) & (kv >= first)
    cell = first_shown(mask, replace(tokens, device=torch.device("cpu")), keys, padded.hidden.shape[1], heads)
    if cell is not None:
        raise LoweringError(
            f"{described(mask)} lets a query attend to the key at position {cell.kv} of sequence {cell.b}, which was padding "
            "when the cache got it. After a prompt with padding on the right call cache.truncate(lengths); with padding on the "
            "left give key_padding(start=...) in every call, or key_padding(keep=...) with a value for each token so far"
        )


# ---------------------------------------------------------------- what a mask says of padding

#: From the arguments of a named mask and positions ``int64[B, n]`` to ``bool[B, n]``, True for padding; None where it is unknown.
Rule = Callable[[dict[str, Any], Tensor], "Tensor | None"]


def _padding(mask: Mask, positions: Tensor) -> Tensor | None:
    """Which positions a mask says to be padding, ``bool[B, n]``; None where it says it of none, or in tensors on a device."""
    match mask:
        case Named(name=name, arguments=arguments) if name in RULES:
            return RULES[name](dict(arguments), positions)
        case Named(body=body):
            return _padding(body, positions)
        case And(operands):
            found = [part for part in (_padding(operand, positions) for operand in operands) if part is not None]
            return reduce(torch.logical_or, found) if found else None
        case Or(operands) | PerHead(operands):
            every = [_padding(operand, positions) for operand in operands]
            found = [part for part in every if part is not None]
            return reduce(torch.logical_and, found) if len(found) == len(every) else None
    return None


def _of_key_padding(arguments: dict[str, Any], positions: Tensor) -> Tensor | None:
    ((name, data),) = ((name, data) for name, data in arguments.items() if name != "side")
    if name in ("keep", "hide"):
        return _compared(data, positions, lambda value: (value == 0) if name == "keep" else (value != 0))
    limits = _values(data, positions)
    if limits is None:
        return None
    return positions < limits.view(-1, 1) if name == "start" else positions >= limits.view(-1, 1)


def _of_cross_length(arguments: dict[str, Any], positions: Tensor) -> Tensor | None:
    return _of_key_padding({"lengths": arguments["kv_lengths"]}, positions)


def _of_documents(arguments: dict[str, Any], positions: Tensor) -> Tensor | None:
    ids = arguments.get("kv_ids", arguments.get("ids"))
    if ids is not None:
        return _compared(ids, positions, lambda value: value < 0)
    sources = [(name, arguments[name]) for name in ("lengths", "cu_seqlens") if name in arguments]
    if not arguments.get("padding") or not sources:
        return None
    ((name, data),) = sources
    ends = _values(data, positions)
    return None if ends is None else positions >= (ends.sum(-1) if name == "lengths" else ends[..., -1]).view(-1, 1)


RULES: dict[str, Rule] = {
    "key_padding": _of_key_padding,
    "cross_length": _of_cross_length,
    "document": _of_documents,
    "per_document": _of_documents,
    "shared_prefix": _of_documents,
    "in_context": _of_documents,
}


def _compared(data: object, positions: Tensor, is_padding: Callable[[Tensor], Tensor]) -> Tensor | None:
    """A condition on data ``[S]`` or ``[B, S]`` at some positions; False after its end."""
    values = _values(data, positions)
    if values is None:
        return None
    every = is_padding(values).expand(positions.shape[0], values.shape[-1])
    return every.gather(1, positions.clamp(max=values.shape[-1] - 1)) & (positions < values.shape[-1])


def _values(data: object, positions: Tensor) -> Tensor | None:
    """The values of an argument; None where reading them forces a host sync."""
    values = as_table(data, "padding").to_tensor()
    return None if _sync.needs_sync(values) else values
